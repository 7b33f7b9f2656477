"""A Ray job's request, order and script, and what is refused before anything is sent."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.job import JobRecord
from echelon.launch.job_checks import refuse_secrets
from echelon.launch.ray.launcher import RayLauncher, find_last_words
from echelon.launch.records import make_job, submit_job
from echelon.launch.source_bundle import build_wheel
from echelon.recipe.load import parse_recipe
from tests.unit.recipe_samples import DEMO

RECIPE = DEMO + "launch: {to: ray, nodes: 2, nproc_per_node: 8}\n"


def make(*overrides, workdir="/shared/work"):
    recipe, _ = parse_recipe(RECIPE, "recipe.yaml", list(overrides))
    return make_job(recipe, Path(workdir), "demo-20300102-030405")


def render(*overrides):
    files = RayLauncher().render(make(*overrides))
    return json.loads(files["request.json"]), json.loads(files["order.json"]), files["agent.sh"]


def test_one_bundle_per_machine_with_its_gpus():
    request, order, _ = render("launch.ray.resources={CPU: 12, my_rack: 0.5}")
    assert order == {
        "fewest": 2, "most": 2, "bundle": {"CPU": 12.0, "GPU": 8.0, "my_rack": 0.5}, "labels": {},
        "wait_seconds": 600.0, "max_restarts": 3,
    }  # fmt: skip
    assert request["submission_id"] == "demo-20300102-030405"
    assert request["runtime_env"]["working_dir"] == "/shared/work/jobs/demo-20300102-030405"


def test_gpus_per_node_zero_requests_none():
    assert render("launch.ray.gpus_per_node=0")[1]["bundle"] == {"CPU": 1.0}


def test_an_elastic_job_has_its_range():
    _, order, _ = render("launch.nodes=1:4")
    assert (order["fewest"], order["most"]) == (1, 4)


def test_the_stop_waits_for_the_save():
    request, _, agent = render("fault.notice_seconds=300")
    assert request["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "360"}
    assert "for _ in {1..300}; do" in agent


def test_the_request_has_the_runtime_environment_and_no_variable_of_the_job():
    """Ray shows the request to everybody who sees its dashboard."""
    request, _, agent = render(
        "launch.env={MY_PLACE: here}", "launch.ray.runtime_env={pip: [numpy], env_vars: {A: b}}", "adapter.method=lora"
    )
    wheel = "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/" + build_wheel()[0] + "[peft]"
    assert request["runtime_env"]["pip"] == ["numpy", wheel]
    options = render("launch.ray.runtime_env={uv: {packages: [], uv_check: true}}")[0]["runtime_env"]["uv"]
    assert options == {"packages": [wheel.removesuffix("[peft]")], "uv_check": True}
    assert request["runtime_env"]["env_vars"]["A"] == "b"
    assert "MY_PLACE" not in json.dumps(request)
    assert 'PATH="$3:$PATH"' in agent and "PATH=" not in render()[2]
    assert "export MY_PLACE=here" in agent


def test_the_script_of_a_machine():
    script = render("launch.max_hours=1", "launch.ray.workdir=/their folder", "launch.ray.interface=eth1")[2]
    assert script.splitlines()[-1] == (
        'exec timeout --foreground --preserve-status --signal=TERM 3600 python3 -m echelon train "$here/recipe.yaml" '
        '--nproc 8 --interface eth1 --nodes "$1" --rendezvous "$2"'
    )
    assert "cd '/their folder' || exit 2" in script
    if (shellcheck := shutil.which("shellcheck")) is not None:
        subprocess.run([shellcheck, "--shell=bash", "-"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("launch.ray.address=10.0.0.1:6379", "launch.ray.address=10.0.0.1:6379 is not the address of Ray Jobs"),
        ("launch.ray.workdir=here", "launch.ray.workdir=here is not an absolute path"),
        ("launch.ray.resources={GPU: 2}", "launch.ray.resources.GPU: set launch.ray.gpus_per_node instead"),
        ("launch.ray.runtime_env={working_dir: .}", "launch.ray.runtime_env.working_dir: echelon sends"),
        ("launch.ray.runtime_env={pips: [a]}", "pips is not a field of a runtime environment; did you mean pip?"),
        ("launch.ray.runtime_env={pip: requirements.txt}", "launch.ray.runtime_env.pip: give a list of packages"),
        ("launch.ray.runtime_env={uv: {uv_check: true}}", "launch.ray.runtime_env.uv: give a list of packages"),
        ("launch.ray.runtime_env={env_vars: [a]}", "launch.ray.runtime_env.env_vars=['a'] is not a mapping"),
    ],
)
def test_wrong_settings_are_refused(override, words):
    with pytest.raises(ConfigError) as caught:
        RayLauncher().check(make(override))
    assert words in str(caught.value)


def test_a_machine_of_which_nothing_is_requested_is_refused():
    with pytest.raises(ConfigError, match="Ray reserves no machine for nothing"):
        RayLauncher().check(make("launch.ray.resources.CPU=0", "launch.ray.gpus_per_node=0"))


def test_a_secret_is_refused_with_the_way_to_pass_it():
    with pytest.raises(ConfigError) as caught:
        refuse_secrets(make("launch.ray.runtime_env={env_vars: {HF_TOKEN: a-secret-word}}").recipe)
    assert "HF_TOKEN looks like a secret" in str(caught.value) and "`ray start`" in str(caught.value)
    assert "a-secret-word" not in str(caught.value)


def test_without_ray_one_message_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    monkeypatch.chdir(tmp_path)
    job, launcher = make(workdir=str(tmp_path)), RayLauncher()
    with pytest.raises(
        ConfigError,
        match=r"requires the package ray, .* pip install 'ray\[default\]>=.*', in the version of the cluster",
    ):
        submit_job(job, launcher, launcher.render(job))


def test_nothing_answers_at_a_wrong_address(tmp_path):
    pytest.importorskip("ray")
    record = JobRecord("demo", "ray", "demo", "runs/demo", 0.0, tmp_path, {"address": "http://127.0.0.1:9"})
    with pytest.raises(LaunchError, match=r"launch.ray.address=http://127.0.0.1:9: nothing answers there"):
        RayLauncher().status(record)


def test_the_last_message_of_echelon_is_the_reason():
    message = (
        "Job failed with exit code 2, last logs:\nnode-2 | echelon: data.train is empty; add text.\nnode-3 | bye\n"
    )
    assert find_last_words(message) == "data.train is empty; add text."
    assert find_last_words("Runtime env setup failed\nno such package\n") == "no such package"
    assert find_last_words("") == ""
