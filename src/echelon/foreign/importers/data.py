"""Import the data keys of another tool's file: sources, sequences, chat template and trained tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.foreign.importers.axolotl_data import read_axolotl
from echelon.foreign.importers.factory_data import read_factory, read_factory_v1
from echelon.foreign.importers.ledger import Defaults, Ledger, Trainer, put_default
from echelon.foreign.importers.sources import Read, Wording, build_source, is_hub_id, put_split
from echelon.foreign.importers.swift import read_swift
from echelon.recipe.aliases import spellings
from echelon.recipe.inputs import is_template
from echelon.recipe.names import Answers
from echelon.recipe.yaml_text import show_value

# The columns that a handbook dataset keeps, and the format that each implies.
_COLUMNS = {"messages": "messages", "chosen": "preference", "conversations": "sharegpt",
            "completion": "prompt_completion", "text": None}  # fmt: skip
_PLACE_OF_DATA = "path/to/data.jsonl"


def read_hf(ledger: Ledger, trainer: Trainer | None) -> Read:
    """Read the data keys of a file of the Hugging Face family, except lengths."""
    wording = _template(ledger)
    mixture = ledger.peek("dataset_mixture")
    if isinstance(mixture, dict):
        train = _mixture(ledger, mixture)
    elif isinstance(ledger.peek("datasets"), list):
        train = _listed(ledger, "datasets")
    elif isinstance(mixer := ledger.peek("dataset_mixer"), dict):
        train = _mixer(ledger, mixer)
    else:
        train = _named(ledger, trainer)
    field = ledger.take("dataset_text_field")
    for source in train if field not in (None, "text") else ():
        source["fields"] = {"text": field}
    limit = ledger.number("max_train_samples")
    for source in train if limit is not None else ():
        source["max_samples"] = int(limit or 0)
    for source in train if trainer == "kto" else ():
        if source.get("format") == "prompt_completion":
            source["format"] = "unpaired_preference"
    plain = True if trainer == "transformers" or field is not None else None
    return Read(tuple(train), tuple(_held_out(ledger, trainer)), () if plain else (wording,), plain)


def _template(ledger: Ledger) -> Wording:
    if (full := ledger.find("chat_template_path", "chat_template")) is None:
        return Wording(None, "the tokenizer's own")
    value = str(ledger.take(full))
    if not is_template(value) and not value.endswith((".jinja", ".j2")):
        ledger.refuse(full, "it is neither a Jinja template nor a .jinja or .j2 file; give one of them.")
    return Wording(value, full if is_template(value) else f"{full}: {value}")


def _mixture(ledger: Ledger, mixture: dict[str, Any]) -> list[dict[str, Any]]:
    ledger.expand("dataset_mixture", mixture)
    size = ledger.find("dataset_mixture.test_split_size")
    if size is not None and isinstance(ledger.given[size], float) and ledger.given[size] < 1:
        ledger.put("data.validation_fraction", ledger.take(size), f"{size}: {show_value(ledger.given[size])}")
        ledger.differ(size, "the held-out documents are selected by a hash of each document, not by a shuffle.")
    elif size is not None:
        ledger.lose(
            size,
            "a number of held-out records is not supported; set data.validation or a fraction, "
            "data.validation_fraction.",
        )
    if ledger.find("dataset_mixture.seed"):
        ledger.need_not("dataset_mixture.seed", "the order follows run.seed.")
    return _listed(ledger, "dataset_mixture.datasets")


def _listed(ledger: Ledger, full: str) -> list[dict[str, Any]]:
    items = ledger.given[full]
    ledger.expand(full, {str(index): item for index, item in enumerate(items)})
    for index, item in enumerate(items):
        ledger.expand(f"{full}.{index}", item if isinstance(item, dict) else {"path": item})
    ledger.reasons["data.train"] = full
    return [_item(ledger, f"{full}.{index}") for index in range(len(items))]


def _item(ledger: Ledger, name: str) -> dict[str, Any]:
    path = str(ledger.take(f"{name}.id", f"{name}.path"))
    config = ledger.take(f"{name}.config", f"{name}.name")
    columns = ledger.peek(f"{name}.columns")
    columns = [str(column) for column in columns] if isinstance(columns, list) else []
    form = next((form for column, form in _COLUMNS.items() if column in columns), None)
    ledger.take(f"{name}.columns")
    if "chat_template_kwargs" in columns:
        ledger.refuse(f"{name}.columns", "template settings per record are not supported.")
    fields = {column: column for column in columns if column in ("prompt",) and form == "preference"}
    source = build_source(path, form, fields, None if config == "default" else config)
    put_split(ledger, f"{name}.split", source)
    _carry_share(ledger, name, source)
    return source


def _carry_share(ledger: Ledger, name: str, source: dict[str, Any]) -> None:
    """Import a fraction of a dataset as a slice of its split."""
    share = ledger.number(f"{name}.weight", f"{name}.fraction")
    if share is not None and share < 1 and "split" in source:
        source["split"] = f"{source['split']}[:{share * 100:g}%]"
        ledger.differ(
            str(next(key for key in (f"{name}.weight", f"{name}.fraction") if key in ledger.given)),
            "the first records are used, not a random selection.",
        )
    elif share is not None and share != 1:
        ledger.refuse(f"{name}.weight", "a part of a dataset is selected by data.train.0.split; this is not a part.")


def _mixer(ledger: Ledger, mixer: dict[str, Any]) -> list[dict[str, Any]]:
    """Import the handbook's older form: `{ID: fraction}`, with training and evaluation splits in a separate key."""
    ledger.take("dataset_mixer")
    splits = ledger.words("dataset_splits")
    ledger.reasons["data.train"] = "dataset_mixer"
    if any(share != 1 for share in mixer.values()):
        ledger.refuse(
            "dataset_mixer", "fractions of datasets are given as splits; list the datasets in dataset_mixture."
        )
    sources = []
    for path in mixer:
        source = build_source(str(path), None, {})
        sources.append({**source, "split": splits[0] if splits else "train"})
    if len(splits) > 1:
        ledger.values["data.validation"] = [{**source, "split": splits[1]} for source in sources]
        ledger.reasons["data.validation"] = "dataset_splits"
    return sources


def _named(ledger: Ledger, trainer: Trainer | None) -> list[dict[str, Any]]:
    if (full := ledger.find("dataset_name", "train_file", "dataset")) is None:
        return []
    ledger.reasons["data.train"] = f"{full}: {show_value(ledger.given[full])}"
    config = ledger.take("dataset_config", "dataset_config_name") if full == "dataset_name" else None
    form, fields = None, {}
    if trainer == "grpo":
        form, fields = "prompt", {"prompt": str(ledger.take("dataset_prompt_column") or "prompt")}
    source = build_source(str(ledger.take(full)), form, fields, config)
    put_split(ledger, "dataset_train_split", source)
    return [source]


def _held_out(ledger: Ledger, trainer: Trainer | None) -> list[dict[str, Any]]:
    if (full := ledger.find("validation_file")) is not None:
        ledger.reasons["data.validation"] = "validation_file"
        return [build_source(str(ledger.take(full)), None, {})]
    evaluates = ledger.given.get("eval_strategy") not in (None, "no")
    name = ledger.given.get("dataset_name")
    if evaluates and trainer not in (None, "transformers") and name is not None and is_hub_id(str(name)):
        split = ledger.take("dataset_test_split")
        ledger.reasons["data.validation"] = "dataset_test_split" if split else "the default of TRL"
        return [{"path": str(name), "format": "hub", "split": split or "test"}]
    if ledger.find("dataset_test_split"):
        ledger.need_not("dataset_test_split", "nothing is evaluated.")
    return []


def read_data(ledger: Ledger, tool: str, trainer: Trainer | None, folder: Path) -> Read:
    """Read the data sources of a file of `tool` in the folder `folder`."""
    match tool:
        case "ms-swift":
            return read_swift(ledger)
        case "axolotl":
            return read_axolotl(ledger)
        case "llamafactory":
            return read_factory(ledger, folder)
        case "llamafactory-v1":
            return read_factory_v1(ledger, folder)
        case _:
            return read_hf(ledger, trainer)


def carry_data(ledger: Ledger, tool: str, read: Read, defaults: Defaults, answers: Answers | None) -> None:
    """Import the recipe's `data`: sources, validation, sequence length, packing, chat template, trained tokens."""
    if not (sources := list(read.train)):
        sources = [{"path": _PLACE_OF_DATA}]
        ledger.remark(f"the file has no data; set data.train (currently {_PLACE_OF_DATA}).")
        ledger.reasons["data.train"] = "not in the file"
    ledger.values["data.train"] = sources
    _carry_validation(ledger, list(read.validation))
    if ledger.move("data.sequence_len", "model_max_length") is None:
        put_default(ledger, defaults, "data.sequence_len", defaults.sequence_len)
    _carry_packing(ledger, tool, defaults, read, answers)
    _carry_wording(ledger, read)
    _carry_learned(ledger, tool, defaults, read, answers)
    _carry_overlong(ledger, tool, defaults)
    _carry_ends(ledger, read)
    if ledger.peek("dataset_exact_deduplication"):
        ledger.take("dataset_exact_deduplication")
        ledger.put("data.deduplicate", True, "dataset_exact_deduplication: true")
    ledger.move("data.prepare_workers")


def _carry_validation(ledger: Ledger, validation: list[dict[str, object]]) -> None:
    names = (*spellings("data.validation_fraction"), "validation_split_percentage", "split_dataset_ratio")
    full = ledger.find(*names)
    size = ledger.number(*names)
    if validation or "data.validation" in ledger.values:
        ledger.values.setdefault("data.validation", validation)
        if full is not None and size:
            ledger.need_not(full, "the file has separate evaluation data.")
        return
    if "data.validation_fraction" in ledger.values:
        return
    if full == "validation_split_percentage" and size:
        size = size / 100
    if size and size >= 1:
        assert full is not None
        ledger.lose(
            full,
            "a number of held-out records is not supported; set data.validation or a fraction, "
            "data.validation_fraction.",
        )
        size = None
    if size:
        assert full is not None
        ledger.put("data.validation_fraction", float(size), f"{full}: {show_value(size)}")
        ledger.differ(full, "the held-out documents are selected by a hash of each document, not by a shuffle.")
    else:
        ledger.put("data.validation_fraction", 0, "nothing is held out" if full is None else f"{full}")


def _carry_packing(ledger: Ledger, tool: str, defaults: Defaults, read: Read, answers: Answers | None) -> None:
    neat, full = ledger.take("neat_packing"), ledger.find("sample_packing", "packing")
    value = ledger.take("sample_packing", "packing")
    if tool == "llamafactory-v1":
        _carry_batching(ledger)
        return
    default = _pretrains(ledger) or defaults.packing
    packs = bool(neat or (default if full is None else value))
    if any(name.startswith("pretraining_dataset.") for name in ledger.given):
        _carry_joined(ledger, packs)
        return
    _refuse_padding(ledger, tool, full, is_padded=bool(read.plain) and not packs)
    if answers and packs:
        ledger.put("data.packing", False, "one pair, or one judged answer, at a time")
        return
    ledger.put(
        "data.packing", packs, f"the default of {defaults.name}" if full is None else f"{full}: {show_value(value)}"
    )
    if packs:
        joins = tool == "llamafactory" and not neat and not _pretrains(ledger)
        _carry_mask(ledger, tool, defaults, full or "packing", joins, bool(read.plain))


def _pretrains(ledger: Ledger) -> bool:
    """Whether this is a LLaMA-Factory file for pretraining."""
    return ledger.given.get("stage") == "pt"


def _refuse_padding(ledger: Ledger, tool: str, full: str | None, is_padded: bool) -> None:
    if tool == "axolotl" and is_padded:
        ledger.refuse(
            full or "datasets.0.type", "Axolotl cuts each text into sequences by itself and pads them, which echelon "
            "does not support; set sample_packing: true."
        )  # fmt: skip


def _carry_joined(ledger: Ledger, packs: bool) -> None:
    """Import the packing of Axolotl's `pretraining_dataset`."""
    apart = packs and ledger.take("pretrain_multipack_attn") is not False
    ledger.put("data.packing", True, "pretraining_dataset: texts are joined")
    ledger.put("data.document_mask", apart, f"sample_packing: {show_value(packs)}")


def _carry_mask(ledger: Ledger, tool: str, defaults: Defaults, full: str, joins: bool, plain: bool) -> None:
    """Set whether packed samples attend to each other. `joins`: they do in the tool."""
    strategy = ledger.take("packing_strategy")
    if joins:
        ledger.put("data.document_mask", False, "packing without neat_packing")
        ledger.differ(
            full, "without neat_packing packed samples attend to each other: document_mask: false. Remove that key to "
            "prevent it."
        )  # fmt: skip
    elif tool == "axolotl" or (tool == "hf" and defaults.name != "transformers" and strategy != "wrapped"):
        ledger.put("data.document_mask", True, "packed samples do not attend to each other")
        if plain:
            ledger.differ(full, "plain texts are joined and cut at data.sequence_len, not each text by itself.")


def _carry_batching(ledger: Ledger) -> None:
    """Import v1's `batching_strategy`: the layout of a microbatch or, with `dynamic`, the size of a step."""
    strategy = ledger.take("batching_strategy")
    if strategy not in (None, "normal", "padding_free"):
        ledger.refuse(
            "batching_strategy", "LLaMA-Factory fills a step with samples up to a number of tokens; in echelon every "
            "step has train.global_batch_size sequences."
        )  # fmt: skip
    ledger.put(
        "data.packing", False, f"batching_strategy: {strategy}" if strategy else "the default of LLaMA-Factory v1"
    )


def _carry_wording(ledger: Ledger, read: Read) -> None:
    if len(read.wordings) > 1:
        said = ", ".join(wording.said for wording in read.wordings)
        first = next(name for name in ledger.given if name.partition(".")[0] in ("datasets", "test_datasets"))
        ledger.refuse(
            first, f"a recipe has one chat template, but this file uses several: {said}; rewrite the data for one "
            "template."
        )  # fmt: skip
    for wording in read.wordings[:1]:
        if wording.template is not None:
            ledger.put("data.chat_template", wording.template, wording.said)
        if wording.system is not None:
            ledger.put("data.system_prompt", wording.system, f"{wording.said}, its system message")
    for name in ("chat_template_jinja", "chat_template"):
        if ledger.find(name) is not None:
            ledger.need_not(name, "the datasets have their own templates.")
    if ledger.peek("default_system_message", "default_system", "system_prompt"):
        ledger.move("data.system_prompt", "default_system_message", "default_system", "system_prompt")


def _carry_learned(ledger: Ledger, tool: str, defaults: Defaults, read: Read, answers: Answers | None) -> None:
    """Set `data.train_on`, also if the value is echelon's default: the tools differ most in this setting."""
    whole, last = ledger.find("train_on_inputs", "train_on_prompt"), ledger.find("mask_history")
    only_answers = ledger.find("assistant_only_loss")
    assistant = ledger.take("assistant_only_loss")
    if read.plain or answers:
        why = (
            "all tokens of plain text are targets."
            if read.plain
            else "of a prompt with its answers, only answers are trained."
        )
        for name in filter(None, (whole, last)):
            ledger.need_not(name, why)
        return
    if whole is not None and ledger.take(whole) is True:
        ledger.put("data.train_on", "all", f"{whole}: true")
        if tool == "axolotl" and any(map(_has_turns, read.train)):
            ledger.refuse(
                whole,
                "Axolotl trains on the text of each turn; echelon would also train on the template's text around it.",
            )
    elif last is not None and ledger.take(last):
        ledger.put("data.train_on", "last", f"{last}: true")
    else:
        everything = tool == "hf" and not assistant
        default = f"the default of {'TRL' if everything else defaults.name}"
        why = f"{only_answers}: {show_value(not everything)}" if only_answers else default
        ledger.put("data.train_on", "all" if everything else "assistant", why)
    _carry_completions(ledger)


def _carry_completions(ledger: Ledger) -> None:
    full = ledger.find("completion_only_loss")
    if full is not None and ledger.given[full] is True:
        ledger.need_not(full, "of a prompt-completion record, only the completion is a target.")
    elif full is not None:
        ledger.refuse(full, "of a prompt-completion record, echelon trains only on the completion.")


def _has_turns(source: Mapping[str, Any]) -> bool:
    """Whether a source contains conversations rather than single questions with answers."""
    return source.get("format") in ("messages", "sharegpt") or bool(
        {"messages", "conversations"} & {*source.get("fields", ())}
    )


def _carry_overlong(ledger: Ledger, tool: str, defaults: Defaults) -> None:
    if (full := ledger.find("excess_length_strategy", "sample_packing_excess", "truncation_strategy")) is None:
        put_default(ledger, defaults, "data.on_overlong", defaults.on_overlong)
        return
    value = ledger.take(full)
    if (
        ours := {"drop": "drop", "delete": "drop", "truncate": "cut", "right": "cut", "raise": "refuse"}.get(str(value))
    ) is None:
        ledger.refuse(full, "samples that are too long can be cut, dropped or refused: data.on_overlong.")
    else:
        ledger.put("data.on_overlong", ours, f"{full}: {value}")


def _carry_ends(ledger: Ledger, read: Read) -> None:
    """Import the tokens that end turns and texts, if the file sets any."""
    ends = ledger.find("eot_tokens")
    eos = ledger.find("eos_token")
    if ends is not None and read.plain:
        ledger.need_not(ends, "the data has no conversations.")
    elif ends is not None:
        ledger.put("data.eot_tokens", ledger.words(ends), f"{ends}: {show_value(ledger.given[ends])}")
    if eos == "eos_token":  # TRL's
        if "eos_token" in str(ledger.values.get("data.chat_template", "")):
            ledger.refuse(eos, "the chat template uses the tokenizer's eos; write the token itself into the template.")
        token = str(ledger.take(eos))
        ledger.put("data.document_separator", token, f"{eos}: {token}")
        if not read.plain:
            ledger.put("data.eot_tokens", [token], f"{eos}: {token}")
    elif named := ledger.given.get("special_tokens.eos_token"):
        ledger.put("data.document_separator", str(named), f"special_tokens.eos_token: {named}")
