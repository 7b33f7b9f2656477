"""`echelon init`: the starter recipe, and a recipe for a model size and number of tokens, which trains."""

import json
from pathlib import Path

import pytest

from tests.dist.command import TEXT, read_lines

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_a_recipe_for_a_model_size_trains(echelon):
    Path("text.txt").write_text(TEXT)
    ending = echelon("init", "small.yaml", "--params", "1m", "--tokens", "200k", "--vocab-size", "300")
    assert ending.code == 0, ending
    for words in ("learning_rate: 0.0013  (Kaplan, 0.003239", "global_batch_tokens: 4096  (49 steps; DeepSeek, 0.2920",
                  "0.2 tokens for each parameter: few.", "wrote small.yaml"):  # fmt: skip
        assert words in ending.out
    ending = echelon("train", "small.yaml", "data.train.0.path=text.txt", "data.sequence_len=64", "train.tokens=16384")
    assert ending.code == 0, ending
    losses = [row["loss"] for row in read_lines("runs/small/metrics.jsonl") if row["kind"] == "train"]
    assert len(losses) == 4 and losses[-1] < losses[0] < 6.5
    assert json.loads(Path("runs/small/model/config.json").read_text())["vocab_size"] == 320


def test_init_refusals(echelon):
    Path("there.yaml").write_text("mine")
    for arguments, words in [
        (["there.yaml"], "there.yaml already exists"),
        (["new.yaml", "--params", "much"], "--params much is not a count; write it like 1.3b, 350m or 2e9."),
        (["new.yaml", "--tokens", "9"], "--tokens 9 is out of range; use 100k to 100t."),
        (["new.yaml", "--vocab-size", "300"], "--vocab-size 300 requires --params or --tokens"),
    ]:
        ending = echelon("init", *arguments)
        assert ending.code == 2 and words in ending.err and not Path("new.yaml").exists()
    assert Path("there.yaml").read_text() == "mine"
    assert echelon("init").code == 0 and "num_hidden_layers: 4" in Path("recipe.yaml").read_text()
