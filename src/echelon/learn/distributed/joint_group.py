"""A process group over ranks of several replicas, of which any may be lost, and the replicas stay in step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from typing_extensions import override

from echelon.learn.distributed.mesh import all_reduce, wait_for
from echelon.learn.distributed.torch_internals import add_backend, close_connections, enlist, strike_off

if TYPE_CHECKING:
    from echelon.learn.distributed.transport import Communicator

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")
_ELSEWHERE = "connection closed by peer: another process of this replica has lost one of another replica"


class OpenStep:
    """A step of a replica of several ranks, whose all-reduces with other replicas end as one, at the end of the step.

    From `begin` to `end` one that fails raises nothing: this rank computes the step to its end as the others of its
    replica do, with numbers that nobody uses. So these all-reduces need no agreement of their own.
    """

    def __init__(self) -> None:
        self.groups: list[JointGroup] = []
        """Those that a step uses."""
        self.is_open = False
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Begin a step. Collective over the ranks of a replica."""
        self.is_open = True

    def run(self, operate: Callable[[], dist.Work]) -> dist.Work:
        """Run an operation of the step; none after one has failed here."""
        if self._failure is None:
            try:
                return operate()
            except Exception as error:
                self._failure = error
                for group in self.groups:  # others may wait for this rank
                    group.close()
        return _Over()

    def end(self, values: torch.Tensor, own: dist.ProcessGroup) -> torch.Tensor:
        """End the step; return the result of its last all-reduce, fp64, [values], of a rank on which none failed.

        Collective over `own`, the ranks of a replica. If one has failed on every rank, raises the first error here.
        """
        self.is_open = False
        bits = torch.cat([values.new_ones(1), values]).view(torch.int64)
        if self._failure is not None:
            bits.fill_(torch.iinfo(torch.int64).min)
        all_reduce(bits, own, dist.ReduceOp.MAX)
        if bits[0] < 0:
            self.check()
        return bits[1:].view(torch.float64)

    def check(self) -> None:
        """Raise the error of the first operation that failed here."""
        if self._failure is not None:
            raise self._failure


class _Over(dist.Work):
    """An operation for which there is nothing to wait."""

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class JointGroup(dist.ProcessGroup):
    """A group that is not a part of the default group, which has the ranks of this replica alone.

    It sends over gloo, and tensors of the GPU by its communicator, if it has one.

    An operation ends in the same way on all ranks of a replica: where it fails on one of them, it fails on all. So all
    leave the view at the same operation, none waits for another in an operation inside the replica, and the groups
    inside the replica can be used on. For that each operation is waited for, and the ranks of the replica then tell
    each other how it ended, in the group `own`; for the all-reduces of an `OpenStep` its end does that. Messages
    between two ranks (`send`, `recv`), and what no code here uses, such as `reduce_scatter`, are as in any group.
    """

    def __init__(
        self,
        connect: Callable[[], dist.ProcessGroupGloo],
        rank: int,
        size: int,
        own: dist.ProcessGroup | None,
        name: str,
        step: OpenStep | None = None,
        communicator: "Communicator | None" = None,
    ) -> None:
        """Collective over the ranks of the group.

        Args:
            connect: connects this rank to the others.
            own: the ranks of this replica, for this group alone as long as it is used; None for a replica of one rank.
            step: the steps that use this group; None if none does.
            communicator: what connects the GPUs of the ranks; None: gloo also sends what is on them.

        Raises:
            RuntimeError: a rank of the group is lost, or one of `own` could not connect.
        """
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._own = own
        self._step = step or OpenStep()
        self._step.groups.append(self)
        self._plain: dist.ProcessGroup | None = None
        self._is_one = False
        self._communicator = communicator
        with _together(own, self.close):
            backend = connect()
            plain = dist.ProcessGroup(rank, size)  # type: ignore[call-arg]
            self._plain = _wrap(plain, backend, name)
            _wrap(self, backend, name)
            if communicator is None:
                add_backend(plain, _GPU, backend)
            else:
                communicator.connect(plain)

    def enlist(self, places: Mapping[int, int], store: Store) -> None:
        """Make torch's functions accept this group. `places`: ranks of the default group, with their ranks in this."""
        others = [rank for rank in range(self.size()) if rank not in places.values()]
        strangers = range(dist.get_world_size(), dist.get_world_size() + len(others))
        enlist(self, {**places, **dict(zip(strangers, others, strict=True))}, store)

    def leave(self) -> None:
        """Drop what torch knows of this group. Not collective."""
        strike_off(self)

    def close(self) -> None:
        """End all waits in this group, here and in the other processes. Not collective."""
        if self._plain is not None:
            close_connections(self._plain)
        if self._communicator is not None:
            self._communicator.end()

    def meet(self, seconds: float) -> None:
        """Wait so long for the other ranks, if none is lost. Raises nothing."""
        assert self._plain is not None
        with suppress(RuntimeError):
            self._plain.barrier(dist.BarrierOptions()).wait(timedelta(seconds=seconds))

    def getBackendName(self) -> str:
        """The name that torch asks for."""
        return "gloo"

    @contextmanager
    def together(self) -> Iterator[None]:
        """A scope of operations that end as one: their number may differ between the ranks of a replica.

        On GPUs all-reduces, of tensors of one device, are waited for once, at its end: then their numbers may be wrong
        where one has failed, and the scope fails, or the step if one is open. Collective over the ranks of a replica.
        """
        with nullcontext() if self._step.is_open else _together(self._own, self.close):
            self._is_one = True
            try:
                yield
                self._step.run(self._finish) if self._step.is_open else self._finish()
            finally:
                self._is_one = False

    def _finish(self) -> dist.Work:
        if self._communicator is not None:
            self._communicator.finish()
        return _Over()

    def _run(self, name: str, *arguments: Any, **options: Any) -> Any:
        def operate() -> dist.Work:
            call: Callable[[], dist.Work] = partial(getattr(self._plain, name), *arguments, **options)
            if self._communicator is not None:
                is_part = self._is_one and name == "allreduce"
                (self._communicator.start if is_part else self._communicator.run)(call)
                return _Over()
            work = call()
            wait_for([work])
            return work

        if self._step.is_open and name == "allreduce":
            return self._step.run(operate)
        with nullcontext() if self._is_one else _together(self._own, self.close):
            self._step.check()
            return operate()


for _name in ("allgather", "allreduce", "barrier", "broadcast", "gather", "reduce", "scatter"):
    setattr(JointGroup, _name, partialmethod(JointGroup._run, _name))


def together(group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """`JointGroup.together`, of any group."""
    return group.together() if isinstance(group, JointGroup) else nullcontext()


@contextmanager
def _together(own: dist.ProcessGroup | None, close: Callable[[], None]) -> Iterator[None]:
    """A scope that fails on all ranks of a replica if it fails on one of them. Collective over `own`.

    `close` is called before the others of the replica are told of an error here: they may still wait for ranks of other
    replicas, which in turn may wait for this rank.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
        close()
    if own is not None:
        failed = torch.tensor([int(failure is not None)])
        with suppress(RuntimeError) if failure else nullcontext():  # a rank of this replica may be lost as well
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=own)
        if failed and failure is None:
            close()
            raise dist.DistNetworkError(_ELSEWHERE)
    if failure is not None:
        raise failure


def _wrap(group: dist.ProcessGroup, backend: dist.ProcessGroupGloo, name: str) -> dist.ProcessGroup:
    """Have a group use a backend, and carry a name, under which what it sends is counted."""
    add_backend(group, _CPU, backend, is_default=True)
    group._set_group_desc(name)
    return group
