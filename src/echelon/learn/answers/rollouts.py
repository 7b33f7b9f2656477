"""Answers of a model to prompts, and batches for training with them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.ground.errors import ConfigError, DataError
from echelon.learn.answers.sampling import ForwardPasses, Sampling, continue_prompts, row_seed
from echelon.learn.data.loader import BatchPlace, StepBatch
from echelon.learn.data.own_batches import build_step_batch, hash_lists
from echelon.learn.data.shards import NO_LABEL
from echelon.learn.distributed.mesh import Meshes, all_reduce
from echelon.learn.distributed.objects import gather_objects


@dataclass(frozen=True)
class Played:
    """What the environment did in answers of several turns. One entry per answer."""

    written: Sequence[Sequence[bool]]
    """Of each token of an answer: whether the model wrote it. The others have no label, and log-probabilities of 0."""
    earned: Sequence[float]
    """The sum of the environment's rewards over the turns; NaN where it failed."""
    turns: Sequence[int]
    """How often the model spoke."""
    failures: Sequence[str] = ()
    """What went wrong on this rank, a sentence each."""


@dataclass(frozen=True)
class Rollouts:
    """What a model has answered to the prompts of this rank; `Learner.generate` makes them. One entry per answer."""

    prompts: Sequence[Sequence[int]]
    """Token ids: a prompt with several samples occurs that often, next to each other."""
    answers: Sequence[Sequence[int]]
    """Token ids, the stop token that ended it included. Of several turns: those of the environment between them too."""
    log_probabilities: Sequence[Tensor]
    """fp32 `[len(answer)]` on the CPU: of each token under the model itself, before temperature, top_k and so on."""
    at_temperature: Sequence[Tensor]
    """The same with the logits divided by the temperature of sampling."""
    ended: Sequence[bool]
    """Whether a stop token ended the answer, and not `Sampling.max_tokens`; or the environment, if there is one."""
    place: BatchPlace
    """Which part of a batch of all ranks these answers are."""
    most: int
    """The number of answers of the rank that has most. Batches are filled up to it by sequences without targets."""
    played: Played | None = None
    """What an environment did in these answers; None without one."""
    versions: Sequence[int] = ()
    """Of each answer: the updates of the weights that a sampler apart has drawn it with; empty without one."""

    def batch(
        self,
        step: int = 0,
        micro_batch_size: int | None = None,
        trained: Sequence[bool] | None = None,
        **extra: Sequence[Any] | Tensor,
    ) -> StepBatch:
        """Return the answers as a batch of a step, with labels on the tokens that the model wrote.

        Its hash is that of tokens and labels alone: what is computed from them differs by rounding between plans.

        Args:
            micro_batch_size: sequences of one forward pass; None: as the plan says.
            trained: whether each answer has labels; None: all have.
            extra: what the loss needs, by name. Of each answer one value: a number, or a tensor [1, ...], for the
                answer; or a tensor [len(answer), ...], whose values get the positions of the labels. There is always
                `old_log_probabilities`, those of the tokens under the model that drew them.

        Raises:
            DataError: an extra has another number of values, or a sequence is longer than the recipe's.
        """
        count, given = len(self.answers), {"old_log_probabilities": self.log_probabilities, **extra}
        for name, values in given.items():
            if len(values) != count:
                raise DataError(f"extra[{name!r}] has {len(values)} values for {count} answers; give one for each.")
        fill = self.most - count
        heads = [len(prompt) - 1 for prompt in self.prompts]
        sequences = [[*prompt, *answer[:-1]] for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        kept = [True] * count if trained is None else trained
        labels = [
            [NO_LABEL] * head
            + [token if is_kept and is_own else NO_LABEL for token, is_own in zip(*written, strict=True)]
            for head, is_kept, *written in zip(heads, kept, self.answers, self.written, strict=True)
        ]
        placed = {name: self._place(values, heads) for name, values in given.items()}
        filled = {name: rows + [torch.zeros_like(rows[0][:1])] * fill for name, rows in placed.items()}
        place = self.place if micro_batch_size is None else replace(self.place, micro_batch_size=micro_batch_size)
        batch = build_step_batch(step, sequences + [[0]] * fill, labels + [[NO_LABEL]] * fill, place, filled)
        return replace(batch, hash=hash_lists(sequences, labels, place, self.place.rank * self.most))

    @property
    def written(self) -> Sequence[Sequence[bool]]:
        """Of each token of the answers: whether the model wrote it."""
        return [[True] * len(answer) for answer in self.answers] if self.played is None else self.played.written

    def _place(self, values: Sequence[Any] | Tensor, heads: Sequence[int]) -> list[Tensor]:
        """Put the values of answers' tokens where their labels are; values of whole answers are [1, ...]."""
        rows = [torch.as_tensor(value) for value in values]
        rows = [row[None] if row.dim() == 0 else row for row in rows]
        if [len(row) for row in rows] != [len(answer) for answer in self.answers]:
            return rows
        return [torch.cat([row.new_zeros(head, *row.shape[1:]), row]) for row, head in zip(rows, heads, strict=True)]


def generate(
    passes: ForwardPasses,
    meshes: Meshes,
    device: torch.device,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stops: Sequence[int],
    place: BatchPlace,
    numbers: Sequence[int] | None = None,
    max_num_seqs: int | None = None,
) -> Rollouts:
    """Answer prompts, `sampling.num_samples` times each. Collective: ranks may have different prompts.

    The draws of an answer depend on its prompt, its number and the seed, so they are the same on any number of ranks;
    a prompt that occurs twice has the same answers. All ranks run as many passes as the one that needs most.

    Args:
        prompts: token ids of this rank's prompts; ranks that share a model's sequences (tp, cp, pp) give the same.
        stops: token ids that end an answer.
        numbers: of each prompt the number of its first answer; None: 0.
        max_num_seqs: answers that a rank samples at the same time, at most; None: all.

    Raises:
        ConfigError: on every rank, if the prompts of any rank cannot be used, or the ranks differ in `sampling` or
            `max_num_seqs`.
    """
    rows = [tuple(prompt) for prompt in prompts for _ in range(sampling.num_samples)]
    firsts = [0] * len(prompts) if numbers is None else numbers
    problem = _find_problem(prompts, sampling, firsts, max_num_seqs)
    most, width = _agree(meshes, rows, sampling, max_num_seqs, problem)
    seeds = [
        draw_seed(sampling.seed, prompt, first + number)
        for prompt, first in zip(prompts, firsts, strict=True)
        for number in range(sampling.num_samples)
    ]
    fill, ends = most - len(rows), frozenset(stops)

    def has_ended(number: int, tokens: Sequence[int]) -> bool:
        return number >= len(rows) or tokens[-1] in ends

    def agree(goes_on: bool) -> bool:
        still_sampled = torch.tensor(goes_on, dtype=torch.long, device=device)
        all_reduce(still_sampled, meshes.loss, dist.ReduceOp.MAX)
        return bool(still_sampled)

    holders = None if meshes.tp is None else meshes.tp.get_group()
    peers = [group for group in (holders, meshes.cp) if group is not None]
    padded, seeds = rows + [(0,)] * fill, seeds + [0] * fill
    continuations = continue_prompts(
        passes, padded, sampling, seeds, device, has_ended, agree, peers, width, max_num_seqs
    )[: len(rows)]
    return Rollouts(
        rows,
        [tuple(answer.tokens) for answer in continuations],
        [torch.tensor(answer.log_probabilities, dtype=torch.float32) for answer in continuations],
        [torch.tensor(answer.at_temperature, dtype=torch.float32) for answer in continuations],
        [answer.tokens[-1] in ends for answer in continuations],
        place,
        most,
    )


def draw_seed(seed: int, prompt: Sequence[int], number: int) -> int:
    """Return the seed of the draws of one answer to a prompt, given as token ids."""
    return row_seed(seed, " ".join(map(str, prompt)), number)


def _agree(
    meshes: Meshes, rows: Sequence[Sequence[int]], sampling: Sampling, max_num_seqs: int | None, problem: str | None
) -> tuple[int, int]:
    """Return the most rows of any rank, and the greatest length of a prompt. Collective."""
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    width = max((len(row) for row in rows), default=0)
    asked = (sampling, max_num_seqs)
    requests = gather_objects((problem, asked, meshes.data_rank, digest, len(rows), width), meshes.everyone)
    digests: dict[int, str] = {}
    for rank, (reason, theirs, data_rank, found, *_) in enumerate(requests):
        if reason is not None:
            raise ConfigError(f"generate, rank {rank}: {reason}")
        if theirs != requests[0][1]:
            told = [f"{given}, max_num_seqs={size}" for given, size in (theirs, requests[0][1])]
            raise ConfigError(f"generate, rank {rank}: its {told[0]} differ from {told[1]} of rank 0; give the same.")
        if found != digests.setdefault(data_rank, found):
            raise ConfigError(
                f"generate, rank {rank}: its prompts differ from those of the ranks with which it reads the same data; "
                f"give all ranks with meshes.data_rank={data_rank} the same."
            )
    return max(request[4] for request in requests), max(request[5] for request in requests)


def _find_problem(
    prompts: Sequence[Sequence[int]], sampling: Sampling, numbers: Sequence[int], max_num_seqs: int | None
) -> str | None:
    if not prompts:
        return "there is no prompt; give every rank at least one."
    if len(numbers) != len(prompts):
        return f"there are {len(numbers)} numbers for {len(prompts)} prompts; give one for each."
    if not all(prompts):
        return "a prompt has no token; give at least one."
    if sampling.stop:
        return f"stop={sampling.stop} are texts, and answers are token ids; give their ids as `stops`."
    if max_num_seqs is not None and max_num_seqs < 1:
        return f"max_num_seqs={max_num_seqs} leaves no answer to sample; use 1 or more, or None for all."
    return None
