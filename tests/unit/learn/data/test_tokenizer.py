"""Tokenizers: exact ids, round trips, and folders that AutoTokenizer loads."""

import json.decoder
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from echelon.ground.errors import ConfigError, DataError
from echelon.learn.data.tokenizer import (
    build_bytes_tokenizer,
    build_tokenizer,
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
    vocabulary = build_bytes_tokenizer().get_vocab()
    assert sorted(vocabulary.values()) == list(range(256))


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
