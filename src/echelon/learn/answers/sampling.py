"""Sampling with a model, also while it trains: tokens are drawn one by one, with a KV cache where the model has one.

Rows that have ended leave the batch and others take their place, as in Orca (Yu et al. 2022).
"""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.model.seeds import mix_bits

if TYPE_CHECKING:
    from echelon.learn.model.kv_cache import Advance, KeyValueCache


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters."""

    max_tokens: int = 128
    temperature: float = 0.8
    """0 is greedy decoding; top_k, top_p and min_p then have no effect."""
    top_k: int = 50
    """Sample from this many most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with this total probability (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Exclude tokens with less than this fraction of the highest probability (Nguyen et al. 2024)."""
    repetition_penalty: float = 1.0
    """Penalty on the scores of tokens that already occurred; 1 for none (Keskar et al. 2019)."""
    num_samples: int = 1
    """Samples of each prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample; they are not part of it."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"max_tokens": 1, "temperature": 0, "top_k": 0, "top_p": 0, "min_p": 0, "num_samples": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {limit}.")


def row_seed(seed: int, prompt: str, number: int) -> int:
    """Return the seed of a prompt's sample, independent of its batch."""
    text = f"{seed}\0{number}\0{prompt}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little") >> 1


def build_processors(sampling: Sampling) -> LogitsProcessorList:
    """Return what changes the scores [rows, vocabulary] before a token is chosen, in the order of `transformers`.

    The processors are called with token ids [rows, seq] and scores. Only the penalty reads the ids: the tokens of each
    row, in any order and number.
    """
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0:
        return processors
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors


def draw_tokens(scores: Tensor, seeds: Tensor, numbers: Tensor) -> Tensor:
    """Draw a token of each row from the softmax of its scores [rows, vocabulary]: int64 [rows].

    The Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030), written as argmax(p / E) with exponential E instead of
    argmax(log p + G): a logarithm less per entry. Scores that differ by rounding nearly always draw the same token.

    Args:
        seeds: int64 [rows], on the device of the scores.
        numbers: int64 [rows], how many tokens were drawn from each seed before.
    """
    keys, entries = _row_keys(seeds, numbers), _entry_words(scores.shape[1], scores.device)
    size = max(1, _BLOCK // scores.shape[1]) if scores.device.type == "cpu" else len(scores)
    parts = zip(torch.split(scores, size), torch.split(keys, size), strict=True)
    return torch.cat([(part.softmax(-1) / _log_uniform(key, entries)).argmin(-1) for part, key in parts])


def log_uniform(seeds: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Return log(1 - u) of random numbers u, fp32 [rows, size], each a hash of (seed, number, place in the row).

    The uniform u has 63 bits, and fp32 keeps 24 of them after the leading zeros. So u is never 0, and -log(1 - u), an
    exponential number, is as exact where it is small as where it is large: it decides whether a token is drawn whose
    probability is about as small. With the 24 bits of `torch.rand`, in a vocabulary of 1e5 entries one row in 168 has a
    0, whose token would be drawn however improbable. At the other end u is at most 1 - 2^-24.

    Args:
        seeds, numbers: see draw_tokens.
    """
    return _log_uniform(_row_keys(seeds, numbers), _entry_words(size, seeds.device))


def _log_uniform(keys: Tensor, entries: Tensor) -> Tensor:
    """The same of keys int32 [rows, 3] and words of the places, int32 [size].

    A row's keys choose among 2^63 affine maps of the words, so two rows share their bits as good as never.
    """
    offset, factor, other = keys[:, :, None].unbind(1)
    high = mix_bits((entries + offset) * (factor | 1))
    low = mix_bits(high + other) & _MAX_WORD
    uniform = (low.float() * 2.0**-31 + (high & _MAX_WORD)) * 2.0**-31
    return uniform.clamp(2.0**-63, 1 - 2.0**-24).neg().log1p()


def _row_keys(seeds: Tensor, numbers: Tensor) -> Tensor:
    key = torch.arange(1, 4, dtype=torch.int32, device=seeds.device)
    for word in (*torch.split(seeds[:, None].view(torch.int32), 1, dim=1), numbers[:, None].int()):
        key = mix_bits(key + word)
    return key


def _entry_words(size: int, device: torch.device) -> Tensor:
    return mix_bits(torch.arange(size, dtype=torch.int32, device=device))


# On a CPU noise is computed for about so many entries at once, which its cache holds.
_BLOCK = 2**16
_MAX_WORD = 2**31 - 1
# Tokens that are drawn between two reads by the host, which a GPU would else wait for after each; 1 elsewhere.
READ_EVERY = {"cuda": 8}
# Rows leave and join when they are at least 1 / _PARTS of the batch, because that copies the keys and values.
_PARTS = 8


class ForwardPasses(Protocol):
    """Forward passes of a model, of which `Evaluation` is one kind. Collective where the model is divided."""

    def next_token_logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Return fp32 logits [rows, vocabulary] of the token after position `places` [rows] of ids [rows, seq]."""

    def start_cached(self) -> "KeyValueCache | None":
        """Return an empty cache, whose passes are those of this model; None if they keep no keys and values."""


@dataclass
class Continuation:
    """What follows a prompt: token ids, and their fp32 log-probabilities under the model.

    `at_temperature`: the same with the logits divided by the temperature of sampling.
    """

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    at_temperature: list[float] = field(default_factory=list)


@dataclass
class _Row:
    """A prompt that is continued, and its number among the prompts."""

    number: int
    prompt: tuple[int, ...]
    seed: int
    found: Continuation = field(default_factory=Continuation)
    has_ended: bool = False


def continue_prompts(
    passes: ForwardPasses,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    device: torch.device,
    has_ended: Callable[[int, Sequence[int]], bool],
    agree: Callable[[bool], bool] = bool,
    peers: Sequence[dist.ProcessGroup | None] = (),
    width: int = 0,
    max_num_seqs: int | None = None,
    every: int | None = None,
) -> list[Continuation]:
    """Continue each prompt, until it has ended or by `sampling.max_tokens`. Collective where the model is divided.

    The random draws of a row depend on its seed alone. Equal prompts are read once. Where several ranks run the passes
    together, all must have as many prompts and give the same `width` and `max_num_seqs`. They run equally many passes,
    with batches of different shapes if the cache lets rows leave (`KeyValueCache.moves_rows`).

    Args:
        seeds: one for each prompt; `sampling.seed`, `num_samples` and `stop` are not used.
        has_ended: called with the number of a row and its new tokens, after each of them.
        agree: called after each read with whether this rank has rows that go on; returns whether any rank has.
        peers: groups of ranks that hold a model together; their ranks take the tokens of the first one, so that
            rounding cannot drive them apart. None: the group of all.
        width: of the batch of prompts, at least; used if rows cannot leave, where ranks may need equal shapes.
        max_num_seqs: rows in the batch at most; None: all.
        every: passes between two reads of the tokens by the host, which then drops those after a row's end; the same
            on all ranks. None: 8 on a GPU, and 1 on a CPU, without a cache, and with a penalty, which needs the tokens.
    """
    rows = [_Row(number, tuple(prompt), seed) for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))]
    # Neighbours of about the same length need little padding. With the longest first, memory is largest at the start.
    waiting = deque(sorted(rows, key=lambda row: -len(row.prompt)))
    batch = _start(passes, waiting, sampling, device, width, max_num_seqs or len(rows))
    process = build_processors(sampling)
    num_passes = 1 if batch.is_whole or sampling.repetition_penalty != 1.0 else _spread(sampling, device, every)
    while True:
        drawn = []
        for _ in range(num_passes):
            read, logits = batch.run(waiting)
            if read:
                drawn.append((read, _extend(read, batch.state[-len(read) :], logits, sampling, process, peers)))
        _read(drawn, has_ended, sampling.max_tokens)
        if not agree(batch.goes_on(waiting)):
            batch.rows = []
            if not waiting:
                return [row.found for row in rows]


def _spread(sampling: Sampling, device: torch.device, every: int | None) -> int:
    """Passes between two reads: at most `every`, and so many that the last read has as few as possible too many."""
    reads = -(-sampling.max_tokens // (every or READ_EVERY.get(device.type, 1)))
    return -(-sampling.max_tokens // reads)


def _start(
    passes: ForwardPasses, waiting: Sequence[_Row], sampling: Sampling, device: torch.device, width: int, size: int
) -> "_Batch":
    cache = passes.start_cached()
    if cache is not None and cache.moves_rows:
        return _Moving(cache, size, device, sampling.max_tokens)
    widest = max(width, len(waiting[0].prompt))

    def start() -> "Advance":
        return _Uncached(passes, widest + sampling.max_tokens) if cache is None else cache.empty()

    return _Fixed(start, size, widest, device, sampling.max_tokens, is_whole=cache is None)


def _extend(
    rows: Sequence[_Row],
    state: Tensor,
    logits: Tensor,
    sampling: Sampling,
    process: LogitsProcessorList,
    peers: Sequence[dist.ProcessGroup | None],
) -> Tensor:
    """Give each row its next token, from logits [rows, vocabulary].

    Args:
        state: that of the rows, see `_Batch`; it is changed in place.

    Returns:
        Token, log-probability and log-probability at the temperature: fp64 [rows, 3], in which all are exact.
    """
    ids = torch.empty(0)
    if sampling.repetition_penalty != 1.0:  # nothing else reads them
        ids = _pad_left([[*row.prompt, *row.found.tokens] for row in rows], logits.device)[0]
    scores = process(ids, logits)
    tokens = draw_tokens(scores, state[:, 0], state[:, 1]) if sampling.temperature else scores.argmax(-1)
    for group in peers:
        dist.broadcast(tokens, group=group, group_src=0)
    own = _score(logits, tokens)
    cooled = own if sampling.temperature in (0, 1) else _score(logits / sampling.temperature, tokens)
    state[:, 1] += 1
    state[:, 2] = tokens
    return torch.stack([tokens.double(), own, cooled], 1)


def _read(
    drawn: Sequence[tuple[Sequence[_Row], Tensor]], has_ended: Callable[[int, Sequence[int]], bool], most: int
) -> None:
    """Give rows what was drawn in some passes, up to the end of each: at most so many tokens. One read of the host."""
    values = torch.cat([value for _, value in drawn]).tolist() if drawn else []
    for row, (token, score, cooled) in zip(chain.from_iterable(rows for rows, _ in drawn), values, strict=True):
        if not row.has_ended:
            row.found.tokens.append(int(token))
            row.found.log_probabilities.append(score)
            row.found.at_temperature.append(cooled)
            row.has_ended = has_ended(row.number, row.found.tokens) or len(row.found.tokens) == most


def _score(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of a token [rows] of each row of logits [rows, vocabulary], in fp64."""
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].double()


def _pad_left(rows: Sequence[Sequence[int]], device: torch.device, width: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids [rows, width], where each row's first token fills the room before it, and which of them are tokens."""
    width = max(width, *map(len, rows))
    ids = torch.tensor([[*row[:1]] * (width - len(row)) + [*row] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(width, device=device) >= width - lengths[:, None]


class _Batch(Protocol):
    """Rows that are continued together.

    Attributes:
        rows: in the order of the cache.
        state: int64 [rows, 3] on the device: the seed of a row, the number of tokens it has drawn, and the newest one.
        is_whole: whether passes read whole rows, for which there is room up to their last token alone.
    """

    rows: list[_Row]
    state: Tensor
    is_whole: bool

    def run(self, waiting: deque[_Row]) -> tuple[list[_Row], Tensor]:
        """Run a pass, and take rows that wait into the batch. Returns the last rows, which get a token, and logits."""

    def goes_on(self, waiting: deque[_Row]) -> bool:
        """Whether this rank needs another pass."""


class _Moving(_Batch):
    """Rows leave when they have ended, and others take their place."""

    def __init__(self, cache: "KeyValueCache", size: int, device: torch.device, most: int) -> None:
        """`size`: the most rows. `most`: tokens of a row."""
        self.rows, self.state = [], torch.empty(0)
        self.is_whole = False
        self._cache = cache
        self._size = size
        self._device = device
        self._most = most

    @override
    def run(self, waiting: deque[_Row]) -> tuple[list[_Row], Tensor]:
        going = [row for row in self.rows if not row.has_ended]
        room = self._size - len(going)
        if waiting and (not going or room * _PARTS >= self._size):
            return self._enter(going, [waiting.popleft() for _ in range(min(room, len(waiting)))])
        if not going:  # a pass of other ranks, in which this one must take part
            return [], self._cache.empty()(*_pad_left([[0]], self._device))
        if (len(self.rows) - len(going)) * _PARTS >= len(self.rows):
            self._keep(going)
        return self.rows, _read_last(self._cache, self.state, self._most)

    @override
    def goes_on(self, waiting: deque[_Row]) -> bool:
        return bool(waiting) or any(not row.has_ended for row in self.rows)

    def _enter(self, going: list[_Row], entering: list[_Row]) -> tuple[list[_Row], Tensor]:
        """Read the prompts of rows, equal ones once, and add them to the rows that go on."""
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(row.prompt for row in entering))}
        cache, state = self._cache.empty(), _begin(entering, self._device)
        logits = cache(*_pad_left(list(numbers), self._device))
        copies = torch.tensor([numbers[row.prompt] for row in entering], device=self._device)
        cache.select(copies)
        if going:
            self._keep(going)
            self._cache.join(cache)
            state = torch.cat([self.state, state])
        else:
            self._cache = cache
        self.rows, self.state = [*going, *entering], state
        return entering, logits[copies]

    def _keep(self, going: list[_Row]) -> None:
        places = [index for index, row in enumerate(self.rows) if not row.has_ended]
        if len(places) < len(self.rows):
            kept = torch.tensor(places, device=self._device)
            self._cache.select(kept)
            self.state = self.state[kept]
        self.rows = going


class _Fixed(_Batch):
    """Rows stay until all of them have ended on all ranks, which have equal shapes; then others are begun."""

    def __init__(
        self, start: "Callable[[], Advance]", size: int, width: int, device: torch.device, most: int, is_whole: bool
    ) -> None:
        """`start`: begins a batch. `size`: the most rows. `width`: that of the prompts. `most`: tokens of a row."""
        self.rows, self.state = [], torch.empty(0)
        self.is_whole = is_whole
        self._start = start
        self._advance = start()
        self._size = size
        self._width = width
        self._device = device
        self._most = most

    @override
    def run(self, waiting: deque[_Row]) -> tuple[list[_Row], Tensor]:
        if self.rows:
            return self.rows, _read_last(self._advance, self.state, self._most)
        self.rows = [waiting.popleft() for _ in range(min(self._size, len(waiting)))]
        self._advance, self.state = self._start(), _begin(self.rows, self._device)
        return self.rows, self._advance(*_pad_left([row.prompt for row in self.rows], self._device, self._width))

    @override
    def goes_on(self, waiting: deque[_Row]) -> bool:
        return any(not row.has_ended for row in self.rows)


def _begin(rows: Sequence[_Row], device: torch.device) -> Tensor:
    return torch.tensor([[row.seed, 0, 0] for row in rows], device=device)


def _read_last(advance: "Advance", state: Tensor, most: int) -> Tensor:
    """Read the newest token of each row. To a row that has all its tokens it is padding, so its positions end there."""
    return advance(state[:, 2:], state[:, 1:2] < most)


class _Uncached:
    """An `Advance` without a cache: each token is a pass over whole rows, always of the same shape."""

    def __init__(self, passes: ForwardPasses, width: int) -> None:
        self._passes, self._width = passes, width
        self._rows: Tensor | None = None
        self._lengths = torch.empty(0)

    def __call__(self, input_ids: Tensor, filled: Tensor) -> Tensor:
        if self._rows is None:
            # Padding moves to the right: attention is causal, so no token sees it.
            self._lengths = filled.sum(1)
            order = (~filled).long().sort(dim=1, stable=True).indices
            room = self._width - input_ids.shape[1]
            self._rows = pad(input_ids.gather(1, order), (0, room))
        else:
            self._rows[torch.arange(len(self._rows), device=self._rows.device), self._lengths] = input_ids[:, 0]
            self._lengths = self._lengths + 1
        return self._passes.next_token_logits(self._rows, self._lengths - 1)


def find_end(tokens: Sequence[int], stops: Collection[int]) -> int:
    """Return the place of the first stop token; the number of tokens if there is none."""
    return next((index for index, token in enumerate(tokens) if token in stops), len(tokens))
