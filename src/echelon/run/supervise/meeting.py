"""Agreement between the agents of a job, by messages through a key-value store.

One of the agents, the coordinator, hosts it. Each agent posts messages to the coordinator, in a numbered list of the
store; the coordinator publishes news for all in another one (`coordinator.py`). Nobody polls: a reader waits for the
next number. Machines send heartbeats; a machine without heartbeats is lost. All messages are JSON. A single machine
needs no store.
"""

import json
import logging
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar, cast

from echelon.ground.errors import LaunchError, first_line
from echelon.ground.hosts import HostGroup, limit_silence_of, open_coordinator
from echelon.ground.sockets import answers_as_store, host_store, is_loopback
from echelon.recipe.operation import FaultConfig
from echelon.run.supervise.board import await_true
from echelon.run.supervise.coordinator import AttemptNews, Coordinator, MachineReport, Message
from echelon.run.supervise.decision import Decision, HostReport, Restarts
from echelon.run.supervise.etcd_store import EtcdStore
from echelon.run.supervise.outcome import LOST_SECONDS

logger = logging.getLogger(__name__)

_BEAT_SECONDS, _CAMPAIGN_SECONDS = 2.0, 3.0
_LOOK_SECONDS, _TICK_SECONDS = 0.2, 0.5
_JOIN_SECONDS = 600.0
# How long a program may take to say that it is a store.
_HELLO_SECONDS = 5.0
# Timeout of one request to the store, also while a thousand agents connect to it; and of a wait for the next message,
# which a lost connection ends earlier.
_PATIENCE, _FOREVER = timedelta(seconds=20), timedelta(days=365)
_INBOX, _NEWS = "inbox", "news"

Found = TypeVar("Found")


class TorchStore:
    """The keys of a job in torch's TCPStore, whose type stubs are incomplete.

    Methods raise torch's DistError when it is gone.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def clone(self) -> "TorchStore":
        """The same store for another thread."""
        return TorchStore(self._store.clone())

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._store.set(key, value)

    def find(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        return self._store.get(key) if self._store.check([key]) else None

    def find_each(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there, in one request."""
        return list(self._store.multi_get(keys)) if keys else []

    def append(self, name: str, text: str) -> None:
        """Add a message to a list."""
        self._store.set(f"{name}/{self._store.add(name, 1)}", text)

    def count(self, name: str) -> int:
        """How many messages a list has."""
        return int(self._store.add(name, 0))

    def read(self, name: str, number: int) -> bytes:
        """A message of a list, counted from 1, once it is there. A lost connection ends the wait."""
        self._store.wait([f"{name}/{number}"], _FOREVER)
        return bytes(self._store.get(f"{name}/{number}"))


Store = TorchStore | EtcdStore


class Meeting:
    """This machine's connection to the others. Every agent of a job creates one, for use by its main thread.

    Methods raise torch's DistError when the coordinator is gone.
    """

    def __init__(self, group: HostGroup, name: str, restarts: Restarts, fault: FaultConfig | None = None) -> None:
        """Wait until the coordinator listens, or raise LaunchError.

        `name`: this machine's in messages; `fault` says how the coordinator treats bad machines.
        """
        self.group = group
        self.host = f"{name} ({uuid.uuid4().hex[:6]})"
        self.attempt = 0
        """The number of the current or next attempt."""
        self.asked: str | None = None
        """The signal that asked the whole job to stop; None in a job whose machines stop individually."""
        self._news: dict[int, AttemptNews] = {}
        self._changed = threading.Condition()
        self._num_read = 0
        self._error: Exception | None = None
        self._over = threading.Event()
        self._lost_coordinator = frozenset[str]()
        """The coordinator before this machine."""
        self._store: Store | None = None
        self._publisher: Store | None = None
        coordinator = Coordinator(self.host, group, restarts, fault or FaultConfig(), self._publish)
        self._coordinator: Coordinator | None = coordinator if group.is_alone else None
        if group.is_alone:
            return
        if group.store_name is not None:
            self._store = EtcdStore(group)
            self._start(lambda store: self._campaign(cast(EtcdStore, store), coordinator), "campaign")
        elif (listener := open_coordinator(group)) is not None:
            _warn_of_loopback(group, listener.getsockname()[0])
            self._store = TorchStore(host_store(listener, _PATIENCE.total_seconds()))
            self._coordinator = coordinator
            self._start(self._coordinate, "coordinator")
        else:
            self._store = _find_store(group, _JOIN_SECONDS)
        self._store.set(_beat(self.host), "0")
        self._start(self._beat, "beat")
        self._start(self._listen, "news")
        self._catch_up(self._store)  # this machine may have come later
        while (decision := self.now().decision) is not None and decision.goes_on:
            self.attempt += 1

    def _catch_up(self, store: Store) -> None:
        """Wait until this machine has read all news that are there now."""
        num_there = store.count(_NEWS)
        self._await(lambda: self._num_read >= num_there or None)

    @property
    def coordinates(self) -> bool:
        """Whether this machine is the coordinator; with a store outside of the job it may become it."""
        return self._coordinator is not None

    def _start(self, work: Callable[[Store], None], name: str) -> None:
        """Start a thread with a connection of its own; its error is raised in the main thread."""
        assert self._store is not None
        store = self._store.clone()
        if not self.coordinates:
            limit_silence_of(self.group.port, LOST_SECONDS)

        def run() -> None:
            try:
                work(store)
            except Exception as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()

        threading.Thread(target=run, name=name, daemon=True).start()

    def now(self) -> AttemptNews:
        """The news of the current attempt."""
        return self._news.setdefault(self.attempt, AttemptNews())

    def was_spare(self) -> bool:
        """Whether this machine waited during the attempt before this one."""
        return self.host in self._news.get(self.attempt - 1, AttemptNews()).spares

    def present(self, report: MachineReport) -> None:
        """Offer to take part in the current attempt; the answer is in the news."""
        clock = report.clock if self.coordinates else self._measure_clock()
        self.post("present", report={**asdict(report), "clock": clock})

    def end_attempt(self, report: HostReport) -> None:
        """Say how the attempt has ended on this machine."""
        self.post("ended", report=asdict(report))

    def ask(self, name: str) -> None:
        """Say that this machine was asked to stop, by this signal."""
        self.post("asked", name=name)

    def post(self, kind: str, **fields: Any) -> None:
        """Send a message to the coordinator."""
        message = {"kind": kind, "attempt": self.attempt, "host": self.host, **fields}
        if self._store is None:
            assert self._coordinator is not None
            self._coordinator.handle(message)
            self._coordinator.look(frozenset())
        else:
            _append(self._store, _INBOX, message)

    def await_news(self, find: Callable[[AttemptNews], Found | None]) -> Found:
        """Wait until `find` finds something in the news of the current attempt."""
        return self._await(lambda: find(self.now()))

    def _await(self, find: Callable[[], Found | None]) -> Found:
        with self._changed:
            while (result := find()) is None:
                self.check()
                self._changed.wait(_LOOK_SECONDS)
        return result

    @property
    def is_broken(self) -> bool:
        """Whether `check` raises an error."""
        return self._error is not None

    def check(self) -> None:
        """Raise the error of a thread: DistError if the coordinator is gone."""
        if self._error is not None:
            raise self._error

    def await_decision(self) -> Decision:
        """Wait for what all machines do after the current attempt; the next one is then the current one."""
        decision = self.await_news(lambda news: news.decision)
        logger.debug(f"attempt {self.attempt}: decided {decision}")
        self.attempt += decision.goes_on
        return decision

    def close(self) -> None:
        """End the threads; the coordinator waits until the others have read the decision: the store ends with it."""
        store, coordinator = self._store, None if self._error is not None else self._coordinator
        if store is not None and coordinator is not None:
            await_true(lambda: not coordinator.awaits_readers(), LOST_SECONDS)
        self._over.set()
        self._store = None
        if isinstance(store, EtcdStore) and coordinator is not None:
            store.leave(self.host, is_over=coordinator.has_ended)
        elif store is not None and coordinator is not None:
            for name in (_INBOX, _NEWS):
                _append(store, name, {"kind": "end"})

    def _publish(self, message: Message) -> None:
        """By the coordinator: tell all."""
        if self._publisher is None:
            self._take(message)
        else:
            _append(self._publisher, _NEWS, message)

    def _take(self, message: Message) -> None:
        with self._changed:
            if message["kind"] == "stop":
                self.asked = message["name"]
            else:
                self._news.setdefault(message["attempt"], AttemptNews()).take(message)
            self._num_read += 1
            self._changed.notify_all()

    def _listen(self, store: Store) -> None:
        """Read the news, from the first one on, until the job ends."""
        for message in _read(store, _NEWS):
            if message["kind"] == "end":
                raise _lost("it has ended")
            _handle(message, self._take)
            decision = self._news.get(message["attempt"], AttemptNews()).decision
            if message["kind"] == "decision" and decision is not None and not decision.goes_on:
                _append(store, _INBOX, {"kind": "read", "attempt": message["attempt"], "host": self.host})
                return

    def _campaign(self, store: EtcdStore, coordinator: Coordinator) -> None:
        """Become the coordinator when there is none; raise an error when another machine is it instead of this one."""
        seen = frozenset[str]()
        while not self._over.is_set():
            last = store.find_coordinator()
            is_mine = store.take_role(self.host)
            if is_mine and self._coordinator is None:
                self._catch_up(store)
                coordinator.restore(self._news)
                self._lost_coordinator = seen
                self._coordinator = coordinator
                self._start(self._coordinate, "coordinator")
            elif self._coordinator is not None and not is_mine:
                raise _lost("another machine coordinates this job")
            elif is_mine:
                store.renew()
            if last is not None:
                seen = frozenset([last])
            self._over.wait(_CAMPAIGN_SECONDS)

    def _coordinate(self, store: Store) -> None:
        """Handle the messages to the coordinator, until the job has ended."""
        assert self._coordinator is not None
        self._publisher, inbox = store, queue.Queue[Message]()
        self._start(lambda store: _fill(inbox, store), "inbox")
        beats, silent, looked_at = _Beats(), frozenset[str](), 0.0
        while not self._over.is_set():
            for message in _drain(inbox):
                if message["kind"] == "ping":
                    store.set(_pong(message["attempt"], message.get("host")), str(time.time()))
                else:
                    _handle(message, self._coordinator.handle)
            if time.monotonic() - looked_at > _BEAT_SECONDS:
                looked_at = time.monotonic()
                silent = beats.find_silent(store, self._coordinator.hosts() - {self.host})
            self._coordinator.look(silent | self._lost_coordinator)

    def _beat(self, store: Store) -> None:
        for number in count(1):
            if self._over.is_set():
                return
            store.set(_beat(self.host), str(number))
            self._over.wait(_BEAT_SECONDS)

    def _measure_clock(self) -> tuple[float, float]:
        """The bounds of this clock's lead over the coordinator's, which reads its own between two readings of this."""
        assert self._store is not None
        before, key, pause = time.time(), _pong(self.attempt, self.host), _LOOK_SECONDS / 8
        self.post("ping")
        while (text := self._store.find(key)) is None:  # a thousand that ask often would keep the store from the pings
            self.check()
            time.sleep(pause := min(2 * pause, _BEAT_SECONDS))
        return before - float(text), time.time() - float(text)


class _Beats:
    """The heartbeats of machines, by the clock of the coordinator."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[bytes, float]] = {}

    def find_silent(self, store: Store, hosts: Iterable[str]) -> frozenset[str]:
        """The machines that have sent no heartbeat for `LOST_SECONDS`. One request for all."""
        names, now = sorted(hosts), time.monotonic()
        for host, beat in zip(names, store.find_each(list(map(_beat, names))), strict=True):
            if self._last.get(host, (None, 0.0))[0] != beat:
                self._last[host] = beat, now
        return frozenset(host for host in names if now - self._last[host][1] > LOST_SECONDS)


def _lost(words: str) -> Exception:
    from torch.distributed import DistError

    return DistError(words)


def _beat(host: str) -> str:
    return f"beat/{host}"


def _pong(attempt: int, host: str | None) -> str:
    return f"pong/{attempt}/{host}"


def _append(store: Store, name: str, message: Message) -> None:
    """Add a message to a list of the store."""
    store.append(name, json.dumps(message))


def _read(store: Store, name: str) -> Iterator[Message]:
    """The messages of a list, from the first one on; waits for the next one. Raises LaunchError for anything else."""
    for number in count(1):
        text = store.read(name, number)
        try:
            message = json.loads(text)
            yield {"attempt": 0, **message, "kind": str(message["kind"])}
        except (ValueError, TypeError, LookupError) as error:
            raise _describe_foreign(error) from error


def _handle(message: Message, take: Callable[[Message], None]) -> None:
    """Take in a message. Raises LaunchError if it has not the fields of its kind."""
    try:
        take(message)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _describe_foreign(error) from error


def _describe_foreign(error: Exception) -> LaunchError:
    return LaunchError(
        f"the agents' store contains a message that no agent wrote ({type(error).__name__}: {first_line(error)}); "
        "another program can reach its port: close it to all but the machines of the job, and start the same command "
        "again."
    )


def _fill(inbox: "queue.Queue[Message]", store: Store) -> None:
    for message in _read(store, _INBOX):
        inbox.put(message)
        if message["kind"] == "end":
            return


def _drain(inbox: "queue.Queue[Message]") -> Iterator[Message]:
    """The messages that are there; waits a moment for the first one."""
    with suppress(queue.Empty):
        yield inbox.get(timeout=_TICK_SECONDS)
        while True:
            yield inbox.get_nowait()


def _warn_of_loopback(group: HostGroup, address: str) -> None:
    if group.max_nodes > 1 and is_loopback(address) and group.host not in (address, "localhost"):
        logger.warning(
            f"{group.host} resolves to {address} here, which other machines cannot reach; remove that line from "
            "/etc/hosts, or name the network interface (--interface)"
        )


def _find_store(group: HostGroup, patience_seconds: float) -> Store:
    """Connect to the coordinator's store once it listens. Raises LaunchError if none does, or another program does."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + patience_seconds
    strange_since: float | None = None
    is_logged = False
    while True:
        asked_at = time.monotonic()
        try:
            with socket.create_connection((group.host, group.port), _HELLO_SECONDS) as line:
                if answers_as_store(line):
                    return TorchStore(TCPStore(group.host, group.port, timeout=_PATIENCE, wait_for_workers=False))
            # It may also be a coordinator that is shutting down.
            strange_since = strange_since or asked_at
            if time.monotonic() - strange_since >= _HELLO_SECONDS:
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
