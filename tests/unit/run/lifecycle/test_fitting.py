"""Finding a micro batch that fits, with an engine that runs out of memory at a given size."""

from types import SimpleNamespace

import pytest
import torch

from echelon.ground.errors import PlanError, is_out_of_memory
from echelon.learn.engines import Rehearsal
from echelon.learn.micro_batch import fit_micro_batch
from echelon.planner.memory_parts import MemoryParts
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe
from tests.unit.recipe_samples import RECIPE

PLAN = ParallelPlan("ddp", dp_replicate=8, micro_batch_size=6, num_microbatches=2, why=("chosen",))
PARTS = MemoryParts(1, 2, 3, 4, 5, 6)


def build_recipe(micro_batch_size="auto", **train):
    train = {"steps": 1, "global_batch_size": 96, "micro_batch_size": micro_batch_size, **train}
    return Recipe.model_validate(RECIPE | {"data": {"train": "text.txt", "sequence_len": 64}, "train": train})


def fit(largest, short=(3,), micro_batch_size="auto", plan=PLAN):
    """(the plan that is found, what was rehearsed). A microbatch is represented by its size."""
    tried = []

    def build(plan):
        def rehearse(microbatch, num_microbatches):
            assert microbatch == plan.micro_batch_size and num_microbatches == plan.num_microbatches
            tried.append((microbatch, num_microbatches))
            return Rehearsal(short=short if microbatch > largest else (), memory=PARTS)

        return SimpleNamespace(plan=plan, rehearse=rehearse)

    def rehearse(engine, plan):
        return engine.rehearse(plan.micro_batch_size, plan.num_microbatches)

    engine, found, memory = fit_micro_batch(build, rehearse, build_recipe(micro_batch_size), plan)
    assert memory is PARTS
    assert (engine.plan.micro_batch_size, engine.plan.num_microbatches) == tried[-1]
    return found, tried


def test_a_plan_that_fits_is_unchanged():
    assert fit(6) == (PLAN, [(6, 2)])


def test_sizes_are_halved_to_divisors_of_the_global_batch(caplog):
    plan, tried = fit(2)
    assert tried == [(6, 2), (3, 4), (1, 12)]
    assert plan.micro_batch_size == 1 and plan.global_batch_size == PLAN.global_batch_size
    line = (
        "micro_batch_size auto: halved to 1, because rank 3 ran out of memory with 6 in the rehearsal of a step; "
        "a step has 12 microbatches now"
    )
    assert plan.why == ("chosen", line) and caplog.messages == [line]


@pytest.mark.parametrize(
    ("short", "named"),
    [
        ((3,), "rank 3"),
        ((0, 2), "ranks 0, 2"),
        ((0, 1, 2, 4, 5, 7), "ranks 0, 1, 2, 4 and 2 more"),
        (tuple(range(8)), "each rank"),
    ],
)
def test_a_given_micro_batch_is_refused_with_one_that_fits(short, named):
    with pytest.raises(PlanError) as caught:
        fit(5, short, micro_batch_size=6)
    assert str(caught.value) == (
        f"train.micro_batch_size=6: {named} ran out of memory in the rehearsal of a step; set "
        "train.micro_batch_size=3, which fits, or auto."
    )


def fit_policies(fitting, activation_checkpointing="auto", micro_batch_size="auto", size=2):
    """What was rehearsed, and the plan, where only the policies in `fitting` fit."""
    tried = []

    def rehearse(plan, _):
        tried.append((plan.activation_checkpointing, plan.micro_batch_size))
        return Rehearsal(short=() if plan.activation_checkpointing in fitting else (3,), memory=PARTS)

    recipe = build_recipe(micro_batch_size, activation_checkpointing=activation_checkpointing)
    plan = ParallelPlan("fsdp", dp_shard=8, micro_batch_size=size, num_microbatches=12 // size)
    _, found, _ = fit_micro_batch(lambda plan: plan, rehearse, recipe, plan)
    return tried, found


def test_less_is_kept_where_one_sequence_does_not_fit():
    tried, plan = fit_policies(["full"])
    assert tried == [("none", 2), ("none", 1), ("selective", 1), ("full", 1)]
    assert plan.activation_checkpointing == "full" and plan.num_microbatches == 12
    assert plan.why[-1] == (
        "activation_checkpointing auto: full, because rank 3 ran out of memory with none in the rehearsal of a step"
    )
    tried, plan = fit_policies(["selective"], micro_batch_size=2)  # a size that the recipe sets is kept
    assert tried == [("none", 2), ("selective", 2)] and plan.micro_batch_size == 2
    with pytest.raises(PlanError, match="even with a micro batch of 1"):
        fit_policies(["full"], activation_checkpointing="none")


def test_one_sequence_that_does_not_fit_is_refused_with_advice():
    with pytest.raises(PlanError) as caught:
        fit(0)
    assert str(caught.value) == (
        "train.micro_batch_size=auto: rank 3 ran out of memory in the rehearsal of a step, even with a micro batch of "
        "1 sequence; set train.activation_checkpointing=full, shard the parameters with parallel=fsdp, use more "
        "processes, or shorten data.sequence_len=64."
    )
    with pytest.raises(PlanError, match="1 sequence; use more processes, or shorten"):
        fit(0, plan=ParallelPlan("fsdp", dp_shard=8, micro_batch_size=2, activation_checkpointing="full"))


def test_errors_of_every_allocator_are_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46)
    wrapped = RuntimeError("in a compiled layer")
    wrapped.__cause__ = caught.value
    for error in (caught.value, wrapped, MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("std::bad_alloc")):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shapes differ"), ValueError("can't allocate memory"), OSError(28, "no space")):
        assert not is_out_of_memory(error)
