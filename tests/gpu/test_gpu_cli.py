"""The real command on a GPU: train with NCCL, kill, resume, evaluate, sample."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.parity.training import Row, equal_tensors, read_rows, tensors_of, write_recipe

pytestmark = pytest.mark.gpu

STEPS, EVERY = 600, 100
OVERRIDES = (
    "model.attn_implementation=eager", "train.compile=false", f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=100", "evaluate.batches=1000",
)  # fmt: skip
EXACT = ("step", "tokens", "loss", "grad_norm", "learning_rate", "batch_hash")


def echelon(*arguments):
    command = [sys.executable, "-m", "echelon", *map(str, arguments)]
    env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def succeed(*arguments):
    job = echelon(*arguments)
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    return output


def kill_after_first_checkpoint(path, run):
    job = echelon("train", path, "--nproc", "1", *OVERRIDES)
    deadline = time.monotonic() + 240
    while not list((run / "checkpoints").glob("step-*")):
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0]
        time.sleep(0.02)
    job.send_signal(signal.SIGKILL)
    job.communicate()


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(gpu, text, tmp_path):
    row = Row(micro_batch=4)
    paths = {name: write_recipe(row, tmp_path / name, text, STEPS) for name in ("straight", "killed")}
    succeed("train", paths["straight"], "--nproc", "1", *OVERRIDES)
    kill_after_first_checkpoint(paths["killed"], tmp_path / "killed" / "run")
    assert "Resuming from step-" in succeed("train", paths["killed"], "--nproc", "1", *OVERRIDES)
    runs = [tmp_path / name / "run" for name in ("straight", "killed")]
    straight, resumed = ([each for each in read_rows(run) if each["kind"] == "train"] for run in runs)
    assert [each["step"] for each in resumed] == list(range(1, STEPS + 1))
    for ours, theirs in zip(resumed, straight, strict=True):
        assert [ours[key] for key in EXACT] == [theirs[key] for key in EXACT]
    assert equal_tensors(*(tensors_of(run, STEPS) for run in runs))
    assert json.loads((runs[0] / "environment.json").read_text())["cluster"]["kind"] == gpu.device.type
    assert straight[-1]["loss"] < 0.6 * straight[0]["loss"] and straight[-1]["mfu"] > 0

    result = json.loads(succeed("eval", runs[0], "--json").strip().splitlines()[-1])
    last = [each for each in read_rows(runs[0]) if each["kind"] == "eval"][-1]
    assert result["loss"] == pytest.approx(last["loss"], abs=1e-3)  # both measured on all held-out text
    printed = succeed("generate", runs[0], "--prompt", "def ", "--max-tokens", "20").splitlines()
    assert any(line.startswith("def ") for line in printed)  # the first lines may be warnings of packages


@pytest.mark.parametrize("parallel", [pytest.param({"cpu_offload": True}, marks=pytest.mark.device), "auto"], ids=str)
def test_the_defaults_of_a_gpu_train(gpu, text, tmp_path, parallel):
    """The choices of `auto` on a GPU, bf16 and inductor; and a run with offloading."""
    row = Row(parallel, micro_batch=4, compile=parallel == "auto", precision="bf16")
    succeed("train", write_recipe(row, tmp_path, text, 60), "--nproc", "1")
    losses = [each["loss"] for each in read_rows(tmp_path / "run") if each["kind"] == "train"]
    assert len(losses) == 60 and losses[-1] < 0.8 * losses[0]
