"""Build the recipe's data sources from another tool's file, and chat templates from its prompt formats: the template's
text, or the name of one of echelon's templates."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.foreign.importers.ledger import Ledger
from echelon.recipe.data_formats import RECORD_FORMATS
from echelon.recipe.yaml_text import read_table

_FIELD = re.compile(r"\{(instruction|input|system)\}")
FILE_SUFFIXES = (
    ".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow", ".txt", ".gz", ".zst", ".ndjson",
)  # fmt: skip
# The role names that echelon recognises, by role.
_ROLES: Mapping[str, frozenset[str]] = {
    "system": frozenset({"system"}),
    "user": frozenset({"user", "human"}),
    "assistant": frozenset({"assistant", "gpt", "model", "bot", "chatbot"}),
    "tool": frozenset({"tool", "function", "observation", "function_response", "ipython"}),
}


@dataclass(frozen=True)
class Wording:
    """A chat template for conversations. `template` None: the tokenizer's own. `said`: its name in the file.

    `system`: the system message for conversations without one. `difference`: how it differs from the tool's format.
    """

    template: str | None
    said: str
    system: str | None = None
    difference: str = ""


@dataclass(frozen=True)
class PromptTexts:
    """The texts before an answer, with {instruction}, {input} and {system}.

    `eos`: the token at the end of an answer, None for the tokenizer's own.
    """

    plain: str
    with_input: str
    before_plain: str = ""
    before_input: str = ""
    system: str = ""
    eos: str | None = None


# Axolotl's AlpacaPrompter (`prompters.py`), by its prompt_style. These two sentences come first, like system messages.
_WITHOUT = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_WITH = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
)
_TABLE = read_table(Path(__file__).with_name("wording.yaml"))
_STYLES: Mapping[str, Mapping[str, str]] = _TABLE["styles"]
ALPACA_STYLES = tuple(_STYLES)


def alpaca_wording(style: str, said: str, eos: str | None) -> Wording:
    """The template of Axolotl's `type: alpaca` in one style. It ignores a record's system message and history."""
    texts = _STYLES[style]
    plain, with_input = (texts["system"].replace("{system}", sentence) for sentence in (_WITHOUT, _WITH))
    prompt = PromptTexts(texts["plain"], texts["with_input"], plain, with_input, eos=eos)
    return Wording(render_prompt(prompt), said, difference=_SEAMS)


_SEAMS = (
    "Prompt and answer are tokenized as one text, so tokens at their boundary may differ; the text starts with the "
    "tokenizer's bos, if it has one."
)


def prompt_wording(
    plain: str, with_input: str, system_format: str, system: str | None, said: str, eos: str | None
) -> Wording:
    """The template of Axolotl's `type: {format: ...}`, with the user's own texts."""
    prompt = PromptTexts(plain, with_input, system=system_format, eos=eos)
    return Wording(render_prompt(prompt), said, system, _SEAMS)


def render_prompt(prompt: PromptTexts) -> str:
    """Render the texts as a chat template. The question of an alpaca record also has the keys instruction and input.

    The text before the first question is not repeated before later ones.
    """
    end = "eos_token" if prompt.eos is None else json.dumps(prompt.eos, ensure_ascii=False)
    lines = ["{{- bos_token }}", "{%- for message in messages %}"]
    if prompt.system:
        lines += [
            "{%- if message['role'] == 'system' %}",
            f"{{{{- {_join(prompt.system, 'content')} }}}}",
            "{%- endif %}",
        ]
    lines.append("{%- if message['role'] == 'user' and message['input'] %}")
    if prompt.before_input:
        lines.append(f"{{{{- {_quote(prompt.before_input)} if loop.first else '' }}}}")
    lines += [f"{{{{- {_join(prompt.with_input, 'instruction')} }}}}", "{%- elif message['role'] == 'user' %}"]
    if prompt.before_plain:
        lines.append(f"{{{{- {_quote(prompt.before_plain)} if loop.first else '' }}}}")
    lines += [
        f"{{{{- {_join(prompt.plain, 'content')} }}}}",
        "{%- elif message['role'] == 'assistant' %}",
        f"{{{{- message['content'] + {end} }}}}",
        "{%- endif %}",
        "{%- endfor %}",
    ]
    return "\n".join(lines)


def _join(text: str, main: str) -> str:
    """Render a text with fields as a Jinja expression. `main`: the turn's key of the instruction or system message."""
    names = {"instruction": main, "input": "input", "system": main}
    parts = []
    for index, part in enumerate(_FIELD.split(text)):
        if index % 2:
            parts.append(f"message['{names[part]}']")
        elif part:
            parts.append(_quote(part))
    return " + ".join(parts) or "''"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_OWN = "The tokenizer's own template is used; for the chat models of this family it is the same."


def axolotl_wording(name: str, said: str) -> Wording | None:
    """Return the template with this name in Axolotl; None for an unknown name."""
    if name.startswith("tokenizer_default"):
        return Wording(None, said)
    if name in _TABLE["axolotl"].split():
        return Wording(name, said)
    return Wording(None, said, difference=_OWN) if name in _TABLE["axolotl_families"].split() else None


def factory_wording(name: str, said: str) -> Wording | None:
    """Return the template with this name in LLaMA-Factory; None for an unknown name."""
    row = _TABLE["llamafactory"].get(name)
    return None if row is None else Wording(row["template"], said, row.get("system"), row["difference"])


@dataclass(frozen=True)
class Read:
    """The training and validation sources of a file.

    `wordings`: the templates of their conversations, without repetition. `plain`: True if no source has conversations;
    None if the file does not show it.
    """

    train: tuple[dict[str, Any], ...]
    validation: tuple[dict[str, Any], ...] = ()
    wordings: tuple[Wording, ...] = ()
    plain: bool | None = None


def is_hub_id(path: str) -> bool:
    """Whether a path is a Hub id, OWNER/NAME, rather than a file: no file suffix and not an existing path."""
    if path.startswith((".", "/", "~")) or "://" in path or path.endswith(FILE_SUFFIXES) or Path(path).exists():
        return False
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path))


def build_source(path: str, form: str | None, fields: Mapping[str, str], config: str | None = None) -> dict[str, Any]:
    """Build a source of the recipe.

    `form`: the format of its records, None for plain text. `config`: the configuration of a Hub dataset. The key
    `format` of a Hub dataset is `hub`, so its `fields` specify the format of the records.
    """
    renamed = {ours: theirs for ours, theirs in fields.items() if ours != theirs}
    if is_hub_id(path):
        row = RECORD_FORMATS.get(form or "")
        needed = {name: fields.get(name, name) for name in row.required} if row is not None else {}
        named = {**needed, **renamed}
        source: dict[str, Any] = {"path": f"{path}/{config}" if config else path, "format": "hub"}
        return {**source, **({"fields": named} if named else {})}
    return {"path": path, **({"format": form} if form else {}), **({"fields": renamed} if renamed else {})}


def put_split(ledger: Ledger, name: str, source: dict[str, Any]) -> None:
    """Set the split of a source: the value of `name` in the file, or `train` for a Hub dataset."""
    full = ledger.find(name)
    if full is not None and source["path"].endswith(FILE_SUFFIXES):
        ledger.need_not(full, "a file has no splits.")
    elif full is not None:
        source["split"] = ledger.take(full)
    elif source.get("format") == "hub":
        source["split"] = "train"


def unknown_roles(roles: Mapping[str, Any]) -> list[str]:
    """Return the role names, of a mapping from roles to names, that would be read as another role or are unknown."""
    return [
        str(name)
        for role, names in roles.items()
        for name in (names if isinstance(names, list) else [names])
        if str(name) not in _ROLES.get(str(role), frozenset())
    ]


def once(wordings: Iterable[Wording | None]) -> tuple[Wording, ...]:
    """Return the given wordings without None and without repetition."""
    by_text: dict[tuple[str | None, str | None], Wording] = {}
    for wording in wordings:
        if wording is not None:
            by_text.setdefault((wording.template, wording.system), wording)
    return tuple(by_text.values())
