"""Every mixture counted by formula is the one that transformers builds."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from echelon.ground.errors import ConfigError
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.causality import check_is_causal
from echelon.learn.model.divided_copy import check_divides
from echelon.learn.model.traits import find_traits
from echelon.planner.count_on_meta import measure_shape
from echelon.planner.mixtures import MIXTURES
from echelon.planner.shape import build_shape

# Five layers, so that dense and sparse ones are not equally many; 6 heads of 12, or of 10 in latent attention.
SIZES = {
    "vocab_size": 129,
    "hidden_size": 72,
    "intermediate_size": 131,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
INNER = {"moe_intermediate_size": 21}
LATENT = {"num_key_value_heads": 6, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 6, "v_head_dim": 14, "n_routed_experts": 8, "num_experts_per_tok": 2} | INNER
DEEPSEEK_V2 = {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60}
DEEPSEEK_V2 |= {"num_attention_heads": 128, "n_routed_experts": 160, "num_experts_per_tok": 6}
DEEPSEEK_V2 |= {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
GROUPS = {"n_group": 2, "topk_group": 1}
VARIANTS = {
    "mixtral": [
        {"num_local_experts": 4},
        {"num_experts_per_tok": 3, "head_dim": 10},
        {"num_experts": 5, "num_key_value_heads": 6},
    ],
    "olmoe": [{"num_experts_per_tok": 2, "num_experts": 7}, {"num_local_experts": 9, "attention_bias": True}],
    "qwen2_moe": [
        {**INNER, "num_experts": 7, "shared_expert_intermediate_size": 33},
        {**INNER, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 131, "qkv_bias": False},
        {**INNER, "mlp_only_layers": [0, 1, 2, 3, 4]},
    ],
    "qwen3_moe": [
        {**INNER, "num_experts": 9, "attention_bias": True},
        {**INNER, "num_local_experts": 16, "head_dim": 10, "mlp_only_layers": [1], "decoder_sparse_step": 2},
        {**INNER, "mlp_only_layers": None, "num_experts_per_tok": 3},
    ],
    "deepseek_v2": [
        {**LATENT, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 1},
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 3, "num_key_value_heads": None},
        {**LATENT, **GROUPS, "topk_method": "group_limited_greedy", "first_k_dense_replace": 7},
    ],
    "deepseek_v3": [
        {**LATENT, **GROUPS, "attention_bias": True, "n_shared_experts": 2},
        {**LATENT, **GROUPS, "q_lora_rank": None, "first_k_dense_replace": 0, "hidden_size": 70},
        {**LATENT, **GROUPS, "num_key_value_heads": None, "kv_lora_rank": 8},
        {**LATENT, "n_group": 4, "topk_group": 2, "v_head_dim": 9, "first_k_dense_replace": 5},
    ],
}


def odd_configs():
    for family, variants in VARIANTS.items():
        for number, variant in enumerate(variants):
            fields = {"model_type": family, **SIZES, "pad_token_id": None, "eos_token_id": None, **variant}
            yield pytest.param(fields, id=f"{family}-{number}")


def in_order(shape):
    """The shape with its linear layers in the order of their names: a model has them in that of its layers."""
    return replace(shape, linears=tuple(sorted(shape.linears, key=repr)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", odd_configs())
def test_a_mixture_counted_by_formula_equals_the_built_one(config, tied):
    config = {**config, "tie_word_embeddings": tied}
    counted, model = build_shape(config), build_on_meta(load_config(config))
    assert in_order(counted) == in_order(measure_shape(config))
    assert counted.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    experts = [tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 3]
    stated = [(expert.num_experts, expert.rows, expert.columns) for expert in counted.experts]
    assert sorted(experts) == sorted(expert for expert in stated for _ in range(counted.experts[0].count))


@pytest.mark.parametrize(
    ("family", "fields", "total"),
    [
        ("mixtral", {}, 46_702_792_704),  # 8x7B
        (
            "olmoe",
            {"intermediate_size": 1024},
            6_919_161_856,
        ),  # the 6.9 B of OLMoE-1B-7B (Muennighoff et al., arXiv 2409.02060)
        ("qwen2_moe", {}, 14_315_784_192),  # the 14.3 B of Qwen1.5-MoE-A2.7B
        ("qwen3_moe", {"num_hidden_layers": 48, "head_dim": 128}, 30_532_122_624),  # the 30.5 B of Qwen3-30B-A3B
        ("deepseek_v2", DEEPSEEK_V2, 235_741_434_880),  # the 236 B of DeepSeek-V2 (arXiv 2405.04434)
        ("deepseek_v3", {}, 671_026_404_352),  # the 671 B of DeepSeek-V3 (arXiv 2412.19437), without its MTP module
    ],
)
def test_a_mixture_has_the_defaults_of_transformers(family, fields, total):
    config = {"model_type": family, **fields}
    shape = build_shape(config)
    assert in_order(shape) == in_order(measure_shape(config))
    assert shape.num_parameters == total
    known = AutoConfig.for_model(family)
    assert {key: getattr(known, key, None) for key in MIXTURES[family].own} == MIXTURES[family].own


def test_what_a_token_of_deepseek_v3_uses():
    """37 B of 671 B (arXiv 2412.19437, abstract), there with the embedding."""
    shape = build_shape({"model_type": "deepseek_v3"})
    active = shape.num_parameters - shape.num_idle_parameters
    assert 36.5e9 < active < 37.6e9 and shape.num_chosen_experts == 8


@pytest.mark.parametrize("config", [config for config in odd_configs() if config.id.endswith("-0")])
def test_what_a_plan_takes_for_granted_of_a_mixture(config):
    """It is counted without being built: that it is causal, and divides or keeps apart sequences, is checked here."""
    even = {"intermediate_size": 136, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    config = load_config({name: even.get(name, value) for name, value in config.items()})
    model = build_on_meta(config)
    traits = find_traits(model, 64)
    assert traits.mask is not None
    check_is_causal(config)
    for method in ("allgather", "ulysses"):
        check_divides(model, method, traits, 64)


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, ["num_experts_per_tok=5", "4 experts"]),
        ("mixtral", {"router_aux_loss_coef": -0.1}, ["router_aux_loss_coef=-0.1", "0.0 or more"]),
        ("qwen3_moe", {"mlp_only_layers": 3}, ["mlp_only_layers=3", "[0]"]),
        ("qwen3_moe", {"norm_topk_prob": 1}, ["norm_topk_prob=1", "true or false"]),
        ("qwen2_moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step=0", "above 0"]),
        ("deepseek_v2", {}, ["num_experts_per_tok=None", "give one."]),
        ("deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"}, ["topk_method", "greedy"]),
        ("deepseek_v3", {"num_key_value_heads": 64}, ["num_key_value_heads=64", "num_attention_heads=128"]),
        ("deepseek_v3", {"n_routed_experts": 100}, ["n_group=8", "n_routed_experts=100", "5 or 10"]),
        ("deepseek_v3", {"topk_group": 9}, ["topk_group=9", "8 or less"]),
        ("deepseek_v3", {"n_routed_experts": 8}, ["n_group=8", "4 or less"]),
        ("deepseek_v3", {"first_k_dense_replace": -1}, ["first_k_dense_replace=-1", "0 or"]),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, ["qk_rope_head_dim=7", "odd", "8"]),
    ],
)
def test_a_mixture_that_cannot_run_is_refused_by_name(family, fields, words):
    with pytest.raises(ConfigError) as caught:
        build_shape({"model_type": family, **fields})
    assert all(word in str(caught.value) for word in words), str(caught.value)
