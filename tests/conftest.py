"""Fixtures every tier shares."""

from collections.abc import Iterator

import pytest

from workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Four warm worker processes, shared by the whole session."""
    pool = WorkerPool(size=4)
    yield pool
    pool.close()
