"""Answers of several turns: an environment of the user's reads what the model says, and replies.

The environments run in a process of their own, as the rewards do.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from echelon.ground.errors import first_line
from echelon.ground.extensions import check_options
from echelon.ground.variables import remove_secrets
from echelon.learn.answers.rewards import MAX_REWARD, REWARD_LIMITS
from echelon.learn.data.child_process import AnsweringProcess, find_of_user, serve
from echelon.recipe.names import ENVIRONMENTS
from echelon.recipe.rollout import EnvironmentConfig

Said = str | Sequence[Mapping[str, Any]] | None
"""What an environment says: a text, or messages for the chat template; None for nothing."""

KEY = "rollout.environment"

T = TypeVar("T")


class Environment(Protocol):
    """What the model talks with. One is built for each answer, with the options of the recipe.

    Both methods may be async; then those of all answers run at the same time.
    """

    def reset(self, record: Mapping[str, Any], seed: int) -> Said:
        """Begin a conversation; returns what follows the prompt before the model's first turn, often None.

        Args:
            record: the record of the prompt.
            seed: for the random draws of this environment, so that a run that was killed draws the same again.
        """

    def step(self, answer: str) -> tuple[Said, float, bool]:
        """Read a turn of the model. Returns the reply, the reward of this turn, and whether the conversation is over.

        With messages as prompts, a reply that is a text is a message of the user's.
        """


@dataclass(frozen=True)
class Reply:
    """What an environment replied; `problem`: why it could not, a clause."""

    said: Said = None
    reward: float = 0.0
    is_done: bool = False
    problem: str | None = None


class EnvironmentProcess:
    """The environments of some answers, in a process of their own."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the process, and import the class there. Raises ConfigError if it cannot be used."""
        self._limit = config.timeout_seconds
        self._process = AnsweringProcess(KEY, _serve, config)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def reset(self, records: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[Reply]:
        """Build an environment for each record, instead of those before, and return what they say first."""
        return self._ask(("reset", list(zip(records, seeds, strict=True))), len(records))

    def step(self, answers: Mapping[int, str]) -> list[Reply]:
        """Give environments, by their numbers in `reset`, a turn of the model; returns their replies in that order."""
        return self._ask(("step", list(answers.items())), len(answers))

    def _ask(self, request: tuple[str, list[Any]], count: int) -> list[Reply]:
        """Send a request. A failure of the process is a problem of every environment that was asked."""
        try:
            self._process.send(request)
            replies: list[Reply] = self._process.receive(self._limit)
            return replies
        except TimeoutError:
            problem = f"did not answer within {KEY}.timeout_seconds={self._limit:g}"
        except ChildProcessError as error:
            problem = str(error)
        return [Reply(problem=problem)] * count


def check_environment(config: EnvironmentConfig | None) -> None:
    """Import the class of an environment, in a process of its own. Raises ConfigError as EnvironmentProcess does."""
    if config is not None:
        EnvironmentProcess(config).close()


def _serve(connection: Connection, config: EnvironmentConfig) -> None:
    remove_secrets()
    with asyncio.Runner() as runner:  # one loop for all turns: connections of async environments belong to it
        serve(connection, lambda: _Host(_find(config), runner).respond)


def _find(config: EnvironmentConfig) -> Callable[[], Environment]:
    key = f"{KEY}.name"
    kind: type[Environment] = find_of_user(key, config.name, ENVIRONMENTS, Environment)
    check_options(key, config.name, kind, 0, config.options)
    return lambda: kind(**(config.options or {}))


class _Host:
    """Holds the environments in their process."""

    def __init__(self, build: Callable[[], Environment], runner: asyncio.Runner) -> None:
        self._build, self._runner = build, runner
        self._environments: dict[int, Environment] = {}

    def respond(self, request: tuple[str, list[Any]]) -> list[list[Reply]]:
        """Return the one answer to a request of EnvironmentProcess."""
        kind, calls = request
        if kind == "reset":
            self._environments.clear()
            work = [self._reset(number, *call) for number, call in enumerate(calls)]
        else:
            work = [self._step(number, answer) for number, answer in calls]
        return [self._runner.run(_gather(work))]

    async def _reset(self, number: int, record: Mapping[str, Any], seed: int) -> Reply:
        try:
            environment = self._environments[number] = self._build()
            return Reply(_check_said(await _settle(environment.reset(record, seed))))
        except Exception as error:  # it is the user's code
            return _failed("reset", error)

    async def _step(self, number: int, answer: str) -> Reply:
        if number not in self._environments:
            return Reply(problem="ended with the process in which it ran")
        try:
            reply: Any = await _settle(self._environments[number].step(answer))
            if not isinstance(reply, tuple) or len(reply) != 3:
                return Reply(problem=f"returned {_shorten(reply)} from step, and not (text, reward, done)")
            said, reward, is_done = _check_said(reply[0]), float(reply[1]), bool(reply[2])
        except Exception as error:  # it is the user's code
            return _failed("step", error)
        if not abs(reward) <= MAX_REWARD:  # NaN too
            return Reply(problem=f"returned the reward {reward:g}, and one must be between {REWARD_LIMITS}")
        return Reply(said, reward, is_done)


async def _gather(work: Sequence[Awaitable[Reply]]) -> list[Reply]:
    return list(await asyncio.gather(*work))


async def _settle(found: T | Awaitable[T]) -> T:
    return await found if inspect.isawaitable(found) else found


def _check_said(said: Any) -> Said:
    """Return what was said as plain values. Raises TypeError for anything but a text, messages or None."""
    if said is None or isinstance(said, str):
        return said
    if isinstance(said, list | tuple) and all(isinstance(message, Mapping) and "role" in message for message in said):
        return [dict(message) for message in said]
    raise TypeError(f"it said {_shorten(said)}, which is neither a text nor a list of messages")


def _failed(method: str, error: Exception) -> Reply:
    return Reply(problem=f"raised {type(error).__name__} in {method}: {first_line(error)}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
