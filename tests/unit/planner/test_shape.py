import subprocess
import sys

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from echelon.ground.errors import ConfigError
from echelon.planner.families import FAMILIES
from echelon.planner.replica_costs import trained_shapes
from echelon.planner.shape import build_shape, resolve_vocab_size
from tests.families import assert_same_shapes, small_config

LLAMA_LIKE = {
    "vocab_size": 129,
    "hidden_size": 66,
    "intermediate_size": 131,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
LLAMA3_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def odd_configs():
    families = {
        "llama": [{}, {"attention_bias": True, "mlp_bias": True, "head_dim": 10}, {"num_key_value_heads": None}],
        "mistral": [{"head_dim": 22}, {"head_dim": 14}],
        "qwen2": [{"head_dim": 12}, {"num_key_value_heads": 6, "hidden_size": 72}],
        "qwen3": [{}, {"head_dim": 10, "attention_bias": True}],
        "gemma": [{"head_dim": 18}, {"attention_bias": True}],
        "gemma2": [{"head_dim": 18}, {"attention_bias": True}],
        "gemma3_text": [{"head_dim": 18}, {"attention_bias": True}],
    }
    for model_type, variants in families.items():
        for variant in variants:
            base = {**LLAMA_LIKE, "hidden_size": 72} if "head_dim" not in variant else LLAMA_LIKE
            yield {"model_type": model_type, **base, **variant}
    yield {"model_type": "gpt2", "vocab_size": 131, "n_embd": 66, "n_layer": 3, "n_head": 6, "n_positions": 37}
    yield {"model_type": "gpt2", "vocab_size": 131, "hidden_size": 66, "n_layer": 2, "n_head": 3, "n_inner": 97}
    yield {"model_type": "olmo2", **LLAMA_LIKE, "hidden_size": 72}  # not counted by formula


def meta_model(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", odd_configs(), ids=lambda config: config["model_type"])
def test_counts_equal_the_model_of_transformers(config, tied):
    config = {**config, "tie_word_embeddings": tied}
    model, shape = meta_model(config), build_shape(config)
    layers = model.base_model.h if config["model_type"] == "gpt2" else model.base_model.layers
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.num_layer_parameters == sum(p.numel() for p in layers[0].parameters())
    assert shape.num_embedding_parameters == model.get_input_embeddings().weight.numel()
    assert shape.num_layers == len(layers)
    assert_same_shapes(trained_shapes(shape, None), model)
    assert (
        shape.tied_embeddings is (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    )
    if config["model_type"] == "gpt2":
        assert shape.num_position_parameters == model.base_model.wpe.weight.numel()


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2"])
def test_missing_fields_have_the_defaults_of_transformers(model_type):
    config = {"model_type": model_type}
    shape = build_shape(config)
    assert shape.num_parameters == sum(p.numel() for p in meta_model(config).parameters())
    assert shape.max_positions == AutoConfig.for_model(model_type).max_position_embeddings


def windowed_configs():
    window = {"sliding_window": 16}
    for model_type in (*FAMILIES, "mixtral", "qwen2_moe", "qwen3_moe"):
        yield {"model_type": model_type}
        yield {"model_type": model_type, **window}
    for model_type in ("mistral", "mixtral", "gemma2", "gemma3_text"):
        yield {"model_type": model_type, "sliding_window": None}
    yield {"model_type": "qwen3_moe", **window, "use_sliding_window": True}
    for model_type in ("qwen2", "qwen3"):
        for first in (0, 4, 9):
            yield {"model_type": model_type, **window, "use_sliding_window": True, "max_window_layers": first}
    for model_type in ("qwen3", "gemma2", "gemma3_text", "olmo3"):
        yield {"model_type": model_type, **window, "layer_types": ["sliding_attention", "full_attention"] * 4}
    yield {"model_type": "gemma3_text", **window, "sliding_window_pattern": 3}
    yield from ({"model_type": model_type, **window} for model_type in ("phi3", "starcoder2", "cohere2"))


@pytest.mark.parametrize("config", windowed_configs(), ids=lambda config: config["model_type"])
def test_windows_are_those_that_layers_pass_to_attention(config):
    """Of a model of transformers, whose attention is replaced by a function that notes its window."""
    seen = []

    def attend(module, query, key, value, mask, **options):
        seen.append(options.get("sliding_window"))
        return query.transpose(1, 2), None

    AttentionInterface.register("noted", attend)
    config = {**config, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 8,
              "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": None}  # fmt: skip
    built = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16, attn_implementation="noted")
    model(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"), use_cache=False)
    parts = build_shape(config).parts
    windows = [window for window in seen if window is not None]
    assert parts.windowed == len(windows) / len(seen)
    assert {parts.window} == (set(windows) or {0})


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [({"sliding_window_pattern": "all"}, 1.0), ({"sliding_window_pattern": -2}, 1.0), ({"layer_types": []}, 5 / 6),
     ({"max_window_layers": -1}, 1.0), ({"max_window_layers": "none"}, 5 / 6), ({"sliding_window": "wide"}, 0.0)],
)  # fmt: skip
def test_a_window_that_no_model_has_is_left_to_transformers_to_refuse(fields, windowed):
    config = {"model_type": "gemma3_text", **LLAMA_LIKE, "hidden_size": 72, "num_hidden_layers": 6}
    assert build_shape(config | fields).parts.windowed == pytest.approx(windowed)


def test_flops_of_llama3_8b():
    shape = build_shape(LLAMA3_8B)
    assert shape.num_parameters == 8_030_261_248  # the model card's 8.03 B
    # N = 8030261248 - 128256*4096 = 7504924672; 6 N + 12*32*4096*8192 = 45029548032 + 12884901888
    assert shape.flops_per_token(8192) == 57_914_449_920  # 5.79e10, as Megatron-LM and NeMo publish
    # 5762 tokens/s on one H100 (torchtitan's 8B row, 989 TFLOP/s): 5762 * 5.7914e10 / 989e12 = 0.3374
    assert shape.mfu(5762, 1, 989e12, 8192) == pytest.approx(0.33741, abs=1e-5)
    assert shape.mfu(8 * 5762, 8, 989e12, 8192) == pytest.approx(0.33741, abs=1e-5)


def test_flops_of_gpt2_small():
    shape = build_shape({"model_type": "gpt2"})
    assert shape.num_parameters == 124_439_808
    # N includes the tied head, but not the 1024 * 768 positions: 6 * 123653376 + 12 * 12 * 768 * 1024
    assert shape.flops_per_token(1024) == 741_920_256 + 113_246_208


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["model.config.model_type=None", "model_type: llama"]),
        ({"model_type": "lama"}, ["'lama'", "did you mean llama"]),
        ({"model_type": "bert_"}, ["'bert_'", "bert"]),
        ({"model_type": "t5"}, ["t5", "no causal language model"]),
        (
            {"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4},
            ["num_attention_heads=4", "=65", "1 or 5"],
        ),
        (
            {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 3},
            ["num_key_value_heads=3", "num_attention_heads=32", "2 or 4"],
        ),
        ({"model_type": "mistral", "hidden_size": -1}, ["model.config.hidden_size=-1", "above 0"]),
        ({"model_type": "gemma", "head_dim": 7}, ["head_dim=7", "odd", "8"]),
        ({"model_type": "gpt2", "n_embd": 66, "n_head": 4}, ["num_attention_heads=4", "3 or 6"]),
        ({"model_type": "gpt2", "attn_pdrop": 2}, ["attn_pdrop=2", "fraction"]),
        ({"model_type": "olmo2", "hidden_size": "wide"}, ["olmo2", "hidden_size"]),
    ],
)
def test_invalid_configs_are_refused_by_name(config, words):
    with pytest.raises(ConfigError) as caught:
        build_shape(config)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_vocab_size_is_given_or_the_tokenizers_rounded_up():
    rounded = "vocab_size 320: the tokenizer's 257 rounded up to a multiple of 64"
    assert resolve_vocab_size({}, 257) == (320, rounded)
    assert resolve_vocab_size({}, 256) == (256, "vocab_size 256: the tokenizer's")
    size, line = resolve_vocab_size({"vocab_size": 300}, 257)
    assert size == 300 and "300" in line and "257" in line
    with pytest.raises(ConfigError, match=r"vocab_size=256 is smaller than the tokenizer's 257"):
        resolve_vocab_size({"vocab_size": 256}, 257)


def test_known_families_need_no_torch():
    code = (
        "import sys; from echelon.planner.shape import build_shape; from echelon.planner import choose, machines; "
        "build_shape({'model_type': 'qwen3'}); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_experts_that_a_token_does_not_use_cost_nothing():
    """By hand: two layers with 8 experts of three 64 by 32 matrices, 2 of which a token uses."""
    shape = build_shape(small_config("qwen3_moe"))
    experts = 2 * 8 * 3 * 64 * 32
    assert shape.num_expert_parameters == experts and shape.num_idle_parameters == experts * 6 // 8
    active = shape.num_matmul_parameters - shape.num_idle_parameters
    assert shape.flops_per_token(32) == 6 * active + 12 * 2 * 64 * 32
    assert shape.flops_per_token(32, 100) == 4 * active + 2 * 100 + 12 * 2 * 64 * 32
    assert build_shape(small_config("stablelm")).num_idle_parameters == 0


def test_layers_of_different_sizes_are_counted():
    """Gemma 4's heads are wider in some layers, which its config refuses to summarize; Gemma 3n lists its widths."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    per_layer = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 0}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0]}
    listed = {**sizes, **per_layer, **kinds, "intermediate_size": [64, 128], "laurel_rank": 8}
    shape = build_shape({"model_type": "gemma3n_text", **listed})
    assert shape.intermediate_size == 128 and shape.num_layers == 2
    assert build_shape({"model_type": "gemma4_text", **sizes, **per_layer, "intermediate_size": 64}).hidden_size == 64


@pytest.mark.parametrize(
    "given", [{"architectures": 5}, {"architectures": ["XForSequenceClassification"], "id2label": 5}]
)
def test_architectures_and_labels_of_another_type_are_refused(given):
    """They are texts of strangers: a config.json may say anything."""
    with pytest.raises(ConfigError, match=rf"model\.config\.{list(given)[-1]}=5 is not a"):
        build_shape(LLAMA3_8B | given)


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
