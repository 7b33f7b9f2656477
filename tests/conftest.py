"""Fixtures every tier shares."""

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Four warm worker processes, shared by the whole session."""
    pool = WorkerPool(size=4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text that every machine has: the source of Python's argparse."""
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(Path(argparse.__file__).read_text())
    return path


@pytest.fixture
def started() -> Callable[[], list[BaseProcess]]:
    """The child processes that the test itself has started and that still live; the pool's are not among them."""
    before = {process.pid for process in multiprocessing.active_children()}
    return lambda: [process for process in multiprocessing.active_children() if process.pid not in before]
