"""Named chat templates, and the choice of the template of a run.

Each named template ends an assistant turn with a token at which generation stops and starts it with the generation
prompt, so that the targets can be located exactly (see `rendering`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_text
from echelon.recipe.inputs import is_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class NamedTemplate:
    """A template of the folder `chat_templates`, and the tokens that must be single tokens of the tokenizer."""

    name: str
    tokens: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The template."""
        return read_text(_FOLDER / f"{self.name}.jinja")


_FOLDER = Path(__file__).with_name("chat_templates")
# chatml: with tools in the form of Qwen2.5 and Hermes. alpaca: the texts of Stanford's train.py; a turn of an alpaca
# record also has the keys `instruction` and `input`.
NAMED_TEMPLATES: dict[str, NamedTemplate] = {
    "chatml": NamedTemplate("chatml", ("<|im_start|>", "<|im_end|>")),
    "llama3": NamedTemplate("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": NamedTemplate("mistral"),
    "gemma": NamedTemplate("gemma", ("<start_of_turn>", "<end_of_turn>")),
    "zephyr": NamedTemplate("zephyr"),
    "alpaca": NamedTemplate("alpaca"),
    "plain": NamedTemplate("plain"),
}
"""The names for `data.chat_template`. `plain` joins the turns unchanged and ends each answer with eos."""


def load_template(choice: str) -> str:
    """Return the template text for `data.chat_template`: a name, the path of a file, or the template itself.

    Raises ConfigError for a value that is none of them.
    """
    if choice in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[choice].text
    if is_template(choice):
        return choice
    path = Path(choice).expanduser()
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"data.chat_template={choice} is neither a named template ({', '.join(NAMED_TEMPLATES)}) nor a readable "
            f"file ({reason}); use one of these names or the path of a Jinja file."
        ) from error


def own_template(tokenizer: "PreTrainedTokenizerFast") -> str | None:
    """Return a tokenizer's own template, or the default one if it has several; None if it has none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template or None
