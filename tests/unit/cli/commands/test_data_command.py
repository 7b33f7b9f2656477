"""`echelon data`, in this process: its statistics and samples, and its refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from echelon.cli.main import app
from echelon.ground.errors import ConfigError, DataError
from echelon.learn.data.survey import bucket_lengths
from echelon.learn.data.tokenizer import train_tokenizer
from tests.unit.recipe_samples import SMALL

SUMS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(5) for b in range(4)]
BYTES = ["tokenizer=bytes", "data.document_separator=null", "data.sequence_len=16", "data.validation_fraction=0"]


@pytest.fixture
def show(tmp_path, monkeypatch):
    """Run the command on records; return its output, or raise its error."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(SMALL)

    def run(records: list[object], *overrides: str) -> str:
        Path("x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        arguments = ["data", "recipe.yaml", "data.train=x.jsonl", "data.prepare_workers=1", *overrides]
        result = CliRunner().invoke(app, arguments)
        if result.exception is not None:
            raise result.exception
        return result.output

    return run


def test_counts_lengths_and_documents(show):
    # 20 records of 4 + 1 bytes; the completion is the target: 20 of 100.
    found = show(SUMS, *BYTES, "--samples", "2")
    assert "data.train.0: records of format prompt_completion in x.jsonl" in found
    assert "data.train.0 (x.jsonl), train: 20 samples, 100 tokens, 20.0% of them learned" in found
    assert "10 % up to 5, 50 % up to 5, 90 % up to 5, 99 % up to 5, the longest 5" in found
    # Each takes 4 positions, so four share a sequence of 16.
    assert "train: 5 sequences of 16" in found
    shown = [line for line in found.splitlines() if line.endswith("]]")]
    assert len(shown) == 2
    for line in shown:
        prompt, answer = line.rstrip("]").split("[[")
        assert {"prompt": prompt, "completion": answer} in SUMS
    assert found.count("5 tokens, 1 learned (in [[ ]])") == 2


def test_a_source_that_is_also_held_out_is_called_so(show):
    records = [{"text": "one and two and three and four"}] * 5
    divided = show(records, *BYTES, "data.validation_fraction=0.2", "--samples", "0")
    assert "data.train.0 (x.jsonl), train and held out: 5 documents, 150 tokens" in divided
    Path("y.jsonl").write_text('{"text": "five and six"}\n')
    apart = show(records, *BYTES[:-1], "data.validation=y.jsonl", "--samples", "0")
    assert "data.train.0 (x.jsonl), train: 5 documents, 150 tokens" in apart
    assert "(y.jsonl), validation: 1 documents, 12 tokens" in apart


def test_a_limit_is_shown(show):
    found = show(SUMS, *BYTES, "data.train.0.max_samples=7")
    assert "data.train.0: only the first 7 records are read (max_samples)" in found
    assert "data.train.0 (x.jsonl), train: 7 samples, 35 tokens, 20.0% of them learned" in found


def test_every_token_of_a_text_is_a_target(show):
    found = show([{"text": "one and two and three"}], *BYTES, "--samples", "1")
    assert "data.train.0 (x.jsonl), train: 1 documents, 21 tokens" in found
    assert "17 tokens, all learned but the first" in found or "5 tokens, all learned but the first" in found
    assert "[[" not in found


def test_samples_without_an_answer_are_broken_records(show):
    records = [*SUMS, {"prompt": "2+2=", "completion": ""}]
    with pytest.raises(DataError, match=r"data\.max_broken_fraction.*x\.jsonl:21 has an empty answer"):
        show(records, *BYTES)
    found = show(records, *BYTES, "data.max_broken_fraction=0.1", "--samples", "0")
    assert "20 samples, 100 tokens, 20.0% of them learned, 1 broken records left out" in found


def test_data_that_does_not_fit_the_recipe_is_refused(show):
    talk = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    with pytest.raises(ConfigError, match=r"set data\.chat_template to chatml"):
        show(talk, *BYTES)
    with pytest.raises(ConfigError, match=r"add them with model\.new_tokens: \['<\|im_start\|>', '<\|im_end\|>'\]"):
        show(talk, *BYTES, "data.chat_template=chatml")
    assert not list(Path.cwd().glob("runs/prepared/*/manifest.json"))
    with pytest.raises(ConfigError, match=r"model\.config\.vocab_size=100 is smaller than the tokenizer's 256 ids"):
        show(SUMS, *BYTES, "model.config.vocab_size=100")


def test_a_stop_token_that_is_always_cut_off_is_refused(show):
    """Only 8 positions of `1+1=2222~` fit: the beginning of the answer is a target, its stop token never."""
    long = [{"prompt": f"{a}+{a}=", "completion": "2" * 8} for a in range(10)]
    options = ["tokenizer=bytes", "data.document_separator=null", "data.validation_fraction=0", "data.sequence_len=8"]
    assert "learned" in show(long, *options)  # they have no stop token
    train_tokenizer([json.dumps(long)], 257).save_pretrained("eos")
    options[:2] = ["tokenizer=eos", "model.config.vocab_size=257"]
    with pytest.raises(ConfigError, match=r"data\.sequence_len=8 cuts off the end of every answer of data\.train\.0"):
        show(long, *options)
    assert "10 of 11 samples are longer" in show([*long, {"prompt": "1+1=", "completion": "2"}], *options)


def test_histograms_have_round_buckets():
    assert bucket_lengths(np.array([1, 5, 5, 16, 17, 80])) == [
        (1, 10, 3), (11, 20, 2), (21, 30, 0), (31, 40, 0), (41, 50, 0), (51, 60, 0), (61, 70, 0), (71, 80, 1),
    ]  # fmt: skip
    assert bucket_lengths(np.array([3])) == [(1, 1, 0), (2, 2, 0), (3, 3, 1)]
    assert bucket_lengths(np.array([1700]))[-1] == (1501, 1800, 1)
