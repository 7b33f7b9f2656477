"""What the agents of several machines tell each other: a key-value store that one of them, the coordinator, hosts.

Every attempt to train has a number. Each machine says when it joins one and how it ended there; the coordinator then
decides for all, so that no two of them ever do different things. Machines beat; one that does not is lost.
"""

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Protocol, cast

from echelon.errors import LaunchError
from echelon.supervise.hosts import HostGroup, join_endpoint, limit_silence, open_coordinator
from echelon.supervise.listening import answers_as_store, is_loopback
from echelon.supervise.outcome import DONE, FAILED, REFUSED, STOPPED, Cause, Outcome, Weight
from echelon.supervise.restart import Restarts

LOST_SECONDS = 15.0
"""A machine that has not been heard of for so long is lost."""

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_JOIN_SECONDS = 600.0
# Of one answer of the store.
_PATIENCE = timedelta(seconds=5)
# Stops of a whole job reach its machines one after the other.
_ASKING_SECONDS = 1.5


class _Store(Protocol):
    """What is used of torch's TCPStore, whose type stubs leave half of it out."""

    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def clone(self) -> "_Store": ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...


@dataclass(frozen=True)
class HostReport:
    """How an attempt ended on one machine: the cause as its own ranks show it, and the newest checkpoint it sees."""

    host: str
    code: int
    message: str
    final: bool
    weight: int
    time: float
    step: int | None

    @staticmethod
    def of(host: str, cause: Cause, step: int | None) -> "HostReport":
        """The report of a machine."""
        outcome = cause.outcome
        return HostReport(host, outcome.code, outcome.message, outcome.final, int(cause.weight), cause.time, step)

    @property
    def outcome(self) -> Outcome:
        """How the machine's ranks ended."""
        return Outcome(self.code, self.message, self.final)


@dataclass(frozen=True)
class Decision:
    """What all machines do after an attempt: go on with another one, or end with this outcome.

    `restarts`: how many failures were answered by another attempt so far, this one included. `leaving`: machines that
    were asked to stop and end, while the others go on.
    """

    goes_on: bool
    code: int
    message: str
    restarts: int
    step: int | None = None
    leaving: tuple[str, ...] = ()


def decide(
    reports: Mapping[str, HostReport | None], asked: frozenset[str], group: HostGroup, restarts: Restarts
) -> Decision:
    """The coordinator's decision; a machine without a report is lost.

    What ended the attempt is the report that explains most, and of those the earliest.
    """
    told = sorted((each for each in reports.values() if each is not None), key=lambda each: (each.weight, each.time))
    step = max((each.step for each in told if each.step is not None), default=None)
    lost = [host for host, report in reports.items() if report is None]
    first = told[0] if told else None
    staying = len(reports) - len(lost) - len(asked - set(lost))

    def end(outcome: Outcome) -> Decision:
        return Decision(False, outcome.code, outcome.message, restarts.done, step)

    def go_on(message: str = "") -> Decision:
        return Decision(True, FAILED, message, restarts.done, step, tuple(sorted(asked)))

    if first is not None and first.code == REFUSED:
        return end(first.outcome)
    if first is not None and first.code == DONE and not lost:
        return end(first.outcome)
    if asked and not (group.is_elastic and staying >= group.min_nodes):
        stopped = next((each for each in told if each.code == STOPPED), None)
        return end((stopped or first).outcome if first is not None else Outcome(FAILED, "stopped by a signal"))
    if first is not None and first.code == STOPPED:
        # Nobody asked for it, or the machines that were asked leave: the others have saved and go on.
        is_membership = first.message.startswith("stopped by SIG")
        return go_on() if is_membership else end(first.outcome)
    if asked:
        return go_on()
    silence = f"{len(lost)} of {len(reports)} machines went silent: {', '.join(lost)}"
    if first is None:
        failure = Outcome(FAILED, "every machine was lost")
    elif not lost:
        failure = first.outcome
    elif first.weight == Weight.CAUSE:  # such as a hang, which may come of it
        failure = replace(first.outcome, message=f"{first.outcome.message}; {silence}")
    else:
        failure = Outcome(FAILED, silence)
    if staying < group.min_nodes:
        return end(failure)
    ending = restarts.refuse(failure, step)
    return go_on(failure.message) if ending is None else end(ending)


class Meeting:
    """This machine's line to the others. Made by every agent of a job; methods but `watch`'s are for its main thread.

    Raises LaunchError, from any method, when the coordinator is gone.
    """

    def __init__(self, group: HostGroup, name: str, restarts: Restarts, say: Callable[[str], None]) -> None:
        """`name`: what messages call this machine. Waits until the coordinator listens."""
        self._group = group
        self._restarts = restarts
        self.host = f"{name} ({uuid.uuid4().hex[:6]})"
        listener = open_coordinator(group)
        self.coordinates = listener is not None
        self.endpoint = group.endpoint if listener is None else join_endpoint(*listener.getsockname()[:2])
        """Where this machine reaches the store."""
        if listener is None:
            self._store = _find_store(group, say)
        else:
            _warn_of_loopback(group, listener.getsockname()[0], say)
            self._store = _host_store(listener)
        self._beats: dict[str, tuple[bytes, float]] = {}
        self._complete_at: float | None = None
        self._over = threading.Event()
        threading.Thread(target=self._beat, args=(self._store.clone(),), name="beat", daemon=True).start()

    def attempt(self) -> int:
        """The number of the attempt that is under way, or comes next."""
        return self._store.add("attempt", 0)

    def join(self, attempt: int) -> None:
        """Say that this machine takes part."""
        self._store.append(f"{attempt}/hosts", self.host + "\n")

    def await_decision(self, attempt: int, mine: HostReport) -> Decision:
        """Report how the attempt ended here, and wait until it has ended everywhere: what all do now."""
        self._store.set(f"{attempt}/report/{self.host}", json.dumps(asdict(mine)))
        key = f"{attempt}/decision"
        while not self._store.check([key]):
            if self.coordinates and (reports := self._collect(attempt)) is not None:
                asked = self._find_asked(list(reports))
                # Where the coordinator leaves, the store goes with it, and so must all.
                leaving = frozenset(reports if self.host in asked else asked)
                decision = decide(reports, leaving, self._group, self._restarts)
                if decision.goes_on:
                    self._store.add("attempt", 1)
                self._store.set(key, json.dumps(asdict(decision)))
            time.sleep(_LOOK_SECONDS)
        fields = json.loads(self._store.get(key))
        if not self.coordinates:
            self._store.append(f"{attempt}/read", self.host + "\n")
        elif not fields["goes_on"]:
            self._await_readers(attempt)
        return Decision(**{**fields, "leaving": tuple(fields["leaving"])})

    def watch(self) -> "Watch":
        """What a thread may ask beside the main one."""
        return Watch(self._store.clone(), self.host, self.coordinates, self._group.is_elastic, self._silent)

    def close(self) -> None:
        """Stop beating."""
        self._over.set()

    def _collect(self, attempt: int) -> dict[str, HostReport | None] | None:
        """The reports of all who joined; None while one of them still works. Lost ones have None."""
        hosts = _lines(self._store, f"{attempt}/hosts")
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
        if self._find_asked(hosts) and now - self._complete_at < _ASKING_SECONDS:
            return None
        self._complete_at = None
        return reports

    def _find_asked(self, hosts: list[str]) -> list[str]:
        asked = set(_lines(self._store, "asked"))
        return [host for host in hosts if host in asked]

    def _silent(self, store: "_Store", host: str) -> bool:
        """Whether a machine has stopped beating; by this machine's clock alone."""
        key = f"beat/{host}"
        now = time.monotonic()
        beat = store.get(key) if store.check([key]) else b""
        before = self._beats.get(host)
        if before is None or before[0] != beat:
            self._beats[host] = (beat, now)
            return False
        return now - before[1] > LOST_SECONDS

    def _await_readers(self, attempt: int) -> None:
        """The store ends with this process: the others read the last word first."""
        deadline = time.monotonic() + LOST_SECONDS
        others = set(_lines(self._store, f"{attempt}/hosts")) - {self.host}
        while not others <= set(_lines(self._store, f"{attempt}/read")) and time.monotonic() < deadline:
            others -= {host for host in others if self._silent(self._store, host)}
            time.sleep(_LOOK_SECONDS)

    def _beat(self, store: "_Store") -> None:
        count = 0
        with suppress(RuntimeError):  # the coordinator is gone; whoever uses the store next says so
            while not self._over.is_set():
                store.set(f"beat/{self.host}", str(count := count + 1))
                if not self.coordinates:  # every time, since torch opens connections of its own
                    limit_silence(self._group, LOST_SECONDS)
                self._over.wait(_BEAT_SECONDS)


@dataclass(frozen=True)
class Watch:
    """The part of a meeting that the thread beside the workers needs: stops and deaths, both ways."""

    store: "_Store"
    host: str
    coordinates: bool
    is_elastic: bool
    silent: Callable[["_Store", str], bool]

    def ask(self, name: str) -> None:
        """Tell the others that this machine was asked to stop, by this signal."""
        self.store.append("asked", self.host + "\n")
        self.store.set("asked/name", name)

    def asked(self) -> str | None:
        """The signal by which the whole job was asked to stop; machines that may leave alone stop alone."""
        is_all = not self.is_elastic and self.store.check(["asked/name"])
        return self.store.get("asked/name").decode() if is_all else None

    def count(self, attempt: int) -> int:
        """How many machines have joined."""
        return len(_lines(self.store, f"{attempt}/hosts"))

    def tell_death(self, attempt: int) -> None:
        """Tell the others that this attempt has lost a rank."""
        self.store.set(f"{attempt}/death", self.host)

    def has_death(self, attempt: int) -> bool:
        """Whether some machine has lost a rank, or is lost itself."""
        if self.coordinates and not self.store.check([f"{attempt}/death"]):
            hosts = _lines(self.store, f"{attempt}/hosts")
            if any(self.silent(self.store, host) for host in hosts):
                self.tell_death(attempt)
        return self.store.check([f"{attempt}/death"])


def _lines(store: "_Store", key: str) -> list[str]:
    return list(dict.fromkeys(store.get(key).decode().split("\n")[:-1])) if store.check([key]) else []


def _warn_of_loopback(group: HostGroup, address: str, say: Callable[[str], None]) -> None:
    if group.max_nodes > 1 and is_loopback(address) and group.host not in (address, "localhost"):
        say(
            f"note: {group.host} is {address} on this machine, which no other one reaches; take that line out of "
            "/etc/hosts, or name the interface to talk over (--interface)"
        )


def _host_store(listener: socket.socket) -> "_Store":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listener.getsockname()[:2]
    store = TCPStore(
        host, port, is_master=True, timeout=_PATIENCE, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return cast(_Store, store)


def _find_store(group: HostGroup, say: Callable[[str], None]) -> "_Store":
    """The coordinator's store, as soon as that listens. Raises LaunchError when nobody does, or another program."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + _JOIN_SECONDS
    strange_since: float | None = None
    is_told = False
    while True:
        asked_at = time.monotonic()
        try:
            with socket.create_connection((group.host, group.port), _PATIENCE.total_seconds()) as line:
                is_store = answers_as_store(line)
        except OSError as error:
            if asked_at > deadline:
                reason = error.strerror or str(error)
                raise LaunchError(
                    f"this machine finds nobody at {group.endpoint}, where all meet ({reason}); choose another port, "
                    "or start the same command on that machine too."
                ) from error
            strange_since = None
            if not is_told:
                is_told = True
                say(f"waiting for {group.endpoint}, where all machines meet")
        else:
            if is_store:
                return cast(_Store, TCPStore(group.host, group.port, timeout=_PATIENCE, wait_for_workers=False))
            # It may also be a coordinator that is just leaving.
            strange_since = asked_at if strange_since is None else strange_since
            if time.monotonic() - strange_since >= _PATIENCE.total_seconds():
                raise LaunchError(
                    f"what listens at {group.endpoint}, where all meet, is no agent of this job; end that program, or "
                    "choose another port."
                )
        time.sleep(_LOOK_SECONDS)
