"""Samples of `evaluate.prompts` while training goes on: every rank takes part, since each may hold a shard alone."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from echelon.engines.engine import Evaluation
from echelon.errors import ConfigError
from echelon.inference.generate import Sampling, build_processors, row_seed


class PromptSampler:
    """Continues the same prompts with the same random draws at every evaluation.

    The draws are those of `echelon generate` with its defaults and `--seed` the run's. No cache of keys and values is
    kept: each token is a forward pass over all prompts, of one shape throughout.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[int],
        seed: int,
        device: torch.device,
    ) -> None:
        """`stops`: ids that end a sample."""
        self.prompts = tuple(prompts)
        self._tokenizer = tokenizer
        self._stops = frozenset(stops)
        self._ids = encode_prompts(prompts, tokenizer)
        self._max_tokens = max_tokens
        self._seed = seed
        self._device = device

    def describe(self) -> str:
        """One line about what it costs."""
        return (
            f"samples: {len(self.prompts)} prompts, {self._max_tokens} tokens each: {self._max_tokens} forward passes "
            "at every evaluation"
        )

    def run(self, evaluation: Evaluation) -> list[str]:
        """The prompts with their continuations. Collective: every rank makes the same forward passes, and draws."""
        lengths = torch.tensor([len(ids) for ids in self._ids], device=self._device)
        width = int(lengths.max()) + self._max_tokens
        # What stands to the right of a row's end cannot be seen from it.
        rows = torch.tensor([ids + ids[-1:] * (width - len(ids)) for ids in self._ids], device=self._device)
        seeds = [row_seed(self._seed, prompt, 0) for prompt in self.prompts]
        # The limits of `generate`, less the penalty on repetition: nothing looks at the ids or the mask.
        process = build_processors(Sampling(), seeds, torch.ones_like(rows))
        each = torch.arange(len(rows), device=self._device)
        for place in range(self._max_tokens):
            logits = evaluation.next_token_logits(rows, lengths + place - 1)
            rows[each, lengths + place] = process(rows, logits).argmax(-1)
        return [self._decode(row, len(ids)) for row, ids in zip(rows.tolist(), self._ids, strict=True)]

    def _decode(self, row: list[int], start: int) -> str:
        last = start + self._max_tokens
        stop = next((place for place in range(start, last) if row[place] in self._stops), last)
        return str(self._tokenizer.decode(row[:stop], skip_special_tokens=True))


def encode_prompts(prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each prompt. Raises ConfigError for one that has none."""
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise ConfigError(f"evaluate.prompts: {prompt!r} holds no token; give at least one to go on from.")
    return encoded
