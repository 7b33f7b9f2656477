"""Workers on this machine, under torchrun's elastic agent, which runs inside this process."""

import logging
import shlex
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.launch.job import JobSpec
from echelon.launch.outcome import FAILED, STOPPED, Outcome, ProcessDeath, fold_outcomes, read_outcomes
from echelon.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# How long workers may take to leave after a forwarded signal before they are killed.
SHUTDOWN_SECONDS = 5
_MONITOR_SECONDS = 0.2
_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


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
            deaths, stopped_by = _run_agent(job)
        outcomes = read_outcomes(run_folder.outcomes_dir)
        if stopped_by is not None:
            saved = next((each for each in outcomes if each.code == STOPPED), None)
            return Outcome(STOPPED, saved.message) if saved else Outcome(FAILED, f"stopped by {stopped_by}")
        return fold_outcomes(outcomes, deaths, run_folder.logs_dir)


def _run_agent(job: JobSpec) -> tuple[list[ProcessDeath], str | None]:
    """Run the agent: the processes that did not leave with 0, and the signal that ended this process's wait."""
    # torch is imported here alone, so that this module stays light enough for `echelon --help`.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _silence_agent()
    entrypoint, *arguments = job.argv
    with (
        tempfile.TemporaryDirectory(prefix="echelon-agent-") as scratch,
        _signal_handlers_kept(),
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
        "signals_to_handle": ",".join(each.name for each in _HANDLED_SIGNALS),
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
def _signal_handlers_kept() -> Iterator[None]:
    """The agent installs handlers that raise; afterwards the old ones come back."""
    handlers = {each: signal.getsignal(each) for each in _HANDLED_SIGNALS}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def worker_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module of this same Python."""
    return (sys.executable, "-m", module, *arguments)
