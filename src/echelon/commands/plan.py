"""`echelon plan`: how a recipe would run, here or elsewhere, and the memory it would need."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.commands.arguments import OverridesArgument, RecipeArgument, read_recipe
from echelon.commands.terminal import say
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from echelon.hardware.accelerators import Cluster
    from echelon.planner.memory import MemoryEstimate
    from echelon.planner.model_shape import ModelShape
    from echelon.recipe import Recipe


def plan(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="64xH100", help="Plan for these devices. Default: this machine.")
    ] = None,
    devices_per_node: Annotated[int, typer.Option("--devices-per-node", help="Devices of one machine.")] = 8,
    instance: Annotated[
        str | None,
        typer.Option("--instance", metavar="ml.TYPE|auto", help="Plan for machines of SageMaker; auto: the cheapest."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="Machines, with --instance. Default: 1; auto: as few as will do."),
    ] = None,
) -> None:
    """Show how the recipe would run and the memory it needs, or why it would be refused. Downloads no weights."""
    from echelon.lifecycle.model_checks import check_model
    from echelon.lifecycle.setup import describe_steps
    from echelon.planner.choose import resolve_plan
    from echelon.planner.memory import describe_checkpoint, estimate_memory

    if devices is not None and instance is not None:
        raise ConfigError(f"--devices {devices} and --instance {instance} are two clusters; give one.")
    if count is not None and instance is None:
        raise ConfigError(f"--count {count} goes with --instance ml.TYPE; add it, or leave it out.")
    recipe = read_recipe(recipe_path, overrides)
    # Another machine's packages and files are not looked at here.
    checked = check_model(recipe, elsewhere=devices is not None or instance is not None)
    say(f"model: {checked.vocabulary}")
    shape = checked.shape
    cluster = _find_cluster(recipe, shape, devices, devices_per_node, instance, count)
    chosen = resolve_plan(recipe, shape, cluster)
    say(f"cluster: {cluster.num_devices} x {cluster.accelerator.name} on {cluster.num_nodes} machine(s)")
    left = (f"left to train: {line}" for line in checked.left)
    for line in (*chosen.describe(), describe_checkpoint(shape, chosen), *describe_steps(recipe, None), *left):
        say(line)
    _show_memory(estimate_memory(shape, chosen, recipe.data.sequence_len, cluster.kind), cluster)


def _find_cluster(
    recipe: "Recipe",
    shape: "ModelShape",
    devices: str | None,
    devices_per_node: int,
    instance: str | None,
    count: int | None,
) -> "Cluster":
    from echelon.hardware.accelerators import parse_devices

    if devices is not None:
        return parse_devices(devices, devices_per_node)
    if instance is not None:
        return _find_instances(recipe, shape, instance, count)
    if find_spec("torch") is None:
        raise ConfigError(
            "torch is not installed here, and it is torch that looks at this machine's hardware; install it, or name "
            "the devices, for example --devices 8xH100."
        )
    from echelon.distributed.runtime import default_num_processes
    from echelon.hardware.detection import detect_cluster

    return detect_cluster(default_num_processes())


def _find_instances(recipe: "Recipe", shape: "ModelShape", instance: str, count: int | None) -> "Cluster":
    from echelon.hardware.instances import find_instance
    from echelon.planner.machines import choose_instance, find_cluster

    if instance == "auto":
        choice = choose_instance(recipe, shape, count)
        for line in choice.describe():
            say(line)
        return find_cluster(recipe, choice.instance, choice.count)
    found, machines = find_instance(instance), count or 1
    cluster = find_cluster(recipe, found, machines)
    if found.price is None:
        say(f"instance: {machines} x {found.name}, price unknown; budget.usd_per_hour says it")
    else:
        total = found.price.usd_per_hour * machines
        say(f"instance: {machines} x {found.name}, {found.price.describe()} each on demand, ${total:.2f}/h in all")
    return cluster


def _show_memory(estimate: "MemoryEstimate", cluster: "Cluster") -> None:
    """The estimate by part, in GiB a rank, with what it assumes."""
    say("memory per rank, GiB:")
    for part in ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "total"):
        say(f"  {part:<12} {getattr(estimate, part) / 2**30:10.3f}")
    if cluster.accelerator.memory_bytes is not None:
        say(f"  {'of':<12} {cluster.accelerator.memory_bytes / 2**30:10.3f}")
    if estimate.host:
        say(f"  in host memory, by cpu_offload: {estimate.host / 2**30:.3f}")
    for assumption in estimate.assumptions:
        say(f"  assumes: {assumption}")
