"""What is taken for granted of a model that is not built holds for the model that transformers builds."""

import json

import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.model.adapters import apply_adapter, check_adapter
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.causality import check_is_causal
from echelon.learn.model.float8 import find_float8_layers
from echelon.learn.model.traits import find_traits
from echelon.planner.count_on_meta import measure_shape
from echelon.planner.families import FAMILIES
from echelon.planner.mixtures import MIXTURES
from echelon.planner.shape import build_shape
from echelon.recipe import Recipe
from echelon.run.lifecycle.counted_models import ANYWHERE, OWN, check_shape, is_counted
from tests.families import small_config

# The config.json of models on the hub.
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
USUAL = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
QWEN = USUAL | {"bos_token_id": 151643, "eos_token_id": 151645, "max_window_layers": 28, "rms_norm_eps": 1e-6}
QWEN |= {"use_sliding_window": False, "rope_theta": 1000000.0, "hidden_size": 4096, "sliding_window": None}
GEMMA = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": 1, "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "use_cache": True,
}  # fmt: skip
PUBLISHED = {
    "Llama-3.1-8B-Instruct": USUAL | {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "rope_theta": 500000.0,
        "transformers_version": "4.42.3", "vocab_size": 128256,
    },
    "Mistral-7B-v0.3": USUAL | {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.42.0.dev0", "vocab_size": 32768,
    },
    "Mistral-7B-v0.1": USUAL | {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "transformers_version": "4.34.0.dev0", "vocab_size": 32000,
    },
    "Qwen2.5-7B-Instruct": QWEN | {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "sliding_window": 131072, "transformers_version": "4.43.1", "vocab_size": 152064,
    },
    "Qwen3-8B": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_scaling": None, "transformers_version": "4.51.0",
        "vocab_size": 151936,
    },
    "Gemma-2B": {
        "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
        "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 8192,
        "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0,
        "torch_dtype": "bfloat16", "transformers_version": "4.38.0.dev0", "use_cache": True, "vocab_size": 256000,
    },
    "Gemma-2-2B": GEMMA | {
        "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096,
        "torch_dtype": "float32", "transformers_version": "4.42.4", "vocab_size": 256000,
    },
    "Gemma-3-1B": GEMMA | {
        "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "vocab_size": 262144,
    },
    "Mixtral-8x7B-v0.1": USUAL | {
        "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "transformers_version": "4.36.0.dev0",
        "vocab_size": 32000,
    },
    "Qwen3-30B-A3B": QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rope_scaling": None,
        "router_aux_loss_coef": 0.001, "transformers_version": "4.51.0", "vocab_size": 151936,
    },
}  # fmt: skip
SIZES = {"Llama-3.1-8B-Instruct": 8_030_261_248, "Mistral-7B-v0.3": 7_248_023_552, "Qwen3-30B-A3B": 30_532_122_624}
SIZES |= {"Mistral-7B-v0.1": 7_241_732_096, "Gemma-2-2B": 2_614_341_888, "Gemma-3-1B": 999_885_952}
"""Parameters, as the hub shows them."""


def build_recipe(**sections):
    model = sections.pop("model", {"checkpoint": "folder"})
    fixed = {"run": {"name": "r"}, "data": {"train": "text.txt", "sequence_len": 64}, "optim": {"learning_rate": 1e-3}}
    train = {"steps": 1, "global_batch_size": 8} | sections.pop("train", {})
    return Recipe.model_validate({**fixed, "model": model, "train": train, **sections})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_counted_as_they_are_built(name, tmp_path):
    fields = PUBLISHED[name]
    assert is_counted(build_recipe(), fields)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(str(tmp_path))
    model, counted = build_on_meta(config), build_shape(fields)
    assert counted.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counted.num_parameters == SIZES.get(name, counted.num_parameters)
    built = measure_shape(fields)
    assert sorted(counted.linears, key=repr) == sorted(built.linears, key=repr)
    check_is_causal(config)


LENGTHS = {"rope_type": "llama3", **LLAMA3}
VALUES = {
    "_name_or_path": ["org/name"],
    "architectures": [["LlamaForCausalLM"]],
    "attention_bias": [True, False],
    "attn_logit_softcapping": [None, 50.0],
    "clip_qkv": [None],
    "dtype": ["float32", "float16", "bfloat16"],
    "final_logit_softcapping": [None, 30.0],
    "head_dim": [8, 24],
    "hidden_act": ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["gelu_pytorch_tanh"],
    "initializer_range": [0.006, 1.0],
    "layer_types": [["full_attention"] * 2],
    "max_window_layers": [0, 28],
    "mlp_bias": [True, False],
    "output_router_logits": [False],
    "pretraining_tp": [1, 2],
    "query_pre_attn_scalar": [16, 224],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 1e4, **LENGTHS}],
    "rope_scaling": [None, LENGTHS],
    "router_jitter_noise": [0.0],
    "sliding_window": [None, 8, 4096],
    "torch_dtype": ["float32", "float16", "bfloat16"],
    "transformers_version": ["4.40.0"],
    "use_cache": [True, False],
    "use_sliding_window": [False],
}
IDS = {"bos_token_id": [None, 3], "eos_token_id": [2, [1, 2]], "pad_token_id": [None, 0, 95]}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
MORE = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"n_group": 2, "topk_group": 1},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def small(family):
    """The fields of a small model; gemma's heads have the width that the family's default gives them."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"model_type": family, "vocab_size": 96, "num_key_value_heads": 2, **sizes, **MORE.get(family, {})}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("llama", "qwen3", "mixtral") else [pytest.mark.slow])
        for family in (*FAMILIES, *MIXTURES)
    ],
)
def test_a_field_that_is_not_counted_has_no_wrong_value(family):
    """With each value that is accepted the model is built, is causal, keeps documents apart and has the same shape."""
    names = [*ANYWHERE, *IDS, *OWN.get(family, {})]
    num_accepted = 0
    for name in names:
        for value in (VALUES | IDS)[name]:
            fields = {**small(family), name: value}
            if not is_counted(build_recipe(tokenizer="bytes", model={"config": fields}), fields):
                continue
            num_accepted += 1
            config = load_config(fields)  # refuses fields that the family does not have
            model = build_on_meta(config)
            check_is_causal(config)
            assert find_traits(model, 64).mask is not None, (name, value)
            counted = build_shape(fields)
            assert counted.num_parameters == sum(weight.numel() for weight in model.parameters()), (name, value)
    assert num_accepted >= len(names)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "sillu"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"pad_token_id": 96},
        {"pad_token_id": -1},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
        {"use_cache": 1},
        {"dtype": "float8"},
        {"num_hidden_layer": 2},
        {"quantization_config": {}},
        {"sliding_window": 8},
    ],
)
def test_any_other_value_is_tried_by_building_the_model(fields):
    assert is_counted(build_recipe(), small("llama"))
    assert not is_counted(build_recipe(), small("llama") | fields)


def test_kinds_of_layers_are_as_many_as_layers():
    fields = small("qwen3") | {"layer_types": ["full_attention"] * 2}
    assert is_counted(build_recipe(), fields)
    assert not is_counted(build_recipe(), fields | {"num_hidden_layers": 3})
    assert not is_counted(build_recipe(), fields | {"layer_types": ["full_attention", "sliding_attention"]})


def test_fields_that_transformers_ignores_are_taken_in_a_checkpoint_alone():
    fields = small("qwen3_moe") | {"max_window_layers": 28}
    assert is_counted(build_recipe(), fields)
    assert not is_counted(build_recipe(tokenizer="bytes", model={"config": fields}), fields)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"checkpoint": "folder", "attn_implementation": "eager"}},
        {"model": {"checkpoint": "folder", "rope": {"type": "yarn", "factor": 2.0}}},
        {"optim": {"learning_rate": 1e-3, "learning_rate_multipliers": {"*norm*": 2.0}}},
        {"adapter": {"method": "lora", "modules_to_save": ["embed_tokens"]}},
        {"adapter": {"method": "lora", "target_modules": ["lm_head"]}},
    ],
)
def test_what_only_a_built_model_shows(sections):
    assert not is_counted(build_recipe(**sections), small("llama"))


def refusal(check):
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


ADAPTERS = [
    {"method": "lora"},
    {"method": "dora", "r": 64},
    {"method": "lora", "r": 65},
    {"method": "lora", "r": 33, "init": "pissa"},
    {"method": "lora", "target_modules": ["q_proj", "down_proj"], "r": 8},
    {"method": "lora", "target_modules": ["q_prj"]},
    {"method": "qlora"},
]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: " ".join(map(str, adapter.values())))
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 132}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen2_moe", "mixtral", "deepseek_v3"])
def test_an_adapter_is_refused_by_shape_as_by_the_model(family, sizes, adapter):
    fields = {**small(family), **sizes, **({"head_dim": 16} if family == "gemma2" else {})}
    recipe = build_recipe(adapter=adapter)
    if not is_counted(recipe, fields):
        assert family in MIXTURES  # whose layers can be named only for a built model
        return
    model = build_on_meta(load_config(fields))

    def build():
        check_adapter(model, recipe.adapter)
        apply_adapter(model, recipe.adapter)

    shaped = refusal(lambda: check_shape(recipe, build_shape(fields), False, []))
    built = refusal(build)
    assert (shaped is None) == (built is None), (shaped, built)
    if built is not None:  # by the same key, with the same number
        assert shaped.split(":")[0].split(" ")[0] == built.split(":")[0].split(" ")[0]


@pytest.mark.parametrize("hidden", [64, 72])
@pytest.mark.parametrize("inner", [128, 120])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "mixtral"])
def test_float8_is_refused_by_shape_as_by_the_model(family, inner, hidden):
    fields = {**small(family), "hidden_size": hidden, "intermediate_size": inner}
    recipe = build_recipe(train={"precision": "fp8"})
    assert is_counted(recipe, fields)
    model = build_on_meta(load_config(fields))
    shaped = refusal(lambda: check_shape(recipe, build_shape(fields), True, []))
    built = refusal(lambda: find_float8_layers(model))
    assert (shaped is None) == (built is None), (shaped, built)


def test_a_config_of_the_tests_is_counted():
    assert is_counted(build_recipe(), small_config("llama"))
