"""What a file says of its data, as the recipe's `data`: sources, sequences, templates and what is learned."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.recipe.aliases import spellings
from echelon.recipe.foreign.axolotl_data import read_axolotl
from echelon.recipe.foreign.defaults import Defaults, Trainer, put_default
from echelon.recipe.foreign.factory_data import read_factory, read_factory_v1
from echelon.recipe.foreign.hf_data import read_hf
from echelon.recipe.foreign.ledger import Ledger
from echelon.recipe.foreign.reading import Tool
from echelon.recipe.foreign.sources import Read
from echelon.recipe.yaml_text import show_value

_PLACE_OF_DATA = "path/to/data.jsonl"


def read_data(ledger: Ledger, tool: Tool, trainer: Trainer | None, folder: Path) -> Read:
    """The sources that a file of `tool` names, in the folder `folder`."""
    match tool:
        case "axolotl":
            return read_axolotl(ledger)
        case "llamafactory":
            return read_factory(ledger, folder)
        case "llamafactory-v1":
            return read_factory_v1(ledger, folder)
        case "hf":
            return read_hf(ledger, trainer)


def carry_data(ledger: Ledger, tool: Tool, read: Read, defaults: Defaults, dpo: bool) -> None:
    """Sources, what is held out, the sequence, templates and what is learned."""
    sources = list(read.train)
    if not sources:
        sources = [{"path": _PLACE_OF_DATA}]
        ledger.remark(f"the file names no data: set data.train, {_PLACE_OF_DATA} for now.")
        ledger.reasons["data.train"] = "not in the file"
    ledger.values["data.train"] = sources
    _carry_validation(ledger, list(read.validation))
    if ledger.move("data.sequence_len", "model_max_length") is None:
        put_default(ledger, defaults, "data.sequence_len", defaults.sequence_len)
    _carry_packing(ledger, tool, defaults, read, dpo)
    _carry_wording(ledger, read)
    _carry_learned(ledger, tool, defaults, read, dpo)
    _carry_overlong(ledger, tool, defaults)
    _carry_ends(ledger, read)
    if ledger.peek("dataset_exact_deduplication"):
        ledger.take("dataset_exact_deduplication")
        ledger.put("data.deduplicate", True, "dataset_exact_deduplication: true")
    ledger.move("data.prepare_workers")


def _carry_validation(ledger: Ledger, validation: list[dict[str, object]]) -> None:
    names = (*spellings("data.validation_fraction"), "validation_split_percentage")
    full = ledger.find(*names)
    size = ledger.number(*names)
    if validation or "data.validation" in ledger.values:
        ledger.values.setdefault("data.validation", validation)
        if full is not None and size:
            ledger.need_not(full, "the evaluation has data of its own.")
        return
    if "data.validation_fraction" in ledger.values:
        return
    if full == "validation_split_percentage" and size:
        size = size / 100
    if size and size >= 1:
        assert full is not None
        ledger.lose(full, "none are held out here: name texts of their own, or a share, as data.validation_fraction.")
        size = None
    if size:
        assert full is not None
        ledger.put("data.validation_fraction", float(size), f"{full}: {show_value(size)}")
        ledger.differ(full, "which documents are held out is decided by a hash of each, not by a shuffle.")
    else:
        ledger.put("data.validation_fraction", 0, "nothing is held out" if full is None else f"{full}")


def _carry_packing(ledger: Ledger, tool: Tool, defaults: Defaults, read: Read, dpo: bool) -> None:
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
    if dpo and packs:
        ledger.put("data.packing", False, "one pair at a time")
        return
    ledger.put(
        "data.packing", packs, f"the default of {defaults.name}" if full is None else f"{full}: {show_value(value)}"
    )
    if packs:
        joins = tool == "llamafactory" and not neat and not _pretrains(ledger)
        _carry_mask(ledger, tool, defaults, full or "packing", joins, bool(read.plain))


def _pretrains(ledger: Ledger) -> bool:
    """Whether the file is LLaMA-Factory's of pretraining."""
    return ledger.given.get("stage") == "pt"


def _refuse_padding(ledger: Ledger, tool: Tool, full: str | None, is_padded: bool) -> None:
    if tool == "axolotl" and is_padded:
        ledger.refuse(
            full or "datasets.0.type", "each text is cut into sequences of its own there, and padded; set "
            "sample_packing: true, which is had here."
        )  # fmt: skip


def _carry_joined(ledger: Ledger, packs: bool) -> None:
    """Axolotl's `pretraining_dataset`."""
    apart = packs and ledger.take("pretrain_multipack_attn") is not False
    ledger.put("data.packing", True, "pretraining_dataset: texts are joined")
    ledger.put("data.document_mask", apart, f"sample_packing: {show_value(packs)}")


def _carry_mask(ledger: Ledger, tool: Tool, defaults: Defaults, full: str, joins: bool, plain: bool) -> None:
    """Whether packed samples attend to each other. `joins`: they do in the tool."""
    strategy = ledger.take("packing_strategy")
    if joins:
        ledger.put("data.document_mask", False, "packing without neat_packing")
        ledger.differ(
            full, "without neat_packing packed samples attend to each other, and document_mask: false says so; take it "
            "out, and they will not."
        )  # fmt: skip
    elif tool == "axolotl" or (tool == "hf" and defaults.name != "transformers" and strategy != "wrapped"):
        ledger.put("data.document_mask", True, "packed samples do not see each other")
        if plain:
            ledger.differ(full, "plain texts are joined and cut at data.sequence_len, and not each by itself.")


def _carry_batching(ledger: Ledger) -> None:
    """v1's `batching_strategy`: how a microbatch is laid out, or, with `dynamic`, how much a step holds."""
    strategy = ledger.take("batching_strategy")
    if strategy not in (None, "normal", "padding_free"):
        ledger.refuse(
            "batching_strategy", "a step holds as many samples as fit into a number of tokens there; here all steps "
            "hold train.global_batch_size sequences."
        )  # fmt: skip
    ledger.put(
        "data.packing", False, f"batching_strategy: {strategy}" if strategy else "the default of LLaMA-Factory v1"
    )


def _carry_wording(ledger: Ledger, read: Read) -> None:
    if len(read.wordings) > 1:
        said = ", ".join(wording.said for wording in read.wordings)
        first = next(name for name in ledger.given if name.partition(".")[0] in ("datasets", "test_datasets"))
        ledger.refuse(
            first, f"a recipe has one chat template, and this file words its data in "
            f"several ways: {said}; rewrite them in one."
        )  # fmt: skip
    for wording in read.wordings[:1]:
        if wording.template is not None:
            ledger.put("data.chat_template", wording.template, wording.said)
        if wording.system is not None:
            ledger.put("data.system_prompt", wording.system, f"{wording.said}, its system message")
    for name in ("chat_template_jinja", "chat_template"):
        if ledger.find(name) is not None:
            ledger.need_not(name, "the data sets have a wording of their own.")
    if ledger.peek("default_system_message", "default_system", "system_prompt"):
        ledger.move("data.system_prompt", "default_system_message", "default_system", "system_prompt")


def _carry_learned(ledger: Ledger, tool: Tool, defaults: Defaults, read: Read, dpo: bool) -> None:
    """`data.train_on`. Said even where it is echelon's own default, for it is what differs most between the tools."""
    whole, last = ledger.find("train_on_inputs", "train_on_prompt"), ledger.find("mask_history")
    only_answers = ledger.find("assistant_only_loss")
    assistant = ledger.take("assistant_only_loss")
    if read.plain or dpo:
        why = "all of a text is learned." if read.plain else "the answers of a pair are compared."
        for name in filter(None, (whole, last)):
            ledger.need_not(name, why)
        return
    if whole is not None and ledger.take(whole) is True:
        ledger.put("data.train_on", "all", f"{whole}: true")
        if tool == "axolotl" and any(map(_has_turns, read.train)):
            ledger.refuse(
                whole, "of each turn its text is learned there, and here what the template puts around it too."
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
        ledger.need_not(full, "of a prompt with its completion, the completion is learned.")
    elif full is not None:
        ledger.refuse(full, "of a prompt with its completion, only the completion is learned here.")


def _has_turns(source: Mapping[str, Any]) -> bool:
    """Whether a source is of conversations, rather than of questions with their answers."""
    return source.get("format") in ("messages", "sharegpt") or bool(
        {"messages", "conversations"} & {*source.get("fields", ())}
    )


def _carry_overlong(ledger: Ledger, tool: Tool, defaults: Defaults) -> None:
    full = ledger.find("excess_length_strategy", "sample_packing_excess")
    if full is None:
        put_default(ledger, defaults, "data.on_overlong", defaults.on_overlong)
        return
    value = ledger.take(full)
    ours = {"drop": "drop", "truncate": "cut", "raise": "refuse"}.get(str(value))
    if ours is None:
        ledger.refuse(full, "a sample that is too long is cut, dropped or refused: data.on_overlong.")
    else:
        ledger.put("data.on_overlong", ours, f"{full}: {value}")


def _carry_ends(ledger: Ledger, read: Read) -> None:
    """The tokens that end turns and texts, where the file names some."""
    ends = ledger.find("eot_tokens")
    eos = ledger.find("eos_token")
    if ends is not None and read.plain:
        ledger.need_not(ends, "the data holds no conversations.")
    elif ends is not None:
        ledger.put("data.eot_tokens", ledger.words(ends), f"{ends}: {show_value(ledger.given[ends])}")
    if eos == "eos_token":  # TRL's
        if "eos_token" in str(ledger.values.get("data.chat_template", "")):
            ledger.refuse(eos, "the chat template names the tokenizer's eos; write the token itself into it.")
        token = str(ledger.take(eos))
        ledger.put("data.document_separator", token, f"{eos}: {token}")
        if not read.plain:
            ledger.put("data.eot_tokens", [token], f"{eos}: {token}")
    elif named := ledger.given.get("special_tokens.eos_token"):
        ledger.put("data.document_separator", str(named), f"special_tokens.eos_token: {named}")
