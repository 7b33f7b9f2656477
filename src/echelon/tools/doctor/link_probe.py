"""Check the network between several machines over ssh, for `echelon doctor --hosts`.

`python -m echelon.tools.doctor.network` answers on each machine. Every wait has a timeout, and a machine that does not
answer does not prevent the checks of the others.
"""

import json
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from typing import Any

from echelon.ground.errors import LaunchError
from echelon.launch.shell import join_words, prepare_lines
from echelon.launch.ssh_launcher import Ssh, explain, on_each
from echelon.recipe.launch_sections import LaunchConfig

Pair = tuple[str, str]

# A pair is slow below this fraction of the usual bandwidth, or above this multiple of the usual latency plus a margin.
_SLOW, _LATE, _LATE_SECONDS = 0.25, 4.0, 0.002
logger = logging.getLogger(__name__)

MARK = "@echelon "
"""Prefix of answer lines, which tells them from other output, such as that of a shell profile."""

START_SECONDS = 90.0
CONNECT_SECONDS = 3.0
MEASURE_SECONDS = 10.0
_CLOCK_REPEATS = 5


@dataclass(frozen=True)
class Speed:
    """The speed of an all-reduce: latency in seconds, and bytes per second on each machine's network link."""

    latency_seconds: float
    bytes_per_second: float

    @property
    def rate(self) -> str:
        """The bandwidth with its unit."""
        megabytes = self.bytes_per_second / 1e6
        return f"{megabytes / 1000:.1f} GB/s" if megabytes >= 1000 else f"{megabytes:.3g} MB/s"

    @property
    def delay(self) -> str:
        """The latency with its unit."""
        return f"{self.latency_seconds * 1e3:.2g} ms"

    def better(self, other: "Speed") -> "Speed":
        """The better value of both, for each figure: disturbances only make a measurement worse."""
        return Speed(
            min(self.latency_seconds, other.latency_seconds), max(self.bytes_per_second, other.bytes_per_second)
        )


def find_slow(speeds: Mapping[Pair, Speed]) -> dict[Pair, str]:
    """The pairs that are much slower than usual, with the figures.

    Usual is the median over all hosts of each host's best pair, which one bad host or pair does not affect.
    """
    best: dict[str, Speed] = {}
    for pair, speed in speeds.items():
        for host in pair:
            best[host] = speed.better(best.get(host, speed))
    if not best:
        return {}
    usual = Speed(
        median(link.latency_seconds for link in best.values()), median(link.bytes_per_second for link in best.values())
    )
    slow = {}
    for pair, speed in speeds.items():
        if speed.bytes_per_second < _SLOW * usual.bytes_per_second:
            slow[pair] = f"{speed.rate} where {usual.rate} is usual"
        elif speed.latency_seconds > _LATE * usual.latency_seconds + _LATE_SECONDS:
            slow[pair] = f"{speed.delay} for an all-reduce where {usual.delay} is usual"
    return slow


class ProbeProcess:
    """A process on one machine that answers requests. Raises LaunchError with the reason if it does not."""

    def __init__(self, host: str, argv: Sequence[str]) -> None:
        self.host = host
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self._answers: Queue[str | None] = Queue()
        self._errors: list[str] = []
        self._is_given_up = False
        for read in (self._read_answers, self._read_errors):
            threading.Thread(target=read, daemon=True).start()

    def ask(self, do: str, seconds: float, **words: Any) -> dict[str, Any]:
        """Send one request and return its answer."""
        assert self._process.stdin is not None
        if self._is_given_up:
            raise LaunchError("skipped, because it did not answer earlier")
        with suppress(BrokenPipeError):  # it has ended; its last line has the reason
            self._process.stdin.write(json.dumps({"do": do, **words}) + "\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=seconds)
        except Empty:
            self._is_given_up = True
            self.close()
            raise LaunchError(f"no answer in {seconds:.0f} s") from None
        if line is None:
            self._process.wait(5)
            time.sleep(0.1)  # for the thread that reads stderr
            raise LaunchError(explain("".join(self._errors)) or f"it exited with code {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LaunchError(answer["error"])
        return answer

    def close(self) -> None:
        """End the local process. The remote one ends when its stdin closes."""
        self._process.kill()
        self._process.wait()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(line.removeprefix(MARK))
        self._answers.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)


@dataclass(frozen=True)
class Examination:
    """The measurements. A string instead of a value is the reason why there is none.

    `facts`: the result of `network.Machine.describe` on each host. `offsets`: seconds that each clock is ahead of this
    machine's. `blocked`: why the first host of a pair cannot reach the second, by kind: `rendezvous` at the rendezvous
    port, `collective` at a port like those of collectives. `pairs`, `whole`: speeds of two hosts, and of all.
    """

    hosts: tuple[str, ...]
    port: int
    facts: Mapping[str, dict[str, Any] | str]
    offsets: Mapping[str, float] = field(default_factory=dict)
    blocked: Mapping[Pair, Mapping[str, str]] = field(default_factory=dict)
    pairs: Mapping[Pair, Speed | str] = field(default_factory=dict)
    whole: Speed | str | None = None


def probe_script(launch: LaunchConfig, workdir: Path) -> str:
    """The script for a host: the setup of training, then the process that answers."""
    return "\n".join(
        [*prepare_lines(launch, workdir), f"exec {join_words([launch.python, '-m', 'echelon.tools.doctor.network'])}"]
    )


@contextmanager
def probes_over_ssh(hosts: Sequence[str], ssh: Ssh, script: str) -> Iterator[dict[str, ProbeProcess]]:
    """Start a probe on each host; they end with the block."""
    probes: dict[str, ProbeProcess] = {}
    try:
        for host in hosts:
            probes[host] = ProbeProcess(host, ssh.command(host, ["bash", "-c", script]))
        yield probes
    finally:
        for probe in probes.values():
            probe.close()


def examine(probes: Mapping[str, ProbeProcess], port: int, interface: str | None, seen: str | None) -> Examination:
    """Run all checks. Disjoint pairs are measured at the same time."""
    hosts = tuple(probes)
    words = {"hosts": hosts, "port": port, "interface": interface, "seen": seen}
    logger.info(f"querying {len(hosts)} hosts over ssh")
    described = on_each(hosts, lambda host: probes[host].ask("describe", START_SECONDS, **words))
    answered = _successes(described)
    facts = {host: answered.get(host, str(description)) for host, description in described.items()}
    there = list(answered)
    backend = "nccl" if all(answer["has_gpu"] for answer in answered.values()) else "gloo"  # as training chooses
    offsets = _successes(on_each(there, lambda host: _find_offset(probes[host])))
    logger.info("connecting every pair, both ways")
    blocked = _find_blocked(probes, facts, there, port)
    pairs = _measure_pairs(probes, facts, there, {tuple(sorted(pair)) for pair in blocked}, backend)
    whole: Speed | str | None = None
    if len(there) > 2 and not blocked and not any(isinstance(result, str) for result in pairs.values()):
        logger.info("measuring all together")
        whole = _measure_apart(probes, facts, [tuple(there)], "whole", backend)[tuple(there)]
    return Examination(hosts, port, facts, offsets, blocked, pairs, whole)


def _measure_pairs(
    probes: Mapping[str, ProbeProcess],
    facts: Mapping[str, Any],
    hosts: Sequence[str],
    bad: Set[tuple[str, ...]],
    backend: str,
) -> dict[tuple[str, str], Speed | str]:
    """The speed of every pair that is not `bad`, or why there is none; slow pairs are measured again, alone."""
    speeds: dict[tuple[str, ...], Speed | str] = {}
    for number, round_ in enumerate(rounds(hosts)):
        good = [pair for pair in round_ if tuple(sorted(pair)) not in bad]
        if good:
            logger.info(f"measuring {', '.join(f'{a}-{b}' for a, b in good)}")
            speeds |= _measure_apart(probes, facts, good, f"round-{number}", backend)
    pairs = {(a, b): speed for (a, b), speed in speeds.items()}
    measured = {pair: speed for pair, speed in pairs.items() if isinstance(speed, Speed)}
    for pair in find_slow(measured):  # the better of both counts
        logger.info(f"measuring {pair[0]}-{pair[1]} again")
        again = _measure_apart(probes, facts, [pair], f"again-{pair[0]}-{pair[1]}", backend)[pair]
        pairs[pair] = again.better(measured[pair]) if isinstance(again, Speed) else again
    return pairs


def measure_here(start: Callable[[str], ProbeProcess]) -> Speed:
    """The speed of two processes of this machine, which `start` starts. Raises LaunchError where they do not work."""
    names = ("first", "second")
    probes = {name: start(name) for name in names}
    words = {"hosts": ["127.0.0.1"], "port": 1, "interface": None, "seen": None}
    try:
        facts = on_each(names, lambda name: probes[name].ask("describe", START_SECONDS, **words))
        for fact in facts.values():
            if isinstance(fact, LaunchError):
                raise fact
        speed = _measure_apart(probes, facts, [names], "here", "gloo")[names]
    finally:
        for probe in probes.values():
            probe.close()
    if isinstance(speed, str):
        raise LaunchError(speed)
    return speed


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """All pairs, in rounds in which no host has two (the circle method of tournaments)."""
    places: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    all_rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        all_rounds.append([(a, b) for a, b in met if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return all_rounds


def _successes(answers: Mapping[str, Any]) -> dict[str, Any]:
    return {host: answer for host, answer in answers.items() if not isinstance(answer, LaunchError)}


def _find_offset(probe: ProbeProcess) -> float:
    """How many seconds its clock is ahead of this machine's, from the fastest of several answers."""
    best = (float("inf"), 0.0)
    for _ in range(_CLOCK_REPEATS):
        before = time.time()
        there = probe.ask("clock", 5.0)["time"]
        after = time.time()
        best = min(best, (after - before, there - (before + after) / 2))
    return best[1]


def _find_blocked(
    probes: Mapping[str, ProbeProcess], facts: Mapping[str, Any], there: Sequence[str], port: int
) -> dict[Pair, dict[str, str]]:
    def connect(host: str) -> dict[str, Any]:
        targets: dict[str, list[Any]] = {}
        for other in there:
            if other != host:
                # By the host's name as resolved here, and by the address that collectives use.
                targets[f"{other} rendezvous"] = [facts[host]["addresses"][other] or other, port]
                targets[f"{other} collective"] = [facts[other]["address"], facts[other]["store_port"]]
        return probes[host].ask("connect", CONNECT_SECONDS + 10, targets=targets, limit=CONNECT_SECONDS)

    blocked: dict[Pair, dict[str, str]] = {}
    for host, answers in on_each(there, connect).items():
        if isinstance(answers, LaunchError):
            blocked |= {(host, other): {"collective": str(answers)} for other in there if other != host}
            continue
        for name, reason in answers.items():
            if reason is not None:
                other, _, what = name.partition(" ")
                blocked.setdefault((host, other), {})[what] = reason
    return blocked


def _measure_apart(
    probes: Mapping[str, ProbeProcess],
    facts: Mapping[str, Any],
    groups: Sequence[tuple[str, ...]],
    tag: str,
    backend: str,
) -> dict[tuple[str, ...], Speed | str]:
    """The speeds of disjoint groups, measured at the same time over gloo or nccl."""
    places = {host: (group, rank) for group in groups for rank, host in enumerate(group)}

    def measure(host: str) -> dict[str, Any]:
        group, rank = places[host]
        first = facts[group[0]]
        words = {"rank": rank, "size": len(group), "address": first["address"], "port": first["store_port"]}
        words |= {"backend": backend, "tag": tag, "limit": MEASURE_SECONDS}
        return probes[host].ask("measure", 4 * MEASURE_SECONDS, **words)

    answers = on_each(list(places), measure)
    speeds: dict[tuple[str, ...], Speed | str] = {}
    for group in groups:
        first = answers[group[0]]
        failed = [answer for answer in (answers[host] for host in group) if isinstance(answer, LaunchError)]
        speeds[group] = str(failed[0]) if isinstance(first, LaunchError) or failed else Speed(**first)
    return speeds
