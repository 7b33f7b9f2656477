"""Submit, status, logs and cancel, with the official client over HTTP and a fake cluster."""

import re
from typing import Any

import pytest
import yaml
from kubernetes.config import kube_config

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.job import JobRecord
from echelon.launch.kubernetes import launcher
from echelon.launch.kubernetes.launcher import KubernetesLauncher
from echelon.launch.kubernetes.manifest import KINDS
from echelon.launch.records import submit_job
from tests.unit.launch.kubernetes.kubernetes_jobs import NAME, make_kubernetes_job
from tests.unit.launch.kubernetes.kubernetes_server import stub_cluster, write_kubeconfig

JOB = ("pytorchjobs", "default", NAME)
RECIPE = ("configmaps", "default", f"{NAME}-recipe")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    kubeconfig = tmp_path / "kubeconfig"
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    monkeypatch.setattr(launcher, "_LOOK_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    with stub_cluster(kubeconfig) as cluster:
        yield cluster


def submit(folder, *overrides: str) -> JobRecord:
    job = make_kubernetes_job(folder, *overrides)
    target = KubernetesLauncher()
    return submit_job(job, target, target.render(job))


def pod(role: str, index: int, state: dict[str, Any], restarts: int = 0, last: dict[str, Any] | None = None, **status):
    name = f"{NAME}-{role}-{index}"
    labels = {
        "training.kubeflow.org/job-name": NAME,
        "training.kubeflow.org/replica-type": role,
        "training.kubeflow.org/replica-index": str(index),
    }
    container = {"name": "pytorch", "state": state, "restartCount": restarts, "lastState": last or {}}
    return {
        "metadata": {"name": name, "uid": name, "labels": labels},
        "status": {"containerStatuses": [container] if state else [], **status},
    }


def condition(kind: str, message: str = "", reason: str = "", status: str = "True") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


RUNS: dict[str, Any] = {"running": {"startedAt": "2026-01-02T03:04:05Z"}}


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code}}


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])
def test_the_rendered_job_arrives_and_is_deleted(kind, cluster, tmp_path):
    record = submit(tmp_path, f"launch.kubernetes.kind={kind}")
    assert (record.id, record.place) == (f"default/{NAME}", {"kind": kind, "context": "here"})
    config_map, body = yaml.safe_load_all((record.folder / "manifest.yaml").read_text())
    job = cluster.objects[KINDS[kind].plural, "default", NAME]
    uid = job["metadata"].pop("uid")
    assert job == body
    recipe = cluster.objects[RECIPE]
    (owner,) = recipe["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": body["apiVersion"], "kind": body["kind"], "name": NAME, "uid": uid}
    assert recipe["data"] == config_map["data"]
    job["metadata"]["uid"] = uid
    KubernetesLauncher().cancel(record)
    assert cluster.objects == {}
    deletes = [path for verb, path in cluster.requests if verb == "DELETE"]
    assert len(deletes) == 1 and "propagationPolicy=Background" in deletes[0]
    assert KubernetesLauncher().status(record).state == "stopped"
    with pytest.raises(LaunchError, match="has ended already"):
        KubernetesLauncher().cancel(record)


@pytest.mark.parametrize(
    ("kind", "patch", "said"),
    [
        (
            "trainjob",
            "patch={spec: {podSpecOverrides: []}}",
            r"podSpecOverrides.*; with a Kubeflow Trainer before 2\.3 use",
        ),
        ("jobset", "pod_patch={spec: {affinity: {nodeAfinity: {}}}}", r"refused the request \(4\d\d\): .*nodeAfinity"),
    ],
)
def test_an_unknown_field_is_refused_by_the_cluster(kind, patch, said, cluster, tmp_path):
    with pytest.raises(LaunchError, match=said):
        submit(tmp_path, f"launch.kubernetes.kind={kind}", f"launch.kubernetes.{patch}")


def test_a_job_without_its_recipe_is_removed(cluster, tmp_path):
    cluster.forbidden.add("configmaps")
    with pytest.raises(LaunchError, match="does not allow it: configmaps is forbidden"):
        submit(tmp_path)
    assert cluster.objects == {}


@pytest.mark.parametrize(
    ("conditions", "pods", "expected"),
    [
        ([], [], ("queued", "no pods yet", None)),
        (
            [condition("Created")],
            [pod("master", 0, RUNS), pod("worker", 0, RUNS)],
            ("running", "2 of 2 pods running", None),
        ),
        (
            [condition("Running")],
            [
                pod("master", 0, RUNS),
                pod("worker", 0, {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off\n pulling"}}),
            ],
            ("running", f"1 of 2 pods running; {NAME}-worker-0: ImagePullBackOff: Back-off pulling", None),
        ),
        (
            [],
            [
                pod("worker", 0, {"waiting": {"reason": "ContainerCreating"}}),
                pod("worker", 1, {}, conditions=[condition("PodScheduled", "0/3 nodes", "Unschedulable", "False")]),
            ],
            ("queued", f"0 of 2 pods running; {NAME}-worker-1: Unschedulable: 0/3 nodes", None),
        ),
        (
            [],
            [pod("master", 0, {"waiting": {"reason": "CrashLoopBackOff"}}, 2, ended(2))],
            ("queued", f"0 of 1 pods running; {NAME}-master-0: CrashLoopBackOff after exit code 2", None),
        ),
        ([condition("Suspended", "no quota")], [], ("queued", "suspended: no quota", None)),
        ([condition("Running", status="False"), condition("Succeeded")], [], ("done", "", 0)),
        ([condition("Complete")], [], ("done", "", 0)),
        (
            [condition("Failed", "1 replica failed", "PyTorchJobFailed")],
            [pod("master", 0, ended(2)), pod("worker", 0, ended(2))],
            ("failed", "PyTorchJobFailed: 1 replica failed", 2),
        ),
        ([condition("Failed", "too often", "x")], [], ("failed", "x: too often", 1)),
        ([condition("Failed", "", "x")], [pod("master", 0, ended(3))], ("stopped", "x", 3)),
        ([condition("Failed", "", "DeadlineExceeded")], [], ("stopped", "DeadlineExceeded", 3)),
        (
            [condition("Failed", "it was active longer than specified deadline", "PyTorchJobFailed")],
            [],
            ("stopped", "PyTorchJobFailed: it was active longer than specified deadline", 3),
        ),
    ],
)
def test_states(conditions, pods, expected, cluster, tmp_path):
    record = submit(tmp_path)
    cluster.objects[JOB]["status"] = {"conditions": conditions}
    cluster.pods = pods
    status = KubernetesLauncher().status(record)
    assert (status.state, status.detail, status.exit_code) == expected


def test_a_deleted_job_still_saves(cluster, tmp_path):
    record = submit(tmp_path)
    cluster.objects.clear()
    cluster.pods = [pod("master", 0, RUNS)]
    assert KubernetesLauncher().status(record).state == "running"


def test_logs_begin_with_rank_0(cluster, tmp_path):
    record = submit(tmp_path)
    cluster.objects[JOB]["status"] = {"conditions": [condition("Running")]}
    cluster.pods = [pod("worker", 0, {}), pod("worker", 10, RUNS), pod("worker", 9, RUNS), pod("master", 0, RUNS)]
    cluster.logs = {f"{NAME}-{each}": f"{each} é\nlast" for each in ("master-0", "worker-9", "worker-10")}
    lines = list(KubernetesLauncher().logs(record, False))
    names = ["master-0", "worker-9", "worker-10"]
    assert lines == [line for name in names for line in (f"--- {NAME}-{name}", f"{name} é", "last")]
    assert all("container=pytorch" in path for _, path in cluster.requests if "/log" in path)
    cluster.pods = [pod("worker", 0, {})]
    with pytest.raises(LaunchError, match="has printed nothing yet: 0 of 1 pods running"):
        list(KubernetesLauncher().logs(record, False))


def test_lines_arrive_as_they_were_printed(cluster, tmp_path):
    record = submit(tmp_path)
    cluster.pods = [pod("master", 0, RUNS)]
    cluster.logs = {f"{NAME}-master-0": b"\nsteps 1\rsteps 2\n\n\xff cut\nlast \xc3\xa9"}
    lines = ["", "steps 1\rsteps 2", "", "\ufffd cut", "last é"]
    assert list(KubernetesLauncher().logs(record, False)) == lines


def test_following_shows_every_start_once(cluster, tmp_path):
    record = submit(tmp_path)
    cluster.pods = [pod("master", 0, {})]
    shown = []
    lines = KubernetesLauncher().logs(record, True)
    cluster.pods = [pod("master", 0, RUNS)]
    cluster.logs = {f"{NAME}-master-0": "first start\n"}
    shown.append(next(lines))
    cluster.logs = {f"{NAME}-master-0": "second start\n"}
    cluster.pods = [pod("master", 0, RUNS, restarts=1)]
    shown.append(next(lines))
    cluster.objects[JOB]["status"] = {"conditions": [condition("Succeeded")]}
    cluster.pods = [pod("master", 0, ended(0), restarts=1)]
    assert [*shown, *lines] == ["first start", "second start"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("launch.kubernetes.namespace=nowhere",), '(404): namespaces "nowhere" not found'),
        (
            ("launch.kubernetes.kind=hyperpod",),
            "does not have HyperPodPyTorchJob (sagemaker.amazonaws.com/v1); install the SageMaker HyperPod training",
        ),
    ],
)
def test_missing_operators_and_objects(overrides, said, cluster, tmp_path):
    with pytest.raises(LaunchError, match=re.escape(said)):
        submit(tmp_path, *overrides)


def test_errors_of_the_api_are_one_message(cluster, tmp_path, monkeypatch):
    record = submit(tmp_path)
    target, job = KubernetesLauncher(), make_kubernetes_job(tmp_path)
    with pytest.raises(LaunchError, match=f'the object exists already: pytorchjobs "{NAME}" already exists; launch'):
        target.submit(job)
    cluster.forbidden.add("pytorchjobs")
    with pytest.raises(LaunchError, match='pytorchjobs is forbidden: User "ann" cannot GET in default; ask its admin'):
        target.status(record)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="not found in the kubeconfig"):
        target.status(record)
    write_kubeconfig(tmp_path / "other", cluster.address, token="wrong")
    with pytest.raises(LaunchError, match="does not accept the kubeconfig's credentials; log in again"):
        target.status(record)
    write_kubeconfig(tmp_path / "other", "http://127.0.0.1:9")
    with pytest.raises(LaunchError, match="the cluster of context here does not answer"):
        target.status(record)
