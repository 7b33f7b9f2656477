"""The tables of the documentation are complete, and their numbers equal those of the planner and of tested formulas."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from echelon.cli.api.quoting import PUBLISHED_HIGH, PUBLISHED_LOW
from echelon.planner.choose import MEMORY_HEADROOM, resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.hardware.instances import cluster_of, find_instance
from echelon.planner.memory import estimate_memory
from echelon.planner.plan import ParallelPlan
from echelon.planner.rates import GPU_RATES
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe.difference import RESUMABLE
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.training.metrics import StepMetrics, train_row
from parity_table import RESULTS, render_page, split_rows
from planner_accuracy import (
    Case,
    estimate,
    plan_as_echelon,
    render_error_bar,
    render_memory,
    render_time,
    score_shipped,
)
from published import read_rows
from published_fits import report_fits
from published_memory import score_memory
from tests.parity.parity_rows import COVERING, FULL, OPTIMIZERS, PRECISIONS
from tests.parity.published_rows import read_measured
from tests.parity.training import HALF_LOSS, HALF_NORM, LOSS, NORM, bounds
from traffic import expect_traffic

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
MEMORY = (ROOT / "docs" / "memory-and-traffic.md").read_text(encoding="utf-8")
FOLDER = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
CHECKPOINTS = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
RECIPE = ROOT / "recipes" / "pretrain-1.3b.yaml"

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "total")
ROWS = {
    "DDP": ["parallel=ddp"],
    "ZeRO-1": ["parallel=zero1"],
    "ZeRO-2": ["parallel=zero2"],
    "FSDP": ["parallel=fsdp"],
    "HSDP, 2 x 4": ["parallel=hsdp"],
    "FSDP, selective": ["parallel=fsdp", "train.activation_checkpointing=selective"],
    "FSDP, full": ["parallel=fsdp", "train.activation_checkpointing=full"],
    "FSDP, offloaded": ["parallel={dp_shard: auto, cpu_offload: true}"],
}


def render_row(name: str, overrides: list[str]) -> str:
    recipe, _ = load_recipe(RECIPE, overrides)
    assert recipe.model.config is not None
    shape = build_shape({**recipe.model.config, "vocab_size": 32000})
    plan = resolve_plan(recipe, shape, parse_devices("8xH100"))
    estimate = estimate_memory(shape, plan)
    memory = [f"{getattr(estimate, part) / 2**30:.2f}" for part in PARTS]
    sent = expect_traffic(plan, shape).sent_bytes(plan) / 1e9
    return f"| {name} | {' | '.join(memory)} | {sent:.1f} |"


@pytest.mark.parametrize("name", ROWS)
def test_the_worked_example(name: str) -> None:
    assert render_row(name, ROWS[name]) in MEMORY


def test_bytes_per_parameter() -> None:
    """The rule of thumb of the page, on a model so deep that the size of one layer is negligible."""
    fields = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2000, "vocab_size": 64}
    shape = build_shape({"model_type": "llama", **fields, "num_attention_heads": 1, "max_position_embeddings": 64})
    sharded = {"dp_shard": 8, "num_microbatches": 2}
    plans = {
        "DDP": ParallelPlan("ddp", dp_replicate=8, num_microbatches=2),
        "ZeRO-1": ParallelPlan("zero1", **sharded),
        "ZeRO-2": ParallelPlan("zero2", **sharded, reduce_gradients="each"),
        "FSDP": ParallelPlan("fsdp", **sharded, reduce_gradients="each", reshard_after_forward=True),
    }
    for name, plan in plans.items():
        shown = re.search(rf"^\| {name} \|.*\| ([\d.]+) \| ([\d.]+) \|$", MEMORY, re.MULTILINE)
        assert shown is not None, name
        bf16 = resolve_precision(plan)
        for figure, each in zip(shown.groups(), (plan, bf16), strict=True):
            needed = estimate_memory(shape, replace(each, sequence_len=64)).states / shape.num_parameters
            assert needed == pytest.approx(float(figure), rel=0.01), name


def resolve_precision(plan: ParallelPlan) -> ParallelPlan:
    return ParallelPlan.from_dict({**plan.to_dict(), "precision": {**BF16}})


BF16 = {
    "param": "float32", "compute": "bfloat16", "reduce": "float32", "master": "float32", "optimizer": "float32",
    "rounding": "nearest", "float8": False, "float8_scaling": "tensorwise",
}  # fmt: skip


def test_the_parity_table_is_described_correctly() -> None:
    assert f"{len(COVERING)} of its {len(FULL):,} rows" in PAGE
    assert (LOSS, NORM, HALF_LOSS, HALF_NORM) == (2e-5, 1e-4, 2e-2, 5e-2)
    assert "| fp32 | 2e-5 | 1e-4 |" in PAGE and "| bf16 | 2e-2 | 5e-2 |" in PAGE


def test_every_key_of_a_row_is_explained() -> None:
    row = train_row(
        StepMetrics(
            0, 1.0, None, None, 1.0, True, None, 0.1, 1, 1, "0" * 16, 0.0, 0.0, 0.0, [], *[None] * 2, False, 0, None
        )
    )
    assert set(re.findall(r"^\| `(\w+)` \|", FOLDER, re.MULTILINE)) >= set(row)


def test_every_key_that_a_resume_may_change_is_listed() -> None:
    [table] = re.findall(r"^\| May differ \|.*?\n\n", CHECKPOINTS, re.MULTILINE | re.DOTALL)
    lengths = {"train.steps", "train.tokens", "train.epochs"}
    assert set(re.findall(r"`([\w.]+)`", table)) == set(RESUMABLE) | lengths


def test_every_file_of_a_run_is_explained() -> None:
    folder = RunFolder(Path("run"))
    for path in (folder.recipe_path, folder.plan_path, folder.estimate_path, folder.environment_path, folder.data_path,
                 folder.metrics_path, folder.events_path, folder.outcome_path):  # fmt: skip
        assert f"| `{path.name}` |" in FOLDER
    assert f"| `{folder.model_dir.name}/` |" in FOLDER


def test_the_parity_page_shows_the_measurements() -> None:
    """The page contains only measurements of the parity tests, all within the current bounds."""
    strategies, divided = split_rows(read_measured([RESULTS]))
    assert (ROOT / "docs" / "parity.md").read_text(encoding="utf-8") == render_page(strategies, divided)
    rows = {str(row): row for row in (*FULL, *COVERING, *OPTIMIZERS, *PRECISIONS)}
    assert all(each.name in rows for each in strategies)
    for each in (*strategies, *divided):
        loss, norm = bounds(each.row)
        assert each.equal and each.difference.loss <= loss and each.difference.norm <= norm, each.name


SEQUENCES = (Path(__file__).parents[2] / "docs" / "context-parallelism.md").read_text(encoding="utf-8")
METHODS = ("allgather", "ulysses", "ring")
CLUSTER = cluster_of(find_instance("p5.48xlarge"), 1)
ROOMY = replace(CLUSTER, accelerator=replace(CLUSTER.accelerator, memory_bytes=None))
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 1048576,
}  # fmt: skip
LENGTHS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SEQUENCES.partition("## Plans for long sequences")[2].splitlines()
    if re.match(r"\| [\d,]+ \||\| [\d,]+, with", line)
]


@cache
def plan(length, method, tiles, offloads):
    """GiB of a process, and seconds of a step."""
    shape = build_shape(LLAMA)
    train = {
        "steps": 10, "global_batch_size": 1, "precision": "bf16", "activation_offloading": offloads,
        "activation_checkpointing": {"mlp_tiles": 8} if tiles else "full",
    }  # fmt: skip
    recipe = Recipe.model_validate({
        "run": {"name": "long"}, "model": {"config": LLAMA}, "tokenizer": "bytes", "train": train,
        "data": {"train": "text.txt", "sequence_len": length}, "optim": {"learning_rate": 1e-4},
        "parallel": {"cp": 8, "cp_method": method},
    })  # fmt: skip
    found = resolve_plan(recipe, shape, ROOMY)
    return estimate_memory(shape, found).total / 2**30, estimate_time(shape, found, CLUSTER).total


@pytest.mark.parametrize("row", LENGTHS, ids=lambda row: row[0])
def test_a_row_of_the_table(row):
    length, offloads = int(row[0].split(", with")[0].replace(",", "")), "offloading" in row[0]
    found = {method: plan(length, method, False, offloads) for method in METHODS}
    usable = CLUSTER.accelerator.memory_bytes * (1 - MEMORY_HEADROOM) / 2**30
    tiled = plan(length, "ulysses", True, offloads)[0]
    for cell, memory in zip(row[1:4], (found["allgather"][0], found["ulysses"][0], tiled), strict=True):
        assert float(cell.split(":")[0]) == pytest.approx(memory, abs=0.06), row
        assert ("does not fit" in cell) == (memory > usable), row
    assert found["ring"][0] == pytest.approx(found["ulysses"][0], abs=0.06)
    for cell, method in zip(row[4:7], METHODS, strict=True):  # a tenth: what a step takes is predicted anew often
        assert float(cell) == pytest.approx(found[method][1], rel=0.1), (row, method)


def test_all_rows_are_read():
    assert len(LENGTHS) == 4


ACCURACY = (ROOT / "docs" / "planner-accuracy.md").read_text(encoding="utf-8")
REPORT = (ROOT / "benchmarks" / "results" / "planner-accuracy.md").read_text(encoding="utf-8")


def read_table(title):
    """The lines of the table below a heading of the report."""
    lines = REPORT.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    end = next((number for number in range(start, len(lines)) if not lines[number].startswith("|")), len(lines))
    return lines[start:end]


def read_timed():
    return [each for each in read_rows() if isinstance(each, Case) and each.seconds is not None]


def test_the_page_has_the_tables_of_the_report():
    for title in ("Step time", "Memory of each source's program", "Memory: which runs fit"):
        assert "\n".join(read_table(title)) in ACCURACY, title


def test_the_report_is_that_of_this_planner():
    """All but the constants that were fitted without a source, which take minutes: its columns 7 and 8."""
    timed = read_timed()
    own = score_shipped(timed, lambda case: estimate(case, GPU_RATES))
    planned = score_shipped(timed, plan_as_echelon)
    now = render_time(planned, own, own)
    assert [line.split("|")[:7] for line in read_table("Step time")] == [line.split("|")[:7] for line in now]
    assert render_error_bar(planned) in REPORT
    kept, _ = score_memory([each for each in read_rows() if isinstance(each, Case)])
    assert read_table("Memory of each source's program") == render_memory(kept)
    assert "\n".join(report_fits(timed)).strip() in REPORT


def test_the_error_bar_of_a_quote_is_that_of_the_report():
    words = f"10th percentile {PUBLISHED_LOW:.2f}, 90th percentile {PUBLISHED_HIGH:.2f}."
    assert words in REPORT
    assert f"between {PUBLISHED_LOW:.2f} and {PUBLISHED_HIGH:.2f} times as long" in (ROOT / "docs/cost.md").read_text()
