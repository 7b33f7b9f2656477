"""Records of jobs may come with a stranger's folder: nothing in them becomes an option, a command or an address."""

import json
import stat
from pathlib import Path

import pytest

from echelon.cli.commands.jobs import cancel, logs, status
from echelon.ground.errors import ConfigError
from echelon.launch.job import Submitted, find_launcher
from echelon.launch.records import JOBS, find_job, list_jobs, record_job
from echelon.recipe.names import LAUNCHERS
from tests.unit.launch.sagemaker.sagemaker_jobs import make_job

TORCHRUN = {"hosts": "node-1,node-2", "folder": "/mnt/jobs/x", "ssh_options": "-p 2222"}
SOUND = {
    "local": ("400000000", {}),
    "torchrun": ("x", {**TORCHRUN, "user": "me"}),
    "slurm": ("4711_0", {}),
    "ray": ("x", {"address": "http://127.0.0.1:8265"}),
    "skypilot": ("x", {}),
    "kubernetes": ("team-a/x", {"kind": "jobset", "context": "arn:aws:eks:us-east-1:1:cluster/c"}),
    "sagemaker": ("x", {"region": "us-gov-west-1", "run": "s3://bucket/runs/x", "price": "37.69"}),
}
HOSTILE = [
    ("torchrun", "x", {**TORCHRUN, "hosts": "-oProxyCommand=touch pwned"}),
    ("torchrun", "x", {**TORCHRUN, "hosts": "node-1,../../x"}),
    ("torchrun", "x", {**TORCHRUN, "user": "-oProxyCommand=touch pwned"}),
    ("torchrun", "x", {"hosts": "node-1", "folder": "/tmp"}),
    ("torchrun", "x", {**TORCHRUN, "more": "-F./config"}),
    ("slurm", "--state=RUNNING", {}),
    ("slurm", "1 --user=me", {}),
    ("skypilot", "--all", {}),
    ("local", "-1", {}),
    ("local", "self", {}),
    ("local", "4000000000", {}),
    ("ray", "x", {"address": "my_module://x"}),
    ("ray", "x", {"address": "http://me:pw@host"}),
    ("ray", "x", {}),
    ("kubernetes", "../x", {"kind": "jobset", "context": "c"}),
    ("kubernetes", "a/x", {"kind": "pods", "context": "c"}),
    ("kubernetes", "a/x", {"kind": "jobset"}),
    ("sagemaker", "x", {"region": "evil.example/", "run": "s3://b/x"}),
    ("sagemaker", "x", {"region": "us-east-1", "run": "s3://b/x", "price": "inf"}),
    ("sagemaker", "x", {"region": "us-east-1", "run": "file:///etc"}),
    ("local", "17\n", {}),
    ("local", "17", {"x": "y"}),
    ("slurm", "17", ["x"]),
    ("slurm", "17", {"x": 1}),
    ("mars", "17", {}),
]


@pytest.fixture(autouse=True)
def asked(tmp_path, monkeypatch):
    """Programs that record that they were called, in place of those that launchers call."""
    programs, calls = tmp_path / "programs", tmp_path / "calls"
    programs.mkdir()
    for name in ("ssh", "scontrol", "squeue", "scancel", "sacct", "sky"):
        (programs / name).write_text(f'#!/bin/sh\necho "$0 $*" >> {calls}\nexit 1\n')
        (programs / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return calls


def write(folder, target, id, place, **changes):
    path = JOBS / folder
    path.mkdir(parents=True)
    fields = {"name": folder, "target": target, "id": id, "run_dir": "runs/x", "submitted_at": 1.0, "place": place}
    (path / "job.json").write_text(json.dumps(fields | changes))


@pytest.mark.parametrize("target", LAUNCHERS.own)
def test_what_launchers_write_is_sound(target):
    id, place = SOUND[target]
    write("x", target, id, place)
    records, faults = list_jobs()
    if find_launcher(target).record_form.needs_own:
        assert not records and "was not written by a launch of this account" in faults[0]
    else:
        assert [record.place for record in records] == [place] and not faults


@pytest.mark.parametrize(("target", "id", "place"), HOSTILE)
def test_a_hostile_record_calls_nothing_and_hides_no_other(target, id, place, asked, capsys):
    write("x", target, id, place)
    write("good", "local", "400000000", {})
    status()
    out, err = capsys.readouterr()
    assert out.startswith("good  local  failed") and out.count("\n") == 1
    assert err.startswith("echelon: jobs/x/job.json ") and err.count("\n") == 1
    for command in (status, logs, cancel):
        with pytest.raises(ConfigError, match=r"^jobs/x/job\.json (is not the record of a launch|was not written by)"):
            command("x")
    assert not asked.exists()


@pytest.mark.parametrize("text", ["", '{"name": "x", "tar', "[]", "{}", '{"name": "x"}', "[" * 100_000, "\0"])
def test_a_damaged_record_is_one_line(text):
    write("x", "local", "17", {})
    (JOBS / "x" / "job.json").write_text(text)
    assert list_jobs()[0] == [] and len(list_jobs()[1]) == 1 and "\n" not in list_jobs()[1][0]
    for name in ("x", "jobs/x", str(Path("jobs/x").resolve())):
        with pytest.raises(ConfigError, match=r"jobs/x/job\.json is not the record of a launch: .*remove its folder"):
            find_job(name)


@pytest.mark.parametrize("changes", [{"name": "a b"}, {"run_dir": "\0"}, {"name": 1}, {"submitted_at": "now"}])
def test_other_fields_are_checked_too(changes):
    write("x", "local", "17", {}, **changes)
    with pytest.raises(ConfigError, match="is not the record of a launch"):
        find_job("x")


def test_the_addresses_of_own_records_are_asked(asked, tmp_path, capsys):
    """With the options of the launch; not after somebody has changed the record."""
    job = make_job(tmp_path, "launch.to=torchrun")
    job.folder.mkdir(parents=True)
    record = record_job(job, Submitted(job.name, TORCHRUN))
    assert find_job(job.name) == record
    status(job.name)
    assert "-p 2222 -- node-1" in asked.read_text() and "unknown" in capsys.readouterr().out
    asked.unlink()
    path = job.folder / "job.json"
    path.write_text(path.read_text().replace("-p 2222", "-o ProxyCommand=x"))
    with pytest.raises(ConfigError, match=r"was not written by a launch of this account.*echelon status "):
        status(job.name)
    assert not asked.exists()
