"""The size of a tokenizer that is read without transformers is that of the tokenizer that transformers loads."""

import json

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from echelon.learn.data.tokenizer import count_ids, load_tokenizer, train_tokenizer, vocabulary_size

TEXT = "a few words to learn merges from, and a few more words. " * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_end|>"]
CLASSES = [
    "TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer",
    "Qwen2TokenizerFast", "GPT2Tokenizer",
]  # fmt: skip
KINDS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral"]


def write(folder, special=SPECIAL, config=None, **settings):
    """Write a tokenizer with special tokens; `config`: the model type of a config.json beside it."""
    tokenizer = train_tokenizer([TEXT], 290)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special], special_tokens=True)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": config}))


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", CLASSES)
def test_the_size_is_that_of_the_loaded_tokenizer(tmp_path, name, kind):
    write(tmp_path, config=kind, tokenizer_class=name)
    loaded = vocabulary_size(load_tokenizer(str(tmp_path)).backend_tokenizer)
    assert count_ids(tmp_path) == loaded


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", CLASSES)
def test_a_tokenizer_that_transformers_would_extend_is_left_to_it(tmp_path, name, kind):
    """Special tokens of the class or of its settings that tokenizer.json lacks get ids as it is loaded."""
    write(tmp_path, special=[], config=kind, tokenizer_class=name)
    loaded = vocabulary_size(AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer)
    assert count_ids(tmp_path) in (loaded, None)
    write(tmp_path, config=kind, tokenizer_class=name, pad_token="<filler>")
    loaded = vocabulary_size(AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer)
    assert count_ids(tmp_path) is None and loaded > len(SPECIAL)


@pytest.mark.parametrize("name", ["TokenizersBackend", "LlamaTokenizer", "Qwen2Tokenizer"])
def test_added_tokens_of_older_files(tmp_path, name):
    """Their settings list added tokens by id; more or fewer than tokenizer.json has change what is loaded."""
    write(tmp_path, tokenizer_class=name)
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    listed = {str(token.pop("id")): token for token in added}
    for tokens in (listed, {**listed, "999": {"content": "<new>", "special": True}}, dict(list(listed.items())[:-1])):
        write(tmp_path, tokenizer_class=name, added_tokens_decoder=tokens)
        loaded = vocabulary_size(AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer)
        assert count_ids(tmp_path) == (loaded if tokens is listed else None)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": "T5Tokenizer"}'),
        ("tokenizer_config.json", '{"tokenizer_class": "GemmaTokenizer"}'),
        ("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["a", "b"]}}'),
        ("added_tokens.json", '{"<more>": 400}'),
        ("special_tokens_map.json", '{"pad_token": "<more>"}'),
        ("tekken.json", "{}"),
        ("config.json", "{}"),
    ],
)
def test_other_files_are_left_to_transformers(tmp_path, file, content):
    write(tmp_path)
    assert count_ids(tmp_path) is not None
    (tmp_path / file).write_text(content)
    assert count_ids(tmp_path) is None
