"""The planner's part of a pipeline: layers of each stage, microbatches, the bubble, and what a stage keeps."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.axes.pipeline import (
    balance_layers,
    choose_stages,
    fits_schedule,
    head_cost,
    list_loads,
    predict_waiting,
)
from echelon.planner.axes.pipeline_schedule import StageTime, microbatches_kept, passes_deferred, waiting_share
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import Accelerator, Cluster
from echelon.planner.memory import estimate_memory
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from tests.families import small_config

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
COUNTS = [(2, 4), (2, 6), (4, 4), (4, 8), (4, 16)]


def build_recipe(parallel, **sections):
    train = {"steps": 4, "global_batch_size": 64, "precision": "fp32", **sections.pop("train", {})}
    given = {
        "run": {"name": "r"}, "model": {"config": small_config("llama")}, "tokenizer": "bytes",
        "data": {"train": "text.txt", "sequence_len": 64}, "train": train, "parallel": parallel,
        "optim": {"learning_rate": 1e-3},
    }  # fmt: skip
    return Recipe.model_validate({**given, **sections})


def cpus(count):
    machine = Accelerator("cpu", memory_bytes=2**34, bf16_flops=None, fp32_flops=None, memory_bandwidth=None, source="")
    return Cluster(machine, num_devices=count, devices_per_node=count, kind="cpu")


def shape_of(layers=8, **fields):
    return build_shape(small_config("llama", num_hidden_layers=layers, **fields))


def best_balance(num_layers, count, last_cost):
    """The cost of the slowest stage, over all ways to cut the layers."""
    cuts = itertools.combinations(range(1, num_layers), count - 1)
    sizes = ([stop - start for start, stop in itertools.pairwise((0, *each, num_layers))] for each in cuts)
    return min(max(*each[:-1], each[-1] + last_cost) for each in sizes)


@pytest.mark.parametrize("last_cost", [0.0, 0.4, 1.0, 2.7, 30.0])
@pytest.mark.parametrize(("num_layers", "count"), [(2, 2), (7, 3), (8, 4), (12, 4), (13, 5)])
def test_no_other_cut_has_a_faster_slowest_stage(num_layers, count, last_cost):
    sizes = balance_layers(num_layers, count, last_cost)
    assert (len(sizes), sum(sizes), min(sizes) >= 1) == (count, num_layers, True)
    assert max(*sizes[:-1], sizes[-1] + last_cost) == best_balance(num_layers, count, last_cost)


def test_the_head_of_a_large_vocabulary_takes_layers_from_the_last_stage():
    small, large = shape_of(vocab_size=256), shape_of(vocab_size=8192)
    assert choose_stages(small, 2, "1f1b", 64) == (4, 4)
    # 6 * 8192 * 64 FLOPs against 6 * 36,992 + 12 * 64 * 64 for a layer: the head costs 11.6 layers.
    assert head_cost(large, 64) == pytest.approx(6 * 8192 * 64 / (6 * 36_992 + 12 * 64 * 64))
    assert choose_stages(large, 2, "1f1b", 64) == (7, 1)
    assert choose_stages(small, 2, "interleaved", 64) == (2, 2, 2, 2)


def order_of(schedule, ranks, per_rank, count):
    """What each rank computes, in PyTorch's order: (kind, stage, microbatch), kind F, B, I or W."""
    kinds = {"interleaved": schedules.ScheduleInterleaved1F1B, "zero_bubble": schedules.ScheduleInterleavedZeroBubble}
    if schedule in kinds:
        stages = [
            SimpleNamespace(
                num_stages=ranks * per_rank, group_size=ranks, group_rank=0, stage_index=place * ranks, submod=None
            )
            for place in range(per_rank)
        ]
        order = kinds[schedule](stages, count).pipeline_order
        return {
            rank: [
                (KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in actions if a is not None
            ]
            for rank, actions in order.items()
        }
    order = {}
    for rank in range(ranks):
        ahead = count if schedule == "gpipe" else min(count, ranks - rank)
        forward = [("F", rank, index) for index in range(count)]
        backward = [("B", rank, index) for index in range(count)]
        later = [each for pair in zip(backward, forward[ahead:], strict=False) for each in pair]
        order[rank] = forward[:ahead] + later + backward[count - ahead :]
    return order


def simulate(order, num_stages):
    """The time each rank works and the time the step takes: F, I and W take 1, a whole backward pass B takes 2."""
    seconds = {"F": 1, "B": 2, "I": 1, "W": 1}
    done, clock, next_action = {}, dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    while any(next_action[rank] < len(order[rank]) for rank in order):
        moved = False
        for rank, actions in order.items():
            while next_action[rank] < len(actions):
                kind, stage, index = actions[next_action[rank]]
                needs = {"F": ("F", stage - 1, index), "W": ("I", stage, index)}.get(kind, ("I", stage + 1, index))
                if 0 <= needs[1] < num_stages and needs not in done:
                    break
                clock[rank] = max(clock[rank], done.get(needs, 0)) + seconds[kind]
                done["I" if kind == "B" else kind, stage, index] = clock[rank]
                next_action[rank] += 1
                moved = True
        assert moved, "a rank waits for ever"
    return max(clock.values()), sum(seconds[kind] for kind, _, _ in order[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), COUNTS)
def test_equal_stages_wait_as_long_as_the_papers_of_the_schedules_say(schedule, ranks, count):
    """GPipe, 1F1B, its interleaved form and ZB-H1, and a simulation of the actions that PyTorch lists."""
    for per_rank in (1, 2) if schedule in ("interleaved", "zero_bubble") else (1,):
        total, busy = simulate(order_of(schedule, ranks, per_rank, count), ranks * per_rank)
        work = per_rank * count * (3 if schedule == "zero_bubble" else 1)
        predicted = waiting_share(schedule, ranks, [StageTime(1.0, 1.0, 1.0)] * (ranks * per_rank), count)
        assert predicted == pytest.approx(1 - busy / total, abs=1e-4), (per_rank, total, busy)
        assert predicted == pytest.approx((ranks - 1) / (work + ranks - 1), abs=1e-4)


def test_unequal_stages_wait_longer():
    """Two stages of 1 and 3 layers and 4 microbatches, by hand: a step takes one forward pass of the first stage, four
    passes of the second and a backward pass of the first: 1 + 4 * 9 + 2 = 39 units, in which both work 4 * 3 + 4 * 9.
    """
    plan = ParallelPlan("pp", pp=2, schedule="1f1b", stages=(1, 3), num_microbatches=4)
    free = replace(shape_of(), vocab_size=0)  # whose head costs nothing
    assert predict_waiting(free, replace(plan, sequence_len=64)) == pytest.approx(1 - 48 / (2 * 39), abs=1e-4)
    assert predict_waiting(free, replace(plan, stages=(2, 2), sequence_len=64)) == pytest.approx(1 / 5, abs=1e-4)
    assert predict_waiting(shape_of(vocab_size=8192), replace(plan, stages=(2, 2), sequence_len=64)) > 1 / 5
    assert predict_waiting(free, ParallelPlan("ddp", sequence_len=64)) == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), COUNTS)
def test_a_stage_keeps_no_more_microbatches_than_planned(schedule, ranks, count):
    for per_rank in (1, 2) if schedule in ("interleaved", "zero_bubble") else (1,):
        for rank, actions in order_of(schedule, ranks, per_rank, count).items():
            kept, most = 0, 0
            for kind, _, _ in actions:
                kept += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
                most = max(most, kept)
            planned = microbatches_kept(schedule, ranks, rank, per_rank, count)
            assert most <= per_rank * planned < most + per_rank


@pytest.mark.parametrize(("ranks", "count"), [*COUNTS, (4, 2), (3, 9)])
def test_the_gradients_of_weights_wait_as_long_as_in_pytorchs_order(ranks, count):
    for per_rank in (1, 2):
        if not fits_schedule("zero_bubble", ranks, count):
            continue
        for rank, actions in order_of("zero_bubble", ranks, per_rank, count).items():
            waiting, most = 0, 0
            for kind, stage, _ in actions:
                waiting += {"F": 0, "I": 1, "W": -1}[kind] * (stage > 0)  # the first stage does both at once
                most = max(most, waiting)
            assert passes_deferred("zero_bubble", rank, per_rank, count) == most


def is_taken(schedule, ranks, count):
    """Whether PyTorch builds its schedule for this number of microbatches."""
    stage = SimpleNamespace(num_stages=ranks, group_size=ranks, group_rank=0, stage_index=0, submod=None)
    kinds = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B,
             "interleaved": schedules.ScheduleInterleaved1F1B,
             "zero_bubble": schedules.ScheduleInterleavedZeroBubble}  # fmt: skip
    try:
        kinds[schedule](stage if schedule in ("gpipe", "1f1b") else [stage], count)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_numbers_of_microbatches_are_those_that_pytorch_takes(schedule):
    for ranks, count in itertools.product((2, 3, 4), range(1, 20)):
        assert fits_schedule(schedule, ranks, count) == is_taken(schedule, ranks, count), (ranks, count)


def test_the_micro_batch_is_the_largest_that_leaves_enough_microbatches():
    plan = resolve_plan(build_recipe({"pp": 2}), shape_of(), cpus(2))
    assert (plan.num_microbatches, plan.micro_batch_size, plan.stages, plan.schedule) == (8, 8, (4, 4), "1f1b")
    given = resolve_plan(build_recipe({"pp": 2, "microbatches": 16}), shape_of(), cpus(2))
    assert (given.num_microbatches, given.micro_batch_size) == (16, 4)
    last = 4 + head_cost(shape_of(), 64)  # a step is a first stage's passes and eight of the last: 3 * 4 + 24 * last
    waits = 1 - 24 * (4 + last) / (2 * (3 * 4 + 24 * last))
    assert f"pipeline: stages of 4 and 4 layers, 8 microbatches in a step; by its schedule 1f1b, the processes wait " \
        f"for others in {waits:.1%} of a step" in plan.why  # fmt: skip


@pytest.mark.parametrize(
    ("error", "parallel", "sections", "words"),
    [
        (PlanError, {"microbatches": 3}, {}, ("microbatches=3 does not divide the 64 sequences", "use 1, 2, 4 or 8")),
        (ConfigError, {"microbatches": 8}, {"train": {"micro_batch_size": 8}}, ("both divide a step; remove one",)),
        (PlanError, {}, {"train": {"micro_batch_size": 64}}, ("1f1b with parallel.pp=2 does not take a step of 1",)),
        (ConfigError, {}, {"objective": {"name": "dpo"}}, ("objective.name=dpo does not work with parallel.pp=2",)),
        (ConfigError, {"reduce_gradients": "each"}, {}, ("reduce_gradients=each does not work",)),
        (ConfigError, {"reshard_after_forward": True}, {}, ("reshard_after_forward=true does not work",)),
        (ConfigError, {"schedule": "zero_bubble"}, {"train": {"compile": True}}, ("cannot split the backward pass",)),
        *((ConfigError, {"schedule": "zero_bubble"}, {"train": {"activation_checkpointing": given}},
           (f"train.activation_checkpointing={shown} does not work with parallel.schedule=zero_bubble",
            "train.activation_checkpointing=none"))
          for given, shown in (("selective", "selective"), ("full", "full"), ({"every": 2}, '{"every": 2}'))),
        (ConfigError, {}, {"adapter": {"method": "lora", "init": "pissa"}}, ("adapter.init=pissa does not work",)),
    ],
)  # fmt: skip
def test_what_a_pipeline_cannot_do_is_refused_with_the_reason(error, parallel, sections, words):
    with pytest.raises(error) as raised:
        resolve_plan(build_recipe({"pp": 2, **parallel}, **sections), shape_of(), cpus(2))
    assert all(each in str(raised.value) for each in words), str(raised.value)


def test_interleaving_needs_as_many_layers_as_stages():
    with pytest.raises(ConfigError, match=r"puts 2 stages on each of the 4 processes .* only 6 decoder layers"):
        resolve_plan(build_recipe({"pp": 4, "schedule": "interleaved"}), shape_of(6), cpus(4))


def test_the_loads_of_all_stages_are_the_model_and_a_tied_head_twice():
    for tied in (False, True):
        shape = build_shape(small_config("llama", tied, num_hidden_layers=8))
        plan = resolve_plan(build_recipe({"pp": 4}), shape, cpus(4))
        loads = list_loads(shape, plan, hidden_bytes=0)
        total = sum(each.shape.num_parameters for each in loads)
        assert total == shape.num_parameters + tied * shape.num_embedding_parameters
        assert [each.num_kept for each in loads] == [4, 3, 2, 1]
        assert [each.has_head for each in loads] == [False, False, False, True]


def test_a_stage_needs_the_memory_of_its_layers():
    """fp32 AdamW on one process of four: 8 bytes of moments, 4 of weights and of gradients, per parameter."""
    shape = shape_of(8, vocab_size=8192)
    needs = estimate_memory(shape, resolve_plan(build_recipe({"pp": 2, "stages": [4, 4]}), shape, cpus(2)), "cpu")
    last = 4 * 36_992 + 64 + 8192 * 64
    assert needs.optimizer == 8 * last
