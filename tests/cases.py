"""Cases of parametrized tests."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)
