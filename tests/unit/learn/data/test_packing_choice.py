"""`data.packing: auto`: what a model can keep apart is packed; the choice is shown, and kept when a run resumes."""

import json
from dataclasses import replace

import pytest

import echelon.learn.model.traits
from echelon.cli.api.planning import plan
from echelon.ground.errors import ConfigError
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.memory import estimate_memory
from echelon.planner.plan_lines import describe_plan
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.setup import prepare_run
from tests.families import small_config
from tests.parity.training import MACHINE

RECIPE = {
    "run": {"name": "small"},
    "tokenizer": "bytes",
    "data": {"sequence_len": 32, "validation_fraction": 0.0, "prepare_workers": 1, "document_separator": None},
    "train": {"steps": 4, "global_batch_size": 4, "precision": "fp32", "compile": False},
    "optim": {"learning_rate": 1e-3},
    "parallel": "ddp",
}


def write(folder, family, **data):
    rows = [{"prompt": f"{number} ", "completion": f"is {number}"} for number in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{**row, "chosen": row["completion"], "rejected": "no"} for row in rows]
    for pair in pairs:
        del pair["completion"]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    config = small_config(family)
    recipe = {
        **RECIPE,
        "run": {"name": "small", "dir": str(folder / "run")},
        "model": {"config": config},
        "data": {**RECIPE["data"], "train": str(folder / "rows.jsonl"), **data},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return path


def start(path, *overrides):
    recipe, _ = load_recipe(path, overrides)
    prepared = prepare_run(recipe, False, lambda: Cluster(MACHINE, 1, 1, kind="cpu"), {})
    prepared.folder.unlock()
    return prepared


def stored_packing(prepared):
    return json.loads((prepared.folder.path / "data.json").read_text())["packing"]


@pytest.mark.parametrize(("family", "packs"), [("phi3", True), ("mamba", False)])
def test_samples_are_packed_if_the_model_keeps_them_apart(tmp_path, caplog, family, packs):
    caplog.set_level("INFO")
    assert stored_packing(start(write(tmp_path, family))) is packs
    notes = [line for line in caplog.messages if line.startswith("packing: none, each sample has a sequence")]
    assert len(notes) == (0 if packs else 1)
    assert all("this mamba model cannot keep" in line for line in notes)


def test_a_resumed_run_keeps_its_choice(tmp_path, monkeypatch):
    """Another version of transformers might make another choice; the order of the samples depends on it."""
    path = write(tmp_path, "mamba")
    assert stored_packing(start(path)) is False
    monkeypatch.setattr(echelon.learn.model.traits, "describe_obstacle", lambda traits, config: None)
    assert stored_packing(start(path)) is False
    (tmp_path / "other").mkdir()
    path = write(tmp_path / "other", "mamba")
    assert stored_packing(start(path)) is True


def test_packing_and_masks_that_are_asked_for_are_refused_with_the_fix(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.packing=true: this mamba model .*; set data\.packing=auto"):
        start(write(tmp_path, "mamba"), "data.packing=true")
    assert not (tmp_path / "prepared").exists()


def test_preference_pairs_work_without_a_mask_and_are_counted(tmp_path):
    """Two sequences for each pair: twice the activations, the same states."""
    path = write(tmp_path, "mamba")
    pairs = [f"data.train={tmp_path / 'pairs.jsonl'}", "objective.name=dpo", "train.micro_batch_size=2"]
    prepared = start(path, *pairs)
    assert prepared.plan.rows_per_sequence == 2
    assert any("the two answers run as sequences of their own" in line for line in describe_plan(prepared.plan))
    report = plan(load_recipe(path, pairs)[0], "1xH100")
    assert report.plan.rows_per_sequence == 2
    assert any("data.packing=auto: samples are not packed, because this mamba model" in line for line in report.lines)
    masked = estimate_memory(report.shape, replace(report.plan, rows_per_sequence=1))
    assert report.memory.states == masked.states
    assert report.memory.activations == pytest.approx(2 * masked.activations, rel=0.05)


def test_the_plan_says_nothing_of_a_model_that_keeps_documents_apart(tmp_path):
    report = plan(load_recipe(write(tmp_path, "phi3"))[0], "1xH100")
    assert not any("packing" in line for line in report.lines) and report.plan.rows_per_sequence == 1
