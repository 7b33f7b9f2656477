"""Generation with a model while it trains: token by token, with a KV cache where the model has one."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from echelon.learn.model.kv_cache import Advance
from echelon.learn.sampling import Sampling, build_processors


class Passes(Protocol):
    """Forward passes of a model, of which `Evaluation` is one kind. Collective where the model is divided."""

    def next_token_logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Return fp32 logits [rows, vocabulary] of the token after position `places` [rows] of ids [rows, seq]."""

    def start_cached(self) -> Advance | None:
        """Begin rows of tokens whose keys and values are kept; None if the passes of this model keep none."""


@dataclass(frozen=True)
class Continuation:
    """What follows some prompts, [rows, new]: token ids, and their fp32 log-probabilities under the model.

    `at_temperature`: the same with the logits divided by the temperature of sampling.
    """

    tokens: Tensor
    log_probabilities: Tensor
    at_temperature: Tensor


def continue_prompts(
    passes: Passes,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    device: torch.device,
    is_over: Callable[[Tensor], bool],
    peers: Sequence[dist.ProcessGroup | None] = (),
    width: int = 0,
) -> Continuation:
    """Continue prompts, until `is_over` or by `sampling.max_tokens`. Collective where the model is divided.

    The random draws of a row depend on its seed alone. Where several ranks run the passes together, all must have as
    many prompts, give the same `width`, and agree in `is_over`.

    Args:
        seeds: one for each prompt; `sampling.seed`, `num_samples` and `stop` are not used.
        is_over: called after each pass with the new tokens [rows, new] so far.
        peers: groups of ranks that hold a model together; their ranks take the tokens of the first one, so that
            rounding cannot drive them apart. None: the group of all.
        width: prompts are padded to at least this; more than needed if another rank has a longer one.
    """
    width = max(width, *(len(prompt) for prompt in prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    filled = torch.arange(width, device=device) >= width - lengths[:, None]
    process = build_processors(sampling, seeds, filled)
    advance = passes.start_cached() or _Uncached(passes, width + sampling.max_tokens)
    temperature = sampling.temperature or 1.0
    new, chosen, cooled = ids, [], []
    for _ in range(sampling.max_tokens):
        logits = advance(new, filled)
        tokens = process(ids, logits).argmax(-1)
        for group in peers:
            dist.broadcast(tokens, group=group, group_src=0)
        new, filled = tokens[:, None], torch.ones_like(filled[:, :1])
        chosen.append(_score(logits, new))
        cooled.append(chosen[-1] if temperature == 1.0 else _score(logits / temperature, new))
        ids = torch.cat([ids, new], 1)
        if is_over(ids[:, width:]):
            break
    return Continuation(ids[:, width:], torch.stack(chosen, 1), torch.stack(cooled, 1))


def _score(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of a token of each row, [rows]; logits [rows, vocabulary], tokens [rows, 1]."""
    return logits.gather(1, tokens)[:, 0] - logits.logsumexp(-1)


class _Uncached:
    """An `Advance` without a cache: each token is a pass over whole rows, always of the same shape."""

    def __init__(self, passes: Passes, width: int) -> None:
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
    return next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
