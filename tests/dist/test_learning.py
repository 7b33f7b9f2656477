"""Fine-tuning teaches a task: a model of Python source learns to reverse unseen words, also after merging."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.dist.command import finish, start
from tests.families import load_run_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]

END = "<|end|>"
WORDS = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
random.Random(0).shuffle(WORDS)
HELD_OUT, TAUGHT = WORDS[:150], WORDS[150:]

BASE = {
    "run": {"name": "base", "seed": 1},
    "model": {
        "config": {
            "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
    },
    "tokenizer": "bytes",
    "data": {"train": "python-stdlib", "sequence_len": 128, "prepare_workers": 1},
    "train": {"steps": 100, "global_batch_size": 32, "eval_every": None, "precision": "bf16", "compile": False},
    "optim": {"learning_rate": 2e-3, "warmup": 10},
    "evaluate": {"batches": 1},
}  # fmt: skip
TUNED = {
    "model": {"new_tokens": [END]},
    "data": {"train": "taught.jsonl", "sequence_len": 64, "document_separator": END, "validation_fraction": 0.02},
    "train": {"steps": 600, "global_batch_size": 16, "eval_every": None, "compile": False},
    "optim": {"learning_rate": 2e-3, "warmup": 20, "weight_decay": 0.0},
}  # fmt: skip


def question(word):
    return f"reverse {word}: "


@torch.no_grad()
def answers(model, tokenizer, words):
    """The greedy answer to each question: four tokens, the last of which should be the stop token."""
    ids = torch.tensor([tokenizer(question(word))["input_ids"] for word in words])
    said = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return [tokenizer.decode(row[ids.shape[1] :]) for row in said]


def accuracy(said, words, end=END):
    return sum(each.startswith(word[::-1] + end) for each, word in zip(said, words, strict=True)) / len(words)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """An HF folder with a model pretrained on real text, which answers no question correctly."""
    place = tmp_path_factory.mktemp("base")
    (place / "base.json").write_text(json.dumps(BASE))
    for command in (("train", "base.json", "--nproc", "1"), ("export", "runs/base", "base")):
        finish(start(*command, cwd=place), seconds=600).succeeded()
    folder = place / "base"
    said = answers(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), HELD_OUT)
    assert accuracy(said, HELD_OUT, end="") < 0.05
    return folder


def test_no_constant_answer_is_often_right():
    assert not set(HELD_OUT) & set(TAUGHT)
    (favourite, _), *_ = Counter(word[::-1] for word in TAUGHT).most_common(1)
    assert sum(word[::-1] == favourite for word in HELD_OUT) < 0.05 * len(HELD_OUT)


@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_task_is_learned_and_survives_merging(echelon, base, method, precision, seed):
    """The result does not depend on the seed or the machine: the loss stops falling in the first half of a run."""
    Path("taught.jsonl").write_text(
        "".join(json.dumps({"prompt": question(word), "completion": word[::-1]}) + "\n" for word in TAUGHT)
    )
    recipe = {
        **TUNED,
        "run": {"name": "tuned", "seed": seed},
        "model": {**TUNED["model"], "checkpoint": str(base)},
        "adapter": {"method": method, "r": 64, "alpha": 64},
        "train": {**TUNED["train"], "precision": precision},
    }
    Path("tuned.json").write_text(json.dumps(recipe))
    echelon("train", "tuned.json", "--nproc", "1").succeeded()
    live = load_run_model(Path("runs/tuned"), torch.device("cpu"))
    after = accuracy(answers(live, AutoTokenizer.from_pretrained("runs/tuned/model"), HELD_OUT), HELD_OUT)
    echelon("export", "runs/tuned", "merged", "--merge").succeeded()
    plain = AutoModelForCausalLM.from_pretrained("merged")
    there = accuracy(answers(plain, AutoTokenizer.from_pretrained("merged"), HELD_OUT), HELD_OUT)
    comparison = json.loads(Path("merged/merge.json").read_text())
    print(f"{method} {precision} seed {seed}: {after:.1%}, merged {there:.1%}; merge.json {comparison}")
    assert after >= 0.9 and there == after
    assert comparison["kl"] < 1e-4
