"""What the agents of 8 to 1,024 machines cost the store, the coordinator and the shared files, and how fast they agree.

    python benchmarks/agents_at_scale.py [--agents 8,128,1024] [--seconds 20] [--output FILE.jsonl]

The code of the agents and torch's store are the real ones; each agent is a forked process of this machine, and its
ranks are a stub that waits. Written down for each number of agents:

- seconds from the moment when the last one has come to the store until all are admitted;
- when nothing happens: requests and bytes per second at the store, processor time of the process with the coordinator
  and the store, and calls of the file system for the shared run folder;
- seconds from the death of one agent's process until all others know of it, and until all are in the next attempt.
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

from echelon.ground.hosts import HostGroup
from echelon.planner.hardware.health import Health
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise import agent as agents
from echelon.run.supervise.meeting import Meeting, TorchStore
from echelon.run.supervise.workers import Workers
from measuring import describe_machine

LINE_SECONDS = 900
# Of all agents but the coordinator, whose machine is its own elsewhere.
NICENESS = 10
ADDRESS = "127.0.0.1"


class Counts:
    """Requests and bytes to the store of this process's agents, and its calls for files of the shared folder."""

    def __init__(self, shared):
        self.requests = self.bytes = self.files = 0
        self._lock, self._shared = threading.Lock(), str(shared)
        for name in ("set", "find", "find_each", "append", "count", "read"):
            self._count_requests(name)
        for name in ("stat", "open", "listdir", "scandir", "mkdir", "unlink", "replace"):
            self._count_files(name)

    def _count_requests(self, name):
        real = getattr(TorchStore, name)

        def counted(store, *arguments):
            result = real(store, *arguments)
            sent = sum(len(str(value)) for value in arguments)
            received = (
                len(result) if isinstance(result, bytes) else sum(map(len, result or ())) if name == "find_each" else 0
            )
            with self._lock:
                self.requests += 2 if name in ("append", "read", "find") else 1
                self.bytes += sent + received
            return result

        setattr(TorchStore, name, counted)

    def _count_files(self, name):
        real = getattr(os, name)

        def counted(path=".", *arguments, **options):
            if str(path).startswith(self._shared):
                with self._lock:
                    self.files += 1
            return real(path, *arguments, **options)

        setattr(os, name, counted)

    def read(self):
        with self._lock:
            return {"requests": self.requests, "bytes": self.bytes, "files": self.files}


class StubRanks:
    """Ranks that train until the folder says that a rank has died."""

    def __init__(self, folder, warm=None):
        self.deaths, self._folder = [], folder

    def start(self, argv, rank, env):
        """Nothing to start."""

    def wait(self, leaves):
        self.notify(self._folder, "admitted")
        while not self._folder.death_path.exists():
            time.sleep(0.2)
        self.notify(self._folder, "died")

    def end(self):
        """Nothing to end."""


def run_agent(line, group, number, scratch, shared):
    """Run an agent as a thread, tell `line` what happens, and answer its questions, in a process of its own."""
    os.nice(NICENESS if number else 0)
    counts = Counts(shared)
    said = threading.Lock()

    def tell(folder, event):
        with said:
            line.send((event, folder.number, time.monotonic()))

    StubRanks.notify = staticmethod(tell)
    agents.LocalRanks = StubRanks
    agents.stops_forwarded = lambda *arguments: nullcontext([])  # signals are for main threads
    agents.examine_health = lambda count, folder: Health((), (), {})
    real_present = Meeting.present

    def present(meeting, report):
        real_present(meeting, report)
        with said:
            line.send(("present", meeting.host, time.monotonic()))

    Meeting.present = present

    def run():
        folder = RunFolder(shared, scratch / str(number) / "outcomes")
        object.__setattr__(folder, "number", number)
        folder.outcomes_dir.mkdir(parents=True)
        agent = agents.Agent(replace(group, coordinates=number == 0, name=f"node-{number}"))
        try:
            agent.submit(Workers(("true",), 1, folder, max_restarts=3))
        except BaseException as error:
            with said:
                line.send(("error", number, repr(error)))

    threading.Thread(target=run, daemon=True).start()
    while line.recv() == "count":
        with said:
            line.send(("counts", time.process_time(), counts.read()))


class Crowd:
    """All agents of a job, in processes."""

    def __init__(self, count, folder):
        with socket.create_server((ADDRESS, 0)) as probe:
            port = probe.getsockname()[1]
        group = HostGroup(count - 1, count, ADDRESS, port)
        self.count, self.lines, self.processes = count, [], []
        shared = folder / "run"
        shared.mkdir()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "echelon.run.supervise.agent", "measuring"])
        for number in range(count):
            ours, its = context.Pipe()
            process = context.Process(target=run_agent, args=(its, group, number, folder, shared), daemon=True)
            process.start()
            its.close()
            self.lines.append(ours)
            self.processes.append(process)
            if number == 0:
                await_store(port)

    def collect(self, event, count, seconds=LINE_SECONDS):
        """The times of this event on `count` agents; other events are dropped."""
        times, deadline = {}, time.monotonic() + seconds
        while len(times) < count:
            assert time.monotonic() < deadline, f"{len(times)} of {count} agents: {event}"
            for line in wait([line for line in self.lines if not line.closed], 1.0):
                try:
                    kind, who, value = line.recv()
                except EOFError:
                    line.close()
                    continue
                assert kind != "error", (who, value)
                if kind == event:
                    times[who] = value
                elif kind == "present":
                    self.last_present = value
        return times

    def count_all(self):
        """Processor seconds of the coordinator's process, and the sum of the counts."""
        found = []
        for line in self.lines:
            line.send("count")
            while (answer := line.recv())[0] != "counts":
                pass
            found.append(answer)
        total = {key: sum(counts[key] for _, _, counts in found) for key in found[0][2]}
        return found[0][1], total

    def lose_last(self):
        os.kill(self.processes[-1].pid, signal.SIGKILL)
        lost_at = time.monotonic()
        self.processes[-1].join()
        self.lines.pop().close()
        return lost_at

    def end(self):
        for process in reversed(self.processes):  # the coordinator last: without it the others print errors
            process.kill()
        for process in self.processes:
            process.join()


def await_store(port):
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((ADDRESS, port)) == 0:
                return
        time.sleep(0.1)


def measure(count, seconds):
    """One row: a job of this many agents, of which it needs all but one."""
    with tempfile.TemporaryDirectory() as folder:
        crowd = Crowd(count, Path(folder))
        try:
            admitted = crowd.collect("admitted", count)
            row = {"agents": count, "admitted_seconds": round(max(admitted.values()) - crowd.last_present, 2)}
            time.sleep(3)
            began, (busy, before) = time.monotonic(), crowd.count_all()
            time.sleep(seconds)
            wall, (busy_after, after) = time.monotonic() - began, crowd.count_all()
            rates = {key: (after[key] - before[key]) / wall for key in after}
            row["requests_per_agent_second"] = round(rates["requests"] / count, 2)
            row["store_kilobytes_per_second"] = round(rates["bytes"] / 1e3, 1)
            row["shared_file_calls_per_second"] = round(rates["files"], 2)
            row["coordinator_core_percent"] = round(100 * (busy_after - busy) / wall, 1)
            lost_at = crowd.lose_last()
            died = crowd.collect("died", count - 1)
            row["loss_known_seconds"] = round(max(died.values()) - lost_at, 1)
            again = crowd.collect("admitted", count - 1)
            row["next_attempt_seconds"] = round(max(again.values()) - lost_at, 1)
            return row
        finally:
            crowd.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="8,128,1024")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    machine = describe_machine()
    for count in map(int, options.agents.split(",")):
        row = measure(count, options.seconds)
        print(json.dumps(row), flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps({**row, "machine": machine}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
