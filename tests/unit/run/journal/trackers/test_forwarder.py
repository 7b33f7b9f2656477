"""Metrics forwarders: the rows a tracker receives if it fails, hangs, recovers, or belongs to a resumed run."""

import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from echelon.ground.errors import ConfigError
from echelon.ground.stored import write_text
from echelon.recipe.difference import blocking_differences
from echelon.recipe.names import TRACKERS
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers import check_trackers, start_trackers
from echelon.run.journal.trackers import forwarder as forwarder_module
from echelon.run.journal.trackers.forwarder import ForwarderState, MetricsForwarder, RowReader
from echelon.run.journal.trackers.tracker import Opened, scalars
from tests.log_lines import LogLines
from tests.unit.recipe_samples import SMALL, load_text
from tests.waiting import wait_until


class Shelf:
    """A tracker that keeps its rows in memory, also across forwarders, and fails on request."""

    name = "shelf"
    is_store = True

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.error: Exception | None = None
        self.lose_answer = False
        self.finished: list[bool] = []

    def open(self, run_key: str, given: dict[str, int]) -> Opened:
        self._fail()
        self.keys.append(run_key)
        held: defaultdict[str, int] = defaultdict(int)
        held.update({row["kind"]: row["step"] for row in self.rows})
        return Opened(held, "shelf in memory")

    def send(self, rows: list[dict[str, Any]]) -> None:
        self._fail()
        self.rows += rows
        if self.lose_answer:
            self.lose_answer = False
            raise ConnectionError("the answer was lost")

    def finish(self, done: bool) -> None:
        self._fail()
        self.finished.append(done)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


class Run:
    """A run's metrics.jsonl and its console messages."""

    def __init__(self, folder: Path) -> None:
        self.metrics = folder / "metrics.jsonl"
        self.ledger = folder / "trackers" / "shelf.json"
        self.lines = LogLines().lines

    def write(self, *steps: int, kind: str = "train") -> None:
        with self.metrics.open("a") as file:
            for step in steps:
                file.write(json.dumps({"kind": kind, "step": step, "loss": 1 / step}) + "\n")

    def start(self, tracker: Any, resumed_step: int = 0) -> MetricsForwarder:
        forwarder = MetricsForwarder(tracker, self.ledger, self.metrics, resumed_step)
        forwarder.start()
        return forwarder

    def said(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(forwarder_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(forwarder_module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(forwarder_module, "_RETRY_AT_END_SECONDS", 0.02)
    monkeypatch.setattr(forwarder_module, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(forwarder_module, "HURRY_SECONDS", 0.1)
    return Run(tmp_path)


def steps(shelf, kind="train"):
    return [row["step"] for row in shelf.rows if row["kind"] == kind]


def test_rows_are_sent_during_the_run_and_at_its_end(run):
    shelf = Shelf()
    forwarder = run.start(shelf)
    run.write(1, 2)
    wait_until(lambda: steps(shelf) == [1, 2])
    run.write(3)
    run.write(3, kind="eval")
    forwarder.close(done=True)
    assert (steps(shelf), steps(shelf, "eval"), shelf.finished) == ([1, 2, 3], [3], [True])
    assert run.lines == ["track: shelf in memory"]
    assert ForwarderState.read(run.ledger).complete


def test_an_outage_is_reported_once_and_loses_nothing(run):
    shelf = Shelf()
    forwarder = run.start(shelf)
    run.write(1)
    wait_until(lambda: steps(shelf) == [1])
    shelf.error = ConnectionError("refused by https://me:secret@host/api")
    run.write(*range(2, 200))
    wait_until(lambda: run.said("fails"))
    time.sleep(0.2)
    assert steps(shelf) == [1]
    shelf.error = None
    wait_until(lambda: run.said("works again and"))
    run.write(200)
    forwarder.close(done=True)
    assert steps(shelf) == list(range(1, 201))
    [failed], [again] = run.said("fails"), run.said("works again and")
    assert "refused by https://***@host/api" in failed and "198 pending rows" in again
    assert "secret" not in "".join(run.lines)


def test_a_batch_whose_answer_was_lost_is_not_sent_twice(run):
    shelf = Shelf()
    shelf.lose_answer = True
    run.write(1, 2, 3)
    run.start(shelf).close(done=True)
    assert steps(shelf) == [1, 2, 3]


def test_missing_rows_are_reported_at_the_end_and_sent_by_the_next_start(run):
    shelf = Shelf()
    shelf.error = OSError("no such host")
    run.write(1, 2, 3)
    started = time.monotonic()
    run.start(shelf).close(done=True)
    assert time.monotonic() - started < 20
    [line] = run.said("is missing")
    assert line == "track: shelf is missing 3 of 3 rows; run the same command again to send them"
    assert not ForwarderState.read(run.ledger).complete
    wait_until(lambda: not any(thread.name == "forwarder-shelf" for thread in threading.enumerate()))
    shelf.error = None
    run.start(shelf).close(done=True)
    assert steps(shelf) == [1, 2, 3] and ForwarderState.read(run.ledger).complete


def test_a_file_that_cannot_be_read_does_not_end_training(run):
    run.metrics.mkdir()
    run.start(Shelf()).close(done=True)
    [line] = run.said("may lack rows")
    assert "metrics.jsonl" in line and "Is a directory" in line


def test_a_failed_run_does_not_wait_for_a_tracker_that_hangs(run):
    shelf = Shelf()
    released = threading.Event()
    shelf.send = lambda rows: released.wait(60)
    run.write(1)
    started = time.monotonic()
    run.start(shelf).close(done=False)
    assert time.monotonic() - started < 20
    released.set()


def test_a_resumed_run_continues_its_tracking_run_without_repeating_steps(run):
    """Steps 4 and 5 were lost and are repeated; their first values are kept."""
    shelf = Shelf()
    run.write(1, 2, 3, 4, 5)
    run.start(shelf).close(done=False)
    run.metrics.unlink()
    run.write(1, 2, 3, 4, 5, 6, 7)
    run.start(shelf, resumed_step=3).close(done=True)
    assert run.said("keeps the values of steps 4 to 5") == run.lines[-1:]
    assert steps(shelf) == [1, 2, 3, 4, 5, 6, 7]
    assert len(set(shelf.keys)) == 1 and shelf.finished == [False, True]


def test_a_crash_before_the_tracking_run_exists_leaves_its_key_behind(run):
    """The key is on disk before anything is created under it."""
    seen: list[str] = []

    class Crashing(Shelf):
        def open(self, run_key, given):
            seen.append(json.loads(run.ledger.read_text())["run_key"])
            raise ConnectionError("gone")

    run.start(Crashing()).close(done=False)
    shelf = Shelf()
    run.start(shelf).close(done=True)
    assert set(seen) == {shelf.keys[0]}


def test_a_ledger_that_cannot_be_written_counts_as_an_outage(run):
    run.ledger.parent.write_text("a file where a folder should be")
    run.write(1)
    run.start(Shelf()).close(done=True)
    assert run.said("fails (FileExistsError") and run.said("is missing 1 of 1 rows")


def test_the_reader_waits_for_complete_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)
    assert reader.read(10) == []
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"st')
    assert reader.read(1) == [{"kind": "train", "step": 1}]
    assert reader.read(10) == [{"kind": "train", "step": 2}]
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"kind": "train", "step": 3}\n')
    assert reader.read(10) == [{"kind": "train", "step": 3}] and reader.read(10) == []


def test_a_replaced_file_is_read_from_its_beginning(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"kind": "train", "step": 3}\n')
    reader = RowReader(path)
    assert len(reader.read(2)) == 2
    other.write_text('{"kind": "train", "step": 1, "longer": 1}\n{"kind": "train", "step": 2, "longer": 1}\n')
    other.replace(path)
    assert reader.read() == [{"kind": "train", "step": 3}], "the middle of a row of the other file would be no row"
    reader.close()
    assert [row["longer"] for row in reader.read()] == [1, 1]
    reader.close()


def test_rows_that_are_cut_and_written_again_arrive_once(run):
    """As after a rollback: the new rows are longer, so old offsets are invalid."""
    shelf = Shelf()
    forwarder = run.start(shelf)
    run.write(1, 2, 3, 4)
    wait_until(lambda: steps(shelf) == [1, 2, 3, 4])
    write_text(
        run.metrics, "".join(json.dumps({"kind": "train", "step": step, "new": "x" * 50}) + "\n" for step in (1, 2))
    )
    forwarder.reread()
    run.write(3, 4, 5, 6)
    forwarder.close(done=True)
    assert steps(shelf) == [1, 2, 3, 4, 5, 6]


def test_numbers_of_a_row_and_of_its_sets():
    row = {
        "kind": "eval", "step": 7, "loss": 2.0, "perplexity": None, "skipped": False, "batch_hash": "00",
        "sets": {"code": {"loss": 1.5, "tokens": 3}, "prose": {"loss": None}},
    }  # fmt: skip
    assert scalars(row) == {"eval/loss": 2.0, "eval/code/loss": 1.5, "eval/code/tokens": 3}


def test_a_tracker_of_another_package_has_a_section_of_its_own(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept(Shelf):
        def __init__(self, recipe: Any, folder: Any, resumed_step: int) -> None:
            super().__init__()
            self.where = recipe.shelf["where"]

    monkeypatch.setitem(TRACKERS.loaded, "shelf", Kept)
    recipe, _ = load_text(tmp_path, SMALL, "track=[shelf]", "shelf.where=here")
    other, _ = load_text(tmp_path, SMALL)
    assert not blocking_differences(recipe, other)
    check_trackers(recipe)
    [forwarder] = start_trackers(recipe, RunFolder(tmp_path), 0)
    forwarder.close(done=True)
    monkeypatch.setitem(TRACKERS.loaded, "shelf", dict)
    with pytest.raises(ConfigError, match="track=shelf: it must be a class with open, send, finish, like echelon's Tr"):
        check_trackers(recipe)
