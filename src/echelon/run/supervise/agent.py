"""The agent of a machine: it starts the ranks of its machine, watches them, and ends them.

Each machine of a job has one agent; a single machine is a group of one. In each attempt the agents meet, and one of
them, the coordinator, says which machines take part and which ranks each has (`admission.py`). How an attempt ended,
and whether there is another one, is decided once for all machines (`agent_votes.py`).
"""

import json
import logging
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

from echelon.ground.errors import LaunchError, first_line
from echelon.ground.hosts import HostGroup, await_name, find_interface, find_own_address
from echelon.ground.launch_environment import (
    ADDRESS_VARIABLE,
    RESTART_VARIABLE,
    exported,
    rank_environment,
    read_clock,
)
from echelon.ground.logs import erase_progress_bar, keep_console_in
from echelon.ground.open_files import allow_open_files
from echelon.ground.run_files import is_run, newest_step
from echelon.ground.sockets import find_free_port
from echelon.ground.stop_request import read_stop_file
from echelon.ground.stored import write_text
from echelon.ground.variables import read_environment
from echelon.planner.hardware.health import examine_health
from echelon.recipe.operation import FaultConfig
from echelon.run.folder.run_folder import RunFolder, describe_gone
from echelon.run.supervise.admission import Admission, MachineReport
from echelon.run.supervise.agent_votes import LOST_SECONDS, AgentRendezvous
from echelon.run.supervise.decision import Decision, HostReport
from echelon.run.supervise.hands import Machines, NodeAgent
from echelon.run.supervise.hang_verdict import explain_hang, read_records
from echelon.run.supervise.news import AgentStopped, news_shared, stops_forwarded
from echelon.run.supervise.outcome import (
    DONE,
    FAILED,
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
from echelon.run.supervise.replica_keeper import ReplicaSupervisor
from echelon.run.supervise.restart import AWAITS_VARIABLE, Restarts, Vacancies
from echelon.run.supervise.succession import Fence, find_coordinator, succeed
from echelon.run.supervise.warm_start import WarmStart
from echelon.run.supervise.workers import LocalRanks, Workers

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
# Between the loss of the keeper of a quorum and the next attempt to reach it.
_REJOIN_SECONDS = 1.0


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
        return vacancies.wait(self._last.message, _find_newest_step(job), asked, LOST_SECONDS)

    def _meet(self, job: Workers, asked: Sequence[object]) -> Outcome:
        """Meet the other machines, and run the job to its end with them; see `submit`."""
        # torch is imported only here, so that `echelon --help` is fast.
        from torch.distributed import DistError

        restarts, announced = Restarts(job.max_restarts), dict[str, str]()
        rendezvous = fence = None
        try:
            if self._group.shares_files and not self._group.is_alone:
                self._group = find_coordinator(self._group, job.folder)
            rendezvous = AgentRendezvous(self._group, platform.node(), restarts, self._address)
            while True:
                self.is_coordinator = rendezvous.coordinates
                if rendezvous.coordinates and rendezvous.group.shares_files and not rendezvous.group.is_alone:
                    fence = Fence(rendezvous, job.folder)
                try:
                    return self._run(job, rendezvous, restarts, asked, announced)
                except DistError as error:
                    rendezvous, ending = self._succeed(job, rendezvous, restarts, error)
                    if ending is not None:
                        return ending
                    announced = _announce(read_clock(), None)
        except AgentStopped as error:
            if fence is not None and fence.successor is not None:
                raise LaunchError(
                    f"{fence.successor} has taken over this run, which most machines could reach and this one "
                    "could not; start the same command again here to take part."
                ) from error
            return Outcome(FAILED, f"stopped by {error.name}")
        except DistError as error:
            raise self._explain_loss(error) from error
        finally:
            if fence is not None:
                fence.end()
            if rendezvous is not None:
                rendezvous.close()

    def _succeed(
        self, job: Workers, lost: AgentRendezvous, restarts: Restarts, error: Exception
    ) -> tuple[AgentRendezvous, Outcome | None]:
        """Meet at another coordinator instead of a lost one; also how the job ends, None if it goes on.

        Raises LaunchError if this machine is not among enough others.
        """
        step = _find_newest_step(job)
        meeting = succeed(lost, self._address, restarts, job.folder, job.least_machines(lost.group.min_nodes), step)
        lost.close()
        if meeting is None:
            raise self._explain_loss(error.__cause__ or error) from error
        rendezvous, decision = meeting
        self._group, self.is_coordinator = rendezvous.group, rendezvous.coordinates
        self.keeps_journal = self.is_coordinator
        self._begin_again(job, decision, None)
        return rendezvous, decision.find_ending(rendezvous.host, Outcome(FAILED, decision.message))

    def _run(
        self,
        job: Workers,
        rendezvous: AgentRendezvous,
        restarts: Restarts,
        asked: Sequence[object],
        announced: Mapping[str, str],
    ) -> Outcome:
        """Run attempts until the machines decide to end."""
        folder = job.folder
        while True:
            attempt = rendezvous.attempt()
            rendezvous.join(attempt)
            cause, died_at = self._attempt(job, rendezvous, attempt, announced)
            if not rendezvous.coordinates and rendezvous.is_left_out(attempt):
                ending = self._wait(rendezvous, attempt, asked) if rendezvous.is_spare(attempt) else cause.outcome
                if ending is None:
                    continue
                return ending
            erase_progress_bar()
            self.keeps_journal = rendezvous.coordinates if self._group.shares_files else 0 in folder.read_pids()
            if self.keeps_journal and folder.logs_dir.is_dir():
                keep_console_in(folder.console_path)
            if asked:
                rendezvous.watch(attempt).ask(read_stop_file(folder.stop_path) or "SIGTERM")
            decision = rendezvous.await_decision(attempt, HostReport.of(rendezvous.host, cause, _find_newest_step(job)))
            if (ending := decision.find_ending(rendezvous.host, cause.outcome)) is not None:
                self._last = decision
                return ending
            if asked:  # since the decision: the next attempt stops as soon as it can
                write_text(folder.stop_path, read_stop_file(folder.stop_path) or "SIGTERM")
            ended_at = read_clock()
            detection = None if died_at is None else max(0.0, time.time() - died_at)
            restarts.done = decision.restarts
            self._begin_again(job, decision, detection)
            announced = _announce(ended_at, detection)

    @staticmethod
    def _wait(rendezvous: AgentRendezvous, attempt: int, asked: Sequence[object]) -> Outcome | None:
        """Wait as a spare for the next attempt; if there is none, or this machine is asked to stop, how it ends."""
        while (decision := rendezvous.find_decision(attempt)) is None:
            if asked:
                return Outcome(FAILED, "stopped by a signal while this machine waited as a spare")
            time.sleep(_LOOK_SECONDS)
        return decision.find_ending(rendezvous.host, Outcome(DONE))

    def _attempt(
        self, job: Workers, rendezvous: AgentRendezvous, attempt: int, announced: Mapping[str, str]
    ) -> tuple[Cause, float | None]:
        """Start the workers once, with all other machines; returns how they ended here, and when the first one died."""
        folder, was_run = job.folder, is_run(job.folder.path)
        variables = {**network_variables(self._address), **job.env, **announced}
        with exported(variables), self._news_shared(job, rendezvous, attempt):
            if not self._group.is_alone and (refusal := self._present(job, rendezvous, attempt)) is not None:
                return refusal, None
            keep = self._train if job.min_replicas is None else self._keep
            deaths = keep(job, rendezvous, attempt)
            if isinstance(deaths, Cause):
                return deaths, None
            died_at = min((death.time for death in deaths), default=None)
        return self._find_cause(folder, deaths, was_run), died_at

    def _news_shared(self, job: Workers, rendezvous: AgentRendezvous, attempt: int) -> AbstractContextManager[None]:
        """Share news with the other machines during a block, and admit them to the attempt."""
        if self._group.is_alone:  # no other to inform, and its workers handle a stop during startup themselves
            return nullcontext()
        watch = rendezvous.watch(attempt)
        return news_shared(watch, job.folder, Admission(watch, self._fault).look, job.min_replicas is None)

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

    def _present(self, job: Workers, rendezvous: AgentRendezvous, attempt: int) -> Cause | None:
        """Present this machine to the coordinator; None if it takes part in the attempt, else how that ends here."""
        health = examine_health(job.num_processes, job.folder.path)
        name = self._group.name or self._address
        condition = MachineReport.of(health, self._missing, self._fault, job.num_processes, name)
        answer = Admission(rendezvous.watch(attempt), self._fault).present(condition)
        has_spares = bool(rendezvous.group.num_spares)
        if answer.is_spare:
            purpose = "is a spare: it takes the place of one that is lost" if has_spares else "waits for the others"
            logger.info(f"this machine {purpose}")
        elif answer.is_admitted and has_spares and rendezvous.watch(attempt).was_spare(rendezvous.host):
            logger.info("this machine was a spare, and now takes the place of another one")
        elif not answer.is_admitted and not answer.ends and not rendezvous.coordinates:
            logger.warning(f"this machine is left out: {answer.words}")
        return None if answer.is_admitted else answer.cause

    def _keep(self, job: Workers, rendezvous: AgentRendezvous, attempt: int) -> list[ProcessDeath] | Cause:
        """Keep the replicas of a job through an attempt; returns the deaths that have ended it.

        Of several machines, the coordinator keeps all replicas. Elsewhere the result is a Cause: how it ended is known
        there, or why it could not begin.
        """
        if self._group.is_alone:
            return ReplicaSupervisor(job, self._warm).run()
        if rendezvous.coordinates:
            if job.prepare is not None and (ending := job.prepare()) is not None:
                return Cause(ending, Likelihood.NOTHING if ending.code == DONE else Likelihood.CAUSE, time.time())
            machines = Machines(self._address, job.num_machines - 1, job.folder.outcomes_dir)
            keeper = ReplicaSupervisor(job, self._warm, machines, rendezvous.group.min_nodes)
            rendezvous.call(attempt, machines.call)
            return keeper.run()
        while (call := rendezvous.await_call(attempt)) is not None and not NodeAgent(job, self._warm, call).run():
            time.sleep(_REJOIN_SECONDS)  # the link may have been down only for a moment
        return Cause(Outcome(DONE), Likelihood.NOTHING, time.time())

    def _train(self, job: Workers, rendezvous: AgentRendezvous, attempt: int) -> list[ProcessDeath] | Cause:
        """Start this machine's ranks, and wait for their end; returns those that have failed.

        A Cause: the attempt was over before this machine took part in it.
        """
        place = self._find_place(job, rendezvous, attempt)
        if place is None:
            return Cause(Outcome(DONE), Likelihood.NOTHING, time.time())
        first, world_size, endpoint = place
        watch = None if self._group.is_alone else rendezvous.watch(attempt)
        ranks = LocalRanks(job.folder, self._warm)
        try:
            for index in range(job.num_processes):
                env = rank_environment(first + index, world_size, index, job.num_processes)
                ranks.start(job.argv, first + index, {**read_environment(), **env, **endpoint})
            ranks.wait(leaves=lambda: watch is not None and watch.meets_again())
        finally:
            ranks.end()
        return ranks.deaths

    def _find_place(
        self, job: Workers, rendezvous: AgentRendezvous, attempt: int
    ) -> tuple[int, int, dict[str, str]] | None:
        """The first rank of this machine, the number of all ranks, and the variables of where they meet.

        They meet at a free port of the machine of rank 0. None if the attempt is over before.
        """
        team = [(rendezvous.host, job.num_processes)]
        if not self._group.is_alone:
            found = Admission(rendezvous.watch(attempt), self._fault).await_team()
            if found is None:
                return None
            team = found
        hosts = [host for host, _ in team]
        if hosts[0] == rendezvous.host:
            rendezvous.call(attempt, json.dumps([self._address, find_free_port(self._address)]))
        if (words := rendezvous.await_call(attempt)) is None:
            return None
        address, port = json.loads(words)
        first = sum(count for _, count in team[: hosts.index(rendezvous.host)])
        return first, sum(count for _, count in team), {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def _explain_loss(self, error: BaseException) -> LaunchError:
        words = f"the coordinator at {self._group.endpoint} is gone"
        self._last = Decision(False, FAILED, words, 0, is_short=True)
        return LaunchError(
            f"the coordinator at {self._group.endpoint} is gone or unreachable "
            f"({first_line(error)}); start the same command again on the remaining machines to resume "
            "the run."
        )

    def _begin_again(self, job: Workers, decision: Decision, detection: float | None) -> None:
        """Log a restart, write its events on the machine that keeps the journal, and forget how the attempt ended."""
        if decision.message and decision.goes_on:  # it has none where machines left or joined
            self._tell_restart(job, decision, detection)
        job.folder.clear_outcomes(restart=True)

    def _tell_restart(self, job: Workers, decision: Decision, detection: float | None) -> None:
        if self.keeps_journal:
            job.folder.sweep()
            with suppress(OSError):  # the disk may be full
                job.folder.rows.append_event("failure", step=decision.step, code=FAILED, message=decision.message)
                number = decision.restarts
                job.folder.rows.append_event("restart", step=decision.step, number=number, detection_seconds=detection)
        if self.is_coordinator:
            where = "" if self._group.is_alone else ", on all machines"
            start = "from the beginning" if decision.step is None else f"from step {decision.step}"
            logger.warning(f"failure: {decision.message}")
            logger.warning(f"restart {decision.restarts} of {job.max_restarts}{where}: {start}")


def network_variables(address: str) -> dict[str, str]:
    """The network variables of the workers of this machine, which has this address; a single machine uses loopback."""
    interface = find_interface(address)
    names = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {ADDRESS_VARIABLE: address, **names}


def _announce(ended_at: float, detection: float | None) -> dict[str, str]:
    """What the workers of the next attempt are told of the end of the last one."""
    return {RESTART_VARIABLE: json.dumps({"ended_at": ended_at, "detection_seconds": detection})}


def _find_newest_step(job: Workers) -> int | None:
    """The newest step of the checkpoints on disk and the snapshots in memory."""
    held = None if job.memory is None else newest_step(job.memory)
    return max((step for step in (job.folder.newest_step(), held) if step is not None), default=None)


def worker_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module with this Python."""
    return (sys.executable, "-m", module, *arguments)
