"""Training from rewards: the model answers prompts, the answers are judged, and it is trained on them."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from echelon.ground.errors import TrainingError
from echelon.learn.distributed.mesh import all_reduce
from echelon.learn.judging import Rewarded, RewardStats
from echelon.learn.objectives.grpo import GRPO, advantages_of
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.rollouts import Rollouts
from echelon.learn.sampling import Sampling, row_seed
from echelon.recipe import Recipe
from echelon.run.training.loop_run import LoopRun

if TYPE_CHECKING:
    from echelon.learn.data.loader import StepBatch
    from echelon.learn.learner import CountedSums, Learner

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Steps in a row without any reward, after which the run stops."""

_SHOWN_EVERY = 10  # steps between two groups of answers in samples.jsonl


def train_from_rewards(learner: "Learner", run: LoopRun) -> None:
    """The loop of `objective.name: grpo`: in each step answers, rewards, and `rollout.updates` updates. Collective.

    A step is a function of its number, the weights and the optimizer, so a killed run goes on as it would have.
    """
    recipe, judge, failures = learner.recipe, run.judge, 0
    assert judge is not None, "the recipe has rewards"
    objective = find_objective(learner)
    for step in run.steps():
        clock = _Clock()
        with clock.timing("sample", run):
            prompts = judge.prompts(step)
            rollouts = judge.answer(prompts, choose_sampling(recipe, step), run.beat)
        with clock.timing("reward", run):
            judged = judge.judge(rollouts, prompts)
            stats = judge.summarize(rollouts, judged)
        failures = _count_failures(step, judged, stats, failures, run)
        with clock.timing("update", run):
            batch = build_batch(recipe, step, rollouts, judged).to(learner.device)
            batch, mismatch = _compare(learner, batch, recipe)
            for update in range(recipe.rollout.updates):
                if update:
                    learner.step(run.learning_rate(step))
                sums = learner.forward_backward(batch, objective)
                grad_norm = learner.clip()
            learner.step(run.learning_rate(step))
        metrics = _as_metrics(stats) | _describe(learner, objective, rollouts, batch, sums)
        run.record(step, sums, grad_norm, learning_rate=None, **metrics, **mismatch, **clock.seconds)
        if step % _SHOWN_EVERY == 0 or step + 1 == run.num_steps:
            run.keep_samples(step, list(_show(learner, rollouts, judged)))


def find_objective(learner: "Learner") -> GRPO:
    """Return the recipe's objective, with what it needs to know of the answers."""
    rollout = learner.recipe.rollout
    turns = 1 if rollout.environment is None else rollout.environment.max_turns
    return replace(
        cast(GRPO, learner.objective),
        max_tokens=rollout.max_new_tokens * turns,
        temperature=rollout.temperature,
        importance_cap=rollout.importance_cap,
    )


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


def build_batch(recipe: Recipe, step: int, rollouts: Rollouts, judged: Rewarded) -> "StepBatch":
    """Return a batch of this rank's answers, each with its advantage; answers that do not train have no labels."""
    rollout = recipe.rollout
    groups = judged.rewards.view(-1, rollout.group_size)
    advantages = advantages_of(groups, recipe.objective.advantage)
    trains = ~groups.isnan()
    if rollout.skip_truncated:
        trains &= torch.tensor(rollouts.ended).view_as(trains)
    if rollout.skip_uniform_groups:
        trains &= (advantages != 0).any(1, keepdim=True)
    return rollouts.batch(
        step,
        trained=trains.flatten().tolist(),
        advantages=advantages.flatten().float(),
        sampled_log_probabilities=rollouts.at_temperature,
    )


def _compare(learner: "Learner", batch: "StepBatch", recipe: Recipe) -> "tuple[StepBatch, dict[str, float]]":
    """Give the batch the log-probabilities of the trainer's own pass, and compare them with the sampler's. Collective.

    Raises:
        TrainingError: they differ by more than `rollout.max_mismatch`.
    """
    scores = learner.log_probabilities(batch, recipe.rollout.temperature)
    sums, largest = torch.zeros(3, dtype=torch.float64, device=learner.device), torch.zeros(1, device=learner.device)
    for own, microbatch in zip(scores, batch.microbatches, strict=True):
        labelled = microbatch.labels != IGNORE
        gap = (own - microbatch.extra["sampled_log_probabilities"]).abs() * labelled
        sums += torch.stack([gap.sum(), (gap > 0.01).sum(), labelled.sum()]).double()
        largest = torch.maximum(largest, gap.max())
    all_reduce(_counted_once(sums, learner), learner.meshes.everyone)
    all_reduce(largest, learner.meshes.everyone, torch.distributed.ReduceOp.MAX)
    limit = recipe.rollout.max_mismatch
    if limit is not None and float(largest) > limit:
        raise TrainingError(
            f"step {batch.step + 1}: the log-probability of a token differs by {float(largest):.4g} between the "
            f"sampler and the training pass, more than rollout.max_mismatch={limit:g}; use fp32 or another attention, "
            "weight tokens by rollout.importance_cap, or raise the limit."
        )
    mean, share, _ = (sums / sums[2].clamp(min=1)).tolist()
    mismatch = {"mismatch": mean, "mismatch_share": share, "mismatch_max": float(largest)}
    return batch.with_extra(old_log_probabilities=scores), mismatch


def _count_failures(step: int, judged: Rewarded, stats: RewardStats, before: int, run: LoopRun) -> int:
    """Report failed rewards. Returns the steps in a row in which no answer had one; raises TrainingError for many."""
    for failure in judged.failures:
        logger.warning(f"step {step + 1}: {failure} These answers are not trained on.")
        run.event("reward_failed", step=step + 1, message=failure)
    if stats.unjudged < 1:
        return 0
    if before + 1 == MOST_FAILURES:
        raise TrainingError(
            f"no answer had a reward in {MOST_FAILURES} steps: {' '.join(judged.failures)} Correct the reward; the "
            "same command resumes the run."
        )
    return before + 1


def _describe(
    learner: "Learner", objective: GRPO, rollouts: Rollouts, batch: "StepBatch", sums: "CountedSums"
) -> dict[str, float]:
    """Return what the answers and the last update of a step were like, as means over all ranks. Collective."""
    tokens = float(sum(map(sum, rollouts.written)))
    entropy = -sum(float(scores.sum()) for scores in rollouts.at_temperature)
    count = float(len(rollouts.answers))
    turns = 0 if rollouts.played is None else sum(rollouts.played.turns)
    own = torch.tensor(
        [count, tokens, count - sum(rollouts.ended), entropy, turns, batch.num_labels],
        dtype=torch.float64,
        device=learner.device,
    )
    assert sums.measures is not None
    values = torch.cat([own, sums.measures.double()])
    all_reduce(_counted_once(values, learner), learner.meshes.everyone)
    count, tokens, cut, entropy, turns, labels, clipped, divergence = values.tolist()
    found = {"answer_tokens": tokens / count, "truncated": cut / count, "entropy": entropy / max(1.0, tokens)}
    if rollouts.played is not None:
        found["turns"] = turns / count
    if learner.recipe.rollout.updates > 1:
        found["clipped"] = clipped / max(1.0, labels)
    if objective.kl_weight:
        found["kl"] = divergence / max(1.0, labels)
    return found


def _counted_once(values: Tensor, learner: "Learner") -> Tensor:
    """Return the values; zeros on ranks that hold answers which another rank counts, or no loss of them."""
    return values if learner.meshes.counts_loss else values.zero_()


def _as_metrics(stats: RewardStats) -> dict[str, float]:
    parts = {f"reward_{name.rpartition(':')[2]}": value for name, value in stats.parts.items()}
    found = {"reward": stats.reward, "solved": stats.solved, "reward_spread": stats.spread}
    return {**found, **(parts if len(parts) > 1 else {}), **({"unjudged": stats.unjudged} if stats.unjudged else {})}


def _show(learner: "Learner", rollouts: Rollouts, judged: Rewarded) -> Iterator[dict[str, str | float | None]]:
    """Yield rows with the answers of this rank to its first prompt, and their rewards."""
    rows = zip(rollouts.prompts, judged.texts, judged.rewards.tolist(), strict=True)
    for ids, text, reward in islice(rows, learner.recipe.rollout.group_size):
        prompt = learner.tokenizer.decode(list(ids))
        yield {"prompt": prompt, "text": text, "reward": None if math.isnan(reward) else reward}


@dataclass
class _Clock:
    """The seconds of each part of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, part: str, run: LoopRun) -> Iterator[None]:
        run.beat(_ACTIVITIES[part])
        started = time.perf_counter()
        yield
        self.seconds[f"{part}_seconds"] = time.perf_counter() - started


_ACTIVITIES = {"sample": "sampling answers", "reward": "the rewards", "update": "the update"}
