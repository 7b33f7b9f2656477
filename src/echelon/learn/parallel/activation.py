"""Activation checkpointing of decoder layers, in place and without renaming a parameter."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from echelon.learn.model import blocked_attention, flex_attention, varlen_attention  # noqa: F401  (define operations that are kept)
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
}


def apply_activation_checkpointing(layers: Sequence[nn.Module] | nn.ModuleList, policy: str, every: int = 1) -> None:
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
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _selective_policy)
    for layer in layers[every - 1 :: every]:
        kept = dict(options)
        if any(find_dispatches(layer)):
            kept["context_fn"] = functools.partial(keep_routes, options.get("context_fn", noop_context_fn))
        layer.forward = functools.partial(checkpoint, layer.forward, **kept)


def _selective_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
