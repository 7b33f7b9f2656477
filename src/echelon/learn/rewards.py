"""Rewards of answers, from functions that run in a process of their own.

So a function that hangs is ended, one that crashes takes nothing with it, and none sees the secrets in the environment
of the training process.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from echelon.ground.errors import ConfigError, TrainingError, first_line
from echelon.ground.extensions import check_options, find_named
from echelon.ground.variables import remove_secrets
from echelon.learn.data.child_process import ChildProcess, stops_held_back
from echelon.recipe.names import REWARDS
from echelon.recipe.rollout import RewardConfig

START_SECONDS = 120.0
"""Longest time for the process to start and import the functions."""


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


class RewardProcess:
    """Judges answers by the rewards of a recipe, in a process of its own. A context manager."""

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        """Start the process, and import the functions there.

        Raises:
            ConfigError: a function cannot be imported, or does not accept its options.
        """
        self._rewards = tuple(rewards)
        self._child = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._child.stop()

    def score(self, answers: Sequence[str], records: Sequence[Mapping[str, Any]]) -> Scores:
        """Judge answers by the records of their prompts.

        A function that raises, takes longer than its `timeout_seconds`, or returns something other than a number for
        each answer, gives NaN for all of them; for an answer that it cannot judge it may return None, NaN or a text
        with the reason.

        Raises:
            TrainingError: the process has ended, or was ended, and cannot be started again.
        """
        parts, failures = [], []
        for index, reward in enumerate(self._rewards):
            found, problem = self._ask(index, reward, answers, records)
            if problem is not None:
                failures.append(f"reward.{index} ({reward.name}) {problem}.")
            parts.append(found)
        weights = [reward.weight for reward in self._rewards]
        total = [
            sum(weight * value for weight, value in zip(weights, values, strict=True))
            for values in zip(*parts, strict=True)
        ]
        return Scores(parts, total, failures)

    def _ask(
        self, index: int, reward: RewardConfig, answers: Sequence[str], records: Sequence[Mapping[str, Any]]
    ) -> tuple[list[float], str | None]:
        none = [math.nan] * len(answers)
        found: tuple[list[float], str | None]
        try:
            self._child.connection.send((index, list(answers), list(records)))
            if not self._child.connection.poll(reward.timeout_seconds):
                self._restart()
                return none, f"did not answer within reward.{index}.timeout_seconds={reward.timeout_seconds:g}"
            found = self._child.connection.recv()
        except (EOFError, OSError):
            self._restart()
            return none, "ended the process in which rewards are computed"
        return found

    def _restart(self) -> None:
        self._child.stop()
        try:
            self._child = self._start()
        except ConfigError as error:
            raise TrainingError(f"the rewards cannot be computed any longer: {error}") from error

    def _start(self) -> ChildProcess:
        with stops_held_back():
            child = ChildProcess(_serve, self._rewards)
        try:
            problem = f"reward: its functions were not imported within {START_SECONDS:g} seconds; import less there."
            if child.connection.poll(START_SECONDS):
                problem = child.connection.recv()
        except (EOFError, OSError):
            problem = "reward: the process in which rewards are computed ended while it imported them."
        if problem is not None:
            child.stop()
            raise ConfigError(problem)
        return child


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Import the functions of rewards, in a process of their own. Raises ConfigError as RewardProcess does."""
    if rewards:
        RewardProcess(rewards).close()


def _serve(connection: Connection, rewards: Sequence[RewardConfig]) -> None:
    """Answer requests until the pipe is closed: (index, answers, records) -> (numbers, problem)."""
    remove_secrets()
    try:
        functions = [_find(index, reward) for index, reward in enumerate(rewards)]
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send(None)
    with suppress(EOFError, OSError):
        while True:
            index, answers, records = connection.recv()
            connection.send(_judge(functions[index], rewards[index], answers, records))


def _find(index: int, reward: RewardConfig) -> Callable[..., Any]:
    key = f"reward.{index}.name"
    try:
        found = find_named(key, reward.name, REWARDS)
    except ConfigError:
        raise
    except Exception as error:  # it is the user's module
        raise ConfigError(
            f"{key}={reward.name}: its module raised {type(error).__name__}: {first_line(error)}; correct it."
        ) from error
    if not inspect.isfunction(found):
        raise ConfigError(
            f"{key}={reward.name}: it must be a function of (answers, records), but it is a {type(found).__name__}."
        )
    check_options(key, reward.name, found, 2, reward.options)
    return found


def _judge(
    function: Callable[..., Any], reward: RewardConfig, answers: list[str], records: list[Any]
) -> tuple[list[float], str | None]:
    """Call a function. Returns its numbers, NaN where it gives none, and what is wrong with them, as a clause."""
    none = [math.nan] * len(answers)
    try:
        found = function(answers, records, **(reward.options or {}))
        if inspect.isawaitable(found):
            found = asyncio.run(_wait_for(found))
        values = list(found)
        numbers = [math.nan if value is None or isinstance(value, str) else float(value) for value in values]
    except Exception as error:  # it is the user's code
        return none, f"raised {type(error).__name__}: {first_line(error)}"
    if len(numbers) != len(answers):
        return none, f"returned {len(numbers)} numbers for {len(answers)} answers"
    if any(map(math.isinf, numbers)):
        return none, "returned an infinite number"
    if not (unjudged := sum(map(math.isnan, numbers))):
        return numbers, None
    reason = next((f": {value}" for value in values if isinstance(value, str)), "")
    return numbers, f"gave no number for {unjudged} of {len(answers)} answers{reason}"


async def _wait_for(found: Any) -> Any:
    return await found
