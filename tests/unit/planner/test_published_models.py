"""Published models have the sizes that the hub shows, by formula and as transformers builds them."""

import json

import pytest

from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.copy_checks import check_is_causal
from echelon.planner.count_on_meta import measure_shape
from echelon.planner.shape import build_shape

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


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_counted_as_they_are_built(name, tmp_path):
    fields = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(str(tmp_path))
    model, counted = build_on_meta(config), build_shape(fields)
    assert counted.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counted.num_parameters == SIZES.get(name, counted.num_parameters)
    built = measure_shape(fields)
    assert sorted(counted.linears, key=repr) == sorted(built.linears, key=repr)
    check_is_causal(config)
