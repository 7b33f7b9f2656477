"""The prompt formats of each tool as chat templates: the template's text, or the name of one of echelon's templates."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.recipe.yaml_text import read_table

_FIELD = re.compile(r"\{(instruction|input|system)\}")


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
