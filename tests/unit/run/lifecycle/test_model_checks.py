"""Which models are checked by their formula alone, and which are built."""

import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.model.adapters import apply_adapter, check_adapter
from echelon.learn.model.build import build_on_meta, load_config
from echelon.planner.adapter_plan import check_adapter_shape
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
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
        {"model": {"config": SIZES, "attn_implementation": "eager"}},
        {"optim": {"learning_rate": 1e-3, "learning_rate_multipliers": {"*norm*": 2.0}}},
        {"adapter": {"method": "lora", "modules_to_save": ["embed_tokens"]}},
        {"adapter": {"method": "lora", "target_modules": ["lm_head"]}},
        {"train": {"precision": "fp8"}},
    ],
)
def test_what_only_a_built_model_shows(sections):
    assert not is_counted(build_recipe(**sections), SIZES)


PUBLISHED = {
    **SIZES, "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": [2, 3],
    "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": 5},
        {"sliding_window": 8},
        {"hidden_act": "sillu"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"quantization_config": {}},
        {"pad_token_id": 0},
        {"auto_map": {}},
    ],
)
def test_a_plain_checkpoint_is_not_built(fields):
    recipe = build_recipe(model={"checkpoint": "folder"})
    assert is_counted(recipe, PUBLISHED)
    assert is_counted(recipe, PUBLISHED | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert not is_counted(recipe, PUBLISHED | fields)
    assert not is_counted(build_recipe(model={"config": PUBLISHED}), PUBLISHED)


ADAPTERS = [
    {"method": "lora"},
    {"method": "dora", "r": 64},
    {"method": "lora", "r": 65},
    {"method": "lora", "r": 33, "init": "pissa"},
    {"method": "lora", "target_modules": ["q_proj", "down_proj"], "r": 8},
    {"method": "lora", "target_modules": ["q_prj"]},
    {"method": "qlora"},
]


def refusal(check):
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: " ".join(map(str, adapter.values())))
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 132}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_an_adapter_is_refused_by_shape_as_by_the_model(family, sizes, adapter):
    fields = {**SIZES, "model_type": family, **sizes, **({"head_dim": 16} if family == "gemma2" else {})}
    recipe = build_recipe(model={"checkpoint": "folder"}, adapter=adapter)
    assert is_counted(recipe, fields)
    model = build_on_meta(load_config(fields))

    def build():
        check_adapter(model, recipe.adapter)
        apply_adapter(model, recipe.adapter)

    shaped = refusal(lambda: check_adapter_shape(recipe.adapter, build_shape(fields)))
    built = refusal(build)
    assert (shaped is None) == (built is None), (shaped, built)
    if built is not None:  # by the same key, with the same number
        assert shaped.split(":")[0].split(" ")[0] == built.split(":")[0].split(" ")[0]
