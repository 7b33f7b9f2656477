"""Texts, conversations and how they become sequences, of another tool's file."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from echelon.recipe.aliases import spellings
from echelon.recipe.foreign.ledger import Ledger
from echelon.recipe.foreign.reading import Tool
from echelon.recipe.yaml_text import show_value

_PLACE_OF_DATA = "path/to/data.jsonl"
_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow", ".txt", ".gz", ".zst", ".ndjson")
_CONTAINERS = ("json", "jsonl", "csv", "parquet", "arrow", "text")
# Names of an instruction's fields, Axolotl's and LLaMA-Factory's, to ours.
_ALPACA = {"field_instruction": "instruction", "field_input": "input", "field_output": "output",
           "field_system": "system"}  # fmt: skip
_LF_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
              "history": "history"}  # fmt: skip
_LF_PAIRS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
_EVERYWHERE = {"split": "split", "weight": "weight"}
_TEMPLATES = ("chatml", "llama3", "mistral", "gemma", "zephyr", "alpaca")
_FORMATS = ("alpaca", "sharegpt", "messages", "prompt_completion", "preference", "tokens")


def carry_data(ledger: Ledger, tool: Tool, folder: Path) -> None:
    """Sources, what is held out, the sequence, templates and what is learned."""
    match tool:
        case "axolotl":
            sources = list(_axolotl_sources(ledger, "datasets", "pretraining_dataset"))
            validation = list(_axolotl_sources(ledger, "test_datasets"))
        case "llamafactory":
            sources = _factory_sources(ledger, "dataset", folder)
            validation = _factory_sources(ledger, "eval_dataset", folder)
        case "hf":
            sources, validation = _hf_sources(ledger), _hf_validation(ledger)
    if not sources:
        sources = [{"path": _PLACE_OF_DATA}]
        ledger.remark(f"the file names no data: set data.train, {_PLACE_OF_DATA} for now.")
        ledger.reasons["data.train"] = "not in the file"
    ledger.values["data.train"] = sources
    _carry_validation(ledger, validation)
    if ledger.move("data.sequence_len", "model_max_length") is None:
        length = {"axolotl": 512, "llamafactory": 2048, "hf": 1024}[tool]
        ledger.put("data.sequence_len", length, f"the default of {'TRL' if tool == 'hf' else tool}")
    plain = all(source.get("format", "auto") in ("auto", "text", "jsonl") for source in sources) and tool != "hf"
    _carry_packing(ledger, tool, plain)
    _carry_template(ledger, tool)
    _carry_training_part(ledger, tool)
    ledger.move("data.prepare_workers")


def is_hub_id(path: str) -> bool:
    """Whether a path is OWNER/NAME of the hub rather than a file: no suffix of a file, no place in a file system."""
    if path.startswith((".", "/", "~")) or "://" in path or path.endswith(_SUFFIXES) or Path(path).exists():
        return False
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path))


def _source(ledger: Ledger, name: str, path: str, form: str | None, fields: Mapping[str, str]) -> dict[str, Any]:
    source: dict[str, Any] = {"path": path}
    if is_hub_id(path):
        source["format"] = "hub"
        if form in _FORMATS:
            ledger.differ(
                name,
                f"a dataset of the hub has format: hub, and that its records are {form} is told from their fields.",
            )
    elif form is not None:
        source["format"] = form
    renamed = {ours: theirs for ours, theirs in fields.items() if ours != theirs}
    return {**source, **({"fields": renamed} if renamed else {})}


def _carry_split(ledger: Ledger, name: str, source: dict[str, Any]) -> None:
    full = ledger.find(name) if name else None
    if full is None:
        return
    if source["path"].endswith(_SUFFIXES):
        ledger.need_not(full, "a file has no splits.")
    else:
        source["split"] = ledger.take(full)


def _axolotl_sources(ledger: Ledger, *names: str) -> Iterator[dict[str, Any]]:
    full = ledger.find(*names)
    if full is None or not ledger.given[full]:
        return
    items = ledger.given[full] if isinstance(ledger.given[full], list) else [ledger.given[full]]
    ledger.reasons["data.validation" if full == "test_datasets" else "data.train"] = full
    ledger.expand(
        full, {str(index): item if isinstance(item, dict) else {"path": item} for index, item in enumerate(items)}
    )
    for index in range(len(items)):
        name = f"{full}.{index}"
        ledger.expand(name, ledger.given[name])
        if isinstance(kind := ledger.given.get(f"{name}.type"), dict):
            ledger.expand(f"{name}.type", kind)
        yield from _axolotl_source(ledger, name, full == "pretraining_dataset")


def _axolotl_source(ledger: Ledger, name: str, pretraining: bool) -> Iterator[dict[str, Any]]:
    def take(key: str) -> Any:
        return ledger.take(f"{name}.{key}")

    kind = take("type")
    form, fields = _axolotl_form(ledger, name, None if kind is None else str(kind), pretraining)
    path, files = take("path"), ledger.peek(f"{name}.data_files")
    container = take("ds_type")
    paths = [str(path)]
    if files and (path in _CONTAINERS or container):
        paths = [str(each) for each in (take("data_files") if isinstance(files, list) else [take("data_files")])]
    elif files:
        ledger.lose(f"{name}.data_files", "a source is a path; name the files themselves instead of their dataset.")
    if form is None and container in ("csv", "parquet", "arrow", "text"):
        form = str(container)
    for each in paths:
        source = _source(ledger, f"{name}.type" if kind else f"{name}.path", each, form, fields)
        _carry_split(ledger, f"{name}.split", source)
        yield source
    if ledger.peek(f"{name}.roles_to_train") == ["assistant"] or ledger.peek(f"{name}.roles_to_train") == ["gpt"]:
        take("roles_to_train")
    if ledger.peek(f"{name}.train_on_eos") in ("turn", "all"):
        ledger.need_not(f"{name}.train_on_eos", "the token that ends a learned turn is always learned.")


def _axolotl_form(ledger: Ledger, name: str, kind: str | None, pretraining: bool) -> tuple[str | None, dict[str, str]]:
    """(format, our field names to the records' own) of a dataset's `type` and `field...` keys."""

    def renames(table: Mapping[str, str]) -> dict[str, str]:
        found = {ours: ledger.take(f"{name}.{theirs}", f"{name}.type.{theirs}") for theirs, ours in table.items()}
        return {ours: str(theirs) for ours, theirs in found.items() if theirs is not None}

    if pretraining or kind in ("completion", "pretrain"):
        return None, renames({"field": "text", "text_column": "text"})
    word, _, style = (kind or "").partition(".")
    if kind is None:
        custom = renames(_ALPACA)
        return ("alpaca" if custom else None), custom
    if word.startswith("alpaca"):
        word, _, style = word.partition(":")
        if word != "alpaca" or style:
            ledger.differ(f"{name}.type", "the prompt's wording is the chat template's, not this variant's.")
        return "alpaca", renames(_ALPACA)
    if word == "sharegpt" or (word == "chat_template" and style in ("", "default")):
        return _axolotl_conversation(ledger, name, word, renames)
    if word in ("chatml", "llama3", "zephyr", "gemma") or kind.startswith("chat_template."):
        ledger.differ(f"{name}.type", "pairs are told from their fields, and their wording is the chat template's.")
        return "preference", renames({"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"})
    ledger.lose(
        f"{name}.type", f"echelon reads text, {', '.join(_FORMATS)}; which one it is, is told from the records."
    )
    return None, {}


def _axolotl_conversation(ledger: Ledger, name: str, word: str, renames: Any) -> tuple[str, dict[str, str]]:
    mapping = ledger.peek(f"{name}.message_property_mappings")
    if isinstance(mapping, dict):
        ledger.expand(f"{name}.message_property_mappings", mapping)
    role = ledger.take(f"{name}.message_property_mappings.role", f"{name}.message_field_role")
    content = ledger.take(f"{name}.message_property_mappings.content", f"{name}.message_field_content")
    messages = ledger.take(f"{name}.field_messages")
    if word == "sharegpt" or (role, content) == ("from", "value"):
        pairs = {"conversations": messages, "from": role, "value": content}
        return "sharegpt", {ours: str(theirs) for ours, theirs in pairs.items() if theirs}
    pairs = {"messages": messages, "role": role, "content": content}
    return "messages", {ours: str(theirs) for ours, theirs in pairs.items() if theirs}


def _factory_sources(ledger: Ledger, name: str, folder: Path) -> list[dict[str, Any]]:
    value = ledger.peek(name)
    names = ledger.words(name)
    if not names:
        return []
    data_dir = Path(str(ledger.take("dataset_dir") or ledger.given.get("dataset_dir") or "data"))
    table = next((each for each in (folder / data_dir, data_dir) if (each / "dataset_info.json").is_file()), None)
    known = json.loads((table / "dataset_info.json").read_text(encoding="utf-8")) if table is not None else {}
    ledger.reasons["data.validation" if name == "eval_dataset" else "data.train"] = f"{name}: {show_value(value)}"
    sources = [_factory_source(ledger, name, data_dir, each, known) for each in names]
    if ledger.find("interleave_probs") and name == "dataset":
        shares = ledger.take("interleave_probs")
        shares = [float(share) for share in shares.split(",")] if isinstance(shares, str) else shares
        for source, share in zip(sources, shares, strict=False):
            source["weight"] = share
        ledger.take("mix_strategy")
    return sources


def _factory_source(
    ledger: Ledger, name: str, data_dir: Path, dataset: str, known: Mapping[str, Any]
) -> dict[str, Any]:
    entry = known.get(dataset)
    if entry is None:
        ledger.differ(
            name, f"{dataset} stands in no dataset_info.json found in {data_dir}; its path is taken for granted."
        )
        return {"path": str(data_dir / f"{dataset}.json")}
    path = entry.get("hf_hub_url") or str(data_dir / entry.get("file_name", f"{dataset}.json"))
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    if entry.get("ranking"):
        form, fields = "preference", {ours: columns[key] for key, ours in _LF_PAIRS.items() if key in columns}
    elif entry.get("formatting") == "sharegpt":
        form = "messages" if tags.get("role_tag") == "role" else "sharegpt"
        keys = ("messages", "role", "content") if form == "messages" else ("conversations", "from", "value")
        theirs = (columns.get("messages"), tags.get("role_tag"), tags.get("content_tag"))
        fields = {ours: own for ours, own in zip(keys, theirs, strict=True) if own}
    elif ledger.given.get("stage") == "pt":
        form, fields = None, {"text": columns["prompt"]} if "prompt" in columns else {}
    else:
        form, fields = "alpaca", {ours: columns[key] for key, ours in _LF_ALPACA.items() if key in columns}
    source = _source(ledger, name, path, form, fields)
    if "split" in entry and source.get("format") == "hub":
        source["split"] = entry["split"]
    told = {"hf_hub_url", "file_name", "columns", "tags", "ranking", "formatting", "split"}
    if left := sorted(set(entry) - told):
        ledger.differ(name, f"of {dataset} in dataset_info.json, {', '.join(left)} could not be carried over.")
    return source


def _hf_sources(ledger: Ledger) -> list[dict[str, Any]]:
    sources = []
    mixture = ledger.peek("datasets")
    if isinstance(mixture, list):
        ledger.expand("datasets", {str(index): item for index, item in enumerate(mixture)})
        for index, item in enumerate(mixture):
            ledger.expand(f"datasets.{index}", item if isinstance(item, dict) else {"path": item})
            sources.append(_hf_source(ledger, f"datasets.{index}.path", f"datasets.{index}.split"))
        ledger.reasons["data.train"] = "datasets"
    else:
        full = ledger.find("dataset_name", "train_file", "dataset")
        if full is not None:
            ledger.reasons["data.train"] = f"{full}: {show_value(ledger.given[full])}"
            sources.append(_hf_source(ledger, full, "dataset_train_split"))
    if field := ledger.peek("dataset_text_field"):
        ledger.take("dataset_text_field")
        if field != "text":
            for source in sources:
                source["fields"] = {"text": field}
    return sources


def _hf_source(ledger: Ledger, name: str, split_name: str) -> dict[str, Any]:
    source = _source(ledger, name, str(ledger.take(name)), None, {})
    _carry_split(ledger, split_name, source)
    return source


def _hf_validation(ledger: Ledger) -> list[dict[str, Any]]:
    if ledger.find("validation_file"):
        ledger.reasons["data.validation"] = "validation_file"
        return [_hf_source(ledger, "validation_file", "")]
    if ledger.find("dataset_test_split"):
        evaluates = ledger.given.get("eval_strategy") not in (None, "no")
        if evaluates and ledger.find("dataset_name") is None and ledger.given.get("dataset_name"):
            ledger.reasons["data.validation"] = "dataset_test_split"
            split = ledger.take("dataset_test_split")
            path = str(ledger.given["dataset_name"])
            return [{"path": path, "format": "hub", "split": split}] if is_hub_id(path) else []
        ledger.need_not("dataset_test_split", "nothing is evaluated.")
    return []


def _carry_validation(ledger: Ledger, validation: list[dict[str, Any]]) -> None:
    names = (*spellings("data.validation_fraction"), "validation_split_percentage")
    full = ledger.find(*names)
    size = ledger.number(*names)
    if validation:
        ledger.values["data.validation"] = validation
        if full is not None and size:
            ledger.need_not(full, "the evaluation has data of its own.")
        return
    if full == "validation_split_percentage" and size:
        size = size / 100
    if size and size >= 1:
        assert full is not None
        ledger.lose(full, "a share of the data is held out, not a number of samples; set data.validation_fraction.")
        size = None
    if size:
        assert full is not None
        ledger.put("data.validation_fraction", float(size), f"{full}: {show_value(size)}")
        ledger.differ(full, "which documents are held out is decided by a hash of each, not by a shuffle.")
    else:
        ledger.put("data.validation_fraction", 0, "nothing is held out" if full is None else f"{full}")


def _carry_packing(ledger: Ledger, tool: Tool, plain: bool) -> None:
    neat, full = ledger.take("neat_packing"), ledger.find("sample_packing", "packing")
    packs = bool(neat) or bool(ledger.take("sample_packing", "packing"))
    stage = ledger.peek("stage")
    if tool == "llamafactory" and stage == "pt" and full is None:
        packs = True  # LLaMA-Factory packs when it pretrains, unless told otherwise
    if full is None and not neat and plain and tool == "axolotl":
        return  # text without packing has no sense here: documents are joined
    ledger.put("data.packing", packs, f"{full}: {str(packs).lower()}" if full else f"the default of {tool}")
    if packs and tool == "llamafactory" and not neat and stage != "pt":
        ledger.put("data.document_mask", False, "packing without neat_packing")
        if full is not None:
            ledger.differ(
                full, "without neat_packing packed samples attend to each other, and document_mask: false says so; "
                "take it out, and they will not."
            )  # fmt: skip


def _carry_template(ledger: Ledger, tool: Tool) -> None:
    full = ledger.find("chat_template_jinja", "chat_template_path", "chat_template", "template")
    if full is None:
        return
    value = ledger.take(full)
    if (full == "chat_template" and value == "jinja") or str(value).startswith("tokenizer_default"):
        return
    if "{%" in str(value) or "{{" in str(value):
        ledger.lose(full, "write the template into a file, and give its path as data.chat_template.")
    elif value == "default" and tool == "llamafactory":
        ledger.lose(full, "LLaMA-Factory's `default` wording is not a template here; the tokenizer's own is used.")
    elif full in ("chat_template_path",) or str(value).endswith((".jinja", ".j2")):
        ledger.put("data.chat_template", str(value), f"{full}: {show_value(value)}")
    elif value in _TEMPLATES:
        ledger.put("data.chat_template", value, f"{full}: {value}")
    else:
        ledger.differ(full, "the tokenizer's own template is used, which for a chat model is the one of that name.")


def _carry_training_part(ledger: Ledger, tool: Tool) -> None:
    whole = ledger.find("train_on_inputs", "train_on_prompt")
    if whole is not None and ledger.given[whole] is True:
        ledger.take(whole)
        ledger.put("data.train_on", "all", f"{whole}: true")
    if ledger.peek("mask_history"):
        ledger.take("mask_history")
        ledger.put("data.train_on", "last", "mask_history: true")
    if tool == "hf" and (full := ledger.find("assistant_only_loss")) is not None and not ledger.take(full):
        ledger.put("data.train_on", "all", f"{full}: false")
    if ledger.peek("default_system_message", "default_system", "system_prompt"):
        ledger.move("data.system_prompt", "default_system_message", "default_system", "system_prompt")
    full = ledger.find("excess_length_strategy", "sample_packing_excess")
    if full is not None:
        value = ledger.take(full)
        ours = {"drop": "drop", "truncate": "cut", "raise": "refuse"}.get(str(value))
        if ours is None:
            ledger.lose(full, "data.on_overlong is cut, drop or refuse.")
        else:
            ledger.put("data.on_overlong", ours, f"{full}: {value}")
    elif tool == "axolotl":
        ledger.put("data.on_overlong", "drop", "the default of axolotl")
