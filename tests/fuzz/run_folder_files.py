"""Damages each small file of a run folder in turn, and runs all operations that touch it.

A damaged file that a run can do without or rebuild must not stop a resume or a command. Any other damaged file is
refused with a message that names it. `COVERED` lists which test damages each file of a run folder.
"""

import fnmatch
import gzip
import json
import random
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from echelon.ground.errors import EchelonError
from echelon.ground.stored import write_json, write_text
from echelon.learn.checkpoint.given_models import RECORD
from echelon.run.folder.cost import Spending, write_spending
from echelon.run.folder.remote import write_run_name
from echelon.run.journal.trackers.forwarder import ForwarderState
from echelon.run.supervise.outcome import report, write_outcome
from tests.fuzz.damage import ODD_FILES, damage_bytes, damage_gzip, damage_json, foreign_files, put_odd_file
from tests.fuzz.judge import Refusals
from tests.fuzz.recall import undamaged
from tests.fuzz.run_operations import RunOperations
from tests.fuzz.stored_files import Parts, StoredFiles
from tests.fuzz.touched import Known, Restorer, State, read_state, record

# Files that `stored_files` damages: those of a checkpoint and of the model.
BIG_FILES = (
    "checkpoints/step-*/.metadata", "checkpoints/step-*/*.distcp", "checkpoints/step-*/manifest.json",
    "checkpoints/step-*/state.json", "model/*.json", "model/*.jinja",
)  # fmt: skip
# Files that echelon never reads: for people, for the tracker that wrote them, or replaced by the next start.
UNREAD = ("logs/rank-*.log", "logs/parent.log", "tensorboard/*", "wandb/*", ".lock", "export/*", "report.html")
# Whether a damaged file may be refused, by pattern.
SMALL_FILES = {
    "recipe.yaml": True,
    "plan.json": False,
    "estimate.json": False,
    "environment.json": False,
    "data.json": False,
    "remote.json": True,
    "metrics.jsonl": False,
    "samples.jsonl": False,
    "events.jsonl": False,
    "outcome.json": False,
    "spending.json": False,
    "trackers/*.json": False,
    "hub.json": True,
    "models.json": False,
    "profile/*.json.gz": False,
    "logs/console.log": False,
    ".outcomes/rank-*.json": False,
    ".outcomes/pid-*": False,
    ".outcomes/stop": False,
    ".outcomes/death": False,
    ".coordinator.json": False,
}
COVERED = (*BIG_FILES, *UNREAD, *SMALL_FILES)

REMOVED = "removed"
_OTHER_TYPES = (b"5", b'"x"', b"1e999", b"true", b"[null]", b'{"": null}', b"\xff\xfe", b" ", b"\n")


def write_trace(path: Path) -> None:
    """Write the trace of a step with a collective and a kernel."""
    events = [
        {"name": name, "cat": category, "ts": start, "dur": length, "pid": 1, "tid": 1, "args": {}}
        for name, category, start, length in (
            ("echelon step 2", "user_annotation", 0, 100), ("echelon data", "user_annotation", 1, 2),
            ("aten::mm", "cpu_op", 5, 40), ("gloo:all_reduce", "cpu_op", 50, 30),
        )
    ]  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, "distributedInfo": {"world_size": 1}}).encode()))


class RunFolderFiles:
    """The run of `StoredFiles` with every small file that a run may have. It is restored after each damage."""

    def __init__(self, stored: StoredFiles, aside: Path) -> None:
        folder = self.folder = stored.run
        write_spending(folder, Spending(seconds=10.0, until=1.0))
        write_run_name(folder, "20260101-000000-abcdef")
        ForwarderState(folder.tracker_path("mlflow"), steps={"train": 4}).write()
        write_outcome(folder.outcomes_dir, report(0, 0, ""))
        folder.write_pid(0)
        write_text(folder.stop_path, "")
        write_text(folder.death_path, "")
        row = {"step": 4, "prompt": "x", "text": "y"}
        write_text(folder.samples_path, json.dumps(row) + "\n")
        write_text(folder.console_path, "step 1/4  loss 5.0000\n")
        write_json(folder.hub_path, {"a/b": "0" * 40})
        write_json(folder.path / RECORD, {"model.checkpoint": "0" * 16})
        write_trace(folder.trace_path(2, 0))
        folder.rows.append_event("rollback", step=2, suppressed=4)
        folder.mark_finished(4, "early_stop")
        self._restorer = Restorer(folder.path, aside / "pristine")
        self._foreign = foreign_files(stored.marker) | {f"type {each!r}": each for each in _OTHER_TYPES}
        self.files = sorted(
            path.relative_to(folder.path).as_posix()
            for path in folder.path.rglob("*")
            if path.is_file() and self.pattern_of(path.relative_to(folder.path).as_posix()) is not None
        )
        self._operations = RunOperations(stored, aside)
        self._known: dict[str, Known] = {}
        self.expected: Parts = {}
        with undamaged():
            self.expected = self.use(everything=True)
        self.restore()

    @staticmethod
    def pattern_of(name: str) -> str | None:
        """The entry of SMALL_FILES that a file belongs to."""
        return next((pattern for pattern in SMALL_FILES if fnmatch.fnmatchcase(name, pattern)), None)

    def restore(self) -> None:
        """Restore the undamaged folder."""
        self.folder.unlock()
        self._restorer.restore()

    def damage(self, rng: random.Random, name: str) -> str:
        """Damage this file of the run folder; return a description of the damage."""
        path = self.folder.path / name
        content = path.read_bytes()
        choice = rng.random()
        if choice < 0.04:
            path.unlink()
            return REMOVED
        if choice < 0.12:
            what = rng.choice(ODD_FILES)
            put_odd_file(path, what)
            return what
        if choice < 0.45:
            what = rng.choice(sorted(self._foreign))
            path.write_bytes(self._foreign[what])
            return what
        if choice < 0.6 and content:
            path.write_bytes(damage_bytes(rng, content))
            return "other bytes"
        if path.suffix == ".gz":
            path.write_bytes(damage_gzip(rng, content))
            return "another profile"
        if path.suffix == ".json":
            path.write_bytes(damage_json(rng, content))
            return "other JSON"
        if path.suffix == ".jsonl":
            path.write_bytes(self._damage_lines(rng, content))
            return "other lines"
        path.write_bytes(damage_bytes(rng, content) if content else b"SIGTERM")
        return "other bytes"

    def _damage_lines(self, rng: random.Random, content: bytes) -> bytes:
        lines = content.splitlines()
        for _ in range(rng.choice((1, 1, 3))):
            number = rng.randrange(len(lines))
            whole = [other for other in self._foreign.values() if b"\n" not in other]
            other = rng.choice((*_OTHER_TYPES[:-1], *whole, None, None, None))
            try:
                lines[number] = damage_json(rng, lines[number]) if other is None else other
            except (ValueError, IndexError, RecursionError):  # it is already damaged
                lines[number] = b"null"
        return b"\n".join(lines) + b"\n"

    def may_refuse(self, name: str, what: str) -> bool:
        """Whether commands may refuse this damage with a message."""
        pattern = self.pattern_of(name)
        assert pattern is not None
        return SMALL_FILES[pattern] or what in ODD_FILES

    def identify(self, name: str, what: str) -> tuple[str, bytes | str]:
        """Return what is equal for equal damages: the file, and what is in its place."""
        path = self.folder.path / name
        return name, what if what in (REMOVED, *ODD_FILES) else sha256(path.read_bytes()).digest()

    def use(self, everything: bool = False) -> Parts:
        """Run the operations on a run.

        An operation is left out if everything that it touches is as it was in the undamaged folder; its result is then
        known. `everything`: none is left out, and those that would have been must not touch what is damaged. Raises
        Refusals if operations refuse, and the others have the right results.
        """
        found: Parts = {}
        refusals: list[EchelonError] = []
        now = self._read_state()
        for name, operation in self._operations.start().items():
            known = self._known.get(name)
            if known is not None and known.holds(now) and not everything:
                found |= known.parts
                now = known.apply(now)
                continue
            try:
                found |= self._run(name, operation, now) if everything else operation()
            except EchelonError as error:
                refusals.append(error)
                if name in ("prepare", "build"):  # without which there is no resume
                    break
            now = self._read_state()
        if refusals and found.items() <= self.expected.items():
            raise Refusals(refusals)
        return found

    def _run(self, name: str, operation: Callable[[], Parts], before: State) -> Parts:
        """Run an operation and record what it touches; if it would have been left out, nothing that is damaged."""
        with record(self.folder.path) as touched:
            parts = operation()
        known = self._known.setdefault(name, Known(before, self._read_state(), touched, parts))
        if known.holds(before):
            changes = touched.find_changes(known.before, before)
            assert not changes, f"{name} would be left out, and touches {changes}"
        return parts

    def _read_state(self) -> State:
        return read_state(self.folder.path, ("checkpoints", "model")) | self._operations.read_memory()
