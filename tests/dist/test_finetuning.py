"""Fine-tuning by commands, from conversations to folders that PEFT and transformers load."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from echelon.ground.sizes import render_bytes
from echelon.learn.data.tokenizer import train_tokenizer
from echelon.learn.model.adapters import merged_weight
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import EXACT, await_line, finish, read_lines, start
from tests.families import load_run_model
from tests.parity.training import equal_tensors, tensors_of

pytestmark = pytest.mark.dist

MARKS = ["<|im_start|>", "<|im_end|>"]
STEPS = 6


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path)


def write_base(folder, tied=True, width=32):
    """Write a small random model, a tokenizer of 300 ids without a template, and conversations; return their text."""
    tokenizer = train_tokenizer(["".join(f"{number} plus {number} is {2 * number}.\n" for number in range(500))], 300)
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "llama", hidden_size=width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=300,
        max_position_embeddings=128, tie_word_embeddings=tied, pad_token_id=0, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    write_chats(folder / "chat.jsonl", range(96), "messages")
    return folder / "base"


def write_chats(path, numbers, field):
    """Write conversations of two questions and answers each."""
    rows = []
    for number in numbers:
        turns = [("user", f"{number} plus {number}?"), ("assistant", f"{2 * number}.")]
        turns += [("user", "And one?"), ("assistant", f"{2 * number + 1}.")]
        rows.append({field: [{"role": role, "content": content} for role, content in turns]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_recipe(folder, **sections):
    recipe = {
        "run": {"name": "tuned"},
        "model": {"checkpoint": "base", "new_tokens": MARKS},
        "adapter": {"method": "lora", "r": 4, "alpha": 8},
        "data": {"train": "chat.jsonl", "sequence_len": 128, "chat_template": "chatml", "validation_fraction": 0.2},
        "train": {"steps": STEPS, "global_batch_size": 4, "precision": "fp32", "eval_every": None},
        "optim": {"learning_rate": 1e-2},
        "evaluate": {"batches": 100},
        "checkpoint": {"every": 3},
        "parallel": "ddp",
    }  # fmt: skip
    if sections.get("data", {}).get("validation"):
        del recipe["data"]["validation_fraction"]
    for key, value in sections.items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return RunFolder(folder / "runs" / "tuned")


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def load_as_the_card_says(folder):
    """Run the Python code in a folder's README.md; return the model that it loads."""
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(code.replace("this/folder", str(folder)), names)
    return names["model"].eval(), names["tokenizer"]


def last_loss(run):
    return [row for row in read_lines(run.metrics_path) if row["kind"] == "eval"][-1]["loss"]


def trained_in(run, step=STEPS):
    """The trained tensors of a checkpoint by name, without optimizer state."""
    found = tensors_of(run.path, step)
    return {name.removeprefix("model."): each for name, each in found.items() if name.startswith("model.")}


@pytest.mark.slow
def test_from_conversations_to_an_adapter_and_a_merged_model(echelon, base, tmp_path):
    run = write_recipe(tmp_path)
    ending = echelon("data", "recipe.json", "--samples", "1")
    assert ending.code == 0 and "[[" in ending.out.split("<|im_start|>assistant\n")[-1], ending
    assert "<|im_end|>]]" in ending.out and "vocab_size 302: grown from the checkpoint's 300" in ending.out
    ending = echelon("plan", "recipe.json", "train.global_batch_size=8", "--devices", "8xH100")
    assert ending.code == 0 and "adapter: lora of rank 4 at q_proj" in ending.out, ending
    ending = echelon("train", "recipe.json", "--nproc", "2").succeeded()
    check_start(ending.out, run)
    ids = torch.tensor([[300, *range(5, 40), 301, 7]])
    expected = logits_of(load_run_model(run.path, torch.device("cpu")), ids)
    check_new_rows(run, base, tied=True)
    check_adapter_folder(echelon, run, ids, expected)
    check_merged(echelon, run, ids, expected)
    check_commands(echelon, run)
    check_refusals(echelon, run, tmp_path)


def check_start(out, run):
    """Check that trained parameters, their fraction and the checkpoint size are printed and match the checkpoint."""
    trained = trained_in(run)
    assert all("lora_" in name or "trainable_tokens_delta" in name for name in trained)
    count = sum(each.numel() for each in trained.values())
    [line] = [line for line in out.splitlines() if line.startswith("adapter: lora")]
    total = count + sum(each.numel() for each in load_run_model(run.path, torch.device("cpu")).state_dict().values())
    assert f"{count:,} of " in line and count == 2 * 4 * 4 * (32 + 32) + 2 * 3 * 4 * (32 + 64) + 2 * 32 < total
    saved = [each.numel() * each.element_size() for each in tensors_of(run.path, STEPS).values()]
    scalars = len(trained) * 8  # Adam's step counter, and a margin
    assert 12 * count <= sum(saved) <= 12 * count + scalars
    assert f"checkpoint: about {render_bytes(12 * count)}, the adapter and optimizer state" in out
    assert "generation stops at 0 (<|endoftext|>), 301 (<|im_end|>)" in out


def check_new_rows(run, base, tied):
    """Check that the rows of new tokens are trained and equal the live model's, and all other rows equal the base's."""
    live = load_run_model(run.path, torch.device("cpu"))
    first = load_file(base / "model.safetensors")
    trained = {name: each for name, each in trained_in(run).items() if "trainable_tokens_delta" in name}
    assert len(trained) == (1 if tied else 2)
    ids = torch.arange(302)
    looked_up = live.get_input_embeddings()(ids)
    assert torch.equal(looked_up[300:], trained["model.embed_tokens.token_adapter.trainable_tokens_delta.default"])
    assert torch.equal(looked_up[:300], first["model.embed_tokens.weight"])
    start = first["model.embed_tokens.weight"].mean(0)
    assert all((row - start).abs().max() > 1e-2 for row in looked_up[300:]), "not trained"
    if not tied:
        head = live.get_output_embeddings()
        rows = head(torch.eye(live.config.hidden_size)).T
        torch.testing.assert_close(rows[300:], trained["lm_head.token_adapter.trainable_tokens_delta.default"])
        torch.testing.assert_close(rows[:300], first["lm_head.weight"])


def check_adapter_folder(echelon, run, ids, expected):
    """Check that PEFT loads the adapters of the run and of `echelon export` onto the base."""
    assert echelon("export", run.path, "adapter").code == 0
    weights = [load_file(folder / "adapter_model.safetensors") for folder in (run.export_dir, Path("adapter"))]
    assert weights[0].keys() == weights[1].keys() and all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    plain = AutoModelForCausalLM.from_pretrained("base")
    plain.resize_token_embeddings(302)
    tuned = PeftModel.from_pretrained(plain, run.export_dir).eval()
    torch.testing.assert_close(logits_of(tuned, ids), expected, rtol=0, atol=1e-5)
    model, tokenizer = load_as_the_card_says(Path("adapter"))
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=0, atol=1e-5)
    assert model.generation_config.eos_token_id == [0, 301] and len(tokenizer) == 302


def check_merged(echelon, run, ids, expected):
    """Check that transformers loads the merged folder with the logits of the live model."""
    ending = echelon("export", run.path, "merged", "--merge")
    assert ending.code == 0 and "KL divergence" in ending.out, ending
    model, _ = load_as_the_card_says(Path("merged"))
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=0, atol=1e-4)
    assert not [name for name in model.state_dict() if "lora" in name]
    check_equals_a_whole_merge(run, Path("merged"))
    plain = AutoModelForCausalLM.from_pretrained("base")
    plain.resize_token_embeddings(302)
    theirs = PeftModel.from_pretrained(plain, run.export_dir).merge_and_unload().state_dict()
    assert all(torch.equal(each, theirs[name]) for name, each in model.state_dict().items())
    assert model.generation_config.eos_token_id == [0, 301] and model.config.vocab_size == 302
    comparison = json.loads(Path("merged/merge.json").read_text())
    assert comparison["kl"] < 1e-6 and comparison["text"] == "held-out"
    assert comparison["loss_merged"] == pytest.approx(comparison["loss_adapter"], abs=1e-5)
    assert comparison["loss_adapter"] == pytest.approx(last_loss(run), abs=1e-4)
    card = Path("merged/README.md").read_text()
    assert (
        "A model with its adapter merged" in card
        and "starting from base;" in card
        and "base_model" not in card
        and "KL divergence" in card
    )
    assert echelon("export", run.path, "half", "--merge", "--dtype", "bf16").code == 0
    half = AutoModelForCausalLM.from_pretrained("half", dtype="auto")
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(logits_of(half.float(), ids), expected, rtol=0, atol=0.05)


def check_equals_a_whole_merge(run, folder):
    """Check that merging one module after another gives the weights of a merge in the loaded model, bit for bit."""
    live = load_run_model(run.path, torch.device("cpu"))
    merged = load_file(folder / "model.safetensors")
    assert len(merged) == len(dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()))
    assert all(torch.equal(merged_weight(live, name), each) for name, each in merged.items())


def check_commands(echelon, run):
    """Check that `eval` and `generate` agree for run and merged folder, and that an answer ends with its turn."""
    results = [json.loads(echelon("eval", each, "--data", "chat.jsonl", "--json").out) for each in (run.path, "merged")]
    assert results[0]["tokens"] == results[1]["tokens"]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], abs=1e-4)
    tail = ("--prompt", "3 plus 3?", "--chat", "--temperature", "0", "--max-tokens", "16", "--json")
    samples = [json.loads(echelon("generate", each, *tail).out) for each in (run.path, "merged")]
    assert samples[0] == samples[1] and "plus" not in samples[0]["text"].split("?")[0]
    model, tokenizer = (kind.from_pretrained("merged") for kind in (AutoModelForCausalLM, AutoTokenizer))
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 plus 3?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :].tolist()
    assert samples[0]["text"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert samples[0]["ended_by"] == ("eos" if ids[-1] in (0, 301) else "length")
    ending = echelon("generate", "base", *tail)
    assert ending.code == 2 and "--chat: the tokenizer of base has no chat template" in ending.err


def check_refusals(echelon, run, folder):
    """Check the messages of runs and exports that are not possible."""
    ending = echelon("train", "recipe.json", "--nproc", "2", "adapter.r=8", f"train.steps={2 * STEPS}")
    assert ending.code == 2 and "adapter.r" in ending.err and "--fresh" in ending.err, ending
    ending = echelon("train", "recipe.json", f"model.checkpoint={run.path}", "model.new_tokens=[]", "run.name=next")
    assert ending.code == 2 and "this run trained an adapter; write the whole model with" in ending.err, ending
    ending = echelon("train", "recipe.json", "model.checkpoint=./nowhere", "run.name=next")
    assert ending.code == 2 and "model.checkpoint=./nowhere: no such folder" in ending.err, ending
    shutil.move(folder / "base", folder / "elsewhere")
    for ending in (echelon("export", run.path, "again", "--merge"), echelon("eval", run.path)):
        assert ending.code == 2 and "model.checkpoint=base: " in ending.err and "no such folder" in ending.err, ending
    assert not Path("again").exists()
    shutil.move(folder / "elsewhere", folder / "base")


@pytest.mark.slow
def test_qlora_merges_onto_the_dequantized_weights(echelon, tmp_path):
    """Input and output embeddings are untied; both get rows for the new tokens."""
    base = write_base(tmp_path, tied=False, width=64)
    write_chats(tmp_path / "train.jsonl", range(70), "dialogue")
    write_chats(tmp_path / "held.jsonl", range(70, 96), "dialogue")
    sources = [{"path": f"{name}.jsonl", "fields": {"messages": "dialogue"}} for name in ("train", "held")]
    data = {"train": sources[:1], "validation": sources[1:], "train_on": "last", "system_prompt": "Add them."}
    run = write_recipe(tmp_path, adapter={"method": "qlora"}, parallel="fsdp", data=data)
    echelon("train", "recipe.json", "--nproc", "2").succeeded()
    own, given = (json.loads(echelon("eval", run.path, "--json", *more).out) for more in ((), ("--data", "held.jsonl")))
    assert given["tokens"] == own["tokens"] and given["loss"] == pytest.approx(own["loss"], abs=1e-6)
    assert own["loss"] == pytest.approx(last_loss(run), abs=1e-4)
    ending = echelon("eval", run.export_dir, "--data", "held.jsonl")
    assert ending.code == 2 and "contains an adapter without its base model; give the run" in ending.err
    check_new_rows(run, base, tied=False)
    ids = torch.tensor([[300, *range(5, 40), 301, 7]])
    expected = logits_of(load_run_model(run.path, torch.device("cpu")), ids)
    model, _ = load_as_the_card_says(run.export_dir)
    # On some CPUs the layer of bitsandbytes rounds its scales to bf16 before it computes.
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=0, atol=0.05)
    assert echelon("export", run.path, "merged", "--merge").code == 0
    check_equals_a_whole_merge(run, Path("merged"))
    merged = AutoModelForCausalLM.from_pretrained("merged")
    torch.testing.assert_close(logits_of(merged, ids), expected, rtol=0, atol=1e-4)
    first = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    change = merged.state_dict()[name] - first[name]
    assert torch.linalg.matrix_rank(change) > 4, "what four bits lost is in it, beside the adapter"
    tail = ("--prompt", "3 plus 3?", "--chat", "--temperature", "0", "--max-tokens", "8", "--json")
    ours, theirs, other = (
        json.loads(echelon("generate", *each, *tail).out)
        for each in ((run.path,), ("merged", "--system", "Add them."), ("merged",))
    )
    assert ours == theirs and ours["prompt"] == other["prompt"]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_full_training_grows_the_vocabulary(echelon, tmp_path, tied):
    base = write_base(tmp_path, tied)
    run = write_recipe(tmp_path, adapter={"method": "full", "r": 16, "alpha": 32}, parallel="fsdp")
    assert echelon("train", "recipe.json", "--nproc", "2").code == 0
    ids = torch.tensor([[300, *range(5, 40), 301, 7]])
    live = load_run_model(run.path, torch.device("cpu"))
    echelon("export", run.path, "out").succeeded()
    model, _ = load_as_the_card_says(Path("out"))
    assert torch.equal(logits_of(model, ids), logits_of(live, ids))
    trained, first = trained_in(run), load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        assert torch.equal(model.get_parameter(name), trained[name]) and trained[name].shape[0] == 302
        assert all((row - first[name].mean(0)).abs().max() > 1e-2 for row in trained[name][300:]), "not trained"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.generation_config.eos_token_id == [0, 301]


@pytest.mark.slow
def test_a_resumed_adapter_run_equals_an_uninterrupted_one(echelon, base, tmp_path):
    run = write_recipe(tmp_path, train={"steps": 120})
    command = ("train", "recipe.json", "--nproc", "2", "checkpoint.every=10")
    job = start(*command)
    await_line(run.events_path, '"event": "checkpoint", "step": 10', job, seconds=120)
    job.terminate()
    ending = finish(job, 120)
    stopped = run.newest_step()
    assert ending.code == 3 and 10 <= stopped < 120, ending
    assert echelon(*command).code == 0
    assert echelon(*command, "run.dir=runs/whole").code == 0
    whole = RunFolder(tmp_path / "runs" / "whole")
    rows = [
        [[row[key] for key in EXACT] for row in read_lines(each.metrics_path) if row["kind"] == "train"]
        for each in (run, whole)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 120
    assert equal_tensors(tensors_of(run.path, 120), tensors_of(whole.path, 120))
    files = [load_file(each.export_dir / "adapter_model.safetensors") for each in (run, whole)]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


GOOD, BAD = (
    [{"prompt": f"{n} plus {n}?", "completion": f"{2 * n}{end}"} for n in range(96)] for end in (".", " or so.")
)
PAIRS = [
    {"prompt": good["prompt"], "chosen": good["completion"], "rejected": bad["completion"]}
    for good, bad in zip(GOOD, BAD, strict=True)
]
JUDGED = [{**record, "label": label} for records, label in ((GOOD, True), (BAD, False)) for record in records]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "records", "counted", "first", "accuracy", "refusal"),
    [
        ("dpo", PAIRS, "pairs", math.log(2), 0.9,
         "a run with objective.name=dpo, orpo, simpo, cpo or reward can be"),
        ("kto", JUDGED, "answers", 0.5, 0.8, "only a run with objective.name=kto can be evaluated"),
    ],
    ids=["pairs", "judged answers"],
)  # fmt: skip
def test_preferences_move_an_adapter(echelon, base, tmp_path, name, records, counted, first, accuracy, refusal):
    """The loss falls below its initial value, and margins of held-out records grow."""
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = write_recipe(
        tmp_path, data={"train": "given.jsonl", "sequence_len": 128}, objective={"name": name, "beta": 0.5},
        train={"steps": 30, "eval_every": 10}, optim={"learning_rate": 5e-3},
    )  # fmt: skip
    echelon("train", "recipe.json", "--nproc", "2").succeeded()
    rows = read_lines(run.metrics_path)
    assert rows[0]["loss"] == pytest.approx(first, abs=1e-6)
    evals = [row for row in rows if row["kind"] == "eval"]
    assert evals[-1]["loss"] < evals[0]["loss"] < first and evals[-1][counted] > 0
    assert evals[-1]["pairs"] is None or name == "dpo"
    assert evals[-1]["reward_margin"] > evals[0]["reward_margin"] > 0 and evals[-1]["reward_accuracy"] > accuracy
    own = json.loads(echelon("eval", run.path, "--json").out)
    assert own["loss"] == pytest.approx(evals[-1]["loss"], abs=1e-4)
    given = json.loads(echelon("eval", run.path, "--data", "given.jsonl", "--json").out)
    assert given[counted] == len(records) and given["reward_margin"] > 0
    ids = torch.tensor([[300, *range(5, 40), 301, 7]])
    model, _ = load_as_the_card_says(run.export_dir)
    torch.testing.assert_close(logits_of(model, ids), logits_of(load_run_model(run.path, torch.device("cpu")), ids))
    ending = echelon("eval", "base", "--data", "given.jsonl")
    assert ending.code == 2 and refusal in ending.err
