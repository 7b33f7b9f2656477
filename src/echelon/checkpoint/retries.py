"""When a save that failed is repeated."""

MAX_FAILURES = 3


class Retries:
    """Counts the failures in a row of one store's saves: it is tried again 10 steps after it began, then 100.

    Nothing here communicates: every rank books the same, and so has the same answers.
    """

    def __init__(self) -> None:
        self.began_at = 0
        """The step of the newest save."""
        self.num_failures = 0
        self._look_at = 0
        self._retry_at: int | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the newest save that has ended failed."""
        return self._retry_at is not None

    @property
    def is_exhausted(self) -> bool:
        """Whether that was the last failure in a row that is borne."""
        return self.num_failures >= MAX_FAILURES

    def is_due(self, step: int) -> bool:
        """Whether a save failed and is to be repeated after this step."""
        return self._retry_at is not None and step >= self._retry_at

    def begin(self, step: int) -> None:
        """Book a save that begins."""
        self.began_at, self._look_at, self._retry_at = step, step + 1, None

    def end(self, failed: bool) -> None:
        """Book how it ended."""
        self.num_failures = self.num_failures + 1 if failed else 0
        if failed:
            self._retry_at = self.began_at + 10**self.num_failures

    def take_look(self, step: int) -> bool:
        """Whether to look after this step if the save under way has ended: 1, 2, 4, 8... steps after it began."""
        if step < self._look_at:
            return False
        self._look_at = step + (step - self.began_at)
        return True
