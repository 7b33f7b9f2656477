"""The answers of a step of training from rewards: drawn, scored by the training pass, and kept with a checkpoint."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.ground.errors import CheckpointError, TrainingError
from echelon.learn.answers.rollouts import Played, Rollouts
from echelon.learn.answers.sampling import Sampling, row_seed
from echelon.learn.data.prepared import PromptRecord
from echelon.learn.distributed.mesh import all_reduce
from echelon.learn.distributed.objects import gather_objects
from echelon.recipe.document import Recipe

if TYPE_CHECKING:
    from echelon.learn.answers.judging import AnswerJudge
    from echelon.learn.learner import Learner


@dataclass(frozen=True)
class Drawn:
    """The answers to this rank's prompts of a step, not judged yet."""

    step: int
    prompts: Sequence[PromptRecord]
    rollouts: Rollouts
    scores: Sequence[Tensor]
    """Of each answer the log-probabilities of its tokens in a training pass of the weights that drew them."""


def choose_sampling(recipe: Recipe, step: int) -> Sampling:
    """Return how the answers of a step are drawn."""
    rollout = recipe.rollout
    return Sampling(
        max_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        num_samples=rollout.group_size,
        seed=row_seed(recipe.run.seed, "rollout", step),
    )


def score_answers(learner: "Learner", rollouts: Rollouts) -> list[Tensor]:
    """Return the log-probabilities of answers in a training pass, at the temperature of sampling. Collective.

    One fp32 tensor [len(answer)] for each, on the CPU; 0 for the tokens of an environment.
    """
    batch = rollouts.batch()
    rows: dict[int, Tensor] = {}
    for scores, microbatch in zip(
        learner.log_probabilities(batch, learner.recipe.rollout.temperature), batch.microbatches, strict=True
    ):
        rows |= zip(microbatch.batch_indices.tolist(), scores.cpu(), strict=True)
    first = rollouts.place.rank * rollouts.most
    return [
        rows[first + number][len(prompt) - 1 :][: len(answer)].clone()
        for number, (prompt, answer) in enumerate(zip(rollouts.prompts, rollouts.answers, strict=True))
    ]


def add_up(learner: "Learner", values: Tensor) -> None:
    """Add up what answers were like over all ranks, in place; of ranks with the same answers one counts. Collective."""
    if not learner.meshes.counts_loss:
        values.zero_()
    all_reduce(values, learner.meshes.everyone)


def compare(learner: "Learner", drawn: Drawn) -> dict[str, float]:
    """Compare the sampler's log-probabilities with those of the training pass, over all ranks. Collective.

    Raises:
        TrainingError: they differ by more than `rollout.max_mismatch`.
    """
    written = torch.tensor([is_own for row in drawn.rollouts.written for is_own in row])
    gaps = (torch.cat(list(drawn.scores)) - torch.cat(list(drawn.rollouts.at_temperature))).abs()[written]
    sums = torch.tensor([gaps.sum(), (gaps > 0.01).sum(), len(gaps)], dtype=torch.float64, device=learner.device)
    largest = gaps.max().reshape(1).to(learner.device)
    add_up(learner, sums)
    all_reduce(largest, learner.meshes.everyone, torch.distributed.ReduceOp.MAX)
    limit = learner.recipe.rollout.max_mismatch
    if limit is not None and float(largest) > limit:
        raise TrainingError(
            f"step {drawn.step + 1}: the log-probability of a token differs by {float(largest):.4g} between the "
            f"sampler and the training pass, more than rollout.max_mismatch={limit:g}; use fp32 or another attention, "
            "weight tokens by rollout.importance_cap, or raise the limit."
        )
    mean, share, _ = (sums / sums[2].clamp(min=1)).tolist()
    return {"mismatch": mean, "mismatch_share": share, "mismatch_max": float(largest)}


def pack(learner: "Learner", drawn: Drawn) -> dict[str, Any]:
    """Return answers of all ranks as JSON values, to go on from on any number of ranks. Collective."""
    rollouts, played = drawn.rollouts, drawn.rollouts.played
    cooled = [row.clone() for row in rollouts.at_temperature]  # a part of a tensor is saved with all of it
    columns = [rollouts.prompts, rollouts.answers, cooled, rollouts.ended, drawn.scores]
    columns += [] if played is None else [played.written, played.earned, played.turns]
    rank_answers = (list(zip(*columns, strict=True)), () if played is None else played.failures)
    places = dict(gather_objects((rollouts.place.rank, rank_answers), learner.meshes.everyone))
    rows = [row for rank in sorted(places) for row in places[rank][0]]
    failures = [text for rank in sorted(places) for text in places[rank][1]]
    buffer = io.BytesIO()
    torch.save({"rows": rows, "failures": failures}, buffer)
    return {"step": drawn.step, "answers": base64.b64encode(buffer.getvalue()).decode("ascii")}


def unpack(learner: "Learner", judge: "AnswerJudge", saved: Mapping[str, Any]) -> Drawn | None:
    """Return this rank's share of what `pack` returned; None if it is of another batch size, or nothing was saved.

    Raises:
        CheckpointError: it is damaged.
    """
    if not saved:
        return None
    try:
        step, packed = int(saved["step"]), io.BytesIO(base64.b64decode(saved["answers"], validate=True))
        content = torch.load(packed, weights_only=True)
        rows, failures = list(content["rows"]), list(content["failures"])
    except Exception as error:  # torch raises errors of many kinds
        raise CheckpointError("state.json has no valid answers of the next step; delete this checkpoint.") from error
    size, place = learner.recipe.rollout.group_size, learner.place
    count = learner.recipe.global_batch_size // size
    if len(rows) != count * size:
        return None
    share = place.share(count)
    mine = rows[share.start * size : share.stop * size]
    prompts, answers, cooled, ended, scores, *rest = zip(*mine, strict=True)
    played = Played(rest[0], rest[1], rest[2], failures) if rest else None
    # The log-probabilities without the temperature are not used after this.
    rollouts = Rollouts(prompts, answers, cooled, cooled, ended, place, place.count(count) * size, played)
    return Drawn(step, judge.prompts(step), rollouts, scores)
