"""Keeps an object from sending what it exchanges with other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager


class Isolatable:
    """Has a scope in which it sends nothing. `_sends`: whether it sends now."""

    _sends = True

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Scope in which this rank sends nothing and waits for no other: it has its own values alone."""
        self._sends = False
        try:
            yield
        finally:
            self._sends = True
