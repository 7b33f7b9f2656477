"""The held-out loss at equal tokens of every way to agree between replicas, beside the bytes that each process sends.

    python benchmarks/convergence.py OUT [--full] [--link] [--seeds N] [--only NAME ...]

Trains `benchmarks/stdlib.yaml` on two processes once for each method, and appends each result to OUT.json, so that it
can be stopped and continued; then writes OUT.md and OUT.svg. By default the model is smaller than that recipe's and
sees one million tokens, in about a minute for each method on two cores; --full: the recipe's model and three million.
--seeds N: every method of --only runs with the seeds 0 to N - 1, which choose the first weights and the order of the
data.

--link: also trains some steps with each process on a machine of its own (a network namespace, so as root on Linux),
over a link of 100 Mbit/s on which each packet arrives 20 ms later, and shows how long the run would take over it;
seed 0 only.
"""

import argparse
import html
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROCESSES = 2
MEGABITS, LATENCY_SECONDS = 100, 0.02
# A round of the replicas that agree after step 30: such a step, the one beside which they may send, and 28 others.
LINK_STEPS, ROUND, FIRST_COUNTED, WINDOW = 32, 30, 4, 10
LINK_OVERRIDES = [f"train.steps={LINK_STEPS}", "optim.warmup=10", "evaluate.batches=1"]
SMALL = [
    "model.config.hidden_size=128", "model.config.intermediate_size=344", "model.config.num_hidden_layers=2",
    "tokenizer={train: {vocab_size: 1024}}", "data.sequence_len=128", "train.steps=480",
]  # fmt: skip
# Compiled, as `auto` would choose for a run of this length, also in the few steps over the link.
FULL = ["train.steps=750", "train.compile=true"]
FIRST, MOST_SEEDS = "every_step", 3
METHODS = {
    FIRST: {},
    "bf16": {"compress": {"method": "bf16"}},
    "fp16": {"compress": {"method": "fp16"}},
    "PowerSGD, rank 4": {"compress": {"method": "powersgd"}},
    "top-k, 1 %": {"compress": {"method": "topk"}},
    "random-k, 1 %": {"compress": {"method": "randomk"}},
    "random-k, 10 %": {"compress": {"method": "randomk", "fraction": 0.1}},
    "signs": {"compress": {"method": "sign"}},
    "local SGD, H = 30": {"name": "local_sgd", "every": 30},
    "DiLoCo, H = 30": {"name": "diloco", "every": 30},
    "DiLoCo, H = 30, momentum 0.5": {"name": "diloco", "every": 30, "outer_momentum": 0.5},
    "DiLoCo, H = 30, int8": {"name": "diloco", "every": 30, "compress": {"method": "int8"}},
    "DiLoCo, H = 30, overlap": {"name": "diloco", "every": 30, "overlap": True},
    "server, staleness 0": {"name": "parameter_server"},
    "server, staleness 4": {"name": "parameter_server", "max_staleness": 4},
    "server, staleness null": {"name": "parameter_server", "max_staleness": None},
    "server, int8 pushes": {"name": "parameter_server", "compress": {"method": "int8"}},
    "server, top-k 1 % pushes": {"name": "parameter_server", "compress": {"method": "topk"}},
    "quorum": {"name": "quorum"},
}
UNLINKED = ("quorum",)  # for one machine
ROW_HEIGHT, LABEL_WIDTH, BAR_WIDTH, NOTE_WIDTH = 26, 210, 380, 320


def command_of(folder, sync, seed, overrides):
    """The command that trains the recipe with a method, in a folder."""
    shown = [
        f"run.dir={folder}/run", f"data.prepared_dir={ROOT}/runs/prepared", f"sync={json.dumps(sync)}",
        f"run.seed={seed}", "train.eval_every=100000", "checkpoint.every=100000", "train.log_every=100",
        *overrides,
    ]  # fmt: skip
    return [sys.executable, "-m", "echelon", "train", str(ROOT / "benchmarks/stdlib.yaml"), *shown]


def read_rows(folder):
    return [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]


def measure(sync, seed, overrides):
    """The held-out loss at the end of a run, its tokens and steps, and the bytes that a process sent on average."""
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        subprocess.run([*command_of(folder, sync, seed, overrides), "--nproc", str(PROCESSES)], check=True)
        rows = read_rows(folder)
    steps = [row for row in rows if row["kind"] == "train"]
    [evaluated] = [row for row in rows if row["kind"] == "eval"]
    sent = sum(row["sent_bytes"] for row in steps)
    return {"loss": evaluated["loss"], "tokens": steps[-1]["tokens"], "steps": len(steps), "sent_bytes": sent}


def measure_over_link(sync, overrides):
    """Seconds of a step if the processes are on different machines with a slow link: the mean of a round.

    The steps between agreements count as the fastest ten of them in a row, because others may use the same cores.
    """
    from slow_link import train_over_link

    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        command = command_of(folder, sync, 0, [*overrides, *LINK_OVERRIDES])
        seconds = train_over_link(command, folder, MEGABITS, LATENCY_SECONDS)
    alike = seconds[FIRST_COUNTED : ROUND - 1]
    fastest = min(statistics.mean(alike[start : start + WINDOW]) for start in range(len(alike) - WINDOW + 1))
    return ((ROUND - 2) * fastest + sum(seconds[ROUND - 1 : ROUND + 1])) / ROUND


def name_run(method, seed):
    return method if seed == 0 else f"{method}; seed {seed}"


def render_table(results):
    first = results[FIRST]
    lines = [
        f"{first['steps']} steps, {first['tokens']:,} tokens, {PROCESSES} processes. Bytes are those that a process "
        "sends on average, as the run counts them; tests compare the count with the bytes of sockets. Over the link: "
        f"the seconds of so many steps over {MEGABITS} Mbit/s with {1000 * LATENCY_SECONDS:.0f} ms of latency, scaled "
        f"from a run of {LINK_STEPS}: its fastest {WINDOW} in a row, and one agreement in {ROUND} steps.",
        "",
        f"| Method | Sent, MB | Less than {FIRST} | Held-out loss | Above {FIRST} of the same seed | Over the link |",
        "|---|---|---|---|---|---|",
    ]
    for (method, seed), each in results_by_run(results):
        sent = f"{each['sent_bytes'] / 1e6:,.1f} | {first['sent_bytes'] / each['sent_bytes']:.1f} x"
        base = results.get(name_run(FIRST, seed))
        above = f"{each['loss'] / base['loss'] - 1:+.1%}" if base else "not run"
        seconds = link_seconds(each)
        over_link = "" if seconds is None else f"{seconds:,.0f} s"
        lines.append(f"| {name_run(method, seed)} | {sent} | {each['loss']:.4f} | {above} | {over_link} |")
    return "\n".join(lines) + "\n"


def link_seconds(result):
    """Seconds of the whole run over the link; None if that was not measured."""
    return result["link_step_seconds"] * result["steps"] if "link_step_seconds" in result else None


def results_by_run(results):
    """The results in the order of METHODS, with their methods and seeds."""
    runs = [(method, seed) for method in METHODS for seed in range(MOST_SEEDS)]
    return [(run, results[name_run(*run)]) for run in runs if name_run(*run) in results]


def render_picture(results):
    """The losses as bars, from zero, with bytes and seconds over the link beside them: SVG."""
    scale = BAR_WIDTH / max(each["loss"] for each in results.values())
    width, height = LABEL_WIDTH + BAR_WIDTH + NOTE_WIDTH, ROW_HEIGHT * (len(results) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><title>Loss at equal tokens</title><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for number, (run, each) in enumerate(results_by_run(results)):
        y, length = ROW_HEIGHT * (number + 1), each["loss"] * scale
        note = f"{each['loss']:.3f}, {each['sent_bytes'] / 1e6:,.1f} MB sent"
        if (seconds := link_seconds(each)) is not None:
            note += f", {seconds:,.0f} s over the link"
        parts.append(
            f'<text x="{LABEL_WIDTH - 8}" y="{y + 17}" text-anchor="end">{html.escape(name_run(*run))}</text>'
            f'<rect x="{LABEL_WIDTH}" y="{y + 4}" width="{length:.1f}" height="{ROW_HEIGHT - 8}" fill="#4878a8"/>'
            f'<text x="{LABEL_WIDTH + length + 6:.1f}" y="{y + 17}">{note}</text>'
        )
    parts.append(f'<text x="{LABEL_WIDTH}" y="{height - 8}">held-out loss at equal tokens</text></svg>\n')
    return "\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--link", action="store_true")
    parser.add_argument("--seeds", type=int, default=1, choices=range(1, MOST_SEEDS + 1))
    parser.add_argument("--only", nargs="*", choices=list(METHODS), default=list(METHODS))
    given = parser.parse_args()
    stored = given.out.with_suffix(".json")
    results = json.loads(stored.read_text()) if stored.exists() else {}
    overrides = FULL if given.full else SMALL
    (ROOT / "runs").mkdir(exist_ok=True)
    for seed in range(given.seeds):
        for method in given.only:
            if (name := name_run(method, seed)) not in results:
                results[name] = measure(METHODS[method], seed, overrides)
                stored.write_text(json.dumps(results, indent=1))
            if given.link and seed == 0 and method not in UNLINKED and "link_step_seconds" not in results[name]:
                results[name]["link_step_seconds"] = measure_over_link(METHODS[method], overrides)
                stored.write_text(json.dumps(results, indent=1))
    given.out.with_suffix(".md").write_text(render_table(results))
    given.out.with_suffix(".svg").write_text(render_picture(results))
    print(render_table(results))


if __name__ == "__main__":
    main()
