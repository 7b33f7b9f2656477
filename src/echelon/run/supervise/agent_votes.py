"""Agreement between the agents of a job, through a key-value store that one of them, the coordinator, hosts.

Every attempt to train has a number. Each machine reports when it joins an attempt and how the attempt ended there. The
coordinator then decides for all, so all machines do the same. Machines send heartbeats; a machine without heartbeats is
lost. A single machine uses a store within its own process.
"""

import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Protocol, cast

from echelon.ground.errors import LaunchError
from echelon.ground.hosts import HostGroup, join_endpoint, limit_silence_of, open_coordinator
from echelon.ground.sockets import answers_as_store, host_store, is_loopback
from echelon.run.supervise.decision import Decision, HostReport, decide
from echelon.run.supervise.restart import Restarts

logger = logging.getLogger(__name__)

LOST_SECONDS = 15.0
"""A machine without a heartbeat for this long is lost."""

MEMBERS_KEY = "roster"
"""In the store of a meeting."""

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_JOIN_SECONDS = 600.0
# Timeout of one request to the store.
_PATIENCE = timedelta(seconds=5)
# A stop of the whole job reaches its machines at slightly different times.
_ASKING_SECONDS = 1.5


class _Store(Protocol):
    """The part of torch's TCPStore that is used here; its type stubs are incomplete."""

    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def clone(self) -> "_Store": ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...


@dataclass(frozen=True)
class MemberList:
    """The machines of a job as the coordinator has last listed them: their names and addresses, its own first.

    `job`: a name of the job; `term`: how many coordinators were lost before.
    """

    job: str
    term: int = 0
    members: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def parse(text: bytes) -> "MemberList":
        """What the coordinator has stored."""
        fields = json.loads(text)
        return MemberList(fields["job"], fields["term"], tuple((host, address) for host, address in fields["members"]))

    def next(self) -> "MemberList":
        """That of the next coordinator, which has listed nobody yet."""
        return MemberList(self.job, self.term + 1)


class AgentRendezvous:
    """This machine's connection to the others. Every agent of a job creates one, for use by its main thread.

    A single machine uses a store within this process. Methods raise torch's DistError when the coordinator is gone.
    """

    def __init__(
        self,
        group: HostGroup,
        name: str,
        restarts: Restarts,
        address: str = "",
        member_list: MemberList | None = None,
        patience_seconds: float = _JOIN_SECONDS,
    ) -> None:
        """Wait until the coordinator listens, or raise LaunchError.

        `name`: this machine's in messages; `address`: this machine's for the others. `member_list`: where this meeting
        replaces that of a lost coordinator.
        """
        self.group = group
        self.member_list = member_list or MemberList(uuid.uuid4().hex)
        self._restarts = restarts
        self.host = f"{name} ({uuid.uuid4().hex[:6]})"
        listener = None if group.is_alone else open_coordinator(group)
        self.coordinates = group.is_alone or listener is not None
        self.endpoint = group.endpoint if listener is None else join_endpoint(*listener.getsockname()[:2])
        """The endpoint at which this machine reaches the store."""
        if listener is not None:
            _warn_of_loopback(group, listener.getsockname()[0])
            self._store = cast(_Store, host_store(listener, _PATIENCE.total_seconds()))
        else:
            self._store = _open_own_store() if group.is_alone else _find_store(group, patience_seconds)
        self._beats: dict[str, tuple[bytes, float]] = {}
        self._complete_at: float | None = None
        self._over = threading.Event()
        self._store.append("members", json.dumps([self.host, address]) + "\n")
        threading.Thread(target=self._beat, args=(self._store.clone(),), name="beat", daemon=True).start()

    def attempt(self) -> int:
        """The number of the current or next attempt."""
        return self._store.add("attempt", 0)

    def join(self, attempt: int) -> None:
        """Announce that this machine takes part."""
        logger.debug(f"attempt {attempt}: {self.host} takes part, store at {self.endpoint}")
        self._store.append(f"{attempt}/hosts", self.host + "\n")

    def call(self, attempt: int, words: str) -> None:
        """Say where the ranks of the attempt meet, or its keeper."""
        self._store.set(f"{attempt}/call", words)

    def await_call(self, attempt: int) -> str | None:
        """Wait for what another machine says in `call`; None if the attempt is over before."""
        key = f"{attempt}/call"
        while not self._store.check([key]):
            if self._store.check([f"{attempt}/closed"]):
                return None
            time.sleep(_LOOK_SECONDS)
        return self._store.get(key).decode()

    def is_left_out(self, attempt: int) -> bool:
        """Whether the coordinator has left this machine out of an attempt."""
        return self.host not in _list_hosts(self._store, attempt)

    def is_spare(self, attempt: int) -> bool:
        """Whether this machine waits for the attempt after this one."""
        return self.host in read_lines(self._store, f"{attempt}/spares")

    def await_decision(self, attempt: int, mine: HostReport) -> Decision:
        """Report how the attempt ended here, wait until it has ended everywhere; returns what all machines do next."""
        self._store.set(f"{attempt}/report/{self.host}", json.dumps(asdict(mine)))
        if self.coordinates:
            self._store.set(f"{attempt}/closed", "")
        while (decision := self.find_decision(attempt)) is None:
            if not (self.coordinates and self._decide(attempt)):
                time.sleep(_LOOK_SECONDS)
        if self.coordinates and not decision.goes_on:
            self._await_readers(attempt)
        return decision

    def find_decision(self, attempt: int) -> Decision | None:
        """What all machines do after an attempt; None if that is not decided yet."""
        if not self._store.check([key := f"{attempt}/decision"]):
            return None
        decision = Decision.parse(self._store.get(key))
        logger.debug(f"attempt {attempt}: decided {decision}")
        if not self.coordinates:
            self._store.append(f"{attempt}/read", self.host + "\n")
        return decision

    def watch(self, attempt: int) -> "Watch":
        """The view of the store for a second thread."""
        return Watch(self._store.clone(), attempt, self.group, self.host, self.coordinates, self._silent)

    def close(self) -> None:
        """Send no more heartbeats."""
        self._over.set()

    def _decide(self, attempt: int) -> bool:
        """Decide for all machines, if the attempt has ended everywhere."""
        reports = self._collect(attempt)
        if reports is None:
            return False
        asked = self._find_asked(list(reports))
        spares = [host for host in read_lines(self._store, f"{attempt}/spares") if not self._silent(self._store, host)]
        if self.host in asked:  # if the coordinator leaves, the store is lost, so all machines must leave
            asked, spares = list(reports), []
        meets_again = self._store.check([_again(attempt)])
        decision = decide(reports, frozenset(asked), self.group, self._restarts, len(spares), meets_again)
        if decision.goes_on:
            self._store.add("attempt", 1)
        self._store.set(f"{attempt}/decision", json.dumps(asdict(decision)))
        return True

    def _collect(self, attempt: int) -> dict[str, HostReport | None] | None:
        """The reports of all machines that joined, None for lost ones; None while one is still running."""
        if not (hosts := _list_hosts(self._store, attempt)):
            return None  # this machine is left out, and no other has come yet
        reports: dict[str, HostReport | None] = {}
        for host in hosts:
            key = f"{attempt}/report/{host}"
            if self._store.check([key]):
                reports[host] = HostReport(**json.loads(self._store.get(key)))
            elif self._silent(self._store, host):
                reports[host] = None
            else:
                return None
        now = time.monotonic()
        self._complete_at = now if self._complete_at is None else self._complete_at
        num_asked = len(self._find_asked(hosts))
        if 0 < num_asked < len(hosts) and now - self._complete_at < _ASKING_SECONDS:
            return None
        self._complete_at = None
        return reports

    def _find_asked(self, hosts: list[str]) -> list[str]:
        asked = set(read_lines(self._store, "asked"))
        return [host for host in hosts if host in asked]

    def _silent(self, store: _Store, host: str) -> bool:
        """Whether a machine has stopped sending heartbeats, measured by this machine's clock."""
        key = f"beat/{host}"
        now = time.monotonic()
        beat = store.get(key) if store.check([key]) else b""
        before = self._beats.get(host)
        if before is None or before[0] != beat:
            self._beats[host] = (beat, now)
            return False
        return now - before[1] > LOST_SECONDS

    def _await_readers(self, attempt: int) -> None:
        """Wait until the others have read the decision, since the store ends with this process."""
        deadline = time.monotonic() + LOST_SECONDS
        others = {*_list_hosts(self._store, attempt), *read_lines(self._store, f"{attempt}/spares")} - {self.host}
        while not others <= set(read_lines(self._store, f"{attempt}/read")) and time.monotonic() < deadline:
            others -= {host for host in others if self._silent(self._store, host)}
            time.sleep(_LOOK_SECONDS)

    def _beat(self, store: _Store) -> None:
        count = 0
        with suppress(RuntimeError):  # the coordinator is gone; the next user of the store reports it
            while not self._over.is_set():
                store.set(f"beat/{self.host}", str(count := count + 1))
                if self.coordinates:
                    self.member_list = self._list_members(store)
                    store.set(MEMBERS_KEY, json.dumps(asdict(self.member_list)))
                else:
                    if store.check([MEMBERS_KEY]):
                        self.member_list = MemberList.parse(store.get(MEMBERS_KEY))
                    limit_silence_of(self.group.port, LOST_SECONDS)  # every time, since torch opens new connections
                self._over.wait(_BEAT_SECONDS)

    def _list_members(self, store: _Store) -> MemberList:
        """On the coordinator: the machines that do not stay silent, this one first."""
        members = [json.loads(line) for line in read_lines(store, "members")]
        present = [(host, address) for host, address in members if host == self.host or not self._silent(store, host)]
        return replace(self.member_list, members=tuple(sorted(present, key=lambda member: member[0] != self.host)))


@dataclass(frozen=True)
class Watch:
    """The part of a meeting used by a second thread during an attempt: sends and receives stops and deaths."""

    store: _Store
    attempt: int
    group: HostGroup
    host: str
    coordinates: bool
    silent: Callable[[_Store, str], bool]

    def ask(self, name: str) -> None:
        """Tell the others that this machine was asked to stop, by this signal."""
        self.store.append("asked", self.host + "\n")
        self.store.set("asked/name", name)

    def asked(self) -> str | None:
        """The signal that asked the whole job to stop; None in a job whose machines stop individually."""
        is_all = not self.group.may_leave and self.store.check(["asked/name"])
        return self.store.get("asked/name").decode() if is_all else None

    def count_missing(self) -> int:
        """How many machines the attempt still needs to join."""
        return max(0, self.group.min_nodes - len(self.hosts()))

    def tell_death(self) -> None:
        """Tell the others that this attempt has lost a rank."""
        self.store.set(f"{self.attempt}/death", self.host)

    def has_death(self) -> bool:
        """Whether a machine has lost a rank, or is itself lost."""
        key = f"{self.attempt}/death"
        is_looking = self.coordinates and not self.store.check([key])
        if is_looking and any(map(self.is_silent, self.hosts())):
            self.tell_death()
        return self.store.check([key])

    def hosts(self) -> list[str]:
        """The machines that take part in the attempt, lost ones included."""
        return _list_hosts(self.store, self.attempt)

    def is_closed(self) -> bool:
        """Whether the attempt has ended on the coordinator, which admits no more machines to it."""
        return self.store.check([f"{self.attempt}/closed"])

    def is_silent(self, host: str) -> bool:
        """Whether a machine has stopped sending heartbeats."""
        return self.silent(self.store, host)

    def form_team(self, members: Sequence[tuple[str, int]]) -> None:
        """Say who trains in the attempt: machines with their numbers of ranks, in the order of the ranks."""
        self.store.set(f"{self.attempt}/team", json.dumps(members))

    def find_team(self) -> list[tuple[str, int]] | None:
        """What the coordinator has said in `form_team`; None if it has not said it yet."""
        if not self.store.check([key := f"{self.attempt}/team"]):
            return None
        return [(host, count) for host, count in json.loads(self.store.get(key))]

    def meet_again(self) -> None:
        """Have all save and stop, and meet again, because a machine joins. By the coordinator."""
        self.store.set(_again(self.attempt), "")

    def meets_again(self) -> bool:
        """Whether all save and stop, and meet again."""
        return self.store.check([_again(self.attempt)])

    def leave_out(self, host: str) -> None:
        """Let a machine that has joined the attempt take no part in it. By the coordinator, before it starts ranks."""
        self.store.append(f"{self.attempt}/left out", host + "\n")

    def hold(self, host: str) -> None:
        """Let a machine wait as a spare. By the coordinator, which then leaves it out of this attempt."""
        self.store.append(f"{self.attempt}/spares", host + "\n")

    def has_spare(self) -> bool:
        """Whether a machine waits."""
        return not all(map(self.is_silent, self.spares()))

    def was_spare(self, host: str) -> bool:
        """Whether a machine waited during the attempt before this one."""
        return host in self.spares(self.attempt - 1)

    def spares(self, attempt: int | None = None) -> list[str]:
        """The machines that wait during an attempt, this one by default."""
        return read_lines(self.store, f"{self.attempt if attempt is None else attempt}/spares")


def _again(attempt: int) -> str:
    return f"{attempt}/again"


def _list_hosts(store: _Store, attempt: int) -> list[str]:
    """The machines that take part in an attempt: those that have joined, without those that were left out."""
    out = read_lines(store, f"{attempt}/left out")
    return [host for host in read_lines(store, f"{attempt}/hosts") if host not in out]


def read_lines(store: _Store, key: str) -> list[str]:
    """The lines that were appended to a key, each once."""
    return list(dict.fromkeys(store.get(key).decode().split("\n")[:-1])) if store.check([key]) else []


def _warn_of_loopback(group: HostGroup, address: str) -> None:
    if group.max_nodes > 1 and is_loopback(address) and group.host not in (address, "localhost"):
        logger.warning(
            f"{group.host} resolves to {address} here, which other machines cannot reach; remove that line from "
            "/etc/hosts, or name the network interface (--interface)"
        )


def _open_own_store() -> _Store:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return cast(_Store, HashStore())


def _find_store(group: HostGroup, patience_seconds: float) -> _Store:
    """Connect to the coordinator's store once it listens. Raises LaunchError if none does, or another program does."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + patience_seconds
    strange_since: float | None = None
    is_logged = False
    while True:
        asked_at = time.monotonic()
        try:
            with socket.create_connection((group.host, group.port), _PATIENCE.total_seconds()) as line:
                if answers_as_store(line):
                    return cast(_Store, TCPStore(group.host, group.port, timeout=_PATIENCE, wait_for_workers=False))
            # It may also be a coordinator that is shutting down.
            strange_since = strange_since or asked_at
            if time.monotonic() - strange_since >= _PATIENCE.total_seconds():
                raise LaunchError(
                    f"another program listens at the rendezvous endpoint {group.endpoint}; end it, or choose another "
                    "port."
                )
        except OSError as error:
            if asked_at > deadline:
                reason = error.strerror or str(error)
                raise LaunchError(
                    f"no agent listens at the rendezvous endpoint {group.endpoint} ({reason}); choose another port, "
                    "or start the same command on that machine too."
                ) from error
            strange_since = None
            if not is_logged:
                is_logged = True
                logger.info(f"waiting for the coordinator at {group.endpoint}")
        time.sleep(_LOOK_SECONDS)
