"""That fine-tuning teaches: a model of Python's source learns to reverse words it never saw, and keeps it when merged."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echelon.checkpoint.adapted import load_adapted

pytestmark = [pytest.mark.dist, pytest.mark.slow]

END = "<|end|>"
WORDS = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
random.Random(0).shuffle(WORDS)
HELD_OUT, TAUGHT = WORDS[:150], WORDS[150:]

BASE = {
    "run": {"name": "base", "seed": 1},
    "model": {
        "config": {
            "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
    },
    "tokenizer": "bytes",
    "data": {"train": "python-stdlib", "sequence_len": 128, "prepare_workers": 1},
    "train": {"steps": 100, "global_batch_size": 32, "eval_every": None, "precision": "bf16", "compile": False},
    "optim": {"learning_rate": 2e-3, "warmup_steps": 10},
    "evaluate": {"batches": 1},
}  # fmt: skip
TUNED = {
    "model": {"checkpoint": "base", "new_tokens": [END]},
    "data": {"train": "taught.jsonl", "sequence_len": 64, "document_separator": END, "validation_fraction": 0.02},
    "train": {"steps": 400, "global_batch_size": 16, "eval_every": None, "precision": "bf16", "compile": False},
    "optim": {"learning_rate": 2e-3, "warmup_steps": 20, "weight_decay": 0.0},
}  # fmt: skip


def question(word):
    return f"reverse {word}: "


@torch.no_grad()
def answers(model, tokenizer, words):
    """What a model says, greedily, to each question: four tokens, the last of which should be the end."""
    ids = torch.tensor([tokenizer(question(word))["input_ids"] for word in words])
    said = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return [tokenizer.decode(row[ids.shape[1] :]) for row in said]


def accuracy(said, words, end=END):
    return sum(each.startswith(word[::-1] + end) for each, word in zip(said, words, strict=True)) / len(words)


@pytest.fixture
def base(echelon, tmp_path, monkeypatch):
    """An HF folder pretrained on real text, and the records to teach."""
    monkeypatch.chdir(tmp_path)
    assert not set(HELD_OUT) & set(TAUGHT)
    Path("taught.jsonl").write_text(
        "".join(json.dumps({"prompt": question(word), "completion": word[::-1]}) + "\n" for word in TAUGHT)
    )
    Path("base.json").write_text(json.dumps(BASE))
    for command in (("train", "base.json", "--nproc", "1"), ("export", "runs/base", "base")):
        assert echelon(*command).code == 0
    return Path("base")


def test_a_task_is_learned_kept_and_merged(echelon, base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    before = accuracy(answers(AutoModelForCausalLM.from_pretrained(base), tokenizer, HELD_OUT), HELD_OUT, end="")
    (favourite, _), *_ = Counter(word[::-1] for word in TAUGHT).most_common(1)
    majority = sum(word[::-1] == favourite for word in HELD_OUT) / len(HELD_OUT)
    report = [f"held-out words reversed: base model {before:.1%}, the commonest answer {majority:.1%}"]
    for method in ("lora", "qlora"):
        adapter = {"method": method, "r": 64, "alpha": 64}
        recipe = {**TUNED, "run": {"name": method, "seed": 2}, "adapter": adapter}
        Path(f"{method}.json").write_text(json.dumps(recipe))
        trained = echelon("train", f"{method}.json", "--nproc", "2")
        assert trained.code == 0, trained.err
        live = load_adapted(Path("runs") / method, torch.device("cpu")).model
        tokenizer = AutoTokenizer.from_pretrained(Path("runs") / method / "model")
        said = answers(live, tokenizer, HELD_OUT)
        after = accuracy(said, HELD_OUT)
        merged = echelon("export", f"runs/{method}", f"merged-{method}", "--merge")
        assert merged.code == 0, merged.err
        plain = AutoModelForCausalLM.from_pretrained(f"merged-{method}")
        there = accuracy(answers(plain, AutoTokenizer.from_pretrained(f"merged-{method}"), HELD_OUT), HELD_OUT)
        comparison = json.loads(Path(f"merged-{method}/merge.json").read_text())
        report.append(f"{method}: {after:.1%}, merged and loaded by transformers {there:.1%}; merge.json {comparison}")
        assert before < 0.05 and majority < 0.05
        assert after >= 0.9 and there == after
        assert comparison["kl"] < 1e-4
    print("\n".join(report))
