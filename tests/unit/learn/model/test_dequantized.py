"""Checkpoints whose weights are stored quantized are read as the format's own code reads them, bit for bit."""

import json
import statistics

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from echelon.learn.model import dequantized
from echelon.learn.model.adapters import apply_adapter
from echelon.learn.model.build import build_on_meta, load_config, materialize
from echelon.learn.model.model_folder import open_folder
from echelon.learn.model.quantization import describe_errors
from echelon.learn.model.safetensors_folder import SafetensorsFolder
from echelon.learn.model.weights import PretrainedWeights
from echelon.recipe.inputs import AdapterConfig
from tests.families import small_config
from tests.stored_models import CASES, quantize_folder, write_plain

IDS = torch.arange(32).reshape(2, 16)
FAMILY = {"mxfp4": "gpt_oss", "fp8": "qwen3", "int4-group": "deepseek_v3"}


def save_model(folder, family):
    torch.manual_seed(0)
    fields = {"q_lora_rank": 32, "kv_lora_rank": 32} if family == "deepseek_v3" else {}
    AutoModelForCausalLM.from_config(load_config(small_config(family, **fields))).save_pretrained(folder)


@pytest.fixture(params=CASES)
def stored(request, tmp_path):
    """A folder with quantized weights, and its weights by the format's own code."""
    save_model(tmp_path / "stored", FAMILY.get(request.param, "llama"))
    return tmp_path / "stored", quantize_folder(tmp_path / "stored", request.param)


def load(folder, dtype=torch.float32):
    skeleton, model = build_on_meta(load_config(str(folder))), build_on_meta(load_config(str(folder)), dtype=dtype)
    materialize(model, "cpu")
    PretrainedWeights(skeleton, folder).fill(model)
    return model.eval()


def test_every_weight_is_that_of_the_formats_own_code(stored):
    folder, plain = stored
    found = open_folder(folder)
    headers = found.read_headers()
    assert headers.keys() == plain.keys()
    for name, weight in plain.items():
        assert headers[name].shape == tuple(weight.shape)
        read = found.read(name, ())
        assert read.dtype == weight.dtype
        assert torch.equal(read, weight), name


def test_pieces_and_blocks_are_those_of_the_whole_weight(stored, monkeypatch):
    folder, plain = stored
    monkeypatch.setattr(dequantized, "PIECE", 700)
    found = open_folder(folder)
    for name, weight in found.read_whole(plain).items():
        assert torch.equal(weight, plain[name]), name
        if weight.ndim > 1:
            rows = slice(1, weight.shape[0] - 1)
            assert torch.equal(found.read(name, (rows, slice(3, 30))), weight[rows, 3:30]), name


def test_logits_are_those_of_the_model_with_plain_weights(stored, tmp_path):
    folder, plain = stored
    write_plain(folder, tmp_path / "plain", plain)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).eval()
    assert type(open_folder(folder)) is not SafetensorsFolder
    with torch.no_grad():
        assert torch.equal(load(folder, torch.bfloat16)(IDS).logits, theirs(IDS).logits)


def test_blocks_at_the_edges_of_a_weight_may_be_smaller(tmp_path):
    """As DeepSeek-V3's `kv_a_proj_with_mqa`, whose 576 rows are four blocks of 128 and a half."""
    save_model(tmp_path, "llama")
    quantize_folder(tmp_path, "fp8")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    codes, scales = tensors[name], torch.rand(3, 6)
    tensors[f"{name}_scale_inv"] = scales
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [24, 12]
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = {other: weight for other, weight in tensors.items() if name in other or weight.dtype == torch.bfloat16}
    save_file({other: weight for other, weight in kept.items() if "scale" not in other or name in other},
              tmp_path / "model.safetensors")  # fmt: skip
    read = open_folder(tmp_path).read(name, (slice(5, 60), slice(None)))
    for row in range(5, 60):
        for column in range(64):
            expected = codes[row, column].float() * scales[row // 24, column // 12]
            assert read[row - 5, column] == expected.bfloat16()


def quantize_again(folder):
    """The folder's model under QLoRA, with its weights."""
    skeleton, model = build_on_meta(load_config(str(folder))), build_on_meta(load_config(str(folder)))
    apply_adapter(model, AdapterConfig(method="qlora", r=2, alpha=4))
    materialize(model, "cpu")
    PretrainedWeights(skeleton, folder).fill(model)
    return model


def test_what_quantizing_again_adds_is_measured(tmp_path):
    save_model(tmp_path, "llama")
    plain = quantize_folder(tmp_path, "fp8")
    model = quantize_again(tmp_path)
    errors = {}
    for name, weight in plain.items():
        if name.endswith("proj.weight"):
            packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
            near = dequantize_4bit(packed, state).double()
            errors[name] = float((near - weight.double()).norm() / weight.double().norm())
    worst = max(errors, key=errors.get)
    line = describe_errors(model)
    assert f"{statistics.median(errors.values()):.3g} in the median of {len(errors)}" in line
    assert line.endswith(f"and {errors[worst]:.3g} at most, in {worst.removesuffix('.weight')}")
    assert 0.05 < errors[worst] < 0.2


def test_nothing_is_said_of_plain_weights(tmp_path):
    save_model(tmp_path, "llama")
    assert describe_errors(quantize_again(tmp_path)) is None
