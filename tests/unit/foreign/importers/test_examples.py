"""Every example file of the other tools is refused with a message or imported correctly, never as different training.

The files are their authors', and are not kept here. Fetch them, and name their folders in ECHELON_IMPORT_EXAMPLES,
separated by colons: examples/ of Axolotl, of LLaMA-Factory (in its repository, beside data/) and of TRL, recipes/ of
the alignment handbook. A table of what became of them is printed.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.foreign.importers import Imported, import_recipe
from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.load import parse_recipe
from echelon.recipe.render import plain_value

FOLDERS = os.environ.get("ECHELON_IMPORT_EXAMPLES", "")
_UNKNOWN = "this key is unknown to echelon"


@pytest.mark.slow
@pytest.mark.skipif(not FOLDERS, reason="ECHELON_IMPORT_EXAMPLES names no folders of example files")
@pytest.mark.parametrize("folder", FOLDERS.split(":"))
def test_no_example_becomes_another_training(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    count: Counter[str] = Counter()
    faults: list[str] = []
    files = sorted(path for path in Path(folder).rglob("*.y*ml") if path.suffix in (".yml", ".yaml"))
    assert files, f"{folder} holds no YAML files"
    for path in files:
        try:
            found = _import(path)
        except ConfigError as error:
            for reason in _reasons(str(error), path):
                count[f"refused: {reason}"] += 1
            count["refused"] += 1
            continue
        count[f"imported: {found.tool}"] += 1
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        faults += [f"{path}: {fault}" for fault in _differences(given, found)]
    with capsys.disabled():
        print(f"\n{folder}: {len(files)} files")
        for what, number in sorted(count.items(), key=lambda item: (item[0].partition(":")[0], -item[1])):
            print(f"  {number:4} {what}")
    assert not faults, "\n".join(faults)


def _import(path: Path) -> Imported:
    """Import a file. A TRL file may need `--trainer`, which is the name of its folder."""
    try:
        return import_recipe(path)
    except ConfigError as error:
        trainer = next((part for part in reversed(path.parts) if part in ("sft", "dpo", "orpo", "cpo", "kto")), "sft")
        if "--trainer" not in str(error):
            raise
        return import_recipe(path, trainer=trainer)


def _reasons(message: str, path: Path) -> Iterator[str]:
    """The refused keys, each with its reason and without its value."""
    lines = message.replace(str(path), "F").splitlines()
    for line in lines if len(lines) == 1 else lines[1:]:
        line = line.removeprefix("F cannot be imported: ").removeprefix("F: ").strip()
        key, _, rest = line.partition(": ")
        place = re.sub(r"[.][0-9]+[.]", ".N.", key)
        yield f"{place}: {rest.rpartition(': ')[2]}"[:150]


def _differences(given: dict[str, Any], found: Imported) -> Iterator[str]:
    """Differences between the recipe and the training of the file, found by code independent of the importer.

    Only values set in the file are compared; other tests cover the defaults of the tools.
    """
    recipe, _ = parse_recipe(found.text, "imported")
    flat = {
        **given,
        **{key: value for group in ("peft_config", "quant_config") for key, value in (given.get(group) or {}).items()},
    }
    for entry in found.entries:
        if entry.fate == "refused" or _UNKNOWN in entry.text or (entry.fate in ("lost", "needless") and not entry.text):
            yield f"{entry.name} is {entry.fate}: {entry.text!r}"
    wanted = given.get("rl") or given.get("stage") or ("rm" if given.get("reward_model") is True else None)
    methods = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto", "rm": "reward"}
    by_loss = {"orpo": "orpo", "simpo": "simpo"}.get(str(given.get("pref_loss")))
    lengths = ("sequence_len", "cutoff_len", "max_length", "max_seq_length")
    expected = {
        "objective.name": by_loss or methods.get(str(wanted), None if "beta" in given else "causal_lm"),
        "adapter.method": _method(flat, found.tool),
        "model.checkpoint": given.get("base_model") or given.get("model_name_or_path") or given.get("model"),
        "optim.learning_rate": _number(given.get("learning_rate")),
        "optim.weight_decay": _number(given.get("weight_decay")),
        "data.sequence_len": next((given[key] for key in lengths if key in given), None),
        "train.micro_batch_size": given.get("micro_batch_size") or given.get("per_device_train_batch_size"),
        "run.seed": given.get("seed"),
        "optim.max_grad_norm": given.get("max_grad_norm"),
        "objective.beta": given.get("beta") or given.get("rl_beta") or given.get("pref_beta"),
    }  # fmt: skip
    if recipe.adapter.is_adapter:
        expected |= {
            "adapter.r": flat.get("lora_r") or flat.get("lora_rank") or flat.get("r"),
            "adapter.alpha": flat.get("lora_alpha"), "adapter.dropout": flat.get("lora_dropout"),
            "adapter.modules_to_save": flat.get("lora_modules_to_save"),
        }  # fmt: skip
    for key, value in expected.items():
        if value is not None and _at(recipe, key) != value:
            yield f"{key} is {_at(recipe, key)!r}, and the file says {value!r}"
    yield from _course(given, recipe, found.tool)
    yield from _data(given, recipe)


def _method(given: dict[str, Any], tool: str) -> str:
    word = given.get("adapter") or given.get("finetuning_type") or ("lora" if given.get("use_peft") else None)
    if tool == "llamafactory-v1":
        word = given.get("name") if "r" in given or "lora_alpha" in given else None
    if tool == "llamafactory" and word is None:
        word = "lora"
    if word in (None, "full"):
        return "full"
    return "qlora" if given.get("load_in_4bit") or given.get("quantization_bit") == 4 else str(word)


def _course(given: dict[str, Any], recipe: Recipe, tool: str) -> Iterator[str]:
    """Length, batch, warm-up, schedule and optimizer."""
    steps = given.get("max_steps")
    epochs = given.get("num_epochs") or given.get("num_train_epochs")
    if steps and steps > 0:
        if recipe.train.steps != steps:
            yield f"train.steps is {recipe.train.steps}, and the file says {steps}"
    elif epochs and recipe.train.epochs != epochs:
        yield f"train.epochs is {recipe.train.epochs}, and the file says {epochs}"
    accumulated = (
        given.get("gradient_accumulation_steps") or given.get("batch_size", 0) // recipe.train.micro_batch_size or 1
    )
    shards = math.prod(given.get(key) or 1 for key in ("dp_shard_size", "dp_replicate_size"))
    shards = max(
        1, shards // math.prod(given.get(key) or 1 for key in ("tensor_parallel_size", "context_parallel_size"))
    )
    if recipe.global_batch_size != recipe.train.micro_batch_size * accumulated * shards:
        yield f"train.global_batch_size is {recipe.global_batch_size}"
    warmup, share = given.get("warmup_steps"), given.get("warmup_ratio")
    schedule = str(given.get("lr_scheduler") or given.get("lr_scheduler_type") or "")
    if schedule != "constant":
        if warmup and warmup >= 1 and recipe.optim.warmup != warmup:
            yield f"optim.warmup is {recipe.optim.warmup}, and the file says {warmup}"
        if share and not warmup and recipe.optim.warmup != f"{100 * share:g}%":
            yield f"optim.warmup is {recipe.optim.warmup}, and the file says {share}"
    if schedule and not schedule.startswith(recipe.optim.schedule):
        yield f"optim.schedule is {recipe.optim.schedule}, and the file says {schedule}"
    name = str(given.get("optimizer") or given.get("optim") or "adamw")
    if not given.get("optim_config") and not given.get("use_muon") and recipe.optim.name.partition("_")[0] not in name:
        yield f"optim.name is {recipe.optim.name}, and the file says {name}"


def _data(given: dict[str, Any], recipe: Recipe) -> Iterator[str]:
    """Packing and targets."""
    packs, is_plain = given.get("sample_packing", given.get("packing")), recipe.objective.row.answers is None
    pretrains = bool(given.get("pretraining_dataset"))
    if packs is not None and is_plain and not pretrains and recipe.data.packing != bool(packs):
        yield f"data.packing is {recipe.data.packing}, and the file says {packs}"
    if given.get("stage") == "pt" and packs is None and not recipe.data.packing:
        yield "data.packing is false, and stage: pt packs"
    kinds = {str(each.get("type")) for each in given.get("datasets") or [] if isinstance(each, dict)}
    if "alpaca" in kinds and "### Instruction:" not in (recipe.data.chat_template or ""):
        yield "type: alpaca is not worded as Axolotl's"
    everything = given.get("train_on_inputs") or ("dataset_mixture" in given and not given.get("assistant_only_loss"))
    if everything and is_plain and kinds != {"completion"} and recipe.data.train_on != "all":
        yield f"data.train_on is {recipe.data.train_on}, and everything is learned there"


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _at(recipe: Recipe, key: str) -> Any:
    found: Any = recipe
    for part in key.split("."):
        found = getattr(found, part)
    found = plain_value(found)
    return list(found) if isinstance(found, tuple) else found
