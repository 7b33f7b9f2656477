"""What a decoder layer keeps for its backward pass: checkpointing recomputes it, offloading keeps it in host memory.

While a layer runs, a side stream copies what autograd saves to pinned host memory. The next layer still computes when
the last of these copies ends; then the device memory is free again. In the backward pass the tensors of a layer come
back while layers after it are differentiated, `horizon` layers ahead. At most one layer more has its activations on the
device, and at least two have. Memory is allocated and freed on the stream that computes, which waits for the copies.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from echelon.learn.model import blocked_attention, flex_attention, varlen_attention  # noqa: F401  (define operations that are kept)
from echelon.learn.model.compilation import apply_compile
from echelon.learn.parallel.expert import find_dispatches, keep_routes

# What `selective` keeps: results of matrix products, attention and collectives, the costly part of a layer. The rest is
# recomputed.
KEPT_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.echelon.blocked_attention.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops.echelon.gather.default,
    torch.ops.echelon.swap.default,
}
# Smaller storages stay on the device: they are many, and starting a copy takes as long as copying this much.
SMALLEST = 2**20
# What autocast does to a weight before a matrix product saves it.
_CASTS = ("ToCopyBackward0", "TBackward0")


def checkpoint_activations(layers: Sequence[nn.Module] | nn.ModuleList, policy: str, every: int = 1) -> None:
    """Make decoder layers recompute their activations in the backward pass.

    Args:
        policy: `none`; `full` keeps a layer's input alone (Chen et al. 2016); `selective` also keeps the
            results of matrix products, attention (Korthikanti et al. 2022) and collectives.
        every: only layers whose number, from 1, this divides.
    """
    if policy == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if policy == "selective":
        options["context_fn"] = _SELECTIVE
    for layer in layers[every - 1 :: every]:
        kept = dict(options)
        if any(find_dispatches(layer)):
            kept["context_fn"] = functools.partial(keep_routes, options.get("context_fn", noop_context_fn))
        layer.forward = functools.partial(checkpoint, layer.forward, **kept)


def compile_selective(layers: Iterable[nn.Module], backend: Any) -> None:
    """Compile layers that are several graphs, which keep what `selective` keeps, as the dispatch to experts does."""
    apply_compile(layers, _keeping_products(backend))
    contexts = functools.partial(keep_routes, _SELECTIVE)
    for dispatch in chain.from_iterable(map(find_dispatches, layers)):
        dispatch.run = functools.partial(checkpoint, dispatch.run, use_reentrant=False, context_fn=contexts)


@functools.cache
def _keeping_products(backend: Any) -> Callable[[GraphModule, Any], Any]:
    """Return a backend of `torch.compile` that has each graph recompute what `selective` does not keep."""
    compile_graph = lookup_backend(backend)

    def compile_checkpointed(graph: GraphModule, inputs: Any) -> Any:
        around = Graph()
        arguments = [around.node_copy(node) for node in graph.graph.find_nodes(op="placeholder")]
        graph.meta["_checkpoint_context_fn"] = _SELECTIVE
        returned = around.call_function(tag_activation_checkpoint, (around.get_attr("layer"), *arguments))
        outputs: Any = graph.graph.output_node().args[0]
        around.output(tuple(around.call_function(getitem, (returned, index)) for index in range(len(outputs))))
        return compile_graph(GraphModule({"layer": graph}, around), inputs)

    return compile_checkpointed


def _selective_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _selective_policy)


class SideStream:
    """Copies between the GPU of this process and pinned host memory, one after the other, beside the computation."""

    device_type = "cuda"
    """Of the tensors that are copied to the host."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def allocate(self, size: int) -> Tensor:
        """Return pinned host memory, uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy, as soon as everything is done that the current stream has to do so far. Return the event of its end."""
        if self._stream is None:  # the device of this process is known only when layers run
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            end: torch.cuda.Event = self._stream.record_event()
        return end

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event of `copy`. The host does not wait."""
        torch.cuda.current_stream().wait_event(event)


class _Buffers:
    """Host memory, used again and again: pinning it is slow. Sizes are powers of two, as torch's own are."""

    def __init__(self, side: SideStream) -> None:
        self._side = side
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least `size` bytes."""
        room = 1 << (size - 1).bit_length()
        return self._free[room].pop() if self._free[room] else self._side.allocate(room)

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        """Take buffers back. Their next copy comes after all earlier ones, so none is overwritten too early."""
        for buffer in buffers:
            self._free[len(buffer)].append(buffer)


@dataclass(eq=False)
class _Storage:
    """A storage that left the device: its bytes in host memory, and on the device while it is there again."""

    bytes: Tensor
    device: torch.device
    loaded: Tensor | None = None


@dataclass(frozen=True)
class _View:
    """A tensor that autograd saved, as a view of a storage that left the device."""

    storage: _Storage
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def restore(self) -> Tensor:
        """Return the tensor. Its storage must be on the device."""
        assert self.storage.loaded is not None
        empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return empty.set_(self.storage.loaded.untyped_storage(), self.offset, self.size, self.stride)


class _Shelf:
    """What autograd saves in one call of a layer. Autograd holds the shelf as long as it needs any of it.

    Whole storages move, each once: several operations save the same tensor or views of it, and a view keeps its whole
    storage alive.
    """

    def __init__(self, offloading: "_Offloading", kept: frozenset[int] | None, before: "_Shelf | None") -> None:
        """`kept`: addresses of storages that stay on the device; None if all do. `before`: the previous layer's."""
        self._offloading, self._side = offloading, offloading.side
        self._kept = kept
        self._before = None if before is None else weakref.ref(before)
        self._storages: dict[int, _Storage] = {}
        self._taken: list[Tensor] = []
        self._leaving: list[tuple[Tensor, int]] = []
        self._last: Any = None  # the event of the last copy
        self._is_open = self._comes_back = False

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Take a tensor that autograd saves: start its copy, unless it stays on the device."""
        held = tensor.detach()  # without its graph, which refers to this shelf
        if not self._leaves(tensor):
            return held
        source = tensor.untyped_storage()
        stored = self._storages.get(source.data_ptr())
        if stored is None:
            buffer = self._offloading.buffers.take(source.nbytes())
            stored = _Storage(buffer[: source.nbytes()], tensor.device)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(source)
            self._last = self._side.copy(stored.bytes, whole)
            self._storages[source.data_ptr()] = stored
            self._taken.append(buffer)
            self._leaving.append((held, held._version))
        return _View(stored, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _leaves(self, tensor: Tensor) -> bool:
        if self._kept is None or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        is_large = tensor.device.type == self._side.device_type and storage.nbytes() >= self._offloading.smallest
        return is_large and storage.data_ptr() not in self._kept and not _is_cast_weight(tensor)

    def release(self) -> None:
        """Free the device memory of what was copied, as soon as the copies are done.

        Raises:
            RuntimeError: a tensor was changed in place, so that its copy may have either value.
        """
        if self._leaving:
            self._side.wait(self._last)
        changed = [held.shape for held, version in self._leaving if held._version != version]
        self._leaving.clear()
        if changed:
            raise RuntimeError(
                f"a tensor of shape {tuple(changed[0])} that the backward pass needs was changed in place; with "
                "train.activation_offloading=false, PyTorch's own message says by which operation."
            )

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """Return a saved tensor in the backward pass. The first call makes what earlier layers saved come back."""
        if not self._is_open:
            self._is_open = True
            self._load()
            if self._comes_back:
                self._side.wait(self._last)
                self._comes_back = False
            for shelf in islice(self._earlier(), self._offloading.horizon):
                shelf._load()
        return packed if isinstance(packed, Tensor) else packed.restore()

    def _earlier(self) -> Iterator["_Shelf"]:
        """The shelves of the layers before this one, the nearest first."""
        shelf: _Shelf | None = self
        while shelf is not None:
            shelf = None if shelf._before is None else shelf._before()
            if shelf is not None:
                yield shelf

    def _load(self) -> None:
        self.release()
        for storage in self._storages.values():
            if storage.loaded is None:
                self._comes_back = True
                storage.loaded = torch.empty_like(storage.bytes, device=storage.device)
                self._last = self._side.copy(storage.loaded, storage.bytes)

    def __del__(self) -> None:
        if self._leaving or self._comes_back:  # a backward pass that did not run; copies still use the memory
            self._side.wait(self._last)
        self._offloading.buffers.give_back(self._taken)


def _is_cast_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter in another dtype, which autocast makes once for all microbatches of a pass."""
    node = tensor.grad_fn
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    return hasattr(node, "variable")  # the node that accumulates a parameter's gradient


class _Offloading:
    """Offloads what the layers of a decoder save, the last one excepted: its backward pass comes first."""

    def __init__(self, side: SideStream, num_layers: int, smallest: int, horizon: int) -> None:
        self.side, self.smallest, self.horizon = side, smallest, horizon
        self.buffers = _Buffers(side)
        self._num_layers = num_layers
        self._newest: weakref.ref[_Shelf] | None = None

    def run(self, index: int, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the layer's forward returns."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = None if index == 0 or self._newest is None else self._newest()
        kept = None if index == self._num_layers - 1 else _find_kept(layer, args, kwargs)
        shelf = _Shelf(self, kept, before)
        with saved_tensors_hooks(shelf.pack, shelf.unpack):
            output = forward(*args, **kwargs)
        self._newest = weakref.ref(shelf)
        if before is not None:
            before.release()
        return output


def _find_kept(layer: nn.Module, args: Sequence[Any], kwargs: Any) -> frozenset[int]:
    """Return the addresses of storages that a layer does not own: weights, and what all layers get, such as masks."""
    shared = tree_leaves((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))
    tensors = [*layer.parameters(), *layer.buffers(), *(value for value in shared if isinstance(value, Tensor))]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def offload_activations(
    layers: nn.ModuleList, side: SideStream | None = None, smallest: int = SMALLEST, horizon: int = 1
) -> None:
    """Make decoder layers keep what their backward pass needs in host memory, in place.

    Gradients stay the same, bit for bit. Around checkpointed layers, only their inputs move. Compiled layers must be
    checkpointed in full: other tensors that a compiled graph saves do not pass autograd's hooks.

    Args:
        layers: in the order in which they run; their first argument is the hidden states.
        side: what copies; None copies from the GPU of this process.
        smallest: bytes of the smallest storage that moves.
        horizon: layers whose tensors are loaded ahead of the one that is differentiated; 0 loads a layer's own when
            they are needed, and waits.
    """
    offloading = _Offloading(side or SideStream(), len(layers), smallest, horizon)
    for index, layer in enumerate(layers):
        layer.forward = functools.partial(offloading.run, index, layer, layer.forward)
