"""Workers on this machine, under torchrun's elastic agent, which runs inside this process."""

import logging
import shlex
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.launch.job import JobSpec
from echelon.launch.outcome import FAILED, Outcome, ProcessDeath, fold_outcomes, read_outcomes
from echelon.run_folder import RunFolder, write_text
from echelon.stopping import ECHO_SECONDS, STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# How long workers may take to leave after a forwarded signal before they are killed.
SHUTDOWN_SECONDS = 5
_MONITOR_SECONDS = 0.2
# These end the job at once; STOP_SIGNALS let it save first.
_ENDING_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)


class LocalLauncher:
    """Starts the workers here, waits for them, and takes them along when it is stopped.

    `export` puts variables into this process's environment for the time of a job, since the agent hands that on to the
    workers; it is `runtime.exported`, a layer above this one.
    """

    def __init__(self, export: Callable[[Mapping[str, str]], AbstractContextManager[None]]) -> None:
        self._export = export

    def render(self, job: JobSpec) -> str:
        """The command each worker runs, and how many there are."""
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(job.env.items()))
        return f"{job.num_processes} x {settings} {shlex.join(job.argv)}".replace("  ", " ")

    def submit(self, job: JobSpec) -> Outcome:
        """Run the job to its end. Workers inherit stdout and stderr; no worker outlives the call."""
        run_folder = RunFolder(job.run_dir)
        run_folder.create()
        run_folder.clear_outcomes()
        # The agent's own store would give a restarted worker stale addresses.
        with self._export({**job.env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}):
            deaths, stopped_by = _run_agent(job, run_folder.stop_path)
        outcomes = read_outcomes(run_folder.outcomes_dir)
        if stopped_by is not None:
            return Outcome(FAILED, f"stopped by {stopped_by}")
        return fold_outcomes(outcomes, deaths, run_folder.logs_dir)


def _run_agent(job: JobSpec, word: Path) -> tuple[list[ProcessDeath], str | None]:
    """Run the agent: the processes that did not leave with 0, and the signal that ended this process's wait.

    `word` is the file that asks the workers to stop.
    """
    # torch is imported here alone, so that this module stays light enough for `echelon --help`.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _silence_agent()
    entrypoint, *arguments = job.argv
    with (
        tempfile.TemporaryDirectory(prefix="echelon-agent-") as scratch,
        _stops_handed_on(job.notice_seconds, word),
    ):
        try:
            elastic_launch(_build_config(job, Path(scratch)), entrypoint)(*arguments)
        except ChildFailedError as error:
            failures = error.failures.items()
            return [ProcessDeath(rank, each.pid, each.exitcode, each.timestamp) for rank, each in failures], None
        except SignalException as error:
            return [], error.sigval.name
    return [], None


def _build_config(job: JobSpec, scratch: Path) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": job.num_processes,
        "logs_specs": DefaultLogsSpecs(log_dir=str(scratch)),
        "run_id": uuid.uuid4().hex,
        "role": "echelon",
        # Port 0: the agent takes a free one, so jobs on one machine never meet.
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "local_addr": "127.0.0.1",
        "max_restarts": job.max_restarts,
        "monitor_interval": _MONITOR_SECONDS,
        "signals_to_handle": ",".join(each.name for each in _ENDING_SIGNALS),
    }
    # Older torch releases wait a fixed 30 seconds.
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:
        settings["shutdown_timeout"] = SHUTDOWN_SECONDS
    return LaunchConfig(**settings)


def _silence_agent() -> None:
    """The agent's loggers repeat, as warnings and errors, what the outcome says in one sentence."""
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous  # noqa: F401

    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher")
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefixes):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextmanager
def _stops_handed_on(notice_seconds: float, word: Path) -> Iterator[None]:
    """The first signal asks the workers to save and stop; a second one, or the end of the notice, ends the agent.

    Afterwards the handlers of before come back, also those that the agent has replaced.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    asked: list[tuple[str, float]] = []

    def stop(number: int, _: object) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if not asked:
            asked.append((name, now))
            with suppress(OSError):  # a full disk takes no word
                if notice_seconds > 0:
                    write_text(word, name)
                    signal.setitimer(signal.ITIMER_REAL, notice_seconds)
                    return
        elif number != signal.SIGALRM and now - asked[0][1] < ECHO_SECONDS:
            return
        raise SignalException("stopped", signal.Signals[asked[0][0]])

    mine = (*STOP_SIGNALS, signal.SIGALRM)
    before = {each: signal.getsignal(each) for each in (*mine, *_ENDING_SIGNALS)}
    for each in mine:
        signal.signal(each, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in before.items():
            signal.signal(each, handler)


def worker_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module of this same Python."""
    return (sys.executable, "-m", module, *arguments)
