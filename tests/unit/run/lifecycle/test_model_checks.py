"""Which models are checked by their formula alone, and which are built."""

import pytest

from echelon.recipe import Recipe
from echelon.run.lifecycle.model_checks import is_counted

SIZES = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def build_recipe(**sections):
    model = sections.pop("model", {"config": SIZES})
    fixed = {"run": {"name": "r"}, "data": {"train": "text.txt", "sequence_len": 64}, "optim": {"learning_rate": 1e-3}}
    train = {"steps": 1, "global_batch_size": 8} | sections.pop("train", {})
    return Recipe.model_validate({**fixed, "model": model, "tokenizer": "bytes", "train": train, **sections})


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "silu"},
        {"num_hidden_layer": 2},
        {"rope_parameters": {"rope_type": "default"}},
        {"sliding_window": 8},
        {"num_key_value_heads": None},
        {"model_type": "granite"},
        {"model_type": "mixtral"},
    ],
)
def test_a_new_model_with_sizes_alone_is_not_built(fields):
    assert is_counted(build_recipe(), SIZES)
    assert not is_counted(build_recipe(), SIZES | fields)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"checkpoint": "folder"}},
        {"model": {"config": SIZES, "attn_implementation": "eager"}},
        {"optim": {"learning_rate": 1e-3, "learning_rate_multipliers": {"*norm*": 2.0}}},
        {"adapter": {"method": "lora"}},
        {"train": {"precision": "fp8"}},
    ],
)
def test_what_only_a_built_model_shows(sections):
    assert not is_counted(build_recipe(**sections), SIZES)
