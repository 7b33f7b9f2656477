"""Roles of parameters, weight decay by role, and learning-rate multipliers, on real models."""

import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.optimizer import build_optimizer, check_groups
from echelon.learn.optimizer.muon import Muon
from echelon.learn.optimizer.stepper import find_members, find_roles
from echelon.recipe.training import OptimConfig
from tests.families import small_model


def config(**fields):
    return OptimConfig(learning_rate=1e-3, **fields)


def decaying(model, **fields):
    return {member.name for member in find_members(model, config(weight_decay=0.1, **fields)) if member.weight_decay}


def test_roles_come_from_the_modules():
    roles = find_roles(small_model("gpt2", tied=True))
    assert roles["transformer.wte.weight"] == roles["transformer.wpe.weight"] == {"embeddings"}
    assert roles["transformer.h.0.ln_1.weight"] == {"norms"}
    assert roles["transformer.h.0.ln_1.bias"] == {"norms", "biases"}
    assert roles["transformer.h.0.mlp.c_fc.bias"] == {"biases"}
    assert roles["transformer.h.0.mlp.c_fc.weight"] == set()
    qwen3 = find_roles(small_model("qwen3"))
    assert qwen3["model.layers.0.self_attn.q_norm.weight"] == {"norms"}
    assert qwen3["lm_head.weight"] == set(), "an untied head is no embedding"


def test_by_default_matrices_decay_and_vectors_do_not():
    model = small_model("gpt2")
    assert decaying(model) == {name for name, parameter in model.named_parameters() if parameter.ndim == 2}


def test_no_decay_is_by_role():
    model = small_model("gpt2", tied=True)
    everything = {name for name, _ in model.named_parameters()}
    assert decaying(model, no_decay=[]) == everything
    assert everything - decaying(model, no_decay=["embeddings"]) == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert "transformer.h.0.ln_1.weight" in decaying(model, no_decay=["biases"])
    assert "transformer.h.0.mlp.c_fc.bias" in decaying(model, no_decay=["norms"])


def test_muon_is_used_only_for_matrices_in_layers():
    optimizer = build_optimizer(small_model("llama"), config(name="muon"), "fp32", seed=0)
    by_muon = {slot.name for group in optimizer.groups if isinstance(group.rule, Muon) for slot in group.slots}
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    assert by_muon == {f"model.layers.{layer}.{kind}.weight" for layer in (0, 1) for kind in kinds}


def test_the_first_matching_glob_is_used():
    model = small_model("llama")
    multipliers = {"*layers.0.*": 0.5, "*layers*": 2.0, "*embed_tokens*": 0.0}
    factors = {
        member.name: member.rate_factor for member in find_members(model, config(learning_rate_multipliers=multipliers))
    }
    assert factors["model.layers.0.mlp.up_proj.weight"] == 0.5
    assert factors["model.layers.1.mlp.up_proj.weight"] == 2.0
    assert factors["model.embed_tokens.weight"] == 0.0
    assert factors["lm_head.weight"] == 1.0


def test_a_glob_without_a_match_is_refused_with_similar_names():
    names = [name for name, _ in small_model("llama").named_parameters()]
    check_groups(names, config(learning_rate_multipliers={"*embed_tokens*": 0.1}))
    with pytest.raises(ConfigError) as caught:
        check_groups(names, config(learning_rate_multipliers={"*": 1.0, "*embed_token.*": 0.1}))
    assert "optim.learning_rate_multipliers: '*embed_token.*'" in str(caught.value)
    assert "model.embed_tokens.weight" in str(caught.value)
