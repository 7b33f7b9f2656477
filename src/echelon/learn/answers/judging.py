"""Answers of a model to the prompts of a recipe, judged by its rewards, on all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.ground.errors import ConfigError, EchelonError
from echelon.learn.answers.conversations import Conversations
from echelon.learn.answers.environments import EnvironmentProcess
from echelon.learn.answers.reward_models import RewardModel, find_reward_models
from echelon.learn.answers.rewards import Asked, RewardProcess, Scores, name_rewards
from echelon.learn.answers.rollouts import Played, Rollouts
from echelon.learn.answers.sampling import Sampling
from echelon.learn.data.mixture import build_order
from echelon.learn.data.order import DataOrder
from echelon.learn.data.prepared import PromptRecord, read_prompts
from echelon.learn.data.shards import Dataset
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.objects import gather_found, gather_objects
from echelon.learn.evaluation import EvalResult
from echelon.learn.model.hub import read_commits, with_copies
from echelon.learn.objectives.grpo import are_uniform, spread_of
from echelon.recipe.document import Recipe
from echelon.recipe.names import SAMPLERS

if TYPE_CHECKING:
    from echelon.learn.learner import Learner


@dataclass(frozen=True)
class Rewarded:
    """The rewards of this rank's answers, one per answer."""

    texts: Sequence[str]
    """The answers as text, without special tokens."""
    rewards: Tensor
    """fp64 [answers] on the CPU; NaN for an answer that could not be judged."""
    parts: Mapping[str, Tensor]
    """Of each reward of the recipe, by its name (see `name_rewards`), without its weight."""
    failures: Sequence[str]
    """What went wrong on any rank, a sentence each; the same on every rank."""


@dataclass(frozen=True)
class RewardStats:
    """What the answers of all ranks earned: means over the answers that were judged; NaN if none was."""

    reward: float
    solved: float | None
    """The share with the full reward: that of every reward function at 1, and 1 from the environment. None with a
    reward model, whose scores have no largest value."""
    spread: float
    """The mean over groups of what the advantages are divided by: `spread_of`. Groups without a reward do not count."""
    uniform: float
    """The share of groups without two rewards that differ."""
    deviation: float
    """The standard deviation, with the divisor n - 1, over all groups together."""
    unjudged: float
    """The share that could not be judged."""
    parts: Mapping[str, tuple[float, float]]
    """Of each reward the mean and the standard deviation of the answers that it judged."""


@dataclass(frozen=True)
class Judging:
    """Answers of this rank that are being judged."""

    texts: Sequence[str]
    played: Played | None
    asked: Asked | None = None
    """On the rank that runs the reward functions for these answers."""


class AnswerJudge:
    """Gives a learner the prompts of its recipe, and judges the answers by the recipe's rewards.

    Of the ranks that hold the same answers one runs the reward functions, in a process beside it, the environments in
    another, and reward models on its own device.
    """

    def __init__(self, learner: "Learner", hub_path: Path) -> None:
        """Start the processes of the rewards and of the environments. Collective.

        Args:
            hub_path: the file with the commits of the run's hub models (`hub.write_commits`).

        Raises:
            ConfigError: a reward or an environment cannot be imported, or does not accept its options, or a reward
                model is not there, or the sampler does not take the plan; on every rank.
        """
        self._learner, meshes = learner, learner.meshes
        places = gather_objects(meshes.data_rank, meshes.everyone)
        self._rewards: RewardProcess | None = None
        self._environments: EnvironmentProcess | None = None
        self.frozen_bytes = 0
        """Of the reward models of this process, and of what a sampler of another package keeps."""
        sampler = learner.recipe.rollout.sampler
        self._sampler = None if sampler == "native" else SAMPLERS[sampler](learner)
        self.frozen_bytes += 0 if self._sampler is None else self._sampler.num_bytes
        self._judges = places.index(meshes.data_rank) == dist.get_rank(meshes.everyone)
        try:
            gather_found(lambda: self._start(hub_path), meshes.everyone)
        except EchelonError:
            self.close()
            raise

    def _start(self, hub_path: Path) -> None:
        if not self._judges:
            return
        recipe = with_copies(self._learner.recipe, read_commits(hub_path))
        dtype, device = getattr(torch, self._learner.plan.precision.compute), self._learner.device
        models = {index: RewardModel(recipe, index, dtype, device) for index in find_reward_models(recipe)}
        self.frozen_bytes += sum(model.num_bytes for model in models.values())
        self._rewards = RewardProcess(recipe.reward, {index: model.judge for index, model in models.items()})
        if recipe.rollout.environment is not None:
            self._environments = EnvironmentProcess(recipe.rollout.environment)

    def prompts(self, step: int) -> list[PromptRecord]:
        """Return this rank's prompts of a step, counted from 0: a function of the seed, the step and the place alone.

        Raises:
            ConfigError: a step has fewer prompts than there are ranks that read different data.
        """
        recipe, place, dataset = self._learner.recipe, self._learner.place, self._learner.data.train
        count = recipe.global_batch_size // recipe.rollout.group_size
        if (place.size - 1) * place.count(count) >= count:
            raise ConfigError(
                f"a step has {count} prompts (train.global_batch_size={recipe.global_batch_size} answers, "
                f"rollout.group_size={recipe.rollout.group_size} to each), which leaves one of the {place.size} "
                "processes that read different ones without any; increase train.global_batch_size, or use fewer "
                "processes."
            )
        share = place.share(count)
        samples = self._order.sample_ids(step * count + share.start, len(share))
        return read_prompts(dataset, samples.tolist(), share.start)

    @cached_property
    def _order(self) -> DataOrder:
        return build_order(self._learner.recipe, self._learner.data.train)

    def answer(
        self, prompts: Sequence[PromptRecord], sampling: Sampling, report: Callable[[str], None] = lambda activity: None
    ) -> Rollouts:
        """Answer prompts with the weights as they are now, in turns with the recipe's environment if it has one.

        `report` is called with each activity that begins. Collective.
        """
        if self._learner.recipe.rollout.environment is None:
            report("sampling answers")
            if self._sampler is not None and sampling.temperature:
                self._sampler.report = report
                rollouts: Rollouts = self._sampler.answer([prompt.ids for prompt in prompts], sampling)
                return rollouts
            numbers = [prompt.number * sampling.num_samples for prompt in prompts]
            return self._learner.generate([prompt.ids for prompt in prompts], sampling, numbers=numbers)
        return Conversations(self._learner, self._environments, report).hold(prompts, sampling)

    def judge(self, rollouts: Rollouts, prompts: Sequence[PromptRecord]) -> Rewarded:
        """Return the rewards of answers: `collect` what `ask` asks for. Collective."""
        return self.collect(self.ask(rollouts, prompts))

    def ask(self, rollouts: Rollouts, prompts: Sequence[PromptRecord]) -> "Judging":
        """Have answers judged, and return while reward functions run; models have judged then. Collective.

        Args:
            prompts: those that they answer, each as often.

        Raises:
            TrainingError: the process of the rewards ended on one rank and cannot be started again; on every rank.
        """
        tokenizer = self._learner.tokenizer
        texts = [tokenizer.decode(list(answer), skip_special_tokens=True) for answer in rollouts.answers]
        group_size = len(texts) // len(prompts)
        records = [prompt.record for prompt in prompts for _ in range(group_size)]
        asked: list[Asked] = []

        def begin() -> None:
            if self._rewards is not None:
                asked.append(self._rewards.ask(texts, records))

        gather_found(begin, self._learner.meshes.everyone)
        return Judging(texts, rollouts.played, *asked)

    def collect(self, judging: "Judging") -> Rewarded:
        """Wait for the rewards of answers. Collective.

        A function that fails, or takes longer than its `timeout_seconds`, gives NaN, and a sentence in `failures`. So
        does an environment.

        Raises:
            TrainingError: the process of the rewards ended on one rank and cannot be started again; on every rank.
        """
        recipe, meshes, played = self._learner.recipe, self._learner.meshes, judging.played

        def wait() -> tuple[int, Scores | None, Sequence[str]]:
            scores = None if judging.asked is None else judging.asked.scores()
            return meshes.data_rank, scores, () if played is None else played.failures

        gathered = gather_found(wait, meshes.everyone)
        mine = next(found for place, found, _ in gathered if place == meshes.data_rank and found is not None)
        failures = [text for _, found, own in gathered for text in (*own, *([] if found is None else found.failures))]
        parts = dict(zip(name_rewards(recipe.reward), mine.parts, strict=True))
        totals = torch.tensor(list(mine.total), dtype=torch.float64)
        if played is not None:
            assert recipe.rollout.environment is not None, "an environment was played with"
            parts[recipe.rollout.environment.name] = played.earned
            totals = totals + torch.tensor(list(played.earned), dtype=torch.float64)
        tensors = {name: torch.tensor(list(part), dtype=torch.float64) for name, part in parts.items()}
        return Rewarded(judging.texts, totals, tensors, tuple(dict.fromkeys(failures)))

    def evaluate(self, dataset: Dataset, num_prompts: int | None = None) -> EvalResult:
        """Answer the prompts of a held-out set greedily, and judge the answers. Collective.

        `num_prompts`: so many from the start of the set; None: all.
        """
        recipe, place = self._learner.recipe, self._learner.place
        count = dataset.num_samples if num_prompts is None else min(num_prompts, dataset.num_samples)
        share = place.share(count)
        size = max(1, recipe.global_batch_size // place.size)
        sampling = Sampling(max_tokens=recipe.rollout.max_new_tokens, temperature=0)
        totals, failures = torch.zeros(4, dtype=torch.float64), dict[str, None]()
        for first in range(0, place.count(count), size):
            samples = share[first : first + size] or range(1)  # every rank takes part in every round
            prompts = read_prompts(dataset, samples, samples.start)
            rollouts = self.answer(prompts, sampling)
            judged = self.judge(rollouts, prompts)
            totals += (first < len(share)) * _sums_of(recipe, rollouts, judged)
            failures |= dict.fromkeys(judged.failures)
        return replace(_build_result(totals, self._learner.meshes, _knows_full(recipe)), failures=tuple(failures))

    def summarize(self, judged: Rewarded) -> RewardStats:
        """Return what the answers of all ranks earned. Collective."""
        meshes = self._learner.meshes
        own = torch.stack([judged.rewards, *judged.parts.values()]).tolist()
        of_places: dict[int, list[list[float]]] = dict(gather_objects((meshes.data_rank, own), meshes.everyone))
        rewards, *parts = torch.cat([torch.tensor(rows, dtype=torch.float64) for rows in of_places.values()], 1)
        return describe_rewards(self._learner.recipe, rewards, dict(zip(judged.parts, parts, strict=True)))

    def close(self) -> None:
        """End the processes, and those of a sampler that has a `close`."""
        for process in (self._rewards, self._environments, self._sampler):
            if (close := getattr(process, "close", None)) is not None:
                close()
        self._rewards = self._environments = None


def describe_rewards(recipe: Recipe, rewards: Tensor, parts: Mapping[str, Tensor]) -> RewardStats:
    """Return what answers earned, those of a group next to each other; as in Rewarded."""
    has_reward = ~rewards.isnan()
    groups = rewards.view(-1, recipe.rollout.group_size)
    return RewardStats(
        float(rewards.nanmean()),
        float(_are_solved(recipe, rewards)[has_reward].double().mean()) if _knows_full(recipe) else None,
        float(spread_of(groups[has_reward.view_as(groups).any(1)]).mean()),
        float(are_uniform(groups).double().mean()),
        float(spread_of(rewards[None])),
        float((~has_reward).double().mean()),
        {name: (float(part.nanmean()), float(spread_of(part[None]))) for name, part in parts.items()},
    )


def _knows_full(recipe: Recipe) -> bool:
    """Whether there is a full reward; scores of a model have no largest value."""
    return not find_reward_models(recipe)


def _sums_of(recipe: Recipe, rollouts: Rollouts, judged: Rewarded) -> Tensor:
    """Return how many answers were judged, how many have the full reward, their summed rewards and tokens, [4]."""
    rated = ~judged.rewards.isnan()
    solved = _are_solved(recipe, judged.rewards)
    tokens = torch.tensor([sum(written) for written in rollouts.written])
    return torch.stack([rated.sum(), solved.sum(), judged.rewards[rated].sum(), tokens[rated].sum()]).double()


def _are_solved(recipe: Recipe, rewards: Tensor) -> Tensor:
    """Return which answers have the full reward: that of every reward function at 1, and 1 from the environment."""
    full = sum(max(0.0, reward.weight) for reward in recipe.reward) + (recipe.rollout.environment is not None)
    return rewards >= full - 1e-6


def _add_up(own: list[float], meshes: Meshes) -> list[float]:
    """Return the sum of each number over the ranks, of which those with the same answers count once. Collective."""
    of_places: dict[int, list[float]] = dict(gather_objects((meshes.data_rank, own), meshes.everyone))
    return [sum(values) for values in zip(*of_places.values(), strict=True)]


def _build_result(totals: Tensor, meshes: Meshes, has_full: bool) -> EvalResult:
    """Return the result of an evaluation from `_sums_of` on each rank. Collective."""
    count, solved, reward, tokens = _add_up(totals.tolist(), meshes)
    means = [total / count if count else None for total in (-reward, reward, solved)]
    measures = dict(zip(("reward", "solved") if has_full else ("reward",), means[1:], strict=False))
    return EvalResult(means[0], int(tokens), None, "answers", int(count), measures)
