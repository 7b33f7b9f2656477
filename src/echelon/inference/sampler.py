"""Samples `evaluate.prompts` during training, on all ranks, because each may hold only a shard of the model."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from echelon.data.panics import panics_told
from echelon.engines.engine import Evaluation
from echelon.inference.evaluation_checks import encode_prompts
from echelon.inference.generate import Sampling, build_processors, row_seed


class PromptSampler:
    """Continues the same prompts with the same random draws at every evaluation.

    The draws equal those of `echelon generate` with default settings and the run's seed. There is no KV cache: each
    token is a forward pass over all prompts, always with the same shape.
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
        """`stops`: token ids that end a sample."""
        self.prompts = tuple(prompts)
        self._tokenizer = tokenizer
        self._stops = frozenset(stops)
        self._ids = encode_prompts(prompts, tokenizer)
        self._max_tokens = max_tokens
        self._seed = seed
        self._device = device

    def describe(self) -> str:
        """Describe the cost in one line."""
        return (
            f"samples: {len(self.prompts)} prompts, {self._max_tokens} tokens each: {self._max_tokens} forward passes "
            "per evaluation"
        )

    def run(self, evaluation: Evaluation, beat: Callable[[], None] = lambda: None) -> list[str]:
        """Return the prompts with their continuations. Collective: all ranks run the same passes and draws.

        `beat` is called before each forward pass.
        """
        lengths = torch.tensor([len(ids) for ids in self._ids], device=self._device)
        width = int(lengths.max()) + self._max_tokens
        # Right padding: attention is causal, so no token sees it.
        rows = torch.tensor([ids + ids[-1:] * (width - len(ids)) for ids in self._ids], device=self._device)
        seeds = [row_seed(self._seed, prompt, 0) for prompt in self.prompts]
        # The processors of `generate` without a repetition penalty: none of them uses the ids or the mask.
        process = build_processors(Sampling(), seeds, torch.ones_like(rows))
        each = torch.arange(len(rows), device=self._device)
        for place in range(self._max_tokens):
            beat()
            logits = evaluation.next_token_logits(rows, lengths + place - 1)
            rows[each, lengths + place] = process(rows, logits).argmax(-1)
        return [self._decode(row, len(ids)) for row, ids in zip(rows.tolist(), self._ids, strict=True)]

    def _decode(self, row: list[int], start: int) -> str:
        last = start + self._max_tokens
        stop = next((place for place in range(start, last) if row[place] in self._stops), last)
        with panics_told(self._tokenizer.name_or_path, "a sample of evaluate.prompts"):
            return str(self._tokenizer.decode(row[:stop], skip_special_tokens=True))
