"""Runs that are killed and resumed, after the weights of their base were replaced by others of the same shapes."""

import json
import os
import shutil
import signal
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from echelon.learn.checkpoint.given_models import RECORD
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import await_line, finish, start
from tests.dist.test_finetuning import write_base, write_recipe

pytestmark = pytest.mark.dist


def replace_values(base):
    """Write other values of the same shapes, and nothing else."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    shutil.copy(base / "config.json", base / "kept.json")
    model.save_pretrained(base)
    (base / "kept.json").replace(base / "config.json")


def kill_after_a_checkpoint(run, *command):
    """Start a training, and kill all its processes with SIGKILL once a checkpoint is there."""
    job = start(*command)
    await_line(run.events_path, '"event": "checkpoint", "step": 3', job, seconds=120)
    os.killpg(job.pid, signal.SIGKILL)
    finish(job)


def check_refused(ending, *words):
    assert ending.code == 2 and "Traceback" not in ending.err, ending
    for word in ("model.checkpoint=base is not the model that the run ", "restore that folder from a copy", *words):
        assert word in ending.err, ending


def test_an_adapter_is_not_trained_or_used_with_another_base(echelon, tmp_path):
    """A base that was copied, moved and touched is the same."""
    base = write_base(tmp_path)
    run = write_recipe(tmp_path, train={"steps": 60})
    command = ("train", "recipe.json", "--nproc", "1")
    kill_after_a_checkpoint(run, *command)
    shutil.copytree(base, tmp_path / "copy", copy_function=shutil.copyfile)
    replace_values(base)
    ending = echelon(*command)
    check_refused(ending, f"that the run {run.path.relative_to(tmp_path)} began with", "--fresh")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 plus 1 is", "choices": [" 2", " 3"], "answer": 0}\n')
    for arguments in (
        ("export", run.path, "merged", "--merge"),
        ("eval", run.path),
        *((("eval", run.path, "--tasks", "tasks.jsonl"),) if find_spec("lm_eval") else ()),
        ("generate", run.path, "--prompt", "1 plus"),
    ):
        check_refused(echelon(*arguments), f"that the run {run.path} began with")
    assert not (tmp_path / "merged").exists()

    shutil.rmtree(base)
    shutil.move(tmp_path / "copy", base)
    ending = echelon(*command)
    assert ending.code == 0 and "Resuming from step-" in ending.out, ending
    assert echelon("export", run.path, "merged", "--merge").code == 0


@pytest.mark.slow
def test_a_reference_and_a_base_that_all_weights_began_from(echelon, tmp_path):
    """Preferences without an adapter, on two processes, of which one compares; and a run of an earlier version."""
    base = write_base(tmp_path)
    pairs = [{"prompt": f"{n} plus {n}?", "chosen": f"{2 * n}.", "rejected": f"{2 * n} or so."} for n in range(96)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    write_recipe(
        tmp_path, data={"train": "pairs.jsonl", "sequence_len": 128}, objective={"name": "dpo"}, train={"steps": 40}
    )
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    del recipe["adapter"]
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    command, run = ("train", "recipe.json", "--nproc", "2"), RunFolder(tmp_path / "runs" / "tuned")
    kill_after_a_checkpoint(run, *command)
    replace_values(base)
    check_refused(echelon(*command), "--fresh")
    check_refused(echelon("eval", run.path), f"that the run {run.path} began with")
    (run.path / RECORD).unlink()
    ending = echelon(*command)
    assert ending.code == 0 and "Resuming from step-" in ending.out, ending
    assert (run.path / RECORD).is_file()
