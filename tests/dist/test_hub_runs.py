"""Runs with a hub model: started, resumed, evaluated, and started by torchrun, with a local hub server."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from echelon.ground.sockets import find_free_port
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import finish, read_lines, start, write_recipe
from tests.hub_server import HubServer, push_model
from tests.parity.training import LOSS
from tests.unit.learn.answers.test_reward_models import write_scorer

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NAME = "team/tiny"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = HubServer()
    hub.first = push_model(hub, NAME, tmp_path / "first")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield hub
    hub.stop()


def fine_tuning(folder, checkpoint, steps):
    return write_recipe(
        folder,
        model={"config": None, "checkpoint": str(checkpoint)},
        tokenizer=None,
        adapter={"method": "lora", "r": 4},
        train={"steps": steps},
        optim={"schedule": "constant"},
        checkpoint={"every": 4},
    )


def echelon(folder, *arguments, **environment):
    return finish(start(*arguments, cwd=folder, **environment), 200).succeeded()


def losses(folder):
    rows = read_lines(RunFolder(folder / "runs" / "tiny").metrics_path)
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_resume_and_evaluation_use_the_commit_of_the_first_start(hub, tmp_path):
    """Each start is as on another machine: the cache is empty, and the repository has a newer commit."""
    fine_tuning(tmp_path, NAME, 4)
    echelon(tmp_path, "train", "recipe.json", "--nproc", "1")
    push_model(hub, NAME, tmp_path / "second", seed=10)
    shutil.rmtree(tmp_path / "hf")
    fine_tuning(tmp_path, NAME, 8)
    out = echelon(tmp_path, "train", "recipe.json", "--nproc", "1").out
    assert f"hub: {NAME} is at commit {hub.first}" in out
    alone = tmp_path / "alone"
    alone.mkdir()
    fine_tuning(alone, tmp_path / "first", 8)
    echelon(alone, "train", "recipe.json", "--nproc", "1")
    assert losses(tmp_path) == losses(alone) and len(losses(alone)) == 8

    shutil.rmtree(tmp_path / "hf")
    ours = echelon(tmp_path, "eval", "runs/tiny", "--json")
    assert f"hub: fetching {NAME} at commit {hub.first[:12]}" in ours.err
    assert json.loads(ours.out)["loss"] == json.loads(echelon(alone, "eval", "runs/tiny", "--json").out)["loss"]
    asked = len(hub.requests)
    echelon(tmp_path, "generate", "runs/tiny", "--prompt", "1 plus", "--max-tokens", "3", HF_HUB_OFFLINE="1")
    assert len(hub.requests) == asked
    adapter = json.loads((tmp_path / "runs" / "tiny" / "export" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == NAME


def push_texts(hub, folder, seed):
    """Push a dataset of three files, of which each holds about 400 sequences of 64 bytes."""
    (folder / "data").mkdir(parents=True)
    for number in range(3):
        draws = np.random.default_rng((seed, number)).integers(10**8, 10**9, 1300)
        lines = [json.dumps({"text": f"{number} drew {draw}, {draw}"}) for draw in draws]
        (folder / "data" / f"train-{number:05d}.jsonl").write_text("\n".join(lines))
    (folder / "data" / "test.jsonl").write_text(json.dumps({"text": "held out"}))
    return hub.push("datasets/team/text", folder)


def test_a_dataset_of_the_hub_is_prepared_while_a_run_trains(hub, tmp_path):
    """Its batches are those of the dataset prepared before, and a resume keeps its commit."""
    commit = push_texts(hub, tmp_path / "first", 0)
    source = {"path": "team/text", "format": "hub", "split": "train"}
    sections = {"train": {"steps": 8, "eval_every": None}, "checkpoint": {"every": 4}}
    data = {"train": [source], "sequence_len": 64, "validation_fraction": 0}
    write_recipe(tmp_path, data=data, **sections)
    whole = echelon(tmp_path, "train", "recipe.json", "--nproc", "1", "run.dir=whole/tiny")
    assert f"hub: datasets/team/text is at commit {commit}" in whole.out
    rows = read_lines(RunFolder(tmp_path / "whole" / "tiny").metrics_path)
    expected = [row["batch_hash"] for row in rows if row["kind"] == "train"]

    write_recipe(tmp_path, data={**data, "stream": {"window": 10**6}}, **sections)
    echelon(tmp_path, "train", "recipe.json", "--nproc", "2", "run.dir=runs/wide", "train.steps=4")
    wide = read_lines(RunFolder(tmp_path / "runs" / "wide").metrics_path)
    assert [row["batch_hash"] for row in wide if row["kind"] == "train"] == expected[:4]

    stream = ("data.stream.window=16", "data.prepared_dir=near")
    echelon(tmp_path, "train", "recipe.json", "--nproc", "2", "train.steps=4", *stream)
    push_texts(hub, tmp_path / "second", 1)
    out = echelon(tmp_path, "train", "recipe.json", "--nproc", "1", *stream).out
    assert f"hub: datasets/team/text is at commit {commit}" in out and len(losses(tmp_path)) == 8


def test_a_reward_model_of_the_hub_judges_as_its_folder(hub, tmp_path):
    write_scorer(tmp_path / "scorer")
    commit = hub.push("team/scorer", tmp_path / "scorer")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} plus "}) + "\n" for n in range(32)))
    write_recipe(
        tmp_path,
        data={"train": "prompts.jsonl", "sequence_len": 16},
        objective={"name": "grpo"},
        rollout={"group_size": 4, "max_new_tokens": 4},
        train={"steps": 2, "global_batch_size": 16, "log_every": 1},
    )
    rewards = []
    for name, path in (("hub", "team/scorer"), ("folder", str(tmp_path / "scorer"))):
        of_model = f"reward=[{{name: model, options: {{path: {path}}}}}]"
        out = echelon(tmp_path, "train", "recipe.json", "--nproc", "2", of_model, f"run.dir=runs/{name}").out
        assert ("hub: team/scorer is at commit " + commit in out) == (name == "hub")
        rows = read_lines(RunFolder(tmp_path / "runs" / name).metrics_path)
        rewards.append([row["reward"] for row in rows if row["kind"] == "train"])
    assert rewards[0] == rewards[1] and len(rewards[0]) == 2
    ending = finish(start("train", "recipe.json", "reward=[{name: model, options: {path: team/absent}}]",
                          "run.dir=runs/absent", cwd=tmp_path), 100)  # fmt: skip
    assert ending.code == 2 and "reward.0.options.path=team/absent" in ending.err, ending


def test_the_first_rank_of_each_torchrun_machine_downloads(hub, tmp_path):
    """Two machines with two ranks each share the run folder but no cache."""
    fine_tuning(tmp_path, NAME, 4)
    port = str(find_free_port("127.0.0.1"))
    machines = []
    for number in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        command += ["--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", port]
        env = os.environ | {"HF_HOME": str(tmp_path / f"hf-{number}")}
        machines.append(
            subprocess.Popen(
                [*command, "-m", "echelon", "train", "recipe.json"],
                cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    outputs = [each.communicate(timeout=300)[0] for each in machines]
    assert [each.returncode for each in machines] == [0, 0], "\n".join(outputs)
    assert set(hub.downloads().values()) == {2}
    assert all(output.count(f"hub: fetching {NAME} at commit {hub.first[:12]}") == 1 for output in outputs)
    fine_tuning(tmp_path, tmp_path / "first", 4)
    echelon(tmp_path, "train", "recipe.json", "run.dir=alone/runs/tiny", "--nproc", "1")
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "alone"), abs=LOSS)
