"""Every causal model of transformers that obeys a document mask by its small copy does so in training's own forward.

The models, tokens, documents and lengths are others than those of `learn/model/traits.py`, and the references are those
of `transformers`: each document alone, and the model's own logits.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from echelon.learn.data.loader import Microbatch, positions_in_documents
from echelon.learn.model.build import load_config
from echelon.learn.model.router import has_experts
from echelon.learn.model.traits import find_traits
from echelon.learn.objectives.outputs import ObjectiveModule
from tests.parity.causal_models import tiny_fields

LENGTHS = ((6, 13, 10), (17, 2, 9), (12, 12, 4))
LENGTH = 32
CHANGED = {(0, 0), (1, 1), (2, 1)}
# States that go from token to token: no mask of attention stops them.
RECURRENT = {
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
}  # fmt: skip


def packed(changed=False):
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(64, 256, (len(LENGTHS), LENGTH), generator=generator)
    documents = np.full(tokens.shape, -1, dtype=np.int32)
    labels = torch.full(tokens.shape, -100)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            documents[row, start : start + length] = number
            if changed and (row, number) in CHANGED:
                tokens[row, start : start + length] = 319 - tokens[row, start : start + length]
            labels[row, start : start + length - 1] = tokens[row, start + 1 : start + length]
            start += length
    ids, positions = np.arange(len(tokens)), torch.from_numpy(positions_in_documents(documents))
    return Microbatch(tokens, labels, ids, ids, torch.from_numpy(documents), positions)


def build(model_type):
    try:
        config = load_config(tiny_fields(model_type))
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        with torch.no_grad():
            model(input_ids=torch.arange(64, 96)[None], use_cache=False)
    except Exception as error:  # the table of docs/models.md has the reasons
        pytest.skip(f"transformers cannot build or run it small: {str(error)[:80]}")
    return model


@torch.no_grad()
def scores(module, batch):
    return module(batch, lambda outputs, _: outputs.log_probabilities(batch.labels))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_documents_are_kept_apart_or_known_not_to_be(model_type):
    model = build(model_type)
    traits = find_traits(model)
    if model_type in RECURRENT:
        assert traits.mask is None
    if traits.mask is None:
        assert traits.obstacle
        return
    module, batch, other = ObjectiveModule(model, traits=traits), packed(), packed(changed=True)
    before, after = scores(module, batch), scores(module, other)
    for row, lengths in enumerate(LENGTHS):
        for number in range(len(lengths)):
            where = batch.documents[row] == number
            if (row, number) not in CHANGED:
                if has_experts(model):  # groups of tokens: rounding depends on the others
                    torch.testing.assert_close(after[row, where], before[row, where], rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(after[row, where], before[row, where]), (row, number)
            tokens = batch.input_ids[row, where][None]
            with torch.no_grad():
                logits = model(input_ids=tokens, use_cache=False).logits[0].float()
            expected = torch.log_softmax(logits[:-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
            torch.testing.assert_close(before[row, where][:-1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_a_loss_in_chunks_is_that_of_the_models_own_logits(model_type):
    model = build(model_type)
    traits = find_traits(model)
    if traits.arithmetic is None:
        pytest.skip("its own forward pass computes the loss")
    tokens = packed().input_ids
    ids = np.arange(len(tokens))
    batch = Microbatch(tokens[:, :-1], tokens[:, 1:], ids, ids)
    with torch.no_grad():
        found = ObjectiveModule(model, traits=traits)(batch, lambda outputs, read: outputs.token_loss_sum(read.labels))
        logits = model(input_ids=batch.input_ids, use_cache=False).logits.float()
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
