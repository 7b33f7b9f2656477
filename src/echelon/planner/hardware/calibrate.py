"""Calibrates this machine: starts a process for each device, which time the same work at once."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO

from echelon.ground.cores import num_cores
from echelon.ground.errors import LaunchError
from echelon.ground.scratch import scratch_folder
from echelon.ground.variables import read_environment
from echelon.planner.hardware.calibration_store import CPU

Row = tuple[str, dict[str, float]]

_MOST_CPU_PROCESSES = 8  # as many share the memory and the links of a CPU as usual; more take longer to start
_SECONDS = 600  # of all processes; they need less than a minute on a machine without other work


def measure_machine(environment: Callable[[int], Mapping[str, str]]) -> tuple[list[Row], str, int]:
    """(times of pieces of work, the name of the device, the number of GPUs or of cores).

    `environment`: returns the variables of a number of workers on this machine.

    Raises LaunchError if the processes fail, with the end of what they wrote.
    """
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return _run_processes(count, environment(count)), torch.cuda.get_device_name(0), count
    count = min(max(2, num_cores()), _MOST_CPU_PROCESSES)
    return _run_processes(count, environment(count)), CPU, num_cores()


def _run_processes(count: int, variables: Mapping[str, str]) -> list[Row]:
    """The rows of rank 0 of `count` processes."""
    environment = {**read_environment(), **variables, "OMP_NUM_THREADS": "1"}
    with scratch_folder("calibrate") as folder:
        command = [sys.executable, "-m", "echelon.planner.hardware.timed_work", str(folder / "store")]
        with tempfile.TemporaryFile("w+") as errors:
            processes = [
                subprocess.Popen(
                    [*command, str(rank), str(count)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=errors,
                    text=True,
                    env=environment,
                )
                for rank in range(count)
            ]
            try:
                answer, _ = processes[0].communicate(timeout=_SECONDS)
                codes = [process.wait(_SECONDS) for process in processes]
            except subprocess.TimeoutExpired as error:
                raise LaunchError(f"calibration did not end within {_SECONDS} s{_read_end(errors)}") from error
            finally:
                for process in processes:
                    with suppress(ProcessLookupError):
                        process.kill()
                    process.wait()
            if any(codes):
                raise LaunchError(f"calibration failed with exit code {max(codes, key=abs)}{_read_end(errors)}")
    return [(name, values) for name, values in json.loads(answer.splitlines()[-1])]


def _read_end(errors: IO[str]) -> str:
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    return f": {lines[-1]}" if lines else ""
