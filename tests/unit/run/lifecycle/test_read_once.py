"""The preparation of a run loads its tokenizer, reads its config and tries its model once, for all checks and data."""

import json
from collections import Counter
from functools import wraps

import pytest
import transformers

import echelon.learn.model.build
import echelon.learn.model.traits
from echelon.learn.data.tokenizer import build_bytes_tokenizer
from echelon.planner.hardware.accelerators import Cluster
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle import model_checks
from echelon.run.lifecycle.setup import prepare_run
from tests.families import small_model
from tests.parity.training import MACHINE

RECIPE = {
    "run": {"name": "small"},
    "data": {"sequence_len": 32, "validation_fraction": 0.2, "prepare_workers": 1, "document_separator": None},
    "train": {"steps": 4, "global_batch_size": 4, "precision": "fp32", "compile": False},
    "optim": {"learning_rate": 1e-3},
    "evaluate": {"prompts": ["7 "], "prompt_tokens": 4},
    "parallel": "ddp",
}


def write(folder, family="granite", **sections):
    """Write a recipe that trains an HF folder on prompts with answers."""
    small_model(family).save_pretrained(folder / "base")
    build_bytes_tokenizer().save_pretrained(folder / "base")
    rows = [{"prompt": f"{number} ", "completion": f"is {number}"} for number in range(40)]
    if sections:
        rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = {
        **RECIPE,
        **sections,
        "model": {"checkpoint": str(folder / "base")},
        "data": {**RECIPE["data"], "train": str(folder / "rows.jsonl"), "prepared_dir": str(folder / "prepared")},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return path


def prepare(path, run):
    recipe, _ = load_recipe(path, [f"run.dir={path.parent / run}"])
    prepare_run(recipe, False, lambda: Cluster(MACHINE, 1, 1, kind="cpu"), {}).folder.unlock()


@pytest.fixture
def calls(monkeypatch):
    """How often each of the functions that read the files of a model was called."""
    counts = Counter()

    def count(place, name):
        function = getattr(place, name)

        @wraps(function)
        def counted(*arguments, **options):
            counts[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(place, name, counted)

    count(transformers.AutoTokenizer, "from_pretrained")
    count(echelon.learn.model.build, "load_config")
    count(model_checks, "_read_checkpoint_fields")
    count(echelon.learn.model.traits, "find_traits")
    return counts


ONCE = {"from_pretrained": 1, "load_config": 1, "_read_checkpoint_fields": 1, "find_traits": 1}


@pytest.mark.parametrize("sections", [{}, {"objective": {"name": "dpo"}}], ids=["answers", "pairs"])
def test_a_start_and_a_resume_read_each_file_once(tmp_path, calls, sections):
    path = write(tmp_path, **sections)
    prepare(path, "earlier")  # from here on the data is prepared
    for run in ("new", "new"):
        calls.clear()
        prepare(path, run)
        assert calls == ONCE, run


def test_a_model_of_a_known_family_is_not_tried_before_it_is_built(tmp_path, calls):
    path = write(tmp_path, "llama")
    prepare(path, "earlier")
    calls.clear()
    prepare(path, "new")
    assert calls == {"from_pretrained": 1, "_read_checkpoint_fields": 1}
