"""Training from rewards: the model answers prompts, the answers are judged, and it is trained on them."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from echelon.ground.errors import TrainingError
from echelon.learn.answers.judging import Rewarded, RewardStats
from echelon.learn.answers.rollouts import Rollouts
from echelon.learn.distributed.objects import gather_objects
from echelon.learn.objectives.grpo import GRPO, advantages_of, are_uniform
from echelon.recipe.document import Recipe
from echelon.run.training.answers import Drawn, add_up, choose_sampling, compare, pack, score_answers, unpack
from echelon.run.training.loop_run import LoopRun

if TYPE_CHECKING:
    from echelon.learn.answers.judging import AnswerJudge, Judging
    from echelon.learn.data.loader import StepBatch
    from echelon.learn.learner import CountedSums, Learner

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Steps in a row without any reward, after which the run stops."""

MOST_UNIFORM = 3
"""Steps in a row in which no group had rewards that differ, after which a line says so."""

_ACTIVITIES = {"sample": "sampling answers", "reward": "the rewards", "update": "the update"}
_SHOWN_EVERY = 10  # steps between two groups of answers in samples.jsonl


def train_from_rewards(learner: "Learner", run: LoopRun) -> None:
    """The loop of `objective.name: grpo`: in each step answers, rewards, and `rollout.updates` updates. Collective.

    Rewards are computed in another process, beside the training pass that scores the answers. With `rollout.lag: 1`
    the answers of the next step are drawn before the updates of this one, and judged beside them.

    A step is a function of its number, the weights, the optimizer and the answers that were drawn before it, which are
    kept with a checkpoint. So a killed run goes on as it would have.
    """
    recipe, judge, failures, uniform = learner.recipe, run.judge, 0, 0
    assert judge is not None, "the recipe has rewards"
    objective = find_objective(learner)
    ahead = unpack(learner, judge, run.kept) if recipe.rollout.lag else None
    judging = None if ahead is None else judge.ask(ahead.rollouts, ahead.prompts)
    run.keep(lambda: {} if ahead is None else pack(learner, ahead))
    for step in run.steps():
        clock = _PartClock(run)
        if ahead is not None and ahead.step == step:
            drawn = ahead
        else:
            drawn, judging = _draw(learner, judge, step, clock)
        ahead = None
        if recipe.rollout.lag and step + 1 < run.num_steps:
            ahead, _ = _draw(learner, judge, step + 1, clock, asks=False)  # rewards are computed one step at a time
        with clock.timing("reward"):
            assert judging is not None, "answers are asked about when they are drawn, or a step later"
            judged = judge.collect(judging)
            stats = judge.summarize(judged)
        if ahead is not None:
            judging = judge.ask(ahead.rollouts, ahead.prompts)
        failures = _count_failures(step, judged, stats, failures, run)
        uniform = _count_uniform(step, stats, uniform)
        mismatch = compare(learner, drawn)
        with clock.timing("update"):
            batch = build_batch(recipe, drawn, judged).to(learner.device)
            sums, grad_norm = _update(learner, batch, objective, run.learning_rate(step))
        metrics = _as_metrics(stats) | _describe(learner, objective, drawn.rollouts, batch, sums)
        run.record(step, sums, grad_norm, learning_rate=None, **metrics, **mismatch, **clock.seconds)
        if step % _SHOWN_EVERY == 0 or step + 1 == run.num_steps:
            run.keep_samples(step, list(_show(learner, drawn.rollouts, judged)))


def _draw(
    learner: "Learner", judge: "AnswerJudge", step: int, clock: "_PartClock", asks: bool = True
) -> "tuple[Drawn, Judging | None]":
    """Answer this rank's prompts of a step, and score the answers. `asks`: have them judged meanwhile. Collective."""
    with clock.timing("sample"):
        prompts = judge.prompts(step)
        rollouts = judge.answer(prompts, choose_sampling(learner.recipe, step), clock.run.beat)
    judging = judge.ask(rollouts, prompts) if asks else None
    with clock.timing("update"):
        return Drawn(step, prompts, rollouts, score_answers(learner, rollouts)), judging


def _update(
    learner: "Learner", batch: "StepBatch", objective: GRPO, learning_rate: float
) -> "tuple[CountedSums, Tensor]":
    """Train on the answers of a step, `rollout.updates` times. Returns what the last update gave. Collective."""
    for _ in range(learner.recipe.rollout.updates - 1):
        learner.forward_backward(batch, objective)
        learner.clip()
        learner.step(learning_rate)
    sums = learner.forward_backward(batch, objective)
    grad_norm = learner.clip()
    learner.step(learning_rate)
    return sums, grad_norm


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


def build_batch(recipe: Recipe, drawn: Drawn, judged: Rewarded) -> "StepBatch":
    """Return a batch of this rank's answers, each with its advantage; answers that do not train have no labels."""
    rollout, rollouts = recipe.rollout, drawn.rollouts
    groups = judged.rewards.view(-1, rollout.group_size)
    advantages = advantages_of(groups, recipe.objective.advantage)
    trains = ~groups.isnan()
    if "truncated" in rollout.skip:
        trains &= torch.tensor(rollouts.ended).view_as(trains)
    if "uniform" in rollout.skip:
        trains &= ~are_uniform(groups)
    return rollouts.batch(
        drawn.step,
        trained=trains.flatten().tolist(),
        advantages=advantages.flatten().float(),
        old_log_probabilities=drawn.scores,
        sampled_log_probabilities=rollouts.at_temperature,
    )


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


def _count_uniform(step: int, stats: RewardStats, before: int) -> int:
    """Return the steps in a row without anything to learn from, and say so once."""
    if before == MOST_UNIFORM:
        return before
    count = before + 1 if stats.uniform == 1 and stats.unjudged < 1 else 0
    if count == MOST_UNIFORM:
        logger.warning(
            f"step {step + 1}: for {count} steps all answers to the same prompt have had the same reward "
            f"({stats.reward:.4g} on average), and from such answers nothing is learned. Look at samples.jsonl: does "
            "the reward fit the answers? Start from a model that sometimes gives a good answer, use easier or harder "
            "prompts, or raise rollout.group_size or rollout.temperature."
        )
    return count


def _describe(
    learner: "Learner", objective: GRPO, rollouts: Rollouts, batch: "StepBatch", sums: "CountedSums"
) -> dict[str, float]:
    """Return what the answers and the last update of a step were like, as means over all ranks. Collective."""
    tokens = float(sum(map(sum, rollouts.written)))
    entropy = -sum(float(scores.sum()) for scores in rollouts.at_temperature)
    count = float(len(rollouts.answers))
    turns = 0 if rollouts.played is None else sum(rollouts.played.turns)
    counts = torch.tensor(
        [count, tokens, count - sum(rollouts.ended), entropy, turns, batch.num_labels],
        dtype=torch.float64,
        device=learner.device,
    )
    assert sums.measures is not None
    values = torch.cat([counts, sums.measures.double()])
    add_up(learner, values)
    count, tokens, cut, entropy, turns, labels, low, high, divergence = values.tolist()
    metrics = {"answer_tokens": tokens / count, "truncated": cut / count, "entropy": entropy / max(1.0, tokens)}
    metrics |= measure_ended(learner, rollouts)
    if rollouts.played is not None:
        metrics["turns"] = turns / count
    if learner.recipe.rollout.updates > 1 or learner.recipe.rollout.lag:
        clipped = {"clipped": low + high, "clipped_low": low, "clipped_high": high}
        metrics |= {name: value / max(1.0, labels) for name, value in clipped.items()}
    if objective.kl_weight:
        metrics["kl"] = divergence / max(1.0, labels)
    return metrics


def measure_ended(learner: "Learner", rollouts: Rollouts) -> dict[str, float]:
    """Return the lengths of the answers that ended, over all ranks; NaN if none did. Collective."""
    counts = [float(sum(written)) for written, ended in zip(rollouts.written, rollouts.ended, strict=True) if ended]
    of_places: dict[int, list[float]] = dict(gather_objects((rollouts.place.rank, counts), learner.meshes.everyone))
    lengths = [length for of_rank in of_places.values() for length in of_rank] or [math.nan]
    return {
        "ended_tokens": sum(lengths) / len(lengths),
        "ended_tokens_min": min(lengths),
        "ended_tokens_max": max(lengths),
    }


def _as_metrics(stats: RewardStats) -> dict[str, float]:
    metrics = {"reward": stats.reward} | ({} if stats.solved is None else {"solved": stats.solved})
    metrics |= {"reward_spread": stats.spread, "uniform_groups": stats.uniform, "reward_std": stats.deviation}
    if len(stats.parts) > 1:
        for name, (mean, deviation) in stats.parts.items():
            metrics |= {_key_of(name): mean, f"{_key_of(name)}_std": deviation}
    return metrics | ({"unjudged": stats.unjudged} if stats.unjudged else {})


def _key_of(name: str) -> str:
    """The key of a reward in rows, of its name in the recipe."""
    return f"reward_{name.rpartition(':')[2]}"


def _show(learner: "Learner", rollouts: Rollouts, judged: Rewarded) -> Iterator[dict[str, str | float | None]]:
    """Yield rows with the answers of this rank to its first prompt, their rewards and their advantages."""
    size, scale = learner.recipe.rollout.group_size, learner.recipe.objective.advantage
    columns = {"reward": judged.rewards, "advantage": advantages_of(judged.rewards[None, :size], scale)[0]}
    if len(judged.parts) > 1:
        columns |= {_key_of(name): part for name, part in judged.parts.items()}
    prompt = learner.tokenizer.decode(list(rollouts.prompts[0]))
    for number, text in enumerate(judged.texts[:size]):
        values = {name: float(column[number]) for name, column in columns.items()}
        yield {"prompt": prompt, "text": text} | {
            name: None if math.isnan(value) else value for name, value in values.items()
        }


@dataclass
class _PartClock:
    """The seconds of each part of a step."""

    run: LoopRun
    seconds: dict[str, float] = field(default_factory=lambda: {f"{part}_seconds": 0.0 for part in _ACTIVITIES})

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        self.run.beat(_ACTIVITIES[part])
        started = time.perf_counter()
        yield
        self.seconds[f"{part}_seconds"] += time.perf_counter() - started
