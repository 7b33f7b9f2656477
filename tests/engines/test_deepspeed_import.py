"""`echelon import` of checkpoints that DeepSpeed wrote: the weights are those that DeepSpeed itself reads from them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist

RANKS = Path(__file__).parent / "zero_checkpoint.py"
STEP = "global_step3"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of stages 1, 2 and 3 on two processes, after three steps with two parameter groups."""
    folder = tmp_path_factory.mktemp("written")
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(RANKS)]
    done = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """The weights, by DeepSpeed's own conversion."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return {name: each.clone() for name, each in get_fp32_state_dict_from_zero_checkpoint(str(folder), STEP).items()}


def convert(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    command = [sys.executable, "-m", "echelon", "import", str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return load_file(out / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_zero_checkpoint(written: Path, tmp_path: Path, stage: int) -> None:
    """Stage 2 has tied weights, stage 3 is of bf16."""
    source = written / f"stage{stage}"
    found, wanted = convert(source, tmp_path / "out"), expected(source)
    assert ("lm_head.weight" in found) == (stage != 2)
    assert found.keys() == wanted.keys() - ({"lm_head.weight"} if stage == 2 else set())
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert all(each.dtype == torch.float32 for each in found.values())
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_checkpoint(written: Path, tmp_path: Path, stage: int) -> None:
    source, universal = written / f"stage{stage}", tmp_path / "universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(source / STEP), "--output_folder", str(universal / "step3_universal")]
    subprocess.run([*command, *folders], check=True, capture_output=True, timeout=300)
    (universal / "config.json").write_bytes((source / "config.json").read_bytes())
    found, wanted = convert(universal, tmp_path / "out"), expected(source)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.slow
def test_transformers_loads_the_folder(written: Path, tmp_path: Path) -> None:
    """The folder of one step is given; the config is in the folder around it."""
    from transformers import AutoModelForCausalLM

    convert(written / "stage1" / STEP, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(16)[None]
    weights = expected(written / "stage1")
    other = AutoModelForCausalLM.from_config(model.config)
    other.load_state_dict(weights)
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
