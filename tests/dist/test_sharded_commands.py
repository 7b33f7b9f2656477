"""`eval`, `generate` and `export --merge` in several processes, each with a shard of the model: what a user sees."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.learn.data.tokenizer import build_bytes_tokenizer
from tests.dist.command import LAUNCHER_KEYS, TEXT, Ending, assert_no_orphan, finish, start, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]

GENERATE = ("generate", "model", "--prompt", "1 plus 1 is", "--seed", "5")
LAYER_NUMBERS = 4 * 1024**2 + 3 * 1024 * 2816
NUM_LAYERS = 12
MODEL_BYTES = 4 * NUM_LAYERS * LAYER_NUMBERS


def write_model(folder, **fields):
    """Write a random Llama with a byte tokenizer, in several files, and a text."""
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"vocab_size": 256, "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None} | fields
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config))
    model.save_pretrained(folder / "model", max_shard_size="60MB")
    build_bytes_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT[:5000])


@pytest.fixture
def folder(echelon, tmp_path):
    """A folder with a small model; no process that a test starts may outlive it."""
    write_model(tmp_path)
    return tmp_path


def test_torchrun_and_nproc_print_what_one_process_prints(folder, echelon):
    evaluation = ("eval", "model", "--data", "text.txt", "--json")
    alone, several = (echelon(*evaluation, *more) for more in ((), ("--nproc", "3")))
    assert alone.code == several.code == 0, several
    loss = json.loads(alone.out)["loss"]
    assert json.loads(several.out)["loss"] == pytest.approx(loss, rel=1e-12)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_KEYS}
    out = subprocess.run(
        [*torchrun, "-m", "echelon", *evaluation], env=env, check=True, capture_output=True, timeout=200
    ).stdout
    assert json.loads(out)["loss"] == pytest.approx(loss, rel=1e-12)

    lines = ("--num-samples", "3", "--max-tokens", "12", "--json")
    alone, several = (echelon(*GENERATE, *lines, *more) for more in ((), ("--nproc", "2")))
    assert several.code == 0 and several.out == alone.out and len(alone.out.splitlines()) == 3, several
    written = echelon(*GENERATE, *lines[:-1], "--nproc", "2", "--out", "samples.jsonl")
    assert written.code == 0 and Path("samples.jsonl").read_text() == alone.out, written
    streamed = echelon(*GENERATE, "--max-tokens", "12", "--stream", "--nproc", "2")
    assert streamed.out == echelon(*GENERATE, "--max-tokens", "12", "--stream").out and streamed.code == 0


def test_errors_are_told_once(folder, echelon):
    for arguments, code, message in (
        (("eval", "model", "--nproc", "2"), 2, "model is an HF folder without text; give text with --data PATH."),
        (("eval", "model", "--nproc", "0"), 2, "--nproc 0 is neither a number of processes nor auto"),
        ((*GENERATE, "--chat", "--nproc", "2"), 2, "--chat: the tokenizer of model has no chat template"),
    ):
        ending = echelon(*arguments)
        assert ending.code == code and ending.err.count(message) == 1 and not ending.out, ending
        assert "Traceback" not in ending.err and len(ending.err.splitlines()) == 1, ending


def ranks_of(process):
    """The pids of a command's ranks, by rank."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children = [each for each in psutil.Process(process.pid).children(recursive=True) if each.is_running()]
        found = {each.environ().get("RANK"): each.pid for each in children if "generate" in each.cmdline()}
        if {"0", "1"} <= found.keys():
            return found
        time.sleep(0.1)
    raise AssertionError("no ranks")


def begin_endless(folder):
    """Start a generation that does not end, and wait for its first text."""
    job = start(*GENERATE, "--max-tokens", "200000", "--stream", "--nproc", "2", cwd=folder)
    assert job.stdout.read(12)
    return job


def test_a_lost_process_ends_all_with_one_message(folder):
    job = begin_endless(folder)
    os.kill(int(ranks_of(job)["1"]), signal.SIGKILL)
    ending = finish(job, 60)
    assert ending.code == 1 and re.search(r"rank 1 \(pid \d+\) was killed by SIGKILL", ending.err), ending.err
    assert ending.err.count("echelon: ") == 1


def test_ctrl_c_ends_all(folder):
    job = begin_endless(folder)
    os.killpg(job.pid, signal.SIGINT)
    ending = finish(job, 60)
    assert ending.code == 1 and ending.err.splitlines()[-1] == "echelon: stopped by SIGINT", ending.err
    assert_no_orphan()


def run_capped(num_bytes, *arguments, shard_bytes=64 * 2**20):
    """Run a command whose processes may each have this much private memory; exports write small files."""
    code = f"import sys; from echelon.learn.checkpoint import export; export.SHARD_BYTES = {shard_bytes}; "
    code += "from echelon.cli.main import main; sys.argv[0] = 'echelon'; main()"
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_KEYS}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=500,
        env=env | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes)),
    )  # fmt: skip
    return Ending(done.returncode, done.stdout, done.stderr)


def count_idle_bytes():
    """The private memory of a process that has imported all that these commands import."""
    names = ("cli.api.models", "tools.inference.evaluate", "tools.inference.generate", "tools.inference.merge")
    code = "; ".join(f"import echelon.{name}" for name in names)
    code += ", peft, torch.distributed.checkpoint; print(open('/proc/self/status').read())"
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env).stdout
    return 1024 * int(re.search(r"VmData:\s+(\d+) kB", out)[1])


@pytest.mark.slow  # what fits depends on what the libraries of a machine allocate
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers all private memory only on Linux")
def test_memory_for_less_than_the_model_is_enough(echelon, tmp_path):
    """Each process may have three quarters of the model in addition to what it has without one."""
    write_model(
        tmp_path, hidden_size=1024, intermediate_size=2816, num_hidden_layers=NUM_LAYERS, num_attention_heads=16
    )
    write_recipe(
        tmp_path,
        model={"config": None, "checkpoint": "model"},
        tokenizer=None,
        adapter={"method": "lora", "r": 4},
        train={"steps": 2, "global_batch_size": 2},
        optim={"learning_rate": 1e-2},
        checkpoint={"every": 2},
    )
    (tmp_path / "text.txt").write_text(TEXT[:5000])
    echelon("train", "recipe.json", "--nproc", "1").succeeded()
    cap = count_idle_bytes() + 3 * MODEL_BYTES // 4
    for target, *more in (("model", "--data", "text.txt"), ("runs/tiny",)):
        expected = json.loads(echelon("eval", target, *more, "--json").out)["loss"]
        found = run_capped(cap, "eval", target, *more, "--json", "--nproc", "4").succeeded()
        assert json.loads(found.out)["loss"] == pytest.approx(expected, abs=1e-6)
        lacking = run_capped(cap, "eval", target, *more, "--json", "--nproc", "1")
        assert lacking.code != 0 and "memory" in lacking.err.lower(), lacking
    found = run_capped(cap, "generate", "runs/tiny", "--prompt", "1 plus", "--max-tokens", "4", "--nproc", "4")
    assert found.out == echelon("generate", "runs/tiny", "--prompt", "1 plus", "--max-tokens", "4").out, found
    merged = run_capped(cap, "export", "runs/tiny", "merged", "--merge", "--nproc", "4")
    assert merged.code == 0 and len(list(Path("merged").glob("*.safetensors"))) > 5, merged
    comparison = json.loads(Path("merged/merge.json").read_text())
    assert comparison["tokens"] > 50 and 0 <= comparison["kl"] < 1e-6
