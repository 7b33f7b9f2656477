"""Models as lm-eval asks them: one that trains on all ranks, and one that knows nothing, to try tasks on."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.answers.sampling import Sampling, continue_prompts, row_seed
from echelon.learn.data.loader import choose_padding
from echelon.learn.distributed.mesh import all_reduce
from echelon.learn.distributed.objects import gather_objects
from echelon.learn.engines.engine import Evaluation

if TYPE_CHECKING:
    from echelon.learn.learner import Learner

_MAX_ROWS, _MAX_LOGITS = 8, 2**28
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
# What `generate` of transformers accepts, and a greedy answer or a sample does not depend on.
_WITHOUT_EFFECT = {"do_sample", "attention_mask", "use_cache", "pad_token_id"}


class AnyPrefix(HFLM):  # type: ignore[misc]
    """lm-eval's model of `transformers`, for tokenizers that mark neither the beginning nor the end of a text.

    lm-eval asks for a token that can stand for an empty context, and for one that ends an answer.
    """

    def __init__(self, pretrained: Any, tokenizer: PreTrainedTokenizerBase, batch_size: int, **options: Any) -> None:
        """`pretrained`: a causal model, or what stands for it. The tokenizer is copied: lm-eval changes it."""
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        prefix = next((id for id in ids if id is not None), 0)
        super().__init__(
            pretrained=pretrained,
            tokenizer=copy.deepcopy(tokenizer),
            backend="causal",
            batch_size=batch_size,
            prefix_token_id=prefix,
            **options,
        )

    @property
    @override
    def eot_token_id(self) -> int:
        id: int | None = self.tokenizer.eos_token_id
        return self.prefix_token_id if id is None else id


@dataclass(frozen=True)
class _StandIn:
    """What lm-eval reads of a model that it does not run itself."""

    config: PretrainedConfig
    device: torch.device


class TrainingModel(AnyPrefix):
    """The model of a learner, asked by lm-eval on all ranks with the same tasks. Its calls are collective.

    Ranks that read different data divide the requests and exchange the results, so that each has all of them.
    """

    batch_size_per_gpu: int

    def __init__(self, learner: "Learner", evaluation: Evaluation, before_pass: Callable[[], None]) -> None:
        """`before_pass` is called before each forward pass, on all ranks equally often; it may raise."""
        vocabulary = learner.shape.vocab_size * learner.recipe.data.sequence_len
        self._num_rows = max(1, min(_MAX_ROWS, _MAX_LOGITS // vocabulary))
        stand_in = _StandIn(learner.config, learner.device)
        # The groups of requests with the same context differ in number between ranks, and their passes must not.
        super().__init__(stand_in, learner.tokenizer, self._num_rows, logits_cache=False)
        self._learner, self._evaluation, self._before_pass = learner, evaluation, before_pass
        meshes = learner.meshes
        # Where all ranks must give the same shapes, they run the same requests.
        self._size = 1 if choose_padding(learner.plan).is_equal else meshes.data_size
        self._own = 0 if self._size == 1 else meshes.data_rank

    @override
    def _model_call(self, inps: Tensor, attn_mask: None = None, labels: None = None) -> Tensor:
        self._before_pass()
        return self._evaluation.logits(inps)

    @override
    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score this rank's share of the requests, and return the results of all."""
        requests = list(requests)
        if not requests:
            return []
        with self._batches_of(self._num_rows):
            scored = super()._loglikelihood_tokens(self._share(requests), disable_tqdm=True)
        return self._join(scored, len(requests))

    @override
    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
        with self._batches_of(self._num_rows * self._size):  # of windows, which `_loglikelihood_tokens` divides
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

    @override
    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
        with self._batches_of(self._num_rows * self._size):  # of prompts, which `_model_generate` divides
            return super().generate_until(requests, disable_tqdm=True)

    @override
    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Continue prompts, padded on the left; a row ends at a text of `stop` or a token that ends an answer."""
        width, filled = context.shape[1], options["attention_mask"].bool()
        sampling = read_sampling(options, max_length - width)
        prompts = [row[kept].tolist() or [self.prefix_token_id] for row, kept in zip(context, filled, strict=True)]
        ends = {self.eot_token_id, *self._learner.stops}
        share, meshes = self._share(prompts), self._learner.meshes

        def has_ended(number: int, tokens: Sequence[int]) -> bool:
            text = self.tok_decode(tokens)
            return tokens[-1] in ends or any(word in text for word in stop)

        def agree(goes_on: bool) -> bool:
            self._before_pass()
            still_sampled = torch.tensor(goes_on, dtype=torch.long, device=self.device)
            all_reduce(still_sampled, meshes.loss, dist.ReduceOp.MAX)
            return bool(still_sampled)

        seeds = [row_seed(0, " ".join(map(str, prompt)), 0) for prompt in share]
        peers = [group for group in (None if meshes.tp is None else meshes.tp.get_group(), meshes.cp) if group]
        continuations = continue_prompts(
            self._evaluation, share, sampling, seeds, self.device, has_ended, agree, peers, width=width
        )
        answers = self._join([row.tokens for row in continuations], len(prompts))
        end = self.tokenizer.pad_token_id
        longest = max(map(len, answers))
        rows = [answer + [end] * (longest - len(answer)) for answer in answers]
        return torch.cat([context, torch.tensor(rows, dtype=context.dtype, device=context.device)], dim=1)

    def _share(self, values: list[Any]) -> list[Any]:
        """Return this rank's share; the last ones are filled up, so that all ranks have as many."""
        share = values[self._own :: self._size]
        return share + values[:1] * (-(-len(values) // self._size) - len(share))

    def _join(self, own: list[Any], count: int) -> list[Any]:
        """Return the results of all shares, in the order of the requests. Collective."""
        if self._size == 1:
            return own
        shares = dict(gather_objects((self._own, own), self._learner.meshes.everyone))
        return [shares[number % self._size][number // self._size] for number in range(count)]

    @contextmanager
    def _batches_of(self, size: int) -> Iterator[None]:
        before, self.batch_size_per_gpu = self.batch_size_per_gpu, size
        try:
            yield
        finally:
            self.batch_size_per_gpu = before


def read_sampling(options: Mapping[str, Any], max_tokens: int) -> Sampling:
    """Return how a task's `generation_kwargs` draw tokens: greedily, unless it asks for samples.

    Raises ConfigError for an option that echelon's generation does not have, such as `num_beams`.
    """
    effective = {name: value for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT}
    if unknown := sorted(effective.keys() - _SAMPLING):
        raise ConfigError(
            f"evaluate.tasks: a task sets generation_kwargs.{unknown[0]}={effective[unknown[0]]}, which cannot be used "
            "during training; run it afterwards with `echelon eval --lm-eval`, or remove it."
        )
    if not options.get("do_sample"):
        effective["temperature"] = 0.0
    return Sampling(max_tokens=max_tokens, **effective)


class KnowsNothing(LM):  # type: ignore[misc]
    """Gives every text the same probability, and answers with nothing. Refuses what `TrainingModel` cannot do."""

    @override
    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return [(-1.0, False) for _ in requests]

    @override
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        return [-1.0 for _ in requests]

    @override
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        for request in requests:
            options = {**request.args[1]}
            for name in ("until", "max_gen_toks", "max_new_tokens", "max_tokens", "max_length"):
                options.pop(name, None)
            read_sampling(options, 1)
        return ["" for _ in requests]
