"""The best checkpoint is kept, and early stopping works, also across resumes."""

import json
import re
from pathlib import Path

import pytest

from tests.dist.command import read_lines, write_recipe

pytestmark = pytest.mark.dist

# Bytes that do not occur in the training text: their predicted probability falls during training.
STRANGE = "αβγδεζηθ" * 20


def steps(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_early_stopping_ends_the_run(echelon, tmp_path):
    (tmp_path / "strange.txt").write_text(STRANGE)
    (tmp_path / "even.txt").write_text("2 plus 4 is 6, and so on.\n" * 9)
    write_recipe(
        tmp_path,
        data={
            "validation_fraction": None,
            "validation": [{"path": "even.txt"}, {"path": "strange.txt", "name": "odd"}],
        },
        train={"steps": 3, "eval_every": 1},
        optim={"learning_rate": 0.1},
        evaluate={"select_by": "odd", "early_stopping": 3},
        checkpoint={"every": 3, "keep_last": 1, "keep_best": True},
    )
    run = tmp_path / "runs" / "tiny"
    ending = echelon("train", "recipe.json", "--nproc", "1").succeeded()
    assert "eval at step 1: loss" in ending.out and "  odd: loss" in ending.out
    assert steps(run) == [1, 3]

    # Steps 2 and 3 were not better: early stopping triggers at step 4, also after the resume.
    ending = echelon("train", "recipe.json", "--nproc", "1", "train.steps=20")
    assert ending.code == 0 and "early stopping at step 4: no lower loss in 3 evaluations" in ending.out, ending
    assert steps(run) == [1, 4]
    evals = [row["sets"]["odd"]["loss"] for row in read_lines(run / "metrics.jsonl") if row["kind"] == "eval"]
    assert evals == sorted(evals) and len(evals) == 4
    events = read_lines(run / "events.jsonl")
    assert events[-1]["event"] == "early_stop" and events[-1]["step"] == 4
    assert events[-1]["best_step"] == 1 and events[-1]["best_loss"] == evals[0]
    state = json.loads((run / "checkpoints" / "step-00000004" / "state.json").read_text())["train"]
    assert (state["best_step"], state["best_loss"], state["evaluations_since_best"]) == (1, evals[0], 3)

    ending = echelon("train", "recipe.json", "--nproc", "1", "train.steps=20")
    assert ending.code == 0 and "has finished early, at step 4; raise evaluate.early_stopping" in ending.out

    check_choice_of_checkpoints(echelon, run, evals)
    ending = echelon("checkpoint", "prune", run, "--keep", "1")
    assert ending.code == 0 and ending.out == "kept step-00000001, step-00000004\n" and steps(run) == [1, 4]

    ending = echelon("train", "recipe.json", "--nproc", "1", "train.steps=20", "evaluate.early_stopping=5")
    assert ending.code == 0 and "early stopping at step 6" in ending.out, ending
    assert steps(run) == [1, 6]


@pytest.mark.slow
def test_saves_and_evaluations_by_epoch(echelon, tmp_path):
    """Saves and evaluations occur at the end and in the middle of each epoch, also after a resume."""
    write_recipe(
        tmp_path,
        train={"steps": 2, "eval_every": "0.5 epochs", "global_batch_size": 200},
        checkpoint={"every": "1 epochs", "keep_last": 9},
    )
    ending = echelon("train", "recipe.json", "--nproc", "1").succeeded()
    num_samples = int(
        re.search(r"checkpoint.every='1 epochs': ([\d,]+) sequences per epoch", ending.out)[1].replace(",", "")
    )
    assert 400 < num_samples < 1000, "then an epoch is 3 to 5 steps"
    echelon("train", "recipe.json", "--nproc", "1", "train.steps=7").succeeded()
    run = tmp_path / "runs" / "tiny"
    whole = [-(-count * num_samples // 200) for count in (1, 2, 3)]
    halves = [-(-count * num_samples // 400) for count in range(1, 7)]
    evaluated = [row["step"] for row in read_lines(run / "metrics.jsonl") if row["kind"] == "eval"]
    assert evaluated == sorted({2, 7, *(step for step in halves if step <= 7)})
    assert steps(run) == sorted({2, 7, *(step for step in whole if step <= 7)})


def check_choice_of_checkpoints(echelon, run, evals):
    """eval, generate and export accept `best`, or the step of a checkpoint."""
    losses = {}
    for which in ("best", "1", "4"):
        ending = echelon("eval", run, "--checkpoint", which, "--json").succeeded()
        losses[which] = json.loads(ending.out)["sets"]["odd"]["loss"]
    # One batch during training, all held-out text here.
    assert losses["best"] == losses["1"] == pytest.approx(evals[0], abs=0.02)
    assert losses["4"] == pytest.approx(evals[3], abs=0.02)
    sample = ("generate", run, "--prompt", "1", "--max-tokens", "20", "--temperature", "0")
    texts = [echelon(*sample, "--checkpoint", which).out for which in ("best", "newest")]
    assert texts[0] != texts[1]
    assert echelon("export", run, "out", "--checkpoint", "best").code == 0
    assert echelon("generate", "out", *sample[2:]).out == texts[0]
    ending = echelon("eval", run, "--checkpoint", "2")
    assert (
        ending.code == 2 and "--checkpoint 2: use newest, best or a step" in ending.err and "steps 1, 4" in ending.err
    )
    given = [
        echelon("eval", *each, "--data", "text.txt", "--json").out for each in ((run, "--checkpoint", "best"), ("out",))
    ]
    ours, exported = map(json.loads, given)
    assert exported["sequence_len"] == ours["sequence_len"] == 32
    assert exported["tokens"] == ours["tokens"] and exported["loss"] == pytest.approx(ours["loss"], rel=1e-6)
    ending = echelon("eval", "out", "--data", "text.txt", "--checkpoint", "best")
    assert ending.code == 2 and "is an HF folder and has no checkpoints" in ending.err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["evaluate.select_by=other"],
            "evaluate.select_by=other: no validation set has this name; use one of validation",
        ),
        (["checkpoint.keep_best=true", "data.validation_fraction=0"], "checkpoint.keep_best requires evaluations"),
        (["evaluate.early_stopping=2"], "evaluate.early_stopping requires evaluations during training"),
        (["evaluate.prompts=['']"], "evaluate.prompts: '' contains no token"),
        (["evaluate.prompts=[abc]", "evaluate.prompt_tokens=30"], "exceeds data.sequence_len=32"),
    ],
)
def test_invalid_evaluation_settings_are_refused(echelon, tmp_path, overrides, words):
    write_recipe(tmp_path)
    ending = echelon("train", "recipe.json", "--nproc", "1", *overrides)
    assert ending.code == 2 and words in ending.err, ending
    assert not list(Path("runs").glob("*/metrics.jsonl"))


@pytest.mark.slow
def test_held_out_text_without_a_target_is_no_result(echelon, tmp_path):
    """One token predicts nothing, and a loss of 0 would be the best."""
    (tmp_path / "one.txt").write_text("a")
    write_recipe(
        tmp_path,
        data={"validation_fraction": None, "validation": [{"path": "one.txt"}], "document_separator": None},
        train={"steps": 4, "eval_every": 2},
        evaluate={"early_stopping": 1},
        checkpoint={"every": 2, "keep_last": 1, "keep_best": True},
    )
    ending = echelon("train", "recipe.json", "--nproc", "1").succeeded()
    assert "eval at step 2: no result: it has no targets" in ending.out and "best held-out" not in ending.out
    run = tmp_path / "runs" / "tiny"
    rows = [row for row in read_lines(run / "metrics.jsonl") if row["kind"] == "eval"]
    assert [(row["step"], row["loss"], row["perplexity"], row["target_tokens"]) for row in rows] == [
        (2, None, None, 0), (4, None, None, 0)
    ]  # fmt: skip
    assert steps(run) == [4]
    ending = echelon("eval", run)
    assert ending.code == 0 and "loss: unknown" in ending.out, ending
    ending = echelon("eval", run, "--checkpoint", "best")
    assert ending.code == 2 and "no checkpoint is best" in ending.err, ending
