"""The results of benchmarks/peers.py as a table and as a picture, and the comparison of the losses."""

import html
import statistics
from dataclasses import dataclass

from measuring import spread

# Sides compute in bf16 with sums in different orders, and DeepSpeed keeps its weights in bf16 too.
FIRST_TOLERANCE, STEP_TOLERANCE, END_TOLERANCE, END_STEPS = 0.01, 0.1, 0.02, 20
COLORS = {"usual": "#8fb3d9", "best": "#2f6fae"}
ROW_HEIGHT, LABEL_WIDTH, BAR_WIDTH = 24, 230, 480


@dataclass(frozen=True)
class Difference:
    """How far the losses of a run are from those of another: at the first step, at any, in the mean of the last."""

    first: float
    largest: float
    end: float

    @property
    def is_small(self):
        """Whether both trained the same model on the same batches, in bf16."""
        return self.first <= FIRST_TOLERANCE and self.largest <= STEP_TOLERANCE and self.end <= END_TOLERANCE


def compare_losses(losses, reference):
    """The Difference of two series of losses, over the steps that both have."""
    apart = [ours - theirs for ours, theirs in zip(losses, reference, strict=False)]
    return Difference(abs(apart[0]), max(map(abs, apart)), abs(statistics.fmean(apart[-END_STEPS:])))


def find_differences(results, remarks):
    """Compare all runs with the first of the last side, of a peer if one ran: {side: largest}, and what failed."""
    names = [side["name"] for side in results["sides"]]
    peers = [side["name"] for side in results["sides"] if side["engine"] != "echelon"]
    remarks, found = list(remarks), {}
    for name in names:
        reference = (peers or names)[-1]
        losses = results["runs"][reference][0]["losses"]
        each = [compare_losses(run["losses"], losses) for run in results["runs"][name]]
        found[name] = max(each, key=lambda difference: difference.largest)
        bad = [difference for difference in each if not difference.is_small]
        remarks += [f"{name}: failed, its losses differ from those of {reference}: {bad[0]}"] if bad else []
    return found, remarks


def measure_rates(results, name):
    """Tokens per second of a side in each round, from the median step."""
    steps = [statistics.median(run["seconds"][results["warmup"] :]) for run in results["runs"][name]]
    return [results["tokens"] / step for step in steps]


def render_table(results, differences):
    """The results as Markdown."""
    limit = statistics.median(results["limits"])
    lines = [
        "# Pretraining beside other trainers, on CPUs", "",
        "`make bench-peers`. " + results["machine"] + ".", "",
        f"A Llama with {results['work']}, bf16: {len(results['limits'])} interleaved rounds. Tokens/s are those of the "
        "median step of a round: the median over the rounds and the range. p50 and p90 are percentiles of all counted "
        "steps. *Limit*: the share of the speed at which the cores would do the model's FLOPs as one square bf16 "
        f"product, {spread(results['limits'], ',.0f')} tokens/s. *Start*: from the command to the end of the first "
        "step. *Usual*: as its users run it, in bf16, compiled, with the default attention; of echelon, the recipe's "
        "defaults. *Best*: the fastest setting of a search.", "",
        "| Side | Settings | Tokens/s | Limit | p50, s | p90, s | Peak of a rank, MiB | Start, s | Loss difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for side in results["sides"]:
        runs, rates = results["runs"][side["name"]], measure_rates(results, side["name"])
        seconds = sorted(each for run in runs for each in run["seconds"][results["warmup"] :])
        high = seconds[round(0.9 * (len(seconds) - 1))]
        peak = max(run["peak"] for run in runs) / 2**20
        lines.append(
            f"| {side['name']} | {side['words']} | {spread(rates, ',.0f')} | {statistics.median(rates) / limit:.0%} | "
            f"{statistics.median(seconds):.3f} | {high:.3f} | {peak:,.0f} | "
            f"{spread([run['start'] for run in runs], '.1f')} | {differences[side['name']].largest:.4f} |"
        )
    steps = max((len(run["losses"]) for runs in results["runs"].values() for run in runs), default=0)
    lines += [
        "",
        f"All sides start from the same weights and train on the same batches. *Loss difference* is the largest of a "
        f"step, over up to {steps} steps, from the last side that is not echelon. Accepted are {FIRST_TOLERANCE} at "
        f"the first step, {STEP_TOLERANCE} at any, and {END_TOLERANCE} in the mean of the last {END_STEPS}.",
    ]
    if results["search"]:
        lines += ["", "What the search tried, in seconds a step:", ""]
        for name, found in results["search"].items():
            lines.append(f"- {name}: " + "; ".join(f"{setting} {value:.3f}" for setting, value in found.items()))
    lines += ["", *(f"- {remark}" for remark in results["remarks"])] if results["remarks"] else []
    return "\n".join(lines) + "\n"


def render_picture(results):
    """The tokens per second as bars with the range over the rounds, and the limit of the matmuls as a line: SVG."""
    limit = statistics.median(results["limits"])
    rates = {side["name"]: measure_rates(results, side["name"]) for side in results["sides"]}
    top = max(limit, *(max(each) for each in rates.values()))
    scale = BAR_WIDTH / top
    width, height = LABEL_WIDTH + BAR_WIDTH + 80, ROW_HEIGHT * (len(rates) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><title>Tokens per second</title><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for number, side in enumerate(results["sides"]):
        own, y = rates[side["name"]], ROW_HEIGHT * (number + 1)
        length, middle = statistics.median(own) * scale, y + ROW_HEIGHT / 2
        low, high = (LABEL_WIDTH + value * scale for value in (min(own), max(own)))
        parts.append(
            f'<text x="{LABEL_WIDTH - 8}" y="{middle + 4}" text-anchor="end">{html.escape(side["name"])}</text>'
            f'<rect x="{LABEL_WIDTH}" y="{y + 4}" width="{length:.1f}" height="{ROW_HEIGHT - 8}" '
            f'fill="{COLORS[side["variant"]]}"/>'
            f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="black"/>'
            f'<text x="{max(high, LABEL_WIDTH + length) + 6:.1f}" y="{middle + 4}">{statistics.median(own):,.0f}</text>'
        )
    x = LABEL_WIDTH + limit * scale
    parts.append(
        f'<path d="M{x:.1f} {ROW_HEIGHT}V{height - ROW_HEIGHT}" stroke="#b03030" stroke-dasharray="4 3"/>'
        f'<text x="{x:.1f}" y="{ROW_HEIGHT - 8}" text-anchor="end">limit of the matmuls: {limit:,.0f}</text>'
        f'<text x="{LABEL_WIDTH}" y="{height - 8}">tokens per second, with the range over the rounds</text>'
        "</svg>\n"
    )
    return "\n".join(parts)
