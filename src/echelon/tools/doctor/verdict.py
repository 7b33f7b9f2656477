"""The results of an examination of several machines: findings, each with its remedy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from echelon.tools.doctor.link_probe import Examination, Pair, Speed, find_slow

# A larger offset makes other machines' files look too new or too old, and certificates invalid.
_CLOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Finding:
    """The result of one check: `words` describe it; `remedy` is the fix, empty if the check passed."""

    subject: str
    words: str
    remedy: str = ""

    @property
    def is_well(self) -> bool:
        """Whether the check passed."""
        return not self.remedy


def judge(found: Examination) -> list[Finding]:
    """One finding for each check that passed, and one for each problem."""
    there = [host for host in found.hosts if not isinstance(found.facts[host], str)]
    facts: dict[str, Any] = {host: found.facts[host] for host in there}
    subjects: dict[str, tuple[str, Iterable[Finding]]] = {
        "hosts": (f"{len(found.hosts)} answer", _judge_hosts(found)),
        "folder": ("all see this folder", _judge_folder(facts)),
        "versions": (_describe_versions(facts), _judge_versions(facts)),
        "names": ("every host resolves every name", _judge_names(facts)),
        "interfaces": (", ".join(f"{host} {facts[host]['interface'] or 'unknown'}" for host in there), ()),
        "clocks": (_describe_clocks(found.offsets), _judge_clocks(found.offsets)),
        "ports": (f"{found.port} and others are open both ways between every pair", _judge_ports(found, facts)),
        "pairs": (_describe_pairs(found.pairs), _judge_pairs(found)),
    }
    findings = []
    for subject, (words, problems) in subjects.items():
        found_problems = list(problems)
        findings += found_problems or ([Finding(subject, words)] if there and words else [])
    if found.whole is not None:
        findings.append(_judge_whole(found.whole, len(there)))
    return findings


def _judge_hosts(found: Examination) -> Iterator[Finding]:
    for host, facts in found.facts.items():
        if isinstance(facts, str):
            yield Finding(
                "hosts",
                f"{host} does not answer: {facts}",
                "make `ssh HOST` work without a prompt, and check that the host has this folder and, as launch.python, "
                "a Python with echelon",
            )


def _judge_folder(facts: Mapping[str, Any]) -> Iterator[Finding]:
    blind = [host for host, fact in facts.items() if not fact["sees"]]
    if blind:
        yield Finding(
            "folder",
            f"{_list(blind)} {_verb(blind, 'does', 'do')} not see the files of this folder",
            "mount the same storage on every host, or set its path there with launch.torchrun.workdir",
        )


def _judge_versions(facts: Mapping[str, Any]) -> Iterator[Finding]:
    subjects = {f"{name} version": name for name in ("python", "torch", "transformers", "echelon")}
    for subject, name in subjects.items():
        values = {host: str(fact["versions"][name] or "none") for host, fact in facts.items()}
        if words := _differences(values):
            yield Finding("versions", f"{subject}: {words}", f"install the same {name} on every host")
    if words := _differences({host: fact["devices"] for host, fact in facts.items()}):
        yield Finding("versions", f"devices: {words}", "use machines with equal devices")


def _judge_names(facts: Mapping[str, Any]) -> Iterator[Finding]:
    for host, fact in facts.items():
        unknown = [other for other, address in fact["addresses"].items() if address is None]
        if unknown:
            yield Finding(
                "names", f"{host} cannot resolve {_list(unknown)}", f"add them to DNS or to /etc/hosts of {host}"
            )
        for other, address in fact["addresses"].items():
            if address is not None and address.startswith("127.") and len(facts) > 1:
                yield Finding(
                    "names",
                    f"{host} resolves {other} to {address}, a loopback address",
                    f"remove that line from /etc/hosts of {host}, or give the hosts by their addresses",
                )


def _judge_clocks(offsets: Mapping[str, float]) -> Iterator[Finding]:
    usual = median(offsets.values()) if offsets else 0.0
    for host, offset in offsets.items():
        if abs(offset - usual) > _CLOCK_SECONDS:
            where = "ahead of" if offset > usual else "behind"
            yield Finding(
                "clocks",
                f"the clock of {host} is {abs(offset - usual):.1f} s {where} the others",
                f"set it with NTP: start chrony or systemd-timesyncd on {host}",
            )


def _judge_ports(found: Examination, facts: Mapping[str, Any]) -> Iterator[Finding]:
    first = found.hosts[0]
    if first in facts and (reason := facts[first]["listens"]) is not None:
        yield Finding(
            "ports",
            f"port {found.port} of {first} cannot be used: {reason}",
            "end the program that uses it, or choose another one: launch.torchrun.port",
        )
    pairs = {(min(pair), max(pair)) for pair in found.blocked}
    for host in _common(pairs, {(a, b) for a in facts for b in facts if a < b}):
        yield Finding(
            "ports",
            f"{host} and all others cannot connect: {_first_reason(found, host)}",
            f"check the network of {host}: its cable, its interface, its firewall",
        )
        pairs = {pair for pair in pairs if host not in pair}
    for a, b in sorted(pairs):
        yield _judge_blocked_pair(found, a, b)


def _judge_blocked_pair(found: Examination, a: str, b: str) -> Finding:
    there, back = found.blocked.get((a, b), {}), found.blocked.get((b, a), {})
    if there and back and len(there) == len(back) == 2:
        return Finding(
            "ports",
            f"{a} and {b} cannot connect: {there['collective']}",
            f"check the network path between {a} and {b}: routes, firewalls, interfaces",
        )
    source, target, what = (a, b, there) if there else (b, a, back)
    both = "; the same in the other direction" if there and back else ""
    if set(what) == {"collective"}:
        return Finding(
            "ports",
            f"{source} reaches {target} at port {found.port}, but not at other ports ({what['collective']}){both}",
            f"collectives use other ports: open all TCP ports between {a} and {b}",
        )
    if set(what) == {"rendezvous"}:
        return Finding(
            "ports",
            f"{source} does not reach {target} at port {found.port} ({what['rendezvous']}), but at other ports{both}",
            f"open port {found.port} in the firewall of {target}, or choose another one: launch.torchrun.port",
        )
    return Finding(
        "ports",
        f"{source} does not reach {target} ({what['collective']}), while {target} reaches {source}",
        f"check the firewall of {target}, and the route from {source}",
    )


def _judge_pairs(found: Examination) -> Iterator[Finding]:
    for (a, b), speed in found.pairs.items():
        if isinstance(speed, str):
            yield Finding(
                "pairs",
                f"{a} and {b} connect, but an all-reduce between them fails: {speed}",
                f"check the interfaces that {a} and {b} use, or name one: launch.torchrun.interface",
            )
    speeds = {pair: speed for pair, speed in found.pairs.items() if isinstance(speed, Speed)}
    bad = find_slow(speeds)
    for host in _common(set(bad), set(speeds)):
        why = next(why for pair, why in bad.items() if host in pair)
        yield Finding("pairs", f"{host} is slow with all others: {why}", f"check the network card of {host}")
        bad = {pair: why for pair, why in bad.items() if host not in pair}
    for (a, b), why in bad.items():
        yield Finding("pairs", f"{a} and {b} are slow together: {why}", f"check the network path between {a} and {b}")


def _judge_whole(speed: Speed | str, count: int) -> Finding:
    if isinstance(speed, str):
        return Finding(
            "together", f"every pair works, but not all {count} together: {speed}", "try again; see the logs"
        )
    return Finding("together", f"{speed.rate}, {speed.delay} for an all-reduce of all {count}")


def _common(bad: set[Pair], tried: set[Pair]) -> list[str]:
    """Hosts whose pairs are all bad, at least two of them, while other pairs are good."""
    if bad == tried:
        return []
    return [
        host
        for host in sorted({host for pair in bad for host in pair})
        if len(mine := {pair for pair in tried if host in pair}) > 1 and mine <= bad
    ]


def _first_reason(found: Examination, host: str) -> str:
    return next(next(iter(what.values())) for pair, what in found.blocked.items() if host in pair)


def _differences(values: Mapping[str, str]) -> str:
    """The differing values, as `2.13 on a, b; 2.11 on c`; empty if all are equal."""
    by_value: dict[str, list[str]] = {}
    for host, value in values.items():
        by_value.setdefault(value, []).append(host)
    return "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items()) if len(by_value) > 1 else ""


def _describe_versions(facts: Mapping[str, Any]) -> str:
    if (first := next(iter(facts.values()), None)) is None:
        return ""
    versions = ", ".join(f"{name} {value}" for name, value in first["versions"].items())
    return f"{versions}; {first['devices']}"


def _describe_clocks(offsets: Mapping[str, float]) -> str:
    spread = max(offsets.values(), default=0.0) - min(offsets.values(), default=0.0)
    return f"at most {spread:.1f} s apart" if offsets else ""


def _describe_pairs(pairs: Mapping[Pair, Speed | str]) -> str:
    speeds = [speed for speed in pairs.values() if isinstance(speed, Speed)]
    if not speeds:
        return ""
    slowest = min(speeds, key=lambda speed: speed.bytes_per_second)
    latest = max(speeds, key=lambda speed: speed.latency_seconds)
    return f"{slowest.rate} or more, {latest.delay} or less for an all-reduce of two"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def _verb(names: Sequence[str], one: str, many: str) -> str:
    return one if len(names) == 1 else many
