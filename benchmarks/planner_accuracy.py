"""How far the planner's estimates are off, against published measurements: benchmarks/data/published-open.csv.

    python benchmarks/planner_accuracy.py [--fit] [--rows] [--plot FILE.svg] > benchmarks/results/planner-accuracy.md

Step time is scored three times: as `echelon plan` predicts it, with the kernels that echelon runs and the rates and
links of its tables; with the kernels, clocks and links of each source; and so with the fitted constants of
`planner/rates.py` fitted again for each source, on the rows of all other sources. Memory counts what those programs
keep (published_memory.py), its two fitted constants likewise without the source that is scored. Then, which runs fit
into memory as echelon would train them (published_fits.py). --fit prints the constants fitted on all rows; --rows adds
each row to the report; --plot draws predicted against measured step times.
"""

import argparse
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.planner.rates import GPU_RATES, Rates
from echelon.planner.time import TimeEstimate, estimate_time
from echelon.run.report.blocks import Series
from echelon.run.report.picture import Chart, ChartAxis, draw_picture
from published import SOURCES, Case, Excluded, read_rows
from published_fits import report_fits
from published_memory import DEEPSPEED, score_memory

FITTED = ("product", "small_dim", "attention", "fused", "eager", "overlap")
_STEPS = (0.25, 0.12, 0.06, 0.03, 0.015)
_LIMITS = {"product": 1.0, "attention": 1.0, "overlap": 1.0}
CONSTANT_MFU = 0.42
Scored = dict[str, list[tuple[Case, float]]]


def estimate(case: Case, rates: Rates) -> TimeEstimate:
    """The time of a published step."""
    return estimate_time(case.shape, case.plan, case.cluster, case.software, rates)


def plan_as_echelon(case: Case) -> TimeEstimate:
    """What `echelon plan` predicts for a recipe of a published run."""
    return estimate_time(case.shape, case.planned, case.listed)


def loss(cases: Sequence[Case], rates: Rates) -> float:
    """The mean distance of logarithms; a source counts as the square root of its rows."""
    counts = Counter(each.source for each in cases)
    total = weights = 0.0
    for each in cases:
        assert each.seconds is not None
        weight = counts[each.source] ** -0.5
        total += weight * abs(math.log(estimate(each, rates).total / each.seconds))
        weights += weight
    return total / weights


def fit(cases: Sequence[Case], start: Rates = GPU_RATES) -> Rates:
    """The constants with the smallest loss, by a search along one constant after the other."""
    best, lowest = start, loss(cases, start)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for factor in (1 + step, 1 / (1 + step)):
                    value = min(getattr(best, name) * factor, _LIMITS.get(name, math.inf))
                    trial = replace(best, **{name: value})
                    if (found := loss(cases, trial)) < lowest - 1e-6:
                        best, lowest, improved = trial, found, True
    return best


def quantiles(errors: Iterable[float]) -> str:
    """Median and 90th percentile in per cent."""
    ordered = sorted(errors)
    return f"{statistics.median(ordered):.1%} | {ordered[math.ceil(0.9 * len(ordered)) - 1]:.1%}"


def score_shipped(cases: Sequence[Case], predict: Callable[[Case], TimeEstimate]) -> Scored:
    """By source, each row with predicted seconds over measured ones."""
    scored = defaultdict(list)
    for each in cases:
        assert each.seconds is not None
        scored[each.source].append((each, predict(each).total / each.seconds))
    return dict(scored)


def score_time(cases: Sequence[Case]) -> tuple[Scored, dict[str, Rates]]:
    """(by source, each row with predicted seconds over measured ones; the constants, fitted without that source)."""
    rates = {source: fit([each for each in cases if each.source != source]) for source in _sources(cases)}
    return score_shipped(cases, lambda case: estimate(case, rates[case.source])), rates


def constant_mfu(cases: Sequence[Case]) -> list[float]:
    """The errors of the same rows with a model FLOPs utilisation of 42 % for all."""
    errors = []
    for each in cases:
        plan, device = each.plan, each.cluster.accelerator
        peak = (device.peak_flops(plan.precision.compute) or 125e12) * (2 if plan.precision.float8 else 1)
        tokens = plan.global_batch_size * each.plan.sequence_len
        trained = None if plan.adapter is None else plan.adapter.num_trained_matmul_parameters
        flops = tokens * each.shape.flops_per_token(each.plan.sequence_len, trained)
        assert each.seconds is not None
        errors.append(abs(flops / (CONSTANT_MFU * peak * each.cluster.num_devices) / each.seconds - 1))
    return errors


def _sources(cases: Iterable[Case]) -> list[str]:
    return list(dict.fromkeys(each.source for each in cases))


def render_memory(scored: Scored) -> list[str]:
    """Lines of Markdown: the errors of memory by source."""
    lines = ["| source | rows | median error | 90th percentile |", "|---|---|---|---|"]
    return [*lines, *(f"| {name} | {len(rows)} | {_errors(rows)} |" for name, rows in _with_all(scored))]


def render_time(echelon: Scored, own: Scored, left_out: Scored) -> list[str]:
    """Lines of Markdown: the errors of a step by source, as predicted in three ways."""
    columns = ("`echelon plan`", "own kernels and clocks", "constants fitted without it")
    heads = " | ".join(f"{name}: median | 90th percentile" for name in columns)
    lines = [f"| source | rows | {heads} |", f"|---{'|---' * 7}|"]
    others = [dict(_with_all(each)) for each in (own, left_out)]
    for name, rows in _with_all(echelon):
        errors = " | ".join(_errors(each) for each in (rows, *(found[name] for found in others)))
        lines.append(f"| {name} | {len(rows)} | {errors} |")
    return lines


def _with_all(scored: Scored) -> list[tuple[str, list[tuple[Case, float]]]]:
    named = [(SOURCES[source], rows) for source, rows in scored.items()]
    return [*named, ("all", [each for rows in scored.values() for each in rows])]


def _errors(rows: Sequence[tuple[Case, float]]) -> str:
    return quantiles(abs(ratio - 1) for _, ratio in rows)


def render_error_bar(scored: Scored) -> str:
    """The 10th and the 90th percentile of measured over predicted seconds, the error bar of `echelon plan --quote`."""
    factors = [1 / ratio for rows in scored.values() for _, ratio in rows]
    tenths = statistics.quantiles(factors, n=10)
    return (
        f"Measured over predicted seconds of `echelon plan`, all {len(factors)} rows: "
        f"10th percentile {tenths[0]:.2f}, 90th percentile {tenths[-1]:.2f}."
    )


def draw_time(scored: Scored) -> str:
    """An SVG picture: the predicted step time of each row against the measured one."""
    series = []
    for source, rows in scored.items():
        points = [(each.seconds, ratio * each.seconds) for each, ratio in rows if each.seconds is not None]
        series.append(Series(source, points, is_marked=True))
    ends = [x for each in series for x, _ in each.points]
    series.append(Series("as measured", [(value, value) for value in (min(ends), max(ends))], is_faint=True))
    measured, predicted = (ChartAxis(f"{word} seconds of a step", is_log=True) for word in ("measured", "predicted"))
    return draw_picture([Chart(f"{len(ends)} published runs", measured, predicted, series, joined=False)])


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = read_rows()
    cases = [each for each in rows if isinstance(each, Case)]
    timed = [each for each in cases if each.seconds is not None]
    if options.fit:
        best = fit(timed)
        print({name: round(getattr(best, name), 4) for name in FITTED}, f"loss {loss(timed, best):.4f}")
        return
    scored, rates = score_time(timed)
    if options.plot is not None:
        options.plot.write_text(draw_time(scored))
    predicted = score_shipped(timed, plan_as_echelon), score_shipped(timed, lambda case: estimate(case, GPU_RATES))
    lines = ["## Step time", "", *render_time(*predicted, scored), ""]
    lines += [render_error_bar(predicted[0]), ""]
    floor = quantiles(constant_mfu(timed))
    lines += [f"A constant MFU of {CONSTANT_MFU:.0%} on the same rows: median and 90th percentile {floor}.", ""]
    lines += ["The constants, fitted without each source:", ""]
    lines += [f"| without | {' | '.join(FITTED)} |", f"|---{'|---' * len(FITTED)}|"]
    for source, found in rates.items():
        lines.append(f"| {source} | {' | '.join(f'{getattr(found, name):.3g}' for name in FITTED)} |")
    kept, allocators = score_memory(cases)
    lines += ["", "## Memory of each source's program", "", *render_memory(kept), ""]
    lines += ["What the allocator reserves, fitted without each source:", ""]
    lines += ["| without | reserved / counted | buffers, GB |", "|---|---|---|"]
    for source, found in allocators.items():
        fitted = f"{found.ratio:.2f} | {found.buffers / 1e9:.2f}" if source in DEEPSPEED else "nothing is fitted |"
        lines.append(f"| {source} | {fitted} |")
    lines += ["", *report_fits(timed)]
    lines += ["## Rows that are left out", "", "| source | rows | reason |", "|---|---|---|"]
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in rows:
        if isinstance(each, Excluded):
            reasons[each.source, each.reason].append(each.row.rsplit("-", 1)[1])
    lines += [f"| {source} | {', '.join(names)} | {reason} |" for (source, reason), names in reasons.items()]
    print("\n".join(lines))
    if options.rows:
        for title, table in (("time", scored), ("memory", kept)):
            for each, ratio in [pair for every in table.values() for pair in every]:
                print(f"{title} {each.row} {ratio:.2f}")


if __name__ == "__main__":
    main()
