"""Hands out the parts of every step's batch to workers that do not wait for each other."""


class ShareQueue:
    """Each step has the same number of shares; each goes to the first worker that asks for it.

    So a slow worker has fewer of them, and the others need not wait for it. Shares of a later step are handed out while
    a worker still computes one of an earlier step, up to `max_staleness` steps later.
    """

    def __init__(self, num_workers: int, num_shares: int, max_staleness: int | None) -> None:
        """`num_shares`: at least one for each worker; more where workers are lost."""
        self._num_workers = num_workers
        self._num_shares = num_shares
        self._max_staleness = max_staleness
        self.clear()

    def clear(self) -> None:
        """Forget everything: the next step that a worker enters is the first one."""
        self._first: int | None = None
        self._entered: dict[int, int] = {}
        self._started: set[int] = set()
        self._num_taken: dict[int, int] = {}
        self._newest = 0

    def enter(self, worker: int, step: int) -> None:
        """Note that a worker asks for shares of a step: it has none of an earlier step any more."""
        self._first = step if self._first is None else self._first
        self._entered[worker] = step
        self._newest = max(self._newest, step)

    def leave(self, worker: int) -> None:
        """Note that a worker asks for no more shares before `clear`, so nobody waits for it."""
        self._entered[worker] = 2**62

    @property
    def newest(self) -> int:
        """The latest step that a worker has entered since `clear`."""
        return self._newest

    def is_open(self, step: int) -> bool:
        """Whether shares of a step may be handed out."""
        return self._max_staleness is None or step <= self._slowest() + self._max_staleness

    def take(self, worker: int, step: int) -> int | None:
        """Return the index of a share, 0 <= index < number of shares; None if all are taken.

        In the first step each worker has the share of its own index first, so every worker has one.
        """
        if step == self._first and worker not in self._started:
            self._started.add(worker)
            return worker
        slowest = self._slowest()
        self._num_taken = {name: count for name, count in self._num_taken.items() if name >= slowest}
        index = self._num_taken.get(step, self._num_workers if step == self._first else 0)
        if index == self._num_shares:
            return None
        self._num_taken[step] = index + 1
        return index

    def _slowest(self) -> int:
        first = 0 if self._first is None else self._first
        return min(self._entered.get(worker, first) for worker in range(self._num_workers))
