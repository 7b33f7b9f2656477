"""Resolves `auto`: precision, micro batch and strategy, each choice with the numbers it is based on."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import join_words, render_bytes
from echelon.planner.activations import FULL, KeptActivations, check_activations, list_activations
from echelon.planner.adapter_plan import build_adapter_plan, describe_reach
from echelon.planner.axes.table import AXES
from echelon.planner.engine_limits import check_engine
from echelon.planner.hardware.accelerators import ACCELERATORS, Cluster
from echelon.planner.layout import (
    MICRO_BATCH_TOKENS,
    build_layout,
    check_batch,
    find_replica,
    list_divided,
    list_micro_batches,
    micro_batch_sizes,
    weighed_axes,
)
from echelon.planner.memory import MemoryEstimate, add_rollout, count_held, describe_rollout, estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import AdapterPlan, ParallelPlan, Precision, build_sync_plan
from echelon.planner.plan_fields import (
    COMPILE_GAIN,
    choose_compile,
    choose_precision,
    count_reward_models,
    count_teacher,
    estimate_seconds,
    find_loss_kind,
    keeps_documents_apart,
)
from echelon.planner.replica_costs import describe_traffic
from echelon.planner.replica_limits import (
    ANYWHERE,
    check_compression,
    compressed_precision,
    describe_unproven,
    join_servers,
)
from echelon.planner.time import estimate_time
from echelon.recipe.names import ENGINES
from echelon.recipe.synchronization import CONTINUES, PARAMETER_SERVER, QUORUM

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe
    from echelon.recipe.training import ParallelConfig

logger = logging.getLogger(__name__)

_CLOSE = 0.05  # a plan that is slower by less is as fast: predictions are not more exact
# Plans that divide the model, its experts or sequences have to be faster by more than this: they depend more on links,
# and on what else is divided.
_CLEARLY = 0.10


def ranks_by_time(cluster: Cluster) -> bool:
    """Whether predictions for these devices are exact enough to choose by them: calibrated ones, and known GPUs."""
    return cluster.calibration is not None or (cluster.kind == "cuda" and cluster.accelerator.name in ACCELERATORS)


def choose_fastest(
    simple: Sequence[ParallelPlan], divided: Sequence[ParallelPlan], shape: ModelShape, cluster: Cluster
) -> tuple[ParallelPlan, str]:
    """The plan to take, and why, for the user.

    Of the simple plans it is the first that is about as fast as the fastest of them, likewise of the divided ones. A
    divided plan is taken if it is clearly faster, or if there is no simple one.

    Args:
        simple: plans that divide the data, the gradients and the states alone, the simplest first.
        divided: plans that divide the model, its experts or sequences as well, the simplest first. At least one of
            both kinds together.
    """
    seconds = {plan: estimate_time(shape, plan, cluster).total for plan in (*simple, *divided)}
    table = ", ".join(f"{plan.strategy} {seconds[plan]:.3g} s" for plan in simple)
    by = f"by the predicted time of a step on {_describe_devices(cluster)}"
    others = _choose(divided, seconds) if divided else None
    best = f"the best of {len(divided)} with {join_words([axis.name for axis in weighed_axes(shape)])}"
    if not simple:
        assert others is not None
        return others, f"{_name(others)}, {seconds[others]:.3g} s, {best}, {by}"
    chosen = _choose(simple, seconds)
    beside = ""
    if others is not None:
        beside = f"; {best} is {_name(others)}, {seconds[others]:.3g} s"
        if (1 + _CLEARLY) * seconds[others] < seconds[chosen]:
            return others, f"{_name(others)}, {seconds[others]:.3g} s, clearly faster than {table}, {by}"
    ties = [plan.strategy for plan in simple if seconds[plan] < seconds[chosen]]
    words = f"as fast as {ties[0]} and simpler" if ties else "the fastest"
    return chosen, f"{words} of those that fit, {by}: {table}{beside}"


def _describe_devices(cluster: Cluster) -> str:
    """The devices, and the links that are assumed between them."""
    if cluster.calibration is not None:
        return "this calibrated device"
    links = cluster.known_links
    between = f" and {links.between.name}" if cluster.num_nodes > 1 else ""
    return f"{cluster.accelerator.name} with {links.inside.name}{between}"


def _choose(plans: Sequence[ParallelPlan], seconds: dict[ParallelPlan, float]) -> ParallelPlan:
    """The first that is about as fast as the fastest of them."""
    fastest = min(seconds[plan] for plan in plans)
    return next(plan for plan in plans if seconds[plan] <= (1 + _CLOSE) * fastest)


def _name(plan: ParallelPlan) -> str:
    """The degrees above 1, and the schedule."""
    return plan.name_degrees() + (f" ({plan.schedule})" if plan.schedule is not None else "")


MEMORY_HEADROOM = 0.10  # share of a device kept for workspace, fragmentation and what the estimate does not count


def find_usable_bytes(cluster: Cluster) -> float | None:
    """Bytes of each device, less the headroom; None if its memory is unknown."""
    memory = cluster.accelerator.memory_bytes
    return None if memory is None else memory * (1 - MEMORY_HEADROOM)


@dataclass(frozen=True)
class _Request:
    """The inputs that all candidates of one recipe on one cluster share. `replica`: the part of it for one replica.

    `policies`: the ways to keep activations that may be chosen, the one that keeps the most first.
    """

    recipe: "Recipe"
    shape: ModelShape
    cluster: Cluster
    replica: Cluster
    num_samples: int | None
    precision: Precision
    adapter: AdapterPlan | None
    compile: bool
    policies: tuple[KeptActivations, ...]
    fill: bool
    documents_apart: bool

    def fits(self, estimate: MemoryEstimate) -> bool:
        """Whether it fits on a device with the headroom left free, and on its machine; unknown memory fits all."""
        return estimate.fits(find_usable_bytes(self.cluster), self.cluster)

    def estimate(self, plan: ParallelPlan) -> MemoryEstimate:
        return estimate_memory(self.shape, plan, self.cluster.kind)

    def predict(self, plan: ParallelPlan) -> float:
        """Seconds of a step. Raises PlanError if the speed of the devices is unknown."""
        return estimate_time(self.shape, plan, self.cluster).total


def resolve_plan(
    recipe: "Recipe",
    shape: ModelShape,
    cluster: Cluster,
    num_samples: int | None = None,
    fill: bool = False,
    are_apart: bool | None = None,
) -> ParallelPlan:
    """The plan of a recipe on a cluster: checks all fields together and resolves every `auto`, with reasons in `why`.

    `num_samples` is the number of training sequences, if known. `fill`: pad a batch that the ranks cannot share evenly,
    as for a run that resumes with a different number of ranks; otherwise it is refused. `are_apart`: whether the
    documents of a sequence do not attend to each other, if the data is known. Raises PlanError, or ConfigError if the
    recipe is wrong on any cluster, with the values that would fit.
    """
    _check_positions(recipe, shape)
    kind, policies = cluster.kind, list_activations(recipe)
    check_activations(recipe, policies[0], shape, cluster)
    precision, precision_why = choose_precision(recipe, cluster)
    seconds = estimate_seconds(recipe, shape, cluster, precision, num_samples)
    compile_model, compile_why = choose_compile(recipe, cluster, policies[0], seconds, COMPILE_GAIN[precision.compute])
    adapter = build_adapter_plan(recipe.adapter, shape, len(recipe.model.new_tokens))
    replica = find_replica(recipe, cluster)
    apart = keeps_documents_apart(recipe, shape) if are_apart is None else are_apart
    request = _Request(
        recipe, shape, cluster, replica, num_samples, precision, adapter, compile_model, policies, fill, apart
    )
    if recipe.parallel == "auto":
        plan, plan_why = _choose_strategy(request)
    else:
        plan, plan_why = _build_requested(request, _check_layout(request, recipe.parallel))
    plan_why += [line for axis in AXES for line in axis.describe(shape, plan)]
    check_compression(plan)
    check_engine(recipe, plan)
    plan_why += [*describe_traffic(shape, plan, count_held(shape, plan)), *describe_rollout(plan, shape, kind)]
    plan_why += describe_unproven(recipe, cluster)
    reach = None if adapter is None else describe_reach(adapter, shape)
    return replace(plan, why=(*plan_why, *precision_why, *compile_why, *([] if reach is None else [reach])))


def _check_positions(recipe: "Recipe", shape: ModelShape) -> None:
    """Refuse sequences longer than a table of learned positions; rotary positions have no limit."""
    length, positions = recipe.data.sequence_len, shape.max_positions
    if shape.num_position_parameters and positions is not None and length > positions:
        raise ConfigError(
            f"data.sequence_len={length} is longer than the {positions} learned positions of the model; "
            f"use {positions} or less, or a model with more positions."
        )


def _choose_strategy(request: _Request) -> tuple[ParallelPlan, list[str]]:
    """The first strategy that fits, the simplest tried first; on devices of known speed the fastest plan that fits.

    Raises PlanError with what each would need.
    """
    if len(request.policies) > 1 and not ranks_by_time(request.cluster):
        for kept in request.policies[:-1]:  # every strategy is tried before more is recomputed
            with contextlib.suppress(PlanError):
                return _choose_strategy(replace(request, policies=(kept,)))
        return _choose_strategy(replace(request, policies=request.policies[-1:]))
    why: list[str] = []
    fitting: dict[ParallelPlan, list[str]] = {}
    refused: list[ConfigError | PlanError] = []
    layouts = _auto_layouts(request)
    ranks = len(layouts) > 1 and ranks_by_time(request.cluster)
    for layout in layouts:
        plan, needs, line = _choose_micro_batch(request, layout)
        logger.debug(f"plan: {layout.strategy} needs {render_bytes(needs.total)}, micro batch {plan.micro_batch_size}")
        _check_host_memory(request, layout, needs)
        if request.fits(needs):
            try:
                check_engine(request.recipe, plan)
            except (ConfigError, PlanError) as error:
                refused.append(error)
                continue
            if not ranks:
                reason = "one process" if plan.world_size == 1 else "the first that fits"
                return plan, [*why, f"parallel auto: {layout.strategy}, {reason}", *line]
            fitting[plan] = line
            continue
        why.append(f"parallel auto: {_needs(request, layout, plan, needs)}")
    divided = dict(_list_divided(request)) if ranks else {}
    if fitting or divided:
        plan, reason = choose_fastest(list(fitting), list(divided), request.shape, request.cluster)
        return plan, [*why, f"parallel auto: {plan.strategy}, {reason}", *(fitting | divided)[plan]]
    if refused:
        raise refused[0]
    tried = "; ".join(entry.removeprefix("parallel auto: ").removesuffix(", too much") for entry in why)
    raise PlanError(
        f"parallel=auto: nothing fits {request.cluster.accelerator.name}: {tried}. {_advice(request, plan)}"
    )


def _list_divided(request: _Request) -> Iterator[tuple[ParallelPlan, list[str]]]:
    """The plans that divide the model or sequences and fit, the simplest first, each with its reasons.

    Those with stages are tried with several micro batches: smaller ones wait less.
    """
    kind = request.cluster.kind
    for parallel in list_divided(request.recipe, request.shape, request.cluster):
        variant = replace(request, recipe=request.recipe.model_copy(update={"parallel": parallel}))
        try:
            plan, least, _ = _choose_micro_batch(variant, _check_layout(variant, parallel))
        except (ConfigError, PlanError) as error:
            logger.debug(f"plan: {error}")
            continue
        if not request.fits(least):
            continue
        is_one = not plan.stages or request.fill
        for sized in [plan] if is_one else list_micro_batches(variant.recipe, plan, kind):
            # Of those with the same micro batch, what keeps the most is the fastest.
            for candidate in (kept.apply(sized) for kept in request.policies):
                needs = request.estimate(candidate)
                if request.fits(needs):
                    lines = _explain_activations(request, candidate, [candidate])
                    yield candidate, [*lines, *_explain_micro_batch(request, candidate, needs)]
                    break


def _auto_layouts(request: _Request) -> list[ParallelPlan]:
    """The strategies to try, the one with the least communication first.

    In half precision on GPUs, ZeRO-1 replaces DDP: it casts the weights once per step instead of in every microbatch,
    gathers them in half precision, and keeps hidden states in half precision. On one GPU ZeRO-2 needs less memory,
    because it has only one copy of the gradients, but copies them in every microbatch. The frozen weights of an adapter
    need no cast, and its gradients are small.
    """
    cluster, precision = request.replica, request.precision
    casts = cluster.kind == "cuda" and precision.compute != precision.param and request.adapter is None
    sync = request.recipe.sync
    if sync.name == PARAMETER_SERVER or (request.recipe.num_replicas == 1 and sync.compress.method not in ANYWHERE):
        names = ["ddp"]  # other strategies send no whole gradients
    elif cluster.num_devices == 1:
        names = ["zero1", "zero2", "fsdp"] if casts else ["ddp"]
    else:
        names = [*([] if casts else ["ddp"]), "zero1", "zero2", *(["hsdp"] if cluster.num_nodes > 1 else []), "fsdp"]
    runs = ENGINES[request.recipe.engine].strategies
    if runs is not None:
        names = [name for name in names if name in runs] or list(runs)
    return [_build_layout(request, name) for name in names]


def _build_layout(request: _Request, parallel: "str | ParallelConfig") -> ParallelPlan:
    """The layout of every replica."""
    layout = build_layout(parallel, request.replica, request.shape, request.recipe.data.sequence_len)
    if request.recipe.sync.name == PARAMETER_SERVER:
        return join_servers(layout, request.recipe, request.cluster)
    return replace(layout, num_replicas=request.recipe.num_replicas)


def _check_layout(request: _Request, parallel: "str | ParallelConfig") -> ParallelPlan:
    """The layout of a value of `parallel`. Raises ConfigError or PlanError if the recipe or the model rules it out."""
    layout = _build_layout(request, parallel)
    for axis in AXES:
        axis.check(request.recipe, request.shape, layout)
    return layout


def _build_requested(request: _Request, layout: ParallelPlan) -> tuple[ParallelPlan, list[str]]:
    """A strategy set by the user: refused only if its states, which are exact, exceed the memory of the device."""
    plan, needs, why = _choose_micro_batch(request, layout)
    memory = request.cluster.accelerator.memory_bytes
    if memory is not None and needs.states > memory:
        raise PlanError(
            f"parallel={layout.strategy}: parameters, gradients and optimizer need {render_bytes(needs.states)} on "
            f"each of {plan.world_size} {request.cluster.accelerator.name}, which has {render_bytes(memory)}. "
            f"{_advice(request, plan)}"
        )
    _check_host_memory(request, layout, needs)
    if not request.fits(needs):
        why = [*why, f"memory: {_needs(request, layout, plan, needs)}; the run may run out of memory"]
    return plan, why


def _check_host_memory(request: _Request, layout: ParallelPlan, needs: MemoryEstimate) -> None:
    """Raise PlanError if what is offloaded and saved exceeds the memory of a machine."""
    there, count = request.cluster.host_memory_bytes, request.cluster.devices_per_node
    if there is None or needs.fits(None, request.cluster):
        return
    recipe = request.recipe
    in_host = {
        "parallel.cpu_offload=true": "parameters, gradients and optimizer state" if layout.cpu_offload else None,
        "train.activation_offloading=true": "activations" if recipe.train.activation_offloading else None,
        "checkpoint.snapshot_every_steps": "snapshots" if recipe.checkpoint.snapshot_every_steps else None,
    }
    what = {key: word for key, word in in_host.items() if word is not None}
    removable = " or ".join(key.removesuffix("=true") for key in what)
    needed = needs.host + needs.saves
    raise PlanError(
        f"{' and '.join(what) or 'checkpoint'}: {layout.strategy} needs {render_bytes(needed)} of host memory for each "
        f"of {count} processes ({'; '.join([*what.values(), 'copies that checkpoints are written from'])}), "
        f"{render_bytes(needed * count)} in total, but a machine has {render_bytes(there)}; use more machines, or "
        f"machines with more memory{f', or remove {removable}' if what else ''}."
    )


def _choose_micro_batch(request: _Request, layout: ParallelPlan) -> tuple[ParallelPlan, MemoryEstimate, list[str]]:
    """The plan with the largest micro batch up to the cap that fits, or with the smallest if none fits; its memory.

    Of several ways to keep activations it has the fastest one that fits, each with its own micro batch, or the first
    one on devices of unknown speed.
    """
    recipe, cap = request.recipe, MICRO_BATCH_TOKENS[request.cluster.kind]
    per_rank = check_batch(recipe, layout, request.num_samples, request.fill)
    sizes = micro_batch_sizes(recipe, layout.num_readers, request.fill)
    for axis in AXES:
        sizes = axis.micro_batch_sizes(recipe, layout, sizes, request.fill)
    automatic, length = recipe.train.micro_batch_size == "auto", recipe.data.sequence_len
    if automatic and getattr(recipe.parallel, "microbatches", None) is None:
        sizes = [size for size in sizes if size * length <= cap] or sizes[-1:]
    plan = _build_plan(request, layout, request.policies[-1], sizes[-1], per_rank // sizes[-1])
    needs = request.estimate(plan)
    # Where not even this fits, which needs the least, nothing else is estimated.
    fitting = _find_fitting(request, layout, sizes, per_rank) if request.fits(needs) else {}
    if fitting:
        plan = min(fitting, key=request.predict) if len(fitting) > 1 else next(iter(fitting))
        needs = fitting[plan]
    lines = _explain_activations(request, plan, list(fitting))
    return plan, needs, [*lines, *_explain_micro_batch(request, plan, needs)]


def _find_fitting(
    request: _Request, layout: ParallelPlan, sizes: list[int], per_rank: int
) -> dict[ParallelPlan, MemoryEstimate]:
    """For each way to keep activations the plan with the largest of the sizes that fits, and its memory."""
    fitting: dict[ParallelPlan, MemoryEstimate] = {}
    for kept in request.policies:
        for size in sizes:
            plan = _build_plan(request, layout, kept, size, per_rank // size)
            needs = request.estimate(plan)
            if request.fits(needs):
                fitting[plan] = needs
                break
        if fitting and (plan.micro_batch_size == sizes[0] or not ranks_by_time(request.cluster)):
            break  # what keeps less only takes longer
    return fitting


def _explain_activations(request: _Request, plan: ParallelPlan, fitting: list[ParallelPlan]) -> list[str]:
    """The line about a policy that the recipe leaves to echelon. `fitting`: the plans that were weighed."""
    policies = [kept.policy for kept in list_activations(request.recipe)]
    if request.recipe.train.activation_checkpointing != "auto":
        return []
    if len(fitting) > 1:
        weighed = [
            f"{other.activation_checkpointing} {request.predict(other):.3g} s with micro batch {other.micro_batch_size}"
            for other in fitting
        ]
        reason = f"the fastest of those that fit: {', '.join(weighed)}"
    elif len(policies) == 1:
        reason = "the only one that this recipe allows"
    elif not fitting:
        reason = "and even so it does not fit"
    else:
        reason = "all activations fit" if plan.activation_checkpointing == policies[0] else "the first that fits"
    if find_usable_bytes(request.cluster) is None:
        reason = "device memory unknown"
    return [f"activation_checkpointing auto: {plan.activation_checkpointing}, {reason}"]


def _explain_micro_batch(request: _Request, plan: ParallelPlan, needs: MemoryEstimate) -> list[str]:
    """The line about a micro batch that the recipe does not set."""
    if request.recipe.train.micro_batch_size != "auto":
        return []
    size, limit = plan.micro_batch_size, find_usable_bytes(request.cluster)
    room = "device memory unknown" if limit is None else f"of {render_bytes(limit)} usable"
    ramped = ", dividing every size of the ramp" if request.recipe.train.batch_ramp is not None else ""
    return [
        f"micro_batch_size auto: {size} of the {size * plan.num_microbatches} sequences each rank gets{ramped}, "
        f"{size * request.recipe.data.sequence_len} tokens (at most {MICRO_BATCH_TOKENS[request.cluster.kind]}); "
        f"estimated {render_bytes(needs.total)}, {room}"
    ]


def _build_plan(
    request: _Request, layout: ParallelPlan, kept: KeptActivations, micro_batch_size: int, num_microbatches: int
) -> ParallelPlan:
    teacher_parameters, teacher_hidden_size = count_teacher(request.recipe)
    sync = build_sync_plan(request.recipe.sync)
    plan = replace(
        layout,
        engine=request.recipe.engine,
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        sync=replace(sync, name=QUORUM) if request.recipe.goes_on == CONTINUES else sync,
        num_fill=layout.num_readers * num_microbatches * micro_batch_size - request.recipe.global_batch_size,
        rows_per_sequence=1 if request.shape.obeys_masks or request.recipe.objective.row.answers != "pairs" else 2,
        keeps_reference=request.recipe.objective.needs_reference and not request.recipe.adapter.is_adapter,
        num_teacher_parameters=teacher_parameters,
        teacher_hidden_size=teacher_hidden_size,
        loss=find_loss_kind(request.recipe.objective),
        num_reward_parameters=count_reward_models(request.recipe),
        holds_snapshots=request.recipe.checkpoint.snapshot_every_steps is not None,
        activation_offloading=bool(request.recipe.train.activation_offloading),
        activation_loading_horizon=int(request.recipe.train.activation_offloading) or 1,
        compile=request.compile,
        attn_implementation=request.recipe.model.attn_implementation,
        documents_apart=request.documents_apart,
        precision=request.precision,
        optimizer=request.recipe.optim.name,
        adapter=request.adapter,
    )
    whole = kept.apply(replace(plan, precision=compressed_precision(request.precision, plan)))
    return add_rollout(whole, request.recipe, request.shape, request.cluster.kind, find_usable_bytes(request.cluster))


def _needs(request: _Request, layout: ParallelPlan, plan: ParallelPlan, needs: MemoryEstimate) -> str:
    limit = find_usable_bytes(request.cluster) or 0
    return (
        f"{layout.strategy} needs {render_bytes(needs.total)} with micro batch {plan.micro_batch_size} "
        f"({render_bytes(needs.states)} of it parameters, gradients and optimizer state); "
        f"{render_bytes(limit)} available"
    )


def _advice(request: _Request, plan: ParallelPlan) -> str:
    """Changes that would help; those that can be evaluated are named only if they fit, with the memory they need."""
    fsdp, last = _build_layout(request, "fsdp"), request.policies[-1]
    trials = {
        "set train.activation_checkpointing=full": FULL.apply(plan),
        "set parallel=fsdp": _build_plan(request, fsdp, last, plan.micro_batch_size, plan.num_microbatches),
    }
    needs = {way: request.estimate(trial) for way, trial in trials.items() if trial != plan}
    ways = [f"{way} (needs {render_bytes(need.total)})" for way, need in needs.items() if request.fits(need)]
    ways += ["use more devices", "a smaller model", "shorter data.sequence_len"]
    if request.cluster.kind == "cuda" and not plan.cpu_offload:
        ways.append("parallel.cpu_offload=true with dp_shard")
    text = ", ".join(ways[:-1]) + f" or {ways[-1]}."
    return text[0].upper() + text[1:]
