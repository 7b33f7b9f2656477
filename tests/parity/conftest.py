"""Each single-process reference, trained once a session."""

import pytest

from training import train


@pytest.fixture(scope="session")
def references(workers, text, tmp_path_factory):
    """A function from a reference row to its metrics, trained once a session."""
    trained = {}

    def find(row):
        if row not in trained:
            trained[row] = train(workers, row, tmp_path_factory.mktemp("reference"), text)
        return trained[row]

    return find
