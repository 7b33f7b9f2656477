"""Checkpoints whose weights are stored quantized are refused by name, with what would pass."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from echelon.ground.errors import ConfigError
from echelon.run.lifecycle.model_checks import check_model
from tests.families import small_config, small_model
from tests.unit.recipe_samples import SMALL, load_text

# As they stand in config.json: DeepSeek-V3's, gpt-oss's, llm-compressor's and that of `save_pretrained` in 4 bits.
STORED = {
    "fp8": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    },
    "bitsandbytes": {"_load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "load_in_4bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
}  # fmt: skip
FIXES = {
    "fp8": "FineGrainedFP8Config(dequantize=True)).save_pretrained(OUT, save_original_format=False)",
    "mxfp4": "Mxfp4Config(dequantize=True)).save_pretrained(OUT, save_original_format=False)",
    "compressed-tensors": "give the folder of the model before quantization.",
    "bitsandbytes": "with adapter.method=qlora, echelon itself quantizes it to 4 bits",
    "gptq": "give the folder of the model before quantization.",
}


@pytest.mark.parametrize("method", STORED)
def test_the_folder_the_method_and_the_fix_are_named(tmp_path, method):
    folder = tmp_path / "stored"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**small_config("llama"), "quantization_config": STORED[method]}))
    recipe, _ = load_text(tmp_path, SMALL, f"model={{checkpoint: {folder}}}")
    with pytest.raises(ConfigError) as refused:
        check_model(recipe)
    message = str(refused.value)
    assert message.startswith(f"model.checkpoint={folder}: its weights are stored quantized")
    assert f"has the method {method})" in message and FIXES[method] in message


def test_the_line_for_fp8_writes_a_folder_that_passes(tmp_path):
    """The weights of a small model in fp8 blocks, as DeepSeek-V3's are, through the line of the message."""
    model = small_model("llama", hidden_size=128)
    model.save_pretrained(tmp_path / "stored")
    plain = load_file(tmp_path / "stored" / "model.safetensors")
    scales = {f"{name}_scale_inv": weight.abs().amax().expand(1, 1) / 448 for name, weight in plain.items()
              if "proj" in name}  # fmt: skip
    packed = {name: (weight / scales[f"{name}_scale_inv"]).to(torch.float8_e4m3fn) if f"{name}_scale_inv" in scales
              else weight for name, weight in plain.items()}  # fmt: skip
    save_file(
        {**packed, **{name: each.clone() for name, each in scales.items()}}, tmp_path / "stored" / "model.safetensors"
    )
    config = json.loads((tmp_path / "stored" / "config.json").read_text())
    (tmp_path / "stored" / "config.json").write_text(json.dumps({**config, "quantization_config": STORED["fp8"]}))
    source, out = tmp_path / "stored", tmp_path / "plain"
    loaded = AutoModelForCausalLM.from_pretrained(source, quantization_config=FineGrainedFP8Config(dequantize=True))
    loaded.save_pretrained(out, save_original_format=False)
    written = load_file(out / "model.safetensors")
    assert written.keys() == plain.keys()
    assert all(torch.allclose(written[name].float(), plain[name], atol=2e-2) for name in plain)
    recipe, _ = load_text(tmp_path, SMALL, f"model={{checkpoint: {out}}}")
    check_model(recipe)
