"""The agent of one machine of several: it starts this machine's workers, and does what all machines decided.

Within an attempt torchrun's agents meet each other, give out the ranks, and start everybody again when a machine comes.
How an attempt ended, and whether there is another one, is decided once for all (`meeting.py`): torchrun's agents know
exit codes, but neither what a rank said nor that a failure would come back.
"""

import json
import os
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from echelon.errors import LaunchError
from echelon.runs.run_folder import RunFolder
from echelon.stopping import read_stop_file
from echelon.stored import write_text
from echelon.supervise.agent import run_agent, silence_agent, stops_handed_on
from echelon.supervise.hosts import HostGroup, await_name, find_interface, find_own_address
from echelon.supervise.launch_environment import (
    ADDRESS_VARIABLE,
    HOST_VARIABLE,
    RESTART_VARIABLE,
    SHARED_VARIABLE,
    exported,
)
from echelon.supervise.meeting import Decision, HostReport, Meeting
from echelon.supervise.outcome import FAILED, STOPPED, Cause, Outcome, Weight, find_cause, read_outcomes
from echelon.supervise.rendezvous import TOGETHER
from echelon.supervise.restart import Restarts, deaths_watched
from echelon.supervise.workers import Workers

_LOOK_SECONDS = 0.2
# The first machines of an elastic job wait so long for more.
_LAST_CALL_SECONDS = 5
# Between two lines about machines that are not there yet.
_PATIENCE_SECONDS = 20.0
# Machines of a cloud may come up minutes apart.
_JOIN_SECONDS = 1800


class HostAgent:
    """Runs this machine's part of a job to its end; every machine's agent ends with the same outcome.

    `say` gets lines for the user: on the coordinator, or of what only this machine can
    know.
    """

    def __init__(
        self,
        group: HostGroup,
        say: Callable[[str], None],
    ) -> None:
        self._group = group
        self._say = say
        await_name(group, say)
        self._address = find_own_address(group)
        self.speaks = False
        """Whether this is the coordinator, which tells the user how the job ended."""
        self.keeps_journal = False
        """Whether this machine writes down the run's events: the coordinator; where files are not shared, rank 0's."""

    def variables(self) -> dict[str, str]:
        """What this machine's workers need to know of the network."""
        interface = self._group.interface or find_interface(self._address)
        names = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return {ADDRESS_VARIABLE: self._address, **names}

    def submit(self, job: Workers) -> Outcome:
        """Run the job; the outcome is the same on every machine.

        Raises LaunchError when the machines cannot meet, or the coordinator is lost.
        """
        from torch.distributed.elastic.multiprocessing import SignalException

        silence_agent()
        with tempfile.TemporaryDirectory(prefix="echelon-host-") as scratch:
            folder = RunFolder(job.run_dir, Path(scratch))
            shares = {SHARED_VARIABLE: str(int(self._group.shares_files))}
            job = replace(job, env={**job.env, HOST_VARIABLE: scratch, **shares})
            with stops_handed_on(job.notice_seconds, folder.stop_path) as asked:
                meeting = None
                try:
                    meeting = Meeting(self._group, platform.node(), Restarts(job.max_restarts), self._say)
                    self.speaks = meeting.coordinates
                    return self._run(job, folder, meeting, asked)
                except SignalException as error:
                    return Outcome(FAILED, f"stopped by {error.sigval.name}")
                except RuntimeError as error:
                    raise LaunchError(
                        f"the machine at {self._group.endpoint}, where all meet, is gone or cut off "
                        f"({str(error).splitlines()[0]}); start the same command again on the machines that are left, "
                        "and it resumes."
                    ) from error
                finally:
                    if meeting is not None:
                        meeting.close()

    def _run(self, job: Workers, folder: RunFolder, meeting: Meeting, asked: object) -> Outcome:
        announced: dict[str, str] = {}
        while True:
            attempt = meeting.attempt()
            meeting.join(attempt)
            cause, died_at = self._attempt(job, folder, meeting, attempt, announced)
            self.keeps_journal = meeting.coordinates if self._group.shares_files else 0 in folder.read_pids()
            decision = meeting.await_decision(attempt, HostReport.of(meeting.host, cause, folder.newest_step()))
            if meeting.host in decision.leaving:
                return Outcome(STOPPED if cause.outcome.code == STOPPED else FAILED, cause.outcome.message)
            if not decision.goes_on:
                return Outcome(decision.code, decision.message)
            if asked:  # too late for this decision: the next attempt would only be stopped again
                write_text(folder.stop_path, read_stop_file(folder.stop_path) or "SIGTERM")
            ended_at = time.time()
            detection = None if died_at is None else max(0.0, ended_at - died_at)
            self._tell_restart(job, folder, decision, detection)
            folder.clear_outcomes(restart=True)
            announced = {RESTART_VARIABLE: json.dumps({"ended_at": ended_at, "detection_seconds": detection})}

    def _attempt(
        self, job: Workers, folder: RunFolder, meeting: Meeting, attempt: int, announced: Mapping[str, str]
    ) -> tuple[Cause, float | None]:
        """Start the workers once, with all other machines: how they ended here, and when the first of them died."""
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousConnectionError,
            RendezvousError,
            RendezvousStateError,
        )

        settings = {
            "min_nodes": self._group.min_nodes,
            "max_nodes": self._group.max_nodes,
            "run_id": f"echelon-{attempt}",
            "rdzv_backend": TOGETHER,
            "rdzv_endpoint": meeting.endpoint,
            "rdzv_configs": {"is_host": 0, "last_call_timeout": _LAST_CALL_SECONDS, "join_timeout": _JOIN_SECONDS},
            "local_addr": self._group.name or self._address,
            # Workers that are stopped because a machine came have to save.
            "shutdown_timeout": max(1, int(job.notice_seconds)),
        }
        # The agent's own store listens everywhere, and would give workers that start anew stale addresses.
        variables = {**job.env, **announced, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        deaths = []
        with exported(variables), deaths_watched(folder, job.num_processes) as death:
            with _news_shared(meeting, folder, attempt, self._group, self._say):
                try:
                    deaths = run_agent(job, settings)
                except RendezvousClosedError:
                    pass  # the attempt ended before this machine took part in it
                except RendezvousConnectionError as error:
                    raise RuntimeError(str(error.__cause__ or error)) from error  # as every other use of a lost store
                except RendezvousStateError as error:
                    raise LaunchError(f"{error}, and start the same command again.") from error
                except RendezvousError as error:
                    raise LaunchError(
                        f"the machines did not meet at {self._group.endpoint}: {error}; start the same command on "
                        f"{self._group.min_nodes} machines."
                    ) from error
            outcomes = read_outcomes(folder.outcomes_dir)
            cause = find_cause(outcomes, deaths, folder.logs_dir)
            if deaths and cause.weight is Weight.NOTHING:
                cause = replace(cause, outcome=Outcome(FAILED, "its peers were lost"), weight=Weight.ECHO)
        return cause, death.died_at

    def _tell_restart(self, job: Workers, folder: RunFolder, decision: Decision, detection: float | None) -> None:
        """One line, and the events where the run's journal is kept."""
        if not decision.message:  # machines left or came
            return
        if self.keeps_journal:
            folder.sweep()
            with suppress(OSError):  # a full disk takes no event
                folder.append_event("failure", step=decision.step, code=FAILED, message=decision.message)
                number = decision.restarts
                folder.append_event("restart", step=decision.step, number=number, detection_seconds=detection)
        if self.speaks:
            start = "from the beginning" if decision.step is None else f"from step {decision.step}"
            self._say(f"failure: {decision.message}")
            self._say(f"restart {decision.restarts} of {job.max_restarts}, on all machines: {start}")


def _leave_if_idle(folder: RunFolder) -> None:
    """End the wait for other machines: there is no rank yet that could use the notice to save."""
    if not folder.read_pids():
        os.kill(os.getpid(), signal.SIGALRM)  # as the end of the notice, which `stops_handed_on` turns into one


@contextmanager
def _news_shared(
    meeting: Meeting, folder: RunFolder, attempt: int, group: HostGroup, say: Callable[[str], None]
) -> Iterator[None]:
    """Have stops and deaths of this machine known on the others, and theirs here, during the block.

    A lost coordinator counts as a death: the workers leave, and the main thread learns why from its own next question.
    """
    over = threading.Event()

    def share() -> None:
        watch, has_told_stop, has_told_death = meeting.watch(), False, False
        patience = time.monotonic() + _PATIENCE_SECONDS
        try:
            while not over.wait(_LOOK_SECONDS):
                is_late = watch.coordinates and time.monotonic() > patience
                if is_late and (here := watch.count(attempt)) < group.min_nodes:
                    say(f"waiting for machines: {here} of {group.min_nodes} are here")
                    patience += _PATIENCE_SECONDS
                if (name := read_stop_file(folder.stop_path)) is not None and not has_told_stop:
                    watch.ask(name)
                    has_told_stop = True
                    _leave_if_idle(folder)
                elif not has_told_stop and (name := watch.asked()) is not None:
                    write_text(folder.stop_path, name)
                    has_told_stop = True
                    if not folder.read_pids():
                        os.kill(os.getpid(), signal.Signals[name])  # the main thread waits for machines, and hears this
                        time.sleep(_LOOK_SECONDS)
                        _leave_if_idle(folder)
                if folder.death_path.exists() and not has_told_death:
                    watch.tell_death(attempt)
                    has_told_death = True
                elif not has_told_death and watch.has_death(attempt):
                    write_text(folder.death_path, "another machine has lost a rank\n")
                    has_told_death = True
        except RuntimeError:
            with suppress(OSError):
                write_text(folder.death_path, "the coordinator is lost\n")

    thread = threading.Thread(target=share, name="news", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
