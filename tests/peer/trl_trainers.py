"""Trainers of TRL with a small model, and the pairs of the unit tests as their batches."""

import json

import torch
from transformers import PreTrainedTokenizerFast

from echelon.learn.objectives.loss import IGNORE

ROWS = {"prompt": ["a b", "b a"], "chosen": [" a", " b"], "rejected": [" b", " a"]}
ANSWERS = {"prompt": ["a b", "b a"], "completion": [" a", " b"], "label": [True, False]}


def build(trainer_class, config_class, folder, model, rows, reference=None, reward_funcs=None, **settings):
    """A trainer as a user builds it, from a table of texts that no test reads again."""
    from datasets import Dataset

    args = config_class(
        output_dir=str(folder), use_cpu=True, report_to="none", bf16=False, gradient_checkpointing=False, **settings
    )
    given = {"ref_model": reference, "reward_funcs": reward_funcs}
    given = {name: value for name, value in given.items() if value is not None}
    return trainer_class(
        model=model, args=args, processing_class=small_tokenizer(folder), train_dataset=Dataset.from_dict(rows), **given
    )


def small_tokenizer(folder):
    """Words of one letter."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
    added = [{"id": number, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for name, number in list(vocabulary.items())[:2]]  # fmt: skip
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
            }
        )
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>", eos_token="<eos>")


def take_apart(batch, places):
    """Documents of a microbatch as rows of their own, padded on the right: ids, attention mask, completion mask."""
    rows = []
    for row, document in places:
        here = batch.documents[row] == document
        ids, labels = batch.input_ids[row][here], batch.labels[row][here]
        first = int((labels != IGNORE).int().argmax()) + 1  # the token of the first label
        rows.append((ids, torch.arange(len(ids)) >= first))
    width = max(len(ids) for ids, _ in rows)
    ids, masks, filled = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for number, (row, mask) in enumerate(rows):
        ids[number, : len(row)], masks[number, : len(row)], filled[number, : len(row)] = row, mask.long(), 1
    return ids, filled, masks


def gradients_of(model, loss):
    """The gradients of a loss by parameter, which it leaves cleared."""
    model.zero_grad()
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found
