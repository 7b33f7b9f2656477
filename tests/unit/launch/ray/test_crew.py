"""Which machines a job in a Ray cluster takes when machines are lost, with a cluster written down by hand."""

from dataclasses import dataclass, field

import pytest

from echelon.launch.ray import driver
from echelon.launch.ray.driver import JobPlacement, Order, Seat


@dataclass(eq=False)
class Group:
    """A placement group: the machine of each bundle, which the test says; none while Ray still looks for it."""

    nodes: list = field(default_factory=lambda: [None])
    avoids: str = ""
    released: bool = False


@pytest.fixture
def asked(monkeypatch):
    """The groups that the driver has asked for."""
    groups = []

    def reserve(bundles, labels):
        groups.append(Group(avoids=labels["ray.io/node-id"]))
        return groups[-1]

    monkeypatch.setattr(driver, "_reserve", reserve)
    monkeypatch.setattr(driver, "_is_created", lambda group: None not in group.nodes)
    monkeypatch.setattr(driver, "_find_node", lambda seat: seat.group.nodes[seat.index])
    monkeypatch.setattr(driver, "_release", lambda group: setattr(group, "released", True))
    monkeypatch.setattr(driver, "_MORE_SECONDS", 0)
    return groups


@pytest.fixture
def crew(asked):
    """A job on `2:3` machines: a and b of the first group, and c."""
    first, further = Group(["a", "b"]), Group(["c"])
    crew = JobPlacement(Order(2, 3, {"CPU": 1}, {}, wait_seconds=1, max_restarts=3), first)
    crew.seats = [Seat(first, 0, node="a"), Seat(first, 1, node="b"), Seat(further, 0, node="c")]
    return crew


def lose(crew, node):
    [seat] = [seat for seat in crew.seats if seat.node == node]
    seat.lost = True


def find(crew):
    found = crew.find_more()
    crew.seats += found
    return [seat.node for seat in found]


def test_a_lost_one_of_the_fewest_is_replaced_where_ray_moves_its_bundle(crew, asked):
    lose(crew, "b")
    crew.group.nodes[1] = None
    assert find(crew) == [] and asked == []
    crew.group.nodes[1] = "d"
    assert find(crew) == ["d"] and asked == []


def test_a_bundle_on_a_machine_with_an_agent_stays_empty_and_another_machine_is_asked_for(crew, asked):
    lose(crew, "b")
    crew.group.nodes[1] = "c"
    assert find(crew) == []
    assert [group.avoids for group in asked] == ["!in(a,c)"]
    asked[0].nodes = ["e"]
    assert find(crew) == ["e"] and find(crew) == [] and len(asked) == 1
    lose(crew, "c")  # with its agent gone, the bundle there may be used
    assert find(crew) == ["c"]
    assert sorted(seat.node for seat in crew.seats) == ["a", "c", "e"]


def test_a_further_machine_that_got_an_agent_meanwhile_is_given_back(crew, asked):
    lose(crew, "c")
    assert find(crew) == [] and [group.avoids for group in asked] == ["!in(a,b)"]
    lose(crew, "b")
    crew.group.nodes[1] = "d"
    assert find(crew) == ["d"]
    asked[0].nodes = ["d"]
    assert find(crew) == [] and asked[0].released
    assert find(crew) == [] and asked[1].avoids == "!in(a,d)"


def test_machines_with_equal_host_names_have_their_addresses(crew):
    def seat(host, address, node):
        return driver.Seat(None, 0, host=host, address=address, node=node)

    crew.seats = [seat("a", "10.0.0.1", "1f"), seat("vm", "10.0.0.2", "2f"), seat("vm", "10.0.0.3", "3f")]
    assert [crew.name(each) for each in crew.seats] == ["a", "vm (10.0.0.2)", "vm (10.0.0.3)"]
    crew.seats = [seat("vm", "10.0.0.1", f"{n}abcdefghij") for n in range(2)] + [driver.Seat(None, 0)]
    assert [crew.name(each) for each in crew.seats] == ["vm (0abcdefg)", "vm (1abcdefg)", "a machine"]


def test_a_restart_has_one_agent_on_each_machine(crew):
    further = crew.seats[2].group
    lose(crew, "b")
    crew.group.nodes[1] = "c"
    assert crew.gather([])
    assert [(seat.group, seat.index) for seat in crew.seats] == [(crew.group, 0), (crew.group, 1)]
    assert further.released
