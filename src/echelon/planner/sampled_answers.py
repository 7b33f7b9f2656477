"""The answers of a step: how many a rank samples at once, and the seconds until all are there."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echelon.ground.sizes import count_noun, render_bytes
from echelon.planner.axes.table import LAYER_AXES
from echelon.planner.collectives import find_group
from echelon.planner.hardware.accelerators import DeviceKind
from echelon.planner.layer_time import LayerTime, Step, head_time, launch_time, layer_time
from echelon.planner.memory import estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import DTYPE_BYTES, SHARDING, ParallelPlan, RolloutPlan

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

# Passes over the keys and values for each token: they are copied when it is added, and read by attention.
_CACHE_PASSES = 3


def add_rollout(
    plan: ParallelPlan, recipe: "Recipe", shape: ModelShape, kind: DeviceKind, usable: float | None
) -> ParallelPlan:
    """Return the plan with the rollout of the recipe, if it has one.

    As many answers are sampled at once as fit beside the weights and the optimizer's state: at least one, and at most
    `rollout.max_num_seqs`.

    Args:
        usable: bytes of a device; None if unknown.
    """
    if not recipe.samples_answers:
        return replace(plan, rollout=None)
    config, most = recipe.rollout, plan.num_read
    rows = most if config.max_num_seqs == "auto" else min(most, config.max_num_seqs)
    group_size = config.group_size if recipe.draws_answers else 1
    turns = 1 if config.environment is None else config.environment.max_turns
    tokens = min(turns * config.max_new_tokens, plan.sequence_len - 1)
    rollout = RolloutPlan(group_size, tokens, config.updates, 1, config.sampler)
    if usable is not None:
        needs = estimate_memory(shape, replace(plan, rollout=rollout), kind)
        room = usable - (needs.states - needs.gradients)
        rows = max(1, min(rows, int(room / max(1, needs.answers))))
    return replace(plan, rollout=replace(rollout, max_num_seqs=rows))


def describe_rollout(plan: ParallelPlan, recipe: "Recipe", shape: ModelShape, kind: DeviceKind) -> list[str]:
    """Return the line about the answers that a rank samples at once."""
    if plan.rollout is None:
        return []
    rollout = plan.rollout
    needs = estimate_memory(shape, plan, kind)
    rest = "without a cache, because of parallel.pp" if plan.stages else "with their keys and values"
    return [
        f"rollout: {rollout.max_num_seqs} of the {count_noun(plan.num_read, 'answer')} of each rank are sampled at "
        f"once, {rest} in {render_bytes(needs.answers)}, before there are gradients and activations"
    ]


@dataclass(frozen=True)
class TokenTime:
    """Seconds of a pass that adds one token to each answer that is sampled at once.

    Attributes:
        products: matrix products, norms and activations.
        weights: reading the weights, beside the products.
        cache: reading and copying keys and values.
        sent: communication: parts of layers, and gathered weights.
        host: launching the operations of the layers, which are not compiled.
        ends: the embedding, the head, and drawing from the scores.
        waits: whether the device waits while the host launches, as a CPU does.
    """

    products: float
    weights: float
    cache: float
    sent: float
    host: float
    ends: float
    waits: bool

    @property
    def total(self) -> float:
        """Seconds of the pass."""
        computed = max(self.products, self.weights) + self.cache
        return (computed + self.host if self.waits else max(computed, self.host)) + self.sent + self.ends

    @property
    def limit(self) -> str:
        """What takes the longest, in a few words."""
        parts = {
            "matrix products": self.products,
            "reading the weights": self.weights,
            "keys and values": self.cache,
            "the network": self.sent,
            "launching operations": self.host,
            "the head": self.ends,
        }
        return max(parts, key=lambda name: parts[name])


def sampling_seconds(step: Step) -> float:
    """Return the seconds of a step's answers, if each has `max_new_tokens` and each prompt the rest of the sequence.

    The layers run uncompiled, and one pass continues `max_num_seqs` answers. A plan without a cache (`pp`) computes
    whole sequences again for each token.
    """
    plan, rollout = step.plan, _rollout_of(step)
    num_turns, rows = _divide_answers(step)
    num_passes = num_turns * rollout.max_new_tokens
    if plan.stages:
        return num_passes * _forward_seconds(step, rows, plan.sequence_len)
    num_prompts = -(-plan.num_read // rollout.group_size)
    prompt_len = max(1, plan.sequence_len - rollout.max_new_tokens)
    return num_passes * time_token(step).total + _forward_seconds(step, num_prompts, prompt_len)


def describe_sampling(step: Step) -> str:
    """Return what the seconds of the answers take for granted."""
    lengths = f"answers have {_rollout_of(step).max_new_tokens} tokens each, the most, and rewards take no time"
    if step.plan.stages:
        return lengths
    token, rows = time_token(step), count_noun(_divide_answers(step)[1], "answer")
    return f"{lengths}; a token of {rows} takes {1000 * token.total:.3g} ms, most of it for {token.limit}"


def time_token(step: Step) -> TokenTime:
    """Return the seconds of a pass that adds one token to each row of the cache."""
    rollout, plan, part, count = _rollout_of(step), step.plan, step.part, step.shape.num_layers
    policy = plan.precision
    rows, number = _divide_answers(step)[1], DTYPE_BYTES[policy.compute]
    sized = _resize(step, rows, 1)
    layer, head, launch = layer_time(sized), head_time(sized), launch_time(sized)
    read = DTYPE_BYTES[policy.param] + 2 * number if plan.uses_autocast else number  # autocast casts them again
    mean_len = plan.sequence_len - rollout.max_new_tokens / 2
    cached = _CACHE_PASSES * rows * mean_len * 2 * part.num_kv_heads * part.head_dim * number
    head_read = part.hidden_size * part.vocab_size * number / step.bandwidth
    return TokenTime(
        products=count * layer.forward,
        weights=count * part.num_layer_parameters * read / step.bandwidth,
        cache=count * cached / step.bandwidth,
        sent=count * _sent_seconds(sized, layer),
        host=count * launch.layer / 2,
        ends=max(head.forward, head_read) + launch.head / 2,
        waits=step.rates.waits_for_host,
    )


def _divide_answers(step: Step) -> tuple[int, int]:
    """Return how often answers are sampled at once, and how many each time."""
    num_turns = -(-step.plan.num_read // _rollout_of(step).max_num_seqs)
    return num_turns, -(-step.plan.num_read // num_turns)


def _rollout_of(step: Step) -> RolloutPlan:
    assert step.plan.rollout is not None, "the plan samples answers"
    return step.plan.rollout


def _forward_seconds(step: Step, rows: int, length: int) -> float:
    """Seconds of an uncompiled forward pass through all layers."""
    sized = _resize(step, rows, length)
    layer = layer_time(sized)
    return step.shape.num_layers * (layer.forward + _sent_seconds(sized, layer)) + head_time(sized).forward


def _sent_seconds(step: Step, layer: LayerTime) -> float:
    """Exposed communication of one layer of a forward pass: half of that of both passes, and its gathered weights."""
    plan = step.plan
    inside = sum(axis.layer_seconds(step, layer) for axis in LAYER_AXES) / 2
    if not plan.reshard_after_forward:
        return inside
    gathered = step.part.num_layer_parameters * plan.gathered_bytes
    measured = step.cluster.known_links.inside.gather
    gather = find_group(plan, step.cluster, SHARDING).all_gather(gathered, measured)
    return inside + step.exposed(gather, layer.forward)


def _resize(step: Step, rows: int, length: int) -> Step:
    """The step with one uncompiled microbatch of this size."""
    uncompiled = replace(step.plan, compile=False, activation_checkpointing="none")
    plan = replace(uncompiled, sequence_len=length, micro_batch_size=rows, num_microbatches=1, rows_per_sequence=1)
    return replace(step, plan=plan, software=replace(step.software, fused=False))
