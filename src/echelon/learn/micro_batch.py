"""Rehearses the first step of a training, and halves the micro batch or keeps less until it fits in memory."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from echelon.ground.errors import PlanError
from echelon.learn.data.feed import find_batch_place, like_source
from echelon.learn.data.loader import Microbatch, choose_padding
from echelon.learn.data.prepared import PreparedData
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.engines import Engine, EngineSpec, Rehearsal, build_engine
from echelon.learn.evaluation import read_in_order
from echelon.learn.model.adapters import find_new_tokens
from echelon.learn.objectives.objective import build_objective
from echelon.planner.activations import list_activations
from echelon.planner.memory_parts import MemoryParts
from echelon.planner.model_shape import divisors
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe

logger = logging.getLogger(__name__)

_NAMED_RANKS = 4


def build_rehearsed(
    recipe: Recipe, spec: EngineSpec, data: PreparedData, is_known: bool = False
) -> tuple[Engine, ParallelPlan, MemoryParts | None]:
    """Build an engine, and rehearse a step of the recipe's objective with it: see `fit_micro_batch`. Collective.

    `is_known`: whether a step of this plan has already run in this job, and is not rehearsed again.
    """
    objective = build_objective(recipe.objective)
    new_tokens = find_new_tokens(recipe, data.tokenizer)
    spec = replace(spec, new_token_ids=new_tokens, needs_reference=objective.needs_reference)

    def build(plan: ParallelPlan) -> Engine:
        return build_engine(replace(spec, plan=plan))

    def rehearse(engine: Engine, plan: ParallelPlan) -> Rehearsal:
        sequences = read_widest(data, plan, spec.meshes, plan.micro_batch_size).to(spec.device)
        microbatch = like_source(sequences, recipe, data, find_batch_place(recipe, plan, spec.meshes))
        return engine.rehearse(microbatch, plan.num_microbatches, objective)

    if is_known:
        return build(spec.plan), spec.plan, None
    return fit_micro_batch(build, rehearse, recipe, spec.plan)


def read_widest(data: PreparedData, plan: ParallelPlan, meshes: Meshes, num_sequences: int) -> Microbatch:
    """Return this rank's part of the first training sequences, as wide as any microbatch of the plan."""
    padding = replace(choose_padding(plan), is_equal=True)
    return read_in_order(data.train, 0, num_sequences, data.train.num_samples, padding).cut(meshes.sequence_part)


def fit_micro_batch(
    build: Callable[[ParallelPlan], Engine],
    rehearse: Callable[[Engine, ParallelPlan], Rehearsal],
    recipe: Recipe,
    plan: ParallelPlan,
) -> tuple[Engine, ParallelPlan, MemoryParts | None]:
    """Return a rehearsed engine, its plan, and the memory that was measured.

    The plan is the given one, or has a smaller micro batch if that was chosen by auto, or keeps fewer activations if
    that was.

    The engine is built anew for each plan, because an error leaves `fully_shard` and DDP in an undefined state.
    Collective: all ranks try the same plans.

    Args:
        build: builds the engine of a plan with initial weights.
        rehearse: runs a step of the plan with an engine, as `Engine.rehearse` does.

    Raises:
        PlanError: a rank runs out of memory with 1 sequence, or with the micro batch that the recipe sets.
    """
    engine, fitting, first_short = build(plan), plan, ""
    while (rehearsal := rehearse(engine, fitting)).short:
        first_short = first_short or _name_ranks(rehearsal.short, plan.world_size)
        smaller = _shrink(recipe, fitting)
        if smaller is None:
            raise PlanError(_advise(recipe, plan, first_short))
        del engine
        _free_memory(plan)
        fitting = smaller
        engine = build(fitting)
    if fitting is plan:
        return engine, plan, rehearsal.memory
    tried, fits = plan.micro_batch_size, fitting.micro_batch_size
    if fits < tried and recipe.train.micro_batch_size != "auto":
        raise PlanError(
            f"train.micro_batch_size={tried}: {first_short} ran out of memory in the rehearsal of a step; set "
            f"train.micro_batch_size={fits}, which fits, or auto."
        )
    lines = []
    if fits < tried:
        lines.append(
            f"micro_batch_size auto: halved to {fits}, because {first_short} ran out of memory with {tried} in the "
            f"rehearsal of a step; a step has {fitting.num_microbatches} microbatches now"
        )
    if fitting.activation_checkpointing != plan.activation_checkpointing:
        lines.append(
            f"activation_checkpointing auto: {fitting.activation_checkpointing}, because {first_short} ran out of "
            f"memory with {plan.activation_checkpointing} in the rehearsal of a step"
        )
    for line in lines:
        logger.warning(line)
    return engine, replace(fitting, why=(*plan.why, *lines)), rehearsal.memory


def _shrink(recipe: Recipe, plan: ParallelPlan) -> ParallelPlan | None:
    """The next plan to try: halves micro batches first if they are auto; None if nothing is left to try."""
    names = [kept.policy for kept in list_activations(recipe)]
    after = dict(pairwise(names)).get(plan.activation_checkpointing)
    if plan.micro_batch_size > 1 and (recipe.train.micro_batch_size == "auto" or after is None):
        return _halve(plan)
    return None if after is None else replace(plan, activation_checkpointing=after)


def _halve(plan: ParallelPlan) -> ParallelPlan:
    """The same global batch with at most half the micro batch: 6 becomes 3, and 3 becomes 1."""
    size = max(divisor for divisor in divisors(plan.micro_batch_size) if 2 * divisor <= plan.micro_batch_size)
    return replace(plan, micro_batch_size=size, num_microbatches=plan.num_microbatches * plan.micro_batch_size // size)


def _free_memory(plan: ParallelPlan) -> None:
    if plan.compile:
        torch.compiler.reset()
    gc.collect()  # modules and their hooks refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _name_ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "each rank"
    named = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"


def _advise(recipe: Recipe, plan: ParallelPlan, who: str) -> str:
    ways = ", ".join((*_find_ways(plan), "use more processes"))
    return (
        f"train.micro_batch_size={recipe.train.micro_batch_size}: {who} ran out of memory in the rehearsal of a step, "
        f"even with a micro batch of 1 sequence; {ways}, or shorten data.sequence_len={recipe.data.sequence_len}."
    )


def _find_ways(plan: ParallelPlan) -> Iterator[str]:
    if plan.activation_checkpointing != "full" or plan.checkpoint_every > 1:
        yield "set train.activation_checkpointing=full"
    if not plan.uses_fully_shard:
        yield "shard the parameters with parallel=fsdp"
