"""Goodput with a fake clock, through a kill, a stop and a rollback; and the cost of a recovery, measured in parts."""

import json
import time

import pytest

from echelon.ground.launch_environment import RESTART_VARIABLE
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal import goodput
from echelon.run.journal.goodput import GoodputTracker
from echelon.run.journal.recovery import RecoveryWatch
from echelon.run.lifecycle import run_records as journaling
from echelon.run.training.state import GoodputState, SavedState, TrainState


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    made = Clock()
    monkeypatch.setattr(goodput, "read_clock", lambda: made.now)
    return made


def spend(tracker: GoodputTracker, clock, cause: str, seconds: float) -> None:
    with tracker.spending(cause):
        clock.now += seconds


def only(tracker: GoodputTracker) -> dict[str, float]:
    tracker.turn("training")
    return {cause: seconds for cause, seconds in tracker.seconds.items() if seconds}


def test_every_second_has_one_cause(clock) -> None:
    tracker = GoodputTracker(began=990.0)
    tracker.turn("training")
    clock.now += 60
    spend(tracker, clock, "evaluating", 7)
    spend(tracker, clock, "saving", 3)
    tracker.move("training", "data", 4)
    tracker.move("training", "skipped", 6)
    assert only(tracker) == {"starting": 10, "training": 50, "data": 4, "skipped": 6, "evaluating": 7, "saving": 3}
    assert tracker.describe() == (
        "useful time (goodput) 62.5 %: 50s of 1m20s in steps that count; 12.5 % starting; 8.8 % evaluating; "
        "7.5 % in steps that were not applied; 5.0 % waiting for data; 3.8 % waiting for a save"
    )


@pytest.mark.parametrize("asked", [False, True])
def test_the_gap_after_a_checkpoint(clock, asked: bool) -> None:
    """Saved at 1100, trained until 1130, dead until 1150, then 10 s to start."""
    first = GoodputTracker(began=1000.0)
    first.turn("training")
    clock.now = 1100.0
    if asked:
        first.stop()
    saved = GoodputState(**first.state_dict())
    clock.now = 1160.0
    second = GoodputTracker(began=1150.0)
    second.resume(saved, last_sign=0.0 if asked else 1130.0)
    expected = {"training": 100, "starting": 10, **({"stopped": 50} if asked else {"redone": 30, "down": 20})}
    assert only(second) == expected
    wall = 110 if asked else 160
    assert second.describe().startswith(f"useful time (goodput) {100 * 100 / wall:.1f} %: 1m40s of ")


def test_a_rollback_repeats_work(clock) -> None:
    tracker = GoodputTracker()
    tracker.turn("training")
    clock.now += 100
    saved = tracker.state_dict()["seconds"]
    clock.now += 40
    spend(tracker, clock, "evaluating", 5)
    tracker.move("training", "skipped", 2)
    tracker.go_back(saved)
    assert only(tracker) == {"training": 100, "redone": 45}


@pytest.mark.parametrize("end", ["done", "early_stop", None])
def test_the_pause_before_a_finished_run_is_extended_is_not_a_loss(tmp_path, monkeypatch, end) -> None:
    """Saved 100 s before the end of the run, or of its process, which was an hour ago."""
    now = time.time()
    folder = RunFolder(tmp_path)
    events = [("start", now - 4000), *([] if end is None else [(end, now - 3600)])]
    lines = [json.dumps({"event": event, "time": when, "step": 0}) for event, when in events]
    folder.events_path.write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setattr(journaling, "find_start", lambda until: now)
    saved = SavedState(TrainState(step=3), goodput=GoodputState({"training": 200.0}, now - 3700, stopped=False))
    spent = only(journaling.open_goodput(folder, saved))
    assert spent["down" if end is None else "stopped"] == pytest.approx(3700, abs=1)
    assert ("stopped" if end is None else "down") not in spent


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics_path.write_text('{"kind": "train", "step": 25}\n{"kind": "train", "step": 26}\n')
    return folder


def test_a_restart_is_reported_once_with_its_parts(folder, monkeypatch, caplog):
    told = {"ended_at": time.time() - 12, "detection_seconds": 0.25}
    monkeypatch.setenv(RESTART_VARIABLE, json.dumps(told))
    watch = RecoveryWatch(folder)
    folder.rows.cut_metrics(20)  # the earlier rows count
    watch.loaded()
    watch.stepped(21)
    watch.stepped(22)
    [row] = [json.loads(line) for line in folder.events_path.read_text().splitlines()]
    assert (row["event"], row["step"], row["detection_seconds"], row["repeated_steps"]) == ("recovered", 21, 0.25, 6)
    assert 12 <= row["restart_seconds"] < 13 and 0 <= row["load_seconds"] < 1 and 0 <= row["first_step_seconds"] < 1
    [line] = caplog.messages
    assert line.startswith("recovered, after the failure: processes ended 0.2 s, rendezvous 12.")
    assert line.endswith("; 6 steps lost")


def test_under_torchrun_it_counts_from_the_last_activity(folder, monkeypatch, caplog):
    monkeypatch.delenv(RESTART_VARIABLE, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    watch = RecoveryWatch(folder)
    watch.loaded()
    watch.stepped(27)
    assert "since the last sign of life" in caplog.messages[0] and caplog.messages[0].endswith("; 0 steps lost")
    assert json.loads(folder.events_path.read_text())["detection_seconds"] is None


def test_a_start_by_hand_reports_nothing(folder, monkeypatch, caplog):
    for name in (RESTART_VARIABLE, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    RecoveryWatch(folder).stepped(27)
    assert not caplog.messages and not folder.events_path.exists()
