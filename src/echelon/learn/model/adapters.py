"""Adapters: low-rank matrices in addition to frozen weights, in the layers and file format of PEFT.

LoRA: Hu et al. 2021 (arXiv:2106.09685); rank-stabilised: Kalajdzievski 2023 (arXiv:2312.03732); DoRA: Liu et al. 2024
(arXiv:2402.09353). PEFT injects its layers in place, so names are those of `transformers` with added components, which
`plain_name` removes.

PiSSA initializes an adapter with the principal components of each frozen weight, which keeps the remainder: Meng et al.
2024 (arXiv:2404.02948). With W = U S V', A = sqrt(S_r / scale) V_r' and B = U_r sqrt(S_r / scale), and W - scale B A is
frozen. The initial A and B are not stored: they are recomputed from the weights a run starts with.
"""

import copy
import difflib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from echelon.ground.errors import ConfigError
from echelon.ground.quiet_imports import import_bitsandbytes
from echelon.learn.model.parts import find_layers, find_score_head
from echelon.learn.model.quantization import (
    IN_4_BITS,
    QuantizedExperts,
    QuantizedLinear,
    quantize_experts,
    quantize_linears,
)
from echelon.learn.model.seeds import derive_seed
from echelon.learn.model.sharding import local_part, whole, write_part
from echelon.planner.adapter_plan import ROW_MULTIPLE, check_ranks, check_rows, select_experts
from echelon.planner.experts import find_expert_weights, find_unadaptable

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe
    from echelon.recipe.inputs import AdapterConfig


ADAPTER = "default"
_INSERTED = ("token_adapter", "base_layer", IN_4_BITS)
_ADDED = (
    ".lora_A.", ".lora_B.", ".lora_magnitude_vector.", ".trainable_tokens_delta.", ".trainable_tokens_original.",
    ".weight_code", ".scale_code",
)  # fmt: skip

PrincipalParts = dict[str, tuple[Tensor, Tensor]]
"""The initial (A, B) of each adapted layer by its name: full tensors on the CPU."""


def plain_name(name: str) -> str | None:
    """Return the name of a parameter or buffer in the model without the adapter; None if the adapter added it."""
    if any(part in name for part in _ADDED):
        return None
    return ".".join(part for part in name.split(".") if part not in _INSERTED)


def apply_adapter(model: Any, adapter: "AdapterConfig", new_token_ids: Sequence[int] = ()) -> None:
    """Freeze a model on meta and inject an adapter, in place; with `qlora` its linear layers are quantised to 4 bits.

    Args:
        new_token_ids: rows of the embedding, and of an untied head, that are trained in addition to the adapter.
    """
    import_bitsandbytes()
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    saved = {id(parameter) for module in find_saved(model, adapter).values() for parameter in module.parameters()}
    config = build_peft_config(model, adapter, new_token_ids)
    if adapter.method == "qlora":
        quantize_linears(find_layers(model), adapter)
        if adapter.quantize_experts:
            quantize_experts(model, find_layers(model), adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied weights and the meta device, both intended
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            # PEFT would cast a layer's input to A's dtype, fp32, and autocast would cast it again and keep the result
            # for the backward pass: one copy for each layer that shares the input. DoRA computes norms in that dtype.
            module.cast_input_dtype_enabled = adapter.method == "dora"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(plain_name(name) is None or id(parameter) in saved)


def build_peft_config(model: Any, adapter: "AdapterConfig", new_token_ids: Sequence[int] = ()) -> Any:
    """Build PEFT's LoraConfig of an adapter, with the names of its target layers and expert weights."""
    from peft import LoraConfig

    targets = find_targets(model, adapter)
    token_indices = None
    if new_token_ids:
        whole = {name.rpartition(".")[2] for name in find_saved(model, adapter)}
        token_indices = {name: list(new_token_ids) for name in _vocabulary_modules(model) if name not in whole}
    return LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=sorted({name.rpartition(".")[2] for name in targets}),
        target_parameters=sorted({name for name, _ in find_target_parameters(model, adapter)}) or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in targets.values()),
        use_rslora=adapter.rslora,
        use_dora=adapter.method == "dora",
        trainable_token_indices=token_indices or None,
        task_type="SEQ_CLS" if find_score_head(model) is not None else "CAUSAL_LM",
    )


def find_saved(model: Any, adapter: "AdapterConfig") -> dict[str, nn.Module]:
    """Return the modules that are trained in full, by name; of tied modules both.

    They are those of `modules_to_save`, and the head of a model that scores texts, which may be new.

    They are trained in place, without the frozen copy that PEFT's `ModulesToSaveWrapper` keeps. `model` has no adapter
    yet.

    Raises:
        ConfigError: a name of `modules_to_save` does not match a leaf module with weights.
    """
    leaves = {name: module for name, module in model.named_modules() if _has_weights_alone(module)}
    ends = sorted({name.rpartition(".")[2] for name in leaves})
    for target in adapter.modules_to_save:
        if target not in ends:
            hint = _suggest(target, ends)
            raise ConfigError(f"adapter.modules_to_save: the model has no module with weights named {target!r}; {hint}")
    head = find_score_head(model)
    saved = {
        name: module
        for name, module in leaves.items()
        if name.rpartition(".")[2] in adapter.modules_to_save or module is head
    }
    weights = {id(parameter) for module in saved.values() for parameter in module.parameters()}
    return {
        name: module for name, module in leaves.items() if any(id(weight) in weights for weight in module.parameters())
    }


def _has_weights_alone(module: nn.Module) -> bool:
    """Whether a module has weights and no submodules."""
    return bool(list(module.parameters(recurse=False))) and not list(module.children())


def _vocabulary_modules(model: Any) -> list[str]:
    """Return the last name component of the embedding, and of the head unless its weight is tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)].rpartition(".")[2] for module in modules]


def find_targets(model: nn.Module, adapter: "AdapterConfig") -> dict[str, Any]:
    """Return the linear layers that get an adapter, by name. `model` has no adapter yet.

    Raises:
        ConfigError: a name of `target_modules` does not match any linear layer, or only layers that cannot have an
            adapter (`find_unadaptable`).
    """
    linear, left_out = _find_linears(model)
    if adapter.target_modules == "all-linear":
        inside = {id(module) for layer in find_layers(model) for module in layer.modules()}
        inside -= {id(module) for module in find_saved(model, adapter).values()}
        return {name: module for name, module in linear.items() if id(module) in inside}
    ends = sorted({name.rpartition(".")[2] for name in linear})
    for target in adapter.target_modules:
        if target not in ends:
            raise ConfigError(f"adapter.target_modules: {_explain_missing(model, target, ends, left_out)}")
    return {name: module for name, module in linear.items() if name.rpartition(".")[2] in adapter.target_modules}


def _find_linears(model: nn.Module) -> tuple[dict[str, Any], set[str]]:
    """Return the linear layers that can have an adapter, by name, and the names of those that cannot."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    left_out = find_unadaptable(model, linear) if _find_experts(model) else set()
    return {name: module for name, module in linear.items() if name not in left_out}, left_out


def _explain_missing(model: nn.Module, wanted: str, ends: Sequence[str], left_out: set[str]) -> str:
    if any(name.endswith(f".{wanted}") for name in left_out):
        return (
            f"{wanted} of {type(model).__name__} cannot have an adapter: it is a router, or PEFT takes this name to "
            f"mean the experts as it loads an adapter; choose from {', '.join(ends)}."
        )
    return f"the model has no linear layer named {wanted!r}; {_suggest(wanted, [*ends, 'all-linear'])}"


def _find_experts(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the expert weights of a mixture, each with its name in its decoder layer."""
    return [item for layer in find_layers(model) for item in find_expert_weights(model, layer).items()]


def find_target_parameters(model: nn.Module, adapter: "AdapterConfig") -> list[tuple[str, Tensor]]:
    """Return the expert weights that get an adapter, each with its name in its decoder layer.

    Raises:
        ConfigError: a name of `target_parameters` does not match any.
    """
    weights = _find_experts(model)
    selected = select_experts(adapter.target_parameters, [name for name, _ in weights])
    return [(name, weight) for name, weight in weights if name in selected]


def _suggest(wanted: str, names: Sequence[str]) -> str:
    """Suggest the closest name, or list all names."""
    near = difflib.get_close_matches(wanted, names, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}."


def check_adapter(model: nn.Module, adapter: "AdapterConfig") -> None:
    """Refuse adapter settings that the model does not support. `model` is on meta and has no adapter yet.

    Raises:
        ConfigError: the message names the key and a valid value.
    """
    find_saved(model, adapter)
    targets = find_targets(model, adapter)
    if not targets and adapter.target_modules:
        raise ConfigError(
            f"adapter.method={adapter.method}: the decoder layers of {type(model).__name__} have no linear layers for "
            "an adapter; use adapter.method=full."
        )
    if adapter.method == "qlora":
        linear = [module for layer in find_layers(model) for module in layer.modules() if type(module) is nn.Linear]
        check_rows(type(model).__name__, [module.in_features for module in linear])
        if adapter.quantize_experts:
            _check_quantizable_experts(model)
    experts = dict(find_target_parameters(model, adapter))
    ranks = {name: min(module.weight.shape) for name, module in targets.items()}
    ranks |= {name: min(weight.shape[1:]) for name, weight in experts.items()}
    check_ranks(adapter, ranks)


def _check_quantizable_experts(model: nn.Module) -> None:
    experts = [weight for _, weight in _find_experts(model)]
    odd = [weight for weight in experts if weight.shape[-1] % ROW_MULTIPLE]
    if not experts or odd:
        what = f"expert weights with rows of {odd[0].shape[-1]}" if odd else "no expert weights"
        raise ConfigError(
            f"adapter.quantize_experts=true: the decoder layers of {type(model).__name__} have {what}, and 4-bit "
            f"quantisation requires rows of a multiple of {ROW_MULTIPLE}; remove adapter.quantize_experts."
        )


@torch.no_grad()
def initialize_adapter(
    model: nn.Module, adapter: "AdapterConfig", seed: int, frozen_dtype: torch.dtype | None = None
) -> PrincipalParts:
    """Initialise an adapter: the same values on any number of ranks and under any strategy. Collective.

    The model's weights must be loaded. A is Kaiming-uniform with a = sqrt 5, as in PEFT, from a generator per layer; B
    is zero, so the adapter initially adds nothing; a DoRA magnitude is the norm of the frozen weight's row.

    Args:
        frozen_dtype: dtype of the frozen weights when the adapter was trained; None for their current dtype.

    Returns:
        The initial values of a PiSSA adapter; empty for any other.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            _initialize_lora(module, derive_seed(seed, f"{name}.lora_A"))
        elif isinstance(module, TrainableTokensLayer) and module.tied_adapter is None:
            rows = whole(module.base_layer.weight)[module.token_indices[ADAPTER]]
            write_part(module.trainable_tokens_delta[ADAPTER], rows)
            write_part(module.trainable_tokens_original[ADAPTER], rows)
    return take_principal_parts(model, frozen_dtype) if adapter.init == "pissa" else {}


def _initialize_lora(layer: Any, seed: int) -> None:
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    bound = 1 / math.sqrt(a.shape[1])
    write_part(a, torch.empty(a.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed)))
    local_part(b).zero_()
    if ADAPTER in layer.lora_magnitude_vector:
        weight = whole(layer.get_base_layer().weight).float()
        norms = torch.linalg.norm(weight, dim=0 if layer.fan_in_fan_out else 1)
        write_part(layer.lora_magnitude_vector[ADAPTER].weight, norms)


@torch.no_grad()
def merged_weight(model: nn.Module, name: str) -> Tensor:
    """Return a weight of the plain model with the adapter merged, fp32; 4-bit weights are dequantised.

    A buffer is returned as it is. The model must not be sharded, and is not modified.

    Args:
        name: of the parameter in the plain model.
    """
    from peft.tuners.lora import LoraLayer

    path, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if (wrapper := _find_wrapper(module, leaf)) is not None:
        frozen: Tensor = getattr(module.get_base_layer(), leaf).detach().float()
        delta: Tensor = wrapper.get_delta_weight(ADAPTER).float()
        return frozen + delta
    if leaf == "weight" and isinstance(module, LoraLayer):
        return _merge_lora(module)
    if leaf == "weight" and isinstance(module, QuantizedLinear):
        return module.dequantize()
    if leaf == "weight" and hasattr(module, "token_adapter"):
        return module.weight.detach().float()  # type: ignore[no-any-return]
    owner = module.get_base_layer() if isinstance(module, LoraLayer) else module
    weight: Any = getattr(owner, leaf)
    if isinstance(weight, QuantizedExperts):
        return weight.dequantize()
    tensor: Tensor = weight
    return tensor.detach().float() if isinstance(tensor, nn.Parameter) else tensor


def _find_wrapper(module: Any, leaf: str) -> Any:
    """Return PEFT's wrapper of a parameter of the module; None if it has no adapter. The wrappers are nested."""
    while (name := getattr(module, "parameter_name", None)) is not None:
        if name == leaf:
            return module
        module = module.base_layer
    return None


def _merge_lora(layer: Any) -> Tensor:
    """Merge an adapter with PEFT's own method, into an fp32 copy of the frozen layer."""
    frozen = layer.base_layer
    if isinstance(frozen, QuantizedLinear):
        plain: Any = nn.Linear(frozen.in_features, frozen.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(frozen.dequantize(), requires_grad=False)
    else:
        plain = copy.deepcopy(frozen).float()
    layer.base_layer = plain
    try:
        layer.merge(safe_merge=True)
    finally:
        layer.base_layer = frozen
        layer.merged_adapters.clear()
    weight: Tensor = plain.weight.detach()
    return weight


def find_new_tokens(recipe: "Recipe", tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of `model.new_tokens`, whose embedding rows are trained in addition to an adapter."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(recipe.model.new_tokens))
    return ids


@torch.no_grad()
def take_principal_parts(model: nn.Module, frozen_dtype: torch.dtype | None = None) -> PrincipalParts:
    """Set every LoRA layer to its weight's principal part, and the frozen weight to the remainder. Collective.

    Args:
        frozen_dtype: dtype that the weights had when the parts were first computed; None for their current dtype.
    """
    parts = {}
    for name, layer in lora_layers(model):
        weight = layer.get_base_layer().weight
        full = whole(weight)
        a, b = _principal_part(layer, full.to(frozen_dtype or full.dtype))
        product = layer.scaling["default"] * (b @ a)
        write_part(layer.lora_A["default"].weight, a)
        write_part(layer.lora_B["default"].weight, b)
        write_part(weight, full.float() - (product.T if layer.fan_in_fan_out else product))
        parts[name] = (a.cpu(), b.cpu())
    return parts


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _principal_part(layer: Any, weight: Any) -> tuple[Tensor, Tensor]:
    """Compute (A [r, in], B [out, r]) of a full weight, fp32.

    Broadcast from rank 0, because the signs of an SVD are arbitrary.
    """
    rank, scale = layer.r["default"], layer.scaling["default"]
    oriented = weight.T if layer.fan_in_fan_out else weight
    u, s, v = torch.linalg.svd(oriented.float(), full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    a, b = (root[:, None] * v[:rank]).contiguous(), (u[:, :rank] * root).contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        for part in (a, b):
            dist.broadcast(part, src=0)
    return a, b
