"""How the tokens of a text are drawn: the parameters, and what they do to the scores of a model."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
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
