"""Training from the scores of a reward model that echelon trained: rewards, kills, and what is refused at the start."""

import json

import pytest

from tests.dist.command import read_lines
from tests.dist.test_train_from_rewards import exact, rewards, train
from tests.unit.learn.answers.test_reward_models import scores_by_transformers

pytestmark = pytest.mark.dist

MODEL = {"config": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                    "num_attention_heads": 2}}  # fmt: skip
EXACT = ("step", "loss", "grad_norm", "reward", "answer_tokens", "entropy", "batch_hash", "tokens")
DIGITS, LETTERS = "0123456789", "abcdefghijklmnopqrstuvwxyz"


def write_recipes(folder):
    """A reward model learns that digits are better than letters; then a model is trained on its scores."""
    pairs = [
        {"prompt": f"{n} is ", "chosen": DIGITS[n % 10] + DIGITS[n % 7], "rejected": LETTERS[n % 26] + LETTERS[n % 11]}
        for n in range(96)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    prompts = [{"prompt": f"{n} is "} for n in range(48)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    common = {"model": MODEL, "parallel": "ddp"}
    scorer = common | {
        "run": {"name": "scorer"},
        "tokenizer": {"train": {"vocab_size": 270}},
        "data": {"train": "pairs.jsonl", "sequence_len": 32, "validation_fraction": 0.2},
        "objective": {"name": "reward"},
        "train": {"steps": 20, "global_batch_size": 8, "precision": "fp32", "compile": False},
        "optim": {"learning_rate": 1e-2},
    }
    trained = common | {
        "run": {"name": "plain"},
        "tokenizer": "bytes",
        "data": {"train": "prompts.jsonl", "sequence_len": 16, "validation_fraction": 0.2},
        "objective": {"name": "grpo"},
        "rollout": {"group_size": 8, "max_new_tokens": 4},
        "reward": [{"name": "model", "options": {"path": "scorer"}}],
        "train": {"steps": 16, "global_batch_size": 32, "log_every": 1, "eval_every": 8, "precision": "fp32",
                  "compile": False},
        "optim": {"learning_rate": 2e-2, "schedule": "constant"},
        "checkpoint": {"every": 4},
    }  # fmt: skip
    (folder / "scorer.json").write_text(json.dumps(scorer))
    (folder / "recipe.json").write_text(json.dumps(trained))


@pytest.mark.slow
def test_the_score_rises_also_after_a_kill(echelon, tmp_path):
    write_recipes(tmp_path)
    assert echelon("train", "scorer.json").code == 0
    assert echelon("export", "runs/scorer", "scorer").code == 0

    ending, run, whole = train(tmp_path, "whole", 2)
    assert "frozen parameters of reward models" in ending.out, ending
    assert sum(rewards(whole)[-4:]) > sum(rewards(whole)[:4]) + 4, rewards(whole)
    assert not any("solved" in row for row in whole)
    evaluations = [row for row in whole if row["kind"] == "eval"]
    assert [row["step"] for row in evaluations] == [8, 16]
    assert all(row["loss"] == -row["reward"] and row["answers"] > 0 for row in evaluations)
    assert "answers" in ending.out and "solved" not in ending.out

    shown = [row for row in read_lines(run.rows.samples_path) if row["step"] == 16]
    given = [{"prompt": row["prompt"]} for row in shown]
    expected = scores_by_transformers(tmp_path / "scorer", given, [row["text"] for row in shown])
    assert [row["reward"] for row in shown] == pytest.approx(expected, abs=1e-5) and len(shown) == 8

    ending, _, killed = train(tmp_path, "killed", 2, kill_at=6)
    assert "restart 1 of" in ending.out, ending
    assert exact(killed, EXACT) == exact(whole, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "{tp: 2}"])
def test_one_of_the_processes_with_the_same_answers_judges(echelon, tmp_path, parallel):
    """The same rewards as of one process; from the run itself as from the folder that it exported."""
    write_recipes(tmp_path)
    assert echelon("train", "scorer.json").code == 0
    assert echelon("export", "runs/scorer", "scorer").code == 0
    _, _, alone = train(tmp_path, "alone", 1, "train.steps=6")
    of_run = "reward=[{name: model, options: {path: runs/scorer}}]"
    _, _, together = train(tmp_path, "together", 2, "train.steps=6", of_run, f"parallel={parallel}")
    assert rewards(together) == pytest.approx(rewards(alone), abs=1e-5)


def test_what_is_no_reward_model_is_refused_before_the_start(echelon, tmp_path):
    write_recipes(tmp_path)
    ending = echelon("train", "recipe.json", "reward=[{name: model, options: {path: ./scorer}}]")
    assert ending.code == 2 and not (tmp_path / "runs").exists(), ending
    assert "reward.0.options.path=./scorer is no run and no HF folder" in ending.err
