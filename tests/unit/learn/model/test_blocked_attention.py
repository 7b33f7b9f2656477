"""Attention in blocks computes what torch's attention computes, with gradients, masks, and under every wrapper."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from echelon.learn.model import attention
from echelon.learn.model.attention import PLAIN_CAUSAL
from echelon.learn.model.blocked_attention import blocked_attention
from echelon.learn.model.compilation import apply_compile
from echelon.learn.parallel.kept_activations import checkpoint_activations
from tests.families import random_batch, small_model

WIDTH = 16


def draw(length, heads, groups, dtype):
    """Queries, keys and values in the layout of a model's projections."""
    torch.manual_seed(length)
    sizes = (heads * groups, heads, heads)
    return [torch.randn(2, length, size, WIDTH).mul(2).to(dtype).transpose(1, 2).requires_grad_() for size in sizes]


def of_torch(query, key, value, mask=None):
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return output.transpose(1, 2)


def in_blocks(query, key, value, mask=None):
    return blocked_attention(query, key, value, WIDTH**-0.5, mask)


def results(compute, inputs, mask=None):
    """The output, and the gradients of a function of it."""
    output = compute(*inputs, mask)
    return [output.detach(), *torch.autograd.grad(output.double().pow(2).sum(), inputs)]


def errors(compute, inputs, mask=None):
    """The distances from the results in fp64, relative to their size."""
    exact = results(of_torch, [each.detach().double().requires_grad_() for each in inputs], mask)
    found = results(compute, inputs, mask)
    return [((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(found, exact, strict=True)]


def documents_mask(length, *ends):
    """[1, 1, length, length]: a position attends to itself and earlier ones of its document."""
    document = torch.bucketize(torch.arange(length), torch.tensor(ends), right=True)
    return ((document[:, None] == document) & torch.ones(length, length).tril().bool())[None, None]


@pytest.mark.parametrize("length", [5, 127, 128, 129, 300, 1030])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (2, 3)])
def test_outputs_and_gradients_are_those_of_torch(length, heads, groups):
    inputs = draw(length, heads, groups, torch.float32)
    assert max(errors(in_blocks, inputs)) < 5e-6
    assert max(errors(in_blocks, inputs, documents_mask(length, length // 3, length // 2))) < 5e-6


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (2, 3)])
def test_a_compiler_sees_into_it_for_constant_short_lengths(heads, groups):
    """Its graph has the products; a second length makes it one operation, which further lengths share."""
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(in_blocks, backend=keep, fullgraph=True)
    for length in (300, 200, 130, 260):
        inputs = draw(length, heads, groups, torch.float32)
        assert max(errors(compiled, inputs)) < 5e-6
    operation = [any("echelon.blocked_attention" in name for name in graph) for graph in graphs]
    assert operation == [False, True]
    mask = documents_mask(300, 100, 150)
    assert (
        max(errors(torch.compile(in_blocks, backend="aot_eager"), draw(300, heads, groups, torch.float32), mask)) < 5e-6
    )
    torch._dynamo.reset()
    torch.compile(in_blocks, backend=keep, fullgraph=True)(*draw(2048, 1, 1, torch.bfloat16))
    assert any("echelon.blocked_attention" in name for name in graphs[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [5, 300])
def test_a_compiler_is_told_the_layouts_of_the_operations(dtype, length):
    """What it plans with are tensors without numbers; inductor stops where a real one has other strides."""
    inputs = [each.detach() for each in draw(length, 2, 3, dtype)]
    operations = torch.ops.echelon.blocked_attention, torch.ops.echelon.blocked_attention_backward
    output, largest = operations[0](*inputs, WIDTH**-0.5, None)
    for mask in (None, documents_mask(length, length // 2)):
        torch.library.opcheck(operations[0], (*inputs, WIDTH**-0.5, mask), test_utils="test_faketensor")
        gradient = torch.randn_like(output)
        torch.library.opcheck(
            operations[1], (gradient, *inputs, largest, WIDTH**-0.5, mask), test_utils="test_faketensor"
        )


@pytest.mark.slow
def test_compiled_for_many_lengths_it_computes_the_same():
    torch._dynamo.reset()
    compiled = torch.compile(in_blocks, fullgraph=True, dynamic=True)
    with inductor.patch(force_disable_caches=True):  # its keys do not change with what an operation says of its results
        for length in (200, 130):
            assert max(errors(compiled, draw(length, 2, 3, torch.float32))) < 5e-6


@pytest.mark.parametrize(("length", "is_split"), [(300, True), (2048, False)])
def test_compiled_fp32_is_split_into_products_where_a_compiler_fuses_them(length, is_split):
    """Run operation by operation, and for long sequences, torch's own kernel is faster in fp32."""
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def attend(query, key, value):
        return ALL_ATTENTION_FUNCTIONS[PLAIN_CAUSAL](torch.nn.Module(), query, key, value, None)[0]

    torch._dynamo.reset()
    inputs = [each.detach() for each in draw(length, 1, 1, torch.float32)]
    found = torch.compile(attend, backend=keep, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, attend(*inputs), rtol=1e-5, atol=1e-6)
    assert any("scaled_dot_product" in name for name in graphs[0]) is not is_split


def test_in_bf16_rounding_is_like_that_of_torch():
    """And less than half of that of scores rounded before their largest is subtracted, as in eager attention."""
    inputs = draw(300, 4, 1, torch.bfloat16)
    ours, theirs = errors(in_blocks, inputs), errors(of_torch, inputs)
    assert all(own < 3 * other for own, other in zip(ours, theirs, strict=True)), (ours, theirs)

    def eager(query, key, value, mask):
        scores = query @ key.transpose(2, 3) * WIDTH**-0.5
        scores = scores.masked_fill(torch.ones(300, 300).triu(1).bool(), torch.finfo(scores.dtype).min)
        return (scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value).transpose(1, 2)

    assert sum(errors(eager, inputs)) > 2 * sum(ours)


def test_later_positions_and_other_documents_change_no_bit():
    inputs = draw(300, 2, 2, torch.bfloat16)
    changed = [each.detach().clone() for each in inputs]
    for each in changed:
        each[:, :, 150:] = 50 * torch.randn_like(each[:, :, 150:])
    assert torch.equal(in_blocks(*inputs)[:, :150], in_blocks(*changed)[:, :150])
    mask = documents_mask(300, 150, 200)
    changed = [each.detach().clone() for each in inputs]
    for each in changed:
        each[:, :, :150] = 50 * torch.randn_like(each[:, :, :150])
    assert torch.equal(in_blocks(*inputs, mask)[:, 150:], in_blocks(*changed, mask)[:, 150:])


def run_model(model, input_ids, labels, dtype):
    """Loss and gradients under autocast."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(input_ids=input_ids, use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten().clamp(min=0))
    loss.backward()
    return loss.item(), torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *itertools.product(("llama", "gpt2"), ("eager", "selective", "full")),
        *(pytest.param(family, "compiled", marks=pytest.mark.slow) for family in ("llama", "gpt2")),
    ],
)
def test_a_model_in_bf16_trains_with_it(family, change, monkeypatch):
    """Its gradients are as close to those in fp32 as with torch's attention; fp32 takes torch's unless compiled."""
    input_ids, labels = random_batch(length=200)
    model = small_model(family, max_position_embeddings=256)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert not getattr(model.config, name, 0)
    _, exact = run_model(model, input_ids, labels, torch.float32)
    _, usual = run_model(model, input_ids, labels, torch.bfloat16)
    layers = model.model.layers if family == "llama" else model.transformer.h
    if change == "compiled":
        apply_compile(layers, "aot_eager")
    elif change != "eager":
        checkpoint_activations(layers, change)
    model.set_attn_implementation(PLAIN_CAUSAL)
    calls = []
    monkeypatch.setattr(
        attention, "blocked_attention", lambda *args: calls.append(args[0].dtype) or blocked_attention(*args)
    )
    _, found = run_model(model, input_ids, labels, torch.bfloat16)
    assert set(calls) == {torch.bfloat16}
    assert (found - exact).norm() < 1.5 * (usual - exact).norm()
    calls.clear()
    _, found = run_model(model, input_ids, labels, torch.float32)
    if change == "compiled":
        assert set(calls) == {torch.float32}
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)
    else:
        assert torch.equal(found, exact) and not calls


@pytest.mark.slow  # a machine's matrix products may allocate memory of their own
@pytest.mark.parametrize(("sequences", "heads", "groups"), [(2, 4, 1), (1, 1, 8)])
def test_the_backward_pass_holds_three_blocks_of_scores(sequences, heads, groups):
    """256 queries by all keys, of 8 heads in all: probabilities, their gradient, and that of scores.

    Inputs' gradients and copies take less than another. Blocks that stayed in the next turn would be two more, and a
    product of transposed probabilities copies them for a single head of keys.
    """
    length = 2048
    query, key, value = (each[:sequences] for each in draw(length, heads, groups, torch.bfloat16))
    output = in_blocks(query, key, value).float().sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        output.backward()
    held = peak = 0
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert 3 <= peak / (8 * 256 * length * 2) < 4
