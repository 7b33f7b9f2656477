"""`echelon train` with a pipeline on CPUs is the single process's run, and what it leaves is a run like any other."""

import json

import pytest
from safetensors.torch import load_file

from tests.dist.command import read_lines, write_recipe
from tests.parity.training import LOSS, NORM

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MODEL = {
    "config": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip
TRAIN = {"steps": 6, "global_batch_size": 8, "eval_every": 3, "precision": "fp32", "log_every": 1}


def run(echelon, folder, name, processes, *overrides):
    """Train under a name; the ending of the command and the rows of its metrics."""
    records = [{"prompt": f"{n} plus {n} is ", "completion": f"{2 * n}" + " so" * (n % 7)} for n in range(300)]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    write_recipe(folder, model=MODEL, train=TRAIN, evaluate={"batches": 1, "prompts": ["1 plus "], "prompt_tokens": 4})
    ending = echelon("train", "recipe.json", "--nproc", processes, f"run.name={name}", *overrides)
    assert ending.code == 0, ending.err
    return ending, read_lines(folder / "runs" / name / "metrics.jsonl")


def assert_same(rows, expected):
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours["kind"] == theirs["kind"] and ours["loss"] == pytest.approx(theirs["loss"], abs=LOSS)
        if ours["kind"] == "train":
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=NORM)
            assert [ours[key] for key in ("batch_hash", "tokens", "target_tokens")] == [
                theirs[key] for key in ("batch_hash", "tokens", "target_tokens")
            ]


def test_it_is_the_run_of_one_process(echelon, tmp_path):
    _, expected = run(echelon, tmp_path, "one", 1)
    plans = (("pp", 2, "{pp: 2}"), ("data", 4, "{pp: 2, dp_replicate: 2}"), ("tensors", 4, "{pp: 2, tp: 2}"))
    for name, processes, parallel in plans:
        ending, rows = run(echelon, tmp_path, name, processes, f"parallel={parallel}", "train.micro_batch_size=2")
        assert_same(rows, expected)
        assert "pipeline: stages of 2 and 2 layers" in ending.out
        assert "pipeline: the processes waited for other stages in " in ending.out
        samples = [(tmp_path / "runs" / each / "samples.jsonl").read_text() for each in ("one", name)]
        assert samples[0] == samples[1]


def test_it_is_exported_and_evaluated(echelon, tmp_path):
    run(echelon, tmp_path, "one", 1)
    run(echelon, tmp_path, "pp", 2, "parallel={pp: 2}", "train.micro_batch_size=2", "checkpoint.every=3")
    assert echelon("export", "runs/pp", "exported").code == 0
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_hidden_layers"] == 4
    evaluated = [json.loads(echelon("eval", each, "--json").out)["loss"] for each in ("runs/pp", "runs/one")]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=LOSS)


def test_its_adapter_is_exported_from_all_stages(echelon, tmp_path):
    adapter = "adapter={method: lora, r: 4}"
    run(echelon, tmp_path, "one", 1, adapter)
    run(echelon, tmp_path, "pp", 2, adapter, "parallel={pp: 2}", "train.micro_batch_size=2")
    ours, expected = (
        load_file(tmp_path / "runs" / name / "export" / "adapter_model.safetensors") for name in ("pp", "one")
    )
    assert ours.keys() == expected.keys()
    assert max((ours[name] - each).abs().max() for name, each in expected.items()) < 1e-4


@pytest.mark.parametrize("packing", ["true", "false"])
def test_documents_of_any_length_train_alike(echelon, tmp_path, packing):
    """Padded to one width, which a schedule needs; on one process each microbatch is as wide as its longest sample."""
    data = ("data.train=sums.jsonl", f"data.packing={packing}", "evaluate.prompts=[]", "data.document_separator=null")
    _, expected = run(echelon, tmp_path, "one", 1, *data)
    _, rows = run(echelon, tmp_path, "pp", 2, *data, "parallel={pp: 2}", "train.micro_batch_size=2")
    assert_same(rows, expected)
