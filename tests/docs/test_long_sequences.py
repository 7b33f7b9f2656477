"""The table of docs/context-parallelism.md about long sequences has the figures of the plan, for each method."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from echelon.planner.choose import MEMORY_HEADROOM, resolve_plan
from echelon.planner.hardware.instances import cluster_of, find_instance
from echelon.planner.memory import estimate_memory
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe.document import Recipe

PAGE = (Path(__file__).parents[2] / "docs" / "context-parallelism.md").read_text(encoding="utf-8")
METHODS = ("allgather", "ulysses", "ring")
CLUSTER = cluster_of(find_instance("p5.48xlarge"), 1)
ROOMY = replace(CLUSTER, accelerator=replace(CLUSTER.accelerator, memory_bytes=None))
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 1048576,
}  # fmt: skip
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Plans for long sequences")[2].splitlines()
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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
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
    assert len(ROWS) == 4
