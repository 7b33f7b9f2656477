"""Processes that are compared by running in turns: each runs a block of steps while the others wait.

A drift of the machine's speed then affects all of them. The parent has a `Side` for each process and calls
`take_turns`; the process itself has a `Gate`.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import torch

from kernel_table import Kernels
from measuring import count_graphs, free_cache, peak_bytes, reset_peak, resident_bytes


class SideFailed(Exception):
    """The process of a side ended without an answer."""


def find_error(text):
    """The line of a program's output that names its exception: the last such line, or the last of all."""
    lines = text.splitlines()
    named = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt|Exit|Unsupported)\b", line)
    ]
    return [*lines, *named][-1]


class Side:
    """The process of one side, seen from the parent.

    It starts with its first block: a side loads, compiles and rehearses while the ones before it keep only their
    weights. Two that did so at once would not fit into the memory of one GPU.
    """

    def __init__(self, name, command, log):
        """`command`: a Python script with its arguments. `log`: the file for everything that the process prints."""
        self.name, self._command, self._log = name, command, log
        self._process = None

    def _start(self):
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, self._command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )

    def run_block(self, request="go"):
        """Run a block of steps; return its measurements. `request` "profile": with the times of the kernels."""
        if self._process is None:
            self._start()
        try:
            print(request, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            text = self._log.read_text().strip() or "it ended without a message"
            raise SideFailed(f"{self.name}: {find_error(text)}\n{text[-3000:]}")
        return json.loads(answer)

    def end(self, is_orderly):
        """Ask the process to exit, or kill it, and wait for it."""
        if self._process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            if is_orderly:
                self._process.wait(60)
        except subprocess.TimeoutExpired:
            print(f"{self.name} does not end", file=sys.stderr)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


def take_turns(sides, rounds, is_profiled=False):
    """Run a warm-up block of each side, then one block of each in every round, in alternating order.

    Returns [[measurements of the warm-up, of round 1, ...] for each side], and with `is_profiled` those of one more
    block, with the times of the kernels. Ends every process. Raises SideFailed.
    """
    done = [[] for _ in sides]
    pairs = list(zip(sides, done, strict=True))
    is_orderly = False
    try:
        for number in range(rounds + 1):
            for side, blocks in pairs if number % 2 else reversed(pairs):
                blocks.append(side.run_block())
        for side, blocks in pairs if is_profiled else ():
            blocks.append(side.run_block("profile"))
        is_orderly = True
    finally:
        for side in sides:
            side.end(is_orderly)
    return done


class Gate:
    """The start of a side's measurement, between imports and loading; then a side runs blocks of steps on request."""

    def __init__(self):
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # output of libraries is not an answer
        self._baseline = 0 if torch.cuda.is_available() else resident_bytes("VmRSS")
        self._is_first, self._kernels = True, None
        reset_peak()

    def wait(self):
        """Wait for a request; return whether another block should run."""
        request = sys.stdin.readline().strip()
        self._used = time.process_time()
        if request == "profile":
            self._kernels = Kernels()
            self._kernels.start()
        return request != ""

    def tell(self, **measured):
        """Send the measurements of a block. The peak is that since the first block, or in it, that of loading too."""
        used = time.process_time() - self._used
        if self._kernels is not None:
            measured["kernels"] = self._kernels.stop()
            self._kernels = None
        answer = {
            "peak": peak_bytes() - self._baseline, "baseline": self._baseline, "threads": torch.get_num_threads(),
            "cpu_seconds": used, "graphs": count_graphs(),
        }  # fmt: skip
        free_cache()  # the others need the memory while this process waits
        if self._is_first:
            reset_peak()
            self._is_first = False
        print(json.dumps(answer | measured), file=self._answers)
