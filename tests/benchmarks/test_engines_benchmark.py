"""benchmarks/engines.py: every row is a plan of its engine, and the page has what was measured."""

import json
from pathlib import Path

import pytest

from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.shape import build_shape
from echelon.recipe.load import load_recipe
from engines import PROCESSES, ROWS, SIZES, render_page, write_work


@pytest.mark.parametrize("name", ROWS)
def test_every_row_trains_the_same_batch(tmp_path: Path, name: str) -> None:
    engine, overrides = ROWS[name]
    write_work(tmp_path, SIZES["full"], 24)
    recipe, _ = load_recipe(tmp_path / "recipe.json", [f"engine={engine}", *overrides])
    plan = resolve_plan(
        recipe, build_shape({**recipe.model.config, "vocab_size": 256}), parse_devices(f"{PROCESSES}xcpu")
    )
    assert (plan.world_size, plan.global_batch_size, plan.num_microbatches) == (2, 8, 1)
    assert not plan.compile and name.endswith(overrides[-1].partition("=")[2])


def test_ratios_are_those_of_a_round() -> None:
    rows = {
        "native, ddp": {"rates": [100.0, 200.0, 400.0], "peaks": [2**20], "difference": 0.0},
        "horovod, ddp": {"rates": [50.0, 150.0, 240.0], "peaks": [2**21], "difference": 2e-7},
    }
    result = {"machine": "a machine", "versions": ["torch 1"], "steps": 24, "size": "full", "rows": rows}
    page = render_page(json.loads(json.dumps(result)))
    assert "| native, ddp | 200 (100 to 400) | 1.00 (1.00 to 1.00) | 1 | 0.0e+00 |" in page
    assert "| horovod, ddp | 150 (50 to 240) | 0.60 (0.50 to 0.75) | 2 | 2.0e-07 |" in page
    assert "3 rounds of 24 steps" in page


def test_the_documentation_has_the_published_figures() -> None:
    root = Path(__file__).parents[2]
    published = root / "benchmarks" / "results" / "engines-cpu"
    page = render_page(json.loads(published.with_suffix(".json").read_text()))
    assert published.with_suffix(".md").read_text() == page
    table = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + len(ROWS)
    documentation = (root / "docs" / "engines.md").read_text(encoding="utf-8")
    assert "\n".join([table[0], "|---|---|---|---|---|", *table[1:]]) in documentation
