"""The verdict about a run, on losses written by hand: each sentence is worked out from the rows."""

import json
import math
import re
import subprocess
import sys

import pytest

from echelon.cli.commands.trained_models import render_lines
from echelon.run.report.judgement import describe_context, judge_run
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report

FALLING = [4.0 - step / 50 for step in range(100)]  # 4.00 down to 2.02
FLAT = [3.0 - step / 50 for step in range(50)] + [2.0] * 50
RECIPE = "train: {steps: 100}\noptim: {learning_rate: 0.003}\n"


def judge(path, losses, held=(), entropy=None, recipe=RECIPE, ending="done"):
    """The verdict about a run with these training losses and, after equal numbers of steps, evaluation losses."""
    path.mkdir()
    rows = [
        {"kind": "train", "step": step, "loss": loss, "learning_rate": 1e-3 if step < 80 else 1e-4, "skipped": False}
        for step, loss in enumerate(losses, start=1)
    ]
    every = len(losses) // max(1, len(held))
    rows += [{"kind": "eval", "step": every * place, "loss": loss} for place, loss in enumerate(held, start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"event": "start", "time": 1.0, "step": 0, "unigram_entropy": entropy}]
    events.append({"event": ending, "time": 9.0, "step": len(losses)})
    (path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    (path / "recipe.yaml").write_text(recipe)
    if ending == "done":
        (path / "outcome.json").write_text(json.dumps({"time": 9.0, "outcome": "done", "step": len(losses)}))
    return judge_run(read_record(path))


def test_a_good_run_should_go_on(tmp_path):
    """Held out, 2.6 after 80 steps and 2.5 after 100: 3.8 % less."""
    assert judge(tmp_path / "r", FALLING, held=(3.6, 3.2, 2.9, 2.6, 2.5), entropy=5.0) == [
        "It has learned: the evaluation loss is 2.500, below the 5.000 of a model that only knows how often each token "
        "occurs; training began at 3.910.",
        "There is no sign of overfitting: the evaluation loss is at its lowest, or within 1 % of it.",
        "It was still improving: the evaluation loss fell by 3.8 % from step 80 on.",
        "Next: train for longer: the same command with train.steps=200 goes on from here.",
    ]


def test_without_an_evaluation_the_training_loss_is_judged(tmp_path):
    assert judge(tmp_path / "r", FALLING, recipe="train: {epochs: 1.5}\n") == [
        "It has learned: the training loss fell from 3.910 to 2.110.",
        "Whether it overfits cannot be seen from no evaluation; at least 3 are needed, such as by train.eval_every=20, "
        "with held-out text (data.validation_fraction).",
        "It was still improving: the training loss fell by 15.3 % from step 81 on.",  # of 2.61 on average to 2.21
        "Next: train for longer: the same command with train.epochs=3 goes on from here.",
    ]


def test_overfitting_is_a_rising_evaluation_loss_under_a_falling_training_loss(tmp_path):
    held = (3.0, 2.5, 2.6, 2.8, 3.0)
    told = judge(tmp_path / "plain", FALLING, held)
    assert told[1] == (
        "It is overfitting: the evaluation loss was lowest at step 40 (2.500) and is 3.000 now, while the training "
        "loss went on falling."
    )
    assert len(told) == 3 and "checkpoint.keep_best=true" in told[2] and "evaluate.early_stopping=3" in told[2]
    kept = judge(tmp_path / "kept", FALLING, held, recipe=f"{RECIPE}checkpoint: {{keep_best: true}}\n")
    assert kept[2].startswith("Next: use the best weights (--checkpoint best)")
    # a rise of less than one per cent is noise
    assert "no sign of overfitting" in judge(tmp_path / "noise", FALLING, (3.0, 2.5, 2.49, 2.48, 2.50))[1]


def test_a_training_loss_that_rises_too_is_unstable(tmp_path):
    losses = [4.0 - step / 50 for step in range(50)] + [3.0 + step / 100 for step in range(50)]
    told = judge(tmp_path / "r", losses, held=(3.5, 3.0, 3.2, 3.4))
    assert told[1].startswith("Training became unstable: the evaluation loss was lowest at step 50 (3.000)")
    assert told[2] == "Next: train again with optim.learning_rate=0.001 and --fresh."


@pytest.mark.parametrize(
    ("losses", "entropy", "first", "last"),
    [
        (
            FALLING,
            2.05,
            "It has not learned from context yet: the training loss is 2.110, not below the 2.050",
            "longer",
        ),
        (
            [3.0] * 60,
            None,
            "It has hardly learned: the training loss went from 3.000 to 3.000.",
            "longer (train.steps=200)",
        ),
        (
            [3.0 + step / 50 for step in range(60)],
            None,
            "It has not learned: the training loss rose from 3.050",
            "--fresh",
        ),
    ],
)
def test_what_was_not_learned_is_said(tmp_path, losses, entropy, first, last):
    told = judge(tmp_path / "r", losses, entropy=entropy)
    assert told[0].startswith(first) and last in told[-1] and len(told) == 3


def test_a_loss_that_has_levelled_off_needs_something_else(tmp_path):
    told = judge(tmp_path / "r", FLAT, held=(2.9, 2.5, 2.2, 2.1, 2.095))
    assert told[2] == (
        "It has levelled off: the evaluation loss hardly fell from step 80 on, where the learning rate was down to "
        "1.0e-04 of at most 1.0e-03."
    )
    assert told[3].startswith("Next: more steps alone will hardly help")
    noisy = [loss + (0.4 if step % 2 else -0.4) for step, loss in enumerate(FLAT)]
    assert judge(tmp_path / "noisy", noisy)[2].startswith(
        "It has levelled off: the training loss hardly fell from step 81"
    )


def test_a_change_within_the_noise_is_not_judged(tmp_path):
    noisy = [4.0 - step / 100 + (1.0 if step % 2 else -1.0) for step in range(60)]
    told = judge(tmp_path / "r", noisy)
    assert told[2].startswith(
        "Whether it was still improving cannot be told: from step 49 on, the training loss changed"
    )
    assert "train.steps=200" in told[3]


def test_too_few_steps_are_not_judged(tmp_path):
    [line] = judge(tmp_path / "short", FALLING[:19])
    assert line.startswith("Too short to say whether the model has learned: 19 steps have a loss, at least 20")
    assert judge(tmp_path / "empty", []) == []


def test_a_stopped_run_is_to_be_resumed(tmp_path):
    assert (
        judge(tmp_path / "r", FALLING, ending="signal")[-1]
        == "Next: the same command goes on from the newest checkpoint."
    )


def test_the_report_begins_with_the_verdict(tmp_path):
    told = judge(tmp_path / "r", FALLING)
    section = next(each for each in build_report(read_record(tmp_path / "r")).sections if each.title == "Verdict")
    assert [line for block in section.blocks for line in block.lines] == told


def test_eval_says_what_its_numbers_mean():
    assert describe_context(5.5066, 5.5065).endswith("this model has not learned from context yet.")
    assert describe_context(4.7333, 6.0).startswith("The loss is 1.27 lower than that of a model that only knows")
    values = {"loss": 5.5066, "unigram_entropy": 5.5065, "sets": {}}
    assert [line.split(":")[0] for line in render_lines(values)] == [
        "loss", "unigram_entropy",
        "The loss is no lower than that of a model that only knows how often each token occurs (unigram_entropy)",
    ]  # fmt: skip
    assert list(render_lines({"loss": 0.6, "pairs": 3})) == ["loss: 0.6000", "pairs: 3"]


@pytest.mark.slow
def test_a_real_run_ends_with_a_verdict(tmp_path):
    """A byte model of three letters that take turns: 30 steps are enough to know more than how often each occurs."""
    (tmp_path / "text.txt").write_text("abc" * 20_000)
    config = "{model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    (tmp_path / "abc.yaml").write_text(
        f"run: {{name: abc}}\nmodel: {{config: {config}}}\ntokenizer: bytes\n"
        "data: {train: text.txt, sequence_len: 32, validation_fraction: 0.05}\n"
        "train: {steps: 60, global_batch_size: 16, eval_every: 20, compile: false}\noptim: {learning_rate: 1.0e-2}\n"
    )
    command = [sys.executable, "-m", "echelon", "train", "abc.yaml", "--nproc", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^verdict: (.*)$", done.stdout, re.MULTILINE)
    start = json.loads(next(line for line in (tmp_path / "runs/abc/events.jsonl").open() if '"start"' in line))
    assert start["unigram_entropy"] == pytest.approx(math.log(3), abs=0.01)
    assert start["held_out_bytes"] == pytest.approx(3000, abs=5)
    assert told[0].startswith("It has learned: the evaluation loss is 0.") and "below the 1.09" in told[0]
    assert told[1].startswith("There is no sign of overfitting") and told[-1].startswith("Next: ")
    assert told == judge_run(read_record(tmp_path / "runs" / "abc"))


def judge_rewards(path, rewards, spreads, held=()):
    """The verdict about a run from rewards, with evaluations after equal numbers of steps."""
    path.mkdir()
    pairs = zip(rewards, spreads, strict=True)
    rows = [
        {"kind": "train", "step": step, "loss": 0.0, "reward": reward, "reward_spread": spread}
        for step, (reward, spread) in enumerate(pairs, start=1)
    ]
    every = len(rows) // max(1, len(held))
    rows += [
        {"kind": "eval", "step": every * place, "loss": -reward, "reward": reward}
        for place, reward in enumerate(held, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "events.jsonl").write_text(json.dumps({"event": "start", "time": 1.0, "step": 0}) + "\n")
    (path / "recipe.yaml").write_text(RECIPE)
    return judge_run(read_record(path))


def test_a_run_from_rewards_is_judged_by_them(tmp_path):
    """100 rewards from 0.20 to 0.695: the means of the first and last 20 are 0.2475 and 0.6475."""
    rising = [0.2 + step / 200 for step in range(100)]
    assert judge_rewards(tmp_path / "a", rising, [0.4] * 100, held=(0.3, 0.5, 0.7)) == [
        "It has learned: the mean reward rose from 0.2475 to 0.6475 (means of 20 steps).",
        "On held-out prompts the reward went from 0.3000 to 0.7000.",
        "Next: train for longer: the same command with more train.steps goes on from here.",
    ]
    assert judge_rewards(tmp_path / "b", rising[::-1], [0.4] * 100, held=(0.7, 0.5)) == [
        "It has not learned: the mean reward fell from 0.6475 to 0.2475 (means of 20 steps).",
        "On held-out prompts it was better before: 0.7000 at step 50, 0.5000 at the end.",
        "Next: look at samples.jsonl: does the reward prefer the better answers? Then another optim.learning_rate.",
    ]
    [hardly, advice] = judge_rewards(tmp_path / "c", [0.5] * 100, [0.4] * 80 + [0.01] * 20)
    assert hardly == "It has hardly learned: the mean reward went from 0.5000 to 0.5000 (means of 20 steps)."
    assert advice.startswith("Next: other prompts: at the end the answers to one prompt had nearly the same reward")
    [short] = judge_rewards(tmp_path / "d", [0.5] * 5, [0.4] * 5)
    assert short.startswith("Too short to say whether the model has learned: 5 steps have a reward")
