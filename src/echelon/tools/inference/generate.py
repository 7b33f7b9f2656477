"""Sampling from a run or an HF folder, for one or more prompts, in batches or as a stream, also as turns of a
conversation."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.ground.run_files import is_run
from echelon.learn.answers.sampling import ForwardPasses, Sampling, continue_prompts, find_end, row_seed
from echelon.learn.checkpoint.adapted import read_run_recipe
from echelon.learn.data.readers.record import BrokenRecordError
from echelon.learn.data.templates import ChatTemplate, own_template
from echelon.learn.data.tokenizer import panics_told, shorten
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.model.kv_cache import KeyValueCache, start_cache
from echelon.learn.opened import OpenedModel, load_tokenizer_of, one_process

logger = logging.getLogger(__name__)

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a decoder's output for a character with missing bytes

Turn = dict[str, str]


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


@dataclass(frozen=True)
class Sample:
    """One continuation. `text` starts with the prompt, except in a chat; `ended_by` is length, eos or stop."""

    prompt: str
    text: str
    sample: int
    ended_by: str


def render_sample(record: dict[str, Any], sample: Sample) -> str:
    """Return a sample as one line of JSON, with the other fields of its prompt's record."""
    row = {**record, "text": sample.text, "sample": sample.sample, "ended_by": sample.ended_by}
    return json.dumps(row)


def generate_samples(
    target: Path,
    prompts: Sequence[str],
    sampling: Sampling,
    checkpoint: str | None = None,
    batch_size: int = 8,
    write: Callable[[str], None] | None = None,
    chat: Chat | None = None,
    team: Runtime | None = None,
) -> Iterator[Sample]:
    """Continue prompts, `sampling.num_samples` times each, in order. Collective: all processes yield the same samples.

    A sample depends on its prompt, its number and the seed, not on the other prompts: every row of a batch has its own
    random generator. (Rounding differs between batches, which may decide a near tie.)

    Args:
        checkpoint: newest, best or a step of a run; None for the newest.
        batch_size: samples generated at a time.
        write: receives the text as it is generated, prompt first; samples are then generated one at a time.
        chat: prompts are user messages, and the text of a sample is only the answer.
        team: the processes that share the model and decode the same tokens in step; None for this one alone.

    Raises:
        ConfigError: a prompt has no token or is too long for the model, or there is no template for a chat.
    """
    # Check prompts before loading the model, which may take long.
    tokenizer = load_tokenizer_of(target, checkpoint)
    encode = partial(_encode, tokenizer) if chat is None else partial(chat.encode, target, tokenizer)
    rows = [Row(prompt, number, encode(prompt)) for prompt in prompts for number in range(sampling.num_samples)]
    opened = OpenedModel(target, checkpoint, team or one_process(), may_score=False)
    _check_positions(opened.model, rows, sampling.max_tokens)
    size = batch_size if write is None else 1
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        if write is not None and chat is None:
            write(_decode(tokenizer, batch[0].ids))
        yield from opened.run(partial(continue_rows, opened, batch, sampling, write, with_prompt=chat is None))


@dataclass(frozen=True)
class Row:
    """A prompt, its ids, and the number of the sample, which with the prompt decides the random draws."""

    prompt: str
    number: int
    ids: list[int]


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    with panics_told(tokenizer.name_or_path, f"--prompt {shorten(prompt)}"):
        ids: list[int] = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ConfigError(f"--prompt {prompt!r} contains no token; give at least one.")
    return ids


def _check_positions(model: PreTrainedModel, rows: Sequence[Row], max_tokens: int) -> None:
    """Refuse samples longer than a table of learned positions; rotary embeddings have no such limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    words = model.get_input_embeddings()
    learned = any(isinstance(module, nn.Embedding) and module is not words for module in model.modules())
    longest = max(len(row.ids) for row in rows)
    if learned and limit is not None and longest + max_tokens > limit:
        raise ConfigError(
            f"--max-tokens {max_tokens}: with a prompt of {longest} tokens this exceeds the {limit} positions of the "
            f"model; use --max-tokens {max(1, limit - longest)} or less, or a shorter prompt."
        )


class _WholeModel(ForwardPasses):
    """The passes of a model that is not in training."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @override
    def next_token_logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=input_ids, use_cache=False).logits
        return logits[torch.arange(len(places), device=places.device), places].float()

    @override
    def start_cached(self) -> KeyValueCache | None:
        return start_cache(self._model)


@torch.no_grad()
def continue_rows(
    opened: OpenedModel,
    rows: Sequence[Row],
    sampling: Sampling,
    write: Callable[[str], None] | None,
    with_prompt: bool,
) -> list[Sample]:
    """Continue the rows of one batch, each by one sample.

    Args:
        write: receives the text of the continuation as it is generated; for a single row only.
        with_prompt: the text of a sample starts with its prompt.
    """
    eos = opened.stops
    decoders = [_Decoder(opened.tokenizer, row.ids) for row in rows]
    stream = None if write is None else TextStream(decoders[0], sampling.stop, write)

    def has_ended(number: int, tokens: Sequence[int]) -> bool:
        if stream is not None:
            stream.put(tokens[-1])
        return tokens[-1] in eos or (
            any(sampling.stop) and any(stop in decoders[number](tokens) for stop in sampling.stop)
        )

    ids, seeds = [row.ids for row in rows], [row_seed(sampling.seed, row.prompt, row.number) for row in rows]
    peers = [None] if opened.size > 1 else []
    every = None if write is None else 1
    found = continue_prompts(
        _WholeModel(opened.model), ids, sampling, seeds, opened.device, has_ended, peers=peers, every=every
    )
    if stream is not None:
        stream.end()
    return [
        _finish(row, decoder, new, eos, sampling.stop, with_prompt)
        for row, decoder, new in zip(rows, decoders, (continued.tokens for continued in found), strict=True)
    ]


def _finish(
    row: Row, decoder: "_Decoder", new: list[int], eos: list[int], stop: Sequence[str], with_prompt: bool
) -> Sample:
    """Build the sample from the new ids of a row, up to where it ended."""
    end = find_end(new, eos)
    text = decoder(new[:end])
    kept = cut_at_stop(text, stop)
    ended_by = "stop" if len(kept) < len(text) else "eos" if end < len(new) else "length"
    return Sample(row.prompt, decoder.head + kept if with_prompt else kept, row.number, ended_by)


class _Decoder:
    """Decodes a continuation, together with its prompt: some tokenizers drop the leading space of a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self.head = _decode(tokenizer, prompt_ids)

    def __call__(self, new_ids: Sequence[int]) -> str:
        """Return the text of the continuation."""
        return _decode(self._tokenizer, [*self._prompt_ids, *new_ids])[len(self.head) :]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    with panics_told(tokenizer.name_or_path, f"the ids {ids[-3:]} and those before"):
        return str(tokenizer.decode(ids, skip_special_tokens=True))


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((start for string in stop if (start := text.find(string)) >= 0), default=len(text))]


class TextStream:
    """Streams text token by token; holds back incomplete characters, and the possible start of a stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str], write: Callable[[str], None]) -> None:
        self._decode = decode
        self._stop = stop
        self._write = write
        self._ids: list[int] = []
        self._written = 0

    def put(self, token: int) -> None:
        """Receive the next token."""
        self._ids.append(token)
        text = self._decode(self._ids)
        whole = cut_at_stop(text, self._stop)
        self._advance(whole if len(whole) < len(text) else self._settled(text))

    def end(self) -> None:
        """Write the text that was held back."""
        self._advance(cut_at_stop(self._decode(self._ids), self._stop))

    def _settled(self, text: str) -> str:
        text = text.rstrip(_INCOMPLETE)
        for length in range(max((len(string) for string in self._stop), default=0), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._stop if len(text) >= length):
                return text[:-length]
        return text

    def _advance(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


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
