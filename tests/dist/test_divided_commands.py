"""`echelon train` of a divided model on CPUs: the run of one process, which is exported like any other.

The model is divided by tensors (tp), stages (pp), experts (ep), its sequences (cp), and several of them.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.dist.command import read_lines, write_recipe
from tests.families import small_config
from tests.parity.training import LOSS, NORM

pytestmark = [pytest.mark.dist, pytest.mark.slow]

DENSE = {
    "config": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip
MIXTURE = {
    "config": {
        "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.1, "max_position_embeddings": 64,
    },
}  # fmt: skip
TRAIN = {"steps": 6, "global_batch_size": 8, "eval_every": 3, "precision": "fp32", "log_every": 1}
PROMPTS = {"batches": 1, "prompts": ["1 plus "], "prompt_tokens": 4}
LENGTHS = ("data.train=sums.jsonl", "data.document_separator=null")  # documents of any length
EXACT = ("kind", "step", "batch_hash", "tokens", "target_tokens", "skipped")


@pytest.fixture
def run(echelon, tmp_path):
    """Train under a name; the ending of the command and the rows of its metrics."""
    records = [{"prompt": f"{n} plus {n} is ", "completion": f"{2 * n}" + " so" * (n % 7)} for n in range(300)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))

    def start(name, processes, *overrides):
        ending = echelon("train", "recipe.json", "--nproc", processes, f"run.name={name}", *overrides).succeeded()
        return ending, read_lines(tmp_path / "runs" / name / "metrics.jsonl")

    return start


def assert_same(rows, expected):
    for ours, theirs in zip(rows, expected, strict=True):
        assert [ours.get(key) for key in EXACT] == [theirs.get(key) for key in EXACT]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=LOSS)
        if ours["kind"] == "train":
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=NORM)


def assert_same_weights(*paths):
    ours, theirs = (load_file(path) for path in paths)
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - value).abs().max().item() for name, value in theirs.items()) < 1e-4


def export(echelon, name):
    assert echelon("export", f"runs/{name}", f"exported-{name}").code == 0
    return Path(f"exported-{name}") / "model.safetensors"


def samples_of(name):
    return read_lines(Path("runs") / name / "samples.jsonl")


def test_a_pipeline_is_the_run_of_one_process(run, tmp_path):
    write_recipe(tmp_path, model=DENSE, train=TRAIN, evaluate=PROMPTS)
    _, expected = run("one", 1)
    plans = (("pp", 2, "{pp: 2}"), ("data", 4, "{pp: 2, dp_replicate: 2}"), ("tensors", 4, "{pp: 2, tp: 2}"))
    for name, processes, parallel in plans:
        ending, rows = run(name, processes, f"parallel={parallel}", "train.micro_batch_size=2")
        assert_same(rows, expected)
        assert "pipeline: stages of 2 and 2 layers" in ending.out
        assert "pipeline: the processes waited for other stages in " in ending.out
        assert samples_of(name) == samples_of("one")


def test_a_pipeline_is_exported_and_evaluated(run, echelon, tmp_path):
    write_recipe(tmp_path, model=DENSE, train=TRAIN, evaluate=PROMPTS)
    run("one", 1)
    run("pp", 2, "parallel={pp: 2}", "train.micro_batch_size=2", "checkpoint.every=3")
    assert echelon("export", "runs/pp", "exported").code == 0
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_hidden_layers"] == 4
    evaluated = [json.loads(echelon("eval", each, "--json").out)["loss"] for each in ("runs/pp", "runs/one")]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=LOSS)


def test_an_adapter_is_exported_from_all_stages(run, tmp_path):
    write_recipe(tmp_path, model=DENSE, train=TRAIN, evaluate=PROMPTS)
    adapter = "adapter={method: lora, r: 4}"
    run("one", 1, adapter)
    run("pp", 2, adapter, "parallel={pp: 2}", "train.micro_batch_size=2")
    assert_same_weights(*(Path("runs") / name / "export" / "adapter_model.safetensors" for name in ("pp", "one")))


@pytest.mark.parametrize(
    ("model", "packing", "parallel"),
    [(DENSE, "true", "{pp: 2}"), (DENSE, "false", "{pp: 2}"), (MIXTURE, "false", "{dp_shard: 2, ep: 2}")],
)
def test_documents_of_any_length_train_alike(run, tmp_path, model, packing, parallel):
    """Padded to one width, which a schedule of stages needs, and by which each process knows how many rows the others
    can need for their experts; on one process each microbatch is as wide as its longest sample."""
    write_recipe(tmp_path, model=model, train=TRAIN, evaluate={"batches": 1})
    _, expected = run("one", 1, *LENGTHS, f"data.packing={packing}")
    _, rows = run("two", 2, *LENGTHS, f"data.packing={packing}", f"parallel={parallel}", "train.micro_batch_size=2")
    assert_same(rows, expected)


def test_divided_experts_are_the_run_of_one_process(run, echelon, tmp_path):
    write_recipe(tmp_path, model=MIXTURE, train=TRAIN, evaluate={"batches": 1})
    _, expected = run("one", 1)
    whole = export(echelon, "one")
    for name, processes, parallel in (("two", 2, "{dp_shard: 2, ep: 2}"), ("four", 4, "{dp_shard: 4, ep: 2}")):
        _, rows = run(name, processes, f"parallel={parallel}", "train.micro_batch_size=2")
        assert_same(rows, expected)
        loads = [[row["expert_load"] for row in each if row["kind"] == "train"] for each in (rows, expected)]
        assert loads[0] == pytest.approx(loads[1], rel=0.05)
        assert_same_weights(export(echelon, name), whole)


def test_divided_tensors_are_the_run_of_one_process(run, echelon, tmp_path):
    write_recipe(tmp_path, train={"eval_every": 3}, evaluate={"batches": 1, "prompts": ["1 plus"], "prompt_tokens": 5})
    _, expected = run("one", 1)
    whole = export(echelon, "one")
    plans = (("tp", 2, "{tp: 2}"), ("tp-fsdp", 4, "{tp: 2, dp_shard: 2, sequence_parallel: true}"))
    for name, processes, parallel in plans:
        ending, rows = run(name, processes, f"parallel={parallel}")
        assert "tp 2)" in ending.out
        assert_same(rows, expected)
        assert samples_of(name)[-1] == samples_of("one")[-1]
        assert_same_weights(export(echelon, name), whole)


def test_divided_tensors_of_a_mixture_of_experts(run, echelon, tmp_path):
    write_recipe(tmp_path, model={"config": small_config("mixtral")}, train={"eval_every": 3})
    _, expected = run("one", 1)
    whole = export(echelon, "one")
    for name, processes, parallel in (("tp", 2, "{tp: 2}"), ("ep", 4, "{tp: 2, dp_shard: 2, ep: 2}")):
        _, rows = run(name, processes, f"parallel={parallel}")
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], abs=LOSS)
        assert_same_weights(export(echelon, name), whole)


def test_divided_sequences_are_the_run_of_one_process(run, tmp_path):
    prompts = {"batches": 1, "prompts": ["1 plus 1 is"], "prompt_tokens": 8}
    write_recipe(tmp_path, evaluate=prompts, train={"eval_every": 3, "global_batch_size": 4})
    _, expected = run("one", 1)
    plans = {"two": ("{cp: 2}", 2), "heads": ("{cp: 2, cp_method: ulysses}", 2), "four": ("{cp: 2, dp_shard: 2}", 4)}
    for name, (parallel, processes) in plans.items():
        _, rows = run(name, processes, f"parallel={parallel}")
        assert_same(rows, expected)
        assert samples_of(name) == samples_of("one")
        plan = json.loads((tmp_path / "runs" / name / "plan.json").read_text())
        assert (plan["cp"], plan["cp_method"]) == (2, "ulysses" if name == "heads" else "allgather")


@pytest.mark.parametrize(
    ("config", "parallel", "words"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "attn_pdrop": 0}, "{tp: 2}",
         "declares no tensor-parallel plan for gpt2"),
        ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}, "{cp: 2}",
         "this mamba model cannot have its seq"),
        ({"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2}, "{cp: 2}",
         "this bloom model cannot have its seq"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_divided_is_refused_before_anything_is_written(
    echelon, tmp_path, config, parallel, words
):
    write_recipe(tmp_path, model={"config": config})
    ending = echelon("train", "recipe.json", f"parallel={parallel}", "--nproc", 2)
    assert ending.code == 2 and words in ending.err and "Traceback" not in ending.err
    assert not Path("runs").exists()
