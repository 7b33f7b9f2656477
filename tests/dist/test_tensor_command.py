"""`echelon train` with tensor parallelism: the losses and batches of one process, and a model that is exported."""

import json

import pytest
from safetensors.torch import load_file

from tests.dist.command import read_lines, write_recipe
from tests.families import small_config

pytestmark = [pytest.mark.dist, pytest.mark.slow]

PLANS = {"tp": ({"tp": 2}, 2), "tp-fsdp": ({"tp": 2, "dp_shard": 2, "sequence_parallel": True}, 4)}


def train(echelon, folder, name, parallel, nproc):
    changes = [f"run.name={name}", f"parallel={json.dumps(parallel)}", "train.eval_every=3"]
    ending = echelon(
        "train",
        "recipe.json",
        *changes,
        'evaluate={prompts: ["1 plus"], prompt_tokens: 5, batches: 1}',
        "--nproc",
        nproc,
    )
    assert ending.code == 0, ending.err
    return ending.out, read_lines(folder / "runs" / name / "metrics.jsonl")


def test_from_the_command_line(echelon, tmp_path):
    write_recipe(tmp_path)
    _, expected = train(echelon, tmp_path, "one", "ddp", 1)
    for name, (parallel, nproc) in PLANS.items():
        out, rows = train(echelon, tmp_path, name, parallel, nproc)
        assert "tp 2)" in out
        for ours, theirs in zip(rows, expected, strict=True):
            assert (ours["kind"], ours["step"]) == (theirs["kind"], theirs["step"])
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-5)
            assert [ours.get(key) for key in ("batch_hash", "tokens")] == [
                theirs.get(key) for key in ("batch_hash", "tokens")
            ]
        samples = [read_lines(tmp_path / "runs" / run / "samples.jsonl")[-1] for run in (name, "one")]
        assert samples[0] == samples[1]
        assert echelon("export", f"runs/{name}", f"exported-{name}").code == 0
    assert echelon("export", "runs/one", "exported-one").code == 0
    for name in PLANS:
        ours, theirs = (load_file(tmp_path / f"exported-{run}" / "model.safetensors") for run in (name, "one"))
        assert ours.keys() == theirs.keys()
        assert max((ours[each] - theirs[each]).abs().max().item() for each in theirs) < 1e-4


def test_a_mixture_of_experts_from_the_command_line(echelon, tmp_path):
    write_recipe(tmp_path, model={"config": small_config("mixtral")})
    losses = {}
    for name, parallel, nproc in (
        ("one", "ddp", 1),
        ("tp", {"tp": 2}, 2),
        ("ep", {"tp": 2, "dp_shard": 2, "ep": 2}, 4),
    ):
        _, rows = train(echelon, tmp_path, name, parallel, nproc)
        losses[name] = [row["loss"] for row in rows]
        assert echelon("export", f"runs/{name}", f"exported-{name}").code == 0
        ours, theirs = (load_file(tmp_path / f"exported-{run}" / "model.safetensors") for run in (name, "one"))
        assert max((ours[each] - theirs[each]).abs().max().item() for each in theirs) < 1e-4
        assert losses[name] == pytest.approx(losses["one"], abs=2e-5)


def test_a_model_without_a_plan_is_refused_before_any_data_is_read(echelon, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "attn_pdrop": 0}
    write_recipe(tmp_path, model={"config": config})
    ending = echelon("train", "recipe.json", "parallel={tp: 2}", "--nproc", "2")
    assert ending.code == 2 and "declares no tensor-parallel plan for gpt2" in ending.err
    assert not (tmp_path / "runs").exists()
