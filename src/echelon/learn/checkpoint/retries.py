"""Schedules retries of failed saves."""

MAX_FAILURES = 3


class Retries:
    """Counts consecutive failed saves of one store: the first retry is 10 steps after the save began, the second 100.

    No communication: every rank records the same results, and so gets the same answers.
    """

    def __init__(self) -> None:
        self.began_at = 0
        """Step of the newest save."""
        self.num_failures = 0
        self._look_at = 0
        self._retry_at: int | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the newest save that has ended failed."""
        return self._retry_at is not None

    @property
    def is_exhausted(self) -> bool:
        """Whether the limit of consecutive failures is reached."""
        return self.num_failures >= MAX_FAILURES

    def is_due(self, step: int) -> bool:
        """Whether a failed save must be retried after this step."""
        return self._retry_at is not None and step >= self._retry_at

    def begin(self, step: int) -> None:
        """Record the start of a save."""
        self.began_at, self._look_at, self._retry_at = step, step + 1, None

    def end(self, failed: bool) -> None:
        """Record the result of a save."""
        self.num_failures = self.num_failures + 1 if failed else 0
        if failed:
            self._retry_at = self.began_at + 10**self.num_failures

    def take_look(self, step: int) -> bool:
        """Whether to check after this step if the pending save has ended: 1, 2, 4, 8... steps after it began."""
        if step < self._look_at:
            return False
        self._look_at = step + (step - self.began_at)
        return True
