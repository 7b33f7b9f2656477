"""Training runs that take turns: the ranks of all but one are stopped (SIGSTOP) for a few steps of that one.

A drift of the machine's speed over minutes then affects all of them. The launchers, which only wait, are not stopped. A
run is stopped somewhere within a step, and echelon writes the row of a step during the next one, so SETTLING_STEPS of
each turn are not counted: they contain the time in which the run was stopped, and find the caches cold.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time

import psutil

from measuring import NotHere

SETTLING_STEPS = 2
TIMEOUT_SECONDS = 1800


class EchelonRecords:
    """The steps of a run of `echelon train`, from its run folder."""

    def __init__(self, run):
        self._run = run

    def find_pids(self):
        """The processes of all ranks."""
        rows = [json.loads(line) for line in (self._run / "events.jsonl").read_text().splitlines()]
        return [int(pid) for pid in next(row for row in rows if row["event"] == "start")["pids"].values()]

    def count_steps(self):
        """The number of steps recorded so far."""
        return len(self._read())

    def read(self):
        """(seconds of each step, losses, peak bytes of a rank)."""
        rows = self._read()
        return (
            [row["step_seconds"] for row in rows],
            [row["loss"] for row in rows],
            max(row["memory_peak_bytes"] or 0 for row in rows),
        )

    def _read(self):
        return [row for row in _read_lines(self._run / "metrics.jsonl") if row["kind"] == "train"]


class PeerRecords:
    """The steps of a run of peer_sides.py: a file of each rank, with the id of its process in the first line."""

    def __init__(self, folder, processes):
        self._paths = [folder / f"rank-{rank}.jsonl" for rank in range(processes)]

    def find_pids(self):
        """See EchelonRecords."""
        return [_read_lines(path)[0]["pid"] for path in self._paths]

    def count_steps(self):
        """See EchelonRecords. A trainer may record the loss of a step before or after its seconds."""
        ranks = [_read_lines(path) for path in self._paths]
        return min(sum(key in row for row in rows) for rows in ranks for key in ("seconds", "loss"))

    def read(self):
        """See EchelonRecords. The losses are the mean over the ranks, with as many targets each but in one batch."""
        losses = zip(*(self._column(path, "loss") for path in self._paths), strict=False)
        peak = max(max(self._column(path, "peak")) for path in self._paths)
        return self._column(self._paths[0], "seconds"), [statistics.fmean(each) for each in losses], peak

    def _column(self, path, key):
        return [row[key] for row in _read_lines(path) if key in row]


def _read_lines(path):
    """The complete lines of a JSONL file that another process writes; none if it does not exist yet."""
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


class PausedRun:
    """The launcher and the ranks of one training run."""

    def __init__(self, command, environment, log, records):
        """`command`: arguments of Python. `log`: the file for everything it prints. `records`: where its steps are."""
        self._records, self._log, self._pids = records, log, []
        self._started = time.monotonic()
        self.start_seconds = None
        """From the command to the end of the first step."""
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            )  # fmt: skip

    def warm_up(self, num_steps):
        """Wait for the first steps, and stop the ranks. Raises NotHere with the end of the output."""
        self._wait_for(1)
        self.start_seconds = time.monotonic() - self._started
        self._wait_for(num_steps)
        self._pids = self._records.find_pids()
        self._signal(signal.SIGSTOP)

    def take_turn(self, num_steps):
        """Run the ranks for some steps that count, after those that do not; return their seconds."""
        first = self._records.count_steps() + SETTLING_STEPS
        self.run_until(first + num_steps)
        seconds, _, _ = self._records.read()
        return seconds[first : first + num_steps]

    def run_until(self, num_steps):
        """Run the ranks until so many steps are recorded."""
        self._signal(signal.SIGCONT)
        try:
            self._wait_for(num_steps)
        finally:
            self._signal(signal.SIGSTOP)

    def read(self):
        """(seconds of each step, losses, peak bytes of a rank)."""
        return self._records.read()

    def end(self):
        """Kill the launcher, then everything that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):  # ranks that warm up are not known yet
            self._pids += [each.pid for each in psutil.Process(self._process.pid).children(recursive=True)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._signal(signal.SIGKILL)

    def _wait_for(self, num_steps):
        patience = time.monotonic() + TIMEOUT_SECONDS
        while self._records.count_steps() < num_steps:
            if self._process.poll() is not None or time.monotonic() > patience:
                reason = "took too long" if self._process.poll() is None else f"exit code {self._process.returncode}"
                raise NotHere(f"{reason}: {self._log.read_text()[-3000:]}")
            time.sleep(0.02)

    def _signal(self, number):
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
