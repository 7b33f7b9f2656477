"""Import the datasets of Axolotl files: `datasets`, `pretraining_dataset`, `test_datasets`."""

from collections.abc import Iterator, Mapping
from typing import Any

from echelon.foreign.importers.ledger import Ledger
from echelon.foreign.importers.sources import (
    ALPACA_STYLES,
    Read,
    Wording,
    alpaca_wording,
    axolotl_wording,
    build_source,
    is_hub_id,
    once,
    prompt_wording,
    put_split,
    unknown_roles,
)
from echelon.recipe.inputs import is_template
from echelon.recipe.names import OBJECTIVES, Answers
from echelon.recipe.yaml_text import show_value

_CONTAINERS = ("json", "jsonl", "csv", "parquet", "arrow", "text")
# Axolotl's keys for the fields of an instruction, and echelon's field names.
_ALPACA = {"field_instruction": "instruction", "field_input": "input", "field_output": "output",
           "field_system": "system"}  # fmt: skip
# Axolotl's dataset types with Alpaca prompts, and their prompt styles.
_ALPACA_TYPES: Mapping[str, str] = {
    "alpaca": "instruct", "alpaca_instruct.load": "instruct", "alpaca_chat.load": "chat",
    **{f"alpaca:{style}": style for style in ALPACA_STYLES},
}  # fmt: skip
_NOT_A_WORDING = (
    "this prompt format is not supported; rewrite the records as conversations (type: chat_template) or as texts "
    "(type: completion)."
)

_CHAT_TYPES = ("sharegpt", "chat_template", "chat_template.default")
_PAIRS_WITH_PROMPTS = "chat_template.argilla"
"""The type of conversations in which both answers contain the prompt."""
_SCORED_PAIRS = "bradley_terry.chat_template"
"""The type of pairs for a reward model: records with `input`, `chosen`, `rejected` and perhaps `system`, all texts."""
_UNTYPED: Mapping[Answers | None, str] = {
    None: "tokens", "pairs": "preference", "judged": "unpaired_preference", "prompts": "prompt"
}  # fmt: skip
"""The format of a dataset without a type, by what the objective compares."""
_PLACE_OF_PROMPTS = "path/to/prompts.jsonl"
_NOT_JUDGED = (
    "judged answers with a prompt format are not supported; rewrite them with prompt, completion and label, and remove "
    "the type."
)


def read_axolotl(ledger: Ledger) -> Read:
    """Read the data keys of an Axolotl file, except lengths. Unknown prompt formats are refused in the ledger."""
    train = list(_sources(ledger, "datasets", "pretraining_dataset"))
    held_out = list(_sources(ledger, "test_datasets"))
    both = [*train, *held_out]
    return Read(
        tuple(source for source, _, _ in train),
        tuple(source for source, _, _ in held_out),
        once(wording for _, wording, _ in both),
        all(plain for _, _, plain in both) if both else None,
    )


_Found = tuple[dict[str, Any], Wording | None, bool]


def _sources(ledger: Ledger, *names: str) -> Iterator[_Found]:
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
        for inner in ("type", "message_property_mappings"):
            if isinstance(value := ledger.given.get(f"{name}.{inner}"), dict):
                ledger.expand(f"{name}.{inner}", value)
        if _compares(ledger) == "prompts" and ledger.take(f"{name}.type"):
            yield _made_by_code(ledger, name), _template(ledger, name), False
        else:
            yield from _source(ledger, name, full == "pretraining_dataset")


def _source(ledger: Ledger, name: str, pretraining: bool) -> Iterator[_Found]:
    path, files = ledger.take(f"{name}.path"), ledger.peek(f"{name}.data_files")
    kind = ledger.take(f"{name}.type")
    form, fields, wording = _form(ledger, name, None if kind is None else str(kind), pretraining)
    container = ledger.take(f"{name}.ds_type")
    paths = [str(path)]
    if files and (path in _CONTAINERS or container):
        ledger.take(f"{name}.data_files")
        paths = [str(file) for file in (files if isinstance(files, list) else [files])]
    elif files:
        ledger.refuse(f"{name}.data_files", "a source is a whole dataset; download these files and give their paths.")
    config = ledger.take(f"{name}.name")
    if config is not None and not (is_hub_id(paths[0]) and "/" in paths[0]):
        ledger.refuse(
            f"{name}.name", "a dataset configuration is given as OWNER/DATASET/CONFIG; add the owner to the path."
        )
    for file in paths:
        stored = str(container) if form is None and container in ("csv", "parquet", "arrow", "text") else form
        source = build_source(file, stored, fields, config)
        put_split(ledger, f"{name}.split", source)
        yield source, wording, form is None
    _take_learned(ledger, name)


def _made_by_code(ledger: Ledger, name: str) -> dict[str, Any]:
    """Return a source for the prompts that a function of the user makes of a dataset."""
    for key in ("path", "name", "split", "data_files", "ds_type"):
        ledger.take(f"{name}.{key}")
    ledger.differ(
        f"{name}.type",
        "the prompts are what this function makes of the records of the dataset; write them to "
        f"{_PLACE_OF_PROMPTS}, each with a field prompt, a text or messages, and what the rewards need.",
    )
    return {"path": _PLACE_OF_PROMPTS, "format": "prompt"}


def _take_learned(ledger: Ledger, name: str) -> None:
    """Import a dataset's keys for the trained turns of a conversation and the fields of its turns."""
    roles = ledger.peek(f"{name}.roles_to_train")
    if roles is not None and set(roles if isinstance(roles, list) else [roles]) <= {"assistant", "gpt"} and roles:
        ledger.take(f"{name}.roles_to_train")
    for key in ("train_on_eos", "train_on_eot"):
        if ledger.peek(f"{name}.{key}") == "turn":
            ledger.need_not(f"{name}.{key}", "the token that ends a trained turn is always a target.")
    mapping = ledger.peek(f"{name}.roles")
    if isinstance(mapping, dict):
        ledger.take(f"{name}.roles")
        if unknown := unknown_roles(mapping):
            ledger.refuse(
                f"{name}.roles", f"the roles {', '.join(unknown)} would be read as other roles, or are unknown."
            )
    field, key = ledger.peek(f"{name}.field_thinking"), ledger.peek(f"{name}.template_thinking_key")
    if field is not None and field == key:
        for field_key in ("field_thinking", "template_thinking_key"):
            ledger.need_not(
                f"{name}.{field_key}", "all other fields of a turn are passed to the template under their own names."
            )


def _form(
    ledger: Ledger, name: str, kind: str | None, pretraining: bool
) -> tuple[str | None, dict[str, str], Wording | None]:
    """Return (format, field names: echelon's to the records', prompt format) from a dataset's type and field keys."""
    if kind != _SCORED_PAIRS and ledger.values.get("objective.name") != "reward":
        return _form_of_type(ledger, name, kind, pretraining)
    if kind != _SCORED_PAIRS or ledger.values.get("objective.name") != "reward":
        ledger.refuse(f"{name}.type", f"a reward model, and nothing else, is trained on the type {_SCORED_PAIRS}.")
    return "preference", {}, _template(ledger, name)


def _form_of_type(
    ledger: Ledger, name: str, kind: str | None, pretraining: bool
) -> tuple[str | None, dict[str, str], Wording | None]:
    """Return what `_form` does, for a dataset of any other objective than a reward model."""

    def renames(table: Mapping[str, str]) -> dict[str, str]:
        columns = {ours: ledger.take(f"{name}.{theirs}", f"{name}.type.{theirs}") for theirs, ours in table.items()}
        return {ours: str(theirs) for ours, theirs in columns.items() if theirs is not None}

    if pretraining or kind in ("completion", "pretrain"):
        return None, renames({"field": "text", "text_column": "text"}), None
    if any(key.startswith(f"{name}.type.") for key in ledger.given):
        return _own_prompt(ledger, name, renames)
    answers = _compares(ledger)
    if kind in (None, ""):
        return _UNTYPED[answers], {}, None
    assert kind is not None
    eos = ledger.given.get("special_tokens.eos_token")
    if kind in _ALPACA_TYPES:
        wording = alpaca_wording(_ALPACA_TYPES[kind], f"{name}.type: {kind}", eos)
        ledger.differ(f"{name}.type", wording.difference)
        return "alpaca", renames(_ALPACA), wording
    if kind in _CHAT_TYPES or (kind == _PAIRS_WITH_PROMPTS and answers == "pairs"):
        return *_conversation(ledger, name, kind, answers), _template(ledger, name)
    ledger.refuse(f"{name}.type", _NOT_A_WORDING)
    return None, {}, None


def _compares(ledger: Ledger) -> Answers | None:
    """What the objective of the file compares."""
    name = ledger.values.get("objective.name")
    return None if name is None else OBJECTIVES[str(name)].answers


def _own_prompt(ledger: Ledger, name: str, renames: Any) -> tuple[str, dict[str, str], Wording]:
    """Import `type` as a mapping: custom prompt formats. Defaults are those of Axolotl's `UserDefinedDatasetConfig`."""
    plain = ledger.take(f"{name}.type.no_input_format")
    with_input = ledger.take(f"{name}.type.format")
    system = ledger.take(f"{name}.type.system_format")
    fields = renames(_ALPACA)
    if _compares(ledger) is not None:
        ledger.refuse(
            f"{name}.path",
            "preferences with a custom prompt format are not supported; rewrite them as conversations.",
        )
    message = ledger.take(f"{name}.type.system_prompt")
    wording = prompt_wording(
        "{instruction} " if plain is None else str(plain),
        "{instruction} {input} " if with_input is None else str(with_input),
        "{system}" if system is None else str(system),
        str(message) if message else None,
        f"{name}.type",
        ledger.given.get("special_tokens.eos_token"),
    )
    ledger.differ(f"{name}.path", wording.difference)
    return "alpaca", fields, wording


def _conversation(ledger: Ledger, name: str, kind: str, answers: Answers | None) -> tuple[str, dict[str, str]]:
    if answers == "judged":
        ledger.refuse(f"{name}.type", _NOT_JUDGED)
    role = ledger.take(f"{name}.message_property_mappings.role", f"{name}.message_field_role")
    content = ledger.take(f"{name}.message_property_mappings.content", f"{name}.message_field_content")
    messages = ledger.take(f"{name}.field_messages")
    trained = ledger.take(f"{name}.message_field_training")
    if kind == _PAIRS_WITH_PROMPTS:
        return "preference", {}
    if answers == "pairs":
        named = {"prompt": messages or "messages", "role": role, "content": content}
        named |= {"chosen": ledger.take(f"{name}.field_chosen"), "rejected": ledger.take(f"{name}.field_rejected")}
        form = "preference"
    elif kind == "sharegpt" or (role, content) == ("from", "value"):
        # Axolotl's default is `messages` even if the turns have `from` and `value`.
        messages = messages or ("conversations" if kind == "sharegpt" else "messages")
        named, form = {"conversations": messages, "from": role, "value": content, "train": trained}, "sharegpt"
    else:
        named, form = {"messages": messages, "role": role, "content": content, "train": trained}, "messages"
    return form, {ours: str(theirs) for ours, theirs in named.items() if theirs}


def _template(ledger: Ledger, name: str) -> Wording | None:
    """Find the chat template of a dataset: its own, the file's, or the tokenizer's."""
    for prefix in (f"{name}.", ""):
        text, word = (ledger.given.get(f"{prefix}{key}") for key in ("chat_template_jinja", "chat_template"))
        if text is not None:
            _take_once(ledger, f"{prefix}chat_template_jinja")
            if word == "jinja":
                _take_once(ledger, f"{prefix}chat_template")
            said = f"{prefix}chat_template_jinja"
            return Wording(str(text), said if is_template(str(text)) else f"{said}: {text}")
        if word is None:
            continue
        full = f"{prefix}chat_template"
        if (wording := axolotl_wording(str(word), f"{full}: {show_value(word)}")) is None:
            ledger.refuse(full, "this template is not known to echelon; give its text as chat_template_jinja.")
        elif full not in ledger.entries and wording.difference:
            ledger.differ(full, wording.difference)
        else:
            _take_once(ledger, full)
        return wording
    return Wording(None, "the tokenizer's own")


def _take_once(ledger: Ledger, full: str) -> None:
    """Take a key once: several datasets may use the same key of the file."""
    if full in ledger.given and full not in ledger.entries:
        ledger.take(full)
