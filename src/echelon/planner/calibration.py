"""Calibrates this machine: starts a process for each device, which time the same work at once, and fits the constants.

With these constants the planner's own formulas give the times that were measured.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from typing import IO

from echelon.ground.cores import num_cores
from echelon.ground.errors import LaunchError
from echelon.ground.scratch import scratch_folder
from echelon.ground.variables import read_environment
from echelon.planner.hardware.calibration_store import CPU, Calibration, describe_machine
from echelon.planner.layer_time import HIDDEN_PASSES, INNER_PASSES, product_seconds
from echelon.planner.rates import GPU_RATES, expect_wait

_MOST_CPU_PROCESSES = 8  # as many share the memory and the links of a CPU as usual; more take longer to start
_MOST_SECONDS = 600  # of all processes; they need less than a minute on a machine without other work
# How often each collective sends the payload.
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}

Row = tuple[str, Mapping[str, float]]
"""What was measured, and its values: sizes, and `seconds` of one call."""


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
                answer, _ = processes[0].communicate(timeout=_MOST_SECONDS)
                codes = [process.wait(_MOST_SECONDS) for process in processes]
            except subprocess.TimeoutExpired as error:
                raise LaunchError(f"calibration did not end within {_MOST_SECONDS} s{_read_end(errors)}") from error
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


def fit_calibration(rows: Sequence[Row], device: str, num_devices: int, training_dtype: str) -> Calibration:
    """The calibration that follows from what `planner/hardware/timed_work.py` measured.

    Args:
        training_dtype: of the attention and the layers that were measured.

    Raises:
        ValueError: a measurement is missing.
    """
    products = {name.split()[1]: _rows(rows, name) for name, _ in rows if name.startswith("product ")}
    if training_dtype not in products:
        raise ValueError(f"no product in {training_dtype} was measured")
    small_dim = _fit_small_dim(products[training_dtype])
    rates = {dtype: _fit_rate(measured, small_dim) for dtype, measured in products.items()}
    attention = _rows(rows, f"attention {training_dtype}")
    forward = statistics.fmean(_attention_flops(row) / row["seconds"] for row in attention)
    backward = statistics.fmean(2.5 * _attention_flops(row) / row["backward"] for row in attention)
    (layer,), (copy,), (loss,) = (_rows(rows, name) for name in ("layer", "copy", "loss"))
    shortest = min((row["seconds"] for row in _rows(rows, "all_reduce")), default=0.0)
    jitter = _fit_jitter(_rows(rows, "waits"), shortest)
    links = {name: _fit_link(_rows(rows, name), passes, jitter) for name, passes in _PASSES.items()}
    stream = copy["bytes"] / copy["seconds"]
    fitted = Calibration(
        machine=describe_machine(),
        date=date.today().isoformat(),
        device=device,
        num_devices=num_devices,
        product_flops=rates,
        small_dim=small_dim,
        attention_flops=forward,
        attention_backward=backward / forward,
        stream_bandwidth=stream,
        pointwise_bandwidth=stream,
        logit_seconds=loss["seconds"] / loss["logits"],
        launch_seconds=layer["seconds"],
        latency=statistics.fmean(seconds for seconds, _ in links.values()),
        bandwidth=links["all_reduce"][1],
        gather_bandwidth=links["all_gather"][1],
        scatter_bandwidth=links["reduce_scatter"][1],
        wrapper_seconds=_fit_wrapper(rows, "wrapped", {}),
        hook_seconds=_fit_wrapper(rows, "sharded", {"all_gather": 2, "reduce_scatter": 1}),
        dispatch_seconds=_fit_wrapper(rows, "divided", {"all_reduce": 4}),
        jitter=jitter,
    )
    return replace(fitted, pointwise_bandwidth=_fit_pointwise(_rows(rows, "layers"), fitted, training_dtype))


def _rows(rows: Iterable[Row], name: str) -> list[Mapping[str, float]]:
    return [values for row, values in rows if row == name]


def _product_flops(row: Mapping[str, float]) -> float:
    return 6.0 * row["rows"] * row["inner"] * row["outer"]


def _smallness(row: Mapping[str, float]) -> float:
    """By how much a product takes longer per FLOP, for each unit of the constant `small_dim`."""
    return (1 / row["rows"] + 1 / row["inner"] + 1 / row["outer"]) / 2


def _fit_rate(rows: Iterable[Mapping[str, float]], small_dim: float) -> float:
    """FLOP/s of large products."""
    return statistics.median(_product_flops(row) * (1 + small_dim * _smallness(row)) / row["seconds"] for row in rows)


def _fit_small_dim(rows: Sequence[Mapping[str, float]]) -> float:
    """The constant with which the measured products have the same rate; 0 if larger products take no less.

    The seconds of a FLOP are a + b * smallness, and the constant is b / a.
    """
    constant, slope = _fit_line([(_smallness(row), row["seconds"] / _product_flops(row)) for row in rows])
    return max(0.0, slope / constant) if constant > 0 else 0.0


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of the line y = a + b * x through points (x, y), by least squares of the relative errors."""
    ones, ratios = [1 / y for _, y in points], [x / y for x, y in points]
    squares, mixed, slants = (
        sum(one * other for one, other in zip(*pair, strict=True))
        for pair in ((ones, ones), (ones, ratios), (ratios, ratios))
    )
    scale = squares * slants - mixed**2
    if scale <= 0:  # a single point
        return points[0][1], 0.0
    return (sum(ones) * slants - sum(ratios) * mixed) / scale, (sum(ratios) * squares - sum(ones) * mixed) / scale


def _attention_flops(row: Mapping[str, float]) -> float:
    """Of the forward pass, half of the scores: two products of 2 FLOPs per score and number of a head."""
    return 2.0 * row["heads"] * row["tokens"] ** 2 * row["head_dim"]


def _fit_pointwise(rows: Sequence[Mapping[str, float]], found: Calibration, dtype: str) -> float:
    """Bytes per second of a layer's operations outside its products and attention, which take what is left of it.

    By least squares of the relative errors. `found`: the other constants.
    """
    number = 4 if dtype == "float32" else 2
    pairs = [
        (_pointwise_bytes(row, number) / row["seconds"], 1 - _known_seconds(row, found, dtype) / row["seconds"])
        for row in rows
    ]
    slope = sum(moved * left for moved, left in pairs) / sum(moved**2 for moved, _ in pairs)
    return 1 / max(slope, 1 / (GPU_RATES.eager * found.stream_bandwidth))  # at least one pass over memory


def _known_seconds(row: Mapping[str, float], found: Calibration, dtype: str) -> float:
    """Seconds of a layer of Llama, forward and backward, without its pointwise operations."""
    tokens, width, inner = (int(size) for size in (row["sequences"] * row["tokens"], row["width"], row["inner"]))
    matrices = [(width, 3 * width, 1.0), (width, width, 1.0), (width, 2 * inner, 1.0), (inner, width, 1.0)]
    products = 3 * product_seconds(tokens, matrices, found.product_flops[dtype], found.small_dim)
    attention = 2.0 * tokens * row["tokens"] * width / found.attention_flops * (1 + 2.5 / found.attention_backward)
    launch = found.launch_seconds if found.is_cpu else 0.0  # the host of a GPU runs ahead
    return launch + products + attention


def _pointwise_bytes(row: Mapping[str, float], number: int) -> float:
    """What the operations of a layer outside its products and attention read and write, forward and backward."""
    passes = HIDDEN_PASSES * row["width"] + INNER_PASSES * row["inner"]
    return 3 * row["sequences"] * row["tokens"] * number * GPU_RATES.eager * passes


def _fit_wrapper(rows: Sequence[Row], name: str, collectives: Mapping[str, int]) -> float:
    """Seconds that a layer of hardly any size takes longer in this form, without its collectives."""
    variant, whole = _rows(rows, name), _rows(rows, "whole")
    if not variant:
        return 0.0
    seconds = variant[0]["seconds"] - whole[0]["seconds"]
    for kind, times in collectives.items():
        smallest = min(_rows(rows, kind), key=lambda values: values["bytes"])
        seconds -= times * smallest["processor"]
    return max(0.0, seconds)


def _fit_jitter(rows: Sequence[Mapping[str, float]], latency: float) -> float:
    """The jitter with which processes wait for each other as long as measured; 0 without a row."""
    if not rows:
        return 0.0
    [row] = rows
    waited = max(0.0, row["seconds"] - row["work"] - row["times"] * latency)
    return waited / expect_wait(int(row["processes"]), 1.0, row["work"], row["times"])


def _fit_link(rows: Sequence[Mapping[str, float]], passes: int, jitter: float) -> tuple[float, float]:
    """(seconds of a round without a payload, bytes per second that a rank sends of a large one); (0, 0) without rows.

    Args:
        passes: 2 for an all-reduce, which is a reduce-scatter and an all-gather, else 1. In each pass a rank sends the
            payload without its own part, in the rounds of a tree.
        jitter: of the work before each collective; processes wait for the last of them.
    """
    if not rows:
        return 0.0, 0.0
    ranks = int(rows[0]["processes"])
    larger = sorted(rows, key=lambda row: row["bytes"])[1:]
    points = [
        (passes * (ranks - 1) / ranks * row["bytes"], row["seconds"] - expect_wait(ranks, jitter, row["work"], 1))
        for row in larger
    ]
    latency, slope = _fit_line(points)
    sent, seconds = points[-1]
    rounds = passes * math.ceil(math.log2(ranks))
    return max(0.0, latency) / rounds, 1 / slope if slope > 0 else sent / seconds
