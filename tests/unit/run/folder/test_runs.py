"""`echelon runs`, `status`, `logs` and `cancel` of run folders, with real processes that hold their locks."""

import json
import os
import platform
import signal
import subprocess
import sys

import pytest

from echelon.run.folder.cost import Spending, write_spending
from echelon.run.folder.overview import summarize_run
from echelon.run.folder.run_folder import RunFolder

# Holds the lock of the run argv[1], logs a line when it is asked to stop, and ends.
HOLDER = """
import signal, sys
from pathlib import Path
from echelon.run.folder.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
folder.lock()
print("locked", flush=True)
signal.sigwait({signal.SIGTERM})
with folder.console_path.open("a") as console:
    console.write("saved\\n")
"""


@pytest.fixture
def hold():
    """Start a process that holds a run's lock; it ends with the test."""
    processes = []

    def start(path):
        command = [sys.executable, "-c", HOLDER, str(path)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "locked\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def write_run(path, step=2, event="start", loss=3.25, **files):
    """Write the files of a run by hand."""
    (path / "logs").mkdir(parents=True)
    (path / "events.jsonl").write_text(json.dumps({"time": 1.0, "event": event, "step": step}) + "\n")
    rows = [{"kind": "train", "step": each, "loss": loss + step - each} for each in range(1, step + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    for each in path.glob("*.jsonl"):
        os.utime(each, (1_767_322_980, 1_767_322_980))
    return path


def test_runs_are_listed_with_status_step_loss_time_and_cost(echelon, tmp_path, hold):
    write_run(tmp_path / "runs" / "a", outcome={"time": 1, "outcome": "done", "step": 2})
    write_run(tmp_path / "runs" / "deep" / "b", 5, "signal", estimate={"memory": {}, "schedule": {"steps": 300}})
    hold(write_run(tmp_path / "runs" / "c", 0, "prepare"))
    write_run(tmp_path / "runs" / "d", 3, "failure", loss=1.0)
    write_run(tmp_path / "runs" / "a" / "checkpoints" / "nested")  # not a run of its own
    write_spending(RunFolder(tmp_path / "runs" / "d"), Spending(usd=2.5))
    (tmp_path / "runs" / "d" / "estimate.json").write_text("[]")  # damaged: unknown
    jobs = tmp_path / "runs" / "job"  # not a run: a launched job has a recipe too
    jobs.mkdir()
    (jobs / "recipe.yaml").write_text("{}")
    code, out, _ = echelon("runs")
    assert (code, out) == (0, """\
run          status   step   loss    updated (UTC)     cost
runs/a       done     2      3.2500  2026-01-02 03:03  -
runs/c       running  0      -       2026-01-02 03:03  -
runs/d       failed   3      1.0000  2026-01-02 03:03  $2.50
runs/deep/b  stopped  5/300  3.2500  2026-01-02 03:03  -
""")  # fmt: skip
    code, out, _ = echelon("runs", "runs/deep", "runs/a", "--json")
    first, second = json.loads(out)["runs"]
    assert (first["name"], first["path"], second["path"]) == ("a", "runs/a", "runs/deep/b")
    assert second == {
        "name": "b", "path": "runs/deep/b", "status": "stopped", "step": 5, "num_steps": 300, "loss": 3.25,
        "updated_at": 1_767_322_980.0, "usd": None, "process": None,
    }  # fmt: skip


def test_a_place_without_runs(echelon, tmp_path):
    assert echelon("runs")[:2] == (0, "no run below runs\n")
    assert echelon("status")[:2] == (0, "no job was launched from this folder, and runs/ has no run\n")
    code, _, err = echelon("runs", "other")
    assert code == 2 and err == "echelon: other is not a folder; give folders with runs, such as runs.\n"


def test_status_takes_a_folder_or_a_name_and_without_one_shows_all(echelon, tmp_path, hold):
    write_run(tmp_path / "runs" / "a", 2)
    process = hold(write_run(tmp_path / "elsewhere" / "b", 7))
    line = "runs/a  train  interrupted  step 2  loss 3.2500\n"
    assert echelon("status", "runs/a/") == echelon("status", "a") == echelon("status") == (0, line, "")
    running = f"elsewhere/b  train  running  process {process.pid} on {platform.node()}  step 7  loss 3.2500\n"
    assert echelon("status", "elsewhere/b") == (0, running, "")
    code, _, err = echelon("status", "unknown")
    assert code == 2 and err == (
        "echelon: unknown is neither a run nor a job of this folder; the newest runs in runs/: a; the newest jobs in "
        "jobs/: none.\n"
    )


def test_a_run_is_cancelled_and_its_console_followed_to_its_end(echelon, tmp_path, hold):
    path = write_run(tmp_path / "runs" / "a")
    (path / "logs" / "console.log").write_text("step 1\n")
    process = hold(path)
    assert echelon("logs", "a") == (0, "step 1\n", "")
    assert echelon("cancel", "a") == (0, "asked runs/a to stop; it saves, then ends\n", "")
    assert echelon("logs", "a", "--follow") == (0, "step 1\nsaved\n", "")
    assert process.wait(timeout=60) == 0
    code, _, err = echelon("cancel", "a")
    assert code == 2 and err == "echelon: runs/a is not running; it is interrupted.\n"


@pytest.mark.parametrize(
    ("holder", "words"), [("123 on another-host", "not on this machine"), (f"1 on {platform.node()}", "container")]
)
def test_no_process_elsewhere_is_signalled(echelon, tmp_path, hold, monkeypatch, holder, words):
    process = hold(path := write_run(tmp_path / "runs" / "a"))
    (path / ".lock").write_text(holder)
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail(f"{pid} got {signal.Signals(number).name}"))
    code, _, err = echelon("cancel", "a")
    assert code == 2 and words in err and holder in err
    monkeypatch.undo()
    assert process.poll() is None


@pytest.mark.parametrize("steps", ["Infinity", "NaN", "-Infinity"])
def test_a_number_of_steps_that_is_none_is_unknown(tmp_path, steps):
    (tmp_path / "estimate.json").write_text(f'{{"schedule": {{"steps": {steps}}}}}')
    assert summarize_run(tmp_path).num_steps is None
