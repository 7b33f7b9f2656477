"""`echelon drill`: every fault is injected, detected and survived, and nothing is left behind."""

import json
import os
import signal

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import assert_no_orphan, await_line, finish, start, write_recipe

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(marked, tmp_path):
    """A working directory with the small recipe; no process of the drill may outlive the test."""
    write_recipe(tmp_path)
    return tmp_path


def drill(echelon):
    """The findings about a drill of recipe.json, by their faults."""
    ending = echelon("drill", "recipe.json", "--nproc", "2", "--json").succeeded()
    rows = [json.loads(line) for line in ending.out.splitlines() if line.startswith("{")]
    assert all(row["identical"] for row in rows)
    return {row["fault"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGTERM, "pilot"), (signal.SIGINT, "whole"), (signal.SIGHUP, "a-rank-killed")],
)
def test_a_signal_ends_the_drill_and_all_its_processes(folder, number, moment):
    """This includes a suspended rank, which cannot detect that its parent is gone."""
    job = start("drill", "recipe.json", "--nproc", "2", cwd=folder)
    run = RunFolder(folder / "runs" / "tiny-drill" / moment)
    await_line(run.metrics_path, '"step": 2,', job, 600)
    os.kill(run.read_pids()[1], signal.SIGSTOP)
    job.send_signal(number)
    ending = finish(job, 120)
    assert_no_orphan(0.1)
    assert (ending.code, ending.err) == (1, f"echelon: stopped by {number.name}; the drill's processes have ended\n")
    assert not run.path.parent.exists()


@pytest.mark.slow
def test_one_process_skips_the_fault_that_only_a_peer_detects(folder):
    job = start("drill", "recipe.json", "--nproc", "1", "--json", cwd=folder)
    lines, is_first = [], True
    for line in job.stdout:
        lines.append(line)
        if line.startswith("{") and is_first:
            is_first = False
            assert not (folder / "runs" / "tiny-drill" / "NaN-in-the-weights").exists(), "told as it was known"
    findings = {row["fault"]: row for row in map(json.loads, (line for line in lines if line.startswith("{")))}
    said = job.stderr.readlines()
    assert job.wait(60) == 0, (lines, said)
    assert "drill: skipped with one process: a rank hangs, which only another rank could detect\n" in said
    assert said[1].startswith("drill: 6 faults, about ") and said[1].endswith(" in total\n")
    assert len(findings) == 6 and all(each["identical"] for each in findings.values())
    assert findings["a rank killed"]["starts"] == 1 and findings["a rank killed"]["lost_steps"] > 0
    assert not (folder / "runs" / "tiny-drill").exists()


DEEP = {"config": {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 8}}
MIXTURE = {"config": {"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                      "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ("fsdp", {}),
        ({"tp": 2, "sequence_parallel": True}, DEEP),
        ({"pp": 2, "schedule": "interleaved", "stages": [1, 3, 3, 1]}, DEEP),
        ({"cp": 2}, {}),
        ({"dp_shard": 2, "ep": 2}, MIXTURE),
    ],
    ids=["fsdp", "tp", "pp", "cp", "ep"],
)
def test_every_fault_is_survived(echelon, tmp_path, parallel, model):
    write_recipe(tmp_path, parallel=parallel, model=model)
    findings = drill(echelon)
    assert len(findings) == 7
    assert findings["SIGTERM"]["lost_steps"] == 0 and findings["SIGTERM"]["starts"] == 2
    for name in ("a rank killed", "a rank hangs"):
        assert findings[name]["starts"] == 1 and findings[name]["lost_steps"] > 0, "restarted by itself"
    assert findings["the agent killed"]["starts"] == 2 and findings["the agent killed"]["noticed_seconds"] < 10
    assert findings["a rank hangs"]["noticed_seconds"] > 10
    assert findings["the disk is full"]["lost_steps"] == 0 and findings["the disk is full"]["starts"] == 1
    assert findings["NaN in the weights"]["starts"] == 3
    assert not (tmp_path / "runs" / "tiny-drill").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sync",
    [
        {"replicas": 2},
        {"name": "parameter_server"},
        {"name": "parameter_server", "max_staleness": 1},
        {"name": "diloco", "every": 5},
        {"compress": {"method": "powersgd"}},
    ],
    ids=["quorum", "servers", "asynchronous servers", "diloco", "powersgd"],
)
def test_every_fault_is_survived_however_replicas_agree(echelon, tmp_path, sync):
    """A rank that is lost restarts the others only if they need it."""
    fault = {"on_lost_process": "continue"} if sync == {"replicas": 2} else {}
    write_recipe(tmp_path, parallel="ddp", sync=sync, fault=fault)
    findings = drill(echelon)
    assert len(findings) == 7
    killed = findings["a rank killed"]
    goes_on = bool(fault) or sync.get("name") == "parameter_server"
    assert killed["starts"] == 1 and (killed["lost_steps"] == 0) is goes_on


LETTERS = """
def small_letters(answers, records):
    return [sum("a" <= c <= "z" for c in answer) / (len(answer) + 1) for answer in answers]
"""


@pytest.mark.slow
def test_every_fault_is_survived_by_training_from_rewards(echelon, tmp_path):
    """The rewards are those of the undisturbed run; after a reward that hung, the run still takes all its steps."""
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} is "}) + "\n" for n in range(48)))
    write_recipe(
        tmp_path,
        data={"train": "prompts.jsonl", "validation_fraction": 0.2, "sequence_len": 16},
        objective={"name": "grpo"},
        rollout={"group_size": 8, "max_new_tokens": 6},
        reward="letters:small_letters",
        train={"steps": 40, "global_batch_size": 32, "compile": False},
        optim={"learning_rate": 2e-2},
    )
    findings = drill(echelon)
    assert len(findings) == 8
    hung = findings.pop("a reward hangs")
    assert (hung["starts"], hung["lost_steps"], hung["compared"]) == (1, 0, "the steps")
    assert 2.0 < hung["noticed_seconds"] < 30
    assert {row["compared"] for row in findings.values()} == {"every bit"}
    assert findings["a rank killed"]["starts"] == 1 and findings["a rank killed"]["lost_steps"] > 0
