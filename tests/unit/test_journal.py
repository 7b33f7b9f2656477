"""The console messages and rows of a run."""

import errno
import json
import os

import pytest

from echelon.recipe.batches import BatchSchedule, constant_batch, ramp_batch
from echelon.reporting import journal as journal_module
from echelon.reporting.journal import Journal
from echelon.runs.run_folder import RunFolder


@pytest.mark.parametrize(
    ("batches", "remaining"),
    [
        (constant_batch(8, 64), "8s"),  # two steps took 2 s: 8 more
        # 2 sequences in each of the first five steps, then 8: 4 of them took 2 s, and 2 * 2 + 6 * 8 are left
        (ramp_batch(2, 8, 6, over_tokens=640, sequence_len=64), "26s"),
    ],
)
def test_the_time_left_counts_sequences(tmp_path, monkeypatch, batches: BatchSchedule, remaining: str, caplog):
    clock = iter([100.0, 101.0, 102.0])
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: next(clock))
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=11, log_every=1, batches=batches)
    row = dict.fromkeys(("loss", "grad_norm", "tokens_per_second", "mfu", "memory_peak_bytes"))
    for step in (1, 2, 3):
        more = {"step": step, "step_seconds": 1.0, "data_wait_seconds": 0.0, "learning_rate": 1.0, "skipped": False}
        journal.train({"kind": "train", **row, **more})
    journal.close()
    assert [line.split("eta ")[1] for line in caplog.messages][::2] == ["-", remaining]


def test_rows_are_cut_and_the_file_continues(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=9, log_every=9, batches=constant_batch(8, 64))
    for step in (2, 3, 4):
        journal.train({"kind": "train", "step": step})
    journal.cut(2)
    journal.train({"kind": "train", "step": 3})
    journal.close()
    assert [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()] == [2, 3]


def test_rows_wait_on_a_full_disk_and_stay_complete(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=9, log_every=1, batches=constant_batch(8, 64))
    disk = FullDisk(journal._file, room=100)
    journal._file = disk
    row = {"kind": "eval", "loss": 1.0, "perplexity": 2.0, "bits_per_byte": None}
    row |= {"reward_accuracy": None, "reward_margin": None, "sets": {}}
    for step in (1, 2, 3):
        journal.evaluation({"step": step, **row})
    assert folder.metrics_path.stat().st_size == 100
    with pytest.raises(OSError, match="No space left"):
        journal.flush()
    disk.room = 10**6
    journal.evaluation({"step": 4, **row})
    journal.close()
    assert [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()] == [1, 2, 3, 4]


class FullDisk:
    """A file that accepts the first `room` bytes, and then fails like a full disk."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def write(self, content):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._file.write(content[: self.room])
        self.room -= taken
        return taken

    def close(self):
        self._file.close()
