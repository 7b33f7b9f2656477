"""Fixtures of the parity tests: the text, and each single-process reference once."""

import argparse
from pathlib import Path

import pytest

from training import train


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Real text that every machine has: the source of Python's argparse."""
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(Path(argparse.__file__).read_text())
    return path


@pytest.fixture(scope="session")
def references(workers, text, tmp_path_factory):
    """A function from a reference row to its metrics, trained once a session."""
    trained = {}

    def find(row):
        if row not in trained:
            trained[row] = train(workers, row, tmp_path_factory.mktemp("reference"), text)
        return trained[row]

    return find
