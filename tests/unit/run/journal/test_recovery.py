"""The cost of a recovery is measured in parts and reported once, only if something was lost."""

import json
import time

import pytest

from echelon.ground.launch_environment import RESTART_VARIABLE
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.recovery import RecoveryWatch


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
