"""The constants of a calibration, from the times of pieces of work: the planner's own formulas, solved for them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import date

from echelon.hardware.calibration import Calibration, describe_machine
from echelon.planner.layer_time import HIDDEN_PASSES, INNER_PASSES
from echelon.planner.rates import GPU_RATES
from echelon.planner.waits import expect_wait

Row = tuple[str, Mapping[str, float]]
"""What was measured, and its values: sizes, and `seconds` of one call."""


def fit_calibration(rows: Sequence[Row], device: str, num_devices: int, training_dtype: str) -> Calibration:
    """The calibration that follows from what `hardware/timed_work.py` measured.

    Args:
        training_dtype: of the attention and the layers that were measured.

    Raises:
        ValueError: a measurement is missing.
    """
    products = {name.split()[1]: _rows(rows, name) for name, _ in rows if name.startswith("product ")}
    if training_dtype not in products:
        raise ValueError(f"no product in {training_dtype} was measured")
    small_dim = _fit_small_dim(products[training_dtype])
    rates = {dtype: _fit_rate(found, small_dim) for dtype, found in products.items()}
    attention = _rows(rows, f"attention {training_dtype}")
    forward = statistics.fmean(_attention_flops(each) / each["seconds"] for each in attention)
    backward = statistics.fmean(2.5 * _attention_flops(each) / each["backward"] for each in attention)
    (layer,), (copy,), (loss,) = (_rows(rows, name) for name in ("layer", "copy", "loss"))
    number = 4 if training_dtype == "float32" else 2
    latency, bandwidth = _fit_link(_rows(rows, "all_reduce"), passes=2)
    return Calibration(
        machine=describe_machine(),
        date=date.today().isoformat(),
        device=device,
        num_devices=num_devices,
        product_flops=rates,
        small_dim=small_dim,
        attention_flops=forward,
        attention_backward=backward / forward,
        stream_bandwidth=copy["bytes"] / copy["seconds"],
        pointwise_bandwidth=_fit_pointwise(_rows(rows, "pointwise"), number),
        logit_seconds=loss["seconds"] / loss["logits"],
        launch_seconds=layer["seconds"],
        latency=latency,
        bandwidth=bandwidth,
        gather_bandwidth=_fit_link(_rows(rows, "all_gather"), passes=1)[1],
        scatter_bandwidth=_fit_link(_rows(rows, "reduce_scatter"), passes=1)[1],
        wrapper_seconds=_fit_wrapper(rows, "wrapped", {}),
        hook_seconds=_fit_wrapper(rows, "sharded", {"all_gather": 2, "reduce_scatter": 1}),
        dispatch_seconds=_fit_wrapper(rows, "divided", {"all_reduce": 4}),
        jitter=_fit_jitter(_rows(rows, "waits"), latency),
    )


def _rows(rows: Iterable[Row], name: str) -> list[Mapping[str, float]]:
    return [values for each, values in rows if each == name]


def _product_flops(row: Mapping[str, float]) -> float:
    return 6.0 * row["rows"] * row["inner"] * row["outer"]


def _smallness(row: Mapping[str, float]) -> float:
    """By how much a product takes longer per FLOP, for each unit of the constant `small_dim`."""
    return (1 / row["rows"] + 1 / row["inner"] + 1 / row["outer"]) / 2


def _fit_rate(rows: Iterable[Mapping[str, float]], small_dim: float) -> float:
    """FLOP/s of large products."""
    return statistics.median(
        _product_flops(each) * (1 + small_dim * _smallness(each)) / each["seconds"] for each in rows
    )


def _fit_small_dim(rows: Sequence[Mapping[str, float]]) -> float:
    """The constant with which the measured products have the same rate, by least squares of the relative errors.

    The seconds of a FLOP are a + b * smallness, and the constant is b / a. 0 if larger products take no less.
    """
    rates = [_product_flops(each) / each["seconds"] for each in rows]
    slopes = [rate * _smallness(each) for rate, each in zip(rates, rows, strict=True)]
    squares, mixed, slants = (
        sum(one * other for one, other in zip(*pair, strict=True))
        for pair in ((rates, rates), (rates, slopes), (slopes, slopes))
    )
    constant = sum(rates) * slants - sum(slopes) * mixed
    slope = sum(slopes) * squares - sum(rates) * mixed
    return max(0.0, slope / constant) if constant > 0 else 0.0


def _attention_flops(row: Mapping[str, float]) -> float:
    """Of the forward pass, half of the scores: two products of 2 FLOPs per score and number of a head."""
    return 2.0 * row["heads"] * row["tokens"] ** 2 * row["head_dim"]


def _fit_pointwise(rows: Sequence[Mapping[str, float]], number: int) -> float:
    """Bytes per second of a layer's operations outside its products and attention; `number`: bytes of a number."""
    launch, *others = sorted(rows, key=lambda each: each["tokens"] * each["width"])
    moved = (
        3 * each["tokens"] * number * GPU_RATES.eager * (HIDDEN_PASSES * each["width"] + INNER_PASSES * each["inner"])
        for each in others
    )
    taken = (max(each["seconds"] - launch["seconds"], 1e-9) for each in others)
    return statistics.median(one / other for one, other in zip(moved, taken, strict=True))


def _fit_wrapper(rows: Sequence[Row], name: str, collectives: Mapping[str, int]) -> float:
    """Seconds that a layer of hardly any size takes longer in this form, without its collectives."""
    found, whole = _rows(rows, name), _rows(rows, "whole")
    if not found:
        return 0.0
    seconds = found[0]["seconds"] - whole[0]["seconds"]
    for each, times in collectives.items():
        smallest = min(_rows(rows, each), key=lambda values: values["bytes"])
        seconds -= times * smallest.get("processor", smallest["seconds"])
    return max(0.0, seconds)


def _fit_jitter(rows: Sequence[Mapping[str, float]], latency: float) -> float:
    """The jitter with which processes wait for each other as long as measured; 0 without a row."""
    if not rows:
        return 0.0
    [row] = rows
    waited = max(0.0, row["seconds"] - row["work"] - row["times"] * latency)
    return waited / expect_wait(int(row["processes"]), 1.0, row["work"], row["times"])


def _fit_link(rows: Sequence[Mapping[str, float]], passes: int) -> tuple[float, float]:
    """(seconds of the smallest payload, bytes that a rank sends per second of the largest one); (0, 0) without rows.

    Args:
        passes: 2 for an all-reduce, which is a reduce-scatter and an all-gather, else 1. In each pass a rank sends the
            payload without its own part.
    """
    if not rows:
        return 0.0, 0.0
    smallest, largest = (choose(rows, key=lambda each: each["bytes"]) for choose in (min, max))
    ranks, key = largest["processes"], "processor" if "processor" in largest else "seconds"
    sent = passes * (ranks - 1) / ranks * largest["bytes"]
    return smallest["seconds"], sent / max(largest[key] - smallest[key], 1e-9)
