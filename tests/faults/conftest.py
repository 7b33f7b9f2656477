"""What several files of fault tests use."""

import pytest

from tests.dist.command import MARK, assert_no_orphan


@pytest.fixture
def marked(tmp_path, monkeypatch):
    """No process that a test starts may outlive it."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    assert_no_orphan()
