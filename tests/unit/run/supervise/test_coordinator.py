"""Which machines take part in an attempt: the coordinator's answers, compared with answers by hand."""

import json
import time
from dataclasses import asdict, replace

import pytest

from echelon.ground.hosts import parse_group
from echelon.planner.hardware.health import Health, examine_health
from echelon.recipe.operation import FaultConfig
from echelon.run.supervise.coordinator import AttemptNews, Coordinator, MachineReport, Problem, Severity, judge
from echelon.run.supervise.decision import HostReport, Restarts
from echelon.run.supervise.outcome import DONE, FAILED, REFUSED

STRICT, MILD = FaultConfig(on_straggler="stop"), FaultConfig(on_bad_machine="warn")
USUAL, SOUND = FaultConfig(), MachineReport()
BAD = MachineReport((Problem("GPU 1 has 3 uncorrectable memory (ECC) errors; reset it"),))


class Group:
    """A coordinator, `a`, with what it has published; a machine that comes presents itself."""

    def __init__(self, nodes, fault=USUAL, **more):
        self.group = replace(parse_group(nodes, "a:29400"), **more)
        self.news, self.silent, self.attempt = {}, set(), 0
        self.coordinator = Coordinator("a", self.group, Restarts(9), fault, self.publish)

    def publish(self, message):
        self.news.setdefault(message["attempt"], AttemptNews()).take(json.loads(json.dumps(message)))

    def say(self, kind, host, **fields):
        self.coordinator.handle({"kind": kind, "attempt": self.attempt, "host": host, **fields})
        self.coordinator.look(frozenset(self.silent))

    def come(self, host, report=SOUND):
        self.say("present", host, report=json.loads(json.dumps(asdict(report))))

    def end_attempt(self, *hosts):
        """All of these report that another one has failed; the machines then meet again."""
        for host in hosts:
            report = HostReport(host, FAILED, "rank 1 was killed", False, 2, 0.0, self.attempt)
            self.say("ended", host, report=asdict(report))
        assert self.now.decision.goes_on
        self.attempt += 1

    @property
    def now(self):
        return self.news.setdefault(self.attempt, AttemptNews())

    def look_until_answered(self):
        """Whether each machine takes part."""
        deadline = time.monotonic() + 10
        while not (self.now.team or self.now.decision):
            assert time.monotonic() < deadline
            self.coordinator.look(frozenset(self.silent))
            time.sleep(0.01)
        others = {*self.now.spares, *self.now.left_out}
        return {host: True for host, _ in self.now.team or ()} | dict.fromkeys(others, False)


@pytest.fixture(autouse=True)
def _last_call(monkeypatch):
    monkeypatch.setattr("echelon.run.supervise.coordinator._LAST_CALL_SECONDS", 0.5)


def test_a_bad_machine_is_left_out_where_enough_others_are_there():
    group = Group("2:3")
    for host in "abc":
        group.come(host, BAD if host == "b" else MachineReport())
    assert group.look_until_answered() == {"a": True, "b": False, "c": True}
    assert "ECC" in group.now.left_out["b"]


def test_without_enough_others_the_job_ends_on_all_and_names_the_machine():
    group = Group("2")
    group.come("a")
    group.come("b", BAD)
    assert group.look_until_answered() == {}
    ending = group.now.decision
    assert not ending.goes_on and ending.code == FAILED
    assert ending.message.startswith("machine b: GPU 1 has 3 uncorrectable")
    assert "fault.on_bad_machine=warn" in ending.message


def test_a_machine_that_comes_later_is_judged_when_it_comes():
    group = Group("1:3")
    group.come("a")
    assert group.look_until_answered() == {"a": True}
    group.come("b", BAD)
    group.come("c", MachineReport(num_processes=2))
    assert group.look_until_answered() == {"a": True, "b": False, "c": False}
    assert group.now.spares == ["c"] and group.now.meets_again, "all save, and meet again"
    group.end_attempt("a")
    for host in "ac":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "c": True} and not group.now.meets_again


def test_the_ranks_of_a_machine_are_neighbours_in_the_order_of_the_names():
    """The coordinator has the first ones."""
    group = Group("3")
    for host, name, count in (("c", "node-10", 2), ("a", "node-7", 4), ("b", "node-9", 1)):
        group.come(host, MachineReport(num_processes=count, name=name))
    assert group.look_until_answered() == {"a": True, "b": True, "c": True}
    assert group.now.team == [("a", 4), ("b", 1), ("c", 2)]


def test_a_machine_too_many_is_a_spare_and_takes_the_place_of_a_lost_one():
    group = Group("2+1")
    for host in "bca":
        group.come(host)
    # The coordinator trains, although it has come last.
    assert group.look_until_answered() == {"a": True, "b": True, "c": False}
    assert group.now.spares == ["c"] and not group.now.meets_again
    group.end_attempt("a", "b")
    for host in "cba":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "b": True, "c": False}, "what trained before goes on"
    group.silent.add("b")
    group.end_attempt("a")
    for host in "ca":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "c": True}


def test_what_happens_to_a_spare_is_told(caplog):
    caplog.set_level("INFO", "echelon")
    group = Group("2+2")
    for host in "abcd":
        group.come(host)
    group.look_until_answered()
    group.silent.add("d")
    for _ in range(3):
        group.coordinator.look(frozenset(group.silent))
    group.silent.add("b")
    group.end_attempt("a")
    for host in "ca":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "c": True}
    assert caplog.messages == [
        "machine c is a spare",
        "machine d is a spare",
        "the spare d stopped responding; spares left: 1",
        "machine c, a spare, takes the place of another one",
    ]


@pytest.mark.parametrize(
    ("nodes", "first", "bad", "later"), [("2+1", "ab", "b", "c"), ("1:2", "a", "a", "b")], ids=["spare", "more"]
)
def test_another_one_takes_the_place_of_a_bad_machine(nodes, first, bad, later):
    group = Group(nodes)
    for host in first:
        group.come(host, BAD if host == bad else SOUND)
    for _ in range(20):
        group.coordinator.look(frozenset())
    assert group.now == AttemptNews()
    group.come(later)
    assert group.look_until_answered() == {host: host != bad for host in first + later}
    assert group.now.spares == []


def test_a_machine_that_replaces_a_lost_one_of_a_quorum_takes_part():
    group = Group("2+1", lives_on=True)
    for host in "ab":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "b": True}
    group.come("c")
    assert group.now.spares == ["c"]
    group.silent.add("b")
    group.coordinator.look(frozenset("b"))
    assert group.now.lost == {"b"} and group.look_until_answered() == {"a": True, "c": True}
    group.silent.add("c")
    group.coordinator.look(frozenset("bc"))
    group.come("d")
    group.coordinator.look(frozenset("bc"))
    assert group.now.lost == {"b", "c"} and group.now.team == [("a", 1), ("d", 1)]


def test_missing_gpus_refuse_the_job_even_if_bad_machines_may_train():
    missing = "launch.slurm.gpus_per_node=8: 8 GPUs were asked for on b, but torch sees none."
    condition = MachineReport.of(Health(("GPU 0 is lost",), (), {}), missing, MILD, 1, "b")
    assert [problem.severity for problem in condition.problems] == [Severity.REFUSES, Severity.NAMED]
    group = Group("2", MILD)
    group.come("a")
    group.come("b", condition)
    assert group.look_until_answered() == {}
    assert (group.now.decision.code, group.now.decision.message) == (REFUSED, missing)


def test_who_comes_when_an_attempt_has_ended_takes_part_in_the_next_one():
    group = Group("2")
    for host in "ab":
        group.come(host)
    group.say("ended", "b", report=asdict(HostReport("b", FAILED, "rank 1 was killed", False, 0, 0.0, None)))
    assert group.now.is_closed and group.now.decision is None
    group.say("present", "late", report=asdict(SOUND))
    group.say("ended", "stranger", report=asdict(HostReport("stranger", FAILED, "?", False, 0, 0.0, None)))
    group.end_attempt("a")
    assert group.attempt == 1 and group.now == AttemptNews()


def test_a_silent_machine_ends_the_attempt_of_all():
    group = Group("2:3")
    for host in "abc":
        group.come(host)
    group.silent.add("b")
    group.coordinator.look(frozenset("b"))
    assert group.now.is_dead
    group.end_attempt("a", "c")
    assert group.news[0].decision.message == "1 of 3 machines stopped responding: b"


@pytest.mark.parametrize(("nodes", "hosts"), [("2", "ab"), ("2+1", "abc")])
def test_a_machine_that_is_lost_between_two_attempts_ends_the_job_that_needs_it(nodes, hosts):
    """Unless a spare may still present itself."""
    group = Group(nodes)
    for host in hosts:
        group.come(host)
    group.end_attempt("a", "b")
    group.come("a")
    assert group.now.decision is None and group.coordinator.hosts() == set(hosts)
    group.silent.add("b")
    group.coordinator.look(frozenset("b"))
    assert (group.now.decision is None) == ("c" in hosts)
    group.coordinator.look(frozenset("bc"))
    ending = group.now.decision
    assert not ending.goes_on and ending.is_short and ending.message == "1 of 2 machines stopped responding: b"
    assert "the same command resumes from step 0" in ending.advice


def test_a_slow_machine_leaves_only_for_a_spare():
    group = Group("2+1")
    for host in "ab":
        group.come(host)
    group.say("slow", "a", rank=1)
    assert group.now.leaving == []
    group.come("c")
    group.say("slow", "a", rank=0)  # the coordinator's end is that of the job
    group.say("slow", "a", rank=1)
    assert group.now.leaving == ["b"]


def test_who_has_not_read_the_end_is_waited_for():
    group = Group("2")
    for host in "ab":
        group.come(host)
    for host in "ab":
        group.say("ended", host, report=asdict(HostReport(host, DONE, "", False, 3, 0.0, 5)))
    assert not group.now.decision.goes_on and group.coordinator.awaits_readers()
    group.say("read", "b")
    assert not group.coordinator.awaits_readers()


def found(conditions, fault=STRICT):
    return {host: [p.severity for p in problems] for host, problems in judge(conditions, fault).items() if problems}


def test_a_slow_machine_is_found_among_its_peers():
    rates = {"a": 100.0, "b": 40.0, "c": 110.0}
    conditions = {host: MachineReport(rates={"H200, product": rate, "alone": 1.0}) for host, rate in rates.items()}
    assert found(conditions) == {"b": [Severity.LEFT_OUT]}
    assert found(conditions, FaultConfig()) == {"b": [Severity.NAMED]}
    assert found({"a": MachineReport(rates={"x": 1.0}), "b": MachineReport(rates={"y": 9.0})}) == {}


@pytest.mark.parametrize(
    ("leads", "odd"),
    [
        ({"b": (4.9, 5.1)}, "b"),  # of two, the coordinator's clock counts
        ({"b": (4.9, 5.1), "c": (4.8, 5.2)}, "a"),  # two of three agree
        ({"b": (-9.0, -8.0), "c": (-0.1, 0.1)}, "b"),
        ({"b": (1.9, 60.0)}, ""),  # measured on a busy machine: it may be right
    ],
)
def test_the_odd_clock_is_found(leads, odd):
    conditions = {"a": MachineReport()} | {host: MachineReport(clock=lead) for host, lead in leads.items()}
    assert found(conditions) == {host: [Severity.LEFT_OUT] for host in odd}
    assert found(conditions, MILD) == {host: [Severity.NAMED] for host in odd}


def test_this_machine_is_examined(tmp_path, monkeypatch):
    """With a file of the kernel that says how little memory is free."""
    monkeypatch.setenv("ECHELON_SYSTEM_ROOT", str(tmp_path))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable: 131072 kB\n")
    health = examine_health(2, tmp_path / "no" / "folder")
    assert health.faults[0].startswith("128 MiB of memory are free, and 2 processes need 512 MiB"), health
    assert len(health.rates) == 2 and all(rate > 1e6 for rate in health.rates.values())
