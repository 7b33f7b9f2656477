"""A conversation with a model: each message is answered in the context of the turns before it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from echelon.ground.errors import ConfigError
from echelon.learn.answers.sampling import Sampling
from echelon.learn.opened import OpenedModel, load_tokenizer_of, one_process
from echelon.tools.inference.generate import Chat, Row, Sample, continue_rows

logger = logging.getLogger(__name__)

Turn = dict[str, str]


class Dialogue:
    """A loaded model and the turns of a conversation with it.

    A conversation that no longer fits the model's positions loses its oldest turns; a log message says so once.

    Attributes:
        turns: the messages and answers so far, as dictionaries with `role` (user, assistant) and `content`.
    """

    def __init__(
        self, target: Path, sampling: Sampling, system: str | None = None, checkpoint: str | None = None
    ) -> None:
        """Load the model, after checking that its tokenizer can render a conversation.

        Args:
            sampling: `num_samples` is not used; each answer has its own random draws.
            system: the system message; None for the one the run was trained with.
            checkpoint: newest, best or a step of a run; None for the newest.

        Raises:
            ConfigError: there is no model or no chat template, or the template takes no system message.
        """
        self.turns: list[Turn] = []
        self._target, self._sampling, self._chat = target, sampling, Chat(system)
        self._chat.encode(target, load_tokenizer_of(target, checkpoint), "")
        self._opened = OpenedModel(target, checkpoint, one_process(), may_score=False)
        self._positions: int | None = getattr(self._opened.model.config, "max_position_embeddings", None)
        self._num_answers = 0
        self._has_dropped = False

    def reset(self, system: str | None = None) -> None:
        """Forget all turns; `system` is the new system message, None keeps the current one.

        Raises ConfigError, and keeps the turns, if the template takes no system message.
        """
        if system is not None:
            chat = Chat(system)
            chat.encode(self._target, self._opened.tokenizer, "")
            self._chat = chat
        self.turns = []
        self._has_dropped = False

    def ask(self, message: str, write: Callable[[str], None] | None = None) -> Sample:
        """Answer a message; `write` receives the answer as it is generated.

        The first answer equals that of `generate_samples` to the same message. If an exception such as
        KeyboardInterrupt ends the answer, the part that was generated becomes a turn of the conversation.

        Raises ConfigError if the message alone is too long for the model.
        """
        turns, ids = self._shorten([*self.turns, {"role": "user", "content": message}])
        sampling = self._sampling
        if self._positions is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self._positions - len(ids)))
        row = Row(message, self._num_answers, ids)
        pieces: list[str] = []

        def collect(text: str) -> None:
            pieces.append(text)
            if write is not None:
                write(text)

        is_complete = False
        try:
            [answer] = continue_rows(self._opened, [row], sampling, collect, with_prompt=False)
            is_complete = True
        finally:
            if pieces or is_complete:
                self.turns = [*turns, {"role": "assistant", "content": "".join(pieces)}]
                self._num_answers += 1
        return answer

    def _shorten(self, turns: list[Turn]) -> tuple[list[Turn], list[int]]:
        """Drop the oldest questions with their answers until the prompt and an answer fit, and encode the rest."""
        ids = self._chat.encode_turns(self._target, self._opened.tokenizer, turns)
        if self._positions is None:
            return turns, ids
        num_turns = len(turns)
        while len(turns) > 1 and len(ids) + self._sampling.max_tokens > self._positions:
            turns = turns[2:]
            ids = self._chat.encode_turns(self._target, self._opened.tokenizer, turns)
        if len(ids) >= self._positions:
            raise ConfigError(
                f"the message has {len(ids)} tokens with the chat template and the system message, but the model has "
                f"{self._positions} positions; send a shorter one."
            )
        if len(turns) < num_turns and not self._has_dropped:
            self._has_dropped = True
            logger.warning(
                f"chat: the conversation is too long for the {self._positions} positions of the model; from here on "
                "its oldest turns are left out"
            )
        return turns, ids
