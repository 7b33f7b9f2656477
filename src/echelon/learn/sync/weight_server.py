"""A parameter server: it owns a part of the weights, adds up what workers push, and steps it with the optimizer.

To workers that do not wait for each other it hands out the parts of every step's batch.
"""

import logging
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.ground.errors import TrainingError
from echelon.learn.distributed.torch_internals import close_connections
from echelon.learn.optimizer import Served, clip_gradients, global_norm
from echelon.learn.reduction.reducer import flatten, write_back
from echelon.learn.sync.pushes import Kind, PushCode, Request, Taken, receive, reply
from echelon.recipe.synchronization import SyncConfig


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
        self.newest = 0
        """The latest step that a worker has entered since `clear`."""

    def enter(self, worker: int, step: int) -> None:
        """Note that a worker asks for shares of a step: it has none of an earlier step any more."""
        self._first = step if self._first is None else self._first
        self._entered[worker] = step
        self.newest = max(self.newest, step)

    def leave(self, worker: int) -> None:
        """Note that a worker asks for no more shares before `clear`, so nobody waits for it."""
        self._entered[worker] = 2**62

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


logger = logging.getLogger(__name__)


class Server:
    """Answers the requests of all workers, each in a thread of its own, from `open` to the last worker's DRAIN.

    Between them it does nothing, so weights and optimizer may be read, saved and loaded. Where steps wait for all
    workers, gradients are added up in the order of the workers, so that a repeated run gets the same bits. Where they
    do not, a share that is pushed again after the loss of a worker is applied once: see `Served.applied`.

    When a worker is lost, all messages of the group end with an error, here and in the other processes.

    Attributes:
        journal: None, or a list to which each PULL and UPDATE is added when it is answered: kind, step and share.
        num_received: bytes of gradients that came from other processes.
        num_sent: bytes of weights that went to other processes.
    """

    def __init__(
        self,
        served: Served,
        config: SyncConfig,
        group: dist.ProcessGroup,
        num_shares: int,
        is_ending: Callable[[], bool],
    ) -> None:
        """
        Args:
            group: the workers; this process is one of them.
            num_shares: of the batch of a step, where workers do not wait for each other.
            is_ending: whether the workers are to form another group after a step.
        """
        self.journal: list[tuple[Kind, int, int]] | None = None
        self._served = served
        self._aggregate = config.aggregate
        self._compensation = config.staleness_compensation
        self._pulled: dict[int, Tensor] = {}
        self._group = group
        self._num_shares = num_shares
        self._queue = ShareQueue(group.size(), num_shares, config.max_staleness)
        self._is_ending = is_ending
        self._last_step: int | None = None
        self._waits = config.max_staleness == 0
        sizes = [parameter.numel() for parameter in served.parameters.values()]
        self._code = PushCode(config.compress, sizes)
        self._size = sum(sizes)
        self.num_received = self.num_sent = 0
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._sum = torch.empty(0)
        self._square = torch.zeros(1)

    def open(self, step: int) -> None:
        """Start to answer requests, from this step on."""
        self._num_pushed = self._num_drained = 0
        self._num_targets = 0.0
        self._next_step = step
        self._served.applied.difference_update([applied for applied in self._served.applied if applied[0] < step])
        self._queue.clear()
        self._pulled.clear()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"serve-{worker}", daemon=True)
            for worker in range(self._group.size())
            if worker != self._group.rank()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait until every worker has its reply to DRAIN."""
        for thread in self._threads:
            thread.join()
        self._raise_failure()

    def abandon(self) -> None:
        """End all messages of the group, and wait until no thread serves."""
        with self._changed:
            self._failure = self._failure or ConnectionError("the group has ended")
            self._changed.notify_all()
        close_connections(self._group)
        for thread in self._threads:
            thread.join()

    def answer(self, worker: int, request: Request) -> Tensor:
        """Do what a worker asks for, and return the reply. May wait for other workers. Called in any thread."""
        with self._changed:
            self._raise_failure()
            match request.kind:
                case Kind.PUSH:
                    return self._push(worker, request)
                case Kind.DRAIN:
                    self._num_drained += 1
                    self._queue.leave(worker)
                    self._changed.notify_all()
                    self._wait(lambda: self._num_drained == self._group.size())
                    return self._weights()
                case Kind.TAKE:
                    return self._hand_out(worker, request.step)
                case Kind.PULL:
                    self._wait(lambda: not self._waits or self._next_step >= request.step)
                    self._write_down(request)
                    weights = self._weights()
                    if self._compensation:
                        self._pulled[worker] = weights.clone()
                    return weights
                case Kind.UPDATE:
                    return self._update(worker, request)

    def _serve(self, worker: int) -> None:
        """Answer the requests of a worker in another process until it has drained. The thread of that worker."""
        try:
            kind = None
            while kind != Kind.DRAIN:
                request = receive(worker, self._code.num_bytes, self._group)
                answered = self.answer(worker, request)
                with self._changed:
                    self.num_received += 0 if request.values is None else request.values.nbytes
                    self.num_sent += answered.nbytes
                reply(answered, worker, self._group)
                kind = request.kind
        except BaseException as error:  # the main thread raises it
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            close_connections(self._group)

    @torch.no_grad()
    def _push(self, worker: int, request: Request) -> Tensor:
        """Add the gradients of a worker to the sum of the step; wait until those of all workers are in it."""
        size = self._group.size()
        self._wait(lambda: self._num_pushed % size == worker)
        assert request.values is not None
        weight = request.numbers[0] if self._aggregate == "weighted" else 1.0
        if worker == 0:
            self._sum, self._num_targets = torch.zeros(self._size), 0.0
        self._sum.add_(self._code.decode(request.values), alpha=weight)
        self._num_targets += request.numbers[0]
        self._num_pushed += 1
        complete = (self._num_pushed - worker - 1) + size
        if worker == size - 1:
            divisor = {"weighted": max(1.0, self._num_targets), "mean": float(size), "sum": 1.0}[self._aggregate]
            gradients = self._write_gradients(self._sum.div_(divisor))
            self._square = global_norm(gradients).double().square().float().reshape(1)
        self._changed.notify_all()
        self._wait(lambda: self._num_pushed >= complete)
        return self._square

    def _write_gradients(self, values: Tensor) -> list[Tensor]:
        for parameter in self._served.parameters.values():
            parameter.grad = torch.empty_like(parameter)
        gradients = {
            name: parameter.grad for name, parameter in self._served.parameters.items() if parameter.grad is not None
        }
        write_back(values, gradients)
        return list(gradients.values())

    def apply(self, step: int, learning_rate: float, commit: Tensor, norm: float, max_norm: float) -> None:
        """Step the optimizer with the sum of all workers, clipped, or drop it. Called by the worker of this process."""
        with self._changed:
            gradients = [parameter.grad for parameter in self._served.parameters.values() if parameter.grad is not None]
            clip_gradients(gradients, max_norm, torch.tensor(norm))
            self._served.optimizer.step(step, learning_rate, commit)
            self._next_step = step + 1
            self._changed.notify_all()

    def _hand_out(self, worker: int, step: int) -> Tensor:
        """Return the next share of a step, once no worker is too far behind."""
        self._queue.enter(worker, step)
        self._changed.notify_all()
        if self._last_step is None and self._is_ending():
            self._last_step = self._queue.newest
        if self._last_step is not None and step > self._last_step:
            return torch.tensor([float(Taken.VIEW_ENDS)])
        self._wait(lambda: self._queue.is_open(step))
        share = self._queue.take(worker, step)
        return torch.tensor([float(Taken.NONE_LEFT if share is None else share)])

    @torch.no_grad()
    def _update(self, worker: int, request: Request) -> Tensor:
        """Step the optimizer with the gradients of one share, of the weights that the worker pulled last.

        A share that has been applied is dropped.

        Compensated as in Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation"
        (arXiv:1609.08326): the square of the gradient stands for the diagonal of the Hessian.
        """
        assert request.values is not None
        share, rate = int(request.numbers[0]), request.numbers[1]
        if (request.step, share) in self._served.applied:
            return torch.zeros(1)
        values = self._code.decode(request.values)
        if self._compensation:
            change = self._weights().float() - self._pulled.pop(worker).float()
            values = values + self._compensation * values.square() * change
        self._write_gradients(values)
        self._served.optimizer.step(request.step * self._num_shares + share, rate, torch.tensor(True))
        self._served.applied.add((request.step, share))
        self._write_down(request)
        logger.debug(f"server: share {share} of step {request.step + 1} is applied")
        return torch.zeros(1)

    def _write_down(self, request: Request) -> None:
        if self.journal is not None:
            self.journal.append((request.kind, request.step, int(request.numbers[0])))

    def _weights(self) -> Tensor:
        return flatten(self._served.parameters) if self._size else torch.empty(0)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds, or raise what has failed in a thread."""
        self._changed.wait_for(lambda: is_so() or self._failure is not None)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TrainingError(f"a parameter server lost a worker: {self._failure}") from self._failure
