"""Samples `evaluate.prompts` during training, on all ranks, because each may hold only a shard of the model."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from echelon.learn.answers.sampling import Sampling, continue_prompts, find_end, row_seed
from echelon.learn.data.tokenizer import panics_told
from echelon.learn.engines.engine import Evaluation
from echelon.run.training.evaluation_checks import encode_prompts


class PromptSampler:
    """Continues the same prompts with the same random draws at every evaluation.

    The draws equal those of `echelon generate` with default settings and the run's seed. Each token is a forward pass,
    also after all samples have ended: every rank runs the same passes.
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
        seeds = [row_seed(self._seed, prompt, 0) for prompt in self.prompts]
        sampling = Sampling(self._max_tokens)

        def agree(goes_on: bool) -> bool:
            beat()
            return goes_on

        beat()
        continuations = continue_prompts(
            evaluation, self._ids, sampling, seeds, self._device, lambda number, tokens: False, agree
        )
        return [
            self._decode(ids + continued.tokens[: find_end(continued.tokens, self._stops)])
            for ids, continued in zip(self._ids, continuations, strict=True)
        ]

    def _decode(self, ids: list[int]) -> str:
        with panics_told(self._tokenizer.name_or_path, "a sample of evaluate.prompts"):
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))
