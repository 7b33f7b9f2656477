"""Ring attention: the parts of whole attention, and their gradients, by ranks that are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from echelon.learn.distributed.sequence_part import SequencePart, in_order
from echelon.learn.model import ring_attention
from echelon.learn.model.ring_attention import (
    AttentionResult,
    Ring,
    Spans,
    attend_block,
    differentiate_block,
    find_spans,
)

BATCH, HEADS, KEY_HEADS, LENGTH, WIDTH = 2, 4, 2, 48, 16
STARTS = torch.tensor([[0] * 20 + [20] * 3 + [23] * 25, [0] * 48])
PLACES = torch.arange(LENGTH)
# Of each query the first key, and what a ring is told of it: where documents start, or the first keys of a window.
CAUSAL, DOCUMENTS = (None, None), (STARTS, torch.tensor([[0, 20, 23, 48], [0, 48, 48, 48]])[:, None, None])
WINDOWS = torch.maximum(STARTS, PLACES - 6)  # of which some parts see nothing
WINDOWS = (WINDOWS, WINDOWS[:, None, :, None])


class RingOfThreads:
    """Ranks that are threads: one of them."""

    def __init__(self, rank, size, barrier, brought):
        self.rank, self.size = rank, size
        self._barrier, self._brought = barrier, brought

    def shift(self, tensor, stream=0):
        self._brought[self.rank] = tensor.clone()
        self._barrier.wait()
        received = self._brought[(self.rank - 1) % self.size]
        self._barrier.wait()
        return lambda: received


def run_ring(size, tensors, gradient, first, sinks=None, backend=None):
    """The output and the gradients of query, key and value, of whole sequences, and of the sinks."""
    barrier, brought = threading.Barrier(size), {}
    rings = [RingOfThreads(rank, size, barrier, brought) for rank in range(size)]

    def run(ring):
        take = partial(SequencePart(ring.rank, size).take, dim=2)
        own = [take(tensor).detach().requires_grad_() for tensor in tensors]
        others = [] if sinks is None else [sinks.clone().requires_grad_()]
        starts = first if first is None or first.shape[2] == 1 else take(first)
        try:
            attend = Ring(ring, backend)
            output = attend(*own, WIDTH**-0.5, starts, *others)
            return output.transpose(1, 2), *torch.autograd.grad(output, [*own, *others], take(gradient).transpose(1, 2))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, rings))
    of_sinks = [] if sinks is None else [sum(parts[4] for parts in found)]
    return [
        *(in_order(torch.stack(parts), 2) for parts in zip(*(parts[:4] for parts in found), strict=True)),
        *of_sinks,
    ]


def check_ring(size, bounds, device="cpu", dtype=torch.float32, tolerance=1e-5, backend=None):
    generator = torch.Generator().manual_seed(size)
    shapes = [(BATCH, heads, LENGTH, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    *tensors, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    first, told = bounds
    told = None if told is None else told.to(device)
    found = run_ring(size, tensors, gradient, told, backend=backend)
    seen = (PLACES[:, None] >= PLACES) & (True if first is None else first[:, None, :, None] <= PLACES)
    wholes = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    expected = scaled_dot_product_attention(*wholes, seen, enable_gqa=True)
    expected = [expected, *torch.autograd.grad(expected, wholes, gradient.double().cpu())]
    for ours, right in zip(found, expected, strict=True):
        assert (ours.double().cpu() - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bounds", [CAUSAL, DOCUMENTS, WINDOWS], ids=["causal", "documents", "windows"])
def test_the_parts_of_whole_attention(size, bounds):
    check_ring(size, bounds)


def test_documents_are_stretches_of_queries_and_keys():
    """Documents [0, 3), [3, 8) on two ranks: one has positions 0, 1, 6 and 7, the other the rest."""
    starts, ends, middle = torch.tensor([[0, 3, 8], [0, 8, 8]]), torch.tensor([0, 1, 6, 7]), torch.arange(2, 6)
    for queries, keys, expected in (
        (ends, ends, ([0, 2, 4, 4, 8, 8, 8], [0, 2, 4, 4, 8, 8, 8])),
        (middle, ends[:2], ([0, 1, 4, 4, 8, 8, 8], [0, 2, 2, 2, 4, 4, 4])),
        (ends[2:], middle, ([0, 0, 2, 2, 4, 4, 4], [0, 1, 4, 4, 8, 8, 8])),
    ):
        spans = find_spans(starts, queries, keys, is_causal=queries is keys)
        assert (spans.queries.tolist(), spans.keys.tolist()) == expected and spans.queries.dtype == torch.int32


class FlashKernels:
    """What FlashAttention-2 computes for stretches of queries and keys, by the definition; n: key heads, g: a group."""

    def _scores(self, query, key, ends, key_ends, is_causal, scale):
        rows, columns = (torch.arange(len(tensor)) for tensor in (query, key))
        of_rows, of_columns = torch.bucketize(rows, ends, right=True), torch.bucketize(columns, key_ends, right=True)
        seen = (of_rows[:, None] == of_columns) & ((rows[:, None] >= columns) | (not is_causal))
        scores = torch.einsum("qngw,knw->ngqk", query.unflatten(1, (KEY_HEADS, -1)), key) * scale
        return scores.masked_fill(~seen, -torch.inf)

    def _flash_attention_forward(self, query, key, value, *ends, scale):
        scores = self._scores(query, key, *ends[:2], ends[5], scale)
        sums = scores.logsumexp(-1)
        sums = sums.where(sums > -torch.inf, torch.inf)  # so that queries without keys have an output of 0
        output = torch.einsum("ngqk,knw->qngw", (scores - sums[..., None]).exp(), value)
        return output.flatten(1, 2), sums.flatten(0, 1), None, None, None

    def _flash_attention_backward(self, gradient, query, key, value, output, sums, *ends, scale):
        shares = (self._scores(query, key, *ends[:2], ends[5], scale) - sums.view(KEY_HEADS, 2, -1, 1)).exp()
        inner = (gradient * output).sum(-1).T.reshape(KEY_HEADS, 2, -1, 1)
        query, gradient = (tensor.unflatten(1, (KEY_HEADS, -1)) for tensor in (query, gradient))
        of_scores = shares * (torch.einsum("qngw,knw->ngqk", gradient, value) - inner) * scale
        of_query = torch.einsum("ngqk,knw->qngw", of_scores, key).flatten(1, 2)
        return of_query, *(
            torch.einsum("ngqk,qngw->knw", left, right) for left, right in ((of_scores, query), (shares, gradient))
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_flash_kernel_gets_the_documents_of_each_turn(size, monkeypatch):
    monkeypatch.setattr(ring_attention, "_is_flash", lambda query, bias: bias is None)
    monkeypatch.setattr(ring_attention, "aten", FlashKernels())
    check_ring(size, DOCUMENTS)


def test_sums_in_bf16_stay_close():
    check_ring(4, DOCUMENTS, dtype=torch.bfloat16, tolerance=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hides", ["mask", "spans", "later", None])
def test_the_kernels_of_gpus_take_what_they_are_given(dtype, hides):
    """Shapes and types alone, which torch checks without a GPU; tests/gpu checks what they compute."""
    with FakeTensorMode():
        shapes = (HEADS, 12), (KEY_HEADS, 12 if hides == "later" else 10)
        query, key = (torch.empty(BATCH, *shape, WIDTH, dtype=dtype, device="cuda") for shape in shapes)
        if hides == "mask":
            hides = torch.zeros(BATCH, 1, 12, 10, dtype=torch.bool, device="cuda")
        if hides == "spans":
            hides = Spans(*(torch.zeros(9, dtype=torch.int32, device="cuda") for _ in range(2)), False)
        output, sums = attend_block(query, key, key, hides, 0.25)
        assert (output.shape, sums.shape, sums.dtype) == (query.shape, query.shape[:3], torch.float32)
        result = AttentionResult(output, sums, output)
        gradients = differentiate_block(query, key, key, hides, 0.25, result)
        assert [each.shape for each in gradients] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize("size", [1, 4])
def test_sinks_are_a_key_without_a_value(size):
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=generator) for _ in range(4))
    sinks = torch.randn(HEADS, generator=generator)
    found = run_ring(size, [query, key, value], gradient, None, sinks)
    query, key, value, sinks = wholes = [each.double().requires_grad_() for each in (query, key, value, sinks)]
    scores = (query @ key.transpose(2, 3) * WIDTH**-0.5).masked_fill(PLACES[:, None] < PLACES, -torch.inf)
    shares = torch.cat([scores, sinks[:, None, None].expand(BATCH, -1, LENGTH, 1)], -1).softmax(-1)
    expected = shares[..., :-1] @ value
    expected = [expected, *torch.autograd.grad(expected, wholes, gradient.double())]
    for ours, right in zip(found, expected, strict=True):
        assert (ours - right).abs().max() <= 1e-5 * right.abs().max()


def test_merges_are_one_graph_where_the_run_compiles():
    """Inside a compiled layer too, to which the ring is one operation; blocks differ in length."""
    graphs, torch_backend = [], lambda graph, inputs: graphs.append(graph) or graph.forward
    ring, tensors = Ring(None, torch_backend), [torch.randn(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: ring(*args, 0.25, None) + 1, backend="eager", fullgraph=True)
    for length in (LENGTH, LENGTH // 2):
        parts = [tensor[:, :, :length] for tensor in tensors]
        torch.testing.assert_close(compiled(*parts), Ring()(*parts, 0.25, None) + 1)
    assert len(graphs) == 1
    check_ring(2, DOCUMENTS, backend="inductor")
