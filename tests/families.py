"""Small configs of each model family, for tests that hold for all of them."""

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from echelon.learn.data.loader import Microbatch
from echelon.learn.model.build import apply_score_head, build_on_meta, load_config
from echelon.learn.model.weights import initialize_weights
from echelon.learn.opened import OpenedModel, one_process

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXTRA: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 16},
    "gemma": COMMON | {"head_dim": 16},
    "gemma2": COMMON | {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    "gemma3_text": COMMON | {"head_dim": 16},
    "cohere": COMMON | {"logit_scale": 0.3},
    "granite": COMMON | {"logits_scaling": 3.0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    # mixtures of experts
    "qwen3_moe": COMMON
    | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    | {"router_aux_loss_coef": 0.1},
    "mixtral": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
    "stablelm": COMMON,
}

# each family above is a case of many tests, these of few
CONVERTED: dict[str, dict[str, Any]] = {
    "gpt_neox": {name: value for name, value in COMMON.items() if name != "num_key_value_heads"},
    "deepseek_v3": COMMON
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
}
OTHERS: dict[str, dict[str, Any]] = CONVERTED | {
    "gpt_oss": COMMON
    | {"intermediate_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "phi3": COMMON,
    "olmo2": COMMON,
    "olmoe": COMMON | {"num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
    "glm4": COMMON | {"head_dim": 16},
    "granitemoe": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
}


def small_config(family: str, tied: bool = False, **fields: Any) -> dict[str, Any]:
    """A config of about 0.1 M parameters, as it would stand under model.config."""
    fields_of = (EXTRA | OTHERS)[family]
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return {"model_type": family, "vocab_size": 256, "tie_word_embeddings": tied, **special, **fields_of, **fields}


def small_model(family: str, tied: bool = False, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A model of that config with echelon's initial weights, whole, on the CPU."""
    return initialized(load_config(small_config(family, tied, **fields)), seed)


def small_scorer(family: str, labels: Iterable[str] = (), seed: int = 0, **fields: Any) -> PreTrainedModel:
    """The same with a head that scores texts: one score, or one per label."""
    config = load_config(small_config(family, **fields))
    apply_score_head(config, list(labels), padding=0)
    return initialized(config, seed)


def initialized(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The model of a config with echelon's initial weights, whole, on the CPU."""
    skeleton = build_on_meta(config)
    model = build_on_meta(config).to_empty(device="cpu")
    model.tie_weights()
    initialize_weights(model, skeleton, seed)
    return model


def load_run_model(run: Path, device: torch.device) -> PreTrainedModel:
    """The whole model of a run's newest checkpoint."""
    return OpenedModel(run, None, one_process(device)).model


def random_batch(num: int = 2, length: int = 32, vocab: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random input ids and labels, [num, length] each, a stretch of labels masked."""
    tokens = torch.randint(0, vocab, (num, length + 1), generator=torch.Generator().manual_seed(seed))
    labels = tokens[:, 1:].clone()
    labels[0, 5:9] = -100
    return tokens[:, :-1].contiguous(), labels


def microbatch_of(tokens: torch.Tensor, labels: torch.Tensor | None = None, **fields: Any) -> Microbatch:
    """Sequences as a microbatch with ids from 0; without labels, each token is its own."""
    ids = np.arange(len(tokens))
    return Microbatch(tokens, tokens if labels is None else labels, ids, ids, **fields)


def assert_same_shapes(shapes: Iterable[tuple[int, ...]], model: nn.Module) -> None:
    """Compare planned shapes with those of a model's trained tensors: all matrices, and the numbers in vectors.

    A matrix may be stored transposed.
    """
    found = [tuple(each.shape) for each in model.parameters() if each.requires_grad]
    planned, found = (sorted(tuple(sorted(each)) for each in side) for side in (shapes, found))
    assert [each for each in planned if len(each) > 1] == [each for each in found if len(each) > 1]
    assert sum(map(prod, planned)) == sum(map(prod, found))
