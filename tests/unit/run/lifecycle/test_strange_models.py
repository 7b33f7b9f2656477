"""Model folders of strangers whose files are wrong in ways that the libraries do not expect: one message each."""

import json
import shutil

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.dist.command import CommandLine

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
