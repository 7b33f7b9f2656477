"""`import echelon` in scripts, with real workers and signals, and checks of what remains afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import echelon
from echelon.ground.errors import ConfigError, DataError, StoppedError, TrainingError
from tests.dist.command import EXACT, read_lines, write_recipe
from tests.own_parts import write_package

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(marked, monkeypatch, tmp_path):
    """The working directory of a script; no process that it starts may outlive the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def interrupt(name, step):
    """A callback for the lines of a run that sends this process a signal once, at its first line from `step` on.

    Fast steps share a line, so a run need not print the line of this very step.
    """
    sent = []

    def send(line):
        shown = re.match(r"step +([\d,]+)/", line)
        if shown and not sent and int(shown[1].replace(",", "")) >= step:
            sent.append(line)
            signal.raise_signal(name)

    return send


@pytest.mark.slow
def test_an_interrupt_saves_and_the_same_call_resumes(folder):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    recipe = echelon.load_recipe(write_recipe(folder), {"train.steps": 100_000})
    with pytest.raises(KeyboardInterrupt, match=r"^stopped by SIGINT at step .* the same command resumes from it"):
        echelon.train(recipe, nproc=2, on_line=interrupt(signal.SIGINT, 4))
    run = echelon.Run("runs/tiny")
    stopped_at = run.checkpoints()[-1].step
    assert run.status == "stopped" and stopped_at >= 4 and run.plan.world_size == 2

    lines = []
    stop = interrupt(signal.SIGTERM, stopped_at + 2)
    with pytest.raises(StoppedError, match=r"^stopped by SIGTERM"):
        echelon.train(recipe, nproc=2, on_line=lambda line: (lines.append(line), stop(line)))
    assert f"Resuming from step-{stopped_at:08d}." in lines
    assert [row["step"] for row in run.metrics()] == list(range(1, run.checkpoints()[-1].step + 1))
    assert not dist.is_initialized() and "GLOO_SOCKET_IFNAME" not in os.environ
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def test_invalid_data_raises_a_data_error(folder):
    recipe = echelon.load_recipe(write_recipe(folder), {"data.train": "missing.txt"})
    with pytest.raises(DataError, match=r"^data.train.0.path=missing.txt: no such file"):
        echelon.train(recipe, nproc=1, on_line=lambda line: None)
    assert not (folder / "runs" / "tiny" / "recipe.yaml").exists()


@pytest.mark.slow
def test_failed_training_raises_a_training_error(folder):
    recipe = echelon.load_recipe(write_recipe(folder), {"optim.learning_rate": 1e30, "fault.on_bad_step": "stop"})
    with pytest.raises(TrainingError, match="both must be finite"):
        echelon.train(recipe, nproc=1, on_line=lambda line: None)
    assert echelon.Run("runs/tiny").status == "failed"


SCRIPT = """
    import json
    import sys
    import echelon

    run = echelon.train("recipe.json", nproc=2)
    assert not {"torch", "echelon.run.lifecycle.session"} & set(sys.modules), "the run's process is another one"
    numbers = echelon.evaluate(run)
    texts = echelon.generate(run, ["1 plus", "2 plus"], max_tokens=4, num_samples=2, temperature=0)
    one = echelon.generate(run, "1 plus", max_tokens=4, temperature=0)
    out = echelon.export(run, "model", dtype="bf16")
    print(json.dumps({"rows": run.metrics(), "loss": numbers["loss"], "texts": texts, "one": one, "out": str(out)}))
"""


@pytest.mark.slow
def test_a_script_equals_the_commands(folder):
    """The script has no `if __name__ == "__main__"`; two processes tokenize; every step equals the command's run."""
    write_recipe(folder, data={"prepare_workers": 2})
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    told = json.loads(last)
    assert any(line.startswith("step 6/6") for line in shown)
    assert told["texts"][0] == told["texts"][1] == told["one"] and told["texts"][2].startswith("2 plus")
    assert AutoModelForCausalLM.from_pretrained(folder / told["out"]).dtype.itemsize == 2

    command = [sys.executable, "-m", "echelon", "train", "recipe.json", "run.name=other", "--nproc", "2"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    rows = echelon.Run("runs/other").metrics()
    assert [{key: row[key] for key in EXACT} for row in rows] == [
        {key: row[key] for key in EXACT} for row in told["rows"]
    ]
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "eval", "runs/tiny", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["loss"] == told["loss"]


@pytest.mark.slow
def test_external_classes_train_in_real_workers(folder, monkeypatch):
    """A reader, optimizer, objective, synchronizer and callback from a package on the caller's sys.path only."""
    monkeypatch.syspath_prepend(folder / "site")
    package = write_package(folder / "site", "parts_of_the_dist_test")
    (folder / "poems.verse").write_text("".join(f"verse {number} of them\n***\n" for number in range(400)))
    write_recipe(folder)
    overrides = {
        "data.train": [{"path": "poems.verse", "format": f"{package}:Verses"}],
        "optim.name": f"{package}:SignMomentum",
        "optim.options": {"momentum": 0.9},
        "objective.name": f"{package}:ZLoss",
        "objective.options": {"weight": 0.001},
        "sync.name": f"{package}:Slower",
        "sync.options": {"factor": 0.5},
        "train.callbacks": [{"name": f"{package}:Diary", "options": {"path": "diary.jsonl"}}],
    }
    run = echelon.train(echelon.load_recipe("recipe.json", overrides), nproc=2, on_line=lambda line: None)
    assert run.metrics()[0]["loss"] > run.metrics()[-1]["loss"] and run.checkpoints()[-1].read_state()["sync"] == {
        "steps": 6
    }
    told = read_lines("diary.jsonl")
    steps = [["step", row["step"], row["loss"]] for row in run.metrics()]
    assert [each for each in told if each[0] == "step"] == steps and ["save", 6] in told
    assert (told[0], told[-1]) == (["start", 0], ["end"]), "on rank 0 alone"
    assert run.recipe.optim.name == f"{package}:SignMomentum" and echelon.evaluate(run)["loss"] > 0
    overrides["optim.name"] = f"{package}:SignMomentun"
    with pytest.raises(
        ConfigError, match=r"^optim.name=parts_of_the_dist_test:SignMomentun: the module .* has no Sign"
    ):
        echelon.train(echelon.load_recipe("recipe.json", {**overrides, "run.name": "other"}), nproc=2)
    assert not (folder / "runs" / "other").exists()
