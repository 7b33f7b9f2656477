"""The prompt formats of each tool as chat templates: the template's text, or the name of one of echelon's templates."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

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
class Prompt:
    """The texts before an answer, with {instruction}, {input} and {system}.

    `eos`: the token at the end of an answer, None for the tokenizer's own. `after`: text after that token. `bos`:
    whether the text starts with the tokenizer's bos.
    """

    plain: str
    with_input: str
    before_plain: str = ""
    before_input: str = ""
    system: str = ""
    eos: str | None = None
    after: str = ""
    bos: bool = True


# Axolotl's AlpacaPrompter (`prompters.py`), by its prompt_style. These two sentences come first, like system messages.
_WITHOUT = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_WITH = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
)
_STYLES: Mapping[str, tuple[str, str, str]] = {
    "instruct": (
        "### Instruction:\n{instruction}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "{system}\n\n",
    ),
    "chat": (
        "USER: {instruction}\nASSISTANT:",
        "USER: {instruction}\n{input}\nASSISTANT:",
        "SYSTEM: {system}\n",
    ),
    "chatml": (
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\n{system}<|im_end|>\n",
    ),
    "phi": (
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|system|>\n{system}<|end|>\n",
    ),
}
ALPACA_STYLES = tuple(_STYLES)


def alpaca_wording(style: str, said: str, eos: str | None) -> Wording:
    """The template of Axolotl's `type: alpaca` in one style. It ignores a record's system message and history."""
    plain, with_input, system = _STYLES[style]
    prompt = Prompt(plain, with_input, system.replace("{system}", _WITHOUT), system.replace("{system}", _WITH), eos=eos)
    return Wording(render_prompt(prompt), said, difference=_SEAMS)


_SEAMS = (
    "Prompt and answer are tokenized as one text, so tokens at their boundary may differ; the text starts with the "
    "tokenizer's bos, if it has one."
)


def prompt_wording(
    plain: str, with_input: str, system_format: str, system: str | None, said: str, eos: str | None
) -> Wording:
    """The template of Axolotl's `type: {format: ...}`, with the user's own texts."""
    prompt = Prompt(plain, with_input, system=system_format, eos=eos)
    return Wording(render_prompt(prompt), said, system, _SEAMS)


def render_prompt(prompt: Prompt) -> str:
    """Render the texts as a chat template. The question of an alpaca record also has the keys instruction and input.

    The text before the first question is not repeated before later ones.
    """
    end = "eos_token" if prompt.eos is None else json.dumps(prompt.eos, ensure_ascii=False)
    lines = [*(["{{- bos_token }}"] if prompt.bos else []), "{%- for message in messages %}"]
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
        f"{{{{- message['content'] + {end}{f' + {_quote(prompt.after)}' if prompt.after else ''} }}}}",
        "{%- endif %}",
        "{%- endfor %}",
    ]
    return "\n".join(lines)


def _join(text: str, main: str) -> str:
    """Render a text with fields as a Jinja expression. `main`: the turn's key of the instruction or system message."""
    names = {"instruction": main, "input": "input", "system": main}
    parts = []
    for place, part in enumerate(_FIELD.split(text)):
        if place % 2:
            parts.append(f"message['{names[part]}']")
        elif part:
            parts.append(_quote(part))
    return " + ".join(parts) or "''"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Templates of Axolotl that are identical to echelon's.
_AXOLOTL_OURS: Mapping[str, str] = {"chatml": "chatml", "llama3": "llama3", "gemma": "gemma"}
# Copies of the templates in the tokenizers of these chat models (Axolotl: `utils/chat_templates/templates/`).
_AXOLOTL_FAMILIES = frozenset({
    "aya", "cohere", "command_a", "deepseek_v2", "deepseek_v3", "exaone", "exaone4", "falcon_h1", "gemma3", "gemma3n",
    "gemma4", "gemma4_unified", "jamba", "llama3_2_vision", "llama4", "llava", "mistral_v1", "mistral_v2v3",
    "mistral_v3_tekken", "mistral_v7_tekken", "nemotron_h", "phi_3", "phi_35", "phi_4", "pixtral", "qwen2_vl", "qwen3",
    "qwen3_5", "qwen_25",
})  # fmt: skip
_OWN = "The tokenizer's own template is used; for the chat models of this family it is the same."
_NEWLINE = "LLaMA-Factory also trains on the line end after an answer's stop token; echelon does not."
# LLaMA-Factory's `data/template.py`: (our template, system message, difference).
_FACTORY: Mapping[str, tuple[str | None, str | None, str]] = {
    "chatml": ("chatml", None, _NEWLINE),
    "qwen": ("chatml", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", _NEWLINE),
    "qwen3_nothink": ("chatml", None, _NEWLINE),
    "qwen3_5_nothink": ("chatml", None, f"{_NEWLINE} Tool calls are written as in ChatML."),
    "qwen3": (None, None, _OWN),
    "llama3": ("llama3", None, "White space around a turn is removed."),
    "gemma": ("gemma", None, f"{_NEWLINE} White space around a turn is removed."),
    "gemma2": ("gemma", None, f"{_NEWLINE} White space around a turn is removed."),
    "alpaca": (
        render_prompt(
            Prompt(
                "### Instruction:\n{instruction}\n\n### Response:\n",
                "### Instruction:\n{instruction}\n{input}\n\n### Response:\n",
                system="{system}",
                after="\n\n",
                bos=False,
            )
        ),
        f"{_WITHOUT}\n\n",
        "LLaMA-Factory also trains on the line ends after an answer; echelon does not.",
    ),
}


def axolotl_wording(name: str, said: str) -> Wording | None:
    """Return the template with this name in Axolotl; None for an unknown name."""
    if name.startswith("tokenizer_default"):
        return Wording(None, said)
    if name in _AXOLOTL_OURS:
        return Wording(_AXOLOTL_OURS[name], said)
    return Wording(None, said, difference=_OWN) if name in _AXOLOTL_FAMILIES else None


def factory_wording(name: str, said: str) -> Wording | None:
    """Return the template with this name in LLaMA-Factory; None for an unknown name."""
    if name not in _FACTORY:
        return None
    template, system, difference = _FACTORY[name]
    return Wording(template, said, system, difference)
