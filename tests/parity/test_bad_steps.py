"""Bad steps on real ranks: passed over, gone back from, or diagnosed; and what a resume makes of them."""

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from echelon.ground.errors import TrainingError
from echelon.learn.engines.native import NativeEngine
from echelon.learn.model.sharding import local_part
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.recipe.load import load_recipe
from echelon.run.training.training_step import TrainingStep
from tests.parity.training import (
    LOSS,
    NORM,
    PlantedWorkers,
    Row,
    difference,
    equal_tensors,
    masked_trainer,
    prepare,
    tensors_of,
    train,
    train_rank,
    with_ranks,
)

pytestmark = pytest.mark.dist

CORRUPT = "model.layers.1.self_attn.o_proj"
EXACT = ("step", "tokens", "target_tokens", "loss", "grad_norm", "learning_rate", "batch_hash", "skipped")
DISTRIBUTED = [with_ranks(Row("ddp"), 2, micro_batch=2), with_ranks(Row("fsdp"), 2, micro_batch=2)]
NO_ROUTER_LOSS = (("router_aux_loss_coef", 0.0),)
DIVIDED = [
    Row({"pp": 2}, 2, micro_batch=2),
    Row({"tp": 2}, 2, micro_batch=2),
    Row({"tp": 2, "sequence_parallel": True}, 2, micro_batch=2),
    Row({"cp": 2}, 2, micro_batch=2),
    Row({"dp_shard": 2, "ep": 2}, 2, micro_batch=2, family="mixtral", fields=NO_ROUTER_LOSS),
]
SLOW = [pytest.param(row, marks=pytest.mark.slow) for row in (DISTRIBUTED[0], *DIVIDED)]
PLANS = [Row(micro_batch=4), DISTRIBUTED[1], *SLOW]


class PowerCut(Exception):
    """The process is gone."""


def poison(factors):
    """Steps, counted from 1, whose gradients come out of the backward pass multiplied: their batches are bad."""
    forward_backward = NativeEngine.forward_backward

    def poisoned(engine, step, *arguments):
        loss = forward_backward(engine, step, *arguments)
        for parameter in engine.decoder.parameters():
            local_part(parameter.grad).mul_(factors.get(str(step + 1), 1.0))
        return loss

    return mock.patch.object(NativeEngine, "forward_backward", poisoned)


def spoil(number):
    """A step of which one sample, that with the smallest number, has a loss that is not a number."""
    forward_backward, loss_sum = NativeEngine.forward_backward, CausalLM.loss_sum
    spoiled = []

    def note(engine, step, microbatches, *arguments):
        if step + 1 == number and not spoiled:
            least = torch.tensor(min(int(each.sample_ids.min()) for each in microbatches))
            dist.all_reduce(least, dist.ReduceOp.MIN)
            spoiled.append(int(least))
        return forward_backward(engine, step, microbatches, *arguments)

    def lose(objective, outputs, batch):
        loss = loss_sum(objective, outputs, batch)
        return loss * math.nan if set(spoiled) & set(batch.sample_ids.tolist()) else loss

    stack = ExitStack()
    stack.enter_context(mock.patch.object(NativeEngine, "forward_backward", note))
    stack.enter_context(mock.patch.object(CausalLM, "loss_sum", lose))
    return stack


def corrupt(number, times):
    """A weight of one rank that loses its value before a step, the first few times that it comes: broken memory."""
    call = TrainingStep.__call__
    left = [times]

    def corrupted(train_step, step, is_suppressed, measure):
        weight = dict(train_step.learner.engine.decoder.named_parameters()).get(f"{CORRUPT}.weight")
        if step + 1 == number and left[0] and weight is not None and train_step.learner.meshes.data_rank == 0:
            left[0] -= 1
            local_part(weight.detach()).view(-1)[:1].fill_(math.nan)
        return call(train_step, step, is_suppressed, measure)

    return mock.patch.object(TrainingStep, "__call__", corrupted)


def cut_power(number):
    """The end of the process as this step begins for the second time."""
    call = TrainingStep.__call__
    times = [0]

    def cut(train_step, step, is_suppressed, measure):
        times[0] += step + 1 == number
        if times[0] == 2:
            raise PowerCut
        return call(train_step, step, is_suppressed, measure)

    return mock.patch.object(TrainingStep, "__call__", cut)


def train_with_faults(rank, world_size, path, plan, stop_at, faults):
    """Train; what it raised, as text."""
    patches = {"poison": poison, "spoil": spoil, "corrupt": lambda value: corrupt(*value), "cut_power": cut_power}
    with ExitStack() as stack:
        for name, value in json.loads(faults).items():
            stack.enter_context(patches[name](value))
        try:
            train_rank(rank, world_size, path, plan, stop_at, "")
        except (TrainingError, PowerCut) as error:
            return str(error) or type(error).__name__
    return None


def plant(pool, **faults):
    return PlantedWorkers(pool, train_with_faults, json.dumps(faults))


def with_fault(row, every_steps=2, **fault):
    changes = {"fault": fault, "checkpoint": {"every": every_steps}, "optim": {"weight_decay": 0.0}}
    return replace(row, changes=changes)


def trained(rows):
    return [tuple(each[key] for key in EXACT) for each in rows if each["kind"] == "train"]


def events(folder, name):
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def plain_loop(rank, world_size, path, plan, without):
    """The same training as a loop over PyTorch's own parts, on one process, these steps left out; its weights."""
    with masked_trainer(rank, world_size, path, plan) as trainer:
        model, config = trainer.train_step.learner.engine.decoder, load_recipe(Path(path))[0].optim
        optimizer = torch.optim.AdamW(model.parameters(), betas=config.betas, eps=config.eps, weight_decay=0.0)
        for step in range(trainer.num_steps):
            batch = trainer.train_step.loader.batch(step)
            if step + 1 in without:
                continue
            total, count = 0.0, 0
            for microbatch in batch.microbatches:
                logits = model(input_ids=microbatch.input_ids).logits.flatten(0, 1)
                labels = microbatch.labels.flatten()
                total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                count += int((labels != -100).sum())
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.param_groups[0]["lr"] = trainer.train_step.schedule(step)
            optimizer.step()
            optimizer.zero_grad()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def plain(workers, text, tmp_path_factory):
    """A function from a row to the weights of the plain loop over 8 steps of its model, 3 and 6 left out."""

    @cache
    def run(row):
        path, plan = prepare(with_fault(row), tmp_path_factory.mktemp("plain"), text, steps=8)
        return workers.run(plain_loop, 1, str(path), plan, (3, 6))[0]

    return lambda row: run(row.reference())


@pytest.mark.parametrize("row", PLANS, ids=str)
def test_a_skipped_step_is_one_that_never_was(workers, text, tmp_path, plain, row):
    pool = plant(workers, poison={"3": math.nan, "6": math.inf})
    row = with_fault(row, on_bad_step="skip")
    rows = trained(train(pool, row, tmp_path / "straight", text, steps=8))
    assert pool.raised == [None] * row.ranks
    assert [each[-1] for each in rows] == [False, False, True, False, False, True, False, False]
    skips = events(tmp_path / "straight", "bad_step")
    assert [(each["step"], each["action"], each["in_a_row"]) for each in skips] == [(3, "skip", 1), (6, "skip", 1)]
    assert skips[0]["grad_norm"] is None and skips[0]["batch_hash"] == rows[2][-2]
    tensors = tensors_of(tmp_path / "straight" / "run", step=8)
    for name, weight in plain(row).items():
        torch.testing.assert_close(tensors[f"model.{name}"], weight, rtol=0, atol=2e-5)
    train(pool, row, tmp_path / "resumed", text, steps=8, stop_at=3)
    assert trained(train(pool, row, tmp_path / "resumed", text, steps=8)) == rows
    assert equal_tensors(tensors_of(tmp_path / "resumed" / "run", step=8), tensors)


@pytest.mark.parametrize("row", [PLANS[0], pytest.param(PLANS[1], marks=pytest.mark.slow), *SLOW], ids=str)
def test_a_rollback_is_a_run_in_which_the_step_was_never_applied(workers, text, tmp_path, row):
    """A weight breaks before step 4; the checkpoint of step 2 has it whole."""
    expected = train(
        plant(workers, poison={"4": math.nan}), with_fault(row, on_bad_step="skip"), tmp_path / "skip", text, steps=8
    )
    pool = plant(workers, corrupt=[4, 1])
    row = with_fault(row, on_bad_step="rollback")
    rows = train(pool, row, tmp_path / "back", text, steps=8)
    assert pool.raised == [None] * row.ranks
    tensors = tensors_of(tmp_path / "skip" / "run", step=8)
    assert equal_tensors(tensors_of(tmp_path / "back" / "run", step=8), tensors)
    # Step 4 was fed again with whole weights, so its norm is finite; it was not applied all the same.
    assert [each[-1] for each in trained(rows)] == [number == 4 for number in range(1, 9)]
    assert [each[:4] for each in trained(rows)] == [each[:4] for each in trained(expected)]
    [bad] = events(tmp_path / "back", "bad_step")
    assert (bad["step"], bad["action"], bad["loss"]) == (4, "rollback", None)
    assert bad["first_nonfinite"] == f"the output of {CORRUPT}"
    [back] = events(tmp_path / "back", "rollback")
    assert (back["step"], back["suppressed"]) == (2, 4)
    # The process ends before anything was saved after the rollback: the event is what it goes by.
    cut = plant(workers, corrupt=[4, 1], cut_power=3)
    train(cut, row, tmp_path / "cut", text, steps=8)
    assert cut.raised == ["PowerCut"] * row.ranks
    assert trained(train(workers, row, tmp_path / "cut", text, steps=8)) == trained(rows)
    assert equal_tensors(tensors_of(tmp_path / "cut" / "run", step=8), tensors)


def test_two_bad_steps_in_a_row_go_back_twice_and_before_the_first_save_to_the_start(workers, text, tmp_path):
    bad = {"1": math.nan, "4": math.nan, "5": math.nan}
    row = with_fault(DISTRIBUTED[0], on_bad_step="skip", every_steps=3)
    expected = train(plant(workers, poison=bad), row, tmp_path / "skip", text, steps=6)
    pool = plant(workers, poison=bad)
    row = with_fault(row, on_bad_step="rollback", every_steps=3)
    rows = train(pool, row, tmp_path / "back", text, steps=6)
    assert pool.raised == [None, None]
    assert trained(rows) == trained(expected)
    assert [each["suppressed"] for each in events(tmp_path / "back", "rollback")] == [1, 4, 5]
    assert [each["step"] for each in events(tmp_path / "back", "rollback")] == [0, 3, 3]
    tensors = [tensors_of(tmp_path / name / "run", step=6) for name in ("skip", "back")]
    assert equal_tensors(*tensors)


@pytest.mark.parametrize("row", PLANS, ids=str)
def test_too_many_in_a_row_end_the_run_with_a_diagnosis(workers, text, tmp_path, row):
    pool = plant(workers, corrupt=[4, 1])
    rows = trained(train(pool, with_fault(row, on_bad_step="skip", every_steps=9), tmp_path, text, steps=9))
    assert len(set(pool.raised)) == 1 and len(pool.raised) == row.ranks
    message = pool.raised[0]
    assert message.startswith("step 6: loss=nan and gradient norm=nan, and both must be finite"), message
    assert "the last of 3 bad steps in a row (fault.max_bad_steps)" in message
    assert f"the first non-finite value was the output of {CORRUPT}" in message
    # The weight broke on rank 0: its replicas have their own, the other shards are gathered from it.
    assert ("only on rank 0" in message) == (row.parallel == "ddp" and row.ranks == 2)
    assert [each[-1] for each in rows] == [False] * 3 + [True] * 3
    event = events(tmp_path, "bad_step")[-1]
    assert event["action"] == "stop" and event["first_nonfinite"] in message
    assert event["num_samples"] == (4 if "only on rank 0" in message else 8)
    assert f"Samples {', '.join(map(str, event['sample_ids']))}." in message
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("row", DIVIDED, ids=str)
def test_a_bad_sample_is_passed_over_and_diagnosed_as_in_one_process(workers, text, tmp_path, row):
    """A step is passed over with the sample; by default the run ends, and names the sample's microbatch."""
    one = replace(row.reference(), micro_batch=row.micro_batch)
    found = {}
    for name, each in (("one", one), ("divided", row)):
        pool = plant(workers, spoil=4)
        rows = train(pool, with_fault(each, on_bad_step="skip", every_steps=9), tmp_path / f"{name} skip", text, 6)
        assert [row["skipped"] for row in rows if row["kind"] == "train"] == [False] * 3 + [True] + [False] * 2
        train(pool, with_fault(each, every_steps=9), tmp_path / f"{name} stop", text, 6)
        assert len(set(pool.raised)) == 1 and pool.raised[0].startswith("step 4: loss=nan")
        [event] = events(tmp_path / f"{name} stop", "bad_step")
        found[name] = [row for row in rows if row["loss"] is not None], event
    losses, norms = difference(*(rows for rows, _ in found.values()))
    assert losses <= LOSS and norms <= NORM
    (_, expected), (_, event) = found.values()
    assert event["first_nonfinite"] == expected["first_nonfinite"]
    assert (event["step"], event["batch_hash"], event["num_samples"]) == (4, expected["batch_hash"], 2)
    if "ep" in row.parallel:  # its ranks read different sequences, so the sample is in another microbatch
        assert min(event["sample_ids"]) == min(expected["sample_ids"])
    else:
        assert event["sample_ids"] == expected["sample_ids"]


@pytest.mark.parametrize("row", [*DISTRIBUTED, *SLOW[1:]], ids=str)
def test_a_gradient_alone_is_named(workers, text, tmp_path, row):
    """By default the run stops at once."""
    pool = plant(workers, poison={"3": math.nan})
    train(pool, with_fault(row, every_steps=9), tmp_path, text, steps=9)
    assert all("step 3: " in each and "both must be finite" in each for each in pool.raised)
    assert all("the gradient of model.embed_tokens.weight. Samples " in each for each in pool.raised)
    assert all("fault.on_bad_step=skip" in each for each in pool.raised)


@pytest.mark.slow
def test_a_spike_is_judged_alike_after_a_resume(workers, text, tmp_path):
    """Window 3: step 6 is judged by steps 3 to 5 (step 2 was before a spike too, but too early to be judged)."""
    fault = {"on_bad_step": "skip", "spike_factor": 8.0, "spike_window": 3}
    pool = plant(workers, poison={"2": 100.0, "6": 100.0})
    row = with_fault(DISTRIBUTED[1], every_steps=9, **fault)
    rows = trained(train(pool, row, tmp_path / "straight", text, steps=8))
    assert [each[-1] for each in rows] == [number == 6 for number in range(1, 9)]
    assert rows[5][4] > 8 * sorted(each[4] for each in rows[2:5])[1]
    train(pool, row, tmp_path / "resumed", text, steps=8, stop_at=5)
    assert trained(train(pool, row, tmp_path / "resumed", text, steps=8)) == rows
    ours, theirs = (tensors_of(tmp_path / name / "run", step=8) for name in ("straight", "resumed"))
    assert equal_tensors(ours, theirs)
    stopping = plant(workers, poison={"6": 100.0})
    train(stopping, with_fault(row, every_steps=9, **fault | {"on_bad_step": "stop"}), tmp_path / "stop", text, steps=8)
    assert all("which is more than fault.spike_factor=8 times the median" in each for each in stopping.raised)
