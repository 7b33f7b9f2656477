"""What ranks of two machines without shared files learn of each other in a long wait, through their agents."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from echelon.ground.hosts import HostGroup
from echelon.recipe.operation import FaultConfig
from echelon.run.supervise import coordinator
from echelon.run.supervise.coordinator import AttemptNews, Coordinator, MachineReport
from echelon.run.supervise.decision import Restarts
from echelon.run.supervise.hangs import WaitingPeers, WaitingRanks


class TwoMachines:
    """Machine a with the ranks 0 and 1, b with 2 and 3. `tell` does what their agents do every second."""

    def __init__(self, folder):
        self.news = AttemptNews()
        group = HostGroup(2, 2, "a", 29400)
        self.coordinator = Coordinator("a", group, Restarts(0), FaultConfig(), self._publish)
        self.folders = {name: folder / name for name in "ab"}
        for name, place in self.folders.items():
            place.mkdir()
            report = json.loads(json.dumps(asdict(MachineReport(num_processes=2, name=name))))
            self.coordinator.handle({"kind": "present", "attempt": 0, "host": name, "report": report})
        self.coordinator.look(frozenset())
        self.agents = {name: WaitingRanks(place) for name, place in self.folders.items()}

    def _publish(self, message):
        self.news.take(json.loads(json.dumps(message)))

    def rank(self, number):
        first = number // 2 * 2
        return WaitingPeers(self.folders["ab"[number // 2]], number, range(first, first + 2), has_distant=True)

    def tell(self):
        for name, agent in self.agents.items():
            fields = json.loads(json.dumps(asdict(agent.read())))
            self.coordinator.handle({"kind": "waiting", "attempt": 0, "host": name, "waiting": fields})
        self.coordinator.look(frozenset())
        for agent in self.agents.values():
            if self.news.waiting is not None:
                agent.show_all(self.news.waiting)


@pytest.fixture
def machines(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "_NOTICE_SECONDS", 0.3)
    return TwoMachines(tmp_path)


def test_a_rest_on_another_machine_is_known_until_it_ends(machines):
    saving, waiting = machines.rank(0), machines.rank(3)
    saving.show_rest(2)
    machines.tell()
    assert waiting.is_one_resting(2) and waiting.is_one_resting(5) and not waiting.is_one_resting(1)
    assert not machines.rank(2).is_one_resting(1), "it waits there for this rank"
    saving.show_rest(None)
    machines.tell()
    assert not waiting.is_one_resting(5)


def test_a_hang_found_on_one_machine_is_known_on_the_other(machines):
    assert machines.rank(3).find_late() is None
    machines.rank(0).tell_late(8)
    machines.tell()
    assert machines.rank(3).find_late() == 8


@pytest.mark.parametrize(("noticing", "missing"), [((0, 1, 2, 3), []), ((0, 2, 3), [1]), ((3,), [0, 1, 2])])
def test_all_learn_who_has_not_noticed_a_hang(machines, noticing, missing):
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(machines.rank(number).find_unresponsive) for number in noticing]
        while not all(answer.done() for answer in answers):
            machines.tell()
            time.sleep(0.02)
    assert [answer.result() for answer in answers] == [missing] * len(noticing)
