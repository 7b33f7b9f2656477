"""`echelon demo`, made tiny by overrides. `tests/release.py` runs all of it, from the wheel in an empty environment."""

import re
from pathlib import Path

import pytest

import echelon as api
from tests.dist.command import RECIPE, TEXT

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
    first = echelon("demo", *TINY, "--out", "a demo")
    assert first.code == 0, first
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
