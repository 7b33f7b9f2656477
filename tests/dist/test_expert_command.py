"""`echelon train` with expert parallelism on CPUs is the single process's run, and exports the same model."""

import json

import pytest
from safetensors.torch import load_file

from tests.dist.command import read_lines, write_recipe
from tests.parity.training import LOSS, NORM

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MODEL = {
    "config": {
        "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.1, "max_position_embeddings": 64,
    },
}  # fmt: skip
TRAIN = {"steps": 6, "global_batch_size": 8, "eval_every": 3, "precision": "fp32", "log_every": 1}


def run(echelon, folder, name, processes, *overrides):
    """Train under a name and export; the rows of its metrics."""
    write_recipe(folder, model=MODEL, train=TRAIN, evaluate={"batches": 1})
    ending = echelon("train", "recipe.json", "--nproc", processes, f"run.name={name}", *overrides)
    assert ending.code == 0, ending.err
    assert echelon("export", f"runs/{name}", f"exported-{name}").code == 0
    return read_lines(folder / "runs" / name / "metrics.jsonl")


def test_it_is_the_run_of_one_process(echelon, tmp_path):
    expected = run(echelon, tmp_path, "one", 1)
    for name, processes, parallel in (("two", 2, "{dp_shard: 2, ep: 2}"), ("four", 4, "{dp_shard: 4, ep: 2}")):
        rows = run(echelon, tmp_path, name, processes, f"parallel={parallel}", "train.micro_batch_size=2")
        for ours, theirs in zip(rows, expected, strict=True):
            assert ours["kind"] == theirs["kind"] and ours["loss"] == pytest.approx(theirs["loss"], abs=LOSS)
            if ours["kind"] == "train":
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=NORM)
                assert ours["expert_load"] == pytest.approx(theirs["expert_load"], rel=0.05)
                assert [ours[key] for key in ("batch_hash", "tokens")] == [
                    theirs[key] for key in ("batch_hash", "tokens")
                ]
        ours, theirs = (load_file(tmp_path / f"exported-{each}" / "model.safetensors") for each in (name, "one"))
        assert ours.keys() == theirs.keys()
        assert max((ours[each] - theirs[each]).abs().max().item() for each in theirs) < 1e-4


def test_documents_of_any_length_train_alike(echelon, tmp_path):
    """Padded to the full width, so that each process knows how many rows the others can need."""
    records = [{"prompt": f"{n} plus {n} is ", "completion": f"{2 * n}" + " so" * (n % 7)} for n in range(300)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    data = ("data.train=sums.jsonl", "data.packing=false", "data.document_separator=null")
    expected = run(echelon, tmp_path, "one", 1, *data)
    rows = run(echelon, tmp_path, "two", 2, *data, "parallel={dp_shard: 2, ep: 2}", "train.micro_batch_size=2")
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=LOSS)
        assert (ours.get("batch_hash"), ours.get("tokens")) == (theirs.get("batch_hash"), theirs.get("tokens"))
