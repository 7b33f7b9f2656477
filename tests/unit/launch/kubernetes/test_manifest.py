"""The manifests, compared with golden files byte for byte and with the published schemas."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from echelon.ground.errors import ConfigError
from echelon.launch.job_checks import refuse_secrets
from echelon.launch.kubernetes import manifest
from echelon.launch.kubernetes.launcher import KubernetesLauncher
from echelon.launch.kubernetes.manifest import build_env, build_resources, find_kind
from echelon.launch.patch import merge_patch
from echelon.recipe.load import load_recipe
from tests.unit.launch.kubernetes.kubernetes_jobs import NAME, make_kubernetes_job
from tests.unit.launch.kubernetes.kubernetes_schemas import list_faults

GOLDEN = Path(__file__).parents[1] / "golden"
POD = "launch.kubernetes.pod_patch.spec"
PLACES = (
    f"{POD}.nodeSelector={{sagemaker.amazonaws.com/node-health-status: Schedulable}}",
    f"{POD}.tolerations=[{{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}}]",
    f"{POD}.serviceAccountName=trainer",
    f"{POD}.imagePullSecrets=[{{name: registry}}]",
    "launch.kubernetes.queue=research",
)
AMOUNTS = ("launch.kubernetes.resources={cpu: '90', memory: 1000Gi, vpc.amazonaws.com/efa: 32}",)
LABELS = (
    "launch.kubernetes.patch.metadata.labels={team: vision, example.com/cost: 'a_1'}",
    "launch.kubernetes.pod_patch.metadata.labels={team: vision, example.com/cost: 'a_1'}",
)
NOTES = (
    "launch.kubernetes.patch.metadata.annotations={example.com/note: 'any text, {x}'}",
    "launch.kubernetes.pod_patch.metadata.annotations={example.com/note: 'any text, {x}'}",
)
AFFINITY = (
    "{nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "
    "[{matchExpressions: [{key: gpu, operator: In, values: [h100]}]}]}}, podAntiAffinity: "
    "{preferredDuringSchedulingIgnoredDuringExecution: [{weight: 5, podAffinityTerm: {topologyKey: rack, "
    "labelSelector: {matchLabels: {team: vision}}}}]}}"
)
SECURITY = (
    *LABELS,
    *NOTES,
    f"{POD}.securityContext={{runAsUser: 1000, fsGroup: 1000, seccompProfile: {{type: RuntimeDefault}}}}",
    f"{POD}.affinity={AFFINITY}",
    "launch.kubernetes.resources={rdma/hca: 8, example.com/disk: 10Gi}",
    "launch.kubernetes.volumes=[{mount: /data, claim: team-data, sub_path: me}, {mount: /fast, "
    "source: {emptyDir: {}}}, {mount: /nfs, source: {nfs: {server: files, path: /export}}, read_only: true}]",
)
PODS = (
    f"{POD}.priorityClassName=high",
    f"{POD}.schedulerName=volcano",
    f"{POD}.hostNetwork=true",
    f"{POD}.dnsPolicy=ClusterFirstWithHostNet",
)
OF_JOBS = ("launch.kubernetes.patch.spec.runPolicy.ttlSecondsAfterFinished=3600",)
LOCK = "securityContext: {capabilities: {add: [IPC_LOCK]}}"
# Keys of earlier versions, and what replaces each.
EARLIER = {
    "efa_per_node=32": ("launch.kubernetes.resources={vpc.amazonaws.com/efa: 32}",),
    "tolerations=[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]": PLACES[1:2],
    "service_account=trainer": PLACES[2:3],
    "image_pull_secrets=[registry]": PLACES[3:4],
    "cpu='90'": ("launch.kubernetes.resources.cpu='90'",),
    "memory=1000Gi": ("launch.kubernetes.resources.memory=1000Gi",),
    "labels={team: vision, example.com/cost: 'a_1'}": LABELS,
    "annotations={example.com/note: 'any text, {x}'}": NOTES,
    f"affinity={AFFINITY}": (f"{POD}.affinity={AFFINITY}",),
    "priority_class=high": PODS[:1],
    "scheduler=volcano": PODS[1:2],
    "host_network=true": PODS[2:],
    "node_selector={sagemaker.amazonaws.com/node-health-status: Schedulable}": PLACES[:1],
    "security_context={runAsNonRoot: true, fsGroup: 1000}": (
        f"{POD}.securityContext={{runAsNonRoot: true, fsGroup: 1000}}",
    ),
    "container_security_context={runAsNonRoot: true, capabilities: {add: [IPC_LOCK]}}": (
        f"{POD}.containers=[{{name: NAME, imagePullPolicy: Always, "
        "securityContext: {runAsNonRoot: true, capabilities: {add: [IPC_LOCK]}}}]",
    ),
    "image_pull_policy=Always": (),
    "ttl_seconds=60": ("launch.kubernetes.patch.spec.TTL=60",),
    "runtime=mine": ("launch.kubernetes.patch.spec.runtimeRef.name=mine",),
}
SIDECAR = (
    "launch.kubernetes.pod_patch={spec: {runtimeClassName: nvidia, terminationGracePeriodSeconds: null, containers: "
    "[{name: CONTAINER, env: [{name: NCCL_DEBUG, value: INFO}], volumeMounts: [{mountPath: /dev/shm, $patch: delete}]},"
    " {name: exporter, image: registry.example/exporter:1}], "
    "volumes: [{name: shared-memory, emptyDir: {sizeLimit: 64Gi}}]}}"
)
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
    "jobset": ("launch.nodes=4", "launch.max_hours=2", "launch.kubernetes.kind=jobset", "fault.max_restarts=5",
               "launch.kubernetes.patch.spec.ttlSecondsAfterFinished=3600",
               "launch.kubernetes.env_from_secrets=[hub]", *PLACES[1:], *AMOUNTS),
    "hyperpod-elastic": (
        "launch.nodes='2:4'", "launch.kubernetes.kind=hyperpod",
        "launch.kubernetes.patch={spec: {runPolicy: {logMonitoringConfiguration: [{name: steps, logPattern: "
        "'step \\d+/', expectedRecurringFrequencyInSeconds: 600, expectedStartCutOffInSeconds: 1800}]}}}",
    ),
    "pytorchjob-one": ("fault.max_restarts=0",),
    "pytorchjob-options": (
        "launch.nodes=2", "launch.kubernetes.patch={spec: {runPolicy: {suspend: true, cleanPodPolicy: null}}}",
        SIDECAR.replace("CONTAINER", f"pytorch, imagePullPolicy: Always, {LOCK}"), *SECURITY, *PODS, *OF_JOBS,
    ),
    "trainjob-options": (
        "launch.kubernetes.kind=trainjob",
        "launch.kubernetes.pod_patch={spec: {volumes: [{name: recipe, $patch: delete}]"
        f", containers: [{{name: node, {LOCK}}}]}}}}",
        "launch.kubernetes.patch={spec: {managedBy: kueue.x-k8s.io/multikueue, runtimeRef: {name: mine}}}", *SECURITY,
    ),
    "hyperpod-options": (
        "launch.kubernetes.kind=hyperpod",
        SIDECAR.replace("CONTAINER", f"pytorch-job-container, imagePullPolicy: Always, {LOCK}"),
        "launch.kubernetes.patch={spec: {replicaSpecs: [{name: pod, spares: 1}]}}", *SECURITY, *PODS, *OF_JOBS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("selector", "given"),
    [
        ("{node.kubernetes.io/instance-type: p5.48xlarge}", {"FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}),
        ("{node.kubernetes.io/instance-type: ml.g6e.48xlarge}", {}),
        ("{}", {}),
    ],
)
def test_pods_with_efa_have_its_variables(tmp_path, selector, given):
    efa = "launch.kubernetes.resources={vpc.amazonaws.com/efa: NUMBER}"
    settings = ("launch.nodes=2", efa.replace("NUMBER", "32"), f"{POD}.nodeSelector={selector}")
    job = make_kubernetes_job(tmp_path, *settings)
    names = {"FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "RDMAV_FORK_SAFE"}
    found = {each["name"]: each["value"] for each in build_env(job) if each["name"] in names}
    assert found == {"FI_PROVIDER": "efa", **given}
    assert any(line.startswith("EFA: the image must have libfabric") for line in KubernetesLauncher().check(job))
    own = build_env(make_kubernetes_job(tmp_path, *settings, "launch.env={FI_PROVIDER: tcp}"))
    assert [each["value"] for each in own if each["name"] == "FI_PROVIDER"] == ["tcp"]
    without = build_env(make_kubernetes_job(tmp_path, efa.replace("NUMBER", "0")))
    assert not names & {each["name"] for each in without}


def test_pods_on_a_known_machine_are_of_guaranteed_quality(tmp_path):
    """By default each has nearly its share of the cores and the memory: of a p5.48xlarge, 192 cores and 2 TiB."""
    on_p5 = f"{POD}.nodeSelector={{node.kubernetes.io/instance-type: p5.48xlarge}}"

    def request(*overrides):
        return build_resources(make_kubernetes_job(tmp_path, *overrides))

    whole = request(on_p5)
    assert whole["requests"] == whole["limits"] == {"cpu": "172", "memory": "1843Gi", "nvidia.com/gpu": "8"}
    part = request(on_p5, "launch.nproc_per_node=2", "launch.kubernetes.resources={memory: 300Gi}")["limits"]
    assert part == {"cpu": "43", "memory": "300Gi", "nvidia.com/gpu": "2"}
    assert request() == {"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8"}}
    lines = KubernetesLauncher().check(make_kubernetes_job(tmp_path))
    assert any("so the pods are not of Guaranteed quality" in line for line in lines)


@pytest.mark.parametrize("case", CASES)
def test_the_manifest_equals_the_golden_file(case, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "render_recipe", lambda recipe: "run: {name: small}\nseed: 'no'\n")
    job = make_kubernetes_job(tmp_path, *CASES[case])
    launcher = KubernetesLauncher()
    launcher.check(job)
    text = launcher.render(job)["manifest.yaml"]
    assert text == (GOLDEN / f"kubernetes-{case}.yaml").read_text()
    config_map, body = yaml.safe_load_all(text)
    assert list_faults(config_map) == []
    assert list_faults(body) == []
    assert config_map["data"]["recipe.yaml"] == "run: {name: small}\nseed: 'no'\n"


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset", "hyperpod"])
def test_keys_of_earlier_versions_give_the_same_manifest(kind, tmp_path):
    earlier = [f"launch.kubernetes.{word}" for word in EARLIER]
    name = find_kind(make_kubernetes_job(tmp_path, f"launch.kubernetes.kind={kind}")).container
    ttl = "runPolicy.ttlSecondsAfterFinished" if kind in ("pytorchjob", "hyperpod") else "ttlSecondsAfterFinished"
    now = [word.replace("NAME", name).replace("TTL", ttl) for words in EARLIER.values() for word in words]
    jobs = [make_kubernetes_job(tmp_path, f"launch.kubernetes.kind={kind}", *words) for words in (earlier, now)]
    assert jobs[0].recipe == jobs[1].recipe
    before, after = (yaml.safe_load_all(KubernetesLauncher().render(job)["manifest.yaml"]) for job in jobs)
    assert list(before)[1:] == list(after)[1:], "but for the recipe, whose patches have another order"


def test_the_network_of_the_machines_is_taken_back_in_the_earlier_spelling(tmp_path):
    switch = "launch.kubernetes.host_network={}"
    rendered = [
        KubernetesLauncher().render(make_kubernetes_job(tmp_path, *words))["manifest.yaml"].partition("\n---")[2]
        for words in ((), (switch.format("true"), switch.format("false")))
    ]
    assert rendered[0] == rendered[1]


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
    assert expand({each["name"]: each["value"] for each in container["env"]}["V"]) == value
    shell = subprocess.run([expand(word) for word in container["command"]], capture_output=True, text=True, check=True)
    assert shell.stdout == value


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launch.kubernetes.image=null", "image is not set"),
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
        ("launch.kubernetes.gpus_per_node=4", "gpus_per_node=4: each of the launch.nproc_per_node=8"),
        ("launch.nproc_per_node=auto", "gpus_per_node is not set"),
        ("launch.kubernetes.image=team/pytorch:2.13-cpu", "is an image for CPUs by its name, but each pod has 8 GPUs"),
        ("launch.kubernetes.volumes=[{mount: /data, source: {emptyDir: {}}}]", "not on a writable volume"),
        ("launch.kubernetes.resources={nvidia.com/gpu: 1}", "set launch.kubernetes.gpus_per_node instead"),
        ("launch.kubernetes.resources={nvidia.com/mig-3g.40gb: 1}", "already requests 8 nvidia.com/gpu per pod"),
        ("launch.kubernetes.pod_patch={runtimeClassName: x}", "pod_patch.runtimeClassName=x must be a mapping of keys"),
        (
            "launch.kubernetes.patch={metadata: {name: x}}",
            "patch.metadata.name=x: echelon could not find the job again",
        ),
    ],
)
def test_invalid_jobs_are_refused(override, said, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(said)):
        KubernetesLauncher().check(make_kubernetes_job(tmp_path, override))


def test_a_mig_device_is_requested_alone(tmp_path):
    job = make_kubernetes_job(
        tmp_path, "launch.nproc_per_node=1", "launch.kubernetes.gpus_per_node=0",
        "launch.kubernetes.resources={nvidia.com/mig-3g.40gb: 1}",
    )  # fmt: skip
    KubernetesLauncher().check(job)
    _, body = yaml.safe_load_all(KubernetesLauncher().render(job)["manifest.yaml"])
    container = body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"nvidia.com/mig-3g.40gb": "1"}


@pytest.mark.parametrize(
    ("value", "patch", "merged"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": None, "d": {"e": None, "f": 3}}}, {"a": {"b": 1, "d": {"f": 3}}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, {"tolerations": [{"key": "b"}]}),
        ({"env": [{"name": "A", "value": "1"}, {"name": "B"}]}, {"env": [{"name": "C"}, {"name": "A", "value": "2"}]},
         {"env": [{"name": "A", "value": "2"}, {"name": "B"}, {"name": "C"}]}),
        ({"volumes": [{"name": "a"}, {"name": "b"}]}, {"volumes": [{"name": "a", "$patch": "delete"}]},
         {"volumes": [{"name": "b"}]}),
    ],
)  # fmt: skip
def test_patches_are_merged_as_by_kubectl(value, patch, merged):
    before = repr(value)
    assert merge_patch(value, patch, "launch.kubernetes.patch") == merged
    assert repr(value) == before


QUORUM = "fault.on_lost_process=continue"


def test_the_pods_of_a_quorum_are_agents_that_are_restarted_one_by_one(tmp_path):
    job = make_kubernetes_job(tmp_path, "launch.kubernetes.kind=pytorchjob", "launch.nodes=2", QUORUM)
    KubernetesLauncher().check(job)
    _, body = yaml.safe_load_all(KubernetesLauncher().render(job)["manifest.yaml"])
    for name in ("Master", "Worker"):
        replica = body["spec"]["pytorchReplicaSpecs"][name]
        [container] = replica["template"]["spec"]["containers"]
        assert replica["restartPolicy"] == "OnFailure" and "--nodes 2 --rendezvous" in " ".join(container["command"])


def test_an_entry_of_a_patch_needs_its_name(tmp_path):
    job = make_kubernetes_job(tmp_path, "launch.kubernetes.pod_patch={spec: {containers: [{image: x}]}}")
    with pytest.raises(ConfigError, match=r"pod_patch\.spec\.containers: the entry .* has no name"):
        KubernetesLauncher().render(job)


def test_a_secret_in_a_patch_is_refused(tmp_path):
    patch = (
        "launch.kubernetes.pod_patch={spec: {containers: [{name: pytorch, env: [{name: MY_TOKEN, value: a-word}]}]}}"
    )
    with pytest.raises(
        ConfigError, match=r"pod_patch\.spec\.containers\.0\.env\.0\.value looks like a secret"
    ) as refused:
        refuse_secrets(make_kubernetes_job(tmp_path, patch).recipe)
    assert "a-word" not in str(refused.value)
    reference = patch.replace("value: a-word", "valueFrom: {secretKeyRef: {name: hub, key: token}}")
    refuse_secrets(make_kubernetes_job(tmp_path, reference).recipe)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("launch.kubernetes.kind=trainjob", "launch.nodes='1:2'"), "a TrainJob has a fixed number of pods"),
        (("launch.kubernetes.kind=jobset", "launch.nodes='1:2'"), "a JobSet has a fixed number"),
        (("launch.kubernetes.kind=jobset", "launch.nodes=2", QUORUM), "or kubernetes as a PyTorchJob"),
        (("launch.kubernetes.kind=pytorchjob", "launch.nodes=1", QUORUM), "a PyTorchJob of several machines"),
        (("launch.kubernetes.kind=trainjob", "launch.kubernetes.env_from_secrets=[a]"), "a TrainJob has no field for"),
        (
            ("launch.kubernetes.kind=hyperpod", "launch.nproc_per_node=auto", "launch.kubernetes.gpus_per_node=0"),
            "needs the number of processes per pod",
        ),
    ],
)
def test_settings_that_a_kind_does_not_support_are_refused(overrides, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        KubernetesLauncher().check(make_kubernetes_job(tmp_path, *overrides))


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("volcano", r"jobset with launch\.kubernetes\.pod_patch=\{spec: \{schedulerName: volcano\}\}\."),
        ("mpijob", "use pytorchjob or jobset"),
        ("rayjob", r"use launch\.to=ray with launch\.ray\.address"),
        ("trainjob-2.1", r"use trainjob with Kubeflow Trainer 2\.3 or later, or jobset"),
    ],
)
def test_a_kind_that_is_gone_is_refused_with_what_replaces_it(kind, instead, tmp_path):
    with pytest.raises(ConfigError, match=rf"launch\.kubernetes\.kind={kind} is gone; .*{instead}"):
        make_kubernetes_job(tmp_path, f"launch.kubernetes.kind={kind}")


def test_names_leave_space_for_the_suffixes_of_operators(tmp_path):
    job = make_kubernetes_job(tmp_path, "launch.nodes=11", "run.name=x")
    for length, fits in ((63 - len("-worker-10"), True), (64 - len("-worker-10"), False)):
        object.__setattr__(job, "name", "a" * length)
        if fits:
            KubernetesLauncher().check(job)
        else:
            with pytest.raises(ConfigError, match="use a name of at most 37 characters"):
                KubernetesLauncher().check(job)


def test_messages_explain_defaults(tmp_path):
    lines = KubernetesLauncher().check(make_kubernetes_job(tmp_path, "launch.kubernetes.kind=trainjob"))
    assert lines[0] == "run folder: /data/runs/small in the pods"
    assert "fault.max_restarts" in lines[1]
    assert NAME not in "".join(lines)


def read_pod(tmp_path, *overrides):
    job = make_kubernetes_job(tmp_path, *overrides)
    _, body = yaml.safe_load_all(KubernetesLauncher().render(job)["manifest.yaml"])
    assert list_faults(body) == []
    spec = body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    return spec, spec["containers"][0]


def test_a_pod_that_is_not_root_passes_the_restricted_profile(tmp_path):
    """The controls of https://kubernetes.io/docs/concepts/security/pod-security-standards that a pod must set."""
    spec, container = read_pod(tmp_path, f"{POD}.securityContext={{runAsNonRoot: true, fsGroup: 1000}}")
    security = {**spec["securityContext"], **container["securityContext"]}
    assert security["runAsNonRoot"] is True and security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]} and security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_keys_of_the_recipe_win_over_the_restricted_ones(tmp_path):
    spec, container = read_pod(
        tmp_path,
        f"{POD}.securityContext={{runAsNonRoot: true, seccompProfile: {{type: Unconfined}}, fsGroup: 5, "
        "fsGroupChangePolicy: Always}",
        f"{POD}.containers=[{{name: pytorch, securityContext: {{capabilities: {{add: [IPC_LOCK]}}, "
        "allowPrivilegeEscalation: true}}]",
    )
    assert "seccompProfile" not in container["securityContext"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is True
    assert spec["securityContext"]["fsGroupChangePolicy"] == "Always"
    _, as_root = read_pod(tmp_path)
    assert "securityContext" not in as_root, "a container of root may need what the profile takes"


def test_only_a_named_account_gives_its_token_to_the_pods(tmp_path):
    assert read_pod(tmp_path)[0]["automountServiceAccountToken"] is False
    assert "automountServiceAccountToken" not in read_pod(tmp_path, f"{POD}.serviceAccountName=trainer")[0]
