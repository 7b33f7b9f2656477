"""Tokenizers: exact ids, round trips, sizes without transformers, and folders that AutoTokenizer loads."""

import json
import json.decoder
import struct
from base64 import b64encode
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from echelon.ground.errors import ConfigError, DataError
from echelon.learn.data.tokenizer import (
    build_bytes_tokenizer,
    build_tokenizer,
    count_ids,
    load_tokenizer,
    separator_id,
    tokenizer_fingerprint,
    train_tokenizer,
    vocabulary_size,
)

CODE = Path(json.decoder.__file__).read_text()
AWKWARD = "\0 tab\t\r\n  <s> <|endoftext|> é ﬁ 語 🙂 e\u0301 \u3000 \x7f .  ,"


def test_bytes_has_the_ids_of_utf8(tmp_path):
    tokenizer = build_bytes_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    every_byte = "".join(map(chr, range(0x800))) + "語🙂"
    for text in (AWKWARD, CODE[:5000], every_byte, " leading", ""):
        for each in (tokenizer, loaded):
            ids = each(text)["input_ids"]
            assert ids == list(text.encode())
            assert each.decode(ids) == text
    assert len(loaded) == 256
    assert vocabulary_size(loaded.backend_tokenizer) == 256
    assert separator_id(loaded) is None
    assert not loaded.all_special_ids


def test_bytes_that_are_not_utf8_also_have_ids():
    assert sorted(build_bytes_tokenizer().get_vocab().values()) == list(range(256))


def test_training_is_deterministic_and_round_trips(tmp_path):
    texts = [CODE, "Übergrößen 語 " * 50]
    tokenizer = train_tokenizer(texts, 600)
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(train_tokenizer(iter(texts), 600))
    assert vocabulary_size(tokenizer.backend_tokenizer) == 600
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)
    assert loaded.convert_ids_to_tokens(separator_id(loaded)) == "<|endoftext|>"
    for text in (CODE, AWKWARD):
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert len(loaded(CODE)["input_ids"]) < 0.6 * len(CODE)


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"tokenizer\.train\.vocab_size=256 .* use 257 or more"):
        train_tokenizer(["x"], 256)


def test_the_fingerprint_covers_everything_that_determines_the_ids():
    fingerprints = {
        tokenizer_fingerprint(build_bytes_tokenizer()),
        tokenizer_fingerprint(train_tokenizer([CODE], 500)),
        tokenizer_fingerprint(train_tokenizer([CODE], 501)),
        tokenizer_fingerprint(train_tokenizer([CODE[:3000]], 500)),
    }
    tokenizer = train_tokenizer([CODE], 500)
    tokenizer.add_tokens(["<extra>"])
    fingerprints.add(tokenizer_fingerprint(tokenizer))
    assert len(fingerprints) == 5
    same = train_tokenizer([CODE], 500)
    same.backend_tokenizer.enable_truncation(5)
    assert tokenizer_fingerprint(same) in fingerprints


def test_a_missing_tokenizer_is_refused_with_a_message(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="tokenizer is not set"):
        build_tokenizer(None, None)


def test_the_checkpoints_own_tokenizer_is_the_default(tmp_path):
    train_tokenizer([CODE], 300).save_pretrained(tmp_path)
    assert len(build_tokenizer(None, str(tmp_path))) == 300
    assert len(build_tokenizer("bytes", str(tmp_path))) == 256


def test_dropout_is_not_used(tmp_path, caplog):
    """It is for training; with it a text would have other tokens each time."""
    tokenizer = train_tokenizer([CODE], 600)
    expected = tokenizer(CODE[:2000])["input_ids"]
    tokenizer.backend_tokenizer.model.dropout = 0.5
    assert tokenizer(CODE[:2000])["input_ids"] != expected
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert [loaded(CODE[:2000])["input_ids"] for _ in range(5)] == [expected] * 5
    [line] = [line for line in caplog.messages if "dropout" in line]
    assert "its dropout of 0.5, by which a text has other tokens each time, is not used" in line
    encoder = Tokenizer.from_str(loaded.backend_tokenizer.to_str())  # as tokenizing processes make it
    assert encoder.encode(CODE[:2000]).ids == expected
    train_tokenizer([CODE], 600).save_pretrained(tmp_path / "plain")
    plain = load_tokenizer(str(tmp_path / "plain"))
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(plain)
    assert len([line for line in caplog.messages if "dropout" in line]) == 1


def replace(pattern, content, form="String"):
    return {"type": "Replace", "pattern": {form: pattern}, "content": content}


def in_sequence(*steps, name="normalizers"):
    return {"type": "Sequence", name: list(steps)}


def charsmap(*texts):
    """A map of SentencePiece that writes these texts, with an empty trie."""
    trie = struct.pack("<256I", *[0] * 256)
    return {
        "type": "Precompiled",
        "precompiled_charsmap": b64encode(struct.pack("<I", len(trie)) + trie + "\0".join(texts).encode()).decode(),
    }


AROUND = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [1], "tokens": ["x"]}},
}
HOSTILE = {
    "replacements": {"normalizer": in_sequence(*[replace("e", "e" * 1000)] * 4)},
    "one long replacement": {"normalizer": replace("e", "f" * 100)},
    "replacements in turn": {"normalizer": in_sequence(*[replace("a", "bb"), replace("b", "aa")] * 5)},
    "nested sequences": {"normalizer": in_sequence(in_sequence(*[replace("ab", "aabbaabb")] * 4))},
    "expressions": {"normalizer": in_sequence(*[replace("[a-z]", "abcde", "Regex")] * 4)},
    "expressions that match nothing": {"normalizer": in_sequence(*[replace("(?=e)|x", "e", "Regex")] * 7)},
    "prefixes": {"normalizer": {"type": "Prepend", "prepend": "e" * 100}},
    "a letter for another": {"normalizer": in_sequence({"type": "Lowercase"}, replace("e", "f" * 100))},
    "a map": {"normalizer": charsmap("a", "e" * 100)},
    "a decoder": {"decoder": in_sequence(*[replace("e", "ee")] * 10, name="decoders")},
    "tokens around": {"post_processor": {**AROUND, "single": AROUND["single"] * 1000}},
    "a token with many ids": {
        "post_processor": {**AROUND, "special_tokens": {"x": {"id": "x", "ids": [1] * 2000, "tokens": ["x"] * 2000}}}
    },
}
HARMLESS = {
    "Llama 2": {"normalizer": in_sequence({"type": "Prepend", "prepend": "_"}, replace(" ", "_"))},
    "ALBERT": {
        "normalizer": in_sequence(
            replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"},
            charsmap("a", "x" * 18), replace(" {2,}", " ", "Regex"),
        )
    },
    "many symbols": {"normalizer": in_sequence(*[replace(chr(0x2150 + place), " 1/2 ") for place in range(40)])},
    "a line end": {"normalizer": in_sequence({"type": "NFKC"}, charsmap("x" * 18), replace("\n", "<newline>"))},
    "spaces": {"normalizer": in_sequence(*[replace(r"\s+", " ", "Regex")] * 20)},
    "padding": {"padding": {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None,
                            "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}},
}  # fmt: skip


@pytest.mark.parametrize("name", [*HOSTILE, *HARMLESS])
def test_a_tokenizer_that_multiplies_text_is_refused(tmp_path, name):
    """The library would abort the process, which no handler catches."""
    train_tokenizer([CODE], 300).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, **HOSTILE.get(name, HARMLESS.get(name))}))
    if name in HARMLESS:
        assert load_tokenizer(str(tmp_path))("elephant")["input_ids"]
        assert count_ids(tmp_path) == 300
        return
    refused = (
        rf"tokenizer={tmp_path} cannot be loaded .*: its? (normalizer|decoder|adds) .*; it may (make 64|add 1,000)\."
    )
    with pytest.raises(DataError, match=refused):
        load_tokenizer(str(tmp_path))
    assert count_ids(tmp_path) is None


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
