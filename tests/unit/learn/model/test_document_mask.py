"""Packed documents do not attend to each other: the loss of each equals that of the document alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from echelon.learn.data.loader import Microbatch, positions_in_documents
from echelon.learn.model.attention import (
    FIRST_KEYS,
    PLAIN_CAUSAL,
    choose_attention,
    describe_document_mask,
    document_inputs,
)
from echelon.learn.model.build import load_config
from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.traits import apply_plain_causal, find_traits
from echelon.learn.model.varlen_attention import VARLEN
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.objective import LogitsLoss
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.parallel.kept_activations import checkpoint_activations
from tests.families import small_config, small_model

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "cohere",
    "granite",
    "gpt2",
    "stablelm",
]
WINDOW = 4
FIELDS = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "gemma2": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}
LENGTHS = [[9, 11, 5], [14, 7, 4]]  # lengths of documents in sequences of 32; the rest is padding
LENGTH = 32


def packed(seed=0, changed=None):
    """Two sequences of three documents and padding, optionally with other tokens in one document (row, number)."""
    tokens = torch.randint(1, 256, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    documents = torch.full((2, LENGTH), -1, dtype=torch.int32)
    labels = torch.full((2, LENGTH), -100)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            documents[row, start : start + length] = number
            if (row, number) == changed:
                tokens[row, start : start + length] = 255 - tokens[row, start : start + length]
            labels[row, start : start + length - 1] = tokens[row, start + 1 : start + length]
            start += length
        tokens[row, start:] = 0
    positions = torch.from_numpy(positions_in_documents(documents.numpy()))
    ids = np.arange(2)
    return Microbatch(tokens, labels, ids, ids, documents, positions)


def losses(model, batch):
    """The loss of each document, computed by the module that training uses."""
    module = ObjectiveModule(model)
    with torch.no_grad():
        scores = module(batch, lambda outputs, _: outputs.log_probabilities(batch.labels))
    return {
        (row, number): -scores[row][batch.documents[row] == number].sum()
        for row, lengths in enumerate(LENGTHS)
        for number in range(len(lengths))
    }


def loss_alone(model, batch, row, number):
    """The reference: the attention and loss of `transformers` on the document alone."""
    tokens = batch.input_ids[row][batch.documents[row] == number][None]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0].float()
    return F.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_does_not_depend_on_others_or_its_position(family):
    model = small_model(family, **FIELDS.get(family, {})).eval()
    batch, other = packed(), packed(changed=(0, 1))
    found, changed = losses(model, batch), losses(model, other)
    assert [key for key in found if not torch.equal(found[key], changed[key])] == [(0, 1)]
    for row, number in found:
        expected = loss_alone(model, batch, row, number)
        assert found[row, number].item() == pytest.approx(expected.item(), rel=1e-5), (row, number)


def weighted(logits, labels, extra):
    weights = extra["tokens"] * extra["sequence"]
    return (F.cross_entropy(logits, labels, ignore_index=-100, reduction="none") * weights).sum()


def test_extra_tensors_stay_with_their_tokens_in_rows_of_their_own():
    """A model without a document mask computes each document in a row of its own; weights are those of the tokens."""
    model = small_model("llama").eval()
    batch, random = packed(), torch.Generator().manual_seed(2)
    extra = {"tokens": torch.rand(2, LENGTH, generator=random), "sequence": torch.tensor([1.0, 3.0])}
    batch = replace(batch, document_shape=(3, 16)).with_extra(**extra)
    traits = find_traits(model, LENGTH)
    losses = [
        ObjectiveModule(model, traits=each)(batch, LogitsLoss(weighted).loss_sum)
        for each in (traits, replace(traits, mask=None))
    ]
    scores = ObjectiveModule(model, traits=traits)(batch, lambda outputs, _: outputs.log_probabilities(batch.labels))
    expected = -(scores * extra["tokens"] * extra["sequence"][:, None]).sum().item()
    assert [loss.item() for loss in losses] == pytest.approx([expected, expected], rel=1e-5)


@pytest.mark.parametrize("family", FIELDS)
def test_the_sliding_window_is_kept(family):
    """In a document of 14 tokens a window of 4 must have an effect; otherwise the test above would not cover it."""
    windowed = small_model(family, **FIELDS[family]).eval()
    wide = small_model(family, **FIELDS[family] | {"sliding_window": LENGTH}).eval()
    assert losses(windowed, packed())[1, 0] != losses(wide, packed())[1, 0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_a_model_without_a_mask_for_plain_text_has_one_for_documents(attention):
    model = small_model("llama").eval()
    model.set_attn_implementation(attention)
    apply_plain_causal(model, find_traits(model, LENGTH))
    assert (model.config._attn_implementation == PLAIN_CAUSAL) == (attention == "sdpa")
    batch = packed()
    with torch.compiler.set_stance("force_eager"):  # uncompiled flex attention is equal and faster to test
        found = losses(model, batch)
    model.set_attn_implementation("sdpa")
    assert found[0, 2].item() == pytest.approx(loss_alone(model, batch, 0, 2).item(), rel=1e-5)


def test_masks_work_with_checkpointing_compilation_and_autocast():
    """The gradients equal those of the plain model; in bf16 only the separation of documents is tested."""
    plain, changed = small_model("gemma3_text", **FIELDS["gemma3_text"]), packed(changed=(0, 1))
    for model in (plain, other := small_model("gemma3_text", **FIELDS["gemma3_text"])):
        if model is other:
            checkpoint_activations(model.model.layers, "selective")
            apply_compile(model.model.layers, "aot_eager")
        ObjectiveModule(model)(packed(), CausalLM().loss_sum).backward()
    for (name, expected), parameter in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before, after = losses(plain, packed()), losses(plain, changed)
    assert [key for key in before if not torch.equal(before[key], after[key])] == [(0, 1)]


def test_masks_are_built_once_for_all_layers(monkeypatch):
    import echelon.learn.objectives.outputs

    calls = []
    monkeypatch.setattr(
        echelon.learn.objectives.outputs, "document_inputs", lambda *args: calls.append(args) or document_inputs(*args)
    )
    losses(small_model("llama", num_hidden_layers=3).eval(), packed())
    assert len(calls) == 1


def test_flash_attention_receives_the_document_starts():
    """The kernels need a GPU, but not their arguments. Padding is one more document."""
    model, batch = small_model("llama"), packed()
    model.config._attn_implementation_internal = "flash_attention_2"
    told = document_inputs(model, "lengths", batch.documents, batch.position_ids, most=3)
    assert told["cu_seq_lens_q"].tolist() == [0, 9, 20, 25, 32, 46, 53, 57, 64]
    told = document_inputs(model, "lengths", batch.documents, batch.position_ids, most=4)
    assert told["cu_seq_lens_q"].tolist() == [0, 9, 20, 25, 32, 46, 53, 57] + 9 * [64]  # room for 8 in each sequence
    assert told["cu_seq_lens_q"].dtype == torch.int32 and told["max_length_q"] == LENGTH
    assert "attention_mask" not in told


def test_a_ring_is_told_where_documents_and_chunks_start():
    """Of a window it is told the first key of each query."""
    model, expected = (
        small_model("llama"),
        {
            "full_attention": [0, 4, 6, 8],
            "chunked_attention": [0, 3, 4, 6, 8, 8],
            "sliding_attention": [0, 0, 1, 2, 4, 4, 6, 6],
        },
    )
    model.config.attention_chunk_size, model.config.sliding_window, model.config.layer_types = 3, 2, [*expected]
    documents, positions = torch.tensor([[0, 0, 0, 0, 1, 1, -1, -1]]), torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1]])
    masks = document_inputs(model, "by_layer", documents, positions, 2, attention=FIRST_KEYS)["attention_mask"]
    assert {kind: mask.flatten().tolist() for kind, mask in masks.items()} == expected
    assert [masks[kind].shape[2] for kind in expected] == [1, 1, 8]


def test_the_attention_is_printed():
    assert choose_attention(load_config(small_config("gemma2")), None) == "eager"
    assert "; eager, with a mask" in describe_document_mask("eager", "by_layer")
    assert "; sdpa, with a mask" in describe_document_mask(PLAIN_CAUSAL, "full")
    assert "; flash_attention_2, with the start of each document" in describe_document_mask(
        "flash_attention_2", "lengths"
    )
    assert "; torch's flash kernels, with the start of each" in describe_document_mask(VARLEN, "lengths")
    assert "run as sequences of their own" in describe_document_mask("sdpa", None)
