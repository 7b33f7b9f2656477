"""Renders the turns of a conversation with the tokenizer's chat template and generation prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from echelon.ground.errors import ConfigError
from echelon.ground.run_files import is_run
from echelon.learn.checkpoint.adapted import read_run_recipe
from echelon.learn.data.readers.record import BrokenRecordError
from echelon.learn.data.templates import ChatTemplate, own_template
from echelon.learn.data.tokenizer import panics_told, shorten


@dataclass(frozen=True)
class Chat:
    """Treats prompts as user messages. `system`: the system message; None for the one the run was trained with."""

    system: str | None = None

    def encode(self, target: Path, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
        """Encode one user message and the generation prompt. Raises ConfigError if no template can render it."""
        return self.encode_turns(target, tokenizer, [{"role": "user", "content": prompt}])

    def encode_turns(
        self, target: Path, tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, str]]
    ) -> list[int]:
        """Encode turns, the last one by the user, and the generation prompt. Raises ConfigError like `encode`."""
        if own_template(tokenizer) is None:
            raise ConfigError(
                f"--chat: the tokenizer of {target} has no chat template; remove --chat, and write the prompt in the "
                "format that the model was trained on."
            )
        system = self.system
        if system is None and is_run(target):
            system = read_run_recipe(target).data.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += turns
        template = ChatTemplate.of(tokenizer, f"--chat: the chat template of {target}")
        try:
            rendered = template.prompt(messages, generate=True)
        except BrokenRecordError as error:
            raise ConfigError(
                f"--chat: the prompt {turns[-1]['content']!r} {error}; remove --chat or --system."
            ) from error
        with panics_told(tokenizer.name_or_path, f"--chat: the message {shorten(turns[-1]['content'])}"):
            ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids
