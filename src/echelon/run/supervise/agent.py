"""The agent of a machine: it starts the ranks of its machine, watches them, and ends them.

Each machine of a job has one agent; a single machine is a group of one. In each attempt the agents meet, and one of
them, the coordinator, says which machines take part and which ranks each has (`coordinator.py`). How an attempt ended,
and whether there is another one, is decided once for all machines (`decision.py`).
"""

import json
import logging
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from echelon.ground.errors import LaunchError, first_line
from echelon.ground.hosts import HostGroup, await_name, find_interface, find_own_address
from echelon.ground.launch_environment import (
    ADDRESS_VARIABLE,
    RESTART_VARIABLE,
    exported,
    rank_environment,
    read_clock,
    store_environment,
)
from echelon.ground.logs import erase_progress_bar, keep_console_in
from echelon.ground.open_files import allow_open_files, explain_connections
from echelon.ground.run_files import is_run
from echelon.ground.sockets import host_store_at
from echelon.ground.stop_request import read_stop_file
from echelon.ground.stored import write_text
from echelon.ground.variables import read_environment
from echelon.planner.hardware.health import examine_health
from echelon.recipe.operation import FaultConfig
from echelon.run.folder.run_folder import RunFolder, describe_gone
from echelon.run.supervise.coordinator import AttemptNews, MachineReport
from echelon.run.supervise.decision import AWAITS_VARIABLE, Decision, HostReport, Restarts, Vacancies, note_bad_machines
from echelon.run.supervise.hangs import explain_hang, read_records
from echelon.run.supervise.meeting import Meeting
from echelon.run.supervise.news import AgentStopped, news_shared, stops_forwarded
from echelon.run.supervise.outcome import (
    DONE,
    FAILED,
    LOST_SECONDS,
    Cause,
    Likelihood,
    Outcome,
    ProcessDeath,
    describe_silent,
    find_cause,
    find_silent,
    is_peer_leaving,
    read_outcomes,
)
from echelon.run.supervise.replica_keeper import KeptRanks, ReplicaKeeper
from echelon.run.supervise.workers import LocalRanks, WarmStart, Workers

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05


class TakenForLost(Exception):
    """The others have gone on without this machine, which was silent for too long."""


class Agent:
    """Starts this machine's workers, waits for them, restarts them when one fails, and ends them when stopped.

    The agents of all machines end with the same outcome. The coordinator logs events of the whole job; each machine
    logs its local events.
    """

    def __init__(
        self,
        group: HostGroup,
        warm: WarmStart | None = None,
        fault: FaultConfig | None = None,
        missing: str | None = None,
    ) -> None:
        """`warm`: the process that forks the workers; without one each starts an interpreter.

        Of a group of several: `fault` says how bad machines are treated, and `missing` which GPUs that the job asked
        for this machine lacks.

        Raises LaunchError if the coordinator's name does not resolve, ConfigError for an unknown interface.
        """
        self._group = group
        self._warm = warm
        self._fault = fault or FaultConfig()
        self._missing = missing
        if not group.is_alone:
            await_name(group)
        self._address = find_own_address(group)
        self.is_coordinator = False
        """Whether this machine tells the user how the job ended."""
        self.keeps_journal = False
        """Whether this machine writes the run's events: the coordinator, or without shared files, rank 0's machine."""
        self._last: Decision | None = None

    @property
    def has_lost_others(self) -> bool:
        """Whether the job has ended because machines were lost, which each of the others tells its user."""
        return self._last is not None and bool(self._last.advice)

    def submit(self, job: Workers) -> Outcome:
        """Run the job to its end; the outcome is the same on every machine. No worker outlives the call.

        Workers inherit stdout and stderr. Raises LaunchError when the machines cannot meet, or the coordinator is lost.
        """
        allow_open_files()
        group, awaits = self._group, read_environment().get(AWAITS_VARIABLE) == "1"
        vacancies = Vacancies(job.max_restarts if awaits else 0)
        with stops_forwarded(job.notice_seconds, job.folder.stop_path) as asked:
            while True:
                self._group, self._last = group, None
                try:
                    outcome = self._meet(job, asked)
                except TakenForLost:
                    logger.warning("this machine was taken for lost; its processes have ended, and it joins again")
                except LaunchError:
                    if not self._waits(vacancies, job, asked):
                        raise
                else:
                    if not self._waits(vacancies, job, asked):
                        return outcome
                job.folder.clear_outcomes()

    def _waits(self, vacancies: Vacancies, job: Workers, asked: Sequence[object]) -> bool:
        """Whether this machine waits for others in the place of those whose end was that of the job."""
        if self._last is None or not self._last.is_short or asked:
            return False
        return vacancies.wait(self._last.message, job.folder.newest_step(), asked, LOST_SECONDS)

    def _meet(self, job: Workers, asked: Sequence[object]) -> Outcome:
        """Meet the other machines, and run the job to its end with them; see `submit`."""
        # torch is imported only here, so that `echelon --help` is fast.
        from torch.distributed import DistError

        meeting = None
        try:
            name = read_environment().get("SLURMD_NODENAME") or platform.node()
            meeting = Meeting(self._group, name, Restarts(job.max_restarts), self._fault)
            return self._run(job, meeting, asked)
        except AgentStopped as error:
            return Outcome(FAILED, f"stopped by {error.name}")
        except DistError as error:
            raise self._explain_loss(error) from error
        finally:
            if meeting is not None:
                self.is_coordinator = meeting.coordinates
                meeting.close()

    def _run(self, job: Workers, meeting: Meeting, asked: Sequence[object]) -> Outcome:
        """Run attempts until the machines decide to end."""
        folder, announced = job.folder, dict[str, str]()
        while True:
            cause, died_at = self._attempt(job, meeting, announced)
            news = meeting.now()
            if meeting.host in news.left_out and not meeting.coordinates:
                return cause.outcome
            if not meeting.coordinates and not news.takes_part(meeting.host):
                if (ending := self._wait(meeting, asked)) is None:
                    continue
                return ending
            erase_progress_bar()
            self._keep_console(folder, meeting)
            if asked:
                meeting.ask(read_stop_file(folder.stop_path) or "SIGTERM")
            meeting.end_attempt(HostReport.of(meeting.host, cause, job.folder.newest_step()))
            decision = meeting.await_decision()
            if meeting.coordinates:
                note_bad_machines({*news.left_out, *decision.bad}, bool(decision.bad) and not decision.goes_on)
            if (ending := decision.find_ending(meeting.host, cause.outcome)) is not None:
                self._last = decision
                return ending
            if asked:  # since the decision: the next attempt stops as soon as it can
                write_text(folder.stop_path, read_stop_file(folder.stop_path) or "SIGTERM")
            ended_at = read_clock()
            detection = None if died_at is None else max(0.0, time.time() - died_at)
            self._tell_restart(job, decision, detection)
            folder.clear_outcomes(restart=True)
            announced = {RESTART_VARIABLE: json.dumps({"ended_at": ended_at, "detection_seconds": detection})}

    def _keep_console(self, folder: RunFolder, meeting: Meeting) -> None:
        """Keep what this machine prints from now on, if it keeps the journal."""
        self.is_coordinator = meeting.coordinates
        self.keeps_journal = meeting.coordinates if self._group.shares_files else 0 in folder.read_pids()
        if self.keeps_journal and folder.logs_dir.is_dir():
            keep_console_in(folder.console_path)

    def _wait(self, meeting: Meeting, asked: Sequence[object]) -> Outcome | None:
        """Wait for the next attempt; if there is none, or this machine is asked to stop, how it ends."""
        meeting.await_news(lambda news: True if news.decision is not None or asked else None)
        if meeting.now().decision is None:
            return Outcome(FAILED, "stopped by a signal while this machine waited as a spare")
        decision = meeting.await_decision()
        self._last = decision
        return decision.find_ending(meeting.host, Outcome(DONE))

    def _attempt(self, job: Workers, meeting: Meeting, announced: Mapping[str, str]) -> tuple[Cause, float | None]:
        """Start the workers once, with all other machines; returns how they ended here, and when the first one died."""
        folder, was_run = job.folder, is_run(job.folder.path)
        variables = {**network_variables(self._address), **job.env, **announced}
        # A single machine has no other to inform, and its workers handle a stop during startup themselves.
        shares = not self._group.is_alone
        sharing = news_shared(meeting, folder, job.min_replicas is None) if shares else nullcontext()
        with exported(variables), sharing:
            if shares and (refusal := self._present(job, meeting)) is not None:
                return refusal, None
            team = meeting.now().team or [(meeting.host, job.num_processes)]
            reason = explain_connections(sum(count for _, count in team), len(team))
            if reason is not None and team[0][0] == meeting.host:  # which has the store of the ranks, or of the keeper
                return Cause(Outcome(FAILED, reason, final=True), Likelihood.CAUSE, time.time()), None
            deaths = self._train(job, meeting, team) if job.min_replicas is None else self._keep(job, meeting)
            if isinstance(deaths, Cause):
                return deaths, None
            died_at = min((death.time for death in deaths), default=None)
        return self._find_cause(folder, deaths, was_run), died_at

    def _find_cause(self, folder: RunFolder, deaths: Sequence[ProcessDeath], was_run: bool) -> Cause:
        """How an attempt has ended on this machine. `was_run`: whether there was a run before it."""
        silent = find_silent(folder.outcomes_dir)
        cause = find_cause(read_outcomes(folder.outcomes_dir), deaths, folder.logs_dir, silent)
        if cause.weight is Likelihood.DEATH and (verdict := explain_hang(read_records(folder.outcomes_dir), silent)):
            outcome = replace(cause.outcome, message=f"{cause.outcome.message}; {verdict}")
            cause = replace(cause, outcome=outcome)
        if not folder.outcomes_dir.exists() or (was_run and not is_run(folder.path)):  # with the ranks' reports
            cause = Cause(Outcome(FAILED, describe_gone(folder.path), final=True), Likelihood.CAUSE, time.time())
        elif deaths and cause.weight is Likelihood.NOTHING:
            cause = replace(cause, outcome=Outcome(FAILED, "its peers were lost"), weight=Likelihood.ECHO)
        elif cause.weight is Likelihood.NOTHING and self._was_left(folder):
            cause = Cause(describe_silent(min(silent, default=0), folder.logs_dir), Likelihood.DEATH, time.time())
        elif self._group.is_alone and is_peer_leaving(folder.outcomes_dir):  # not because a machine joins or leaves
            cause = replace(cause, outcome=replace(cause.outcome, final=True))
        return cause

    def _was_left(self, folder: RunFolder) -> bool:
        """Whether rank 0 of a run has ended on this machine, and has not recorded the end of the run.

        With replaced processes on several machines another rank may have recorded it, which is seen later here.
        """
        has_first = 0 in folder.read_pids() and not self._group.lives_on
        return has_first and is_run(folder.path) and not folder.is_finished()

    def _present(self, job: Workers, meeting: Meeting) -> Cause | None:
        """Present this machine to the coordinator; None if it takes part in the attempt, else how that ends here."""
        health, host = examine_health(job.num_processes, job.folder.path), meeting.host
        name = self._group.name or self._address
        meeting.present(MachineReport.of(health, self._missing, self._fault, job.num_processes, name))

        news, has_spares = self._await_answer(meeting), bool(self._group.num_spares)
        if news.takes_part(host):
            if has_spares and meeting.was_spare():
                logger.info("this machine was a spare, and now takes the place of another one")
            return None
        if host in news.left_out and not meeting.coordinates:
            logger.warning(f"this machine is left out: {news.left_out[host]}")
            return Cause(Outcome(FAILED, news.left_out[host], final=True), Likelihood.CAUSE, time.time())
        return Cause(Outcome(DONE), Likelihood.NOTHING, time.time())

    def _await_answer(self, meeting: Meeting) -> AttemptNews:
        """Wait for what the coordinator says of this machine; where processes live on, a spare waits for a place."""
        host = meeting.host

        def is_answered(news: AttemptNews) -> bool | None:
            is_named = news.takes_part(host) or host in news.spares or host in news.left_out
            return True if is_named or news.is_over else None

        meeting.await_news(is_answered)
        news = meeting.now()
        if host in news.spares:
            is_spare = self._group.num_spares
            purpose = "is a spare: it takes the place of one that is lost" if is_spare else "waits for the others"
            logger.info(f"this machine {purpose}")
            if self._group.lives_on:
                meeting.await_news(lambda news: True if news.takes_part(host) or news.is_over else None)
        return news

    def _keep(self, job: Workers, meeting: Meeting) -> list[ProcessDeath] | Cause:
        """Start and end processes as the keeper says through an attempt; returns the deaths that have ended it.

        The coordinator has the keeper. Elsewhere the result is a Cause: how it ended is known there, or why it could
        not begin. Raises TakenForLost.
        """
        keeper = None
        if meeting.coordinates:
            if job.prepare is not None and (ending := job.prepare()) is not None:
                return Cause(ending, Likelihood.NOTHING if ending.code == DONE else Likelihood.CAUSE, time.time())
            keeper = ReplicaKeeper(job, meeting, self._address)
        ranks, is_left = KeptRanks(job, self._warm, meeting), False
        try:
            while not (is_left or meeting.now().is_over):
                if meeting.is_broken or meeting.host in meeting.now().lost:
                    ranks.kill()  # at once: the others go on without them
                    meeting.check()
                    raise TakenForLost
                ranks.follow(meeting.now())
                is_left = keeper is not None and keeper.look()
                time.sleep(_LOOK_SECONDS)
        finally:
            if keeper is not None:
                keeper.close()
            ranks.end()
        if keeper is None:
            if (news := meeting.now()).keeper in news.lost:
                return Cause(Outcome(FAILED, "the keeper's machine is lost"), Likelihood.ECHO, time.time())
            return Cause(Outcome(DONE), Likelihood.NOTHING, time.time())
        keeper.await_exits()
        return keeper.deaths

    def _train(self, job: Workers, meeting: Meeting, team: Sequence[tuple[str, int]]) -> list[ProcessDeath] | Cause:
        """Start this machine's ranks, and wait for their end; returns those that have failed.

        They meet in a store of the agent of rank 0's machine. A Cause: the attempt was over before they could start.
        """
        hosts, world_size = [host for host, _ in team], sum(count for _, count in team)
        index = hosts.index(meeting.host)
        store = host_store_at(self._address) if index == 0 else None  # until the ranks have ended
        if store is not None:
            meeting.post("call", words=json.dumps([self._address, store.port]))
        if not (call := meeting.await_news(lambda news: "" if news.is_over else news.call)):
            return Cause(Outcome(DONE), Likelihood.NOTHING, time.time())
        address, port = json.loads(call)
        first = sum(count for _, count in team[:index])
        endpoint = store_environment(address, port)
        ranks = LocalRanks(job.folder, self._warm)
        try:
            for local in range(job.num_processes):
                env = rank_environment(first + local, world_size, local, job.num_processes)
                ranks.start(job.argv, first + local, {**read_environment(), **env, **endpoint})
            ranks.wait(leaves=lambda: meeting.now().meets_again)
        finally:
            ranks.end()
        return ranks.deaths

    def _explain_loss(self, error: BaseException) -> LaunchError:
        keeper = "the coordinator" if self._group.store_name is None else "etcd"
        if self._group.store_name is None:
            note_bad_machines([self._group.host], ends=True)
        self._last = Decision(False, FAILED, f"{keeper} at {self._group.endpoint} is gone", 0, is_short=True)
        return LaunchError(
            f"{keeper} at {self._group.endpoint} is gone or unreachable ({first_line(error)}); start the same command "
            "again on the remaining machines to resume the run."
        )

    def _tell_restart(self, job: Workers, decision: Decision, detection: float | None) -> None:
        """Log a restart after a failure, and write its events on the machine that keeps the journal."""
        if not decision.message:  # machines left or joined
            return
        if self.keeps_journal:
            job.folder.sweep()
            with suppress(OSError):  # the disk may be full
                job.folder.rows.append_event("failure", step=decision.step, code=FAILED, message=decision.message)
                number = decision.restarts
                job.folder.rows.append_event("restart", step=decision.step, number=number, detection_seconds=detection)
        where = "" if self._group.is_alone else ", on all machines"
        start = "the beginning" if decision.step is None else f"step {decision.step}"
        logger.warning(f"failure: {decision.message}")
        logger.warning(f"restart {decision.restarts} of {job.max_restarts}{where}: from {start}")


def network_variables(address: str) -> dict[str, str]:
    """The network variables of the workers of this machine, which has this address; a single machine uses loopback."""
    interface = find_interface(address)
    names = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {ADDRESS_VARIABLE: address, **names}


def worker_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module with this Python."""
    return (sys.executable, "-m", module, *arguments)
