"""Workers on this machine, under torchrun's elastic agent, which runs inside this process."""

import json
import logging
import shlex
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.runs.run_folder import RunFolder, describe_gone, is_run, newest_step
from echelon.stopping import ECHO_SECONDS, STOP_SIGNALS
from echelon.stored import write_text
from echelon.supervise.launch_environment import RESTART_VARIABLE, exported
from echelon.supervise.outcome import FAILED, Outcome, ProcessDeath, fold_outcomes, is_peer_leaving, read_outcomes
from echelon.supervise.rendezvous import ALONE, register_backends
from echelon.supervise.restart import Restarts, deaths_watched
from echelon.supervise.workers import Workers

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# How long workers may take to leave after a forwarded signal before they are killed.
SHUTDOWN_SECONDS = 5
_MONITOR_SECONDS = 0.2
_ALONE = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": ALONE}
# These end the job at once; STOP_SIGNALS let it save first.
_ENDING_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)


class LocalAgent:
    """Starts the workers here, waits for them, starts them again when one fails, takes them along when it is stopped.

    `say` gets a line about each restart.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._say = say

    def render(self, job: Workers) -> str:
        """The command each worker runs, and how many there are."""
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(job.env.items()))
        return f"{job.num_processes} x {settings} {shlex.join(job.argv)}".replace("  ", " ")

    def submit(self, job: Workers) -> Outcome:
        """Run the job to its end. Workers inherit stdout and stderr; no worker outlives the call."""
        from torch.distributed.elastic.multiprocessing import SignalException

        folder = RunFolder(job.run_dir)
        folder.create()
        folder.clear_outcomes()
        silence_agent()
        with stops_handed_on(job.notice_seconds, folder.stop_path) as asked:
            try:
                return self._run(job, folder, asked)
            except SignalException as error:
                return Outcome(FAILED, f"stopped by {error.sigval.name}")

    def _run(self, job: Workers, folder: RunFolder, asked: Sequence[object]) -> Outcome:
        """Attempt after attempt, each under an agent of its own, until one does not fail or may not be repeated.

        The agent could restart by itself; but between two of its attempts nobody could read how the first one ended,
        sweep what it left half-written, or see that the same failure comes back.
        """
        restarts = Restarts(job.max_restarts)
        announced: dict[str, str] = {}
        was_run = is_run(folder.path)
        while True:
            outcome, failed_at = self._attempt(job, folder, announced)
            if was_run and not is_run(folder.path):
                return Outcome(FAILED, describe_gone(folder.path))
            if outcome.code != FAILED or asked or is_peer_leaving(folder.outcomes_dir):
                return outcome
            step = _find_newest_step(job, folder)
            ending = restarts.refuse(outcome, step)
            if ending is not None:
                return ending
            ended_at = time.time()
            folder.sweep()
            folder.clear_outcomes(restart=True)
            seconds = None if failed_at is None else ended_at - failed_at
            with suppress(OSError):  # a full disk takes no event
                folder.append_event("failure", step=step, code=outcome.code, message=outcome.message)
                folder.append_event("restart", step=step, number=restarts.done, detection_seconds=seconds)
            start = "from the beginning" if step is None else f"from step {step}"
            self._say(f"failure: {outcome.message}")
            self._say(f"restart {restarts.done} of {job.max_restarts}: {start}")
            announced = {RESTART_VARIABLE: json.dumps({"ended_at": ended_at, "detection_seconds": seconds})}

    def _attempt(self, job: Workers, folder: RunFolder, variables: Mapping[str, str]) -> tuple[Outcome, float | None]:
        """Start the workers once; how they ended, and when the first of them died."""
        with exported({**job.env, **variables}), deaths_watched(folder, job.num_processes) as watch:
            deaths = run_agent(job, _ALONE | {"run_id": uuid.uuid4().hex})
        return fold_outcomes(read_outcomes(folder.outcomes_dir), deaths, folder.logs_dir), watch.died_at


def _find_newest_step(job: Workers, folder: RunFolder) -> int | None:
    """Of the checkpoints on disk and in memory."""
    held = None if job.memory is None else newest_step(job.memory)
    return max((step for step in (folder.newest_step(), held) if step is not None), default=None)


def run_agent(job: Workers, settings: Mapping[str, Any]) -> list[ProcessDeath]:
    """Run torchrun's agent for one attempt: the processes that did not leave with 0.

    `settings`: of the LaunchConfig, how it meets other agents, if there are any.
    """
    # torch is imported here alone, so that this module stays light enough for `echelon --help`.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    register_backends()
    entrypoint, *arguments = job.argv
    with tempfile.TemporaryDirectory(prefix="echelon-agent-") as scratch:
        try:
            elastic_launch(_build_config(job, Path(scratch), settings), entrypoint)(*arguments)
        except ChildFailedError as error:
            return [
                ProcessDeath(rank, each.pid, each.exitcode, each.timestamp) for rank, each in error.failures.items()
            ]
    return []


def _build_config(job: Workers, scratch: Path, settings: Mapping[str, Any]) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    config: dict[str, Any] = {
        "nproc_per_node": job.num_processes,
        "logs_specs": DefaultLogsSpecs(log_dir=str(scratch)),
        "role": "echelon",
        "max_restarts": 0,
        "monitor_interval": _MONITOR_SECONDS,
        # Under nohup the job outlives its terminal.
        "signals_to_handle": ",".join(
            each.name for each in _ENDING_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN
        ),
        # Older torch releases wait a fixed 30 seconds.
        "shutdown_timeout": SHUTDOWN_SECONDS,
        **settings,
    }
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(**{key: value for key, value in config.items() if key in known})


def silence_agent() -> None:
    """The agent's loggers repeat, as warnings and errors, what the outcome says in one sentence."""
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous  # noqa: F401

    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher")
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefixes):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextmanager
def stops_handed_on(notice_seconds: float, stop_file: Path) -> Iterator[Sequence[object]]:
    """The first signal asks the workers to save and stop; a second one, or the end of the notice, ends the agent.

    Yields a sequence that is not empty once a signal has come. Afterwards the earlier handlers come back, also those
    that the agent has replaced.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    asked: list[tuple[str, float]] = []

    def stop(number: int, _: object) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if not asked:
            asked.append((name, now))
            with suppress(OSError):  # the disk may be full
                if notice_seconds > 0:
                    write_text(stop_file, name)
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
        yield asked
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in before.items():
            signal.signal(each, handler)


def worker_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module of this same Python."""
    return (sys.executable, "-m", module, *arguments)
