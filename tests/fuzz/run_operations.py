"""What can be done with a run, as separate operations: each reads files of the run folder and has a result."""

import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from echelon.ground.checksums import find_faults
from echelon.ground.errors import ConfigError
from echelon.ground.redaction import make_printable
from echelon.launch.records import Log
from echelon.learn.checkpoint.export import export_run
from echelon.learn.checkpoint.folder import clear_out, list_checkpoints
from echelon.learn.learner import Learner
from echelon.planner.plan import ParallelPlan
from echelon.recipe.load import load_recipe
from echelon.run.folder.overview import describe_run, summarize_run
from echelon.run.folder.remote_start import describe_remote
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.recovery import RecoveryWatch
from echelon.run.journal.trackers.forwarder import MetricsForwarder
from echelon.run.journal.trackers.tracker import Opened
from echelon.run.lifecycle.assemble import assemble
from echelon.run.lifecycle.run_learner import build_run_learner
from echelon.run.lifecycle.setup import PreparedRun, prepare_run
from echelon.run.report.comparison import build_comparison
from echelon.run.report.page import render_page
from echelon.run.report.plain import render_text
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report
from echelon.run.report.server import read_live, shorten
from echelon.tools.inference.evaluate import open_held_out
from tests.fuzz.stored_files import MACHINE, Parts, StoredFiles, describe_target, digest
from tests.fuzz.touched import State, note_use
from tests.log_lines import LogLines

PLAN = "the plan in memory"
"""What `prepare` hands on, by its name in the state of the folder."""
LEARNER = "the learner in memory"
"""What `build` hands on to `resume`."""


class NoTracker:
    """A tracker that keeps the rows in memory."""

    name = "mlflow"
    is_store = True

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


class RunOperations:
    """The operations on the run of `StoredFiles`."""

    def __init__(self, stored: StoredFiles, scratch: Path) -> None:
        """`scratch`: a folder for exports. The run folder must be undamaged now."""
        self._folder, self._runtime, self._scratch = stored.run, stored.runtime, scratch
        self._longer, _ = load_recipe(stored.run.recipe_path, ["train.steps=6"])
        self._prepared: PreparedRun | None = None
        self._built: tuple[Learner, str] | None = None
        self._usual: tuple[Learner, str] | None = None  # of the undamaged files

    def start(self) -> dict[str, Callable[[], Parts]]:
        """Return the operations by name, in order. Each is a function of the files that it touches."""
        self._prepared, self._built = None, self._usual
        path, folder = self._folder.path, self._folder
        return {
            "load": lambda: {"target": digest(sorted(describe_target(path).items()))},
            "held out": self._open_held_out,
            "export": self._export,
            "checksums": lambda: {
                "damaged": digest([find_faults(each.path, checksums=True) for each in list_checkpoints(path)])
            },
            "remote": self._describe_remote,
            "last step": self._find_last_step,
            "report": self._report,
            "prune": lambda: {"kept": digest(list(clear_out(folder.checkpoints_dir, 2)))},
            "remedy": self._find_remedy,
            "send rows": self._send_rows,
            "prepare": self._prepare,
            "build": self._build_learner,
            "resume": self._resume,
        }

    def read_memory(self) -> State:
        """Return what an operation hands on to a later one."""
        state: State = {}
        if self._prepared is not None:
            state[PLAN] = digest(asdict(self._prepared.plan))
        if self._built is not None:
            _, state[LEARNER] = self._built
        return state

    def _open_held_out(self) -> Parts:
        [held_out] = open_held_out(self._folder.path)
        return {"held out": str(held_out.dataset.num_samples)}

    def _export(self) -> Parts:
        out = self._scratch / "exported"
        shutil.rmtree(out, ignore_errors=True)
        exported = export_run(self._folder.path, out)
        return {"exported": digest((exported / "model.safetensors").read_bytes().hex())}

    def _describe_remote(self) -> Parts:
        if not (self._folder.path / "remote.json").exists():
            list(describe_remote(self._folder.path, verify=False))
        return {}

    def _find_last_step(self) -> Parts:
        assert RunFolder(self._folder.path).rows.last_step() >= 0
        return {}

    def _find_remedy(self) -> Parts:
        assert isinstance(self._folder.remedy(), str)
        return {}

    def _report(self) -> Parts:
        """Make every report, page and line about the run, of which none controls a terminal."""
        path = self._folder.path
        if not self._folder.events_path.is_file():
            return {}
        record = read_record(path)
        reports = [build_report(record), build_comparison([record] * 2), shorten(read_live(path))]
        for text in (*map(render_page, reports), *map(render_text, reports), describe_run(summarize_run(path))):
            make_printable(text).encode()
        for page in map(render_page, reports):
            assert make_printable(page) == page
        with suppress(ConfigError):
            lines = Log(self._folder.console_path).follow(lambda: True)
            assert all(isinstance(line, str) for line in islice(lines, 9))  # of a huge file, each has a megabyte
        return {}

    def _send_rows(self) -> Parts:
        """Read the rows as a tracker receives them; a failing forwarder reports it."""
        path = self._folder.tracker_path("mlflow")
        if path.is_file() or not path.exists():
            forwarder = MetricsForwarder(NoTracker(), path, self._folder.metrics_path)
            with closing(LogLines()) as said:
                forwarder.start()
                forwarder.close(done=True)
            failed = [line for line in said.lines if " fails " in line]
            assert not failed or not self._folder.metrics_path.is_file(), failed
        return {}

    def _prepare(self) -> Parts:
        """Do what a resume for two more steps does before its training."""
        prepared = prepare_run(self._longer, False, lambda: MACHINE, {})
        assert prepared is not None
        assert not list(self._folder.outcomes_dir.iterdir())
        self._prepared = prepared
        return {}

    def _build_learner(self) -> Parts:
        """Build the model and open the data. As in a restart no step is rehearsed, which would read no file."""
        plan = self._find_plan()
        learner = build_run_learner(self._longer, plan, self._folder, self._runtime, "eager", True, is_known=True)
        self._built = learner, digest(asdict(learner.plan), learner.config.to_dict(), learner.data.fingerprint)
        self._usual = self._usual or self._built
        return {}

    def _resume(self) -> Parts:
        """Load the state that was saved, and stop before the first step."""
        note_use(LEARNER)
        self._find_plan()  # a run is prepared
        assert self._built is not None
        learner, _ = self._built
        for tensor in learner.engine.state_dict().values():
            tensor.detach().fill_(7)  # the learner may have loaded before
        trainer = assemble(learner, self._folder, self._runtime, RecoveryWatch(self._folder, None))
        try:
            found = {name: digest(tensor) for name, tensor in learner.engine.state_dict().items()}
            state = {key: value for key, value in asdict(trainer.state).items() if key != "suppressed"}
            trainer.accounting.goodput.describe()
            return {"state": digest(state), **found}
        finally:
            trainer.train_step.loader.close()
            trainer.accounting.journal.close()
            trainer.saver.store.close()
            for group in trainer.saver.store.groups:
                dist.destroy_process_group(group)

    def _find_plan(self) -> ParallelPlan:
        """Return the plan of the prepared run. Prepare it, if that was left out."""
        note_use(PLAN)
        if self._prepared is None:
            self._prepare()
        assert self._prepared is not None
        return self._prepared.plan
