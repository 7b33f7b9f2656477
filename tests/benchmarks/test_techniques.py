"""benchmarks/techniques.py: every row is a plan that `echelon train` accepts, and the page has what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import techniques
from techniques import GROUPS, SIZES, plan_row, render_page

ROOT = Path(__file__).parents[2]
ROWS = [(group, row) for group in GROUPS for row in GROUPS[group].rows]


@pytest.mark.parametrize("size", SIZES.values(), ids=[f"{size} {device}" for size, device in SIZES])
def test_every_row_trains_the_same_batch_on_the_processes_of_its_group(size):
    for name, group in GROUPS.items():
        for row in group.rows:
            device = "cuda" if group.needs_gpu else "cpu"
            _, plan, memory = plan_row(group, row, size, device)
            assert (plan.world_size, plan.global_batch_size) == (group.processes, size.batch), (name, row)
            assert plan.micro_batch_size == size.micro_batch and memory.total > 0
            assert plan.compile == (name == "compiled")


def test_ratios_are_those_of_a_round_and_the_largest_rank(monkeypatch):
    monkeypatch.setattr(techniques, "DEVICE", "cpu")
    rows = {
        "ddp": {"planned": 90e6, "peaks": [100e6, 100e6], "seconds": [1.0, 2.0, 4.0]},
        "tp 2": {"planned": 60e6, "peaks": [50e6, 60e6], "seconds": [1.5, 3.0, 8.0]},
    }
    found = {"tensors": {"machine": "a machine", "rounds": 3, "steps": 1, "rows": rows}}
    page = render_page(found, SIZES["full", "cpu"])
    assert "| ddp | 100 | 90 | 1.00 | 2.000 | 1.00 |" in page
    assert "| tp 2 | 60 | 60 | 0.60 | 3.000 | 1.50 (1.50 to 2.00) |" in page
    assert GROUPS["tensors"].title in page and GROUPS["experts"].title not in page


@pytest.mark.slow
def test_a_tiny_run_measures_every_row_in_turns(tmp_path):
    """In two calls, whose groups come together on one page."""
    for group in ("checkpointing", "products"):
        command = [sys.executable, "benchmarks/techniques.py", group, "--size", "tiny", "--rounds", "2", "--out",
                   str(tmp_path / "page")]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
    found = json.loads((tmp_path / "page.json").read_text())
    assert list(found) == ["checkpointing", "products"]
    for name, measured in found.items():
        assert list(measured["rows"]) == list(GROUPS[name].rows)
        for row in measured["rows"].values():
            assert len(row["peaks"]) == GROUPS[name].processes and len(row["seconds"]) == 2
            assert max(row["peaks"]) > 0 and min(row["seconds"]) > 0
    products = {name: max(row["peaks"]) for name, row in found["products"]["rows"].items()}
    assert products["tp 2 x pp 2"] < products["ddp"] and products["fsdp"] < products["ddp"]
    assert "tp 2 x pp 2" in (tmp_path / "page.md").read_text()
