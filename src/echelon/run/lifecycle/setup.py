"""Prepares a run folder for the workers: data, shape, plan, and the files that describe them."""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import ConfigError, EchelonError, PlanError
from echelon.ground.logs import keep_console_in
from echelon.ground.stored import read_as, read_bytes, write_json, write_text
from echelon.ground.variables import find_cache_dir
from echelon.planner.choose import resolve_plan
from echelon.planner.forecast import describe_estimate, read_history
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.memory import describe_checkpoint, estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan, load_plan
from echelon.planner.plan_lines import describe_plan, summarize_plan
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from echelon.recipe.render import find_secret_keys, render_recipe
from echelon.recipe.schedule import build_schedule, find_fault, find_warmup, render_schedule
from echelon.recipe.section import read_epochs
from echelon.run.folder.cost import (
    check_budget,
    describe_cost,
    find_price_here,
    forget_damaged_spending,
    refuse_used_up,
)
from echelon.run.folder.environment import describe_environment
from echelon.run.folder.open_run import OpenedRun, open_run
from echelon.run.folder.reckoning import read_quote
from echelon.run.folder.run_folder import RunFolder, describe_gone
from echelon.run.journal.trackers import catch_up, check_trackers
from echelon.run.lifecycle.extension_checks import check_extensions
from echelon.run.lifecycle.model_checks import (
    CheckedModel,
    check_model,
    check_weights,
    read_model_fields,
    size_vocabulary,
)
from echelon.run.training.evaluation_checks import check_evaluation, try_benchmarks

if TYPE_CHECKING:
    from echelon.learn.data.prepared import PreparedData

logger = logging.getLogger(__name__)

# A resumed run keeps the choices made at its start, unless one of these was changed by hand.
_PLAN_KEYS = ("parallel", "train.micro_batch_size", "launch", "sync")
# And if these fields of its cluster are the same.
_DEVICES_OF = attrgetter("kind", "num_devices", "devices_per_node", "accelerator.name")


@dataclass(frozen=True)
class PreparedRun:
    """A locked run folder with everything that a worker needs."""

    folder: RunFolder
    plan: ParallelPlan


@dataclass(frozen=True)
class _LocalRecipe:
    """A recipe with this machine's copies of hub files at `commits`; its model and tokenizer are read once.

    `checked`: what the checks of a new run have read; None for a resumed run, which was checked at its start.
    """

    commits: Mapping[str, str]
    recipe: Recipe
    checked: CheckedModel | None = None

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The HF config fields of the model."""
        return read_model_fields(self.recipe) if self.checked is None else self.checked.fields

    @cached_property
    def obstacle(self) -> str | None:
        """Why the model cannot keep the documents of a sequence apart; None if it can."""
        from echelon.learn.data.prepare import find_mask_obstacle

        return find_mask_obstacle(self.recipe) if self.checked is None else self.checked.obstacle

    def prepare_data(self, packing: bool | None) -> "PreparedData":
        """Prepare or open the data. `packing` is the choice of `data.packing: auto` that a resumed run began with."""
        from echelon.learn.data.prepare import prepare
        from echelon.learn.data.prepare_spec import prepare_spec

        spec = prepare_spec(self.recipe)
        if packing is not None and spec.packing == "auto":
            spec = replace(spec, packing=packing)
        tokenizer = None if self.checked is None else self.checked.tokenizer
        return prepare(spec, find_obstacle=lambda: self.obstacle, tokenizer=tokenizer)


def prepare_run(
    recipe: Recipe,
    fresh: bool,
    find_cluster: Callable[[], Cluster],
    variables: Mapping[str, str],
    patience_seconds: float = 0.0,
    announce: Callable[[Mapping[str, str]], None] = lambda commits: None,
) -> PreparedRun | None:
    """Open the run folder, prepare the data, resolve the plan and write it; None if the run has already finished.

    No process group may exist: the other ranks wait without a collective, however long the data takes. `variables` is
    the environment, of which an allow-list is stored. The folder stays locked by this process; `patience_seconds` is
    how long to wait for another process that holds the lock. `announce` gets the commits of the run's hub files before
    any weights are fetched, so that other machines fetch the same.
    """
    from echelon.learn.data.survey import describe_repeats
    from echelon.learn.model.hub import fetch_models, find_commits, read_commits, write_commits
    from echelon.run.folder.remote_start import RemoteStart

    check_extensions(recipe)
    find_cluster = cache(find_cluster)
    rate = find_price_here(recipe, variables)
    check_budget(recipe, rate)
    remote = RemoteStart(recipe)
    checks: list[_LocalRecipe] = []

    def check() -> None:
        commits = find_commits(recipe, {})
        check_weights(recipe.model.checkpoint)
        local = _with_small_copies(recipe, commits)
        checked = check_model(local, weights=False)
        resolve_plan(recipe, checked.shape, find_cluster())
        remote.reach()
        checks.append(_LocalRecipe(commits, local, checked))

    opened = open_run(recipe, fresh, check, remote.bring_back, patience_seconds)
    folder = opened.folder
    if opened.state == "finished":
        catch_up(recipe, folder)
        remote.send_rest(folder)
        return None
    keep_console_in(folder.console_path)
    with _unlocked_by_failure(folder):
        remote.claim(folder)
        check_trackers(recipe)
        if line := forget_damaged_spending(recipe, folder):
            logger.warning(f"cost: {line}")
        refuse_used_up(recipe, folder, rate, find_cluster().num_nodes)
        began_with = {text.digest for text in folder.text.read_texts()} if opened.state == "resumed" else set()
        folder.rows.append_event("prepare")
        first = dict(checks[0].commits) if checks else {}
        commits = find_commits(recipe, first | read_commits(folder.hub_path))
        announce(commits)
        local = checks[0] if checks and commits == first else _LocalRecipe(commits, _with_small_copies(recipe, commits))
        data = local.prepare_data(folder.text.read_packing() if opened.state == "resumed" else None)
        folder.rows.append_event("prepared")
        _refuse_other_text(folder, began_with, data.content_digest)
        num_steps = recipe.num_steps(data.train.num_samples)
        shape = _check_against_data(recipe, local, data, num_steps)
        cluster = find_cluster()
        plan = _find_plan(opened, recipe, shape, cluster, data)
        _check_profile(recipe, num_steps, plan.world_size)
        memory = estimate_memory(shape, plan, cluster.kind)
        folder.text.write_prepared_path(data.path, data.content_digest, data.is_packed)
        fetch_models(recipe, commits)  # last, after every check that can fail
        write_commits(folder.hub_path, commits)
        history = read_history(find_cache_dir(), shape, cluster)
        seconds = describe_estimate(shape, plan, cluster, history)
        estimate = {"memory": asdict(memory), **seconds}
        write_run(folder, recipe, plan, estimate, num_steps, cluster, variables)
    cost = describe_cost(recipe, folder, rate, cluster.num_nodes, num_steps)
    started = _describe_start(recipe, opened, commits, data, plan)
    for line in (*started, describe_checkpoint(shape, plan), *cost, *_describe_size(recipe, shape, plan, data)):
        logger.info(line)
    for line in describe_repeats(recipe, data):
        logger.warning(line)
    logger.info(f"run folder: {folder.path}")
    return PreparedRun(folder, plan)


def _check_against_data(recipe: Recipe, here: _LocalRecipe, data: "PreparedData", num_steps: int) -> ModelShape:
    """Make the checks that need the prepared data; returns the shape of the model, which depends on its vocabulary."""
    from echelon.learn.teacher import check_teacher, open_taught

    if fault := find_fault(recipe.optim, num_steps, recipe.batches):
        raise ConfigError(fault)
    check_evaluation(recipe, data)
    try_benchmarks(recipe)
    check_teacher(here.recipe, data.tokenizer)
    if recipe.reward:  # this module imports models, which this process otherwise does not need
        from echelon.learn.answers.reward_models import check_reward_models

        check_reward_models(here.recipe, data)
    open_taught(here.recipe, data)
    fields, line = size_vocabulary(here.recipe, here.fields, data.vocab_size)
    logger.info(f"model: {line}")
    obeys_masks = recipe.objective.row.answers != "pairs" or here.obstacle is None
    return replace(build_shape(fields, recipe.adapter.is_adapter), obeys_masks=obeys_masks)


def _check_profile(recipe: Recipe, num_steps: int, world_size: int) -> None:
    """Raise ConfigError if the steps or ranks to profile are not in the run."""
    steps, ranks = recipe.profile.steps, recipe.profile.ranks
    if steps is None:
        return
    if sum(steps) - 1 > num_steps:
        raise ConfigError(
            f"profile.steps={list(steps)} records steps {steps[0]} to {sum(steps) - 1}, but the run has {num_steps}; "
            "set the first step and their number, for example profile.steps=[3, 2]."
        )
    if max(ranks) >= world_size:
        raise ConfigError(f"profile.ranks={list(ranks)}: the run has {world_size} processes, whose ranks begin at 0.")


@contextmanager
def _unlocked_by_failure(folder: RunFolder) -> Iterator[None]:
    """Unlock the folder if the block raises; if the folder is gone, raise an EchelonError about that."""
    try:
        yield
    except BaseException as error:
        folder.unlock()
        if isinstance(error, FileNotFoundError) and not folder.path.exists():
            raise EchelonError(describe_gone(folder.path)) from error
        raise


def _describe_start(
    recipe: Recipe, opened: OpenedRun, commits: Mapping[str, str], data: "PreparedData", plan: ParallelPlan
) -> Iterator[str]:
    """Lines about the run: hub commits, plan, data, steps and redacted secrets."""
    from echelon.learn.data.survey import describe_order
    from echelon.learn.model.hub import describe_commits

    if opened.state == "resumed":  # recipe.yaml in the run folder has the new values now
        yield from (f"run: changed {difference}" for difference in opened.differences)
    yield from describe_commits(commits)
    yield from describe_plan(plan) if logger.isEnabledFor(logging.DEBUG) else summarize_plan(plan)
    yield from describe_order(recipe, data)
    yield from describe_steps(recipe, data.train.num_samples)
    yield from describe_longer_run(recipe, opened, data.train.num_samples)
    for key in find_secret_keys(recipe):
        yield f"recipe: {key} looks like a secret; the run folder and the training processes get *** instead"


def _describe_size(recipe: Recipe, shape: ModelShape, plan: ParallelPlan, data: "PreparedData") -> list[str]:
    """Lines about the size of the model, and how many epochs of the training text the steps make."""
    epoch = data.train.num_samples
    num_steps = recipe.num_steps(epoch)
    fed = recipe.batches.first_sequence(num_steps)
    # The line about an adapter has its numbers of parameters, and the line about the data the number of tokens.
    parameters = [f"parameters: {shape.num_parameters:,}, all trained"] if plan.adapter is None else []
    epochs = f"{fed / epoch:.2f} epochs; an epoch has {epoch:,} sequences"
    if data.streamed is not None:
        epochs = "of an epoch whose size is known once all of it is read"
    return [
        *parameters,
        f"training: {num_steps:,} steps, {fed:,} sequences of {recipe.data.sequence_len:,} tokens, {epochs}",
    ]


def _with_small_copies(recipe: Recipe, commits: Mapping[str, str]) -> Recipe:
    """The recipe with this machine's copies of hub files, without weights."""
    from echelon.learn.model.hub import fetch_models, with_copies

    fetch_models(recipe, commits, weights=False)
    return with_copies(recipe, commits, weights=False)


def describe_steps(recipe: Recipe, num_samples: int | None) -> list[str]:
    """Lines about the run's steps: batch ramp, learning rate schedule, and intervals counted in epochs.

    `num_samples`, the sequences of an epoch, is None before the data is prepared.
    """
    lines = [recipe.batches.describe()] if recipe.train.batch_ramp is not None else []
    if num_samples is None and recipe.train.epochs is not None:
        lines.append(f"schedule: {recipe.optim.schedule}; the number of steps is known once the data is prepared")
    else:
        lines.append(render_schedule(recipe.optim, recipe.num_steps(num_samples or 0), recipe.batches))
    for key, every, find_rhythm in (
        ("checkpoint.every", recipe.checkpoint.every, recipe.save_rhythm),
        ("train.eval_every", recipe.train.eval_every, recipe.evaluation_rhythm),
    ):
        if read_epochs(every) is not None and num_samples is None:
            lines.append(f"{key}={every!r}: the steps are known once the data is prepared")
        elif read_epochs(every) is not None and num_samples is not None:
            first = ", ".join(f"{step:,}" for step in find_rhythm(num_samples).first_steps(3))
            lines.append(f"{key}={every!r}: {num_samples:,} sequences per epoch; after the steps {first}, ...")
    return lines


def describe_longer_run(recipe: Recipe, opened: OpenedRun, num_samples: int) -> Iterator[str]:
    """Lines about what an extension of a run does to its learning rate, and to a warm-up that is a fraction of it."""
    if opened.before is None:
        return
    recipes = (opened.before, recipe)
    before, now = (version.num_steps(num_samples) for version in recipes)
    step = opened.folder.newest_step()
    if before == now or not step:
        return
    last, following = (
        build_schedule(version.optim, steps, version.batches)(index)
        for version, steps, index in zip(recipes, (before, now), (step - 1, step), strict=True)
    )
    yield (
        f"schedule: the run is {now:,} steps long now, not {before:,}, and continues on the learning rate of the "
        f"longer run: {last:.2e} at step {step:,}, {following:.2e} at step {step + 1:,}"
    )
    if recipe.optim.warms_up_by_share:
        warmups = [find_warmup(version.optim, version.num_steps(num_samples), version.batches) for version in recipes]
        yield (
            f"optim.warmup={recipe.optim.warmup!r} applies to the longer run: the warm-up was "
            f"{warmups[0]:,} {recipe.optim.schedule_unit}, and is now {warmups[1]:,}"
        )


def _refuse_other_text(folder: RunFolder, before: Collection[str | None], digest: str) -> None:
    """Refuse to resume with different data: the order of the samples depends on it."""
    if before and not {digest, None}.intersection(before):
        raise ConfigError(
            f"data.train: the data differs from that of the run in {folder.path}; restore the "
            "data, pass --fresh to start a new run, or choose another run.name."
        )


def write_run(
    folder: RunFolder,
    recipe: Recipe,
    plan: ParallelPlan,
    estimate: Mapping[str, Any],
    num_steps: int,
    cluster: Cluster,
    variables: Mapping[str, str],
) -> None:
    """Write recipe.yaml, plan.json, estimate.json and environment.json, and remove outcomes of earlier attempts."""
    folder.clear_outcomes()
    write_json(folder.environment_path, describe_environment(variables) | {"cluster": asdict(cluster)})
    warmup = find_warmup(recipe.optim, num_steps, recipe.batches)
    steps = {"steps": num_steps, f"warmup_{recipe.optim.schedule_unit}": warmup}
    write_json(folder.estimate_path, {**estimate, "schedule": steps, **read_quote(variables)})
    write_json(folder.plan_path, plan.to_dict())
    # Last: a folder with a recipe counts as a run, so everything else is there by then.
    write_text(folder.recipe_path, render_recipe(recipe))


def digest_run(folder: RunFolder) -> int:
    """A positive 63-bit digest of recipe.yaml, plan.json and hub.json as this rank sees them; 0 if it cannot."""
    try:
        text = read_bytes(folder.recipe_path) + b"\0" + read_bytes(folder.plan_path)
        text += b"\0" + read_bytes(folder.hub_path) if folder.hub_path.exists() else b""
    except OSError:
        return 0
    return max(1, int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)


@dataclass(frozen=True)
class _PlannedFor:
    """The hardware that the plan was made for, from environment.json."""

    cluster: Cluster


def _find_plan(
    opened: OpenedRun, recipe: Recipe, shape: ModelShape, cluster: Cluster, data: "PreparedData"
) -> ParallelPlan:
    """The stored plan of a resumed run if it still fits, else a new one, also for a different number of processes."""
    began = _read_beginning(opened)
    if began is not None:
        before, plan = began
        changed = any(difference.key.startswith(_PLAN_KEYS) for difference in opened.differences)
        fits = plan.world_size == cluster.num_devices and plan.global_batch_size == recipe.global_batch_size
        if fits and not changed and _DEVICES_OF(before) == _DEVICES_OF(cluster):
            return plan
        recipe = _keep_precision(recipe, before, plan, cluster)
    is_resumed, num_samples = opened.state == "resumed", data.train.num_samples
    return resolve_plan(recipe, shape, cluster, num_samples=num_samples, fill=is_resumed, are_apart=data.apart)


def _read_beginning(opened: OpenedRun) -> tuple[Cluster, ParallelPlan] | None:
    """The earlier cluster and plan of a resumed run; None, with a warning, if they cannot be read."""
    if opened.state != "resumed":
        return None
    folder = opened.folder
    try:
        return read_as(folder.environment_path, _PlannedFor).cluster, load_plan(folder.plan_path)
    except (OSError, ValueError, PlanError) as error:
        logger.warning(f"plan: a new one, because the plan of the first start cannot be read ({error})")
        return None


def _keep_precision(recipe: Recipe, before: Cluster, plan: ParallelPlan, cluster: Cluster) -> Recipe:
    """Fix the precision that was chosen for a CPU by measurement when the run began, for a new plan.

    A new measurement might choose the other one, which would change the arithmetic of the run.
    """
    if recipe.train.precision != "auto" or cluster.kind != "cpu" or before.kind != "cpu":
        return recipe
    precision = "bf16" if plan.precision.compute == "bfloat16" else "fp32"
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})
