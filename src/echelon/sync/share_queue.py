"""Hands out the parts of every step's batch to workers that do not wait for each other."""


class ShareQueue:
    """Each step has as many shares as there are workers; each goes to the first worker that asks for it.

    So a slow worker has fewer of them, and the others need not wait for it. Shares of a later step are handed out while
    a worker still computes one of an earlier step, up to `max_staleness` steps later.
    """

    def __init__(self, num_workers: int, max_staleness: int | None) -> None:
        self._num_workers = num_workers
        self._max_staleness = max_staleness
        self.clear()

    def clear(self) -> None:
        """Forget everything: the next step that a worker enters is the first one."""
        self._first: int | None = None
        self._entered: dict[int, int] = {}
        self._started: set[int] = set()
        self._num_taken: dict[int, int] = {}

    def enter(self, worker: int, step: int) -> None:
        """Note that a worker asks for shares of a step: it has none of an earlier step any more."""
        self._first = step if self._first is None else self._first
        self._entered[worker] = step

    def leave(self, worker: int) -> None:
        """Note that a worker asks for no more shares before `clear`, so nobody waits for it."""
        self._entered[worker] = 2**62

    def is_open(self, step: int) -> bool:
        """Whether shares of a step may be handed out."""
        return self._max_staleness is None or step <= self._slowest() + self._max_staleness

    def take(self, worker: int, step: int) -> int | None:
        """Return the index of a share, 0 <= index < number of workers; None if all are taken.

        In the first step each worker has the share of its own index.
        """
        if step == self._first:
            if worker in self._started:
                return None
            self._started.add(worker)
            return worker
        slowest = self._slowest()
        self._num_taken = {each: count for each, count in self._num_taken.items() if each >= slowest}
        index = self._num_taken.get(step, 0)
        if index == self._num_workers:
            return None
        self._num_taken[step] = index + 1
        return index

    def _slowest(self) -> int:
        first = 0 if self._first is None else self._first
        return min(self._entered.get(worker, first) for worker in range(self._num_workers))
