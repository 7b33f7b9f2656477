"""Answers sampled by the continuous batching of transformers, with a copy of the weights that are trained."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from echelon.ground.errors import ConfigError, TrainingError
from echelon.ground.logs import warnings_only
from echelon.learn.answers.rollouts import Rollouts
from echelon.learn.answers.sampling import Sampling, row_seed

if TYPE_CHECKING:
    from echelon.learn.learner import Learner

_PAGE = 256  # tokens of a page of keys and values, the default of transformers

_FAILED = "rollout.sampler=transformers: generate_batch of transformers failed"


class PagedSampler:
    """Samples as `rollout.sampler: transformers` says. The draws of an answer depend on the others of its process.

    `generate_batch` of transformers keeps keys and values in pages, and lets answers join and leave a batch at each
    token. It takes a whole model, which is kept beside the trained one, in the compute dtype.
    """

    def __init__(self, learner: "Learner") -> None:
        """Build the model, without the weights.

        Raises:
            ConfigError: the plan divides the model, so that no process has it whole.
        """
        plan = learner.plan
        if plan.dp_replicate != plan.world_size:
            raise ConfigError(
                f"rollout.sampler=transformers needs the whole model on each process, and the plan divides it "
                f"({plan.show_degrees()}); set parallel=ddp, or rollout.sampler=native."
            )
        self._learner = learner
        dtype = getattr(torch, plan.precision.compute)
        with learner.device:
            model = AutoModelForCausalLM.from_config(learner.config, dtype=dtype, attn_implementation="sdpa")
        self._model: Any = model.eval().requires_grad_(requires_grad=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the model on its device."""
        return int(self._model.get_memory_footprint())

    def answer(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Rollouts:
        """Answer prompts with the weights as they are now, `sampling.num_samples` times each. Collective.

        The log-probabilities are those of sampling: at its temperature.
        """
        self._copy_weights()
        learner = self._learner
        rows = [tuple(prompt) for prompt in prompts for _ in range(sampling.num_samples)]
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens, do_sample=True, temperature=sampling.temperature, top_k=0, top_p=1.0,
            eos_token_id=sorted(learner.stops) or None, pad_token_id=0,
        )  # fmt: skip
        pages = -(-(max(map(len, rows)) + sampling.max_tokens) // _PAGE)
        at_once = learner.plan.rollout.max_num_seqs if learner.plan.rollout is not None else len(rows)
        settings = ContinuousBatchingConfig(
            num_blocks=pages * at_once, max_requests_per_batch=at_once, return_logprobs=True,
            allow_block_sharing=False, seed=row_seed(sampling.seed, "process", learner.place.rank) % 2**31,
        )  # fmt: skip
        logging.disable_progress_bar()
        try:
            with warnings_only("ContinuousBatchingLogger"):
                found = self._model.generate_batch(
                    [list(row) for row in rows], config, continuous_batching_config=settings, warmup=False
                )
        except Exception as error:  # transformers raises errors of many kinds
            raise TrainingError(f"{_FAILED}: {error}; set rollout.sampler=native.") from error
        if len(found) != len(rows):
            raise TrainingError(f"{_FAILED} for {len(rows) - len(found)} answers; set rollout.sampler=native.")
        outputs = sorted(found.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        answers = [tuple(output.generated_tokens) for output in outputs]
        scores = [torch.tensor(output.logprobs, dtype=torch.float32) for output in outputs]
        ended = [answer[-1] in learner.stops for answer in answers]
        most = learner.place.count(learner.recipe.global_batch_size // sampling.num_samples) * sampling.num_samples
        return Rollouts(rows, answers, scores, scores, ended, learner.place, most)

    def _copy_weights(self) -> None:
        state: dict[str, Tensor] = {
            name.removeprefix("model."): tensor
            for name, tensor in self._learner.engine.state_dict().items()
            if name.startswith("model.")
        }
        left = self._model.load_state_dict(state, strict=False)
        assert not left.unexpected_keys, left.unexpected_keys
