"""Fixtures for tests of complete jobs."""

import pytest

from tests.dist.command import MARK, CommandLine, assert_no_orphan


@pytest.fixture
def echelon(capfd, monkeypatch, tmp_path):
    """The command in a temporary folder; no process that it starts may outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    yield CommandLine(capfd, monkeypatch)
    assert_no_orphan()
