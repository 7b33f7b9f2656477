"""The special tokens of a model that a recipe describes."""

import pytest
import torch

from echelon.ground.errors import ConfigError
from echelon.learn.data.tokenizer import train_tokenizer
from echelon.learn.model.build import build_on_meta, resolve_config
from echelon.learn.model.weights import initialize_weights
from echelon.recipe.load import parse_recipe
from tests.families import COMMON
from tests.unit.recipe_samples import DEMO


@pytest.fixture(scope="module")
def tokenizer():
    """echelon's own: it pads with the end of a text."""
    found = train_tokenizer([__doc__ * 50], 280)
    assert found.pad_token_id == found.eos_token_id is not None
    return found


def resolve(tokenizer, **fields):
    wanted = {"model_type": "llama", "vocab_size": 512, **COMMON, **fields}
    recipe, _ = parse_recipe(DEMO, "recipe.yaml", [])
    return resolve_config(recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": wanted})}), 512,
                          tokenizer)  # fmt: skip


def test_the_end_of_a_text_is_trained_and_does_not_overflow(tokenizer):
    """The embedding of padding stays zero: in 24 layers, the gradient of a text that begins with it is NaN."""
    config = resolve(tokenizer, num_hidden_layers=24)
    model, skeleton = build_on_meta(config).to_empty(device="cpu"), build_on_meta(config)
    initialize_weights(model, skeleton, seed=0)
    end = config.eos_token_id
    tokens = torch.tensor([[end, *range(20, 40), end]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    embedding = model.get_input_embeddings()
    assert embedding.weight[end].norm() > 0 and embedding.weight.grad[end].norm() > 0


def test_another_token_pads(tokenizer):
    assert resolve(tokenizer, eos_token_id=5).pad_token_id == tokenizer.pad_token_id
    assert build_on_meta(resolve(tokenizer, pad_token_id=7)).get_input_embeddings().padding_idx == 7


@pytest.mark.parametrize(
    "fields", [{"pad_token_id": 3, "eos_token_id": 3}, {"pad_token_id": 3, "eos_token_id": [2, 3]},
               {"pad_token_id": 3, "bos_token_id": 3}]
)  # fmt: skip
def test_padding_that_is_read_is_refused(tokenizer, fields):
    with pytest.raises(
        ConfigError, match=r"model.config.pad_token_id=3 is also the start or the end of a text.*remove"
    ):
        resolve(tokenizer, **fields)
