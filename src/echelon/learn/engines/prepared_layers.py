"""A model on meta as an engine trains it: its kernels, its adapter, its dtypes; and where its buffers are."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from echelon.learn.model.adapters import apply_adapter
from echelon.learn.model.float8 import apply_float8
from echelon.learn.model.liger import apply_liger
from echelon.learn.model.parts import find_layers
from echelon.learn.model.quantization import Quantized
from echelon.planner.plan import ParallelPlan, Precision
from echelon.recipe.document import Recipe


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
