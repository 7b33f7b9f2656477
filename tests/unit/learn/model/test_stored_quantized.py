"""Which quantized checkpoints are read, and what is said of those that are not, before any work."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.ground.errors import CheckpointError, ConfigError
from echelon.learn.model.model_folder import open_folder
from echelon.learn.model.stored_format import METHODS, StoredFormat, find_stored_format
from echelon.run.lifecycle.model_checks import check_model, check_weights
from tests.families import small_config, small_model
from tests.stored_models import CASES, quantize_folder
from tests.unit.recipe_samples import SMALL, load_text

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP},
}  # fmt: skip


def with_weights(**changes):
    return {**COMPRESSED, "config_groups": {"group_0": {**GROUP, "weights": {**GROUP["weights"], **changes}}}}


# The settings, the key and value that are named, and what the message says is possible.
REFUSED = {
    "bitsandbytes": ({"_load_in_4bit": True, "load_in_4bit": True}, "quant_method=bitsandbytes", "fp8, mxfp4, comp"),
    "hqq": ({"quant_method": "hqq", "bits": 4}, "quant_method=hqq", "gptq, awq"),
    "nothing": ({"bits": 4}, "quant_method=None", "fp8, mxfp4, compressed-tensors, gptq, awq"),
    "fp8 of e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt=e5m2", "e4m3"),
    "fp4 experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype=fp4", "fp8"),
    "one size": ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size=[128]", "two positive"),
    "gptq bits": ({"quant_method": "gptq", "bits": 5}, "bits=5", "2 or 3 or 4 or 8"),
    "marlin": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format=marlin", "gptq or gptq_v2"),
    "group of 0": ({"quant_method": "gptq", "group_size": 0}, "group_size=0", "a positive whole number"),
    "gemv": ({"quant_method": "awq", "version": "gemv"}, "version=gemv", "gemm"),
    "awq without zeros": ({"quant_method": "awq", "zero_point": False}, "zero_point=False", "True"),
    "nvfp4": ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "format=nvfp4-pack-quantized", "pack-quantized"),
    "activations": (
        {**COMPRESSED, "config_groups": {"group_0": {"input_activations": {"num_bits": 8}}}},
        "config_groups.group_0.weights=None", "groups whose weights are quantized",
    ),
    "no groups": ({**COMPRESSED, "config_groups": {}}, "config_groups={}", "at least one group"),
    "bits": (with_weights(num_bits=16), "config_groups.group_0.weights=int of 16 bits", "int of 1 to 8 bits"),
    "strategy": (with_weights(strategy="token"), "weights.strategy=token", "tensor, channel, group, block"),
    "transforms": ({**COMPRESSED, "transform_config": {"R1": {}}}, "transform_config={...}", "without transforms"),
    "sparsity": ({**COMPRESSED, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format=sparse", "dense"),
    "text": ("int4", "quantization_config=int4", "a mapping with quant_method"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_key_its_value_and_what_is_possible_are_named(tmp_path, case):
    settings, key, possible = REFUSED[case]
    folder = tmp_path / "stored"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**small_config("llama"), "quantization_config": settings}))
    recipe, _ = load_text(tmp_path, SMALL, f"model={{checkpoint: {folder}}}")
    with pytest.raises(ConfigError) as refused:
        check_model(recipe)
    message = str(refused.value)
    assert message.startswith(f"model.checkpoint={folder}: its weights are stored quantized (quantization_config")
    assert (key in message and f"echelon reads {possible}" in message) or possible in message.partition("reads")[2]
    assert "give the folder of the model before quantization" in message
    assert ("adapter.method=qlora" in message) == (case == "bitsandbytes")


def test_published_settings_are_read():
    """Of DeepSeek-V3, Kimi-K2-Thinking, Qwen3-8B-AWQ, and a text model inside one with images."""
    deepseek = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    found = find_stored_format("x", {"torch_dtype": "bfloat16", "quantization_config": deepseek})
    assert found is not None and str(found) == "fp8 (8 bits)" and found.dtype == "bfloat16"
    assert found.schemes[0].block == (128, 128)
    kimi = {**COMPRESSED, "ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": None}
    found = find_stored_format("x", {"text_config": {"dtype": "float16", "quantization_config": kimi}})
    assert isinstance(found, StoredFormat) and (str(found), found.dtype) == ("compressed-tensors (4 bits)", "float16")
    awq = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
    found = find_stored_format("x", {"quantization_config": {**awq, "modules_to_not_convert": None}})
    assert found is not None and found.schemes[0].block == (1, 128)
    assert find_stored_format("x", small_config("llama")) is None
    assert {settings["quant_method"] for settings, *_ in CASES.values()} == METHODS.keys()


DAMAGE = {
    "fp8": ("weight_scale_inv", "weight_scale_inv is missing"),
    "mxfp4": ("_scales", "_scales is missing"),
    "int4-group": ("weight_shape", "weight_shape is missing"),
    "int8-zeros": ("weight_zero_point", "scale and a zero point"),
    "int4-zeros": ("weight_zero_point", "do not fit"),
    "gptq": ("qzeros", ".qzeros is missing"),
    "awq": ("scales", ".scales is missing"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_missing_tensor_is_named_before_any_work(tmp_path, case):
    ending, reason = DAMAGE[case]
    folder, tensors = stored(tmp_path, case)
    name = next(name for name in sorted(tensors) if name.endswith(ending))
    del tensors[name]
    with pytest.raises(CheckpointError, match=reason.replace(".", r"\.")) as refused:
        rewrite(folder, tensors)
    method = CASES[case][0]["quant_method"]
    assert name.removesuffix(ending) in str(refused.value)
    assert f"(quantization_config.quant_method={method} in config.json)" in str(refused.value)


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_another_shape_are_refused(tmp_path, case):
    folder, tensors = stored(tmp_path, case)
    ending = {"fp8": "_scale_inv", "mxfp4": "_scales", "gptq": "qzeros", "awq": "qweight"}.get(
        CASES[case][0]["quant_method"], "weight_scale"
    )
    name = next(name for name in sorted(tensors) if name.endswith(ending))
    tensors[name] = torch.cat([tensors[name].reshape(-1, tensors[name].shape[-1] if tensors[name].ndim else 1)] * 3)
    with pytest.raises(CheckpointError, match="do not fit"):
        rewrite(folder, tensors)


def test_an_order_that_names_no_group_is_refused(tmp_path):
    folder, tensors = stored(tmp_path, "gptq-order")
    name = next(name for name in sorted(tensors) if name.endswith("g_idx"))
    tensors[name][3] = 99
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match=r"g_idx names the group 99 of \d+; the checkpoint is damaged"):
        open_folder(folder).read(f"{name.removesuffix('g_idx')}weight", ())


def test_scales_of_a_dtype_without_meaning_are_refused(tmp_path):
    folder, tensors = stored(tmp_path, "fp8")
    name = next(name for name in sorted(tensors) if name.endswith("_scale_inv"))
    tensors[name] = tensors[name].to(torch.int32)
    with pytest.raises(CheckpointError, match="its scales are stored as I32, not F32"):
        rewrite(folder, tensors)


@pytest.mark.parametrize("case", ["fp8", "int8-zeros", "gptq"])
def test_scales_beside_a_weight_of_plain_numbers_are_refused(tmp_path, case):
    """As a plain number it would be read without its scale: it is one of another file."""
    folder, tensors = stored(tmp_path, case)
    ending, scales = (".qweight", ".scales") if case == "gptq" else (".weight", ".weight_scale")
    name = next(name for name in sorted(tensors) if name.endswith(f"q_proj{ending}"))
    tensors[name] = tensors[name].to(torch.bfloat16)
    words = rf"{name} is stored as BF16 .*, and {name.removesuffix(ending)}{scales}.* is a scale of codes in (F8|I32)"
    with pytest.raises(CheckpointError, match=words):
        rewrite(folder, tensors)


def stored(tmp_path, case):
    folder = tmp_path / "stored"
    family = "gpt_oss" if case == "mxfp4" else "llama"
    small_model(family).save_pretrained(folder)
    quantize_folder(folder, case)
    return folder, load_file(folder / "model.safetensors")


def rewrite(folder, tensors):
    """Write the tensors, and check the folder as `train` does before it starts."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    check_weights(str(folder))
