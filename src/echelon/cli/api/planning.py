"""Plan how a recipe would run, here or on other machines, and the memory that it needs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Option
from typing_extensions import override

from echelon.cli.api.recipes import RecipeLike, load_recipe
from echelon.ground.cores import num_cores
from echelon.ground.errors import ConfigError, LaunchError, PlanError
from echelon.ground.launch_environment import worker_environment
from echelon.ground.sizes import render_bytes
from echelon.ground.variables import find_cache_dir
from echelon.planner.calibration import fit_calibration, measure_machine
from echelon.planner.choose import resolve_plan
from echelon.planner.engine_limits import compare_engines
from echelon.planner.forecast import Forecast, HourlyPrice, describe_payoff, forecast_run, read_history
from echelon.planner.hardware.accelerators import Cluster, parse_devices
from echelon.planner.hardware.calibration_store import Calibration, store_calibration
from echelon.planner.hardware.detection import calibrated_cluster, detect_cluster, find_calibrated_cpu, use_calibration
from echelon.planner.hardware.instances import find_instance
from echelon.planner.machines import choose_instance, find_cluster
from echelon.planner.memory import MemoryEstimate, describe_checkpoint, estimate_memory, estimate_stored
from echelon.planner.memory_parts import StoredBytes
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.plan_lines import describe_plan
from echelon.planner.reliability import RESTART_SECONDS, Goodput, Reliability, estimate_goodput
from echelon.recipe.document import Recipe
from echelon.run.lifecycle.model_checks import check_model
from echelon.run.lifecycle.plan_build import build_stages
from echelon.run.lifecycle.setup import describe_steps

Long = Option(min=0, max=1e9)


@dataclass(frozen=True)
class PlanReport:
    """A plan with its memory, time, cluster and model shape. `str()` gives the output of `echelon plan`."""

    plan: ParallelPlan
    memory: MemoryEstimate
    """Bytes of one rank, by part."""
    cluster: Cluster
    shape: ModelShape
    lines: tuple[str, ...]
    built: Mapping[int, StoredBytes] = field(default_factory=dict)
    """With `build`: the bytes that a rank of the first and of the last pipeline stage stores, by stage from 0."""

    forecast: Forecast | None = None
    """The predicted time of a step and of the run, and its cost; None if the speed of the devices is unknown."""

    goodput: Goodput | None = None
    """With `reliability`: the part of the time that trains."""

    @override
    def __str__(self) -> str:
        return "\n".join(self.lines)


def plan(
    recipe: RecipeLike,
    devices: Annotated[str | None, Option("--devices", metavar="64xH100")] = None,
    *,
    devices_per_node: int = 8,
    instance: Annotated[str | None, Option(metavar="ml.TYPE|auto")] = None,
    count: Annotated[int | None, Option(min=1)] = None,
    build: bool = False,
    reliability: Reliability | None = None,
    engines: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
) -> PlanReport:
    """Plan how a recipe would run, and the memory, time and money it needs. Downloads no weights.

    Args:
        recipe: a Recipe, the path of its file, or a mapping.
        devices: plan for these devices. Default: this machine.
        devices_per_node: number of devices per machine.
        instance: plan for SageMaker machines; auto: the cheapest type.
        count: number of machines, with `instance` (default 1; with auto: as few as possible) or `--quote` (1, 2, 4, 8).
        build: divide the real model as planned, without devices, and count what ranks store.
        reliability: failures and stragglers, for the expected goodput.
        engines: also show what each engine would make of the recipe.
        on_line: called with each line of the report as soon as it is known, also if the plan is then refused.

    Raises:
        ConfigError, PlanError or DataError: `train` would refuse the recipe; the message names the key.
    """
    _check_target(devices, instance, count)
    recipe = load_recipe(recipe)
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        on_line(line)

    # Packages and files of other machines cannot be checked here.
    checked = check_model(recipe, elsewhere=devices is not None or instance is not None)
    for line in checked.describe():
        note(line)
    shape = checked.shape
    cluster, price = find_target(recipe, shape, devices, devices_per_node, instance, count, note)
    chosen = resolve_plan(recipe, shape, cluster)
    note(f"cluster: {cluster.num_devices} x {cluster.accelerator.name} on {cluster.num_nodes} machine(s)")
    left = (f"left to train: {line}" for line in checked.left)
    memory = estimate_memory(shape, chosen, cluster.kind)
    for part in (describe_plan(chosen), [describe_checkpoint(shape, chosen)], describe_steps(recipe, None), left):
        for line in part:
            note(line)
    for line in _describe_memory(memory, cluster):
        note(line)
    forecast = _forecast(recipe, shape, chosen, cluster, price, note)
    goodput = None if reliability is None else estimate_goodput(shape, chosen, cluster.num_nodes, reliability)
    if goodput is not None and reliability is not None:
        for line in goodput.describe(reliability):
            note(line)
    built = build_stages(recipe, shape, chosen) if build else {}
    for line in _describe_built(built, estimate_stored(shape, chosen)):
        note(line)
    for line in compare_engines(recipe, lambda other: resolve_plan(other, shape, cluster)) if engines else ():
        note(line)
    return PlanReport(chosen, memory, cluster, shape, tuple(lines), built, forecast, goodput)


def _forecast(
    recipe: Recipe,
    shape: ModelShape,
    chosen: ParallelPlan,
    cluster: Cluster,
    price: HourlyPrice | None,
    note: Callable[[str], None],
) -> Forecast | None:
    """The predicted time and cost, with its lines; None, with the reason, if the speed of the devices is unknown."""
    try:
        history = read_history(find_cache_dir(), shape, cluster)
        forecast = forecast_run(recipe, shape, chosen, cluster, price, history=history)
    except PlanError as error:
        note(f"time: {error}")
        return None
    payoff = describe_payoff(shape, chosen, cluster)
    for line in (*forecast.describe(), *([] if payoff is None else [payoff])):
        note(line)
    return forecast


def read_reliability(
    *,
    mtbf_hours: Annotated[float | None, Long] = None,
    restart_seconds: Annotated[float | None, Long] = None,
    replace_hours: Annotated[float | None, Long] = None,
    step_spread: Annotated[float | None, Option(min=0, max=1000)] = None,
) -> Reliability | None:
    """What options say about failures and stragglers; None if they say nothing. Raises ConfigError.

    Args:
        mtbf_hours: mean hours between failures of a machine: show the goodput.
        restart_seconds: from a failure to the next step. Default: 300.
        replace_hours: until a failed machine is replaced: show the goodput with spare machines.
        step_spread: standard deviation of a machine's step time over its mean: show the goodput.
    """
    for option, value in (("--restart-seconds", restart_seconds), ("--replace-hours", replace_hours)):
        if value is not None and mtbf_hours is None:
            raise ConfigError(f"{option} {value:g} needs --mtbf-hours; add it, or remove the option.")
    if mtbf_hours is None and step_spread is None:
        return None
    if mtbf_hours is not None and mtbf_hours <= 0:
        raise ConfigError(f"--mtbf-hours {mtbf_hours:g}: give the mean hours between failures of a machine, above 0.")
    restart = RESTART_SECONDS if restart_seconds is None else restart_seconds
    return Reliability(mtbf_hours, restart, step_spread or 0.0, replace_hours or 0.0)


def _check_target(devices: str | None, instance: str | None, count: int | None) -> None:
    if devices is not None and instance is not None:
        raise ConfigError(f"--devices {devices} and --instance {instance} are different clusters; give only one.")
    if count is not None and instance is None:
        raise ConfigError(f"--count {count} requires --instance ml.TYPE; add it or remove --count.")


def find_target(
    recipe: Recipe,
    shape: ModelShape,
    devices: str | None,
    devices_per_node: int,
    instance: str | None,
    count: int | None,
    on_line: Callable[[str], None] = lambda line: None,
) -> tuple[Cluster, HourlyPrice | None]:
    """The cluster to plan for, as for `plan`, and the price of one of its machines, if it is known."""
    _check_target(devices, instance, count)
    if devices is not None:
        return use_calibration(parse_devices(devices, devices_per_node)), None
    if instance is not None:
        return _find_instances(recipe, shape, instance, count, on_line)
    return _find_here(), None


def _find_here() -> Cluster:
    if (calibration := find_calibrated_cpu()) is not None:
        count = max(1, num_cores() // 2)
        return calibrated_cluster(calibration, count, count)
    if find_spec("torch") is None:
        raise ConfigError(
            "torch is not installed here, but it is needed to detect this machine's hardware; install it, or give the "
            "devices, for example --devices 8xH100."
        )
    from echelon.run.lifecycle.process_group import default_num_processes

    return detect_cluster(default_num_processes())


def _find_instances(
    recipe: Recipe, shape: ModelShape, instance: str, count: int | None, on_line: Callable[[str], None]
) -> tuple[Cluster, HourlyPrice | None]:
    if instance == "auto":
        choice = choose_instance(recipe, shape, count)
        for line in choice.describe():
            on_line(line)
        chosen, machines = choice.instance, choice.count
    else:
        settings, machines = recipe.launch.sagemaker, count or 1
        chosen = find_instance(instance, region=settings.region)
    price = None if chosen.price is None else HourlyPrice(chosen.price.usd_per_hour, chosen.price.terms)
    if instance != "auto" and price is None:
        on_line(f"instance: {machines} x {chosen.name}, price unknown; set budget.usd_per_hour")
    elif instance != "auto" and chosen.price is not None:
        total = chosen.price.usd_per_hour * machines
        on_line(
            f"instance: {machines} x {chosen.name}, {chosen.price.describe()} each on demand, ${total:.2f}/h in all"
        )
    return find_cluster(recipe, chosen, machines), price


def _describe_memory(estimate: MemoryEstimate, cluster: Cluster) -> Iterator[str]:
    """Yield the estimate of a rank by part, with its assumptions."""
    yield "memory per rank:"
    for part in ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "total"):
        yield f"  {part:<12} {render_bytes(getattr(estimate, part)):>10}"
    if cluster.accelerator.memory_bytes is not None:
        yield f"  {'of':<12} {render_bytes(cluster.accelerator.memory_bytes):>10}"
    if estimate.answers:
        yield f"  answers, before there are gradients and activations: {render_bytes(estimate.answers)}"
    if estimate.host:
        yield f"  in host memory: {render_bytes(estimate.host)}"
    if estimate.saves:
        yield f"  in host memory, for checkpoints and snapshots: {render_bytes(estimate.saves)}"
    for assumption in estimate.assumptions:
        yield f"  assumes: {assumption}"


def _describe_built(built: Mapping[int, StoredBytes], planned: Sequence[StoredBytes]) -> Iterator[str]:
    """Yield what was built beside the estimate."""
    if not built:
        return
    yield "built without devices, a rank between steps (in brackets as planned):"
    for stage, stored in built.items():
        if len(planned) > 1:
            yield f"  stage {stage + 1} of {len(planned)}"
        for part, size in asdict(stored).items():
            yield f"  {part:<12} {render_bytes(size):>10} ({render_bytes(getattr(planned[stage], part))})"


def calibrate() -> tuple[Calibration, Path]:
    """Measure matrix products, attention, layers, copies and all-reduces between the devices of this machine.

    It takes less than a minute on a machine without other work. Later plans for devices like these use the result.

    Returns:
        What was measured, and the file in which it is kept.

    Raises:
        LaunchError: the processes that measure failed, or the file cannot be written.
    """
    rows, device, count = measure_machine(worker_environment)
    calibration = fit_calibration(rows, device, count, "float32" if device == "cpu" else "bfloat16")
    try:
        return calibration, store_calibration(find_cache_dir(), calibration)
    except OSError as error:
        raise LaunchError(
            f"the calibration cannot be kept in {find_cache_dir()} ({error}); set ECHELON_CACHE to a folder that can "
            "be written."
        ) from error
