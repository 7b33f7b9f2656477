"""The held-out loss at equal tokens of every way to agree between replicas, beside the bytes that each process sends.

    python benchmarks/convergence.py OUT [--full] [--only NAME ...]

Trains the demo on two processes once for each method, and appends each result to OUT.json, so that it can be stopped
and continued; then writes OUT.md and OUT.svg. By default the model is smaller than the demo's and sees one million
tokens, in about a minute for each method on two cores; --full: the demo's model and three million.
"""

import argparse
import html
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from echelon.model.build import build_on_meta, load_config
from echelon.planner.plan import build_sync_plan
from echelon.planner.replica_costs import count_sent_bytes
from echelon.recipe import SyncConfig

ROOT = Path(__file__).parents[1]
PROCESSES = 2
SMALL = [
    "model.config.hidden_size=128", "model.config.intermediate_size=344", "model.config.num_hidden_layers=2",
    "tokenizer={train: {vocab_size: 1024}}", "data.sequence_len=128", "train.steps=480",
]  # fmt: skip
FULL = ["train.steps=750"]
METHODS = {
    "every_step": {},
    "bf16": {"compress": {"method": "bf16"}},
    "fp16": {"compress": {"method": "fp16"}},
    "PowerSGD, rank 4": {"compress": {"method": "powersgd"}},
    "top-k, 1 %": {"compress": {"method": "topk"}},
    "random-k, 1 %": {"compress": {"method": "randomk"}},
    "random-k, 10 %": {"compress": {"method": "randomk", "fraction": 0.1}},
    "signs": {"compress": {"method": "sign"}},
    "local SGD, H = 30": {"name": "local_sgd", "every": 30},
    "DiLoCo, H = 30": {"name": "diloco", "every": 30},
    "DiLoCo, H = 30, int8": {"name": "diloco", "every": 30, "compress": {"method": "int8"}},
    "DiLoCo, H = 30, overlap": {"name": "diloco", "every": 30, "overlap": True},
}
ROW_HEIGHT, LABEL_WIDTH, BAR_WIDTH = 26, 190, 420


def train(sync, overrides, folder):
    """The held-out loss at the end, the tokens, and the trained parameters' shapes of a run."""
    shown = [
        f"run.dir={folder}/run", f"data.prepared_dir={folder.parent}/prepared", f"sync={json.dumps(sync)}",
        "train.eval_every=100000", "checkpoint.every_steps=100000", "train.log_every=100", *overrides,
    ]  # fmt: skip
    command = [sys.executable, "-m", "echelon", "train", str(ROOT / "recipes/demo.yaml"), *shown]
    subprocess.run([*command, "--nproc", str(PROCESSES)], check=True)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    [evaluated] = [row for row in rows if row["kind"] == "eval"]
    config = load_config(json.loads((folder / "run/model/config.json").read_text()))
    shapes = [tuple(each.shape) for each in build_on_meta(config).parameters()]
    return evaluated["loss"], steps[-1]["tokens"], len(steps), shapes


def measure(sync, overrides):
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        loss, tokens, steps, shapes = train(sync, overrides, Path(folder))
    plan = build_sync_plan(SyncConfig.model_validate(sync))
    agreements = -(-steps // plan.every)
    sent = agreements * count_sent_bytes(plan, shapes, PROCESSES)
    return {"loss": loss, "tokens": tokens, "steps": steps, "sent_bytes": sent}


def render_table(results):
    first = results["every_step"]
    lines = [
        f"{first['steps']} steps, {first['tokens']:,} tokens, {PROCESSES} processes. Bytes are those that each process "
        "sends to agree, by formulas that tests compare with "
        "the bytes of sockets.",
        "",
        "| Method | Sent, MB | Less than every_step | Held-out loss | Above every_step |",
        "|---|---|---|---|---|",
    ]
    for name, each in results.items():
        lines.append(
            f"| {name} | {each['sent_bytes'] / 1e6:,.1f} | {first['sent_bytes'] / each['sent_bytes']:.1f} x | "
            f"{each['loss']:.4f} | {each['loss'] / first['loss'] - 1:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def render_picture(results):
    """The losses as bars, from zero, with the bytes beside them: SVG."""
    scale = BAR_WIDTH / max(each["loss"] for each in results.values())
    width, height = LABEL_WIDTH + BAR_WIDTH + 170, ROW_HEIGHT * (len(results) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><title>Loss at equal tokens</title><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for number, (name, each) in enumerate(results.items()):
        y, length = ROW_HEIGHT * (number + 1), each["loss"] * scale
        parts.append(
            f'<text x="{LABEL_WIDTH - 8}" y="{y + 17}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="{LABEL_WIDTH}" y="{y + 4}" width="{length:.1f}" height="{ROW_HEIGHT - 8}" fill="#4878a8"/>'
            f'<text x="{LABEL_WIDTH + length + 6:.1f}" y="{y + 17}">{each["loss"]:.3f}, '
            f"{each['sent_bytes'] / 1e6:,.1f} MB sent</text>"
        )
    parts.append(f'<text x="{LABEL_WIDTH}" y="{height - 8}">held-out loss at equal tokens</text></svg>\n')
    return "\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(METHODS), default=list(METHODS))
    given = parser.parse_args()
    stored = given.out.with_suffix(".json")
    results = json.loads(stored.read_text()) if stored.exists() else {}
    (ROOT / "runs").mkdir(exist_ok=True)
    for name in given.only:
        if name not in results:
            results[name] = measure(METHODS[name], FULL if given.full else SMALL)
            stored.write_text(json.dumps(results, indent=1))
    ordered = {name: results[name] for name in METHODS if name in results}
    given.out.with_suffix(".md").write_text(render_table(ordered))
    given.out.with_suffix(".svg").write_text(render_picture(ordered))
    print(render_table(ordered))


if __name__ == "__main__":
    main()
