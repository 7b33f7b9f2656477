"""The results of benchmarks/peers.py as a table and as a picture, and the comparison of the losses.

    python benchmarks/peer_report.py RESULTS.json ... --out benchmarks/results/peers-cpu

writes one table and one picture of several results of the same work, for example of each mode, or of a group that
another program had disturbed and that was measured again. Nothing is left out.
"""

import argparse
import html
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

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
    """Tokens per second of a side in each turn, from the median step."""
    turns = [turn for run in results["runs"][name] for turn in run["turns"]]
    return [results["tokens"] / statistics.median(turn) for turn in turns]


def measure_ratios(results, side):
    """The speed of echelon with its defaults over that of a side, in each turn of the side."""
    reference = {run["group"]: run["turns"] for run in results["runs"].get(f"echelon, {side['mode']}, usual", ())}
    return [
        statistics.median(theirs) / statistics.median(ours)
        for run in results["runs"][side["name"]]
        for theirs, ours in zip(run["turns"], reference.get(run["group"], ()), strict=False)
    ]


def render_table(results, differences):
    """The results as Markdown."""
    limit = statistics.median(results["limits"])
    lines = [
        "# Pretraining beside other trainers, on CPUs", "",
        "`make bench-peers`. " + results["machine"] + ".", "",
        f"A Llama with {results['work']}. The sides run in {results['turns']} turns of a few seconds, while the "
        "others are stopped. Tokens/s are those of the median step of a turn: the median over the turns and the range. "
        "*echelon*: how many times as fast echelon was with its defaults, in the same turns. p10, p50 and p90 are "
        "percentiles of all counted steps. *Limit*: the share of the speed at which the cores would do the model's "
        f"FLOPs as one square product, {spread(results['limits'], ',.0f')} tokens/s. *Start*: from the command to "
        "the end of the first step. *Usual*: as its users run it, compiled, with the default attention; of "
        "echelon, the recipe's defaults. *Best*: the fastest setting of a search.", "",
        "| Side | Settings | Tokens/s | echelon | Limit | p10, s | p50, s | p90, s | Peak of a rank, MiB | Start, s "
        "| Loss difference |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for side in results["sides"]:
        runs, rates = results["runs"][side["name"]], measure_rates(results, side["name"])
        ratios = measure_ratios(results, side)
        seconds = sorted(each for run in runs for turn in run["turns"] for each in turn)
        low, high = (seconds[round(share * (len(seconds) - 1))] for share in (0.1, 0.9))
        peak = max(run["peak"] for run in runs) / 2**20
        lines.append(
            f"| {side['name']} | {side['words']} | {spread(rates, ',.0f')} | "
            f"{spread(ratios, '.2f') if ratios else '-'} | {statistics.median(rates) / limit:.0%} | "
            f"{low:.3f} | {statistics.median(seconds):.3f} | {high:.3f} | {peak:,.0f} | "
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
    """The tokens per second as bars with the range over the turns, and the limit of the matmuls as a line: SVG."""
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
        f'<text x="{LABEL_WIDTH}" y="{height - 8}">tokens per second, with the range over the turns</text>'
        "</svg>\n"
    )
    return "\n".join(parts)


def merge_results(parts):
    """The results of several runs of peers.py as one; the first decides the machine's line. Raises ValueError."""
    merged = {**parts[0], "limits": [], "search": {}, "remarks": [], "sides": [], "runs": {}}
    num_groups = 0
    for part in parts:
        if (part["work"], part["tokens"]) != (merged["work"], merged["tokens"]):
            raise ValueError(f"the results are of different work: {merged['work']}; {part['work']}")
        merged["limits"] += part["limits"]
        merged["search"] |= part["search"]
        merged["remarks"] += [each for each in part["remarks"] if each not in merged["remarks"]]
        known = [side["name"] for side in merged["sides"]]
        merged["sides"] += [side for side in part["sides"] if side["name"] not in known]
        for name, runs in part["runs"].items():
            merged["runs"].setdefault(name, []).extend(run | {"group": run["group"] + num_groups} for run in runs)
        num_groups += 1 + max(run["group"] for runs in part["runs"].values() for run in runs)
    engines = list(dict.fromkeys(side["engine"] for side in merged["sides"]))
    merged["sides"].sort(key=lambda side: (engines.index(side["engine"]), side["mode"], side["variant"] == "best"))
    return merged


def write_report(results, out):
    """Compare the losses, and write FILE.json, FILE.md and FILE.svg if `out` is given; return the table."""
    differences, results["remarks"] = find_differences(results, results["remarks"])
    text = render_table(results, differences)
    if out:
        out.with_suffix(".json").write_text(json.dumps(results) + "\n")
        out.with_suffix(".md").write_text(text)
        out.with_suffix(".svg").write_text(render_picture(results))
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="the report, without its suffixes")
    arguments = parser.parse_args()
    print(write_report(merge_results([json.loads(path.read_text()) for path in arguments.results]), arguments.out))


if __name__ == "__main__":
    main()
