"""The conclusions of `echelon doctor`: each case has hand-written measurements and the expected message."""

import json
import sys
import tomllib
from itertools import combinations
from pathlib import Path

import pytest

from echelon.cli.commands.doctor import describe_links
from echelon.ground.errors import LaunchError, PlanError
from echelon.launch.shell import guard_setup
from echelon.planner.hardware.accelerators import parse_devices
from echelon.recipe.launch_sections import LaunchConfig
from echelon.tools.doctor import machine
from echelon.tools.doctor.link_probe import Examination, ProbeProcess, Speed, find_slow, probe_script, rounds
from echelon.tools.doctor.verdict import judge

ROOT = Path(__file__).parents[4]
FAST = Speed(0.0001, 1e9)


def fact(host, hosts="abcd", **changes):
    """The measurements of a healthy host."""
    versions = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "echelon": "0.1.0"}
    numbers = {each: f"10.0.0.{number}" for number, each in enumerate(hosts, 1)}
    healthy = {"versions": versions, "devices": "8 x H100", "address": numbers[host], "interface": "eth0",
               "addresses": numbers, "listens": None, "store_port": 40000, "sees": True, "free_bytes": 1}  # fmt: skip
    return {**healthy, **changes}


def found(hosts="abcd", facts=None, **changes):
    pairs = dict.fromkeys(combinations(hosts, 2), FAST)
    every = {host: fact(host, hosts) for host in hosts} | (facts or {})
    fields = {"offsets": dict.fromkeys(hosts, 0.0), "pairs": pairs, "whole": FAST} | changes
    return Examination(tuple(hosts), 29400, every, **fields)


def problems(examination):
    return [f"{each.words}; {each.remedy}" for each in judge(examination) if not each.is_well]


def test_healthy_hosts():
    findings = judge(found())
    assert all(each.is_well for each in findings)
    lines = {each.subject: each.words for each in findings}
    assert lines == {
        "hosts": "4 answer",
        "folder": "all see this folder",
        "versions": "python 3.11.7, torch 2.13.0, transformers 5.23.0, echelon 0.1.0; 8 x H100",
        "names": "every host resolves every name",
        "interfaces": "a eth0, b eth0, c eth0, d eth0",
        "clocks": "at most 0.0 s apart",
        "ports": "29400 and others are open both ways between every pair",
        "pairs": "1.0 GB/s or more, 0.1 ms or less for an all-reduce of two",
        "together": "1.0 GB/s, 0.1 ms for an all-reduce of all 4",
    }


def both(reason):
    return {"rendezvous": reason, "collective": reason}


SLOW, LATE = Speed(0.0001, 1e7), Speed(0.05, 1e9)
PAIRS = list(combinations("abcd", 2))


@pytest.mark.parametrize("together", [True, False])
def test_a_plan_uses_what_the_doctor_measured_between_machines(tmp_path, together):
    """Eight GPUs share what one process of their machine reached: 400 MB/s together, 10 MB/s in the slowest pair."""
    pairs = {pair: SLOW if pair == ("b", "d") else FAST for pair in PAIRS}
    measured = found(pairs=pairs, whole=Speed(0.0003, 4e8) if together else None)
    path = tmp_path / "Network.json"
    path.write_text(json.dumps({"is_well": True, "findings": [], **describe_links(measured)}))
    links = parse_devices(f"32xH100@nvlink,{path}").known_links
    assert links.inside.name == "nvlink4"
    assert links.between.bandwidth == (4e8 if together else 1e7) / 8
    assert links.between.latency == FAST.latency_seconds
    assert f"Network.json with {0.05 if together else 0.00125:g} GB/s per device between machines" in links.describe()


def test_a_plan_refuses_what_the_doctor_could_not_measure(tmp_path):
    path = tmp_path / "network.json"
    with pytest.raises(PlanError, match=r"put network\.json second"):
        parse_devices("32xH100@network.json")
    with pytest.raises(PlanError, match=r"has no measurement between machines .*give the output of `echelon doctor"):
        parse_devices(f"32xH100@nvlink,{path}")
    broken = found(pairs={**dict.fromkeys(PAIRS, FAST), ("a", "b"): "no connection"}, whole=None)
    for content in (describe_links(broken), {"is_well": True, "findings": []}, describe_links(found(pairs={}))):
        path.write_text(json.dumps(content))
        with pytest.raises(PlanError, match="has no measurement between machines"):
            parse_devices(f"32xH100@nvlink,{path}")


@pytest.mark.parametrize(
    ("examination", "sentences"),
    [
        (
            found(blocked={("b", "c"): both("no answer in 3 s"), ("c", "b"): both("no answer in 3 s")}),
            ["b and c cannot connect: no answer in 3 s; check the network path between b and c: routes, firewalls, "
             "interfaces"],
        ),
        (
            found(blocked={("b", "c"): both("no answer in 3 s")}),
            ["b does not reach c (no answer in 3 s), while c reaches b; check the firewall of c, and the route "
             "from b"],
        ),
        (
            found(blocked={("c", "b"): {"rendezvous": "connection refused"}}),
            ["c does not reach b at port 29400 (connection refused), but at other ports; open port 29400 in the "
             "firewall of b, or choose another one: launch.torchrun.port"],
        ),
        (
            found(blocked={(a, b): {"collective": "no route to host"} for a, b in (("a", "d"), ("d", "a"))}),
            ["a reaches d at port 29400, but not at other ports (no route to host); the same in the other "
             "direction; collectives use other ports: open all TCP ports between a and d"],
        ),
        (  # every pair with c: one message about c
            found(blocked={pair: both("no answer in 3 s") for a in "abd" for pair in ((a, "c"), ("c", a))}),
            ["c and all others cannot connect: no answer in 3 s; check the network of c: its cable, its interface, "
             "its firewall"],
        ),
        (
            found(pairs={pair: SLOW if pair == ("b", "d") else FAST for pair in PAIRS}),
            ["b and d are slow together: 10 MB/s where 1.0 GB/s is usual; check the network path between b and d"],
        ),
        (
            found(pairs={pair: LATE if pair == ("b", "d") else FAST for pair in PAIRS}),
            ["b and d are slow together: 50 ms for an all-reduce where 0.1 ms is usual; check the network path "
             "between b and d"],
        ),
        (
            found(pairs={pair: SLOW if "d" in pair else FAST for pair in PAIRS}),
            ["d is slow with all others: 10 MB/s where 1.0 GB/s is usual; check the network card of d"],
        ),
        (
            found(pairs={**dict.fromkeys(PAIRS, FAST), ("a", "b"): "Gloo connectFullMesh failed"}),
            ["a and b connect, but an all-reduce between them fails: Gloo connectFullMesh failed; check the "
             "interfaces "
             "that a and b use, or name one: launch.torchrun.interface"],
        ),
        (
            found(facts={"b": fact("b", versions={**fact("b")["versions"], "torch": "2.11.0"})}),
            ["torch version: 2.13.0 on a, c, d; 2.11.0 on b; install the same torch on every host"],
        ),
        (
            found(facts={"d": fact("d", devices="7 x H100")}),
            ["devices: 8 x H100 on a, b, c; 7 x H100 on d; use machines with equal devices"],
        ),
        (
            found(offsets={"a": 0.0, "b": 0.0, "c": -37.4, "d": 0.2}),
            ["the clock of c is 37.4 s behind the others; set it with NTP: start chrony or systemd-timesyncd on c"],
        ),
        (
            found(facts={"a": fact("a", addresses={**fact("a")["addresses"], "a": "127.0.1.1", "c": None})}),
            ["a cannot resolve c; add them to DNS or to /etc/hosts of a",
             "a resolves a to 127.0.1.1, a loopback address; remove that line from /etc/hosts of a, or give "
             "the hosts by their addresses"],
        ),
        (
            found(facts={"a": fact("a", listens="address already in use"), "b": fact("b", listens="whatever")}),
            ["port 29400 of a cannot be used: address already in use; end the program that uses it, or choose "
             "another one: launch.torchrun.port"],
        ),
        (
            found(facts={"c": fact("c", sees=False), "d": fact("d", sees=False)}),
            ["c, d do not see the files of this folder; mount the same storage on every host, or set its path there "
             "with launch.torchrun.workdir"],
        ),
        (
            found(facts={"d": "Connection timed out"}, pairs=dict.fromkeys(combinations("abc", 2), FAST), whole=None),
            ["d does not answer: Connection timed out; make `ssh HOST` work without a prompt, and check that the host "
             "has this folder and, as launch.python, a Python with echelon"],
        ),
    ],
)  # fmt: skip
def test_the_bad_host_or_pair_is_named(examination, sentences):
    assert problems(examination) == sentences


def test_two_machines_are_not_compared_with_each_other():
    assert problems(found("ab", pairs={("a", "b"): SLOW}, whole=None)) == []


def test_no_host_answers():
    assert len(problems(found("ab", facts={"a": "no", "b": "no"}, offsets={}, pairs={}, whole=None))) == 2


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_rounds_contain_every_pair_once_and_no_host_twice(count):
    hosts = [f"h{number}" for number in range(count)]
    all_rounds = rounds(hosts)
    for each in all_rounds:
        named = [host for pair in each for host in pair]
        assert len(named) == len(set(named))
    met = [tuple(sorted(pair)) for each in all_rounds for pair in each]
    assert sorted(met) == sorted(combinations(hosts, 2))


def test_the_typical_value_is_the_median_of_best_pairs():
    """With three hosts, one slow host makes two of three pairs slow, so the median of pairs would be slow."""
    pairs = {("a", "b"): FAST, ("a", "c"): SLOW, ("b", "c"): SLOW}
    assert find_slow(pairs) == dict.fromkeys([("a", "c"), ("b", "c")], "10 MB/s where 1.0 GB/s is usual")
    assert find_slow({**pairs, ("a", "c"): Speed(0.0001, 2.5e8), ("b", "c"): Speed(0.0021, 1e9)}) == {}


def test_answers_are_found_in_other_output_and_exits_are_explained():
    code = "print('Loading modules', flush=True); input(); print('@echelon {\"time\": 5.0}', flush=True); 1/0"
    probe = ProbeProcess("a", [sys.executable, "-c", code])
    assert probe.ask("clock", 20) == {"time": 5.0}
    with pytest.raises(LaunchError, match="ZeroDivisionError: division by zero"):
        probe.ask("clock", 20)
    probe.close()


def test_a_machine_that_does_not_answer_times_out():
    probe = ProbeProcess("a", ["sleep", "60"])
    with pytest.raises(LaunchError, match=r"no answer in 0 s"):
        probe.ask("clock", 0.2)
    with pytest.raises(LaunchError, match="skipped"):
        probe.ask("clock", 20)


def test_commands_on_a_host_use_the_setup_of_training():
    launch = LaunchConfig(env={"A": "it's"}, setup=("module load cuda",), python="/opt/a b/python")
    assert probe_script(launch, Path("/work dir")).splitlines() == [
        "cd '/work dir' || exit 2",
        """export A='it'"'"'s'""",
        *guard_setup(("module load cuda",)),
        "exec '/opt/a b/python' -m echelon.tools.doctor.network",
    ]


def test_required_versions_equal_those_of_the_package():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"{name}{wanted}" for name, wanted in machine.REQUIRED.items()} <= set(dependencies)


def test_problems_of_this_machine_are_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "find_version", {"torch": "2.10.1"}.get)
    monkeypatch.setattr(machine, "machine_memory_bytes", lambda: 2**30)
    monkeypatch.setattr(machine, "measure_here", fail)
    monkeypatch.setattr(machine.time, "time", lambda: 1_700_000_000.0)
    monkeypatch.setattr(machine, "read_limits", lambda: (256, 1024))
    bad = {each.subject: f"{each.words}; {each.remedy}" for each in machine.examine_machine(tmp_path) if each.remedy}
    assert bad.pop("open files").startswith("up to 1,024 for a process, enough for a job of about 724 ranks; raise")
    assert bad.pop("memory").startswith("1.00 GiB of 1.00 GiB free; ")
    assert bad == {
        "torch": "2.10.1; pip install 'torch>=2.11,<2.14'",
        "transformers": "not installed; pip install 'transformers>=5.17,<6'",
        "clock": "2023-11-14 22:13 UTC; set it with NTP",
        "gloo": "two processes on this machine cannot run an all-reduce: refused; check that `lo` is up",
    }


def fail(_):
    raise LaunchError("refused")


def test_the_command_prints_text_or_json_and_exits_with_1(monkeypatch):
    from typer.testing import CliRunner

    from echelon.cli.main import app
    from echelon.tools.doctor.verdict import Finding

    lines = [Finding("python", "3.11"), Finding("disk", "0.1 GiB free", "free space")]
    monkeypatch.setattr(machine, "examine_machine", lambda _: iter(lines))
    plain = CliRunner().invoke(app, ["doctor"])
    assert plain.exit_code == 1
    assert plain.stdout.splitlines()[:2] == [
        "ok       python       3.11",
        "problem  disk         0.1 GiB free; free space",
    ]
    told = CliRunner().invoke(app, ["doctor", "--json"])
    assert told.exit_code == 1 and json.loads(told.stdout) == {
        "is_well": False,
        "findings": [
            {"subject": "python", "words": "3.11", "remedy": ""},
            {"subject": "disk", "words": "0.1 GiB free", "remedy": "free space"},
        ],
    }
    del lines[1]
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
