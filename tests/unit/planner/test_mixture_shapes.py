"""Mixtures of experts are counted as transformers builds them, and refused if they cannot route a token."""

import pytest

from echelon.ground.errors import ConfigError
from echelon.planner.shape import build_shape

DEEPSEEK_V2 = {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60}
DEEPSEEK_V2 |= {"num_attention_heads": 128, "n_routed_experts": 160, "num_experts_per_tok": 6}
DEEPSEEK_V2 |= {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}


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
def test_a_published_mixture_has_its_number_of_parameters(family, fields, total):
    assert build_shape({"model_type": family, **fields}).num_parameters == total


def test_what_a_token_of_deepseek_v3_uses():
    """37 B of 671 B (arXiv 2412.19437, abstract), there with the embedding."""
    shape = build_shape({"model_type": "deepseek_v3"})
    active = shape.num_parameters - shape.num_idle_parameters
    assert 36.5e9 < active < 37.6e9 and shape.num_chosen_experts == 8


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, ["num_experts_per_tok=5", "4 experts"]),
        ("qwen3_moe", {"mlp_only_layers": 3}, ["mlp_only_layers"]),
        ("qwen2_moe", {"decoder_sparse_step": 0}, ["cannot build a qwen2_moe model"]),
        ("deepseek_v2", {}, ["num_experts_per_tok is missing", "give a number"]),
        ("deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"}, ["topk_method", "greedy"]),
        ("deepseek_v3", {"num_key_value_heads": 64}, ["num_key_value_heads=64", "num_attention_heads=128"]),
        ("deepseek_v3", {"n_routed_experts": 100}, ["n_group=8", "n_routed_experts=100", "5 or 10"]),
        ("deepseek_v3", {"topk_group": 9}, ["topk_group=9", "8 or less"]),
        ("deepseek_v3", {"n_routed_experts": 8}, ["n_group=8", "4 or less"]),
    ],
)
def test_a_mixture_that_cannot_run_is_refused_by_name(family, fields, words):
    with pytest.raises(ConfigError) as caught:
        build_shape({"model_type": family, **fields})
    assert all(word in str(caught.value) for word in words), str(caught.value)
