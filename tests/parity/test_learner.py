"""A learner without a run: its loop has the rows of `echelon train`, and a loop in plain PyTorch has its losses."""

import math
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

import echelon
from echelon.ground.errors import CheckpointError, ConfigError, PlanError
from echelon.learn.objectives.pairs import DPO
from echelon.recipe.load import load_recipe
from echelon.recipe.schedule import build_schedule
from tests.parity.training import LOSS, NORM, Row, prepare, train, with_ranks, with_uneven_targets

pytestmark = pytest.mark.dist

STEPS = 4
# One group of parameters for the plain loop: no decay.
PLAIN = {"optim": {"weight_decay": 0.0}}
ONE = Row(changes=PLAIN)
PLANS = [ONE, with_ranks(Row("ddp", changes=PLAIN), 2, micro_batch=2), with_ranks(Row("fsdp", changes=PLAIN), 2)]


@contextmanager
def built(path, plan):
    """A learner of a recipe file, its batches with uneven targets, and the learning rate of each step."""
    recipe, _ = load_recipe(Path(path))
    with (
        closing(echelon.Learner.build(recipe, plan)) as learner,
        closing(with_uneven_targets(learner.open_feed(), recipe)) as feed,
    ):
        yield learner, feed, build_schedule(recipe.optim, STEPS, recipe.batches)


def take(learner, feed, schedule, steps, loss=None):
    """Take these steps; the loss and the gradient norm of each."""
    rows = []
    for step in steps:
        sums = learner.forward_backward(feed.batch(step), loss)
        norm = learner.clip()
        learner.step(schedule(step))
        rows.append((learner.mean_loss(sums), float(norm)))
    assert learner.num_steps == steps[-1] + 1
    return rows


def loop(rank, world_size, path, plan, checkpoints):
    """All steps; then the newest checkpoint of a run of the same recipe, and its loss on the held-out text."""
    with built(path, plan) as (learner, feed, schedule):
        rows = take(learner, feed, schedule, range(STEPS))
        learner.load(Path(checkpoints))
        assert learner.num_steps == STEPS
        [held_out] = learner.data.validation
        batches = learner.held_out(held_out.dataset, learner.recipe.global_batch_size)
        return rows, learner.evaluate(batches).loss


@pytest.mark.parametrize("row", PLANS, ids=str)
def test_its_loop_has_the_rows_of_a_run_bit_for_bit(workers, text, tmp_path, row):
    rows = train(workers, row, tmp_path, text, STEPS)
    path, plan = prepare(row, tmp_path / "again", text, STEPS)
    before = sorted(tmp_path.rglob("*"))
    checkpoints = str(tmp_path / "run" / "checkpoints")
    found = workers.run(loop, row.ranks, str(path), plan, checkpoints)
    expected = [(each["loss"], each["grad_norm"]) for each in rows if each["kind"] == "train"]
    [evaluated] = [each["loss"] for each in rows if each["kind"] == "eval"]
    assert found == [(expected, evaluated)] * row.ranks
    assert sorted(tmp_path.rglob("*")) == before, "it has written a file"


def half(rank, world_size, path, plan, folder, steps):
    """Continue from the checkpoint in a folder, if there is one, and save another."""
    with built(path, plan) as (learner, feed, schedule):
        if steps[0]:
            learner.load(Path(folder))
        rows = take(learner, feed, schedule, steps)
        learner.save(Path(folder))
        return rows


def test_another_number_of_processes_continues_its_curve(workers, text, tmp_path):
    rows = []
    for row, steps in ((PLANS[2], range(2)), (ONE, range(2, 3)), (PLANS[1], range(3, STEPS))):
        path, plan = prepare(row, tmp_path / str(row.ranks), text, STEPS)
        [mine, *others] = workers.run(half, row.ranks, str(path), plan, str(tmp_path / "saved"), steps)
        assert all(other == mine for other in others)
        rows += mine
    assert sorted(each.name for each in (tmp_path / "saved").glob("step-*"))[-1] == "step-00000004"
    path, plan = prepare(ONE, tmp_path / "straight", text, STEPS)
    [straight] = workers.run(half, 1, str(path), plan, str(tmp_path / "whole"), range(STEPS))
    for (loss, norm), (expected, expected_norm) in zip(rows, straight, strict=True):
        assert abs(loss - expected) < LOSS and abs(norm / expected_norm - 1) < NORM


def compare_with_torch(rank, world_size, path, plan, folder):
    """The losses of a learner, and those of a plain loop from the same weights over the same batches; and how much
    the log-probabilities of both differ at the end."""
    with built(path, plan) as (learner, feed, schedule):
        weights = {
            name.removeprefix("model."): each.full_tensor() if hasattr(each, "full_tensor") else each.clone()
            for name, each in learner.engine.state_dict().items()
            if name.startswith("model.")
        }
        ours = [loss for loss, _ in take(learner, feed, schedule, range(STEPS))]
        batches = [feed.batch(step).microbatches for step in range(STEPS)]
        scored = learner.log_probabilities(feed.batch(STEPS))
        last, optim, config = feed.batch(STEPS).microbatches, learner.recipe.optim, learner.config.to_dict()
    # From here on without echelon.
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), betas=optim.betas, eps=optim.eps, weight_decay=0.0)
    theirs = []
    for step, microbatches in enumerate(batches):
        loss, count = 0.0, sum((each.labels != -100).sum() for each in microbatches)
        dist.all_reduce(count)
        for each in microbatches:
            logits = model(input_ids=each.input_ids).logits
            total = cross_entropy(logits.flatten(0, 1), each.labels.flatten(), reduction="sum") / count
            total.backward()
            loss += total.detach()
        dist.all_reduce(loss)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(float(loss))
    worst = 0.0
    for microbatch, own in zip(last, scored, strict=True):
        with torch.no_grad():
            every = model(input_ids=microbatch.input_ids).logits.log_softmax(-1)
        is_label = microbatch.labels != -100
        picked = every.gather(-1, microbatch.labels.clamp(min=0)[..., None])[..., 0] * is_label
        worst = max(worst, float((picked - own).abs().max()))
        assert own.shape == microbatch.labels.shape and own[~is_label].eq(0).all() and is_label.any()
    return ours, theirs, worst


@pytest.mark.parametrize("row", [ONE, PLANS[2]], ids=str)
def test_a_loop_in_plain_pytorch_has_its_losses(workers, text, tmp_path, row):
    path, plan = prepare(row, tmp_path, text, STEPS)
    for ours, theirs, worst in workers.run(compare_with_torch, row.ranks, str(path), plan, str(tmp_path)):
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < LOSS
        assert worst < 1e-4


def summed(logits, labels, extra):
    """The cross-entropy of a chunk of tokens, as a user writes it."""
    return cross_entropy(logits, labels, reduction="sum")


def doubled(logits, labels, extra):
    """Another loss of the same tokens."""
    return 2 * summed(logits, labels, extra)


def change_losses(rank, world_size, path, plan):
    """Losses and norms where each step has another loss; and what is refused."""
    with built(path, plan) as (learner, feed, _):
        batch, rows = feed.batch(0), []
        for loss in (None, summed, doubled, learner.objective):
            sums = learner.forward_backward(batch, loss)
            rows.append((learner.mean_loss(sums), float(learner.clip(math.inf)), int(sums.num_targets)))
            learner.step(0.0, commit=torch.tensor(False))
        rows.append((learner.evaluate([batch], doubled).loss, 0.0, 0))
        with pytest.raises(ConfigError, match=r"DPO needs a reference model.*objective.name=causal_lm"):
            learner.forward_backward(batch, DPO(0.1))
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            learner.load(Path(path).parent)
        if world_size > 1:
            with pytest.raises(PlanError, match="the plan is for 1 processes, and this job has 2"):
                echelon.Learner.build(learner.recipe, replace(plan, dp_shard=1))
    return rows


@pytest.mark.parametrize("row", [ONE, PLANS[2]], ids=str)
def test_each_step_may_have_another_loss(workers, text, tmp_path, row):
    path, plan = prepare(row, tmp_path, text, STEPS)
    for rows in workers.run(change_losses, row.ranks, str(path), plan):
        (loss, norm, count), plain, twice, again, (evaluated, *_) = rows
        assert count == plain[2] == twice[2] > 0 and again == (loss, norm, count)
        assert abs(plain[0] - loss) < LOSS and abs(plain[1] / norm - 1) < NORM
        assert abs(twice[0] - 2 * loss) < LOSS and abs(twice[1] / (2 * norm) - 1) < NORM
        assert abs(evaluated - twice[0]) < LOSS
