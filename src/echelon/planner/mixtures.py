"""The shapes of known mixtures of experts by formula: a family whose layers, or some of them, have experts for MLPs."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.planner.families import (
    UNUSED_WINDOW,
    AttentionShape,
    ConfigFields,
    Family,
    Widths,
    check_divides,
    check_rotates,
    count_decoder,
    count_heads,
    count_linears,
    list_defaults,
    list_mlp,
)
from echelon.planner.model_shape import ExpertShape, LayerParts, LinearShape, ModelShape


def _sparse_in_all(fields: ConfigFields) -> int:
    return fields.count("num_hidden_layers")


def _sparse_in_steps(fields: ConfigFields) -> int:
    step, dense = fields.count("decoder_sparse_step"), fields.get("mlp_only_layers")
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise ConfigError(f"model.config.mlp_only_layers={dense!r:.80} is not a list of layers; use for example [0].")
    return sum(number % step == 0 for number in range(1, _sparse_in_all(fields) + 1) if number - 1 not in dense)


def _sparse_after_dense(fields: ConfigFields) -> int:
    return max(0, _sparse_in_all(fields) - fields.count("first_k_dense_replace", least=0))


def _shares_none(fields: ConfigFields) -> Widths:
    return {}


def _shares_gated(fields: ConfigFields) -> Widths:
    hidden = fields.count("hidden_size")
    return {**list_mlp(hidden, fields.count("shared_expert_intermediate_size")), "shared_expert_gate": (hidden, 1)}


def _shares_some(fields: ConfigFields) -> Widths:
    return list_mlp(
        fields.count("hidden_size"), fields.count("moe_intermediate_size") * fields.count("n_shared_experts")
    )


def _latent_attention(fields: ConfigFields, family: Family) -> AttentionShape:
    """Attention with compressed queries and keys (DeepSeek-V2, arXiv 2405.04434, section 2.1). Queries may be whole."""
    hidden, (heads, kv_heads) = fields.count("hidden_size"), count_heads(fields)
    if family.heads_must_divide_hidden:
        check_divides("num_attention_heads", heads, "hidden_size", hidden)
    if kv_heads != heads:
        raise ConfigError(
            f"model.config.num_key_value_heads={kv_heads} differs from num_attention_heads={heads}, but each head "
            f"has keys and values of its own in this attention; use {heads}."
        )
    rotated, plain = fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    value, rank = fields.count("v_head_dim"), fields.count("kv_lora_rank")
    check_rotates("qk_rope_head_dim", rotated)
    query_rank = None if fields.get_or_null("q_lora_rank") is None else fields.count("q_lora_rank")
    query = heads * (plain + rotated)
    queries: Widths = (
        {"q_proj": (hidden, query)}
        if query_rank is None
        else {"q_a_proj": (hidden, query_rank), "q_b_proj": (query_rank, query)}
    )
    linears = {
        **queries,
        "kv_a_proj_with_mqa": (hidden, rank + rotated),
        "kv_b_proj": (rank, heads * (plain + value)),
        "o_proj": (heads * value, hidden),
    }
    biases = fields.has(family.output_bias) * ((query_rank or 0) + rank + rotated + hidden)
    num_parameters = count_linears(linears) + (query_rank or 0) + rank + biases
    return AttentionShape(heads, kv_heads, rotated, num_parameters, linears)


@dataclass(frozen=True)
class Mixture:
    """A family with experts.

    Attributes:
        family: its attention, its norms, and the MLP of layers without experts.
        own: transformers' defaults of the config keys that only mixtures have. `count_mixture` checks them all.
        num_experts, width: the keys for the number of experts, and for the width between the products of each.
        alias: another key for the number of experts, which transformers takes as well.
        count_sparse: the number of layers that have experts.
        list_shared: the linear layers beside the experts.
        adapts_mlps: whether an adapter can be on the linear layers of MLPs, as `experts.find_unadaptable` says.
    """

    family: Family
    own: Mapping[str, Any]
    num_experts: str = "num_experts"
    alias: str | None = None
    width: str = "moe_intermediate_size"
    count_sparse: Callable[[ConfigFields], int] = _sparse_in_all
    list_shared: Callable[[ConfigFields], Widths] = _shares_none
    adapts_mlps: bool = False


_LOSS = {"router_aux_loss_coef": 0.001}
_STEPS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "attention_bias": False,
}  # fmt: skip

# tests/unit/planner/test_mixture_shapes.py compares every mixture with what transformers builds.
MIXTURES: dict[str, Mixture] = {
    "mixtral": Mixture(
        Family({**list_defaults(32000, 4096, 14336, 32, (32, 8), None, 131072), "sliding_window": None}),
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": None, **_LOSS},
        num_experts="num_local_experts",
        alias="num_experts",
        width="intermediate_size",
    ),
    "olmoe": Mixture(
        Family(
            list_defaults(50304, 2048, 2048, 16, (16, None), None, 4096),
            LayerParts(head_norms=True),
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            norms_all_heads=True,
        ),
        {"num_experts": 64, "num_experts_per_tok": 8, "attention_bias": False, "norm_topk_prob": False}
        | {"router_aux_loss_coef": 0.01},
        alias="num_local_experts",
        width="intermediate_size",
    ),
    "qwen2_moe": Mixture(
        Family(list_defaults(151936, 2048, 5632, 24, (16, 16), None, 32768), qkv_bias="qkv_bias"),
        {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 5632, "qkv_bias": True, **_STEPS, **_LOSS},
        count_sparse=_sparse_in_steps,
        list_shared=_shares_gated,
        adapts_mlps=True,
    ),
    "qwen3_moe": Mixture(
        Family(
            {**list_defaults(151936, 2048, 6144, 24, (32, 4), None, 32768), **UNUSED_WINDOW},
            LayerParts(head_norms=True),
            qkv_bias="attention_bias",
            output_bias="attention_bias",
        ),
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}
        | {"head_dim": None, "attention_bias": False, **_STEPS, **_LOSS},
        alias="num_local_experts",
        count_sparse=_sparse_in_steps,
    ),
    "deepseek_v2": Mixture(
        Family(
            list_defaults(102400, 4096, 11008, 32, (32, None), None, 2048),
            attention=_latent_attention,
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            heads_must_divide_hidden=True,
        ),
        {"n_routed_experts": 64, "num_experts_per_tok": None, "moe_intermediate_size": 1407, "n_shared_experts": 2}
        | {"first_k_dense_replace": 0, "topk_method": "greedy", "n_group": None, "topk_group": None}
        | {"norm_topk_prob": False, "mlp_bias": False, **_LATENT},
        num_experts="n_routed_experts",
        alias="num_experts",
        count_sparse=_sparse_after_dense,
        list_shared=_shares_some,
    ),
    "deepseek_v3": Mixture(
        Family(
            list_defaults(129280, 7168, 18432, 61, (128, 128), None, 4096),
            attention=_latent_attention,
            output_bias="attention_bias",
        ),
        {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1}
        | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, **_LATENT},
        num_experts="n_routed_experts",
        alias="num_local_experts",
        count_sparse=_sparse_after_dense,
        list_shared=_shares_some,
    ),
}


def check_chosen(num_experts: int, num_chosen: int) -> None:
    """Raise ConfigError, with a valid number, if a token is routed to more experts than a mixture has."""
    if num_chosen > num_experts > 1:
        raise ConfigError(
            f"model.config.num_experts_per_tok={num_chosen}: the model has only {num_experts} experts; use "
            f"{num_experts} or less."
        )


def _check_routing(fields: ConfigFields, mixture: Mixture, num_experts: int) -> None:
    """Raise ConfigError for a setting of the router with which no token can be routed."""
    for key, default in mixture.own.items():
        if isinstance(default, bool):
            fields.flag(key)
        elif isinstance(default, float):
            fields.weight(key)
    check_chosen(num_experts, fields.count("num_experts_per_tok"))
    method = fields.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise ConfigError(
            f"model.config.topk_method={method!r:.80} is unknown; use greedy or group_limited_greedy, or omit it."
        )
    groups, chosen = (fields.get_or_null(key) and fields.count(key) for key in ("n_group", "topk_group"))
    if groups is None or chosen is None or method == "greedy":
        return
    check_divides("n_group", groups, mixture.num_experts, num_experts)
    if chosen > groups:
        raise ConfigError(
            f"model.config.topk_group={chosen}: the router has only {groups} groups; use {groups} or less."
        )
    if method is None and num_experts == groups:  # a group counts as its two best experts do
        raise ConfigError(
            f"model.config.n_group={groups} leaves one expert to each group, which needs two; use {groups // 2} or "
            "less."
        )


def count_mixture(config: Mapping[str, Any], mixture: Mixture) -> ModelShape:
    """The shape of a config of a mixture: experts as two stacked tensors, and a router without bias.

    Raises ConfigError naming the key that is wrong.
    """
    family = replace(mixture.family, defaults={**mixture.family.defaults, **mixture.own})
    aliases = {} if mixture.alias is None else {mixture.num_experts: mixture.alias}
    dense, fields = count_decoder(config, family), ConfigFields(config, family.defaults, aliases)
    hidden, inner, layers = dense.hidden_size, dense.intermediate_size, dense.num_layers
    num_experts, width = fields.count(mixture.num_experts), fields.count(mixture.width)
    num_chosen = fields.count("num_experts_per_tok")
    _check_routing(fields, mixture, num_experts)
    sparse, shared = mixture.count_sparse(fields), mixture.list_shared(fields)
    expert, has_bias = 3 * hidden * width, fields.has(family.mlp_bias)
    added = num_experts * (expert + hidden)  # a router has a row for each expert
    added += count_linears(shared, has_bias) - count_linears(list_mlp(hidden, inner), has_bias)
    experts = (
        ExpertShape("mlp.experts.gate_up_proj", num_experts, 2 * width, hidden, sparse),
        ExpertShape("mlp.experts.down_proj", num_experts, hidden, width, sparse),
    )
    return replace(
        dense,
        num_parameters=dense.num_parameters + sparse * added,
        num_layer_parameters=dense.num_layer_parameters + sparse * added // layers,
        linears=_merge_linears(dense.linears, shared, sparse, layers, mixture.adapts_mlps),
        experts=experts if sparse else (),
        num_idle_parameters=sparse * expert * max(0, num_experts - num_chosen),
    )


def _merge_linears(
    dense: tuple[LinearShape, ...], shared: Widths, sparse: int, layers: int, adapts_mlps: bool
) -> tuple[LinearShape, ...]:
    """The linear layers of all layers, of which so many are sparse, given those of a dense one."""
    mlp = list_mlp(0, 0).keys()
    counts: Counter[tuple[str, int, int]] = Counter()
    for linear in dense:
        counts[linear.name, linear.in_features, linear.out_features] += layers - (sparse if linear.name in mlp else 0)
    for name, widths in shared.items():
        counts[name, *widths] += sparse
    adaptable = adapts_mlps or not sparse
    return tuple(
        LinearShape(*linear, count, adaptable=adaptable or linear[0] not in mlp)
        for linear, count in counts.items()
        if count
    )
