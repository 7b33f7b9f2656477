"""`echelon demo`: from text that every machine has to a sample and a report, also from a wheel alone."""

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

import echelon as api
from tests.dist.command import LAUNCHER_KEYS, RECIPE, TEXT

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
CONFIG = ",".join(f"{key}: {value}" for key, value in RECIPE["model"]["config"].items())
TINY = (
    f"model.config={{{CONFIG}}}", "tokenizer=bytes", "data.train=text.txt", "data.sequence_len=32", "train.steps=4",
    "train.global_batch_size=4", "train.eval_every=2", "train.log_every=2", "optim.warmup_steps=1",
    "checkpoint.every_steps=4",
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
    assert sampled.splitlines()[1].startswith("def read(")
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


def build_environment(folder):
    """An environment with the wheel of this source and what its metadata asks for; returns its folder of programs."""
    source, empty = folder / "source", folder / "empty"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)], check=True)
    venv.create(empty)
    wanted = [f"torch=={version('torch').partition('+')[0]}", *map(str, folder.glob("*.whl"))]  # the torch of this test
    subprocess.run([*pip, "--python", str(empty), "install", *wanted], check=True)
    return empty / "bin"


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_runs_the_demo(tmp_path):
    """The whole demo, as a user runs it first, without a checkout, make, git or a compiler."""
    programs = build_environment(tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    environment = {key: value for key, value in os.environ.items() if key not in (*LAUNCHER_KEYS, "PYTHONPATH")}
    del environment["OMP_NUM_THREADS"]
    done = subprocess.run(
        [programs / "echelon", "demo"], cwd=place, env={**environment, "PATH": str(programs)}, capture_output=True,
        text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("next")
    run = api.Run(place / "runs" / "demo")
    losses = [row["loss"] for row in run.metrics("eval")]
    assert len(losses) > 2 and losses == sorted(losses, reverse=True)
    assert float(re.search(r"^loss: (.+)$", done.stdout, re.MULTILINE)[1]) < 4.6 < 8 < run.metrics()[0]["loss"]
    sample = done.stdout.partition("== letting it continue")[2].partition("== drawing")[0]
    assert len(re.findall(r"\b(?:self|return|if|def|for|in|not|None)\b", sample)) >= 8, sample
