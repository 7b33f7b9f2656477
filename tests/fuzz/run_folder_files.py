"""Damages each small file of a run folder in turn, and runs all commands that read it.

A damaged file that a run can do without or rebuild must not stop a resume or a command. Any other damaged file is
refused with a message that names it. `COVERED` lists which test damages each file of a run folder.
"""

import fnmatch
import gzip
import json
import random
import shutil
from collections import defaultdict
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from echelon.ground.checksums import find_faults
from echelon.ground.errors import ConfigError
from echelon.ground.redaction import make_printable
from echelon.ground.stored import write_json, write_text
from echelon.launch.job_logs import Log
from echelon.learn.checkpoint.export import export_run
from echelon.learn.checkpoint.folder import clear_out, list_checkpoints
from echelon.recipe.load import load_recipe
from echelon.run.folder.cost import Spending, write_spending
from echelon.run.folder.overview import describe_run, summarize_run
from echelon.run.folder.remote import write_run_name
from echelon.run.folder.remote_start import describe_remote
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers.forwarder import Ledger, MetricsForwarder
from echelon.run.journal.trackers.tracker import Opened
from echelon.run.lifecycle.assemble import build_trainer
from echelon.run.lifecycle.setup import prepare_run
from echelon.run.report.comparison import build_comparison
from echelon.run.report.live import read_live, shorten
from echelon.run.report.page import render_page
from echelon.run.report.plain import render_text
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report
from echelon.run.supervise.outcome import report, write_outcome
from echelon.tools.inference.held_out import open_held_out
from tests.fuzz.damage import ODD_FILES, damage_bytes, damage_gzip, damage_json, foreign_files, put_odd_file
from tests.fuzz.stored_files import MACHINE, Parts, StoredFiles, describe_target, digest
from tests.log_lines import LogLines

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
    "profile/*.json.gz": False,
    "logs/console.log": False,
    ".outcomes/rank-*.json": False,
    ".outcomes/pid-*": False,
    ".outcomes/stop": False,
    ".outcomes/death": False,
}
COVERED = (*BIG_FILES, *UNREAD, *SMALL_FILES)

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


class NoTracker:
    """A tracker that keeps the rows in memory."""

    name = "mlflow"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def open(self, run_key: str, given: Any) -> Any:
        """Start without rows."""
        return Opened(defaultdict(int), "nowhere")

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Keep them."""
        self.rows += rows

    def finish(self, done: bool) -> None:
        """Nothing to do."""


class RunFolderFiles:
    """The run of `StoredFiles` with every small file that a run may have. It is restored after each damage."""

    def __init__(self, stored: StoredFiles, aside: Path) -> None:
        self._stored, self._aside = stored, aside / "pristine"
        self._scratch = aside
        folder = self.folder = stored.run
        write_spending(folder, Spending(seconds=10.0, until=1.0))
        write_run_name(folder, "20260101-000000-abcdef")
        Ledger(folder.tracker_path("mlflow"), steps={"train": 4}).write()
        write_outcome(folder.outcomes_dir, report(0, 0, ""))
        folder.write_pid(0)
        write_text(folder.stop_path, "")
        write_text(folder.death_path, "")
        row = {"step": 4, "prompt": "x", "text": "y"}
        write_text(folder.samples_path, json.dumps(row) + "\n")
        write_text(folder.console_path, "step 1/4  loss 5.0000\n")
        write_json(folder.hub_path, {"a/b": "0" * 40})
        write_trace(folder.trace_path(2, 0))
        folder.rows.append_event("rollback", step=2, suppressed=4)
        folder.mark_finished(4, "early_stop")
        self._longer, _ = load_recipe(folder.recipe_path, ["train.steps=6"])
        shutil.copytree(folder.path, self._aside)
        self._foreign = foreign_files(stored.marker) | {f"type {each!r}": each for each in _OTHER_TYPES}
        self.files = sorted(
            path.relative_to(folder.path).as_posix()
            for path in folder.path.rglob("*")
            if path.is_file() and self.pattern_of(path.relative_to(folder.path).as_posix()) is not None
        )
        self.expected = self.use()
        self.restore()

    @staticmethod
    def pattern_of(name: str) -> str | None:
        """The entry of SMALL_FILES that a file belongs to."""
        return next((pattern for pattern in SMALL_FILES if fnmatch.fnmatchcase(name, pattern)), None)

    def restore(self) -> None:
        """Restore the undamaged folder."""
        self.folder.unlock()
        shutil.rmtree(self.folder.path)
        shutil.copytree(self._aside, self.folder.path)

    def damage(self, rng: random.Random, name: str) -> str:
        """Damage this file of the run folder; return a description of the damage."""
        path = self.folder.path / name
        content = path.read_bytes()
        choice = rng.random()
        if choice < 0.04:
            path.unlink()
            return "removed"
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
            except (ValueError, IndexError):  # it is already damaged
                lines[number] = b"null"
        return b"\n".join(lines) + b"\n"

    def may_refuse(self, name: str, what: str) -> bool:
        """Whether commands may refuse this damage with a message."""
        pattern = self.pattern_of(name)
        assert pattern is not None
        return SMALL_FILES[pattern] or what in ODD_FILES

    def use(self) -> Parts:
        """Run every operation on a run: status, evaluate, export, prune, send rows to a tracker, report, resume."""
        return {**self._look(), **self._go_on()}

    def _look(self) -> Parts:
        path = self.folder.path
        target = describe_target(path)
        [held_out] = open_held_out(path)
        out = self._scratch / "exported"
        shutil.rmtree(out, ignore_errors=True)
        export_run(path, out)
        damaged = [find_faults(each.path, checksums=True) for each in list_checkpoints(path)]
        if not (path / "remote.json").exists():
            list(describe_remote(path, verify=False))
        RunFolder(path).rows.last_step()
        if self.folder.events_path.is_file():
            self._report()
        kept = list(clear_out(self.folder.checkpoints_dir, 2))
        read = self.folder.remedy()
        assert isinstance(read, str)
        self._send_rows()
        looked = {"target": digest(sorted(target.items())), "kept": digest(damaged, kept)}
        return looked | {"held out": str(held_out.dataset.num_samples)}

    def _report(self) -> None:
        """Make every report, page and line about the run, of which none controls a terminal."""
        path = self.folder.path
        record = read_record(path)
        reports = [build_report(record), build_comparison([record] * 2), shorten(read_live(path))]
        for text in (*map(render_page, reports), *map(render_text, reports), describe_run(summarize_run(path))):
            make_printable(text).encode()
        for page in map(render_page, reports):
            assert make_printable(page) == page
        with suppress(ConfigError):
            lines = Log(self.folder.console_path).follow(lambda: True)
            assert all(isinstance(line, str) for line in islice(lines, 9))  # of a huge file, each has a megabyte

    def _send_rows(self) -> None:
        """Read the rows as a tracker receives them; a failing forwarder reports it."""
        path = self.folder.tracker_path("mlflow")
        if path.is_file() or not path.exists():
            forwarder = MetricsForwarder(NoTracker(), path, self.folder.metrics_path)
            with closing(LogLines()) as said:
                forwarder.start()
                forwarder.close(done=True)
            failed = [line for line in said.lines if " fails " in line]
            assert not failed or not self.folder.metrics_path.is_file(), failed

    def _go_on(self) -> Parts:
        """Resume for two more steps, and stop before the first one."""
        prepared = prepare_run(self._longer, False, lambda: MACHINE, {})
        assert prepared is not None
        assert not list(self.folder.outcomes_dir.iterdir())
        trainer = build_trainer(self._longer, prepared.plan, self.folder, self._stored.runtime, "eager")
        try:
            found = {name: digest(tensor) for name, tensor in trainer.train_step.learner.engine.state_dict().items()}
            state = {key: value for key, value in asdict(trainer.state).items() if key != "suppressed"}
            trainer.accounting.goodput.describe()
            return {"state": digest(state), **found}
        finally:
            trainer.train_step.loader.close()
            trainer.accounting.journal.close()
            trainer.saver.store.close()
            for group in trainer.saver.store.groups:
                dist.destroy_process_group(group)
