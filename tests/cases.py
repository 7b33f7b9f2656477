"""Cases of parametrized tests, and marks of modules."""

from typing import Any

import pytest

from tests.namespaces import namespaces_allowed


def slow(*values: Any) -> Any:
    """A case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def needs_machines(missing: str | None = None) -> list[pytest.MarkDecorator]:
    """The marks of slow tests with emulated machines. `missing`: what else they miss here."""
    reason = namespaces_allowed() or missing
    return [pytest.mark.dist, pytest.mark.slow, pytest.mark.skipif(reason is not None, reason=str(reason))]
