"""The succession of a lost coordinator: the machines that are left agree on another one, and go on with a new attempt.

Each machine knows the others from the roster of its meeting, and tries them in the same order. One takes over once most
machines of the roster have come to it, so of a network that is divided at most one side goes on. It leaves its claim in
the run folder, which all share: the old coordinator stops when it sees that, and gives up the lock of the folder, which
the new one needs.
"""

import json
import logging
import os
import platform
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from echelon.ground.errors import LaunchError
from echelon.ground.hosts import HostGroup
from echelon.ground.sockets import answers_as_store
from echelon.ground.stored import read_as, write_json, write_text
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.agent_votes import MEMBERS_KEY, AgentRendezvous, MemberList, read_lines
from echelon.run.supervise.decision import Decision
from echelon.run.supervise.outcome import FAILED, Outcome
from echelon.run.supervise.restart import Restarts

logger = logging.getLogger(__name__)

FENCE_SIGNAL = signal.SIGURG
"""By which a thread of the agent ends the wait of its main thread, and so the job on this machine."""

# How much later than this machine another one may notice the loss, or come up as the next one in the order.
_FIND_SECONDS = 30.0
# How long a machine with enough others waits for the rest.
_SETTLE_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_CLAIM_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
_SUPPORT, _WITHDRAWN, _INHERITED = "support", "withdrawn", "inherited"


@dataclass(frozen=True)
class Claim:
    """What a machine that has taken over leaves in the run folder: which job, for which time, and where it listens."""

    job: str
    term: int
    host: str
    address: str
    port: int

    @staticmethod
    def read(folder: RunFolder) -> "Claim | None":
        """The newest claim to a run; None if there is none, or the file is damaged."""
        with suppress(OSError):
            os.listdir(folder.path)  # a network file system then asks its server for new files
        try:
            return read_as(folder.claim_path, Claim)
        except (OSError, ValueError):
            return None


class Fence:
    """On a coordinator: ends this machine's part of the job when another one has taken over."""

    def __init__(self, rendezvous: AgentRendezvous, folder: RunFolder) -> None:
        self.successor: str | None = None
        """The machine that has taken over."""
        self._roster, self._folder = rendezvous.member_list, folder
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="fence", daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(_CLAIM_SECONDS):
            claim = Claim.read(self._folder)
            if claim is not None and claim.job == self._roster.job and claim.term > self._roster.term:
                self.successor = claim.host
                with suppress(OSError):  # without saving
                    write_text(self._folder.death_path, "another machine has taken over\n")
                os.kill(os.getpid(), FENCE_SIGNAL)
                return

    def end(self) -> None:
        """Look no more."""
        self._over.set()


def find_coordinator(group: HostGroup, folder: RunFolder) -> HostGroup:
    """The group, with the coordinator that took over while this machine was lost, if its job still runs."""
    claim = Claim.read(folder)
    if claim is None or not _is_coordinated(claim):
        return group
    logger.info(f"machine {claim.host} has become the coordinator of this run, at {claim.address}:{claim.port}")
    return replace(group, host=claim.address, port=claim.port, coordinates=False)


def _is_coordinated(claim: Claim) -> bool:
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    try:
        with socket.create_connection((claim.address, claim.port), _ANSWER_SECONDS) as line:
            if not answers_as_store(line):
                return False
        patience = timedelta(seconds=_ANSWER_SECONDS)
        store = TCPStore(claim.address, claim.port, timeout=patience, wait_for_workers=False)
        return store.check([MEMBERS_KEY]) and MemberList.parse(store.get(MEMBERS_KEY)).job == claim.job
    except (OSError, ValueError, OverflowError, DistError):  # the file may name no address
        return False


def succeed(
    lost: AgentRendezvous, address: str, restarts: Restarts, folder: RunFolder, least: int, step: int | None
) -> tuple[AgentRendezvous, Decision] | None:
    """Agree with the other machines on a coordinator instead of a lost one; returns the meeting there.

    None without restarts, and if this machine is not among enough others: more than half of the machines that the lost
    one saw, itself counted, and at least `least`. Every agent that has lost the coordinator calls it. The decision says
    whether all start another attempt.

    Args:
        address: this machine's, for the others.
        step: that of the newest checkpoint.
    """
    from torch.distributed import DistError

    group, member_list = lost.group, lost.member_list
    others = member_list.members[1:]
    enough = max(len(member_list.members) // 2 + 1, least)
    is_known = any(host == lost.host for host, _ in others)
    if lost.coordinates or not group.shares_files or not is_known or len(others) < enough or not restarts.limit:
        return None
    logger.warning(f"the coordinator {member_list.members[0][0]} is lost; this machine looks for another one")
    for host, where in others:
        rendezvous, is_own = None, host == lost.host
        try:
            moved = replace(group, host=where, coordinates=is_own)
            rendezvous = AgentRendezvous(moved, platform.node(), restarts, address, member_list.next(), _FIND_SECONDS)
            if is_own:
                hosts = {other for other, _ in others}
                decision = _take_over(rendezvous, lost.host, hosts, enough, folder, restarts, step)
            else:
                decision = _follow(rendezvous, lost.host)
            if decision is not None:
                return rendezvous, decision
        except (LaunchError, DistError) as error:
            logger.debug(f"{host} does not take over: {error}")
        if rendezvous is not None:
            rendezvous.close()
        if is_own:
            break
    return None


def _take_over(
    rendezvous: AgentRendezvous,
    own: str,
    hosts: set[str],
    enough: int,
    folder: RunFolder,
    restarts: Restarts,
    step: int | None,
) -> Decision | None:
    """Wait for enough machines, and decide for all; None if they do not come."""
    store = rendezvous.watch(0).store
    store.append(_SUPPORT, f"{own}\n")
    began = enough_since = time.monotonic()
    while True:
        now = time.monotonic()
        ready = hosts & set(read_lines(store, _SUPPORT)) - set(read_lines(store, _WITHDRAWN))
        if len(ready) < enough:
            enough_since = now
        if ready == hosts or now - enough_since > _SETTLE_SECONDS or now - began > _FIND_SECONDS:
            break
        time.sleep(_LOOK_SECONDS)
    if len(ready) < enough:
        return None
    if rendezvous.group.lives_on:  # its keeper goes on with the machines that are there
        rendezvous.group = replace(rendezvous.group, min_nodes=min(len(ready), rendezvous.group.min_nodes))
    claim = Claim(
        rendezvous.member_list.job,
        rendezvous.member_list.term,
        rendezvous.host,
        rendezvous.group.host,
        rendezvous.group.port,
    )
    with suppress(OSError):  # the disk may be full; the lock of the folder still keeps the old coordinator out
        write_json(folder.claim_path, asdict(claim))
    time.sleep(2 * _CLAIM_SECONDS)  # the old coordinator, if it still runs, stops meanwhile
    failure = Outcome(FAILED, f"the coordinator was lost; {rendezvous.host} has taken over, with {len(ready)} machines")
    ending = restarts.refuse(failure, step)
    decision = Decision(ending is None, FAILED, (ending or failure).message, restarts.done, step)
    store.set(_INHERITED, json.dumps(asdict(decision)))
    return decision


def _follow(rendezvous: AgentRendezvous, own: str) -> Decision | None:
    """Support another machine, and wait for its decision; None if it does not take over."""
    store = rendezvous.watch(0).store
    store.append(_SUPPORT, f"{own}\n")
    deadline = time.monotonic() + _FIND_SECONDS + _SETTLE_SECONDS
    while not store.check([_INHERITED]):
        if time.monotonic() > deadline:
            store.append(_WITHDRAWN, f"{own}\n")
            return None
        time.sleep(_LOOK_SECONDS)
    return Decision.parse(store.get(_INHERITED))
