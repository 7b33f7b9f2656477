"""`echelon train` with context parallelism: the run of one process, from the command line."""

import json
from pathlib import Path

import pytest

from tests.dist.command import CommandLine, assert_no_orphan, read_lines, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]

KEYS = ("step", "tokens", "target_tokens", "batch_hash", "skipped")


@pytest.fixture
def echelon(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHELON_TEST_MARK", str(tmp_path))
    yield CommandLine(capfd, monkeypatch)
    assert_no_orphan()


def test_a_run_with_divided_sequences_is_that_of_one_process(echelon, tmp_path):
    prompts = {"batches": 1, "prompts": ["1 plus 1 is"], "prompt_tokens": 8}
    write_recipe(tmp_path, evaluate=prompts, train={"eval_every": 3, "global_batch_size": 4})
    plans = {
        "one": ("auto", 1),
        "two": ("{cp: 2}", 2),
        "heads": ("{cp: 2, cp_method: ulysses}", 2),
        "four": ("{cp: 2, dp_shard: 2}", 4),
    }
    found = {}
    for name, (parallel, ranks) in plans.items():
        ending = echelon("train", "recipe.json", f"run.name={name}", f"parallel={parallel}", "--nproc", ranks)
        assert ending.code == 0, ending.err
        run = Path("runs") / name
        found[name] = read_lines(run / "metrics.jsonl"), read_lines(run / "samples.jsonl")
        plan = json.loads((run / "plan.json").read_text())
        assert name == "one" or (plan["cp"], plan["cp_method"]) == (2, "ulysses" if name == "heads" else "allgather")
    expected, texts = found.pop("one")
    for rows, samples in found.values():
        assert len(rows) == len(expected) and samples == texts
        for ours, right in zip(rows, expected, strict=True):
            assert ours["loss"] == pytest.approx(right["loss"], abs=2e-5)
            assert [ours.get(key) for key in KEYS] == [right.get(key) for key in KEYS]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}, "this mamba model cannot have its seq"),
        ({"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2}, "this bloom model cannot have its seq"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_before_anything_is_written(echelon, tmp_path, model, words):
    recipe = json.loads(write_recipe(tmp_path).read_text())
    recipe["model"] = {"config": model}
    recipe["parallel"] = {"cp": 2}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    ending = echelon("train", "recipe.json", "--nproc", 2)
    assert ending.code == 2 and words in ending.err and "Traceback" not in ending.err
    assert not Path("runs").exists()
