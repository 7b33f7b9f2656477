"""The adapter of a plan: which parameters are trained, which are frozen, and which of those are in 4 bits."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError
from echelon.ground.extras import require_extra
from echelon.planner.model_shape import SCORE_HEAD, LinearShape, ModelShape
from echelon.planner.plan import AdapterPlan

if TYPE_CHECKING:
    from echelon.recipe.inputs import AdapterConfig

# Names of the modules that can be trained in full, in the families of transformers.
_INPUT_TABLES = frozenset(("embed_tokens", "wte", "embed_in", "word_embeddings"))
_OUTPUT_TABLES = frozenset(("lm_head", "embed_out"))
TABLES = (_INPUT_TABLES, _OUTPUT_TABLES)
_LAST_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
_LAYER_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm", "ln_1",
    "ln_2",
)  # fmt: skip
_HEAD_NORMS = ("q_norm", "k_norm")

QUANTIZED_BLOCK = 64  # numbers that share a scale; with double quantisation, scales that share a second scale:
ROW_MULTIPLE = 8  # divides the input features of a layer in 4 bits: each packed row has whole fp32 elements
NESTED_BLOCK = 256  # Dettmers et al. 2023 (arXiv:2305.14314), in the layout of bitsandbytes


def build_adapter_plan(adapter: "AdapterConfig", shape: ModelShape, num_new_tokens: int = 0) -> AdapterPlan | None:
    """The adapter of a recipe for a model of this shape; None if every parameter is trained.

    `num_new_tokens` rows of the embedding, and of an untied head, are trained too.

    Raises ConfigError for a target that matches no linear layer or no expert weight.
    """
    if adapter.method == "full":
        return None
    modules = _find_saved(adapter, shape)
    inside, outside, looked_up = _count_saved(modules, shape)
    targets = tuple(name for name in _target_names(adapter.target_modules, shape) if name not in modules)
    experts = select_experts(adapter.target_parameters, [expert.name for expert in shape.experts])
    adapted = [expert for expert in shape.experts if expert.name in experts]
    quantized = adapter.method == "qlora"
    packed_experts = shape.num_expert_parameters if adapter.quantize_experts else 0
    frozen = [linear for linear in shape.linears if linear.name not in modules]
    num_quantized = sum(linear.count * linear.size for linear in frozen) + packed_experts if quantized else 0
    trained = _count_adapter(adapter, targets, shape)
    # Each expert has its own A and B.
    trained += adapter.r * sum(expert.count * expert.num_experts * (expert.rows + expert.columns) for expert in adapted)
    trained += num_new_tokens * shape.hidden_size * _count_frozen_tables(modules, shape)
    return AdapterPlan(
        method=adapter.method,
        r=adapter.r,
        dropout=adapter.dropout,
        targets=targets,
        num_trained_parameters=trained + inside + outside,
        num_frozen_parameters=shape.num_parameters - inside - outside,
        num_quantized_parameters=num_quantized,
        double_quant=quantized and adapter.double_quant,
        saved=modules,
        num_saved_inside=inside,
        num_saved_outside=outside,
        num_looked_up=looked_up,
        experts=experts,
        num_adapted_experts=sum(expert.count * expert.size for expert in adapted),
        num_quantized_experts=packed_experts,
    )


def _find_saved(adapter: "AdapterConfig", shape: ModelShape) -> tuple[str, ...]:
    """The modules trained in full: those of the recipe, and a head that scores texts, which may be new."""
    modules = adapter.modules_to_save
    is_added = shape.num_scores is not None and SCORE_HEAD not in modules
    return (*modules, SCORE_HEAD) if is_added else modules


def select_experts(wanted: str | tuple[str, ...], names: Sequence[str]) -> tuple[str, ...]:
    """Return the expert weights of `adapter.target_parameters`, out of all of a model by their name in a layer.

    A name selects those that it equals or that end in it after a dot, as in PEFT.

    Raises:
        ConfigError: a name selects none.
    """
    names = tuple(dict.fromkeys(names))
    if wanted == "experts" and names:
        return names
    ends = (wanted,) if isinstance(wanted, str) else wanted
    for end in ends:
        if not any(_ends_in(name, end) for name in names):
            near = difflib.get_close_matches(end, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}." if names else (
                "it is not a mixture of experts; remove adapter.target_parameters."
            )  # fmt: skip
            raise ConfigError(f"adapter.target_parameters: the model has no expert weights named {end!r}; {hint}")
    return tuple(name for name in names if any(_ends_in(name, end) for end in ends))


def _ends_in(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _count_saved(names: tuple[str, ...], shape: ModelShape) -> tuple[int, int, int]:
    """Parameters of the modules trained in full: (inside decoder layers, outside of them, in look-up tables)."""
    sizes = {name: _saved_size(name, shape) for name in names}
    inside = sum(size for size, is_inside in sizes.values() if is_inside)
    outside = sum(size for size, is_inside in sizes.values() if not is_inside)
    if not shape.tied_embeddings:
        return inside, outside, sum(sizes[name][0] for name in _INPUT_TABLES & sizes.keys())
    if not any(table.isdisjoint(names) for table in TABLES):  # one weight with two names
        outside -= shape.num_embedding_parameters
    return inside, outside, 0


def _count_adapter(adapter: "AdapterConfig", targets: tuple[str, ...], shape: ModelShape) -> int:
    """Parameters of A and B for all targets, and of DoRA's magnitudes."""
    head = LinearShape("lm_head", shape.hidden_size, shape.vocab_size, 1)
    targeted = [linear for linear in (*shape.linears, head) if linear.name in targets and linear.adaptable]
    added = sum(linear.count * adapter.r * (linear.in_features + linear.out_features) for linear in targeted)
    if adapter.method == "dora":
        added += sum(linear.count * linear.out_features for linear in targeted)
    return added


def _count_frozen_tables(saved: tuple[str, ...], shape: ModelShape) -> int:
    """The number of vocabulary tables that are not trained in full: each gets separate rows for new tokens."""
    frozen = sum(table.isdisjoint(saved) for table in TABLES)
    # Of one weight for both: it is trained in full if either name is saved.
    return int(frozen == len(TABLES)) if shape.num_tables == 1 else frozen


def _saved_size(name: str, shape: ModelShape) -> tuple[int, bool]:
    """(parameters of all modules of a name, whether these are in decoder layers), without the biases of linear layers.

    Raises ConfigError for a name that no embedding, head, norm or linear layer of such a model has.
    """
    norm = shape.hidden_size * (2 if shape.parts.norm == "layer" else 1)
    linears = {linear.name: linear.count * linear.size for linear in shape.linears}
    sizes = {
        **dict.fromkeys(_INPUT_TABLES, (shape.num_embedding_parameters, False)),
        **dict.fromkeys(_OUTPUT_TABLES, (shape.vocab_size * shape.hidden_size, False)),
        **({} if shape.num_scores is None else {SCORE_HEAD: (shape.num_scores * shape.hidden_size, False)}),
        **dict.fromkeys(_LAST_NORMS, (norm, False)),
        **dict.fromkeys(_LAYER_NORMS, (norm * shape.num_layers, True)),
        **dict.fromkeys(_HEAD_NORMS, (shape.head_dim * shape.num_layers, True)),
        **{name: (size, True) for name, size in linears.items()},
    }
    if shape.num_position_parameters:
        sizes["wpe"] = (shape.num_position_parameters, False)
    if name not in sizes:
        near = difflib.get_close_matches(name, sizes, n=1)
        hint = f"did you mean {near[0]}?" if near else f"for example embed_tokens, lm_head, norm, {', '.join(linears)}."
        raise ConfigError(f"adapter.modules_to_save: {name!r} matches no embedding, head, norm or linear layer; {hint}")
    return sizes[name]


def trains_head(shape: ModelShape, adapter: AdapterPlan) -> bool:
    """Whether the weight of the head, which may be tied to the embedding, is trained in full."""
    names = _OUTPUT_TABLES | {SCORE_HEAD} | (_INPUT_TABLES if shape.tied_embeddings else frozenset())
    return not names.isdisjoint(adapter.saved)


def describe_reach(adapter: AdapterPlan, shape: ModelShape) -> str | None:
    """The message about experts that the adapter does not reach; None if it reaches all, or there are none."""
    left = shape.num_expert_parameters - adapter.num_adapted_experts
    if not left:
        return None
    what = f"experts: {left / shape.num_parameters:.0%} of the model's parameters are expert weights that the adapter "
    what += "does not reach, because they are not linear layers"
    if adapter.num_quantized_experts:
        return f"{what}; they stay frozen in 4 bits"
    return f"{what}; set adapter.target_parameters=experts to adapt them too"


def _target_names(wanted: str | tuple[str, ...], shape: ModelShape) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(linear.name for linear in shape.linears if linear.adaptable))
    if isinstance(wanted, str):
        return names
    for name in wanted:
        if name not in (*names, "lm_head"):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use some of {', '.join(names)}, or all-linear."
            raise ConfigError(f"adapter.target_modules: the model has no linear layer named {name!r}; {hint}")
    return wanted


def targeted_linears(shape: ModelShape, adapter: AdapterPlan) -> list[LinearShape]:
    """The linear layers inside decoder layers that have an adapter."""
    return [linear for linear in shape.linears if linear.name in adapter.targets and linear.adaptable]


def frozen_bytes(shape: ModelShape, adapter: AdapterPlan, compute_bytes: int) -> tuple[int, int]:
    """(of all decoder layers, outside them): bytes of the frozen parameters of the whole model.

    Parameters that are not in 4 bits are in the compute dtype, with `compute_bytes` bytes each.
    """
    layers = shape.num_layers * shape.num_layer_parameters
    plain = layers - adapter.num_quantized_parameters - adapter.num_saved_inside
    packed = 0
    if adapter.num_quantized_parameters:
        stored = [(linear.count, linear.size) for linear in shape.linears if linear.name not in adapter.saved]
        if adapter.num_quantized_experts:
            stored += [(expert.count, expert.size) for expert in shape.experts]
        packed = sum(count * _quantized_bytes(size, adapter.double_quant) for count, size in stored)
    outside = shape.num_parameters - layers - adapter.num_saved_outside
    return plain * compute_bytes + packed, outside * compute_bytes


def _quantized_bytes(size: int, double_quant: bool) -> int:
    """Half a byte per number plus an fp32 scale per block; double: a byte per block, fp32 per 256 blocks, one fp32."""
    blocks = math.ceil(size / QUANTIZED_BLOCK)
    scales = 4 + 4 * math.ceil(blocks / NESTED_BLOCK) + blocks if double_quant else 4 * blocks
    return size // 2 + math.ceil(scales / 4) * 4


def whole_weight_bytes(shape: ModelShape, adapter: AdapterPlan, compute_bytes: int) -> int:
    """Bytes of the largest weight while it is materialized: dequantized, as the gradient of expert weights with an
    adapter, or, for DoRA, to compute its norm.

    DoRA's norm needs the identity that A and B are applied to, their product, and the weight with it.
    """
    if adapter.method == "dora":
        largest = max(targeted_linears(shape, adapter), key=lambda linear: linear.in_features**2 + 2 * linear.size)
        return compute_bytes * (largest.in_features**2 + 2 * largest.size)
    whole = [expert.size for expert in shape.experts if expert.name in adapter.experts]
    if adapter.method == "qlora":
        whole += [linear.size for linear in shape.linears]
    return compute_bytes * max(whole, default=0)


def adapter_bytes_per_token(
    shape: ModelShape, adapter: AdapterPlan, compute: int, own_copies: bool, mask: int
) -> float:
    """Activation bytes per token of the adapter in one decoder layer, in addition to those of the frozen layer.

    Each A keeps its input and each B the output of A. Layers that read the same tensor share it, unless each casts it
    (`own_copies`: it is not in the compute dtype) or applies dropout to it. DoRA keeps the outputs of the frozen layer
    and of the adapter for its magnitudes.

    Args:
        mask: bytes of one number of a dropout mask.
    """
    linears, kept = targeted_linears(shape, adapter), 0.0
    apart = own_copies or adapter.dropout > 0
    shared: set[str] = set()
    for linear in linears:
        source = _input_of(linear)
        per_layer = linear.count / shape.num_layers
        if apart or (source not in shared and source != "attention"):
            kept += per_layer * compute * linear.in_features
        shared.add(source)
        kept += per_layer * (compute * adapter.r + mask * linear.in_features * (adapter.dropout > 0))
        kept += per_layer * 2 * compute * linear.out_features * (adapter.method == "dora")
    return kept


def _input_of(linear: LinearShape) -> str:
    """A key for the tensor that a layer reads: shared for the usual names in transformers, else unique."""
    inputs = {"q_proj": "norm", "k_proj": "norm", "v_proj": "norm", "o_proj": "attention", "gate_proj": "norm2",
              "up_proj": "norm2"}  # fmt: skip
    return inputs.get(linear.name, f"{linear.name} {linear.in_features}")


def check_packages(adapter: "AdapterConfig") -> None:
    """Raise ConfigError if the packages that an adapter requires are not installed."""
    if adapter.is_adapter:
        extra = "qlora" if adapter.method == "qlora" else "peft"
        require_extra(f"adapter.method={adapter.method}", extra, "or use adapter.method=full")


def check_ranks(adapter: "AdapterConfig", ranks: Mapping[str, int]) -> None:
    """Raise ConfigError if `adapter.r` is more than the ranks of the weights with an adapter allow, given by name."""
    largest, smallest = max(ranks, key=ranks.__getitem__), min(ranks, key=ranks.__getitem__)
    if adapter.r > ranks[largest]:
        raise ConfigError(
            f"adapter.r={adapter.r} exceeds the rank of every target layer; the largest is {ranks[largest]}, of "
            f"{largest}; use {ranks[largest]} or less, or adapter.method=full."
        )
    if adapter.init == "pissa" and adapter.r > ranks[smallest]:
        raise ConfigError(
            f"adapter.r={adapter.r}: adapter.init=pissa needs as many singular vectors, and {smallest} has only "
            f"{ranks[smallest]}; use {ranks[smallest]} or less."
        )


def check_rows(model_type: str, rows: Sequence[int]) -> None:
    """Raise ConfigError if the linear layers of a model, given by their input features, cannot be in 4 bits."""
    odd = [row for row in rows if row % ROW_MULTIPLE]
    if not rows or odd:
        what = f"a linear layer with {odd[0]} input features" if odd else "no plain linear layers"
        raise ConfigError(
            f"adapter.method=qlora: the decoder layers of {model_type} have {what}, and 4-bit quantisation requires "
            f"linear layers with a multiple of {ROW_MULTIPLE} input features; use adapter.method=lora."
        )


def check_adapter_shape(adapter: "AdapterConfig", shape: ModelShape) -> None:
    """Refuse an adapter of linear layers inside decoder layers that a model of this shape does not support.

    Raises ConfigError: the message names the key and a valid value.
    """
    plan = build_adapter_plan(adapter, shape)
    assert plan is not None
    if adapter.method == "qlora":
        check_rows(shape.model_type, [linear.in_features for linear in shape.linears])
    targets = targeted_linears(shape, plan)
    check_ranks(adapter, {linear.name: min(linear.in_features, linear.out_features) for linear in targets})
