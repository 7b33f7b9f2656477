"""Fixtures for tests of complete jobs."""

import pytest

from tests.dist.command import MARK, CommandLine, assert_no_orphan


@pytest.fixture
def marked(request, tmp_path, monkeypatch):
    """No process that a test starts may outlive it by more than the module's ORPHAN_SECONDS."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    assert_no_orphan(getattr(request.module, "ORPHAN_SECONDS", 3.0))


@pytest.fixture
def echelon(marked, capfd, monkeypatch, tmp_path):
    """The command in a temporary folder."""
    monkeypatch.chdir(tmp_path)
    return CommandLine(capfd, monkeypatch)
