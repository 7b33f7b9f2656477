"""What several files of fault tests use."""

from tests.dist.conftest import marked  # noqa: F401 (a fixture)
