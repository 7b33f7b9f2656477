"""Attention by the starts of documents: what a CPU can show of the path that GPUs take."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.learn.data.loader import positions_in_documents
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines import prepared_layers
from echelon.learn.model import varlen_attention
from echelon.learn.model.attention import PLAIN_CAUSAL, document_inputs
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.varlen_attention import VARLEN, count_starts, find_error, find_starts, has_kernel
from echelon.planner.plan import ParallelPlan
from echelon.recipe.load import parse_recipe
from tests.families import small_config, small_model
from tests.unit.learn.model.test_document_mask import FIELDS, LENGTHS, loss_alone, losses, packed
from tests.unit.recipe_samples import DEMO

CPU, PLAN = torch.device("cpu"), ParallelPlan("ddp")


def attend_documents(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What `torch.nn.attention.varlen` documents, [tokens, heads, width], one document after the other."""
    assert enable_gqa == (query.shape[1] != key.shape[1]) and torch.equal(cu_seq_q, cu_seq_k)
    assert max_q >= cu_seq_q.diff().max() and max_k == max_q
    outputs = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        places = torch.arange(end - start)
        distance = places[:, None] - places
        assert window_size[1] == 0
        seen = (distance >= 0) & (distance <= window_size[0] if window_size[0] >= 0 else True)
        parts = [each[start:end].transpose(0, 1) for each in (query, key, value)]
        output = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def kernel(monkeypatch):
    """A CPU's stand-in for the kernel, and a torch that asks for groups."""
    monkeypatch.setattr(varlen_attention, "varlen_attn", attend_documents)
    monkeypatch.setattr(varlen_attention, "_ASKS_FOR_GROUPS", True)


def test_starts_are_found_without_reading_the_device():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 0, 0]])
    assert find_starts(positions)["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 8, 9, *5 * [10]]
    assert find_starts(positions, 8)["cu_seq_lens_k"].tolist() == [0, 3, 5, 6, 8, 9, 10, 10, 10]
    assert [count_starts(number) for number in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    with FakeTensorMode() as fake:
        assert find_starts(fake.from_tensor(positions), 8)["cu_seq_lens_q"].shape == (9,)


def test_the_kernel_gets_its_arguments_as_torch_documents_them(kernel):
    assert find_error(varlen_attention.run_kernel, CPU, torch.bfloat16, 16) < 0.02


@pytest.mark.parametrize("fault", ["starts", "window", "scale", "missing"])
def test_a_kernel_that_computes_something_else_is_not_used(kernel, fault, monkeypatch):
    def faulty(*args, **kwargs):
        if fault == "missing":
            raise TypeError("unexpected keyword argument 'window_size'")
        changes = {"window": {"window_size": (-1, 0)}, "scale": {"scale": 1.0}}.get(fault, {})
        if fault == "starts":
            whole = torch.tensor([0, args[0].shape[0]], dtype=torch.int32)
            args = (*args[:3], whole, whole, args[0].shape[0], args[0].shape[0])
        return attend_documents(*args, **(kwargs | changes))

    monkeypatch.setattr(varlen_attention, "varlen_attn", faulty)
    assert find_error(varlen_attention.run_kernel, CPU, torch.bfloat16, 16) > varlen_attention.TOLERANCE


def test_only_gpus_have_the_kernel():
    assert not has_kernel(CPU, torch.bfloat16, load_config(small_config("llama")))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3_text", "gpt2"])
def test_documents_have_the_loss_that_they_have_alone(family):
    """With windows too, of which no mask tells."""
    model = small_model(family, **FIELDS.get(family, {})).eval()
    expected = {
        (row, number): loss_alone(model, packed(), row, number)
        for row, lengths in enumerate(LENGTHS)
        for number in range(len(lengths))
    }
    other = small_model(family, **FIELDS.get(family, {})).eval()
    other.set_attn_implementation(VARLEN)
    for place, loss in losses(other, packed()).items():
        torch.testing.assert_close(loss, expected[place], rtol=1e-5, atol=1e-5)
    changed = losses(other, packed(changed=(0, 1)))
    same = losses(other, packed())
    assert [place for place in same if not torch.equal(same[place], changed[place])] == [(0, 1)]


def of_one_document():
    """What `packed` returns, with all but the first document of each sequence as padding."""
    documents = -(packed().documents != 0).int()
    positions = torch.from_numpy(positions_in_documents(documents.numpy()))
    return replace(packed(), documents=documents, position_ids=positions, document_shape=(1, 16))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_one_document_a_sequence_is_plain_causal_attention(family, monkeypatch):
    """For which torch has faster kernels on some GPUs. Windows remain."""
    model, batch, given = small_model(family, **FIELDS.get(family, {})).eval(), of_one_document(), []
    expected = [loss_alone(model, batch, row, 0) for row in (0, 1)]
    model.set_attn_implementation(VARLEN)
    losses(model, batch)  # finds the traits
    find_visible = varlen_attention.find_visible
    monkeypatch.setattr(varlen_attention, "find_visible", lambda *args: given.append(args[2:]) or find_visible(*args))
    found = losses(model, batch)
    torch.testing.assert_close([found[row, 0] for row in (0, 1)], expected, rtol=1e-5, atol=1e-5)
    assert given == ([] if family == "llama" else 2 * [(None, 4)])
    assert "cu_seq_lens_q" in document_inputs(model, "lengths", batch.documents, batch.position_ids, 2)


def test_other_numbers_of_documents_do_not_compile_again():
    """Sizes are powers of two; beyond the second, the compiler makes them variable."""
    model = small_model("llama").eval()
    model.set_attn_implementation(VARLEN)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    apply_compile(model.model.layers, "aot_eager")
    for count in (1, 3, 7, 2, 6, 13, 30):
        positions = torch.arange(32).remainder(-(-32 // count)).expand(2, -1)
        told = find_starts(positions, 2 * count_starts(count + 1))
        model(input_ids=torch.ones(2, 32, dtype=torch.int64), position_ids=positions, use_cache=False, **told)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build_mesh(PLAN, "cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "fields", "here", "chosen"),
    [
        ("llama", {}, True, VARLEN),
        ("llama", {}, False, PLAIN_CAUSAL),
        ("mistral", {"sliding_window": 8}, True, VARLEN),
        ("gemma2", {}, True, "eager"),
        ("llama", {"attn_implementation": "sdpa"}, True, PLAIN_CAUSAL),
    ],
)
def test_the_kernel_is_used_where_it_works(alone, monkeypatch, family, fields, here, chosen):
    monkeypatch.setattr(prepared_layers, "has_kernel", lambda *_: here)
    wanted = fields.get("attn_implementation")
    recipe, _ = parse_recipe(DEMO, "recipe.yaml", [] if wanted is None else [f"model.attn_implementation={wanted}"])
    config = load_config({**small_config(family), **({} if wanted else fields)})
    skeleton = build_on_meta(config, wanted)
    prepared_layers.choose_attention_kernel(skeleton, recipe, PLAN, alone, CPU)
    assert skeleton.config._attn_implementation == chosen


@pytest.mark.parametrize(
    ("family", "fields", "here", "keeps"),
    [
        ("llama", {}, True, True),
        ("llama", {"attention_dropout": 0.1}, True, False),  # the flash kernels have none: a mask is made
        ("gpt2", {"attn_pdrop": 0.1}, True, False),
        ("llama", {}, False, False),
    ],
)
def test_a_model_that_passes_masks_gets_no_kernel_of_cudnn(alone, monkeypatch, family, fields, here, keeps):
    """Their gradients can be NaN with a mask: github.com/pytorch/pytorch/issues/196678."""
    monkeypatch.setattr(prepared_layers, "has_kernel", lambda *_: here)
    torch.backends.cuda.enable_cudnn_sdp(True)
    recipe, _ = parse_recipe(DEMO, "recipe.yaml", [])
    prepared_layers.choose_attention_kernel(
        build_on_meta(load_config(small_config(family, **fields))), recipe, PLAN, alone, CPU
    )
    found = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert found == keeps


@pytest.fixture
def flash_3(monkeypatch):
    """Pretends that a Hopper GPU and FlashAttention-3 are here; notes what torch activates."""
    active = []
    monkeypatch.setattr(varlen_attention, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen_attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(varlen_attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    monkeypatch.setattr(varlen_attention, "restore_flash_attention_impl", active.clear)
    return active


@pytest.mark.parametrize("is_right", [True, False])
def test_flash_attention_3_is_used_only_if_it_computes_rightly(flash_3, is_right, monkeypatch):
    monkeypatch.setattr(varlen_attention, "has_kernel", lambda *_: is_right and flash_3 == ["FA3"])
    config = load_config(small_config("llama"))
    assert varlen_attention.activate_flash_3(torch.device("cuda"), torch.bfloat16, config) == is_right
    assert flash_3 == ["FA3"]
    varlen_attention.deactivate_flash_3()
    assert flash_3 == []


@pytest.mark.parametrize("obstacle", ["cpu", "no package", "another GPU", "dropout", "broken package"])
def test_flash_attention_3_is_not_used_without_all_that_it_needs(flash_3, obstacle, monkeypatch):
    def fail(name):
        raise OSError("undefined symbol")

    config, device = load_config(small_config("llama")), torch.device("cpu" if obstacle == "cpu" else "cuda")
    config.attention_dropout = 0.1 * (obstacle == "dropout")
    changes = {
        "no package": (varlen_attention, "find_spec", lambda name: None),
        "another GPU": (torch.cuda, "get_device_capability", lambda device: (8, 0)),
        "broken package": (varlen_attention, "activate_flash_attention_impl", fail),
    }
    if obstacle in changes:
        monkeypatch.setattr(*changes[obstacle])
    assert not varlen_attention.activate_flash_3(device, torch.bfloat16, config)
    assert flash_3 == []
