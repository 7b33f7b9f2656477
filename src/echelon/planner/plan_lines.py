"""A plan in the words of its users."""

from echelon.ground.sizes import count_noun
from echelon.planner.plan import AdapterPlan, ParallelPlan, SyncPlan
from echelon.recipe.names import NATIVE
from echelon.recipe.synchronization import PARAMETER_SERVER, QUORUM

_ROWS = "pairs: the two answers run as sequences of their own, because no document mask keeps them apart in this model"

_REFERENCE = "reference: a frozen copy of the initial weights, which each microbatch passes once more without gradient"


def describe_plan(plan: ParallelPlan) -> list[str]:
    """Lines that say all: the plan, the precision policy, the batch arithmetic, and why."""
    sharding = _describe_sharding(plan) if plan.shards else ""
    when = "each microbatch" if plan.reduce_gradients == "each" else "the last microbatch"
    reduction = f"; gradients reduced after {when}" if plan.dp_size > 1 or plan.num_shards > 1 else ""
    return [
        f"plan: {_describe_strategy(plan)} ({plan.show_degrees()}){sharding}{reduction}; "
        f"activation checkpointing {_describe_activations(plan)}; compile {'on' if plan.compile else 'off'}",
        _describe_precision(plan),
        *([] if plan.adapter is None else [describe_adapter_plan(plan.adapter, plan.precision.compute)]),
        *_describe_batch(plan),
        *(f"why: {line}" for line in plan.why),
    ]


def summarize_plan(plan: ParallelPlan) -> list[str]:
    """The lines of `describe_plan` that a run prints before its first step: what it does, not why, and warnings."""
    degrees = f" ({plan.name_degrees()})" if plan.num_peers > 1 else ""
    activations = _describe_activations(plan)
    saved = "" if activations == "none" else f"; activation checkpointing {activations}"
    policy = plan.precision
    is_usual = policy.rounding == "nearest" and policy.param == "float32" and not policy.float8
    chosen = [line for line in plan.why if " auto: " in line]
    return [
        f"plan: {_describe_strategy(plan)}{degrees}; computes in {policy.compute}{saved}; "
        f"compile {'on' if plan.compile else 'off'}",
        *([] if is_usual else [_describe_precision(plan)]),
        *([] if plan.adapter is None else [describe_adapter_plan(plan.adapter, policy.compute)]),
        *_describe_batch(plan),
        *(f"why: {line}" for line in plan.why if line not in chosen),
        *(["plan: its reasons and all settings are shown by --verbose and `echelon report`"] if chosen else []),
    ]


def describe_adapter_plan(adapter: AdapterPlan, compute: str) -> str:
    """The message about trained and frozen parameters; frozen ones are in the dtype `compute`."""
    whole = f", with {', '.join(adapter.saved)} trained in full" if adapter.saved else ""
    packed = f", {adapter.num_quantized_parameters:,} of them in 4 bits" if adapter.num_quantized_parameters else ""
    total = adapter.num_trained_parameters + adapter.num_frozen_parameters
    return (
        f"adapter: {adapter.method} of rank {adapter.r} at {', '.join((*adapter.targets, *adapter.experts))}{whole}: "
        f"{adapter.num_trained_parameters:,} of {total:,} parameters are trained "
        f"({adapter.num_trained_parameters / total:.2%}); the frozen ones are in {compute}{packed}"
    )


def _describe_precision(plan: ParallelPlan) -> str:
    policy = plan.precision
    rounding = "" if policy.rounding == "nearest" else f" ({policy.rounding} rounding)"
    compute = f"{policy.compute}, in float8 in linear layers" if policy.float8 else policy.compute
    moments = f"moments {policy.optimizer}" if plan.optimizer != "adamw_8bit" else "moments in 8 bits"
    return (
        f"precision: parameters {policy.param}, compute {compute}, reduction {policy.reduce}, "
        f"master weights {policy.master}{rounding}, optimizer {plan.optimizer} with {moments}"
    )


def _describe_batch(plan: ParallelPlan) -> list[str]:
    rank = "rank" if plan.num_peers == 1 else "data-parallel rank"
    share = plan.num_fill / plan.num_fed
    padding = f" - {count_noun(plan.num_fill, 'padding sequence')} ({share:.1%} of the computation is wasted)"
    return [
        f"batch: {count_noun(plan.global_batch_size, 'sequence')} = {count_noun(plan.num_readers, rank)} x "
        f"{count_noun(plan.num_microbatches, 'microbatch', 'es')} x {count_noun(plan.micro_batch_size, 'sequence')}"
        f"{padding if plan.num_fill else ''}",
        *([] if plan.rows_per_sequence == 1 else [_ROWS]),
        *([_REFERENCE] if plan.keeps_reference else []),
        *([_describe_teacher(plan)] if plan.num_teacher_parameters else []),
        *([_describe_reward_models(plan)] if plan.num_reward_parameters else []),
        *([] if plan.sync == SyncPlan() else [_describe_sync(plan)]),
    ]


def _describe_teacher(plan: ParallelPlan) -> str:
    return (
        f"teacher: {plan.num_teacher_parameters:,} frozen parameters, divided like the model's, which each microbatch "
        "passes without gradient"
    )


def _describe_reward_models(plan: ParallelPlan) -> str:
    return (
        f"reward: {plan.num_reward_parameters:,} frozen parameters of reward models, whole on each process that judges "
        f"answers, in {plan.precision.compute}"
    )


def _describe_sync(plan: ParallelPlan) -> str:
    """How replicas agree."""
    sync = plan.sync
    words = [sync.name]
    if sync.name == PARAMETER_SERVER:
        words += [
            count_noun(plan.num_replicas, "worker"),
            count_noun(sync.servers, "server"),
            f"aggregate {sync.aggregate}",
        ]
        if sync.max_staleness != 0:
            most = sync.max_staleness
            limit = "any number of steps" if most is None else f"at most {count_noun(most, 'step')}"
            words.append(f"staleness of {limit}")
        if sync.staleness_compensation:
            words.append(f"compensated with {sync.staleness_compensation:g}")
    elif plan.num_replicas > 1:
        words.append(f"{plan.num_replicas} replicas of {count_noun(plan.replica_size, 'process', 'es')}")
    if sync.name == QUORUM:
        words.append("the loss of a replica costs one repeated step")
    if sync.every > 1:
        words.append(f"every {sync.every} steps")
    if (sync.outer_learning_rate, sync.outer_momentum) != (1.0, 0.0):
        words.append(f"outer learning rate {sync.outer_learning_rate:g}, momentum {sync.outer_momentum:g}")
    if sync.overlap:
        words.append("sent during the next step")
    if sync.method != "none":
        words.append(f"gradients sent as {_describe_compression(sync)}")
    lossy = "" if sync.is_exact else "; lossy: the losses are not those of sync.name: every_step"
    return f"sync: {', '.join(words)}{lossy}"


def _describe_compression(sync: SyncPlan) -> str:
    if sync.method == "powersgd":
        return f"PowerSGD of rank {sync.rank}"
    if sync.method in ("topk", "randomk"):
        return f"the {'largest' if sync.method == 'topk' else 'a random'} {sync.fraction:.3g} of their values"
    return {"sign": "signs"}.get(sync.method, sync.method)


def _describe_strategy(plan: ParallelPlan) -> str:
    strategy = plan.strategy if plan.engine == NATIVE else f"{plan.strategy} by {plan.engine}"
    return f"{strategy} on {count_noun(plan.world_size, 'process', 'es')}"


def _describe_sharding(plan: ParallelPlan) -> str:
    parts = [f"; gathered parameters {'freed after use' if plan.reshard_after_forward else 'kept until backward'}"]
    if plan.prefetch is not None:
        parts.append(f"; {plan.prefetch} {'layer' if plan.prefetch == 1 else 'layers'} gathered ahead")
    if plan.cpu_offload:
        parts.append("; parameters and optimizer state in host memory")
    return "".join(parts)


def _describe_activations(plan: ParallelPlan) -> str:
    words = plan.activation_checkpointing if plan.checkpoint_every == 1 else f"of 1 in {plan.checkpoint_every} layers"
    if plan.activation_memory_budget is not None:
        words = f"by torch.compile within a memory budget of {plan.activation_memory_budget:g}"
    words += f", each MLP in {plan.mlp_tiles} tiles" * (plan.mlp_tiles > 1)
    if not plan.activation_offloading:
        return words
    ahead = plan.activation_loading_horizon
    loaded = "" if ahead == 1 else f", loaded {ahead} layers ahead"
    return f"{words}; activations in host memory{loaded}"
