"""Messages between workers and parameter servers over gloo, and the code of gradients, sized by the shapes alone.

Nothing is pickled: messages are numbers and tensors of known shapes. `torch.distributed.rpc` is not used: it unpickles
what arrives at a port of its own. These messages take the connections of a process group, whose addresses and
interfaces are those of the job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.learn.distributed.runtime import COLLECTIVE_SECONDS
from echelon.learn.reduction import TopK
from echelon.learn.reduction.methods import BLOCKS, HALF, ROUNDED, WHOLE, Code, count_sent
from echelon.learn.reduction.reducer import flatten
from echelon.recipe.synchronization import CompressConfig

_REQUEST, _REPLY = 1, 2  # tags: both may be on their way between the same two processes
_NUM_NUMBERS = 2
_CODES = {"none": WHOLE, "bf16": ROUNDED, "fp16": HALF, "int8": BLOCKS}


class Kind(IntEnum):
    """What a worker asks a server for."""

    PUSH = 0
    """Numbers: targets. With gradients. The reply is the square of the norm of the server's sum of gradients."""
    DRAIN = 1
    """The worker pushes nothing more. The reply is the weights after the last push of all workers."""
    TAKE = 2
    """The reply is the next share of the step's batch that nobody has taken, or another value of `Taken`."""
    PULL = 3
    """Numbers: share. The reply is the weights; where steps wait for all workers, those after the step before."""
    UPDATE = 4
    """Numbers: share, learning rate. With gradients, which are applied at once. The reply is one number."""


class Taken(IntEnum):
    """Replies to TAKE that are no share."""

    NONE_LEFT = -1
    VIEW_ENDS = -2
    """This step, and all later ones, are for the workers of the next view."""


@dataclass(frozen=True)
class Request:
    """A message to a server. `values`: what is pushed, bytes of a `PushCode`; None where the kind has none."""

    kind: Kind
    step: int = 0
    numbers: Sequence[float] = ()
    values: Tensor | None = None


def post(request: Request, server: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Send a request without waiting for it; the result is to be waited for after the reply has come."""
    head = torch.zeros(2 + _NUM_NUMBERS, dtype=torch.float64)
    head[: 2 + len(request.numbers)] = torch.tensor([request.kind, request.step, *request.numbers], dtype=torch.float64)
    parts = [head] if request.values is None else [head, request.values]
    return [dist.isend(part, group_dst=server, group=group, tag=_REQUEST) for part in parts]  # type: ignore[misc]


def receive(worker: int, size: int, group: dist.ProcessGroup) -> Request:
    """Wait for the next request of a worker. `size`: how many bytes a push has."""
    head = torch.empty(2 + _NUM_NUMBERS, dtype=torch.float64)
    _take(head, worker, group, _REQUEST)
    number, step, *numbers = head.tolist()
    kind, values = Kind(int(number)), None
    if kind in (Kind.PUSH, Kind.UPDATE):
        values = torch.empty(size, dtype=torch.uint8)
        _take(values, worker, group, _REQUEST)
    return Request(kind, int(step), numbers, values)


def reply(values: Tensor, worker: int, group: dist.ProcessGroup) -> None:
    """Send the reply to a worker's request."""
    await_message(dist.isend(values, group_dst=worker, group=group, tag=_REPLY))


def await_reply(request: Request, server: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """Wait for the reply of a server. `size`: the number of its weights."""
    values = torch.empty(size if request.kind in (Kind.DRAIN, Kind.PULL) else 1)
    _take(values, server, group, _REPLY)
    return values


def _take(values: Tensor, source: int, group: dist.ProcessGroup, tag: int) -> None:
    """Wait for a message, and write it into `values`."""
    await_message(dist.irecv(values, group_src=source, group=group, tag=tag))


def await_message(work: dist.Work | None) -> None:
    """Wait until a message is sent or received.

    Without a time of its own a message gets that of the group's connections, which is shorter than a long step.
    """
    assert work is not None
    work.wait(timedelta(seconds=COLLECTIVE_SECONDS))


class PushCode:
    """Reads pushed gradients of a server's part. `sizes`: how many numbers its tensors have."""

    def __init__(self, config: CompressConfig, sizes: Sequence[int]) -> None:
        self._total = sum(sizes)
        self._code = _CODES.get(config.method)
        self.num_bytes = 8 * sum(count_sent(size, config.fraction) for size in sizes)
        if self._code is not None:
            self.num_bytes = len(self._code.encode(_pad(torch.zeros(self._total), self._code)))

    def decode(self, sent: Tensor) -> Tensor:
        """Return the values of all tensors, fp32, 1-D; 0 where none were sent."""
        if self._code is not None:
            return self._code.decode(sent)[: self._total]
        values, places = sent.view(torch.int32).view(2, -1)
        total = torch.zeros(self._total)
        total[places.long()] = values.view(torch.float32)
        return total


class Pusher:
    """Writes the gradients that a worker pushes; with `topk` it keeps what was not sent for its next push."""

    def __init__(self, config: CompressConfig, trained: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._code = _CODES.get(config.method)
        self._largest = None if self._code is not None else TopK(trained, config.fraction, group)

    def encode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the gradients of one server's part as bytes."""
        if self._largest is not None:
            return self._largest.choose(tensors).view(torch.uint8).flatten()
        assert self._code is not None
        return self._code.encode(_pad(flatten(tensors), self._code))

    def settle(self, commit: Tensor) -> None:
        """Keep what was not sent for the next push, where `commit` is true."""
        if self._largest is not None:
            self._largest.settle(commit)

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that a resumed run needs."""
        return {} if self._largest is None else self._largest.tensors()


def _pad(values: Tensor, code: Code) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % code.multiple))
