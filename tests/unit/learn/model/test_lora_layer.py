"""LoRA layers that add their adapter by one product, compared with PEFT's own layers."""

import copy
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaModel
from transformers.pytorch_utils import Conv1D

from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.lora_layer import AddingLinear, CopyingLinear, add_by_products
from echelon.learn.parallel.kept_activations import checkpoint_activations

ROWS, WIDTH, OUT = 6, 8, 10
NO_COUNT = nullcontext()


class LargePasses(TorchDispatchMode):
    """Notes the operations that read or write a tensor of the output's size once more, and additions in place."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name.removeprefix("aten::")
        if name in ("mul", "add", "add_", "addmm_", "clone", "copy_") and result.numel() == ROWS * OUT:
            self.found.append(name)
        return result


def build_layers(base, **settings):
    """A layer of PEFT with B other than 0, and the same as echelon runs it."""
    torch.manual_seed(0)
    theirs = nn.Sequential(base)
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["0"], **settings}
    inject_adapter_in_model(LoraConfig(fan_in_fan_out=isinstance(base, Conv1D), **settings), theirs)
    nn.init.normal_(theirs[0].lora_B["default"].weight)
    ours = copy.deepcopy(theirs)
    add_by_products(ours, keeps_products=False)
    return theirs, ours


def run(model, dtype):
    """The output, the gradients of the input and of the adapter, and the passes over memory."""
    torch.manual_seed(1)
    inputs = torch.randn(2, 3, WIDTH, requires_grad=True)
    gradient = torch.randn(2, 3, OUT)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16), LargePasses() as passes:
        output = model(inputs)
        output.backward(gradient.to(output.dtype))
    gradients = [each.grad for name, each in model.named_parameters() if "lora" in name]
    return [output, inputs.grad, *gradients], passes.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"lora_dropout": 0.5}, {"lora_alpha": 1}], ids=lambda each: str(each)
)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["Linear", "Conv1D"])
def test_outputs_and_gradients_are_those_of_peft_with_fewer_passes(is_transposed, settings, dtype):
    theirs, ours = build_layers(Conv1D(OUT, WIDTH) if is_transposed else nn.Linear(WIDTH, OUT), **settings)
    assert type(ours[0]) is AddingLinear
    expected, their_passes = run(theirs, dtype)
    found, our_passes = run(ours, dtype)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * other.norm()
    assert their_passes == ["mul", "add", "mul"], "scaled, added, and its gradient scaled"
    assert our_passes == ([] if is_transposed else ["addmm_"]), "what is added in place needs no other tensor"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["Linear", "Conv1D"])
def test_under_selective_checkpointing_the_kept_output_of_the_frozen_layer_does_not_change(is_transposed, dtype):
    theirs, ours = build_layers(Conv1D(OUT, WIDTH) if is_transposed else nn.Linear(WIDTH, OUT, bias=False))
    for layer in ours:
        layer.__class__ = CopyingLinear
    checkpoint_activations(list(ours), "selective")
    expected, _ = run(theirs, dtype)
    found, _ = run(ours, dtype)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * other.norm()


def test_a_disabled_or_merged_adapter_and_dora_run_as_in_peft():
    theirs, ours = build_layers(nn.Linear(WIDTH, OUT))
    inputs = torch.randn(ROWS, WIDTH)
    ours[0]._disable_adapters = theirs[0]._disable_adapters = True
    assert torch.equal(ours(inputs), theirs(inputs))
    ours[0]._disable_adapters = False
    added = ours(inputs)
    ours[0].merge()
    torch.testing.assert_close(ours(inputs), added)
    _, dora = build_layers(nn.Linear(WIDTH, OUT), use_dora=True)
    assert type(dora[0]) is Linear


class NarrowProducts(TorchDispatchMode):
    """Counts products by A, of one layer or several, and in a backward pass those by its transpose."""

    def __init__(self, is_forward):
        super().__init__()
        self.dimension, self.count = int(is_forward), 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten.mm.default:
            self.count += args[1].shape[self.dimension] in (3, 6, 9) and args[1].shape[1 - self.dimension] > 9
        return operation(*args, **(kwargs or {}))


def build_llamas(policy, targets="all-linear", **settings):
    """PEFT's and ours, of four layers: B other than 0, r = 3."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1}
    theirs = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=11))
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=6, target_modules=targets, **settings), theirs)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_("lora" in name)
        if "lora_B" in name:
            nn.init.normal_(parameter)
    ours = copy.deepcopy(theirs)
    add_by_products(ours, keeps_products=policy == "selective")
    checkpoint_activations(ours.layers, policy)
    return theirs, ours


def train(model, dtype=torch.float32, forward=NO_COUNT, backward=NO_COUNT):
    """The output and the gradients of the adapter, of a forward and a backward pass in these contexts."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        with forward:
            output = model(torch.arange(22).view(2, 11) % 11, use_cache=False).last_hidden_state
        with backward:
            (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"output": output.detach()} | gradients


def error(found, expected):
    """The largest relative error of the output and of any gradient."""
    assert found.keys() == expected.keys() and len(found) == 1 + 4 * 7 * 2
    return max((each - expected[name]).norm() / expected[name].norm() for name, each in found.items())


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_layers_with_the_same_input_read_it_in_one_product(policy):
    theirs, ours = build_llamas(policy)
    expected = train(theirs)
    counts = []
    for model in (theirs, ours):
        counts.append((NarrowProducts(is_forward=True), NarrowProducts(is_forward=False)))
        assert error(train(model, torch.float32, *counts[-1]), expected) <= 1e-5
    counts = [tuple(each.count for each in both) for both in counts]
    assert counts == [(4 * 7, 4 * 7 - 3), (4 * 4, 4 * 4 - 1)], "the first layer's input has no gradient"
    theirs_rounded, ours_rounded = (error(train(model, torch.bfloat16), expected) for model in (theirs, ours))
    assert ours_rounded <= 1.2 * theirs_rounded


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_compiled_layers_share_graphs_that_are_whole(policy):
    theirs, ours = build_llamas(policy)
    graphs = []
    apply_compile(ours.layers, lambda graph, inputs: graphs.append(graph) or graph.forward)
    assert error(train(ours), train(theirs)) <= 1e-5
    assert len(graphs) == 2, "one for the first layer, whose input has no gradient, and one for the others"
    torch.compiler.reset()


def test_masks_and_other_inputs_are_those_of_each_layer():
    theirs, ours = build_llamas("none", ["q_proj", "k_proj", "v_proj"], lora_dropout=0.5)
    assert all(layer.self_attn.q_proj.siblings is None for layer in ours.layers)
    theirs, ours = (model.layers[0].self_attn for model in build_llamas("none", ["q_proj", "k_proj", "v_proj"]))
    one, other = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    for name, inputs in [("q_proj", one), ("k_proj", other), ("q_proj", one), ("v_proj", other), ("v_proj", one)]:
        torch.testing.assert_close(getattr(ours, name)(inputs), getattr(theirs, name)(inputs))
