"""Jobs submitted to a real API server; the command of a pod as process 1 of a namespace."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.config import kube_config

from echelon.ground.errors import LaunchError
from echelon.launch.kubernetes.launcher import KubernetesLauncher
from echelon.launch.kubernetes.manifest import KINDS, RECIPE_PATH, JobKind
from echelon.launch.records import make_job, submit_job
from echelon.run.folder.run_folder import RunFolder
from tests.launchers.kube_cluster import GUEST, missing_programs, real_cluster
from tests.unit.launch.kubernetes.kubernetes_jobs import NAME, make_kubernetes_job
from tests.unit.recipe_samples import load_text
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:Unverified HTTPS request"),  # the server's certificate is self-signed
]

needs_server = pytest.mark.skipif(
    bool(missing_programs()),
    reason=f"not on this machine: {', '.join(missing_programs())}; tests/launchers/kube_apiserver.sh builds the server",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with real_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        for kind in ("pytorchjob", "trainjob"):
            cluster.install(KINDS[kind])
        yield cluster


@pytest.fixture
def as_admin(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.write_kubeconfig()))
    monkeypatch.chdir(tmp_path)


def read_job(cluster: Any, kind: JobKind) -> dict[str, Any]:
    place = (kind.group, kind.version, "default", kind.plural, NAME)
    job: dict[str, Any] = client.CustomObjectsApi(cluster.api).get_namespaced_custom_object(*place)
    return job


@needs_server
@pytest.mark.parametrize("name", ["pytorchjob", "trainjob"])
def test_a_job_is_stored_as_rendered_and_deleted(name, cluster, as_admin, tmp_path):
    kind, target = KINDS[name], KubernetesLauncher()
    job = make_kubernetes_job(tmp_path, f"launch.kubernetes.kind={name}", "launch.nodes=2", "launch.setup=[echo '$A']")
    record = submit_job(job, target, target.render(job))
    config_map, body = yaml.safe_load_all((record.folder / "manifest.yaml").read_text())
    kept = read_job(cluster, kind)
    assert kept["spec"] == body["spec"]
    assert kept["metadata"]["labels"] == body["metadata"]["labels"]
    core = client.CoreV1Api(cluster.api)
    recipe = core.read_namespaced_config_map(f"{NAME}-recipe", "default")
    assert recipe.data == config_map["data"]
    assert [owner.uid for owner in recipe.metadata.owner_references] == [kept["metadata"]["uid"]]
    with pytest.raises(LaunchError, match="the object exists already"):
        target.submit(job)
    assert target.status(record).state == "queued"
    end = {"type": "Complete" if name == "trainjob" else "Succeeded", "status": "True", "reason": "r", "message": ""}
    place = (kind.group, kind.version, "default", kind.plural, NAME)
    custom = client.CustomObjectsApi(cluster.api)
    custom.patch_namespaced_custom_object_status(*place, {"status": {"conditions": [end | {"type": "Running"}]}})
    target.cancel(record)
    assert target.status(record).state == "stopped"
    core.delete_namespaced_config_map(f"{NAME}-recipe", "default")  # no controller runs here that would delete it


@needs_server
def test_the_log_of_a_pod_is_read(cluster, as_admin, tmp_path):
    target, core = KubernetesLauncher(), client.CoreV1Api(cluster.api)
    job = make_kubernetes_job(tmp_path)
    record = submit_job(job, target, target.render(job))
    template = read_job(cluster, KINDS["pytorchjob"])["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    labels = {"training.kubeflow.org/job-name": NAME, "training.kubeflow.org/replica-type": "master"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{NAME}-master-0", "labels": labels}}
    core.create_namespaced_pod("default", pod | {"spec": template["spec"]})
    assert target.status(record).detail == "0 of 1 pods running"
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    core.patch_namespaced_pod_status(f"{NAME}-master-0", "default", {"status": {"conditions": [unschedulable]}})
    assert target.status(record).detail == f"0 of 1 pods running; {NAME}-master-0: Unschedulable: 0/3 nodes"
    core.delete_namespaced_pod(f"{NAME}-master-0", "default", grace_period_seconds=0)
    target.cancel(record)


@needs_server
def test_a_refusal_of_the_server_is_one_message(cluster, as_admin, tmp_path, monkeypatch):
    target = KubernetesLauncher()

    def submit(*overrides: str) -> str:
        job = make_kubernetes_job(tmp_path, *overrides)
        shutil.rmtree(job.folder, ignore_errors=True)
        with pytest.raises(LaunchError) as refused:
            submit_job(job, target, target.render(job))
        return str(refused.value)

    assert "does not have HyperPodPyTorchJob" in submit("launch.kubernetes.kind=hyperpod")
    assert 'namespaces "nowhere" not found' in submit("launch.kubernetes.namespace=nowhere")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.write_kubeconfig(GUEST)))
    assert 'does not allow it: pytorchjobs.kubeflow.org is forbidden: User "guest" cannot create' in submit()
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.write_kubeconfig("wrong")))
    assert "does not accept the kubeconfig's credentials" in submit()


TINY = """\
run: {name: small, dir: runs/small}
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}
tokenizer: bytes
data: {train: text.txt, sequence_len: 32}
train: {steps: 100000, global_batch_size: 4}
optim: {learning_rate: 1e-3}
"""


def can_unshare() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="this machine does not allow namespaces of processes and mounts")
def test_sigterm_to_a_pods_first_process_saves(tmp_path):
    """As under a kubelet, the container's command is process 1, has its variables, and gets one SIGTERM."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    overrides = (
        "launch.nproc_per_node=2", "launch.kubernetes.gpus_per_node=0", "launch.kubernetes.image=local",
        f"launch.python={sys.executable}", f"launch.kubernetes.volumes=[{{mount: {data}, host_path: {data}}}]",
        "launch.setup=['export FROM_SETUP=1']",
    )  # fmt: skip
    recipe, _ = load_text(tmp_path, TINY, "launch.to=kubernetes", *overrides)
    job = make_job(recipe, tmp_path, NAME)
    target = KubernetesLauncher()
    target.check(job)
    config_map, body = yaml.safe_load_all(target.render(job)["manifest.yaml"])
    container = body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "recipe.yaml").write_text(config_map["data"]["recipe.yaml"])
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost {NAME}-master-0\n")
    # A kubelet mounts the ConfigMap and adds the pod's name to /etc/hosts before it starts the container.
    prepare = f'mount --bind {mounted} /mnt && mount --bind {tmp_path / "hosts"} /etc/hosts && exec "$@"'
    command = [word.replace("$$", "$").replace(RECIPE_PATH, "/mnt/recipe.yaml") for word in container["command"]]
    environment = os.environ | {
        "MASTER_ADDR": f"{NAME}-master-0", "MASTER_PORT": "29400", "WORLD_SIZE": "1", "RANK": "0",
        "PET_NNODES": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "bash", "-c", prepare, "-"]
    with (tmp_path / "log").open("wb") as log:
        pod = subprocess.Popen(
            [*namespaces, *command], cwd=container["workingDir"], env=environment, stdout=log, stderr=log
        )
    try:
        folder = RunFolder(data / "runs" / "small")
        wait_until(folder.rows.last_step, 120, pod, say=lambda: (tmp_path / "log").read_text())
        (first,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert pod.wait(60) == 3, (tmp_path / "log").read_text()
    finally:
        pod.kill()
        pod.wait()
    saved = sorted((data / "runs" / "small" / "checkpoints").glob("step-*"))
    assert saved and int(saved[-1].name.removeprefix("step-")) >= 1
