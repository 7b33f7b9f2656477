"""`echelon demo`, made tiny by overrides (`tests/release.py` runs all of it), and what `echelon init` writes trains."""

import json
import re
from pathlib import Path

import pytest

import echelon as api
from tests.dist.command import RECIPE, TEXT, read_lines

pytestmark = pytest.mark.dist

CONFIG = ",".join(f"{key}: {value}" for key, value in RECIPE["model"]["config"].items())
TINY = (
    f"model.config={{{CONFIG}}}", "tokenizer=bytes", "data.train=text.txt", "data.sequence_len=32", "train.steps=4",
    "train.global_batch_size=4", "train.eval_every=2", "train.log_every=2", "optim.warmup=1",
    "checkpoint.every=4",
)  # fmt: skip
PARTS = ("== training ", "== evaluating ", "== letting it continue ", "== drawing ", "== done in ")


def test_the_demo_trains_evaluates_samples_reports_and_says_what_is_next(echelon):
    Path("text.txt").write_text(TEXT)
    first = echelon("demo", *TINY, "--out", "a demo").succeeded()
    places = [first.out.index(part) for part in PARTS]
    assert places == sorted(places)
    trained, evaluated, sampled, drawn, ended = (
        first.out[start:end] for start, end in zip(places, [*places[1:], None], strict=True)
    )
    assert all(re.search(rf"^step {step}/4  loss ", trained, re.MULTILINE) for step in (1, 2, 4))
    assert re.search(r"^loss: \d\.\d+$", evaluated, re.MULTILINE)
    assert sampled.splitlines()[1].startswith("def __init__(self, path")
    assert drawn.splitlines()[1] == "report: a demo/report.html"
    lines = ended.splitlines()[1:]
    assert lines and all(line.startswith("next") for line in lines)
    assert "echelon generate 'a demo' --prompt" in ended and "echelon init my-model.yaml" in ended
    run = api.Run("a demo")
    assert (run.status, run.step, run.plan.world_size) == ("done", 4, 2)
    assert (run.path / "report.html").is_file()

    again = echelon("demo", *TINY, "--out", "a demo")
    assert again.code == 0 and "run: a demo has finished" in again.out
    assert again.out[again.out.index(PARTS[1]) :].splitlines()[1:-5] == first.out[places[1] :].splitlines()[1:-5]


def test_what_the_demo_refuses(echelon, monkeypatch):
    for arguments, words in [
        (["--nproc", "0"], "--nproc 0 is neither a number of processes nor auto"),
        (["train.step=3"], "train.step"),
        ([*TINY, "data.train=nowhere.txt"], "nowhere.txt"),
    ]:
        ending = echelon("demo", *arguments)
        assert ending.code == 2 and words in ending.err and "== evaluating" not in ending.out, ending
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ending = echelon("demo")
    assert ending.code == 2 and "a launcher started it (worker)" in ending.err and not ending.out
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_recipe_for_a_model_size_trains(echelon):
    Path("text.txt").write_text(TEXT)
    ending = echelon("init", "small.yaml", "--params", "1m", "--tokens", "200k", "--vocab-size", "300").succeeded()
    for words in ("learning_rate: 0.0013  (Kaplan, 0.003239", "global_batch_tokens: 4096  (49 steps; DeepSeek, 0.2920",
                  "0.2 tokens for each parameter: few.", "wrote small.yaml"):  # fmt: skip
        assert words in ending.out
    echelon(
        "train", "small.yaml", "data.train.0.path=text.txt", "data.sequence_len=64", "train.tokens=16384"
    ).succeeded()
    losses = [row["loss"] for row in read_lines("runs/small/metrics.jsonl") if row["kind"] == "train"]
    assert len(losses) == 4 and losses[-1] < losses[0] < 6.5
    assert json.loads(Path("runs/small/model/config.json").read_text())["vocab_size"] == 320


def test_init_refusals(echelon):
    Path("there.yaml").write_text("mine")
    for arguments, words in [
        (["there.yaml"], "there.yaml already exists"),
        (["new.yaml", "--params", "much"], "--params much is not a count; write it like 1.3b, 350m or 2e9."),
        (["new.yaml", "--tokens", "9"], "--tokens 9 is out of range; use 100k to 100t."),
        (["new.yaml", "--vocab-size", "300"], "--vocab-size 300 requires --params or --tokens"),
    ]:
        ending = echelon("init", *arguments)
        assert ending.code == 2 and words in ending.err and not Path("new.yaml").exists()
    assert Path("there.yaml").read_text() == "mine"
    assert echelon("init").code == 0 and "num_hidden_layers: 4" in Path("recipe.yaml").read_text()
