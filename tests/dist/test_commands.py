"""One run on two processes, and every command that reads it."""

import json
import math
import os
import stat
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echelon.planner.memory_parts import MemoryParts
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import read_lines, write_recipe
from tests.families import load_run_model

pytestmark = pytest.mark.dist

SECRET = "hf_AbCdEf0123456789"
TRAIN_KEYS = {
    "kind", "step", "tokens", "target_tokens", "loss", "grad_norm", "learning_rate", "tokens_per_second",
    "step_seconds", "data_wait_seconds", "mfu", "memory_peak_bytes", "batch_hash", "skipped", "loss_scale", "cost_usd",
    "sent_bytes",
    "message_wait_seconds",
    "rank_seconds",
    "gpu_utilization",
    "gpu_watts",
    "router_loss",
    "expert_load",
}  # fmt: skip


@pytest.fixture
def echelon(echelon, monkeypatch):
    """The command, with a secret in its environment."""
    for name in ("HF_TOKEN", "WANDB_API_KEY", "NCCL_PASSWORD", "SLURM_JWT"):
        monkeypatch.setenv(name, SECRET)
    return echelon


def test_from_text_to_a_model_that_transformers_loads(echelon, tmp_path):
    write_recipe(
        tmp_path, tokenizer={"train": {"vocab_size": 300}}, train={"steps": 4, "eval_every": 2}, track=["tensorboard"]
    )
    run = RunFolder(Path("runs/tiny"))
    ending = echelon("train", "recipe.json", f"launch.env={{MY_PAT: {SECRET}}}", "--nproc", "2")
    assert ending.code == 0 and "recipe: launch.env.MY_PAT looks like a secret" in ending.out
    assert SECRET not in ending.out + ending.err and stat.S_IMODE(run.path.stat().st_mode) == 0o700
    # Step 4 is lost, and repeated by the resumed run.
    os.truncate(run.checkpoints_dir / "step-00000004" / ".metadata", 10)
    ending = echelon("train", "recipe.json", "train.steps=7", "evaluate.batches=2", "--nproc", "2")
    assert ending.code == 0 and "Resuming from step-00000003" in ending.out
    for line in (
        ", all trained\n", " sequences\n", "training: 7 steps, 28 sequences of 32 tokens, ",
        "run folder: runs/tiny\n", "done: 7 steps in ",
        "best held-out loss ", "next: echelon eval runs/tiny\n", "next: echelon export runs/tiny tiny-exported\n",
    ):  # fmt: skip
        assert line in ending.out
    table = ending.out[ending.out.index("\ntensors of one process  ") :].splitlines()[1:9]
    assert [line.split()[0] for line in table[1:]] == [*list(asdict(MemoryParts(0, 0, 0, 0, 0, 0)))[:-1], "total"]
    assert "mfu" not in ending.out  # on a CPU

    check_record(run)
    check_tensorboard(run)
    check_secrets(tmp_path)
    held_out = check_eval(echelon, run)
    check_generate(echelon, run)
    check_export(echelon, run, held_out)


def check_record(run):
    """Check metrics.jsonl, events.jsonl and the other files of the run."""
    rows = read_lines(run.metrics_path)
    train = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in train] == [1, 2, 3, 4, 5, 6, 7]
    assert all(set(row) == TRAIN_KEYS for row in train)
    assert [row["tokens"] for row in train] == [step * 4 * 32 for step in range(1, 8)]
    assert all(len(row["batch_hash"]) == 16 and int(row["batch_hash"], 16) >= 0 for row in train)
    evals = [row for row in rows if row["kind"] == "eval"]
    assert [row["step"] for row in evals] == [2, 4, 6, 7]
    numbers = {"loss", "perplexity", "bits_per_byte", "target_tokens", "pairs", "answers"}
    numbers |= {"reward_accuracy", "reward_margin"}
    assert all(set(row) == {"kind", "step", "sets"} | numbers for row in evals)
    assert all(list(row["sets"]) == ["validation"] and set(row["sets"]["validation"]) == numbers for row in evals)
    assert all(math.isclose(math.exp(row["loss"]), row["perplexity"], rel_tol=1e-9) for row in evals)

    events = read_lines(run.events_path)
    milestones = ("start", "resume", "checkpoint", "done")
    assert [(row["event"], row["step"]) for row in events if row["event"] in milestones] == [
        ("start", 0), ("checkpoint", 3), ("checkpoint", 4), ("done", 4),
        ("resume", 3), ("checkpoint", 6), ("checkpoint", 7), ("done", 7),
    ]  # fmt: skip
    saves = ["save", "publish", "checkpoint"]
    assert [row["event"] for row in events if row["event"] in saves] == saves * 4
    assert [row["event"] for row in events[:3]] == ["prepare", "prepared", "start"]
    evaluations = [row["step"] for row in events if row["event"] in ("evaluation", "evaluated")]
    assert evaluations == [2, 2, 4, 4, 4, 4, 6, 6, 7, 7]
    memory = [row for row in events if row["event"] == "memory"]
    assert [row["step"] for row in memory] == [0, 3] and all(row["planned"]["weights"] > 0 for row in memory)
    first = next(row["seconds"] for row in events if row["event"] == "goodput")
    assert first["down"] == first["stopped"] == first["redone"] == 0 < min(first["training"], first["starting"])
    times = [row["time"] for row in events]
    # A separate thread writes the events of saves, so two simultaneous events may occur in either order.
    assert all(later > earlier - 0.1 for earlier, later in pairwise(times)) and times[0] > 1.7e9
    assert json.loads(run.plan_path.read_text())["dp_replicate"] == 2
    assert json.loads(run.estimate_path.read_text())["memory"]["parameters"] > 0
    environment = json.loads(run.environment_path.read_text())
    # The suffix of a build, such as +cu130, is not always part of the package version.
    assert torch.__version__.startswith(environment["packages"]["torch"])
    assert environment["cluster"]["num_devices"] == 2
    assert "steps: 7" in run.recipe_path.read_text()


def check_tensorboard(run):
    """Check that the event files contain the losses of metrics.jsonl, each step once, also after a resume."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    for kind in ("train", "eval"):
        expected = [(row["step"], row["loss"]) for row in read_lines(run.metrics_path) if row["kind"] == kind]
        found = [(scalar.step, scalar.value) for scalar in events.Scalars(f"{kind}/loss")]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)  # fp32 there


def check_secrets(folder):
    """Check that no file of the run, its data or its logs contains a secret of the environment or the recipe."""
    files = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    assert len(files) > 15
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def check_eval(echelon, run):
    """Check that the loss of `eval`, in one process and other microbatches, equals the final loss during training."""
    ending = echelon("eval", run.path, "--json", "--data", "text.txt").succeeded()
    whole = json.loads(ending.out)
    ending = echelon("eval", run.path, "--json")
    result = json.loads(ending.out)
    assert set(result) == {
        "loss", "perplexity", "bits_per_byte", "unigram_entropy", "tokens", "data", "sequence_len", "sets",
    }  # fmt: skip
    assert result["tokens"] < whole["tokens"]
    assert echelon("eval", run.path).out.splitlines()[0] == f"loss: {result['loss']:.4f}"
    # Training evaluates 2 batches of 4 held-out sequences; the loss of all of them is in the same range.
    last = [row for row in read_lines(run.metrics_path) if row["kind"] == "eval"][-1]
    assert result["loss"] == pytest.approx(last["loss"], abs=0.05)
    return whole


def check_generate(echelon, run):
    """Check that the same seed gives the same text, and that it continues the prompt."""
    sample = ("generate", run.path, "--prompt", "12 plus", "--max-tokens", "8", "--json")
    first, second, other = echelon(*sample), echelon(*sample), echelon(*sample, "--seed", "1")
    assert first.code == 0 and first.out == second.out != other.out
    text = json.loads(first.out)
    assert text["prompt"] == "12 plus" and text["text"].startswith("12 plus") and len(text["text"]) > len("12 plus")


def check_export(echelon, run, held_out):
    """Check that transformers loads the export, with logits and loss equal to the live model's bit for bit."""
    out = Path("exported")
    assert echelon("export", run.path, out).code == 0
    assert not list(Path().glob(".writing*")) and not list(out.glob("*.bin"))
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id], "what ends a document ends a sample"
    ids = tokenizer("7 plus 7 is 14, and so on.\n", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "7 plus 7 is 14, and so on.\n"
    live = load_run_model(run.path, torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, live(input_ids=ids).logits)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in live.named_parameters()}

    # An HF folder has no sequence_len: the model's maximum length is used, which is set to the run's here.
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    result = json.loads(echelon("eval", out, "--data", "text.txt", "--json").out)
    assert result["tokens"] == held_out["tokens"]
    assert result["loss"] == pytest.approx(held_out["loss"], abs=1e-6)
    size = os.path.getsize(out / "model.safetensors")
    assert echelon("export", run.path, "half", "--dtype", "bf16").code == 0
    assert os.path.getsize("half/model.safetensors") < 0.6 * size
    assert AutoModelForCausalLM.from_pretrained("half", dtype="auto").dtype == torch.bfloat16
