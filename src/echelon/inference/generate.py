"""Sampling from a run or an HF folder, for one or more prompts, in batches or as a stream."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from echelon.data.panics import panics_told, shorten
from echelon.errors import ConfigError
from echelon.inference.chat import Chat
from echelon.inference.target import find_device, load_target, load_target_tokenizer
from echelon.inference.team import Host, SameToken, Team

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a decoder's output for a character with missing bytes


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: 0 is greedy decoding; top_k, top_p and min_p then have no effect.
        top_k: sample from this many most likely tokens; 0 for all.
        top_p: sample from the smallest set of most likely tokens with this total probability (Holtzman et al. 2020).
        min_p: exclude tokens with less than this fraction of the highest probability (Nguyen et al. 2024).
        repetition_penalty: penalty on the scores of tokens that already occurred; 1 for none (Keskar et al. 2019).
        stop: strings that end a sample; they are not part of it.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"max_tokens": 1, "temperature": 0, "top_k": 0, "top_p": 0, "min_p": 0, "num_samples": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {limit}.")


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
    team: Team | None = None,
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
    team = team or Team(find_device())
    host = Host(team)
    # Check prompts before loading the model, which may take long.
    tokenizer = load_target_tokenizer(target, checkpoint)
    encode = partial(_encode, tokenizer) if chat is None else partial(chat.encode, target, tokenizer)
    rows = [Row(prompt, number, encode(prompt)) for prompt in prompts for number in range(sampling.num_samples)]
    model, tokenizer = load_target(target, host, checkpoint)
    _check_positions(model, rows, sampling.max_tokens)
    size = batch_size if write is None else 1
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        if write is not None and chat is None:
            write(_decode(tokenizer, batch[0].ids))
        work = partial(continue_rows, model, tokenizer, batch, sampling, write, with_prompt=chat is None, team=team)
        yield from host.run(work)


@dataclass(frozen=True)
class Row:
    """A prompt, its ids, and the number of the sample, which with the prompt decides the random draws."""

    prompt: str
    number: int
    ids: list[int]


def row_seed(seed: int, prompt: str, number: int) -> int:
    """Return the seed of a prompt's sample, independent of its batch."""
    text = f"{seed}\0{number}\0{prompt}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little") >> 1


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


@torch.no_grad()
def continue_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    sampling: Sampling,
    write: Callable[[str], None] | None,
    with_prompt: bool,
    team: Team | None = None,
) -> list[Sample]:
    """Continue the rows of one batch, each by one sample.

    Args:
        write: receives the text of the continuation as it is generated; for a single row only.
        with_prompt: the text of a sample starts with its prompt.
    """
    width = max(len(row.ids) for row in rows)
    eos = _eos_ids(model, tokenizer)
    # transformers takes from it what `config` below does not set, whatever it is.
    model.generation_config = GenerationConfig(eos_token_id=eos or None)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (eos or [0])[0]
    ids = torch.tensor([[pad] * (width - len(row.ids)) + row.ids for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in rows], device=model.device)
    decoders = [_Decoder(tokenizer, row.ids) for row in rows]
    config = GenerationConfig(
        max_new_tokens=sampling.max_tokens, do_sample=False, num_beams=1, pad_token_id=pad, eos_token_id=eos or None
    )
    seeds = [row_seed(sampling.seed, row.prompt, row.number) for row in rows]
    processors = build_processors(sampling, seeds, mask)
    if team is not None and team.size > 1:
        processors.append(SameToken())
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=config,
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList([_StopTexts(decoders, width, sampling.stop)] if sampling.stop else []),
        streamer=None if write is None else TextStream(decoders[0], sampling.stop, write),
    )
    new_ids = output[:, width:].tolist()
    return [
        _finish(row, decoder, new, eos, sampling.stop, with_prompt)
        for row, decoder, new in zip(rows, decoders, new_ids, strict=True)
    ]


def _finish(
    row: Row, decoder: "_Decoder", new: list[int], eos: list[int], stop: Sequence[str], with_prompt: bool
) -> Sample:
    """Build the sample from the new ids of a row, up to where it ended."""
    end = next((place for place, token in enumerate(new) if token in eos), len(new))
    text = decoder(new[:end])
    kept = cut_at_stop(text, stop)
    ended_by = "stop" if len(kept) < len(text) else "eos" if end < len(new) else "length"
    return Sample(row.prompt, decoder.head + kept if with_prompt else kept, row.number, ended_by)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a text: those of generation_config.json, else the tokenizer's. Raises ConfigError."""
    given = model.generation_config.eos_token_id if model.generation_config is not None else None
    if given is None:
        return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = given if isinstance(given, list) else [given]
    size = model.config.get_text_config(decoder=True).vocab_size
    if not all(type(each) is int and 0 <= each < size for each in ids):
        raise ConfigError(
            f"{Path(model.config.name_or_path) / 'generation_config.json'}: eos_token_id={str(given)[:100]} must be "
            f"one id of the model's vocabulary (0 to {size - 1}), or a list of them; correct it, or remove the file."
        )
    return ids


class _Decoder:
    """Decodes a continuation, together with its prompt: some tokenizers drop the leading space of a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self.head = _decode(tokenizer, prompt_ids)

    def __call__(self, new_ids: list[int]) -> str:
        """Return the text of the continuation."""
        return _decode(self._tokenizer, self._prompt_ids + new_ids)[len(self.head) :]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    with panics_told(tokenizer.name_or_path, f"the ids {ids[-3:]} and those before"):
        return str(tokenizer.decode(ids, skip_special_tokens=True))


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


class _StopTexts(StoppingCriteria):  # type: ignore[misc]
    """Ends a row once its continuation contains a stop string, regardless of token boundaries."""

    def __init__(self, decoders: Sequence[_Decoder], width: int, stop: Sequence[str]) -> None:
        self._decoders = decoders
        self._width = width
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        texts = [
            decoder(row) for decoder, row in zip(self._decoders, input_ids[:, self._width :].tolist(), strict=True)
        ]
        ended = [any(each in text for each in self._stop) for text in texts]
        return torch.tensor(ended, device=input_ids.device)


class TextStream(BaseStreamer):  # type: ignore[misc]
    """Streams text token by token; holds back incomplete characters, and the possible start of a stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str], write: Callable[[str], None]) -> None:
        self._decode = decode
        self._stop = stop
        self._write = write
        self._ids: list[int] | None = None
        self._written = 0

    def put(self, value: Tensor) -> None:
        """Receive the prompt's ids first, which are ignored, then each new token."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = self._decode(self._ids)
        whole = cut_at_stop(text, self._stop)
        self._advance(whole if len(whole) < len(text) else self._settled(text))

    def end(self) -> None:
        """Write the text that was held back."""
        self._advance(cut_at_stop(self._decode(self._ids or []), self._stop))

    def _settled(self, text: str) -> str:
        text = text.rstrip(_INCOMPLETE)
        for length in range(max((len(each) for each in self._stop), default=0), 0, -1):
            if any(each.startswith(text[-length:]) for each in self._stop if len(text) >= length):
                return text[:-length]
        return text

    def _advance(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


def build_processors(sampling: Sampling, seeds: Sequence[int], mask: Tensor) -> LogitsProcessorList:
    """Return the processors of the scores [batch, vocabulary] before the argmax, in the order of `transformers`.

    Args:
        seeds: one for each row.
        mask: attention mask of the prompts, [batch, seq], 0 for padding.
    """
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RowRepetitionPenalty(sampling.repetition_penalty, mask))
    if sampling.temperature == 0:
        return processors
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    processors.append(RowNoise(seeds, mask.device))
    return processors


class RowRepetitionPenalty(RepetitionPenaltyLogitsProcessor):  # type: ignore[misc]
    """The penalty of `transformers`, except that it ignores the padding of a row."""

    def __init__(self, penalty: float, mask: Tensor) -> None:
        super().__init__(penalty)
        self._mask = mask.bool()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [batch, vocabulary] with the penalty applied."""
        ids = input_ids.clone()
        prompts = ids[:, : self._mask.shape[1]]
        prompts.copy_(torch.where(self._mask, prompts, prompts[:, -1:]))  # the last prompt token is not padding
        penalised: Tensor = super().__call__(ids, scores)
        return penalised


class RowNoise(LogitsProcessor):  # type: ignore[misc]
    """Adds Gumbel noise with one generator per row; the argmax is then a sample from the softmax.

    The Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030). In fp64: a fp32 uniform draw is 0 once in 2^24 draws,
    and each token needs one draw per vocabulary entry.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [batch, vocabulary] plus noise, fp64."""
        noise = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores.double() - noise.log()
