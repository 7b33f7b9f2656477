"""Passes with a KV cache, compared with passes over whole sequences: several families and attention implementations."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.learn.model import kv_cache
from echelon.learn.model.attention import PADDED, PLAIN_CAUSAL
from echelon.learn.model.kv_cache import KeyValueCache, RandomRows, can_cache, can_move_rows, continue_rows
from echelon.learn.model.varlen_attention import VARLEN
from tests.families import small_model

LENGTHS = (9, 4, 12)
NEW = 8
# Windows are shorter than the sequences, and gemma2 caps scores and logits.
MODELS = [
    ("llama", {}, PLAIN_CAUSAL), ("llama", {}, VARLEN), ("llama", {}, "eager"), ("gpt2", {}, PLAIN_CAUSAL),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, "sdpa"),
    ("gemma3_text", {"sliding_window": 6}, "sdpa"), ("gemma2", {"sliding_window": 6}, "eager"),
    ("qwen3_moe", {}, "sdpa"), ("mamba", {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fields", "attention"), MODELS, ids=lambda value: value if value else "-")
def test_cached_logits_are_those_of_whole_sequences(family, fields, attention):
    model = small_model(family, **fields).eval()
    rows = [torch.randint(256, (1, length + NEW), generator=torch.Generator().manual_seed(1)) for length in LENGTHS]
    with torch.no_grad():
        whole = [model(input_ids=row, use_cache=False).logits[0] for row in rows]
    if attention is not None:
        model.set_attn_implementation(attention)
    before = model.config._attn_implementation
    assert can_cache(model)
    cache, width = KeyValueCache(model), max(LENGTHS)
    for place in range(NEW):
        ends = [length + place for length in LENGTHS]
        if place:
            new = torch.cat([row[:, end - 1 : end] for row, end in zip(rows, ends, strict=True)])
            filled = torch.ones_like(new, dtype=torch.bool)
        else:
            new = torch.cat([pad(row[:, :end], (width - end, 0), value=7) for row, end in zip(rows, ends, strict=True)])
            filled = torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]
        with torch.no_grad():
            logits = cache(new, filled)
        expected = torch.stack([each[end - 1] for each, end in zip(whole, ends, strict=True)])
        torch.testing.assert_close(logits, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(("family", "fields"), [("llama", {}), ("gemma3_text", {"sliding_window": 6})])
def test_tokens_are_added_in_place_as_transformers_adds_them(family, fields):
    model = small_model(family, **fields).eval()
    ids = torch.randint(256, (2, 80), generator=torch.Generator().manual_seed(1))
    cache, theirs, buffers = KeyValueCache(model), None, []
    for start, end in [(0, 9), *((place, place + 1) for place in range(9, 80))]:
        with torch.no_grad():
            logits = cache(ids[:, start:end], torch.ones(2, end - start, dtype=torch.bool))
            theirs = model(ids[:, start:end], past_key_values=theirs and theirs.past_key_values, logits_to_keep=1)
        assert torch.equal(logits, theirs.logits[:, -1])
        buffers.append([layer.keys.untyped_storage() for layer in cache.layers()])
    for own in zip(*buffers[1:], strict=True):
        assert sum(before.data_ptr() != after.data_ptr() for before, after in pairwise(own)) <= 2


class HostReads(TorchDispatchMode):
    """Counts how often a value is read by the host, which waits for a GPU then."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "fields"), [("llama", {}), ("gemma3_text", {"sliding_window": 6})])
def test_on_a_gpu_no_pass_waits_for_the_device(family, fields, monkeypatch):
    monkeypatch.setattr(kv_cache, "_find_padded_attention", lambda model: PADDED)
    model, filled = small_model(family, **fields).eval(), torch.tensor([[False, True, True], [True, True, True]])
    with torch.no_grad():
        assert continue_rows(RandomRows(model, KeyValueCache(model)))
        cache = KeyValueCache(model)
        cache(torch.full((2, 3), 7), filled)
        with HostReads() as reads:
            cache(torch.full((2, 1), 7), filled[:, 1:2])
    assert not reads.count


def test_a_cache_that_cannot_be_cut_is_not_used():
    model = small_model("mistral", sliding_window=6)
    state = torch.get_rng_state()
    assert can_cache(model) and can_cache(small_model("llama"), multiple=2)
    assert not can_cache(model, multiple=2)  # passes of two tokens, of which one is padding that must leave the window
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("family", "fields", "attention"), MODELS, ids=lambda value: value if value else "-")
def test_rows_move_in_caches_of_keys_and_values_alone(family, fields, attention):
    assert can_move_rows(small_model(family, **fields)) == (family != "mamba")


def test_rows_are_not_moved_where_that_goes_wrong(monkeypatch):
    assert can_move_rows(small_model("llama"))
    select = KeyValueCache.select
    monkeypatch.setattr(KeyValueCache, "select", lambda cache, rows: select(cache, rows.roll(1)))
    model = small_model("llama", max_position_embeddings=512)  # not yet tried
    assert can_cache(model) and not can_move_rows(model)
