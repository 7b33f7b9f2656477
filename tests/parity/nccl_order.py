"""What NCCL would do with the collectives of a step that ranks compute on CPUs, over gloo.

Ranks send as on GPUs (`as_on_gpus`), and note what they call and when they wait for it (`Collectives`). `find_disorder`
and `find_cycle` say where they would wait forever on NCCL: gloo does so only if it waits too, or if sizes differ.
"""

import itertools
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import ScriptObject
from torch._library.custom_ops import OPDEFS
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

import echelon.learn.distributed.mesh
import echelon.learn.parallel.data_parallel

# Parts of different sizes are sent, or only one rank has the whole.
UNEVEN = ("alltoall_base_", "all_to_all_single", "scatter_", "gather_")
MESSAGE = "message"
# Which rank of a message its caller is: the one that sends, or the one that receives.
ENDS = {"send": 0, "recv_": 1}
# Of each stream, how far each one had come in what it has waited for. Each communicator is a stream too.
CLOCKS: defaultdict[Any, Counter] = defaultdict(Counter)


class Event(torch.cpu.Event):
    """What torch.cuda.Event is to the streams of a GPU."""

    clock = None

    def record(self, stream=None):
        self.clock = Counter(CLOCKS[stream or torch.cpu.current_stream()])


def record_event(stream, event=None):
    event = event or Event()
    event.record(stream)
    return event


def wait_event(stream, event):
    assert event.clock is not None, "a stream would not wait for an event that is recorded later"
    CLOCKS[stream] |= event.clock


def wait_stream(stream, other):
    CLOCKS[stream] |= CLOCKS[other]


@contextmanager
def as_on_gpus():
    """Scope in which models are built to send as on GPUs, and torch's streams of a CPU wait as those of a GPU do."""
    CLOCKS.clear()
    with ExitStack() as stack:
        for module in (echelon.learn.distributed.mesh, echelon.learn.parallel.data_parallel):
            stack.enter_context(mock.patch.object(module, "sends_by_nccl", lambda device_type: True))
        stack.enter_context(mock.patch.object(torch.cpu, "Event", Event))
        for method in (record_event, wait_event, wait_stream):
            stack.enter_context(mock.patch.object(torch.cpu.Stream, method.__name__, method))
        yield


class Call(NamedTuple):
    """A collective: the global ranks of its group, the operation, the shapes and types of its tensors, and the stream.

    Of a message the ranks are (from, to), and the operation is MESSAGE.
    """

    ranks: tuple[int, ...]
    kind: str
    tensors: tuple[Any, ...]
    is_on_main_stream: bool = True


class Pending(NamedTuple):
    """A collective that no stream has waited for: what torch returned, and the clock of its end."""

    call: Call
    work: Work | None
    results: set[StorageWeakRef]
    end: Counter


class Collectives(TorchDispatchMode):
    """Notes the collectives that this thread calls, as torch dispatches them, and what is used before they have ended.

    Attributes:
        steps: in their order; messages of one batch begin together.
        races: operations on a tensor that another stream may be writing, or reading while they write.
        pending: the collectives that nothing has waited for.
    """

    def __init__(self):
        super().__init__()
        self.steps, self.races, self.pending = [], [], []
        self._writes, self._reads = {}, defaultdict(Counter)
        self._main, self._batch = torch.cpu.current_stream(), None

    @contextmanager
    def noting(self):
        """Scope in which everything is noted."""
        with ExitStack() as stack:
            for owner, name, wrap in (
                (Work, "wait", self._waiting), (Work, "get_future", self._waiting),
                (dist, "batch_isend_irecv", self._together),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
            stack.enter_context(self)
            yield

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # it computes with its parts, and is seen again
        if operation.namespace == "echelon":
            with self:  # it sends
                return OPDEFS[operation._schema.name]._init_fn(*args)
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        if operation.namespace not in ("c10d", "_c10d_functional"):
            if not operation.is_view:
                written = [given for given, schema in zip(args, operation._schema.arguments, strict=False)
                           if schema.alias_info is not None and schema.alias_info.is_write]  # fmt: skip
                self._touch(name, torch.cpu.current_stream(), (args, kwargs), (written, result))
        elif name == "wait_tensor":
            self._wait(lambda pending: pending.results & storages_of(args))
        elif (group := find_group(operation, args)) is not None:
            self._begin(operation, name, group, args, result)
        return result

    def _begin(self, operation, name, group, args, result):
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        shapes = () if name in UNEVEN else tuple(tuple(each.shape) for each in tensors)
        ranks, kind = tuple(dist.get_process_group_ranks(group)), name
        if name in ENDS:
            ends = [dist.get_rank(), ranks[args[2]]]
            ranks, kind = tuple(reversed(ends) if ENDS[name] else ends), MESSAGE
        stream = torch.cpu.current_stream()
        described = (*shapes, *sorted({str(each.dtype) for each in tensors}))
        call = Call(ranks, kind, described, stream is self._main)
        if self._batch is None:
            self.steps.append([call])
        else:
            self._batch.append(call)
        is_functional = operation.namespace == "_c10d_functional"
        written = result if is_functional else [] if name == "send" else args[0]
        wait_stream(group, stream)
        self._touch(name, group, args, written)
        boxed = None if is_functional else next(each for each in tree_leaves(result) if isinstance(each, ScriptObject))
        work = None if boxed is None else Work.unbox(boxed)
        self.pending.append(Pending(call, work, storages_of(written), Counter(CLOCKS[group])))

    def _touch(self, name, stream, read, written):
        """Let a stream read and write tensors; note those that it should have waited for."""
        clock, written = CLOCKS[stream], storages_of(written)
        clock[stream] += 1
        for storage in storages_of(read) | written:
            earlier = [self._writes[storage]] if storage in self._writes else []
            if storage in written:
                earlier += self._reads.pop(storage, Counter()).items()
                self._writes[storage] = (stream, clock[stream])
            else:
                self._reads[storage][stream] = clock[stream]
            if any(clock[other] < tick for other, tick in earlier):
                self.races.append(name)

    def _wait(self, is_meant):
        for pending in filter(is_meant, self.pending):
            CLOCKS[torch.cpu.current_stream()] |= pending.end
        self.pending = [pending for pending in self.pending if not is_meant(pending)]

    def _waiting(self, method):
        def waiting(work, *arguments):
            self._wait(lambda pending: pending.work is work)
            return method(work, *arguments)

        return waiting

    def _together(self, begin):
        def began(messages):
            self._batch = []
            self.steps.append(self._batch)
            try:
                return begin(messages)
            finally:
                self._batch = None

        return began


def storages_of(tensors):
    """The memory of the tensors in nested containers."""
    leaves = [each for each in tree_leaves(tensors) if isinstance(each, torch.Tensor)]
    return {StorageWeakRef(each.untyped_storage()) for each in leaves if each.layout == torch.strided}


def find_group(operation, args):
    """The group of a collective; None if it waits for one, or its group has a single rank."""
    boxed = next((each for each in args if isinstance(each, ScriptObject)), None)
    if boxed is not None:
        group = ProcessGroup.unbox(boxed)
    else:
        names = [schema.name for schema in operation._schema.arguments]
        if "group_name" not in names:
            return None
        group = _resolve_process_group(args[names.index("group_name")])
    return group if group.size() > 1 else None


def find_disorder(ranks):
    """The first collective or message of two ranks that differs, of those that both take part in; None if all agree.

    They must agree over all of their groups together. Messages from one rank to another must be received in the order
    in which they are sent: NCCL has no tags to tell them apart.

    Args:
        ranks: of each rank the `steps` of `Collectives`.
    """
    calls = [list(itertools.chain(*steps)) for steps in ranks]
    for first, second in itertools.permutations(range(len(calls)), 2):
        shared = [
            [call for call in calls[one] if call.kind != MESSAGE and other in call.ranks]
            for one, other in ((first, second), (second, first))
        ]
        sent = [[call for call in calls[one] if call[:2] == ((first, second), MESSAGE)] for one in (first, second)]
        for kind, (ours, theirs) in (("collective", shared), (MESSAGE, sent)):
            for number, pair in enumerate(itertools.zip_longest(ours, theirs)):
                if pair[0] != pair[1]:
                    return f"{kind} {number} of ranks {first} and {second}: {pair[0]}, but {pair[1]}"
    return None


def find_cycle(ranks):
    """Collectives of which each waits for the one before it, of ranks whose pairs agree; None if there are none.

    A rank's collectives are taken to run one after the other, in whatever group: so those of one stream do, and those
    of several may, because a kernel that waits for other ranks keeps its part of the GPU. Arguments as above.
    """
    sorter: TopologicalSorter[Any] = TopologicalSorter()
    for steps in ranks:
        counts, before = Counter(), []
        for step in steps:
            meetings = []
            for call in step:
                channel = call.ranks, call.kind == MESSAGE
                counts[channel] += 1
                meetings.append((*channel, counts[channel]))
            for meeting in meetings:
                sorter.add(meeting, *before)
            before = meetings or before
    try:
        sorter.prepare()
    except CycleError as error:
        return error.args[1]
    return None
