"""LoRA layers that add their adapter by one product, compared with PEFT's own layers."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from echelon.learn.model.lora_layer import AddingLinear, CopyingLinear, add_by_products
from echelon.learn.parallel.kept_activations import checkpoint_activations

ROWS, WIDTH, OUT = 6, 8, 10


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
