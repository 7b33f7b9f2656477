"""Which models are checked by formula alone, and which are built; wrong files of strangers are one message."""

import json
import shutil

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from echelon.ground.errors import ConfigError
from echelon.learn.model.adapters import apply_adapter, check_adapter
from echelon.learn.model.build import build_on_meta, load_config
from echelon.planner.adapter_plan import check_adapter_shape
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from echelon.run.lifecycle.model_checks import is_counted
from tests.dist.command import CommandLine

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


CONFIG = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "bos_token_id": None,
}


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """An HF folder whose tokenizer splits texts by a regular expression that fails on a row of `a`."""
    path = tmp_path_factory.mktemp("strange") / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(path)
    inner = Tokenizer(models.BPE(vocab={chr(32 + each): each for each in range(64)} | {"a": 64, "d": 65}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+(a+)+(a+)+b"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="!").save_pretrained(path)
    return path


@pytest.fixture
def command(capfd, monkeypatch):
    return CommandLine(capfd, monkeypatch)


def assert_refused(ending, *words):
    """One message, beside what the native code prints itself."""
    assert ending.code == 2, ending
    [message] = [line for line in ending.err.splitlines() if line.startswith("echelon: ")]
    assert all(word in message for word in words), message
    assert "Traceback (most recent call last)" not in ending.err


def write_texts(folder):
    """Four lines, of which the tokenizer fails on the third."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in ["A B C", "D E F", "a" * 60, "G H I"]))
    return path


def test_eval_names_the_tokenizer_and_the_record_on_which_it_fails(strange, tmp_path, command):
    path = write_texts(tmp_path)
    ending = command("eval", strange, "--data", path)
    assert_refused(ending, f"the tokenizer {strange} failed at {path}:3: ", "retry-limit-in-match")


@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_names_the_tokenizer_and_the_file(strange, tmp_path, command, workers):
    path = write_texts(tmp_path)
    recipe = {
        "run": {"name": "strange", "dir": str(tmp_path / "run")},
        "model": {"config": {"model_type": "llama", **CONFIG}},
        "tokenizer": str(strange),
        "data": {"train": str(path), "sequence_len": 8, "prepare_workers": workers},
        "train": {"steps": 1, "global_batch_size": 1},
        "optim": {"learning_rate": 1e-3},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    ending = command("data", "--prepare", tmp_path / "recipe.json")
    assert_refused(ending, f"the tokenizer {strange} failed at {path}:3: ")


@pytest.mark.parametrize("chat", [False, True])
def test_generate_names_the_prompt(strange, command, tmp_path, chat):
    if chat:
        shutil.copytree(strange, strange := tmp_path / "model")
        (strange / "chat_template.jinja").write_text("{{ messages[0].content }}")
    arguments = ["--chat"] if chat else []
    ending = command("generate", strange, "--prompt", "a" * 60, "--max-tokens", 2, *arguments)
    assert_refused(ending, f"the tokenizer {strange} failed at --", "'" + "a" * 40 + "...'")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"eos_token_id": "x"}, "eos_token_id=x must be one id of the model's vocabulary (0 to 127)"),
        ({"eos_token_id": [3, 4000]}, "eos_token_id=[3, 4000] must be"),
        ({"eos_token_id": True}, "eos_token_id=True must be"),
        ({"top_k": 5, "pad_token_id": "x"}, "pad_token_id=x: "),
        ({"max_new_tokens": [1]}, "max_new_tokens=[1]: "),
        ([1], "transformers cannot use it"),
    ],
)
def test_a_wrong_value_for_generation_names_file_and_key(strange, tmp_path, command, content, words):
    shutil.copytree(strange, strange := tmp_path / "model")
    (strange / "generation_config.json").write_text(json.dumps(content))
    ending = command("generate", strange, "--prompt", "A B", "--max-tokens", 2)
    assert_refused(ending, f"{strange}/generation_config.json: {words}")


def test_a_strange_value_for_generation_that_is_not_used_changes_nothing(strange, tmp_path, command):
    shutil.copytree(strange, strange := tmp_path / "model")
    (strange / "generation_config.json").unlink(missing_ok=True)
    arguments = ("generate", strange, "--prompt", "A B", "--max-tokens", 4)
    plain = command(*arguments)
    (strange / "generation_config.json").write_text('{"min_length": 1e9, "repetition_penalty": -3, "num_beams": 1e6}')
    assert command(*arguments).out == plain.out != ""
