"""Import what ms-swift has besides the arguments of transformers' Trainer: datasets, targets, lengths and defaults."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.foreign.importers.ledger import Defaults, Ledger
from echelon.foreign.importers.sources import FILE_SUFFIXES, Read, Wording, build_source
from echelon.recipe.yaml_text import show_value

_METHODS = ("dpo", "orpo", "simpo", "cpo", "kto", "rm")
_LONGEST = 4096
_FULL_RATE = 1e-5
_LEARNED = {"default": "assistant", "last_round": "last", "all": "all"}


def find_swift_method(ledger: Ledger) -> Any:
    """Take the method of a file (`rlhf_type`), and refuse the tasks and methods that are not imported."""
    task = ledger.find("task_type")
    if task is not None and ledger.take(task) != "causal_lm":
        ledger.refuse(task, "only causal language models are imported; for classes write a recipe with labels.")
    if (name := ledger.find("model_type")) is not None:
        ledger.need_not(name, "the checkpoint's config determines the class.")
    if (quantized := ledger.find("quant_method")) is not None and ledger.take(quantized) != "bnb":
        ledger.refuse(quantized, "4-bit weights are supported only with bitsandbytes.")
    full = ledger.find("rlhf_type")
    method = ledger.take("rlhf_type")
    if full is not None and method not in _METHODS:
        ledger.refuse(full, f"of ms-swift the methods {', '.join(_METHODS)} are imported; write a recipe.")
        return None
    return method


def swift_defaults(ledger: Ledger, defaults: Defaults) -> Defaults:
    """The defaults that depend on the file: without an adapter the learning rate is smaller."""
    return defaults if "adapter.method" in ledger.values else replace(defaults, learning_rate=_FULL_RATE)


def read_swift(ledger: Ledger) -> Read:
    """Read the datasets: files, and those of the hub of Hugging Face."""
    wording = Wording(None, "the tokenizer's own", ledger.take("system"))
    if (full := ledger.find("template")) is not None:
        ledger.differ(full, "the tokenizer's own template is used; for chat models it is the same.")
    form = "unpaired_messages" if ledger.values.get("objective.name") == "kto" else None
    hub = bool(ledger.take("use_hf"))
    train = [_read_source(ledger, "dataset", word, form, hub) for word in ledger.words("dataset")]
    ledger.reasons["data.train"] = "dataset"
    held_out = [_read_source(ledger, "val_dataset", word, form, hub) for word in ledger.words("val_dataset")]
    if held_out:
        ledger.reasons["data.validation"] = "val_dataset"
    return Read(tuple(train), tuple(held_out), (wording,), None)


def _read_source(ledger: Ledger, key: str, word: str, form: str | None, hub: bool) -> dict[str, Any]:
    """Read one dataset, PATH or ID[:SUBSET], each perhaps with #COUNT records."""
    path, _, count = word.partition("#")
    name, _, subset = path.partition(":")
    is_file = path.endswith(FILE_SUFFIXES) or Path(path).exists()
    if not is_file and not hub:
        ledger.refuse(
            key, f"{path} is a dataset of ModelScope; download it and give its file, or set use_hf: true if it is the "
            "id of one on the hub of Hugging Face."
        )  # fmt: skip
    if "self-cognition" in path:
        ledger.refuse(key, f"ms-swift fills in the texts of {path} itself; write them to a file.")
    source = build_source(path, form, {}) if is_file else build_source(name, form, {}, subset or None)
    if source.get("format") == "hub":
        source["split"] = "train"
    if count:
        source["max_samples"] = int(count)
        ledger.differ(key, "the first records are used, not a random selection.")
    return source


def complete_swift(ledger: Ledger) -> None:
    """Import lengths, targets and types that have other names in ms-swift, once the rest of the data is there."""
    if "model.checkpoint" in ledger.values and ledger.given.get("use_hf") is not True:
        ledger.differ("model", "an id is one of the hub of Hugging Face, not of ModelScope.")
    if "max_length" not in {name.rpartition(".")[2] for name in ledger.given}:
        ledger.put("data.sequence_len", _LONGEST, "the file has no max_length")
        ledger.remark(
            f"the file has no max_length, and a recipe needs a limit: data.sequence_len={_LONGEST}; longer samples are "
            "dropped."
        )
    if ledger.given.get("train_dataloader_shuffle") is False:
        ledger.refuse("train_dataloader_shuffle", "samples are always shuffled.")
    full, scale = ledger.find("loss_scale"), ledger.take("loss_scale")
    if scale is not None and scale not in _LEARNED:
        ledger.refuse(
            str(full), f"the targets {', '.join(_LEARNED)} are imported; weights of tokens are not supported."
        )
    elif "data.train_on" in ledger.values:
        said = f"loss_scale: {scale}" if scale else "the default of ms-swift"
        ledger.put("data.train_on", _LEARNED[scale or "default"], said)
    dtype = ledger.peek("torch_dtype")
    ours = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(dtype))
    if ours is not None:
        ledger.put("train.precision", ours, f"torch_dtype: {show_value(dtype)}")
    if ledger.values.get("objective.name") == "simpo":
        for key, name, default in (("beta", "beta", 2.0), ("gamma", "simpo_gamma", 1.0)):
            if name not in ledger.given:
                ledger.put(f"objective.{key}", default, "the default of ms-swift")
