"""Answers of several turns: masks and places worked out by hand, the same draws on any number of ranks, gradients."""

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.learn.answers.conversations import Conversations
from echelon.learn.answers.environments import Reply
from echelon.learn.answers.sampling import Sampling, row_seed
from echelon.learn.data.prepared import read_prompts
from echelon.learn.learner import Learner
from echelon.learn.objectives.grpo import GRPO
from echelon.recipe.load import load_recipe

pytestmark = pytest.mark.dist

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 256,
}  # fmt: skip
LENGTH, TOKENS, TURNS, GROUP = 24, 2, 4, 2
SAMPLED = Sampling(max_tokens=TOKENS, temperature=1.0, top_k=0, num_samples=GROUP, seed=3)
# After how many turns each environment is done, and what it says first.
RECORDS = [
    {"prompt": "one ", "turns": 1, "first": None}, {"prompt": "two ", "turns": 3, "first": "or "},
    {"prompt": "many ", "turns": 9, "first": None}, {"prompt": "much too long", "turns": 9, "first": None},
    {"prompt": "ill ", "turns": 2, "first": None}, {"prompt": "one ", "turns": 2, "first": "a first text of 18"},
]  # fmt: skip


class Table:
    """Environments without a process of their own, in the place of EnvironmentProcess."""

    def reset(self, records, seeds):
        self.records, self.heard = records, [[] for _ in records]
        return [Reply(record["first"]) for record in records]

    def step(self, answers):
        return [self._step(number, answer) for number, answer in answers.items()]

    def _step(self, number, answer):
        record, heard = self.records[number], self.heard[number]
        heard.append(answer)
        if record["prompt"] == "ill " and len(heard) == 2:
            return Reply(problem="is ill")
        return Reply(f"<{len(heard)}>", 0.5, len(heard) == record["turns"])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversations")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    recipe = {
        "run": {"name": "talk", "dir": str(folder / "run")},
        "model": {"config": CONFIG},
        "tokenizer": "bytes",
        "data": {"train": str(folder / "prompts.jsonl"), "sequence_len": LENGTH, "validation_fraction": 0},
        "objective": {"name": "grpo"},
        "rollout": {
            "group_size": GROUP, "max_new_tokens": TOKENS, "environment": {"name": "their:Own", "max_turns": TURNS}
        },
        "train": {
            "steps": 1, "global_batch_size": 12, "micro_batch_size": 3, "precision": "fp32", "compile": False
        },
        "optim": {"learning_rate": 1e-2},
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder / "recipe.json"


def talk(rank, world_size, path, parallel):
    """Hold the conversations of this rank's prompts; returns them, and the gradients' norm of a step on them."""
    recipe, _ = load_recipe(Path(path), [f"parallel={parallel}"])
    with closing(Learner.build(recipe)) as learner:
        weights = {name: tensor.clone() for name, tensor in learner.engine.state_dict().items() if world_size == 1}
        share = learner.place.share(len(RECORDS))
        found = read_prompts(learner.data.train, range(len(RECORDS)))
        found.sort(key=lambda prompt: (prompt.record["prompt"], prompt.record["turns"]))
        prompts = [found[index] for index in share]
        leads = parallel != "{tp: 2}" or rank == 0
        told = []
        rollouts = Conversations(learner, Table() if leads else None, told.append).hold(prompts, SAMPLED)
        check_scores(learner, rollouts)
        check_draws(learner, rollouts, prompts[0].number)
        advantages = [float(len(answer)) - 6 for answer in rollouts.answers]
        learner.forward_backward(rollouts.batch(advantages=advantages), GRPO())
        norm = float(learner.clip(math.inf))
        records = [prompt.record for prompt in prompts for _ in range(GROUP)]
        fields = (records, rollouts.prompts, rollouts.answers, rollouts.ended, *vars(rollouts.played).values())
        return list(zip(*fields[:-1], strict=True)), fields[-1], norm, weights, told


def check_scores(learner, rollouts):
    """The log-probabilities of the sampler are those of a pass over the whole text, and 0 where it did not write."""
    batch = rollouts.batch(scores=rollouts.at_temperature)
    assert batch.num_labels == sum(map(sum, rollouts.written))
    for microbatch, now in zip(batch.microbatches, learner.log_probabilities(batch), strict=True):
        torch.testing.assert_close(now, microbatch.extra["scores"].to(now), atol=2e-5, rtol=1e-4)
        assert not microbatch.extra["scores"][microbatch.labels == -100].any()


def check_draws(learner, rollouts, first):
    """The second turn of an answer is what the model says to the text so far, by the seeds of the turn and number."""
    number = GROUP - 1
    text = [*rollouts.prompts[number], *rollouts.answers[number][: TOKENS + 3]]
    seed = row_seed(SAMPLED.seed, "turn", 1)
    again = learner.generate([text], replace(SAMPLED, num_samples=1, seed=seed), numbers=[first * GROUP + number])
    assert again.answers[0] == rollouts.answers[number][TOKENS + 3 : TOKENS + 3 + TOKENS] or learner.place.rank
    assert len(rollouts.answers[number]) > TOKENS or learner.place.rank


@pytest.fixture(scope="module")
def alone(workers, path):
    return workers.run(talk, 1, str(path), "ddp")[0]


def test_tokens_masks_and_rewards_are_those_worked_out_by_hand(alone):
    found, failures, _, _, told = alone
    model, reply = [True] * TOKENS, [False] * 3
    ends = {  # the prompt with what was said first, the turns, whether the environment ended it
        "one ": ("one ", 1, True),
        "two ": ("two or ", 3, True),
        "many ": ("many ", 4, False),  # rollout.environment.max_turns
        "much too long": ("much too long", 3, False),  # 13 + 3 * 2 + 2 * 3 tokens fill 24 + 1
        "ill ": ("ill ", 2, False),
    }
    for record, prompt, answer, ended, written, earned, turns in found:
        if record["first"] and record["first"].startswith("a first"):  # 4 + 18 + 2 tokens fit in 24 + 1, 5 more do not
            expected = ("one a first text of 18", 1, False)
        else:
            expected = ends[record["prompt"]]
        assert (bytes(prompt).decode(), turns, ended) == expected
        assert written == (model + reply) * (turns - 1) + model
        for turn in range(turns - 1):
            start = turn * 5 + TOKENS
            assert bytes(answer[start : start + 3]).decode() == f"<{turn + 1}>"
        assert earned == pytest.approx(0.5 * turns) or (record["prompt"] == "ill " and math.isnan(earned))
    assert failures == ["their:Own is ill (2 of 12 answers)."]
    assert told == ["the environment", *["sampling answers", "the environment"] * TURNS]


def test_answers_to_one_prompt_differ_in_every_turn(alone):
    by_prompt = {}
    for _, prompt, answer, *_ in alone[0]:
        by_prompt.setdefault(prompt, []).append(answer)
    for answers in by_prompt.values():
        for start in range(0, min(map(len, answers)), 5):
            assert len({answer[start : start + TOKENS] for answer in answers}) == GROUP


def build_model(alone):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).eval()
    weights = {name.removeprefix("model."): tensor for name, tensor in alone[3].items() if name.startswith("model.")}
    model.load_state_dict(weights, strict=False)
    return model


def test_gradients_are_those_of_the_written_tokens(alone):
    """With a ratio of 1 the gradient is that of the mean over answers of A times the mean log p of its own tokens."""
    model, losses = build_model(alone), []
    for _, prompt, answer, _, written, *_ in alone[0]:
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        scores = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        losses.append(-(len(answer) - 6) * scores[torch.tensor(written)].mean())
    torch.stack(losses).mean().backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    assert alone[2] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "{tp: 2}"])
def test_ranks_draw_the_same(workers, path, alone, parallel):
    results = workers.run(talk, 2, str(path), parallel)
    found = [row for rows, *_ in (results[:1] if "tp" in parallel else results) for row in rows]
    assert str(results[0][0]) == str(results[1][0]) or "tp" not in parallel  # nan
    assert str(found) == str(alone[0])
    assert all(norm == pytest.approx(alone[2], rel=1e-4) for _, _, norm, *_ in results)
