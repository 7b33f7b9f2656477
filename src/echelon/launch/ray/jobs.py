"""Calls of Ray Jobs with Ray's own client: plain values in and out, one-line errors."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from echelon.ground.errors import LaunchError
from echelon.ground.extras import missing_package

_LONGEST_MESSAGE = 400


@dataclass(frozen=True)
class RayJob:
    """A job as Ray Jobs describes it. `message` ends with the last lines of its driver."""

    state: str
    message: str
    exit_code: int | None


class RayJobs:
    """The jobs of one cluster."""

    def __init__(self, address: str) -> None:
        """`address`: the dashboard's, or `auto`. Raises LaunchError if it does not answer, ConfigError without ray."""
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise missing_package("launch.to=ray", "ray", "ray", "in the version of the cluster") from error
        for name in ("ray", "ray.dashboard.modules.job.sdk"):  # the second sets its own level
            logging.getLogger(name).setLevel(logging.WARNING)
        with _explained(address):
            self._client = JobSubmissionClient(address)
        self.address = str(self._client.get_address())
        if address not in ("auto", self.address):
            raise LaunchError(
                f"launch.ray.address={address}, but RAY_ADDRESS or RAY_API_SERVER_ADDRESS says {self.address}, which "
                "Ray prefers; unset the variable, or give its address in the recipe."
            )

    def submit(self, request: Mapping[str, Any]) -> None:
        """Submit a job; its working directory is uploaded."""
        with _explained(self.address):
            self._client.submit_job(**request)

    def find(self, name: str) -> RayJob | None:
        """The job of this name; None if the cluster does not know it."""
        with _explained(self.address, name):
            info = self._client.get_job_info(name)
            return RayJob(str(info.status.value), info.message or "", info.driver_exit_code)
        return None

    def stop(self, name: str) -> None:
        """Ask the job's driver to stop."""
        with _explained(self.address):
            self._client.stop_job(name)

    def read_log(self, name: str) -> Iterator[str]:
        """The lines that the driver has printed; none before it starts."""
        with _explained(self.address):
            text = self._client.get_job_logs(name)
        yield from text.splitlines()

    def follow_log(self, name: str) -> Iterator[str]:
        """The lines that the driver has printed and prints until it ends."""
        rest = ""
        with _explained(self.address), asyncio.Runner() as runner:
            chunks = self._client.tail_job_logs(name)
            while (chunk := runner.run(_next_chunk(chunks))) is not None:
                *lines, rest = (rest + chunk).split("\n")
                yield from lines
        if rest:
            yield rest


async def _next_chunk(chunks: AsyncIterator[str]) -> str | None:
    return await anext(chunks, None)


@contextmanager
def _explained(address: str, name: str | None = None) -> Iterator[None]:
    """Turn an error of Ray's client into a LaunchError, except for a job `name` that the cluster does not know."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except ConnectionError as error:
        raise LaunchError(
            f"launch.ray.address={address}: nothing answers there as Ray's dashboard; give the address that "
            "`ray start --head` prints, usually http://HEAD_MACHINE:8265."
        ) from error
    except AuthenticationError as error:
        raise LaunchError(f"the cluster at {address} asks for a token: {_shorten(str(error))}") from error
    except (RuntimeError, ValueError, OSError) as error:
        words = str(error)
        if name is not None and f"{name} does not exist" in words:
            return
        raise LaunchError(f"the cluster at {address} refused the request: {_shorten(words)}") from error


def _shorten(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _LONGEST_MESSAGE else plain[: _LONGEST_MESSAGE - 3] + "..."
