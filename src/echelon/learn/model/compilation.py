"""Compilation of decoder layers, in place and without renaming a parameter, and how often anything was compiled."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import get_compilation_metrics
from typing_extensions import override

MAX_GRAPHS = 32
"""Graphs that Dynamo keeps for a layer; its default is 8, which LoRA reaches: three in training (for the first shape,
for any, and for one sequence), twice because the first layer's input needs no gradient, and two in evaluation."""

RECURSION_LIMIT = 10_000
"""Nested Python calls while layers are compiled. The tracer follows a size that may change back to its origin, three
calls for each operation of a layer with distributed tensors; Python's own limit of 1,000 ends that with an error."""

# Its functions are compiled for several kinds of parameters.
_OPTIMIZER = Path(__file__).parents[1] / "optimizer"

logger = logging.getLogger(__name__)


class _LimitWatch(logging.Handler):
    """Logs a warning, besides Dynamo's own in the rank's log, when a layer is not compiled again."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("torch._dynamo hit config."):
            logger.warning(
                f"compile: layers have been compiled for {torch._dynamo.config.recompile_limit} shapes and modes, the "
                "most that are kept; others run uncompiled, which is slower. Set data.packing: true, so that more "
                "sequences have one length, or train.compile: false."
            )


_WATCH = _LimitWatch()


def apply_compile(layers: Iterable[nn.Module], backend: Any, memory_budget: float | None = None) -> None:
    """Compile each decoder layer's forward. Equal layers share one compilation.

    The forward is compiled rather than the module: hooks of FSDP stay outside the graph, and names stay as they are.
    Dynamo's option for DDP, which cuts graphs at the borders of buckets so that reduction can begin inside a graph, is
    switched off: a layer is small enough to be reduced whole.

    Args:
        backend: the name of a backend of `torch.compile`, or itself.
        memory_budget: the share of a layer's activations that is kept, from 0 (its inputs alone) to 1 (what the
            compiler keeps by itself), the default. It recomputes what takes the fewest FLOPs.
    """
    # Read when a layer is compiled, at its first call; one process has one budget.
    torch._functorch.config.activation_memory_budget = 1.0 if memory_budget is None else memory_budget
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION_LIMIT))
    logging.getLogger("torch._dynamo.convert_frame").addHandler(_WATCH)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=False)


@contextmanager
def compilations_told(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """In this scope, call `begin` when torch begins to compile anything in this process, and `end` when it has.

    A compilation inside another one is not told. Both may be called in another thread: a backward pass is compiled
    when it first runs.
    """
    starts, ends = callback_handler.start_callbacks, callback_handler.end_callbacks

    def tell_begin(*_: object) -> None:
        begin()

    def tell_end(*_: object) -> None:
        end()

    starts.append(tell_begin)
    ends.append(tell_end)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch.compiler.reset() has removed them
            starts.remove(tell_begin)
            ends.remove(tell_end)


def describe_graph_breaks() -> str | None:
    """Return a line about places at which this process could not compile on; None if there are none."""
    count = sum(torch._dynamo.utils.counters["graph_break"].values())
    if not count:
        return None
    return (
        f"compile: {count} graph break{'s' * (count > 1)}, at which compiled code returns to Python and is slower; "
        'TORCH_LOGS="graph_breaks" shows them in the logs of the ranks'
    )


def describe_recompiles() -> str | None:
    """Return a line about how often this process has compiled layers again; None if it never has."""
    done = get_compilation_metrics()
    count = sum(bool(graph.recompile_reason) and Path(graph.co_filename or "").parent != _OPTIMIZER for graph in done)
    if not count:
        return None
    return (
        f"compile: layers and the loss were compiled {count} more time{'s' * (count > 1)} for other shapes of batches, "
        'or with and without gradients; TORCH_LOGS="recompiles" shows the reasons in the logs of the ranks'
    )
