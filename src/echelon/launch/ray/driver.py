"""The driver of a job in a Ray cluster: reserves machines, starts an agent on each, prints their output.

It is sent with the job and uses only the standard library and ray, so that the machine where Ray starts it needs no
echelon. How a run restarts its processes is decided by its agents; the driver only replaces machines. After a run that
ended because a machine was lost, it starts the agents again, which resume from the newest checkpoint.
"""

import json
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# As in echelon.run.supervise.outcome.
DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 3

ORDER, AGENT = "order.json", "agent.sh"
"""Files beside this one: what the driver does, and the script of each machine."""

_LOOK_SECONDS = 0.5
# Other machines of an elastic job that are there from the start are taken before training begins.
_MORE_SECONDS = 5.0
# A wait is told to the user after this time.
_QUIET_SECONDS = 2.0
_CREATED = "CREATED"


@dataclass(frozen=True)
class Order:
    """What the driver does; the contents of `order.json`.

    `bundle` is what is reserved on each machine, from those with `labels`. `max_restarts` limits the starts after the
    first one.
    """

    fewest: int
    most: int
    bundle: Mapping[str, float]
    labels: Mapping[str, str]
    wait_seconds: float
    max_restarts: int

    @property
    def nodes(self) -> str:
        """The number of machines as `echelon train --nodes` takes it."""
        return str(self.most) if self.fewest == self.most else f"{self.fewest}:{self.most}"


def say(words: str, own: str = "ray") -> None:
    """Print a line of the driver itself; `own="echelon"` marks the reason of a failure, which `status` shows."""
    print(f"{own}: {words}", file=sys.stdout, flush=True)


class Brief:
    """A stream that passes on what Ray prints in this process, without the state of a node that has ended."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the lines of a message; that of a lost node ends with some 50 lines of its last state."""
        lines = text.splitlines(keepends=True)
        self._stream.write("".join(line for line in lines if "[state-dump]" not in line))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class RayMachine:
    """Lives in a Ray worker on its machine: runs the agent as a child, and hands over its output."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def describe(self) -> tuple[str, str, str, int]:
        """The machine's host name, its address, its id in Ray, and a port that is free there."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        return platform.node(), address, ray.get_runtime_context().get_node_id(), port

    def start(self, nodes: str, rendezvous: str) -> None:
        """Start the agent. Its script holds the other end of its stdin, so that it ends with this process."""
        self._process = subprocess.Popen(
            ["bash", str(Path(AGENT).resolve()), nodes, rendezvous, str(Path(sys.executable).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def poll(self) -> tuple[list[str], int | None]:
        """The next lines, after at most half a second, and the exit code once the last line was handed over."""
        assert self._process is not None
        lines: list[str] = []
        wait = _LOOK_SECONDS
        with suppress(queue.Empty):
            while (line := self._lines.get(timeout=wait)) is not None:
                lines.append(line)
                wait = 0.01
            return lines, self._find_code()
        return lines, None

    def _find_code(self) -> int:
        """The exit code; remains of the agent are killed. A stop before training began has nothing to save."""
        assert self._process is not None
        code = self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if code < 0 and self._stopped:
            return STOPPED
        return code if code >= 0 else FAILED

    def stop(self) -> None:
        """Ask the agent to save and end; a job ends on all machines if one of them is asked."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


@dataclass
class Seat:
    """A reserved place on a machine, and the agent there, if one runs. `group` is Ray's placement group."""

    group: Any
    index: int
    actor: Any = None
    host: str = ""
    address: str = ""
    port: int = 0
    node: str = ""
    code: int | None = None
    lost: bool = False


@dataclass
class JobPlacement:
    """The seats of a job: one placement group with the fewest machines, and a group for each further one."""

    order: Order
    group: Any
    seats: list[Seat] = field(default_factory=list)
    coming: Any = None
    """The placement group of a further machine that Ray has not found yet."""

    def name(self, seat: Seat) -> str:
        """The machine of a seat: its host name, and if others have the same one its address, or its id in Ray."""
        others = [other for other in self.seats if not other.lost and other.node != seat.node]
        alike = [other for other in others if other.host == seat.host]
        if not seat.host or not alike:
            return seat.host or "a machine"
        differs = all(other.address != seat.address for other in alike)
        return f"{seat.host} ({seat.address if differs else seat.node[:8]})"

    def gather(self, stops: Sequence[object]) -> bool:
        """Wait for the machines; False if Ray does not find them in time, or the job is stopped."""
        order = self.order
        began, is_told = time.monotonic(), False
        while not _is_created(self.group):
            waited = time.monotonic() - began
            if stops:
                return False
            if waited > _QUIET_SECONDS and not is_told:
                say(f"waits up to {order.wait_seconds:g} s for {_describe_need(order)}; {_describe_cluster(order)}")
                is_told = True
            if waited > order.wait_seconds:
                say(
                    f"Ray did not find {_describe_need(order)} within launch.ray.wait_seconds={order.wait_seconds:g}; "
                    f"{_describe_cluster(order)}. Ask for fewer machines (launch.nodes) or for less of each "
                    "(launch.ray), or wait for longer.",
                    own="echelon",
                )
                return False
            time.sleep(_LOOK_SECONDS)
        self._reseat()
        until = time.monotonic() + _MORE_SECONDS
        while len(self.seats) < order.most and time.monotonic() < until and not stops:
            self.seats += self.find_more()
            time.sleep(_LOOK_SECONDS)
        return True

    def _reseat(self) -> None:
        """New seats in the first group, and in each further one whose machine is there and not in the first."""
        further = [seat for seat in self.seats if seat.group is not self.group]
        self.seats = [Seat(self.group, index) for index in range(self.order.fewest)]
        nodes = {_find_node(seat) for seat in self.seats}
        for seat in further:
            if seat.lost or seat.node in nodes:
                _release(seat.group)
            else:
                self.seats.append(Seat(seat.group, seat.index, node=seat.node))

    def find_more(self) -> list[Seat]:
        """Seats on machines that have come since; asks Ray for the next one if there is room for it.

        Ray moves a lost bundle of the first group without a look at the further groups. One that is now on a machine
        with an agent stays empty, and another machine is asked for.
        """
        self._release_lost()
        empty = [seat for seat in self.seats if seat.lost]
        nodes = {seat.node or _find_node(seat) for seat in self.seats if not seat.lost}
        room = self.order.most - len(self.seats) + len(empty)
        seats: list[Seat] = []
        if empty and not _is_created(self.group):
            room -= len(empty)  # Ray still looks for their machines
            empty = []
        for seat in empty:
            node = _find_node(seat)
            if room > len(seats) and node not in nodes:
                seats.append(Seat(self.group, seat.index, node=node))
                nodes.add(node)
                self.seats.remove(seat)
        return seats + self._find_further(nodes) if len(seats) < room else seats

    def _release_lost(self) -> None:
        """Give back the further groups whose machines are lost."""
        for seat in [seat for seat in self.seats if seat.lost and seat.group is not self.group]:
            _release(seat.group)
            self.seats.remove(seat)

    def _find_further(self, nodes: Set[str]) -> list[Seat]:
        """A seat in a group of its own on a machine that is not among `nodes`, if Ray has found one."""
        if self.coming is None:
            taken = ",".join(sorted(nodes))
            self.coming = _reserve([self.order.bundle], {**self.order.labels, "ray.io/node-id": f"!in({taken})"})
            return []
        if not _is_created(self.coming):
            return []
        seat = Seat(self.coming, 0)
        self.coming = None
        seat.node = _find_node(seat)
        if seat.node in nodes:  # which has got an agent since Ray was asked
            _release(seat.group)
            return []
        return [seat]


def _reserve(bundles: Sequence[Mapping[str, float]], labels: Mapping[str, str]) -> Any:
    from ray.util import placement_group

    selectors = [dict(labels) for _ in bundles] if labels else None
    return placement_group(
        [dict(bundle) for bundle in bundles], strategy="STRICT_SPREAD", bundle_label_selector=selectors
    )


def _release(group: Any) -> None:
    from ray.util import remove_placement_group

    remove_placement_group(group)


def _is_created(group: Any) -> bool:
    from ray.util import placement_group_table

    return bool(placement_group_table(group)["state"] == _CREATED)


def _find_node(seat: Seat) -> str:
    from ray.util import placement_group_table

    return str(placement_group_table(seat.group)["bundles_to_node_id"].get(seat.index, ""))


def _describe_need(order: Order) -> str:
    parts = [f"{amount:g} {name}" for name, amount in order.bundle.items()]
    parts += [f"{name}={value}" for name, value in order.labels.items()]
    return f"{order.fewest} machine(s) with {', '.join(parts)} each"


def _describe_cluster(order: Order) -> str:
    """How many machines are large enough when idle."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    large = [
        node
        for node in alive
        if all(node["Resources"].get(name, 0) >= amount for name, amount in order.bundle.items())
        and all(node.get("Labels", {}).get(name) == value for name, value in order.labels.items())
    ]
    words = f"of the {len(alive)} machine(s) of the cluster {len(large)} have as much"
    return words if len(large) < order.fewest else f"{words}, but are in use"


class DriverJob:
    """One run of the agents on all machines, and its repetitions."""

    def __init__(self, order: Order, stops: Sequence[object]) -> None:
        self._order, self._stops = order, stops
        self._crew = JobPlacement(order, _reserve([order.bundle] * order.fewest, order.labels))
        self._rendezvous = ""

    def run(self) -> int:
        """Train to the end; returns the exit code of the job."""
        for restart in range(self._order.max_restarts + 1):
            if restart:
                say(f"restart {restart} of {self._order.max_restarts}, because a machine was lost")
            if (polls := self._begin()) is None:
                return STOPPED if self._stops else FAILED
            code = self._train(polls)
            was_lost = any(seat.lost for seat in self._crew.seats)
            if code != FAILED or not was_lost or self._stops:
                return code
        return FAILED

    def _begin(self) -> dict[Any, Seat] | None:
        """Start the agents once the machines are there; None if Ray does not find them, or the job is stopped.

        For some seconds Ray may offer a machine that is lost.
        """
        import ray

        until = time.monotonic() + self._order.wait_seconds
        while self._crew.gather(self._stops):
            present = self._occupy(self._crew.seats)
            if len(present) >= self._order.fewest:
                self._rendezvous = ""
                return self._start(present)
            for seat in present:
                ray.kill(seat.actor)
            if time.monotonic() > until:
                say(
                    f"for launch.ray.wait_seconds={self._order.wait_seconds:g} Ray has offered machines that are lost; "
                    "start the same job again once `ray status` shows them as dead.",
                    own="echelon",
                )
                return None
            time.sleep(_LOOK_SECONDS)
        return None

    def _train(self, polls: dict[Any, Seat]) -> int:
        """Wait until all agents have ended; returns the exit code that those at the end agree on.

        `polls`: the seats with agents, each by its pending poll.
        """
        import ray

        crew, asked = self._crew, False
        while polls:
            for poll in ray.wait(list(polls), timeout=_LOOK_SECONDS)[0]:
                seat = polls.pop(poll)
                if self._take(seat, poll):
                    polls[seat.actor.poll.remote()] = seat
            if self._stops and not asked:
                asked = True
                for seat in polls.values():
                    seat.actor.stop.remote()
            is_ending = asked or any(seat.code is not None for seat in crew.seats)
            if self._order.fewest < self._order.most and not is_ending:
                seats = crew.find_more()
                crew.seats += seats
                polls |= self._start(self._occupy(seats))
        codes = [seat.code for seat in crew.seats if seat.code is not None]
        return next((code for code in (DONE, STOPPED, REFUSED) if code in codes), FAILED)

    def _occupy(self, seats: Sequence[Seat]) -> list[Seat]:
        """Start a Ray worker in each of these seats; returns those whose machine has answered."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = dict(self._order.bundle)
        options = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0)}
        if "memory" in bundle:
            options["memory"] = bundle.pop("memory")
        for seat in seats:
            strategy = PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=seat.index)
            made = ray.remote(RayMachine).options(
                **options, resources=bundle, scheduling_strategy=strategy, max_restarts=0
            )
            seat.actor = made.remote()
        asked = [(seat, seat.actor.describe.remote()) for seat in seats]
        for seat, answer in asked:
            try:
                seat.host, seat.address, seat.node, seat.port = ray.get(answer, timeout=self._order.wait_seconds)
            except ray.exceptions.RayError as error:
                self._lose(seat, error)
        return [seat for seat in seats if not seat.lost]

    def _start(self, present: Sequence[Seat]) -> dict[Any, Seat]:
        """Start the agents of these seats; returns the pending poll of each."""
        if not self._rendezvous and present:
            self._rendezvous = f"{present[0].address}:{present[0].port}"
            hosts = ", ".join(map(self._crew.name, present))
            say(f"trains on {len(present)} machine(s): {hosts}; they meet at {self._rendezvous}")
        elif present:
            say(f"{', '.join(map(self._crew.name, present))} joins")
        for seat in present:
            seat.actor.start.remote(self._order.nodes, self._rendezvous)
        return {seat.actor.poll.remote(): seat for seat in present}

    def _take(self, seat: Seat, poll: Any) -> bool:
        """Print what an agent has printed; returns whether it goes on."""
        import ray

        try:
            lines, seat.code = ray.get(poll)
        except ray.exceptions.RayError as error:
            self._lose(seat, error)
            return False
        prefix = "" if self._order.most == 1 else f"{self._crew.name(seat)} | "
        for line in lines:
            print(f"{prefix}{line}", file=sys.stdout, flush=True)
        if seat.code is not None:
            ray.kill(seat.actor)
        return seat.code is None

    def _lose(self, seat: Seat, error: Exception) -> None:
        import ray

        seat.lost = True
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(seat.actor)
        if not isinstance(error, ray.exceptions.RayActorError):
            say(f"{self._crew.name(seat)} is not usable: {str(error).strip().splitlines()[0]}")
        else:
            say(f"{self._crew.name(seat)} is lost: Ray's worker there has ended")


def main(folder: Path) -> int:
    """Run the job whose files are in this folder; returns its exit code."""
    import ray

    sys.stdout = Brief(sys.stdout)
    order = Order(**json.loads((folder / ORDER).read_text(encoding="utf-8")))
    ray.init(log_to_driver=False, logging_level="ERROR")
    stops: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which sets its own
        signal.signal(signum, lambda number, _: stops.append(number))
    return DriverJob(order, stops).run()


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent))
