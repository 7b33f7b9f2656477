"""Fine-tuning by commands from a base whose weights are stored quantized."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from echelon.learn.checkpoint.adapted import AdaptedRun
from tests.dist.command import exact_rows
from tests.dist.test_finetuning import trained_in, write_base, write_recipe
from tests.parity.training import equal_tensors, tensors_of
from tests.stored_models import quantize_folder, write_plain

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture
def base(tmp_path):
    """A base in block-wise fp8, and the same with plain weights."""
    write_base(tmp_path, tied=False)
    write_plain(tmp_path / "base", tmp_path / "plain", quantize_folder(tmp_path / "base", "fp8"))
    return tmp_path / "base"


def test_lora_trains_resumes_merges_and_exports(echelon, base, tmp_path):
    """All as on the same base with plain weights, bit for bit."""
    run = write_recipe(tmp_path, optim={"schedule": "constant"})  # the rate of a step does not depend on their number
    ending = echelon("plan", "recipe.json", "--devices", "1xH100")
    assert ending.code == 0 and "weights are stored as fp8 (8 bits)" in ending.out, ending
    assert "read as plain numbers of bfloat16; memory is that of the model" in ending.out
    ending = echelon("train", "recipe.json", "train.steps=3", "--nproc", "2", "parallel=fsdp")
    assert ending.code == 0 and "are stored as fp8 (8 bits) and read as plain numbers of bfloat16" in ending.out, ending
    assert echelon("train", "recipe.json", "train.steps=6", "--nproc", "2", "parallel=fsdp").code == 0
    resumed, rows = tensors_of(run.path, 6), exact_rows(run)
    ending = echelon("train", "recipe.json", "--nproc", "2", "parallel=fsdp", "model.checkpoint=plain", "--fresh")
    assert ending.code == 0 and "are stored as" not in ending.out, ending
    assert equal_tensors(tensors_of(run.path, 6), resumed) and exact_rows(run) == rows
    plain = AdaptedRun(run.path, None, torch.device("cpu"))
    expected = plain.merged([name for name, _ in plain.skeleton.named_parameters()])
    echelon("train", "recipe.json", "--nproc", "1", "parallel=fsdp", "--fresh").succeeded()
    check_merged(echelon, run, tmp_path, set(expected))


def check_merged(echelon, run, tmp_path, names):
    """The merged folder has plain weights, base + B A alpha / r, and says so."""
    ending = echelon("export", run.path, "merged", "--merge", "--dtype", "bf16")
    assert ending.code == 0 and "are stored as fp8 (8 bits) and read as plain numbers" in ending.out, ending
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "has plain numbers of bfloat16: its config.json has no quantization_config" in card
    merged, plain = load_file(tmp_path / "merged" / "model.safetensors"), load_file("plain/model.safetensors")
    assert {weight.dtype for weight in merged.values()} == {torch.bfloat16} and merged.keys() == names
    trained = trained_in(run)
    name = "model.layers.0.mlp.down_proj"
    a, b = (trained[f"{name}.lora_{part}.default.weight"] for part in "AB")
    assert torch.equal(merged[f"{name}.weight"], (plain[f"{name}.weight"].float() + b @ a * 2).bfloat16())
    assert torch.equal(merged["lm_head.weight"][:300], plain["lm_head.weight"])
    assert AutoModelForCausalLM.from_pretrained("merged").dtype == torch.bfloat16
    card = (run.export_dir / "README.md").read_text()
    assert "load the base dequantized, as below" in card and "FineGrainedFP8Config(dequantize=True)" in card


def test_qlora_says_what_quantizing_again_costs(echelon, base, tmp_path):
    write_recipe(tmp_path, adapter={"method": "qlora"}, train={"steps": 2})
    ending = echelon("train", "recipe.json", "--nproc", "1").succeeded()
    [line] = [line for line in ending.out.splitlines() if "quantized again to 4 bits" in line]
    median, largest = map(float, re.search(r"is ([0-9.]+) in the median of 14 and ([0-9.]+) at most", line).groups())
    assert 0.05 < median <= largest < 1
    ending = echelon("export", "runs/tuned", "merged", "--merge", "--dtype", "bf16")
    assert ending.code == 0 and "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_evaluation_is_that_of_the_plain_weights(echelon, base, tmp_path, nproc):
    (tmp_path / "text.txt").write_text("".join(f"{number} plus {number} is {2 * number}.\n" for number in range(300)))
    found = [echelon("eval", name, "--data", "text.txt", "--nproc", nproc, "--json") for name in ("base", "plain")]
    assert [ending.code for ending in found] == [0, 0], found
    losses = [json.loads(ending.out)["loss"] for ending in found]
    assert losses[0] == losses[1]


WHOLE_MODEL = """
import resource, sys, threading
from pathlib import Path
import torch
from echelon.learn.model.build import build_on_meta, load_config, materialize
from echelon.learn.model.weights import PretrainedWeights
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
config = load_config(str(folder))
skeleton, model = build_on_meta(config), build_on_meta(config, dtype=torch.bfloat16)
materialize(model, "cpu")
for parameter in model.parameters():
    parameter.data.zero_()
weights = PretrainedWeights(skeleton, folder)
def used():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
    return int(line.split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used() + limit, -1))
weights.fill(model)
print(sum(float(parameter.float().abs().sum()) for parameter in model.parameters()))
"""


def test_a_load_needs_no_more_than_a_layer_beside_the_model(tmp_path):
    """Under a cap of one layer, 98 MiB in bf16, above the model and its mapped file."""
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=2048, intermediate_size=5632, num_hidden_layers=3, num_attention_heads=8,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    model.save_pretrained(tmp_path / "base")
    plain = quantize_folder(tmp_path / "base", "fp8")
    expected = sum(float(weight.float().abs().sum()) for weight in plain.values())
    num_bytes = sum(weight.nbytes for weight in plain.values())
    limit = (tmp_path / "base" / "model.safetensors").stat().st_size + layer
    done = subprocess.run(
        [sys.executable, "-c", WHOLE_MODEL, tmp_path / "base", str(limit)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) == pytest.approx(expected, rel=1e-6) and num_bytes > 200e6
