"""`echelon launch`, and what follows it: status, logs, cancel."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.commands import OverridesArgument, RecipeArgument, complain, parse_hosts, read_recipe, say
from echelon.errors import ConfigError, EchelonError, HubUnreachableError, LaunchError
from echelon.redaction import redact_text

if TYPE_CHECKING:
    from echelon.hardware.accelerators import Cluster
    from echelon.launch.job import JobRecord, JobSpec, JobStatus, Launcher
    from echelon.planner.model_shape import ModelShape
    from echelon.recipe import LaunchConfig, Recipe
    from echelon.runs.run_folder import RunFolder

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's name, its folder, or its id at the target.")]

_LOOK_SECONDS = 1.0


def launch(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TARGET", help="local, torchrun, slurm, kubernetes or sagemaker."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, no more.")] = False,
    hosts: Annotated[
        str | None, typer.Option("--hosts", metavar="A,B", help="Machines for --to torchrun; sets launch.nodes too.")
    ] = None,
    nodes: Annotated[str | None, typer.Option("--nodes", metavar="N|MIN:MAX", help="Machines.")] = None,
    instance: Annotated[
        str | None, typer.Option("--instance", metavar="ml.TYPE|auto", help="Machines for --to sagemaker.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the job's output until it ends, and leave with its exit code.")
    ] = False,
) -> None:
    """Start the recipe somewhere else: everything that can be checked is checked here first."""
    from echelon.launch.records import make_job, submit_job

    options = _read_options(to, hosts, nodes, instance)
    recipe = read_recipe(recipe_path, [*(overrides or []), *options])
    _check_options(recipe.launch.to, hosts, instance)
    recipe = settle_instance(recipe)
    job = make_job(recipe, Path.cwd())
    launcher, texts = check_job(job)
    if dry_run:
        for name, text in texts.items():
            say(f"--- {name}")
            say(text.rstrip("\n"))
        return
    with _handed_over_whole(job.name):
        record = submit_job(job, launcher, texts)
        say(f"launched {record.name} as {record.id}; echelon status {record.name}, echelon logs {record.name}")
    if follow:
        try:
            for line in launcher.logs(record, True):
                say(redact_text(line))
            ended = _await_end(launcher, record)
        except KeyboardInterrupt:
            raise LaunchError(
                f"no longer followed; {record.name} goes on, `echelon cancel {record.name}` ends it."
            ) from None
        say(_describe(record, ended))
        raise typer.Exit(1 if ended.exit_code is None else ended.exit_code)


def status(
    name: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Default: all jobs launched from here.")] = None,
) -> None:
    """How jobs stand: at their target, and by their run folder where this machine sees it."""
    from echelon.launch.records import find_job, list_jobs
    from echelon.launch.targets import find_launcher

    records = list_jobs() if name is None else [find_job(name)]
    if not records:
        say("no job was launched from this folder")
    unknown = False
    for record in records:
        try:
            say(_describe(record, find_launcher(record.target).status(record)))
        except EchelonError as error:
            if name is not None:
                raise
            unknown = True  # the other targets may answer
            complain(f"{record.name}: {error}")
    if unknown:
        raise typer.Exit(1)


def logs(
    name: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
) -> None:
    """Show what a job has printed."""
    from echelon.launch.records import find_job
    from echelon.launch.targets import find_launcher

    record = find_job(name)
    for line in find_launcher(record.target).logs(record, follow):
        say(redact_text(line))


def cancel(name: JobArgument) -> None:
    """Ask a job to save and end; launching the same recipe again goes on from there."""
    from echelon.launch.records import find_job
    from echelon.launch.targets import find_launcher

    record = find_job(name)
    find_launcher(record.target).cancel(record)
    say(f"asked {record.name} to stop; it saves first, then ends")


@contextmanager
def _handed_over_whole(name: str) -> Iterator[None]:
    """A signal waits until the target has the job and its record is written; a second one ends this at once."""
    asked: list[str] = []

    def note(number: int, _: object) -> None:
        asked.append(signal.Signals(number).name)
        if len(asked) > 1:
            raise LaunchError(f"ended at once by {asked[-1]}; {name} may have reached its target, look there.")

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if asked:
        raise LaunchError(f"stopped by {asked[0]} when {name} was launched already; `echelon cancel {name}` ends it.")


def check_job(job: "JobSpec", tell: Callable[[str], None] = say) -> "tuple[Launcher, dict[str, str]]":
    """Who will start the job, and exactly what is submitted, once nothing that can be known here speaks against it.

    `tell` gets lines about what will be done. Raises ConfigError or PlanError naming the key.
    """
    from echelon.data.corpus import list_corpus
    from echelon.data.prepare import prepare_spec
    from echelon.launch.secrets import refuse_secrets
    from echelon.launch.targets import TARGETS, find_launcher
    from echelon.model.hub import find_commits
    from echelon.runs.cost import check_budget, describe_cost, find_price_at_target

    recipe = job.recipe
    if recipe.launch.to is None:
        raise ConfigError(f"launch.to is not set; say where with --to, one of {', '.join(TARGETS)}.")
    refuse_secrets(recipe)
    rate = find_price_at_target(recipe)
    check_budget(recipe, rate)
    launcher = find_launcher(recipe.launch.to)
    notes: list[str] = []
    if recipe.launch.to in ("local", "torchrun", "slurm"):  # these see the files of this machine
        with _left_to_the_job(recipe.launch.to, notes):
            if recipe.launch.to == "local":
                find_commits(recipe, {})
            spec = prepare_spec(recipe)
            list_corpus(spec.train, spec.validation)
    lines = launcher.check(job)
    if recipe.launch.to == "sagemaker":
        _check_uploads(recipe)
    trained = _find_trained_recipe(recipe)
    with _left_to_the_job(recipe.launch.to, notes):
        lines += _check_model(trained, find_target_cluster(trained))
    lines += notes
    num_steps = None if recipe.train.epochs is not None else recipe.num_steps(0)
    if rate is None and recipe.launch.to != "local":
        lines.append("cost: the price of these machines is not known; budget.usd_per_hour says that of one")
    lines += describe_cost(recipe, _find_run_folder(recipe.launch.to, recipe.run.dir), rate, job.nodes[1], num_steps)
    for line in lines:
        tell(line)
    return launcher, launcher.render(job)


@contextmanager
def _left_to_the_job(target: str, notes: list[str]) -> Iterator[None]:
    """Make a note of what cannot be checked since the hub is not reached from here: machines elsewhere may reach it."""
    try:
        yield
    except HubUnreachableError as error:
        if target == "local":
            raise
        notes.append(f"hub: not checked from here, and left to the machines of the job: {error.reason}")


def _check_uploads(recipe: "Recipe") -> None:
    """Raise DataError or ConfigError for local files that cannot be trained on as the recipe says.

    In the container they lie in several folders, where nothing shows any more that text to train and to validate on
    is the same.
    """
    from echelon.data.corpus import list_corpus
    from echelon.data.prepare import prepare_spec
    from echelon.data.templates import load_template

    spec = prepare_spec(recipe)
    train, validation = (
        [each for each in sources if each.format != "hub" and not each.path.startswith(("s3://", "/opt/ml/"))]
        for sources in (spec.train, spec.validation)
    )
    list_corpus(train, validation)
    if recipe.data.chat_template is not None:
        load_template(recipe.data.chat_template)


def settle_instance(recipe: "Recipe") -> "Recipe":
    """The recipe with the type of its machines in the place of `auto`, which is said and why. Raises PlanError."""
    if recipe.launch.to != "sagemaker" or recipe.launch.sagemaker.instance_type != "auto":
        return recipe
    from echelon.lifecycle.model_checks import check_model, find_checkpoint_out_of_reach
    from echelon.planner.machines import choose_instance

    if (why := find_checkpoint_out_of_reach(recipe)) is not None:
        raise ConfigError(f"launch.sagemaker.instance_type=auto: {why}, so its size is not known; name a type.")
    try:
        shape = check_model(recipe, elsewhere=True).shape
    except HubUnreachableError as error:
        raise ConfigError(
            f"launch.sagemaker.instance_type=auto: the size of the model is not known, for {error.reason}; name a type."
        ) from error
    choice = choose_instance(recipe, shape, recipe.launch.node_range[1])
    for line in choice.describe():
        say(line)
    sagemaker = recipe.launch.sagemaker.model_copy(update={"instance_type": choice.instance.name})
    return recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"sagemaker": sagemaker})})


def find_target_cluster(recipe: "Recipe") -> "Cluster | None":
    """The hardware the recipe will run on, as far as the recipe says it. Raises ConfigError if it says half of it."""
    from echelon.hardware.accelerators import parse_devices
    from echelon.hardware.instances import find_instance
    from echelon.planner.machines import find_cluster

    launch = recipe.launch
    if launch.to == "sagemaker" and launch.sagemaker.instance_type is not None:
        return find_cluster(recipe, find_instance(launch.sagemaker.instance_type), launch.node_range[1])
    if launch.accelerator is None:
        return None
    count = _count_devices(launch)
    if not count:
        raise ConfigError(
            f"launch.accelerator={launch.accelerator}: how many of them a machine has is not known; set "
            "launch.nproc_per_node, or leave launch.accelerator out."
        )
    return parse_devices(f"{launch.node_range[1] * count}x{launch.accelerator}", count)


def _read_options(to: str | None, hosts: str | None, nodes: str | None, instance: str | None) -> list[str]:
    """The options as overrides: each only is a short way to say a recipe key."""
    options = [] if to is None else [f"launch.to={to}"]
    if hosts is not None:
        options.append(parse_hosts(hosts))
        if nodes is None:
            options.append(f"launch.nodes={options[-1].count(',') + 1}")
    if nodes is not None:
        options.append(f"launch.nodes={json.dumps(nodes)}")
    if instance is not None:
        options.append(f"launch.sagemaker.instance_type={json.dumps(instance)}")
    return options


def _count_devices(launch: "LaunchConfig") -> int | None:
    """Devices of a machine, by what is asked for there; None: it has as many as it has."""
    if launch.nproc_per_node != "auto":
        return launch.nproc_per_node
    if launch.to == "slurm":
        return launch.slurm.gpus_per_node
    return launch.kubernetes.gpus_per_node if launch.to == "kubernetes" else None


def _check_options(target: str | None, hosts: str | None, instance: str | None) -> None:
    """Raise ConfigError for an option that says nothing at this target."""
    for option, given, only in (("--hosts", hosts, "torchrun"), ("--instance", instance, "sagemaker")):
        if given is not None and target not in (only, None):
            raise ConfigError(f"{option} {given} goes with --to {only}, not with {target}; leave one of them out.")


def _find_trained_recipe(recipe: "Recipe") -> "Recipe":
    """The recipe as its target trains it: dictionaries of SageMaker's SDK may change the plan."""
    if recipe.launch.to != "sagemaker":
        return recipe
    from echelon.launch.sagemaker.request import find_trained_recipe

    return find_trained_recipe(recipe)


def _check_model(recipe: "Recipe", cluster: "Cluster | None") -> list[str]:
    """Lines about the checks that are left to the target, and the memory the plan needs on these machines.

    Raises ConfigError, DataError or PlanError for a model that the target would refuse, or that does not fit there.
    """
    from echelon.lifecycle.model_checks import check_model, find_checkpoint_out_of_reach

    elsewhere = recipe.launch.to != "local"
    if elsewhere and (why := find_checkpoint_out_of_reach(recipe)) is not None:
        return [f"left to train: the model, and whether the plan fits the memory of the machines ({why})"]
    checked = check_model(recipe, elsewhere)
    lines = [f"left to train: {line}" for line in checked.left]
    return lines if cluster is None else [*lines, _check_plan(recipe, checked.shape, cluster)]


def _check_plan(recipe: "Recipe", shape: "ModelShape", cluster: "Cluster") -> str:
    """A line about the memory the plan needs there. Raises PlanError where it does not fit."""
    from echelon.errors import PlanError
    from echelon.planner.choose import resolve_plan
    from echelon.planner.memory import estimate_memory

    plan = resolve_plan(recipe, shape, cluster)
    needed = estimate_memory(shape, plan, recipe.data.sequence_len, cluster.kind).total
    there = cluster.accelerator.memory_bytes
    words = f"{plan.strategy} on {cluster.num_devices} x {cluster.accelerator.name} needs {needed / 1e9:.1f} GB each"
    if there is not None and needed > there:
        raise PlanError(
            f"parallel={plan.strategy}: the plan needs {needed / 1e9:.1f} GB on each {cluster.accelerator.name}, which "
            f"has {there / 1e9:.0f} GB; lower train.micro_batch_size, shard more (parallel: fsdp), set "
            "train.activation_checkpointing: full, or use more machines."
        )
    return f"plan: {words}" + ("" if there is None else f" of {there / 1e9:.0f}")


def _await_end(launcher: "Launcher", record: "JobRecord") -> "JobStatus":
    from echelon.launch.job import FINAL_STATES

    while (now := launcher.status(record)).state not in FINAL_STATES:
        time.sleep(_LOOK_SECONDS)
    return now


def _find_run_folder(target: str, here: Path) -> "RunFolder":
    """The folder of a run at its target. In a container it is another than the one here, which a local run may fill."""
    from echelon.launch.sagemaker.staging import CHECKPOINT_DIR
    from echelon.runs.run_folder import RunFolder

    return RunFolder(Path(CHECKPOINT_DIR) / here.name if target == "sagemaker" else here)


def _describe(record: "JobRecord", now: "JobStatus") -> str:
    """One line: the target's word, how far the run is, what it cost by its own count and what the target bills."""
    from echelon.runs.cost import read_spending

    parts: list[Any] = [record.name, record.target, now.state]
    if now.detail:
        parts.append(now.detail)
    folder = _find_run_folder(record.target, Path(record.run_dir))
    if step := folder.last_step():
        parts.append(f"step {step}")
    with suppress(ConfigError):  # a damaged file; the run's next start says so
        if usd := read_spending(folder).usd:
            parts.append(f"cost ${usd:.2f}")
    if now.billed_hours is not None:
        parts.append(f"billed {now.billed_hours:.2f} h")
    if now.billed_usd is not None:
        parts.append(f"billed ${now.billed_usd:.2f}")
    return "  ".join(map(str, parts))
