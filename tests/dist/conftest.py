"""What the tests of whole jobs share."""

import pytest

from command import MARK, CommandLine, assert_no_orphan


@pytest.fixture
def echelon(capfd, monkeypatch, tmp_path):
    """The command, in a folder of its own; nobody it started outlives the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    yield CommandLine(capfd, monkeypatch)
    assert_no_orphan()
