"""Answers of a model while it trains: under every plan those of `transformers`, and without a trace in the training."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.ground.errors import ConfigError
from echelon.learn.answers.sampling import READ_EVERY, Sampling
from echelon.learn.distributed.traffic import count_traffic
from echelon.learn.learner import Learner
from echelon.planner.plan import RolloutPlan
from echelon.planner.shape import build_shape
from echelon.recipe.load import load_recipe
from tests.parity.training import Row, prepare, with_ranks

pytestmark = pytest.mark.dist

PROMPTS = [list(text.encode()) for text in ("def add(", "x", "A longer prompt is", "import", "for each")]
SAMPLED = Sampling(max_tokens=10, temperature=1.0, top_k=0, num_samples=2, seed=5)
GREEDY = Sampling(max_tokens=12, temperature=0.0)
STEPS = 3


def train_and_answer(rank, world_size, path, plan, samplings):
    """Train for a few steps, answer this rank's prompts by each sampling, and train one more step.

    Returns the answers with their prompts and log-probabilities, the weights that gave them, and the last step's sums.
    """
    recipe, _ = load_recipe(Path(path))
    with closing(Learner.build(recipe, plan)) as learner:
        for step in range(STEPS):
            take_step(learner, step)
        weights = {name: tensor.clone() for name, tensor in learner.engine.state_dict().items() if world_size == 1}
        torch.manual_seed(7)
        state, found = torch.get_rng_state(), []
        for sampling in samplings:
            rollouts = learner.generate(PROMPTS[learner.meshes.data_rank :: learner.meshes.data_size], sampling)
            few = learner.generate(rollouts.prompts[:: sampling.num_samples], sampling, max_num_seqs=3)
            assert few.answers == rollouts.answers and few.ended == rollouts.ended
            if not plan.compile:  # each width would be compiled once more
                check_batch(learner, rollouts)
            scores = [each.tolist() for each in rollouts.log_probabilities]
            found.append(list(zip(rollouts.prompts, rollouts.answers, scores, rollouts.ended, strict=True)))
        assert torch.equal(torch.get_rng_state(), state)
        return found, weights, take_step(learner, STEPS)


def take_step(learner, step):
    sums = learner.forward_backward(learner.batch(step))
    norm = float(learner.clip())
    learner.step(1e-2)
    return norm, float(sums.loss)


def check_batch(learner, rollouts):
    """A batch has labels on the answers alone, and beside them the log-probabilities that the model computes."""
    weights = [float(len(answer)) for answer in rollouts.answers]
    batch = rollouts.batch(micro_batch_size=2, lengths=weights)
    assert batch.num_labels == sum(weights)
    for microbatch, now in zip(batch.microbatches, learner.log_probabilities(batch), strict=True):
        old, is_label = microbatch.extra["old_log_probabilities"], microbatch.labels != -100
        torch.testing.assert_close(now, old.to(now) * is_label, atol=2e-5, rtol=1e-4)
        assert not old[~is_label].any()
        if microbatch.part is None:
            assert is_label.sum(1).tolist() == microbatch.extra["lengths"].flatten().tolist()


def of_all_ranks(results, index):
    """The answers of one sampling on all ranks, by prompt; ranks that hold a model together have the same."""
    found = {}
    for answers, _, _ in results:
        for prompt, answer, scores, ended in answers[index]:
            found.setdefault(prompt, []).append((answer, scores, ended))
    return found


@pytest.fixture(scope="module")
def alone(workers, text, tmp_path_factory):
    """One process: its answers, and the model of `transformers` with its weights."""
    row, folder = Row(), tmp_path_factory.mktemp("alone")
    path, plan = prepare(row, folder, text, STEPS + 1)
    results = workers.run(train_and_answer, 1, str(path), plan, [GREEDY, SAMPLED])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**row.config())).eval()
    weights = {name.removeprefix("model."): each for name, each in results[0][1].items() if name.startswith("model.")}
    model.load_state_dict(weights, strict=False)
    return results, model


TP = {"dp_shard": 1, "tp": 2}
ROWS = [
    Row(),
    with_ranks(Row("ddp"), 2, micro_batch=2),
    with_ranks(Row("fsdp", checkpointing="full"), 2, micro_batch=2),
    with_ranks(Row(TP), 2, micro_batch=2),
    with_ranks(Row({"pp": 2}), 2, micro_batch=2),
    *(
        pytest.param(with_ranks(row, 2, micro_batch=2), marks=pytest.mark.slow)
        for row in (
            Row("zero1"),
            Row(TP | {"sequence_parallel": True}),
            Row({"dp_shard": 1, "cp": 2}),
            Row("fsdp", compile=True),
        )
    ),
    pytest.param(with_ranks(Row({"dp_shard": 2, "tp": 2}), 4, micro_batch=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_answers_are_those_of_transformers(workers, text, tmp_path, alone, row):
    path, plan = prepare(row, tmp_path, text, STEPS + 1)
    results = workers.run(train_and_answer, row.ranks, str(path), plan, [GREEDY, SAMPLED])
    reference, model = alone
    found = of_all_ranks(results, 0)
    assert len(found) == len(PROMPTS)
    for prompt, answers in found.items():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=GREEDY.max_tokens, do_sample=False, pad_token_id=0
        )
        for answer, scores, _ in answers:
            assert list(prompt) + list(answer) == expected[0, : len(prompt) + len(answer)].tolist()
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert scores == pytest.approx(own.tolist(), abs=1e-3)
    drawn, drawn_alone = of_all_ranks(results, 1), of_all_ranks(reference, 1)
    for prompt, answers in drawn.items():
        assert {answer for answer, _, _ in answers} == {answer for answer, _, _ in drawn_alone[prompt]}
    assert len({answer for answers in drawn.values() for answer, _, _ in answers}) == 2 * len(PROMPTS)


DROPOUT = [
    Row(family="gpt2", dropout=0.1),
    with_ranks(Row("fsdp", family="gpt2", dropout=0.1), 2, micro_batch=2),
    pytest.param(with_ranks(Row("fsdp", adapter="lora", compile=True), 2, micro_batch=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("row", DROPOUT, ids=str)
def test_answers_leave_no_trace_in_the_training(workers, text, tmp_path, row):
    path, plan = prepare(row, tmp_path, text, STEPS + 1)
    with_answers, without = (
        workers.run(train_and_answer, row.ranks, str(path), plan, samplings) for samplings in ([SAMPLED], [])
    )
    assert [each[2] for each in with_answers] == [each[2] for each in without]


def count_token_bytes(rank, world_size, path, plan):
    """The bytes that this rank sends for 4 tokens and for 12, and the sums of a step after them."""
    meter, sent = count_traffic(), []
    recipe, _ = load_recipe(Path(path))
    with closing(Learner.build(recipe, plan)) as learner:
        for count in (4, 12):
            meter.take()
            learner.generate(PROMPTS[:1], replace(GREEDY, max_tokens=count), stops=[])
            sent.append(meter.take())
        return (*sent, take_step(learner, 0))


def test_weights_may_stay_whole_while_answers_are_sampled(workers, text, tmp_path):
    row = with_ranks(Row("fsdp"), 2, micro_batch=2)
    path, plan = prepare(row, tmp_path, text, STEPS + 1)
    (few, many, freed), (few_whole, many_whole, kept) = (
        workers.run(count_token_bytes, 2, str(path), replace(plan, rollout=rollout))[0]
        for rollout in (RolloutPlan(1, 12, 1, 1), RolloutPlan(1, 12, 1, 1, gathers_once=True))
    )
    assert freed == kept
    shape = build_shape(row.config())
    half = shape.num_layers * shape.num_layer_parameters * 4 / 2  # what this rank has of the layers, in fp32
    assert many - few >= 8 * half and many_whole - few_whole < 0.01 * half


def answer_uneven(rank, world_size, path, plan):
    """Ranks with different numbers of prompts, answers that end early, and requests that cannot be met."""
    recipe, _ = load_recipe(Path(path))
    with closing(Learner.build(recipe, plan)) as learner:
        prompts = PROMPTS[:1] if rank else PROMPTS[1:]
        free = learner.generate(prompts, GREEDY)
        stop = free.answers[0][3]
        stopped = learner.generate(prompts, GREEDY, stops=[stop])
        for whole, answer, ended in zip(free.answers, stopped.answers, stopped.ended, strict=True):
            assert answer == (whole[: whole.index(stop) + 1] if stop in whole else whole)
            assert ended == (stop in whole)
        # Rank 1 has one prompt and rank 0 four: they run equally many passes, or the next collective would not match.
        for size in (1, 3):
            few = learner.generate(prompts, GREEDY, stops=[stop], max_num_seqs=size)
            assert few.answers == stopped.answers and few.ended == stopped.ended
            with mock.patch.dict(READ_EVERY, cpu=8):  # as on a GPU
                late = learner.generate(prompts, GREEDY, stops=[stop], max_num_seqs=size)
            assert late.answers == stopped.answers and late.ended == stopped.ended
        batch = stopped.batch()
        assert len(batch.microbatches) == 2 and batch.num_labels == sum(map(len, stopped.answers))
        group = learner.generate(prompts, SAMPLED)
        second = learner.generate(prompts, replace(SAMPLED, num_samples=1), numbers=[1] * len(prompts))
        assert second.answers == group.answers[1::2] and second.answers != group.answers[::2]
        errors = []
        for wrong, sampling in ((prompts if rank else [], GREEDY), (prompts, Sampling(seed=rank)), ([[]], GREEDY)):
            with pytest.raises(ConfigError) as error:
                learner.generate(wrong, sampling)
            errors.append(str(error.value))
        with pytest.raises(ConfigError, match="there are 2 numbers for 1 prompts; give one for each"):
            learner.generate(PROMPTS[:1], GREEDY, numbers=[0, 1])
        for size in (0, 1 + rank):
            with pytest.raises(ConfigError) as error:
                learner.generate(prompts, GREEDY, max_num_seqs=size)
            errors.append(str(error.value))
        return errors


def test_ranks_may_have_different_prompts(workers, text, tmp_path):
    path, plan = prepare(with_ranks(Row("fsdp"), 2, micro_batch=2), tmp_path, text, STEPS + 1)
    results = workers.run(answer_uneven, 2, str(path), plan)
    for errors in results:
        assert errors[0] == "generate, rank 0: there is no prompt; give every rank at least one."
        assert "generate, rank" in errors[1] and "seed=1" in errors[1]
        assert errors[2] == "generate, rank 0: a prompt has no token; give at least one."
        assert "max_num_seqs=0 leaves no answer to sample; use 1 or more" in errors[3]
        assert (
            "rank 1" in errors[4] and "max_num_seqs=2 differ" in errors[4] and "max_num_seqs=1 of rank 0" in errors[4]
        )
