"""SkyPilot's task: its golden files, SkyPilot's parser, a machine's script, the calls of `sky`; and dstack's task."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.job_checks import refuse_secrets
from echelon.launch.records import make_job, submit_job
from echelon.launch.skypilot import SkyPilotLauncher
from echelon.launch.source_bundle import build_wheel
from echelon.recipe.load import parse_recipe
from tests.unit.recipe_samples import DEMO

GOLDEN = Path(__file__).parent / "golden"
NAME = "demo-20300102-030405"
RECIPE = DEMO + "launch: {to: skypilot}\ncheckpoint: {remote: 's3://bucket/runs/demo'}\n"
# Accepted by `sky.Task.from_yaml_config` of SkyPilot 0.14.1, and by that of the version that is installed here, if any.
CASES = {
    "spot": (
        "launch.nodes=2", "launch.nproc_per_node=8", "launch.accelerator=A100-80", "launch.max_hours=12",
        "launch.setup=['pip install my-rewards']", "adapter.method=lora", "launch.env={NOTE: \"it's\"}",
        "launch.skypilot.resources={use_spot: true, infra: aws/us-west-2, disk_size: 500}",
    ),
    "mounted": (
        "checkpoint.remote=null", "run.dir=/runs/demo", "data.train.0.path=/data/text", "launch.nproc_per_node=4",
        "launch.skypilot.resources={accelerators: {H100: 4, A100-80GB: 4}, image_id: 'docker:registry.example/e:1', "
        "job_recovery: {strategy: FAILOVER, max_restarts_on_errors: 2}}",
        "launch.skypilot.patch={workdir: ., file_mounts: {/data: 's3://bucket/text', "
        "/runs: {source: 's3://bucket/runs', mode: MOUNT_CACHED}}}",
    ),
}  # fmt: skip


@pytest.fixture
def make(tmp_path):
    (tmp_path / "text.txt").write_text("text")

    def build(*overrides):
        recipe, _ = parse_recipe(RECIPE, "recipe.yaml", list(overrides))
        return make_job(recipe, tmp_path, NAME)

    return build


def render(job):
    return yaml.safe_load(SkyPilotLauncher().render(job)["task.yaml"])


@pytest.mark.parametrize("case", CASES)
def test_the_task_equals_the_golden_file(case, make, tmp_path):
    job = make(*CASES[case])
    SkyPilotLauncher().check(job)
    text = SkyPilotLauncher().render(job)["task.yaml"]
    text = text.replace(str(tmp_path), "/work").replace(build_wheel()[0], "WHEEL")
    assert text == (GOLDEN / f"skypilot-{case}.yaml").read_text()


@pytest.mark.parametrize("case", CASES)
def test_skypilot_reads_the_task(case, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml_config(yaml.safe_load((GOLDEN / f"skypilot-{case}.yaml").read_text()))
    assert task.name == NAME and task.num_nodes == (2 if case == "spot" else 1)
    assert all(75 in each.job_recovery["recover_on_exit_codes"] for each in task.resources)
    assert {each.use_spot for each in task.resources} == {case == "spot"}


@pytest.mark.parametrize(
    ("code", "event", "expected"),
    [
        (0, "done", 0),
        (1, "failure", 1),
        (2, "", 2),
        (3, "stopped by SIGTERM at step 4", 75),
        (3, "stopped by budget.max_usd at step 4", 3),
        (124, "stopped by SIGTERM at step 4", 3),
    ],
)
def test_only_a_save_on_a_signal_is_recovered(code, event, expected, make, tmp_path):
    folder = tmp_path / "echelon"
    (folder / "runs/demo").mkdir(parents=True)
    (folder / "runs/demo/events.jsonl").write_text(json.dumps({"event": event}) + "\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "$@"\n[[ $* = *--version ]] && exit 0\nexit {code}\n')
    python.chmod(0o755)
    script = render(make(f"launch.python={python}", "launch.setup=['echo first']"))["run"]
    home = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=home, capture_output=True, text=True, check=False)
    assert done.returncode == expected, done.stderr
    assert done.stdout == "first\n-m echelon train recipe.yaml\n"


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1)])
def test_a_machine_without_echelon_installs_the_wheel_of_the_job(code, expected, make, tmp_path):
    (tmp_path / "echelon").mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "$@"\n[[ $* = *--version ]] && exit 1\n[[ $* = *pip* ]] && exit {code}\n:\n')
    python.chmod(0o755)
    job = make(f"launch.python={python}", "adapter.method=lora")
    home = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", render(job)["run"]], env=home, capture_output=True, text=True, check=False)
    wheel = f"./{build_wheel()[0]}[peft,s3]"
    lines = [f"-m pip install --quiet {wheel}", *(["-m echelon train recipe.yaml"] if code == 0 else [])]
    assert (done.returncode, done.stdout.splitlines()) == (expected, lines), done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("checkpoint.remote=null", "run.dir=runs/demo is deleted with the machines"),
        ("data.train.0.path=/data/text", "data.train.0.path=/data/text is not in"),
        ("data.train.0.path=absent.txt", "data.train.0.path=absent.txt is not in"),
        ("launch.nodes='1:2'", "a task of SkyPilot has a fixed number of machines"),
        ("launch.accelerator=H100", "launch.nproc_per_node is auto, so the number of H100"),
    ],
)
def test_invalid_jobs_are_refused(override, said, make):
    with pytest.raises(ConfigError, match=said):
        SkyPilotLauncher().check(make(override))


def test_a_secret_is_named_and_not_stored(make):
    with pytest.raises(ConfigError, match=r"name it in launch\.skypilot\.secrets"):
        refuse_secrets(make("launch.env={HF_TOKEN: hf_" + "a" * 34 + "}").recipe)
    lines = SkyPilotLauncher().check(make("launch.skypilot.secrets=[HF_TOKEN]"))
    assert any(line.endswith("as secrets: HF_TOKEN") for line in lines)


SKY = """\
#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
answer = json.loads((here / "answer").read_text())
sys.stdout.write(answer.get("out", ""))
sys.stderr.write(answer.get("err", ""))
sys.exit(answer.get("code", 0))
"""


@pytest.fixture
def sky(tmp_path, monkeypatch):
    """A `sky` that prints an answer; called with it, it sets the answer, and it lists the calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sky").write_text(SKY.format(python=sys.executable))
    (folder / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def answer(**given):
        (folder / "answer").write_text(json.dumps(given))
        calls = folder / "calls"
        return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    answer()
    return answer


def listed(status, job_id=4, name=NAME, **more):
    return {"job_id": job_id, "job_name": name, "status": status, "failure_reason": None, "recovery_count": 0, **more}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (listed("STARTING"), ("queued", "SkyPilot job 4 STARTING", None)),
        (listed("RUNNING", recovery_count=2), ("running", "SkyPilot job 4 RUNNING, recovered 2 time(s)", None)),
        (listed("SUCCEEDED"), ("done", "SkyPilot job 4 SUCCEEDED", 0)),
        (listed("CANCELLED"), ("stopped", "SkyPilot job 4 CANCELLED", 3)),
        # As `ManagedJobRecord.failure_reason` of SkyPilot 0.14.1 says it.
        (
            listed("FAILED", failure_reason="Job exited with exit code 2 (user program failure). To see 7"),
            ("failed", "SkyPilot job 4 FAILED: Job exited with exit code 2 (user program failure). To see 7", 2),
        ),
        (
            listed("FAILED", failure_reason="Job exited with exit codes [0, 3] (user program failure)."),
            ("stopped", "SkyPilot job 4 FAILED: Job exited with exit codes [0, 3] (user program failure).", 3),
        ),
        (listed("FAILED_NO_RESOURCE"), ("failed", "SkyPilot job 4 FAILED_NO_RESOURCE", 1)),
    ],
)
def test_a_job_is_submitted_watched_and_cancelled(row, expected, sky, make):
    job, launcher = make("launch.skypilot.secrets=[HF_TOKEN]"), SkyPilotLauncher()
    record = submit_job(job, launcher, launcher.render(job))
    task = str(job.workdir / job.folder / "task.yaml")
    assert sky() == [["jobs", "launch", "--yes", "--detach-run", "--secret", "HF_TOKEN", task]]
    sky(out="Starting a server.\n" + json.dumps([listed("FAILED", 3), row, listed("PENDING", 9, "another")]))
    status = launcher.status(record)
    assert (status.state, status.detail, status.exit_code) == expected
    if status.exit_code is None:
        launcher.cancel(record)
        assert sky()[-1] == ["jobs", "cancel", "--yes", "--name", NAME]
    else:
        with pytest.raises(LaunchError, match="has ended already"):
            launcher.cancel(record)
    sky(out="a\nb\n")
    assert list(launcher.logs(record, False)) == ["a", "b"]
    assert sky()[-1] == ["jobs", "logs", "--name", NAME, "--no-follow", "--tail", "0"]
    sky(err="sky.exceptions.ClusterNotUpError: No in-progress managed jobs.\n", code=1)
    assert launcher.status(record).detail == "no longer known to SkyPilot"


def test_a_refusal_is_one_line(sky, make, monkeypatch):
    sky(err="a traceback\nsky.exceptions.NoCloudAccessError: no cloud is enabled\n", code=1)
    job, launcher = make(), SkyPilotLauncher()
    with pytest.raises(LaunchError, match=r"^SkyPilot refused `sky jobs launch`: .*no cloud is enabled$"):
        submit_job(job, launcher, launcher.render(job))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="`sky` is not installed"):
        launcher.submit(job)


PAGE = Path(__file__).parents[3] / "docs" / "dstack.md"


def test_dstack_reads_the_task_of_its_page():
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    text = PAGE.read_text().partition("test: write demo.dstack.yml -->\n```yaml\n")[2].partition("```")[0]
    task = configurations.parse_run_configuration(yaml.safe_load(text))
    assert (task.type, task.nodes, task.commands) == ("task", 2, ["echelon train recipe.yaml"])
    assert task.resources.gpu.name == ["H100"] and task.resources.gpu.count.min == 8
    assert [each.value for each in task.retry.on_events] == ["no-capacity", "interruption"]
