"""The chosen attention implementation supports all features of the model, and uses no mask if none is needed."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from echelon.ground.errors import ConfigError
from echelon.learn.model.attention import PLAIN_CAUSAL, choose_attention
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.traits import apply_plain_causal, find_traits
from tests.families import random_batch, small_config, small_model

LENGTH = 32


def logits(model, input_ids):
    with torch.no_grad():
        return model(input_ids=input_ids, use_cache=False).logits


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "cohere", "granite", "gpt2", "stablelm"]
)
def test_without_a_mask_the_logits_are_the_same_bit_for_bit(family):
    model, (input_ids, _) = small_model(family), random_batch(length=LENGTH)
    assert model.config._attn_implementation == "sdpa"
    expected = logits(model, input_ids)
    apply_plain_causal(model, find_traits(model, LENGTH))
    assert model.config._attn_implementation == PLAIN_CAUSAL
    assert torch.equal(logits(model, input_ids), expected)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_shorter_than_the_sequence_keeps_its_mask(family):
    model = small_model(family, sliding_window=LENGTH - 1)
    apply_plain_causal(model, find_traits(model, LENGTH))
    assert model.config._attn_implementation == "sdpa"
    apply_plain_causal(model, find_traits(model, LENGTH - 1))
    assert model.config._attn_implementation == PLAIN_CAUSAL


def test_a_model_that_attends_otherwise_is_unchanged():
    model = small_model("llama", use_cache=False)
    apply_plain_causal(model, replace(find_traits(model), skips_mask=False))
    assert model.config._attn_implementation == "sdpa"


def test_soft_capped_scores_are_capped():
    """A cap of 1e-3 makes every score about 0, so attention is the mean of all earlier values."""
    config = load_config(small_config("gemma2", attn_logit_softcapping=1e-3))
    assert build_on_meta(config).config._attn_implementation == "eager"
    capped, free = (small_model("gemma2", attn_logit_softcapping=cap) for cap in (1e-3, None))
    for model in (capped, free):
        model.get_submodule("model.layers.0.self_attn.q_proj").weight.data.mul_(100)
    input_ids, _ = random_batch(length=LENGTH)
    assert (logits(capped, input_ids) - logits(free, input_ids)).abs().max() > 1e-3


def test_the_users_choice_is_used_unless_it_cannot_compute_the_model():
    capped, plain = (load_config(small_config(family)) for family in ("gemma2", "llama"))
    assert choose_attention(plain, None) is None
    assert choose_attention(plain, "eager") == choose_attention(capped, "eager") == "eager"
    with pytest.raises(ConfigError, match=r"attn_implementation=sdpa cannot.*attn_logit_softcapping is 50\.0"):
        choose_attention(capped, "sdpa")


def test_by_default_transformers_chooses(tmp_path):
    small_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=None)
    assert model.config._attn_implementation == "sdpa"
