"""On-policy distillation: the model answers prompts, and learns what a teacher predicts at each of its own tokens."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from echelon.learn.answers.rollouts import Rollouts
from echelon.learn.answers.sampling import row_seed
from echelon.learn.data.shards import NO_LABEL
from echelon.recipe.document import Recipe
from echelon.run.training.answers import add_up, choose_sampling
from echelon.run.training.loop_run import LoopRun

if TYPE_CHECKING:
    from echelon.learn.data.loader import StepBatch
    from echelon.learn.learner import Learner

_SHOWN_EVERY = 10  # steps between two answers in samples.jsonl
_UNKNOWN = ("answer_tokens", "truncated", "entropy", "left_out")


def distill_on_policy(learner: "Learner", run: LoopRun) -> None:
    """The loop of `objective.name: distill` with `objective.on_policy_fraction` (GKD, arXiv:2306.13649). Collective.

    A step trains on the model's own answers to the prompts of its batch, or on the answers of the data. Which, and what
    is drawn, are functions of the step, the weights and the optimizer, so a killed run goes on as it would have.
    """
    recipe = learner.recipe
    for step in run.steps():
        batch, started = run.batch(step), time.perf_counter()
        metrics: dict[str, float] = dict.fromkeys(_UNKNOWN, math.nan)
        on_policy = is_on_policy(recipe, step)
        if on_policy:
            run.beat("sampling answers")
            prompts, fits = find_prompts(batch, recipe.data.sequence_len - recipe.rollout.max_new_tokens)
            first = learner.place.rank * len(prompts)
            numbers = range(first, first + len(prompts))  # equal prompts have different answers
            rollouts = learner.generate(prompts, replace(choose_sampling(recipe, step), num_samples=1), numbers=numbers)
            metrics = _describe(learner, rollouts, fits)
            batch = rollouts.batch(step, trained=fits)
            if step % _SHOWN_EVERY == 0 or step + 1 == run.num_steps:
                texts = [learner.tokenizer.decode(list(ids)) for ids in (rollouts.prompts[0], rollouts.answers[0])]
                run.keep_samples(step, [dict(zip(("prompt", "text"), texts, strict=True))])
        sampled = time.perf_counter()
        run.beat("the update")
        sums = learner.forward_backward(batch)
        grad_norm = learner.clip()
        learner.step(run.learning_rate(step))
        seconds = {"sample_seconds": sampled - started, "update_seconds": time.perf_counter() - sampled}
        run.record(step, sums, grad_norm, on_policy=float(on_policy), **metrics, **seconds)


def is_on_policy(recipe: Recipe, step: int) -> bool:
    """Whether a step trains on the model's own answers: a function of the seed and the step."""
    draw = row_seed(recipe.run.seed, "on policy", step) % 2**32 / 2**32
    return draw < recipe.objective.on_policy_fraction


def find_prompts(batch: "StepBatch", longest: int) -> tuple[list[Sequence[int]], list[bool]]:
    """Return this rank's prompts of a step, in the order of the batch, and whether each is answered and trained on.

    The prompt of a sequence is what precedes its first target. One that is longer than `longest`, or of a sequence that
    only fills the batch, is not trained on, and has one token here.
    """
    prompts = []
    for microbatch in batch.microbatches:
        rows = zip(
            microbatch.batch_indices.tolist(), microbatch.input_ids.tolist(), microbatch.labels.tolist(), strict=True
        )
        for index, ids, labels in rows:
            length = next((position + 1 for position, label in enumerate(labels) if label != NO_LABEL), 0)
            fits = 0 < length <= longest
            prompts.append((index, ids[:length] if fits else ids[:1], fits))
    ordered = sorted(prompts, key=lambda prompt: prompt[0])
    return [ids for _, ids, _ in ordered], [fits for *_, fits in ordered]


def _describe(learner: "Learner", rollouts: Rollouts, fits: Sequence[bool]) -> dict[str, float]:
    """Return what the answers of all ranks that train are like. Collective.

    answer_tokens: their mean length. truncated: the share that `rollout.max_new_tokens` has cut off. entropy: nats per
    token, estimated from the drawn tokens. left_out: the share of sequences whose prompt leaves no room for an answer.
    """
    rows = [row for row, is_trained in enumerate(fits) if is_trained]
    tokens = sum(len(rollouts.answers[row]) for row in rows)
    surprise = -sum(float(rollouts.at_temperature[row].sum()) for row in rows)
    cut = sum(not rollouts.ended[row] for row in rows)
    counts = torch.tensor([len(fits), len(rows), tokens, cut, surprise], dtype=torch.float64, device=learner.device)
    add_up(learner, counts)
    count, trained, tokens_, cut_, surprise_ = counts.tolist()
    return {
        "answer_tokens": tokens_ / max(1.0, trained),
        "truncated": cut_ / max(1.0, trained),
        "entropy": surprise_ / max(1.0, tokens_),
        "left_out": 1 - trained / max(1.0, count),
    }
