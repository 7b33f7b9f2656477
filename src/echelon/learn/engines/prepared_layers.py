"""A model on meta as an engine trains it: its adapter, its dtypes, and kernels chosen by tests on all devices."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.objects import broadcast_object, gather_objects
from echelon.learn.model.adapters import apply_adapter
from echelon.learn.model.flex_attention import FLEX, get_softcap, has_flex
from echelon.learn.model.liger import apply_liger, find_obstacle, is_installed
from echelon.learn.model.parts import find_layers
from echelon.learn.model.quantization import Quantized, apply_float8
from echelon.learn.model.traits import Traits, apply_plain_causal, computes_as_eager, find_traits
from echelon.learn.model.varlen_attention import VARLEN, activate_flash_3, deactivate_flash_3, has_dropout, has_kernel
from echelon.planner.plan import ParallelPlan, Precision
from echelon.planner.rates import compiles_checkpoints
from echelon.recipe.document import Recipe


def prepare_layers(
    skeleton: PreTrainedModel,
    recipe: Recipe,
    plan: ParallelPlan,
    device_type: str,
    uses_liger: bool,
    new_token_ids: Sequence[int],
) -> PreTrainedModel:
    """Copy a model on meta, with the kernels, the adapter and the dtypes that it trains with."""
    model = copy.deepcopy(skeleton)
    if uses_liger:
        apply_liger(model, device_type)
    if recipe.adapter.is_adapter:
        apply_adapter(model, recipe.adapter, new_token_ids)
        if plan.tp == 1:
            from echelon.learn.model.lora_layer import add_by_products

            add_by_products(model, plan.activation_checkpointing == "selective")
    if plan.precision.float8:
        apply_float8(model, device_type != "cuda", plan.precision.float8_scaling, plan.gathers_float8)
    if plan.mlp_tiles > 1:
        from echelon.learn.model.mlp_tiles import apply_tiles, find_mlps

        apply_tiles(find_layers(model), find_mlps(skeleton), plan.mlp_tiles)
    frozen_dtype = plan.precision.compute if recipe.adapter.is_adapter else plan.precision.param
    store_parameters(model, replace(plan.precision, compute=frozen_dtype))
    return model


def store_parameters(model: nn.Module, precision: Precision) -> None:
    """Set the plan's dtypes on the parameters of a model on meta; frozen ones use the compute dtype.

    Buffers are unchanged: rotary tables need fp32.
    """
    for module in model.modules():
        if isinstance(module, Quantized):
            module.store_as(getattr(torch, precision.compute))
    for parameter in model.parameters():
        dtype = precision.param if parameter.requires_grad else precision.compute
        parameter.data = parameter.data.to(getattr(torch, dtype))


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Allocate buffers on the device of the forward pass: offloading keeps only parameters on the host."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != device.type:
                setattr(module, name, torch.empty_like(buffer, device=device))


# Tokens of the test of Liger's kernels: enough that a kernel takes longer than its launch.
_MOST_TOKENS = 4096
LIGER = "kernels: Liger's for norms, rotary embeddings and MLPs, which are equal up to rounding and faster here"
_EAGER = "attention: eager, because this GPU's flex attention does not compute the model's soft-capped attention"
_EAGER_LAYERS = (
    "attention: eager, because flex attention is wrong in layers that are both compiled and checkpointed; it needs "
    "less memory, and train.compile=false or train.activation_checkpointing=none"
)
_FLASH_3 = "attention: FlashAttention-3 where documents or windows bound it"
_FLEX = "attention: flex attention, whose kernels cap the scores"


def choose_attention_kernel(
    skeleton: PreTrainedModel, recipe: Recipe, plan: ParallelPlan, meshes: Meshes, device: torch.device
) -> tuple[Traits, str | None]:
    """Choose the attention of a model on meta, unless the recipe names one, and set it. Collective.

    `sdpa` loses cuDNN's kernels in this process if the model passes masks or has dropout in its attention. With a mask,
    releases of cuDNN before 9.26 return NaN gradients for some lengths: github.com/pytorch/pytorch/issues/196678.

    Returns:
        The model's traits, and a line for the user about another kernel than the usual one.
    """
    traits, line = _choose(skeleton, recipe, plan, meshes, device)
    if skeleton.config._attn_implementation != VARLEN or has_dropout(skeleton.config):
        torch.backends.cuda.enable_cudnn_sdp(False)
    return traits, line


def _choose(
    skeleton: PreTrainedModel, recipe: Recipe, plan: ParallelPlan, meshes: Meshes, device: torch.device
) -> tuple[Traits, str | None]:
    length, dtype = recipe.data.sequence_len, getattr(torch, plan.precision.compute)
    # Queries of a part of each sequence need other masks than those that the kernels below take.
    is_free = recipe.model.attn_implementation is None and plan.cp_method in (None, "ulysses")
    default = skeleton.config._attn_implementation if is_free else None
    if default == "sdpa" and _agree(has_kernel(device, dtype, skeleton.config), meshes):
        skeleton.set_attn_implementation(VARLEN)
        traits = _agree_on_traits(skeleton, length, meshes)
        if traits.mask == "lengths" and traits.skips_mask:
            has_flash_3 = not recipe.train.deterministic and activate_flash_3(device, dtype, skeleton.config)
            if _agree(has_flash_3, meshes):
                return traits, _FLASH_3
            deactivate_flash_3()
            return traits, None
        skeleton.set_attn_implementation(default)
    if default == "eager" and device.type == "cuda" and get_softcap(skeleton.config) is not None:
        return _choose_flex(skeleton, plan, length, meshes, device)
    return _keep(skeleton, length, meshes), None


def _choose_flex(
    skeleton: PreTrainedModel, plan: ParallelPlan, length: int, meshes: Meshes, device: torch.device
) -> tuple[Traits, str]:
    """Have a soft-capped model use flex attention where that works, else eager attention. Collective."""
    if compiles_checkpoints(plan):
        return _keep(skeleton, length, meshes), _EAGER_LAYERS
    if _agree(has_flex(device, getattr(torch, plan.precision.compute), skeleton.config), meshes):
        skeleton.set_attn_implementation(FLEX)
        traits = _agree_on_traits(skeleton, length, meshes)
        if traits.mask is not None and _agree(computes_as_eager(skeleton, FLEX, length), meshes):
            return traits, _FLEX
        skeleton.set_attn_implementation("eager")
    return _keep(skeleton, length, meshes), _EAGER


def _keep(skeleton: PreTrainedModel, length: int, meshes: Meshes) -> Traits:
    """Leave the attention of a model as it is, without a mask where it needs none. Collective."""
    traits = _agree_on_traits(skeleton, length, meshes)
    apply_plain_causal(skeleton, traits)
    return traits


def choose_liger(
    skeleton: PreTrainedModel, recipe: Recipe, plan: ParallelPlan, meshes: Meshes, device: torch.device
) -> tuple[bool, str | None]:
    """Choose whether the layers of a model get Liger's kernels, which they do not yet. Collective.

    They may be used for adapters on GPUs in half precision, in layers that are neither compiled nor divided, if the
    package is installed: with frozen weights, elementwise operations are a large part of a step.

    Returns:
        Whether to call `apply_liger`, and a line for the user if there is a choice.
    """
    is_eager = recipe.adapter.is_adapter and not plan.compile and not recipe.train.deterministic and plan.tp == 1
    is_half = device.type == "cuda" and plan.precision.compute != "float32"
    if not _agree(is_eager and is_half and is_installed(), meshes):
        return False, None
    num_tokens = min(plan.micro_batch_size * recipe.data.sequence_len, _MOST_TOKENS)
    here = find_obstacle(skeleton, device, getattr(torch, plan.precision.compute), num_tokens)
    why = next((obstacle for obstacle in gather_objects(here, meshes.everyone) if obstacle is not None), None)
    return why is None, LIGER if why is None else f"kernels: PyTorch's, because {why}"


def _agree_on_traits(skeleton: PreTrainedModel, sequence_len: int, meshes: Meshes) -> Traits:
    """Return the traits that rank 0 finds, so that the machines of all ranks compute the same. Collective."""
    found = find_traits(skeleton, sequence_len) if dist.get_rank(meshes.everyone) == 0 else None
    traits = broadcast_object(found, meshes.everyone)
    assert traits is not None
    return traits


def _agree(here: bool, meshes: Meshes) -> bool:
    """Whether all ranks say yes. Collective."""
    return all(gather_objects(here, meshes.everyone))
