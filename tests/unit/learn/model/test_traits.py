"""Document masks and chunked losses are used where a small copy of the model shows that they are right."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from echelon.learn.model import traits
from echelon.learn.model.attention import PLAIN_CAUSAL
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.parts import HeadArithmetic
from echelon.learn.model.traits import apply_plain_causal, describe_obstacle, find_traits
from tests.families import small_config

SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}
# Models whose state goes from token to token: no mask of attention stops it.
RECURRENT = {
    "mamba": {},
    "rwkv": {"attention_hidden_size": 64, "context_length": 64},
    "qwen3_next": {
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip


def meta_model(family, **fields):
    return build_on_meta(load_config(small_config(family, **fields)))


@pytest.mark.parametrize(
    ("family", "fields", "form"),
    [
        ("llama", {}, "full"),
        ("mistral", {"sliding_window": 1000}, "window"),
        ("gemma3_text", {"sliding_window": 1000}, "by_layer"),
        ("mixtral", {}, "full"),
        ("deepseek_v3", {}, "full"),
    ],
)
def test_the_form_of_mask_is_found(family, fields, form):
    assert find_traits(meta_model(family, **fields)).mask == form


@pytest.mark.parametrize("family", RECURRENT)
def test_models_with_a_state_cannot_keep_documents_apart(family):
    config = load_config({"model_type": family, **SMALL, **RECURRENT[family]})
    found = find_traits(build_on_meta(config))
    assert found.mask is None
    words = describe_obstacle(found, config)
    assert words.startswith(f"this {family} model cannot keep the documents of a sequence apart: ")
    assert "whatever the mask" in words or "takes no such mask" in words


def test_a_window_that_no_sequence_reaches_needs_no_mask_for_plain_text():
    model = meta_model("mistral", sliding_window=64)
    assert find_traits(model, 64).skips_mask and not find_traits(model, 65).skips_mask
    apply_plain_causal(model, find_traits(model, 64))
    assert model.config._attn_implementation == PLAIN_CAUSAL
    assert find_traits(model, 64).mask == "full", "found with sdpa"


class DeafLlama(modeling_llama.LlamaForCausalLM):
    """Ignores the mask that it is given: its documents attend to each other."""

    def forward(self, *args, attention_mask=None, position_ids=None, **kwargs):
        return super().forward(*args, **kwargs)


class FixedPositions(modeling_llama.LlamaForCausalLM):
    """Obeys masks, and counts positions from the start of the sequence with learned positions of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.places = torch.nn.Embedding(64, config.vocab_size)

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits + self.places(torch.arange(input_ids.shape[1]))
        return output


class ScaledByWidth(modeling_llama.LlamaForCausalLM):
    """Divides its logits by a number that no field of the config has: it follows from the width."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / (self.config.hidden_size / 512)
        return output


class CappedLlama(modeling_llama.LlamaForCausalLM):
    """Caps its logits with a field of the config that no other model has."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.config.my_cap * torch.tanh(output.logits / self.config.my_cap)
        return output


def of_class(model_class, cap=None, **fields):
    config = load_config(small_config("llama", **fields))
    if cap is not None:
        config.my_cap = cap
    with torch.device("meta"):
        return model_class._from_config(config)


def test_a_model_that_ignores_its_mask_is_noticed():
    found = find_traits(of_class(DeafLlama))
    assert found.mask is None and "whatever the mask" in found.obstacle


def test_a_model_that_computes_something_else_after_a_document_is_noticed():
    found = find_traits(of_class(FixedPositions))
    assert found.mask is None and "for the document alone" in found.obstacle
    assert found.arithmetic is None, "the logits are not those of the head"


def test_the_arithmetic_of_any_heads_is_read_from_the_config():
    assert find_traits(meta_model("gemma2")).arithmetic == HeadArithmetic(softcap=5.0)
    assert find_traits(meta_model("cohere")).arithmetic == HeadArithmetic(scale=0.3)
    assert find_traits(meta_model("granite")).arithmetic == HeadArithmetic(scale=1 / 3.0)
    assert find_traits(of_class(CappedLlama, cap=1000.0)).arithmetic == HeadArithmetic(softcap=1000.0)


def test_a_factor_that_follows_from_the_width_is_noticed():
    """In the narrow copy, which is 512 wide, the factor is 1; the other copy is twice as wide."""
    large = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
    found = find_traits(of_class(ScaledByWidth, **large))
    assert found.arithmetic is None and found.mask == "full"
    assert find_traits(of_class(modeling_llama.LlamaForCausalLM, **large)).arithmetic == HeadArithmetic()


@pytest.mark.slow
def test_large_models_are_tested_with_small_copies_and_once(monkeypatch):
    built = []
    build = traits.build_copy
    monkeypatch.setattr(traits, "build_copy", lambda *given: built.append(build(*given)) or built[-1])
    model = build_on_meta(load_config({"model_type": "mixtral", "sliding_window": 4096}))
    for _ in range(2):
        assert find_traits(model).mask == "window"
    assert len(built) == 2
    assert max(sum(each.numel() for each in one.parameters()) for one in built) < 100_000_000
    state = torch.get_rng_state()
    find_traits(model, 77)
    assert torch.equal(state, torch.get_rng_state())


def test_rotary_embeddings_that_follow_the_longest_document_are_noticed():
    """Beyond 64 positions, phi3's frequencies depend on the longest document of a batch."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    fields = {**small_config("llama"), "model_type": "phi3", "rope_parameters": rope,
              "original_max_position_embeddings": 64, "max_position_embeddings": 256}  # fmt: skip
    model = build_on_meta(load_config(fields))
    assert find_traits(model, 64).mask is not None
    assert find_traits(model, 128).mask is None


def test_flash_attention_is_tested_with_a_stand_in(monkeypatch):
    model = meta_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    assert find_traits(model).mask == "lengths"

    def forget(self, *args, cu_seq_lens_q=None, **kwargs):
        return forward(self, *args, **kwargs)

    forward = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forget)
    other = meta_model("llama", rms_norm_eps=2e-5)  # found anew
    other.config._attn_implementation_internal = "flash_attention_2"
    assert find_traits(other).mask is None


def test_an_unknown_attention_implementation_is_refused_with_the_key():
    model = meta_model("llama")
    model.config._attn_implementation_internal = "paged|sdpa"
    assert "model.attn_implementation=paged|sdpa" in find_traits(model).obstacle


def test_traits_do_not_depend_on_weights_or_adapters():
    peft = pytest.importorskip("peft")
    config = load_config(small_config("llama"))
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    expected = find_traits(model)
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    assert find_traits(adapted) is expected is find_traits(build_on_meta(config))


@pytest.mark.slow
def test_a_mixture_of_many_wide_experts_is_tried_too():
    """The widths of Qwen3-235B-A22B: copies with experts of 64 units were too large to run."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    config = load_config({"model_type": "qwen3_moe", "num_hidden_layers": 94, **sizes, **experts})
    found = find_traits(build_on_meta(config), 64)
    assert (found.mask, found.arithmetic) == ("full", HeadArithmetic())
