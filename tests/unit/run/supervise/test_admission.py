"""Which machines take part in an attempt: the coordinator's answers, compared with answers by hand."""

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from echelon.ground.hosts import parse_group
from echelon.planner.hardware.health import Health, examine_health
from echelon.recipe.operation import FaultConfig
from echelon.run.supervise.admission import Admission, AdmissionResult, MachineReport, Problem, Severity, judge
from echelon.run.supervise.agent_votes import Watch
from echelon.run.supervise.outcome import FAILED, REFUSED

STRICT, MILD = FaultConfig(on_straggler="stop"), FaultConfig(on_bad_machine="warn")
USUAL, SOUND = FaultConfig(), MachineReport()
BAD = MachineReport((Problem("GPU 1 has 3 uncorrectable memory (ECC) errors; reset it"),))


class Group:
    """Agents of one attempt, which share a store in this process."""

    def __init__(self, nodes, fault=USUAL):
        self.group = parse_group(nodes, "a:29400")
        self.fault = fault
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=60))
        self.silent = set()
        self.begin_attempt(0)

    def begin_attempt(self, number):
        self.attempt, self.threads, self.answers = number, [], {}
        self.coordinator = self.admission("a")
        self.store.append(f"{number}/hosts", "a\n")

    def watch(self, host):
        return Watch(self.store, self.attempt, self.group, host, host == "a", lambda _, name: name in self.silent)

    def admission(self, host):
        return Admission(self.watch(host), self.fault)

    def come(self, host, condition=SOUND):
        """A machine joins, and presents itself as its agent does; return when its condition is known."""
        self.store.append(f"{self.attempt}/hosts", f"{host}\n")

        def present():
            self.answers[host] = self.admission(host).present(condition)

        self.threads.append(threading.Thread(target=present, daemon=True))
        self.threads[-1].start()
        while self.threads[-1].is_alive() and not self.store.check([f"{self.attempt}/condition/{host}"]):
            self.coordinator.look()  # answers its question for the time
            time.sleep(0.001)

    def look_until_answered(self):
        while any(thread.is_alive() for thread in self.threads):
            self.coordinator.look()
            for thread in self.threads:
                thread.join(0.01)
        return {host: answer.is_admitted for host, answer in self.answers.items()}

    def hosts(self):
        return self.watch("a").hosts()


@pytest.fixture(autouse=True)
def _last_call(monkeypatch):
    monkeypatch.setattr("echelon.run.supervise.admission._LAST_CALL_SECONDS", 0.5)


def test_sound_machines_take_part():
    group = Group("2")
    group.come("a")
    group.come("b")
    assert group.look_until_answered() == {"a": True, "b": True}


def test_a_bad_machine_is_left_out_where_enough_others_are_there():
    group = Group("2:3")
    for host in "abc":
        group.come(host, BAD if host == "b" else MachineReport())
    assert group.look_until_answered() == {"a": True, "b": False, "c": True}
    assert group.hosts() == ["a", "c"] and "ECC" in group.answers["b"].words


def test_without_enough_others_the_job_ends_on_all_and_names_the_machine():
    group = Group("2")
    group.come("a")
    group.come("b", BAD)
    assert group.look_until_answered() == {"a": False, "b": False}
    [answer] = set(group.answers.values())
    assert answer.ends and answer.code == FAILED
    assert (
        answer.words.startswith("machine b: GPU 1 has 3 uncorrectable") and "fault.on_bad_machine=warn" in answer.words
    )


def test_a_machine_that_comes_later_is_judged_when_it_comes():
    group = Group("1:3")
    group.come("a")
    assert group.look_until_answered() == {"a": True}
    group.come("b", BAD)
    group.come("c", MachineReport(num_processes=2))
    assert group.look_until_answered() == {"a": True, "b": False, "c": False}
    assert group.answers["c"].is_spare and group.watch("a").meets_again(), "all save, and meet again"
    group.begin_attempt(1)
    for host in "ac":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "c": True} and not group.watch("a").meets_again()


def test_the_ranks_of_a_machine_are_neighbours_in_the_order_of_the_names():
    """The coordinator has the first ones."""
    group = Group("3")
    for host, name, count in (("c", "node-10", 2), ("a", "node-7", 4), ("b", "node-9", 1)):
        group.come(host, MachineReport(num_processes=count, name=name))
    assert group.look_until_answered() == {"a": True, "b": True, "c": True}
    assert group.admission("b").await_team() == [("a", 4), ("b", 1), ("c", 2)]


def test_the_first_machines_of_an_elastic_job_wait_a_moment_for_others():
    group = Group("1:3")
    for host in "abc":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "b": True, "c": True}


def test_a_machine_too_many_is_a_spare_and_takes_the_place_of_a_lost_one():
    group = Group("2+1")
    for host in "bca":
        group.come(host)
    # The coordinator trains, although it has come last.
    assert group.look_until_answered() == {"a": True, "b": True, "c": False}
    assert group.answers["c"].is_spare and not group.answers["c"].ends and not group.answers["b"].is_spare
    assert group.hosts() == ["a", "b"] and group.watch("a").spares() == ["c"]
    group.begin_attempt(1)
    for host in "cba":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "b": True, "c": False}, "what trained before goes on"
    group.begin_attempt(2)
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
        group.coordinator.look()
    group.begin_attempt(1)
    for host in "ca":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "c": True}
    assert caplog.messages == [
        "machine c is a spare",
        "machine d is a spare",
        "the spare d stopped responding; spares left: 1",
        "machine c, a spare, takes the place of another one",
    ]


def test_a_spare_takes_the_place_of_a_bad_machine():
    group = Group("2+1")
    group.come("a")
    group.come("b", BAD)
    for _ in range(20):
        group.coordinator.look()
    assert not group.answers
    group.come("c")
    assert group.look_until_answered() == {"a": True, "b": False, "c": True}
    assert not group.answers["b"].is_spare


def test_a_machine_that_replaces_a_lost_one_of_a_quorum_takes_part():
    group = Group("2+1")
    group.group = replace(group.group, lives_on=True)
    group.coordinator = group.admission("a")
    for host in "abc":
        group.come(host)
    assert group.look_until_answered() == {"a": True, "b": True, "c": True}


def test_a_bad_first_machine_waits_for_others():
    group = Group("1:2")
    group.come("a", BAD)
    for _ in range(20):
        group.coordinator.look()
    assert not group.answers
    group.come("b")
    assert group.look_until_answered() == {"a": False, "b": True}


def test_missing_gpus_refuse_the_job_even_if_bad_machines_may_train():
    missing = "launch.slurm.gpus_per_node=8: 8 GPUs were asked for on b, but torch sees none."
    condition = MachineReport.of(Health(("GPU 0 is lost",), (), {}), missing, MILD, 1, "b")
    assert [problem.severity for problem in condition.problems] == [Severity.REFUSES, Severity.NAMED]
    group = Group("2", MILD)
    group.come("a")
    group.come("b", condition)
    assert group.look_until_answered() == {"a": False, "b": False}
    assert set(group.answers.values()) == {AdmissionResult(False, missing, True, REFUSED)}


def test_the_attempt_may_end_before_a_machine_is_answered():
    group = Group("1:2")
    group.store.set("0/closed", "")
    group.come("b")
    group.threads[0].join(60)
    assert group.answers["b"].cause.outcome.code == 0 and not group.answers["b"].is_admitted


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
