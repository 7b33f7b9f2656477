"""Liger's fused kernels for RMSNorm, rotary embeddings and gated MLPs, in layers that are not compiled.

They replace chains of elementwise operations, each a pass over memory (Hsu et al. 2024, arXiv:2410.10989). A compiled
layer has such kernels of its own. The package `liger-kernel` is optional; where it is installed, a test on the device
decides (`find_obstacle`).
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from echelon.ground.errors import first_line
from echelon.learn.model.router import has_experts
from echelon.learn.model.small_copy import randomize, shallow_copy, transformers_silenced

# Tokens of a sequence of the test. In long ones attention averages so much that wrong rotary embeddings hardly show.
_LENGTH = 64
_NUM_RUNS = 10


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("liger_kernel") is not None


def apply_liger(model: PreTrainedModel, device_type: str) -> Callable[[], None]:
    """Make the layers of a model, on meta or not, use Liger's kernels on devices of this type. Names stay.

    Liger replaces names in the module of `transformers` too. Classes get theirs back, so that other models, such as the
    small copies on the CPU, are as before; the rotary embedding, a function, is chosen by the device of its input.

    Returns:
        A function that undoes what affects other models.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    has_plain_mlp = not has_experts(model)
    _apply_liger_kernel_to_instance(
        model=model, rope=True, rms_norm=True, swiglu=has_plain_mlp, geglu=has_plain_mlp, layer_norm=False,
        cross_entropy=False, fused_linear_cross_entropy=False,
    )  # fmt: skip
    changed = {name: value for name, value in before.items() if vars(module)[name] is not value}
    for name, value in changed.items():
        kernel = vars(module)[name]
        setattr(module, name, value if isinstance(value, type) else _choose_by_device(kernel, value, device_type))
    return lambda: vars(module).update(changed)


def _choose_by_device(kernel: Callable[..., Any], plain: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    @functools.wraps(plain)
    def choose(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (kernel if tensor.device.type == device_type else plain)(tensor, *args, **kwargs)

    return choose


def find_obstacle(skeleton: PreTrainedModel, device: torch.device, dtype: torch.dtype, num_tokens: int) -> str | None:
    """Return why Liger's kernels are not to be used in a model, as the end of a sentence; None if nothing speaks
    against them.

    Runs one layer of each kind, in full width with random weights, forward and backward. The kernels' outputs and
    gradients must be about as close to those in fp32 as PyTorch's in this dtype are, and come in less time.

    Args:
        num_tokens: tokens of a microbatch, at least 64.
    """
    model_type = skeleton.config.model_type
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except Exception as error:  # its own dependencies may be missing, or of other versions
        return f"liger-kernel cannot be imported ({type(error).__name__}: {first_line(error)})"
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"Liger has no kernels for {model_type} models"
    try:
        with transformers_silenced(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return compare_layers(skeleton, device, dtype, num_tokens)
    except Exception as error:  # a kernel may fail on a device in any way
        return f"Liger's kernels fail here ({type(error).__name__}: {first_line(error)})"


def compare_layers(skeleton: PreTrainedModel, device: torch.device, dtype: torch.dtype, num_tokens: int) -> str | None:
    """Return why a layer with the kernels differs from one without, or is no faster; None if neither holds."""
    torch.manual_seed(0)
    model = _build_layers(skeleton, device, dtype)
    width = model.get_input_embeddings().weight.shape[1]
    shape = (max(1, num_tokens // _LENGTH), _LENGTH, width)
    inputs, direction = (torch.randn(shape, device=device) for _ in range(2))
    exact = _differentiate(model.float(), inputs.to(dtype).float(), direction)
    plain = _differentiate(model.to(dtype), inputs.to(dtype), direction)
    plain_seconds = _measure(model, inputs.to(dtype), direction)
    undo = apply_liger(model, device.type)
    try:
        fused = _differentiate(model, inputs.to(dtype), direction)
        fused_seconds = _measure(model, inputs.to(dtype), direction)
    finally:
        undo()
    for ours, theirs, reference in zip(fused, plain, exact, strict=True):
        error, allowed = _distance(ours, reference), 2 * _distance(theirs, reference) + torch.finfo(dtype).eps
        if not error <= allowed:
            return f"a layer's results with Liger's kernels are off by {error:.1%}, rounding explains {allowed:.1%}"
    if fused_seconds >= plain_seconds:
        return f"a layer takes {fused_seconds * 1e3:.2f} ms with Liger's kernels and {plain_seconds * 1e3:.2f} without"
    return None


def _build_layers(skeleton: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with one layer of each kind, with random weights in the dtype. Only vectors need gradients."""
    with torch.device(device):
        model = type(skeleton)._from_config(shallow_copy(skeleton.config), dtype=torch.float32)
    model.set_attn_implementation(skeleton.config._attn_implementation)
    randomize(model)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        parameter.requires_grad_(parameter.dim() < 2)
    built: PreTrainedModel = model.train().to(dtype)
    return built


def _differentiate(model: PreTrainedModel, inputs: Tensor, direction: Tensor) -> list[Tensor]:
    """Return the last hidden states, and the gradients of inputs, norms and biases."""
    inputs = inputs.clone().requires_grad_()
    states = model.base_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    vectors = [parameter for parameter in model.base_model.parameters() if parameter.requires_grad]
    total = (states.float() * direction).sum()
    gradients = torch.autograd.grad(total, [inputs, *vectors], allow_unused=True, materialize_grads=True)
    return [states.detach().float(), *(gradient.float() for gradient in gradients)]


def _distance(found: Tensor, expected: Tensor) -> float:
    smallest = torch.finfo(torch.float32).tiny  # both may be zero
    return float((found - expected).norm() / expected.norm().clamp(min=smallest))


def _measure(model: PreTrainedModel, inputs: Tensor, direction: Tensor) -> float:
    """Return the median of the seconds that a forward and backward pass takes; the first has been made."""
    seconds = []
    for _ in range(_NUM_RUNS):
        begin = time.perf_counter()
        results = _differentiate(model, inputs, direction)
        results[-1].sum().item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
