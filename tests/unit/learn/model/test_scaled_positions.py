"""Scaled rotary positions: the model of `model.rope` is the one that transformers builds from its config."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.ground.errors import ConfigError
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.config import check_full_sequences, check_scaled, scale_positions
from echelon.recipe.load import parse_recipe
from tests.families import initialized, small_config
from tests.unit.recipe_samples import DEMO

LONG = 64
# What the recipe says, what stands in a config for it, and the length that the config then states.
CASES = [
    ("llama", {"rope_type": "yarn", "factor": 4}, {"rope_type": "yarn", "factor": 4.0}, LONG),
    (
        "llama",
        {"rope_type": "yarn", "factor": 8, "beta_fast": 16, "attention_factor": 2,
         "original_max_position_embeddings": 8},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 16,
            "attention_factor": 2.0,
            "original_max_position_embeddings": 8,
        },
        LONG,
    ),
    ("qwen3", {"rope_type": "linear", "factor": 4}, {"rope_type": "linear", "factor": 4.0}, LONG),
    ("llama", {"rope_type": "dynamic", "factor": 4}, {"rope_type": "dynamic", "factor": 4.0}, 16),
    ("llama", {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4},
     {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, LONG),
    ("mixtral", {"rope_type": "yarn", "factor": 4}, {"rope_type": "yarn", "factor": 4.0}, LONG),
    ("stablelm", {"rope_type": "yarn", "factor": 4}, {"rope_type": "yarn", "factor": 4.0}, LONG),  # a part of each head
]  # fmt: skip


def read_recipe(rope, length=LONG):
    keys = [f"model.rope.{key}={value}" for key, value in rope.items()]
    return parse_recipe(DEMO, "recipe.yaml", [f"data.sequence_len={length}", *keys])[0]


def scaled(family, rope, length=LONG, **fields):
    config = load_config(small_config(family, **{"max_position_embeddings": 16, **fields}))
    recipe = read_recipe(rope, length)
    scale_positions(config, recipe)
    return config, recipe


@torch.no_grad()
def logits_of(model, length=LONG):
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.uniform_(-0.3, 0.3)
    return model.eval()(input_ids=torch.arange(length)[None] + 64, use_cache=False).logits


@pytest.mark.parametrize(("family", "rope", "stated", "reach"), CASES, ids=lambda value: str(value)[:40])
def test_logits_are_those_of_transformers(family, rope, stated, reach):
    config, recipe = scaled(family, rope)
    assert config.max_position_embeddings == reach
    model = initialized(config, seed=0)
    check_scaled(model, recipe)
    fields = small_config(family, max_position_embeddings=16)
    own = AutoConfig.for_model(**fields).rope_parameters
    if family == "mixtral":
        fields["head_dim"] = 16
    kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if name in own}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**fields, "rope_parameters": kept | stated}))
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    expected = logits_of(theirs)
    assert torch.equal(logits_of(model), expected)
    assert not torch.allclose(expected, logits_of(plain), atol=1e-3)


def test_layers_with_a_window_keep_their_positions():
    """As in the configs of Gemma 3, whose `rope_scaling` was that of its layers with full attention."""
    config, _ = scaled("gemma3_text", {"rope_type": "linear", "factor": 8}, num_hidden_layers=6)
    before = load_config(small_config("gemma3_text", max_position_embeddings=16, num_hidden_layers=6)).rope_parameters
    assert config.rope_parameters["sliding_attention"] == before["sliding_attention"]
    assert config.rope_parameters["full_attention"] == {
        **before["full_attention"], "rope_type": "linear", "factor": 8.0
    }  # fmt: skip
    assert logits_of(initialized(config, seed=0)).isfinite().all()


def test_an_exported_folder_has_the_scale(tmp_path):
    config, _ = scaled("llama", {"rope_type": "yarn", "factor": 4})
    model = initialized(config, seed=0)
    expected = logits_of(model)
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(theirs(input_ids=torch.arange(LONG)[None] + 64, use_cache=False).logits, expected)
    again = load_config(str(tmp_path))
    with pytest.raises(ConfigError, match=r"model.rope.rope_type=linear: .* scaled already \(rope_type yarn\)"):
        scale_positions(again, read_recipe({"rope_type": "linear", "factor": 4}))
    scale_positions(again, read_recipe({"rope_type": "linear", "factor": 8, "original_max_position_embeddings": 16}))
    assert again.rope_parameters["rope_type"] == "linear" and again.max_position_embeddings == 128


@pytest.mark.parametrize(
    ("family", "length", "message"),
    [
        ("gpt2", LONG, r"model.rope.rope_type=yarn: a gpt2 model has no rotary positions"),
        ("llama", 65, r"data.sequence_len=65 is longer than the 64 positions .*set model.rope.factor=5"),
        ("gemma3_text", LONG, r"model.rope.rope_type=yarn: Gemma3ForCausalLM with this config computes no such"),
    ],
)
def test_what_cannot_be_scaled_is_refused(family, length, message):
    with pytest.raises(ConfigError, match=message):
        config, recipe = scaled(family, {"rope_type": "yarn", "factor": 4}, length)
        check_scaled(build_on_meta(config), recipe)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.rope={rope_type: yarn}"], "model.rope.factor"),
        (["model.rope={rope_type: ntk, factor: 4}"], r"rope_type='ntk' must be one of linear, dynamic, yarn, llama3"),
        (["model.rope={rope_type: yarn, factor: 0.5}"], r"model.rope.factor must be a number of 1 or more"),
        (["model.rope={rope_type: yarn, factor: .inf}"], r"model.rope.factor=inf must be a finite number"),
        (["model.rope={rope_type: yarn, factor: 4, beta_fast: fast}"], r"model.rope.beta_fast='fast' must be a finite"),
        (["model.rope={rope_type: linear, factor: 4, beta_fast: 32}"], r"Unrecognized keys .*linear.*beta_fast"),
        (["model.rope={rope_type: llama3, factor: 4, low_freq_factor: 1}"], "Missing .*high_freq_factor"),
        (["model.rope={rope_type: yarn, factor: 4, beta_slow: 64}"], "must be greater than beta_slow.*=64"),
        (["model.rope={rope_type: dynamic, factor: 4}", "data.packing=false"], r"dynamic .*data.packing=false"),
        (["model.rope={rope_type: dynamic, factor: 4}", "data.document_mask=true"], r"dynamic .*data.document_mask"),
        (["model.rope={rope_type: dynamic, factor: 4}", "objective.name=dpo"], r"dynamic .*objective.name=dpo"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        recipe, _ = parse_recipe(DEMO, "recipe.yaml", keys)
        scale_positions(load_config(small_config("llama")), recipe)


def test_positions_that_depend_on_a_batch_are_refused_for_documents():
    recipe = read_recipe({"rope_type": "dynamic", "factor": 4})
    check_full_sequences(recipe)
    with pytest.raises(ConfigError, match=r"rope_type=dynamic .* documents of this data are kept apart .*yarn"):
        check_full_sequences(recipe, are_apart=True)


def test_the_spelling_of_earlier_versions_is_read():
    whole, _ = parse_recipe(DEMO, "recipe.yaml", ["model.rope={type: yarn, factor: 4}"])
    recipe, notes = parse_recipe(DEMO, "recipe.yaml", ["model.rope.type=yarn", "model.rope.factor=4"])
    assert recipe.model.rope == whole.model.rope == {"rope_type": "yarn", "factor": 4}
    assert any("model.rope.type: yarn is of an earlier version" in note for note in notes)
