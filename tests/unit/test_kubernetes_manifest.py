"""The manifests, compared with golden files byte for byte and with the published schemas."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from echelon.errors import ConfigError
from echelon.launch.kubernetes import KubernetesLauncher, manifest
from echelon.launch.kubernetes.checks import read_quantity
from echelon.recipe import load_recipe
from kubernetes_jobs import NAME, make_kubernetes_job
from kubernetes_schemas import list_faults

GOLDEN = Path(__file__).parent / "golden"
PLACES = (
    "launch.kubernetes.node_selector={sagemaker.amazonaws.com/node-health-status: Schedulable}",
    "launch.kubernetes.tolerations=[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]",
    "launch.kubernetes.service_account=trainer",
    "launch.kubernetes.image_pull_secrets=[registry]",
    "launch.kubernetes.queue=research",
)
AMOUNTS = ("launch.kubernetes.cpu='90'", "launch.kubernetes.memory=1000Gi", "launch.kubernetes.efa_per_node=32")
CASES = {
    "pytorchjob": ("launch.nodes=2", "launch.max_hours=1.5", "launch.kubernetes.env_from_secrets=[hub]",
                   *PLACES, *AMOUNTS),
    "pytorchjob-elastic": ("launch.nodes='1:4'", "launch.nproc_per_node=2", "launch.kubernetes.gpus_per_node=0",
                           "launch.setup=[\"export A='it''s'\", 'echo \"$HOME\" $(id -u)']",
                           "launch.env={QUOTE: \"it's $(HOME) $5\", LINES: \"a\\nb\"}",
                           "launch.kubernetes.volumes=[{mount: /data, host_path: /mnt/data}, "
                           "{mount: /keys, secret_name: hub}]"),
    "trainjob": ("launch.nodes=4", "launch.max_hours=2", "launch.kubernetes.kind=trainjob",
                 "launch.kubernetes.workdir='/data/my work'", "fault.notice_seconds=100", *PLACES, *AMOUNTS),
    "hyperpod": ("launch.nodes=2", "launch.max_hours=2", "launch.kubernetes.kind=hyperpod",
                 "fault.max_restarts=5", *PLACES[1:], *AMOUNTS),
    "pytorchjob-one": ("fault.max_restarts=0",),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_manifest_equals_the_golden_file(case, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "render_recipe", lambda recipe: "run: {name: small}\nseed: 'no'\n")
    job = make_kubernetes_job(tmp_path, *CASES[case])
    launcher = KubernetesLauncher()
    launcher.check(job)
    text = launcher.render(job)["manifest.yaml"]
    assert text == (GOLDEN / f"kubernetes-{case}.yaml").read_text()
    config_map, body = yaml.safe_load_all(text)
    assert list_faults(config_map) == list_faults(body) == []
    assert config_map["data"]["recipe.yaml"] == "run: {name: small}\nseed: 'no'\n"


def test_a_field_outside_the_schema_is_detected(tmp_path):
    _, body = yaml.safe_load_all(KubernetesLauncher().render(make_kubernetes_job(tmp_path))["manifest.yaml"])
    body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    body["spec"]["runPolicy"]["backoffLimit"] = "7"
    assert len(list_faults(body)) == 2


def test_the_recipe_is_sent_unchanged(tmp_path):
    job = make_kubernetes_job(tmp_path, 'launch.env={A: "1e3 \'no\' \\"$(X)\\"\\n #"}', "launch.nodes='1:2'")
    config_map, _ = yaml.safe_load_all(KubernetesLauncher().render(job)["manifest.yaml"])
    path = tmp_path / "arrived.yaml"
    path.write_text(config_map["data"]["recipe.yaml"])
    assert load_recipe(path)[0] == job.recipe


def expand(text: str) -> str:
    """Expand `$` in a command as a kubelet does when no variable is defined: `$$` means `$`."""
    out, rest = "", text
    while rest:
        if rest.startswith("$$"):
            out, rest = out + "$", rest[2:]
        else:
            out, rest = out + rest[0], rest[1:]
    return out


def test_values_survive_kubernetes_and_the_shell(tmp_path):
    value = 'it\'s "$(HOME)" $5 $$ \\ \n end'
    setup = f"export V={shlex.quote(value)}"
    job = make_kubernetes_job(tmp_path, "launch.python=/bin/echo")
    launch = job.recipe.launch.model_copy(update={"setup": (setup, 'printf %s "$V"; exit 0'), "env": {"V": value}})
    object.__setattr__(job, "recipe", job.recipe.model_copy(update={"launch": launch}))
    _, body = yaml.safe_load_all(KubernetesLauncher().render(job)["manifest.yaml"])
    container = body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert expand(container["env"][0]["value"]) == value
    shell = subprocess.run([expand(word) for word in container["command"]], capture_output=True, text=True, check=True)
    assert shell.stdout == value


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launch.kubernetes.image=null", "image is not set"),
        ("launch.kubernetes.image='a b'", "image='a b' is not an image name"),
        ("launch.kubernetes.volumes=[]", "volumes is empty"),
        ("run.dir=/scratch/run", "run.dir=/scratch/run is /scratch/run in the pods, which is not on a writable volume"),
        ("launch.kubernetes.workdir=/elsewhere", "run.dir=runs/small is /elsewhere/runs/small in the pods"),
        ("launch.kubernetes.workdir=data", "workdir=data is not absolute"),
        ("run.dir=../../etc/run", "is not on a writable volume"),
        ("launch.kubernetes.volumes=[{mount: /data, claim: d, read_only: true}]", "not on a writable volume"),
        ("data.train.0.path=/home/me/text.txt", "data.train.0.path=/home/me/text.txt is"),
        ("tokenizer=/models/small", "tokenizer=/models/small is /models/small in the pods"),
        ("launch.kubernetes.volumes=[{mount: /dev/shm, claim: d}]", "/dev/shm is already in use"),
        ("launch.kubernetes.volumes=[{mount: /d, claim: d}, {mount: /d/, claim: e}]", "/d is already in use"),
        ("launch.kubernetes.volumes=[{mount: /d, claim: Data}]", "volumes='Data' is not a valid Kubernetes name"),
        ("launch.kubernetes.namespace=a.b", "namespace='a.b' is not a valid Kubernetes name"),
        ("launch.kubernetes.memory=200GB", "memory='200GB' is not a quantity"),
        ("launch.kubernetes.memory=16Gi", "shared_memory=16Gi is part of memory=16Gi"),
        ("launch.kubernetes.gpus_per_node=4", "gpus_per_node=4: each of the launch.nproc_per_node=8"),
        ("launch.nproc_per_node=auto", "gpus_per_node is not set"),
        ("launch.kubernetes.node_selector={a b: c}", "node_selector.a b='c' is not a valid label"),
        ("launch.kubernetes.tolerations=[{keys: a}]", "keys is not a field of a toleration"),
        ("launch.kubernetes.runtime=mine", "only a TrainJob has a runtime"),
    ],
)
def test_invalid_jobs_are_refused(override, said, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(said)):
        KubernetesLauncher().check(make_kubernetes_job(tmp_path, override))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("launch.kubernetes.kind=trainjob", "launch.nodes='1:2'"), "a TrainJob has a fixed number of pods"),
        (("launch.kubernetes.kind=hyperpod", "launch.nodes='1:2'"), "a HyperPodPyTorchJob has a fixed number"),
        (("launch.kubernetes.kind=trainjob", "launch.kubernetes.env_from_secrets=[a]"), "whole Secrets"),
        (
            ("launch.kubernetes.kind=hyperpod", "launch.nproc_per_node=auto", "launch.kubernetes.gpus_per_node=0"),
            "needs the number of processes per pod",
        ),
    ],
)
def test_settings_that_a_kind_does_not_support_are_refused(overrides, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        KubernetesLauncher().check(make_kubernetes_job(tmp_path, *overrides))


def test_names_leave_space_for_the_suffixes_of_operators(tmp_path):
    job = make_kubernetes_job(tmp_path, "launch.nodes=11", "run.name=x")
    for length, fits in ((63 - len("-worker-10"), True), (64 - len("-worker-10"), False)):
        object.__setattr__(job, "name", "a" * length)
        if fits:
            KubernetesLauncher().check(job)
        else:
            with pytest.raises(ConfigError, match="use a name of at most 37 characters"):
                KubernetesLauncher().check(job)


def test_amounts_are_read_as_kubernetes_does():
    assert read_quantity("1Ki") == 1024
    assert read_quantity("1.5Gi") == 1610612736
    assert read_quantity("1k") == 1000
    assert read_quantity("500m") == read_quantity("0.5")
    assert read_quantity("1K") is read_quantity("-1") is read_quantity("") is None


def test_messages_explain_defaults(tmp_path):
    lines = KubernetesLauncher().check(make_kubernetes_job(tmp_path, "launch.kubernetes.kind=trainjob"))
    assert lines[0] == "run folder: /data/runs/small in the pods"
    assert "fault.max_restarts" in lines[1]
    assert NAME not in "".join(lines)
