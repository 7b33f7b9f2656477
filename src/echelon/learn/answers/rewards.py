"""Rewards of answers, from functions that run in a process of their own, and from models that run in this one.

A function that hangs is ended, one that crashes takes nothing with it, and none sees the secrets in the environment of
the training process. Models are in `reward_models.py`.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from echelon.ground.errors import ConfigError, first_line
from echelon.ground.extensions import check_options, check_parameters
from echelon.ground.variables import remove_secrets
from echelon.learn.data.child_process import AnsweringProcess, find_of_user, serve
from echelon.recipe.names import REWARDS
from echelon.recipe.rollout import RewardConfig

_FORM = (
    "it gets the texts and the records of their prompts, while TRL's functions get prompts, completions and columns by "
    "keyword. Write `def NAME(answers, records)`, and return a number for each answer"
)
MAX_REWARD = 1e15
"""The largest size of a reward. The squares of the gradients of much larger ones overflow in fp32."""

REWARD_LIMITS = f"{-MAX_REWARD:g} and {MAX_REWARD:g}"
"""Between which a reward must be, in words."""


@dataclass(frozen=True)
class Scores:
    """The rewards of some answers.

    parts: of each reward one number per answer, without its weight; NaN where the function gave none.
    total: the weighted sum, NaN where a part is NaN.
    failures: what went wrong, a sentence each.
    """

    parts: Sequence[Sequence[float]]
    total: Sequence[float]
    failures: Sequence[str]


Found = tuple[list[float], str | None]
"""What a reward gave: a number for each answer, NaN where it gave none, and what is wrong with them, as a clause."""

Judges = Mapping[int, Callable[[Sequence[str], Sequence[Mapping[str, Any]]], Found]]
"""What judges answers by their records in this process, by the number of the reward: reward models."""


class RewardProcess:
    """Judges answers by the rewards of a recipe, in a process of its own. A context manager."""

    def __init__(self, rewards: Sequence[RewardConfig], models: Judges | None = None) -> None:
        """Start the process, and import the functions there.

        Args:
            models: the rewards of the recipe that are models. They judge in this process, while the functions run.

        Raises:
            ConfigError: a function cannot be imported, or does not accept its options.
        """
        self._rewards, self._models = tuple(rewards), models or {}
        self._process = AnsweringProcess("reward", _serve, self._rewards)
        self._asked: Asked | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def ask(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> "Asked":
        """Begin to judge answers by the records of their prompts, and return while the functions run.

        Answers that were asked about before are waited for.

        Raises:
            TrainingError: the process has ended, or was ended, and cannot be started again.
        """
        if self._asked is not None:
            self._asked.scores()
        self._asked = Asked(self._rewards, self._process, self._models, answers, records)
        return self._asked

    def score(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> Scores:
        """Judge answers by the records of their prompts. See `ask` and `Asked.scores`."""
        return self.ask(answers, records).scores()


class Asked:
    """Answers that are being judged. The functions run one after another, and each has a time limit."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        process: AnsweringProcess,
        models: Judges,
        answers: Sequence[str],
        records: Sequence[Mapping[str, Any]],
    ) -> None:
        self._rewards, self._process = rewards, process
        self._answers, self._records = list(answers), list(records)
        self._scores: Scores | None = None
        self._problem = self._send(0)
        self._of_models = {index: judge(answers, records) for index, judge in models.items()}

    def scores(self) -> Scores:
        """Wait for the scores, and return them.

        A function that raises, returns something other than a number for each answer, or takes longer than its
        `timeout_seconds` from when it is waited for, gives NaN for all of them; for an answer that it cannot judge it
        may return None, NaN or a text with the reason.

        Raises:
            TrainingError: the process has ended, or was ended, and cannot be started again.
        """
        if self._scores is None:
            received = [self._receive(index, reward) for index, reward in enumerate(self._rewards)]
            failures = [
                f"reward.{index} ({reward.name}) {problem}."
                for index, (reward, (_, problem)) in enumerate(zip(self._rewards, received, strict=True))
                if problem is not None
            ]
            parts = [values for values, _ in received]
            weights = [reward.weight for reward in self._rewards]
            total = [
                sum(weight * part[number] for weight, part in zip(weights, parts, strict=True))
                for number in range(len(self._answers))
            ]
            self._scores = Scores(parts, total, failures)
        return self._scores

    def _send(self, first: int) -> str | None:
        """Ask for the rewards from number `first` on. Returns what went wrong."""
        try:
            if not all(reward.is_model for reward in self._rewards[first:]):
                self._process.send((first, self._answers, self._records))
            return None
        except ChildProcessError as error:
            return str(error)

    def _receive(self, index: int, reward: RewardConfig) -> Found:
        """Return what a reward gave."""
        if index in self._of_models:
            return self._of_models[index]
        problem = self._problem
        try:
            if problem is None:
                judged: Found = self._process.receive(reward.timeout_seconds)
                return judged
        except TimeoutError:
            problem = f"did not answer within reward.{index}.timeout_seconds={reward.timeout_seconds:g}"
        except ChildProcessError as error:
            problem = str(error)
        self._problem = self._send(index + 1)  # the process has started anew
        return [math.nan] * len(self._answers), problem


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Import the functions of rewards, in a process of their own. Raises ConfigError as RewardProcess does."""
    if not all(reward.is_model for reward in rewards):
        RewardProcess(rewards).close()


def name_rewards(rewards: Sequence[RewardConfig]) -> list[str]:
    """Return a name for each reward, all different: a second `model` is `model_2`."""
    names: list[str] = []
    for number, reward in enumerate(rewards):
        count = sum(other.name == reward.name for other in rewards[: number + 1])
        names.append(reward.name if count == 1 else f"{reward.name}_{count}")
    return names


def _serve(connection: Connection, rewards: Sequence[RewardConfig]) -> None:
    """Answer requests: (first, answers, records) -> what each function gave, from reward number `first` on."""
    remove_secrets()

    def build() -> Callable[[Any], Iterator[Found]]:
        functions = {index: _find(index, reward) for index, reward in enumerate(rewards) if not reward.is_model}

        def respond(request: Any) -> Iterator[Found]:
            first, answers, records = request
            for index, function in functions.items():
                if index >= first:
                    yield _judge(function, rewards[index], answers, records)

        return respond

    serve(connection, build)


def _find(index: int, reward: RewardConfig) -> Callable[..., Any]:
    key = f"reward.{index}.name"
    part = find_of_user(key, reward.name, REWARDS)
    if not inspect.isfunction(part):
        raise ConfigError(
            f"{key}={reward.name}: it must be a function of (answers, records), but it is a {type(part).__name__}."
        )
    check_parameters(key, reward.name, part, ("answers", "records"), "a reward", _FORM)
    check_options(key, reward.name, part, 2, reward.options)
    return part


def _judge(function: Callable[..., Any], reward: RewardConfig, answers: list[str], records: list[Any]) -> Found:
    """Call a function, and check what it returns."""
    none = [math.nan] * len(answers)
    try:
        rewards = function(answers, records, **(reward.options or {}))
        if inspect.isawaitable(rewards):
            rewards = asyncio.run(_wait_for(rewards))
        if not isinstance(rewards, list | tuple) and not hasattr(rewards, "tolist"):  # as arrays and tensors have
            return none, f"returned a {type(rewards).__name__}, and not a list with a number for each answer"
        values = list(rewards)
        numbers = [math.nan if value is None or isinstance(value, str) else float(value) for value in values]
    except Exception as error:  # it is the user's code
        return none, f"raised {type(error).__name__}: {first_line(error)}"
    if len(numbers) != len(answers):
        return none, f"returned {len(numbers)} numbers for {len(answers)} answers"
    largest = max((number for number in numbers if not math.isnan(number)), key=abs, default=0.0)
    if abs(largest) > MAX_REWARD:
        return none, f"returned {largest:g}, and a reward must be between {REWARD_LIMITS}"
    return numbers, _describe_unjudged(values, numbers)


def _describe_unjudged(values: list[Any], numbers: list[float]) -> str | None:
    """Say how many answers a function gave no number, and the first of its reasons; None if it judged all."""
    unjudged = sum(map(math.isnan, numbers))
    reason = next((f": {value}" for value in values if isinstance(value, str)), "")
    return f"gave no number for {unjudged} of {len(numbers)} answers{reason}" if unjudged else None


async def _wait_for(found: Any) -> Any:
    return await found
