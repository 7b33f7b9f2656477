"""How the tokens of a text are drawn: the parameters, and what they do to the scores of a model."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from echelon.ground.errors import ConfigError


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


def draw_tokens(scores: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw a token of each row from the softmax of its scores [rows, vocabulary], with its generator: int64 [rows].

    The Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030), written as argmax(p / E) with exponential E instead of
    argmax(log p + G): a logarithm less per entry. Scores that differ by rounding nearly always draw the same token. In
    fp64: a fp32 uniform number is 0 once in 2^24, and each token needs one per vocabulary entry.
    """
    noise = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
    for row, generator in zip(noise, generators, strict=True):
        row.uniform_(generator=generator)  # -log of it is exponential; `exponential_` is five times as slow on a CPU
    return (scores.softmax(-1) / noise.log_().neg_()).argmax(-1)
