"""Decoder layers as a run prepares them, whose forward and backward passes are compiled for an H100 without one.

What torch asks of the device is answered by `fake_gpu`; which kernel attention takes is torch's own choice.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention.flex_attention import create_block_mask
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

import echelon.learn.model.attention  # noqa: F401 - registers the kernels by name
from echelon.learn.distributed.peers import GroupPeers, give_number
from echelon.learn.engines.prepared_layers import place_buffers, prepare_layers
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.context_attention import CONTEXT, Context
from echelon.learn.model.flex_attention import FLEX
from echelon.learn.model.parts import find_layers
from echelon.learn.model.varlen_attention import VARLEN
from echelon.learn.parallel import checkpoint_and_compile
from echelon.learn.parallel.expert import ExpertDispatch, FixedCapacity, find_experts
from echelon.planner.plan import ParallelPlan, Precision
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import AdapterConfig
from echelon.recipe.training import CpMethod
from tests.codegen.compiler import backend

ROWS, LENGTH, HIDDEN, HEADS, WIDTH, DOCUMENTS = 8, 2048, 2048, 16, 128, 64
FIELDS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": HIDDEN, "intermediate_size": 5504, "num_attention_heads": HEADS,
    "num_hidden_layers": 1, "max_position_embeddings": LENGTH,
}  # fmt: skip


def build_layer(
    model_type: str = "llama",
    key_heads: int = HEADS,
    attention: str = VARLEN,
    method: str = "full",
    uses_liger: bool = False,
    **precision: bool,
) -> nn.Module:
    """A layer with fake weights on the GPU: all in bf16, or frozen ones in bf16 and an adapter in fp32."""
    fields = {"model_type": model_type, "num_key_value_heads": key_heads, "head_dim": WIDTH, **FIELDS}
    recipe = Recipe.model_construct(adapter=AdapterConfig(method=method))
    param = "bfloat16" if method == "full" else "float32"
    plan = ParallelPlan("ddp", precision=Precision(param=param, compute="bfloat16", **precision))
    with unset_fake_temporarily():  # PEFT copies parameters in ways that fake ones do not know
        skeleton = build_on_meta(load_config(fields))
        skeleton.set_attn_implementation(attention)
        (layer,) = find_layers(prepare_layers(skeleton, recipe, plan, "cuda", uses_liger, ()))
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = torch.empty_like(parameter, device="cuda")
            setattr(module, name, nn.Parameter(weight, requires_grad=parameter.requires_grad))
    place_buffers(layer, torch.device("cuda"))
    return layer.train()


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A fake tensor on the GPU."""
    return torch.empty(shape, device="cuda", dtype=dtype)


def run_layer(layer: nn.Module, mask: Any = None, **inputs: Any) -> None:
    """One forward and backward pass, under autocast where an adapter is in fp32."""
    mixed = len({each.dtype for each in layer.parameters() if each.is_floating_point()}) > 1
    hidden, rotations = new(ROWS, LENGTH, HIDDEN).requires_grad_(), (new(ROWS, LENGTH, WIDTH), new(ROWS, LENGTH, WIDTH))
    with torch.autocast("cuda", torch.bfloat16) if mixed else nullcontext():
        result = layer(hidden, position_embeddings=rotations, attention_mask=mask, **inputs)
    result.sum().backward()


def _documents() -> dict[str, Any]:
    return {"cu_seq_lens_q": new(DOCUMENTS + 1, dtype=torch.int32), "max_length_q": LENGTH}


def compile_layer(packed: bool = True, kept: str = "none", cp: CpMethod | None = None, **kind: Any) -> None:
    """A layer of packed documents, or of one text a row; `kept` by checkpointing; with `cp`, on one of two ranks."""
    layer = build_layer(**kind, **({} if cp is None else {"attention": CONTEXT}))
    for module in layer.modules() if cp is not None else ():
        module.context = Context(_Half(), cp, "sdpa")
    found = find_experts(layer).values()
    for experts in found:
        experts.forward = ExpertDispatch(experts, FixedCapacity(None), len(next(experts.parameters())))
    plan = ParallelPlan("ddp", compile=True, activation_checkpointing=kept)
    checkpoint_and_compile([layer], plan, backend(), is_divided=bool(found))
    run_layer(layer, **(_documents() if packed else {}))


class _Half(GroupPeers):
    """The first of two ranks, which send nothing, as nothing runs."""

    def __init__(self) -> None:
        self.rank, self.size, self._number = 0, 2, give_number(self)


def compile_liger() -> None:
    """A layer with an adapter and Liger's kernels, which are for layers that are not compiled."""
    run_layer(build_layer(method="lora", uses_liger=True), **_documents())


def compile_capped() -> None:
    """A layer of Gemma 2, whose soft-capped attention is one kernel, with the cap and the mask in it."""
    layer = build_layer("gemma2", 4, FLEX)
    visible = and_masks(packed_sequence_mask_function(new(ROWS, LENGTH, dtype=torch.int32)), causal_mask_function)
    mask = create_block_mask(visible, ROWS, None, LENGTH, LENGTH, device="cuda")
    apply_compile([layer], backend())
    run_layer(layer, mask)
