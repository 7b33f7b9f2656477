"""The request to SageMaker, compared byte for byte and with the API's model; and what is refused before."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import botocore.session
import pytest
import yaml

from echelon.ground.errors import ConfigError, DataError
from echelon.launch.job import find_launcher
from echelon.launch.job_checks import check_job, describe_packages, settle_instance
from echelon.launch.sagemaker import enter
from echelon.launch.sagemaker.install import OPTIONAL
from echelon.launch.sagemaker.launcher import SageMakerLauncher
from echelon.launch.sagemaker.request import (
    METRICS,
    OLDEST_PYTHON,
    OLDEST_TORCH,
    build_submission,
    check_image,
    find_image,
)
from echelon.launch.sagemaker.request_patch import MEMBERS, OWNED
from echelon.launch.sagemaker.staging import ENTRY, START, list_requirements
from echelon.launch.source_bundle import CORE, HELPFUL
from echelon.planner.hardware.instances import INSTANCES
from echelon.run.journal.journal import render_evaluation, render_step
from tests.unit.launch.sagemaker.sagemaker_jobs import RECIPE, make_job
from tests.unit.recipe_samples import load_text

GOLDEN = Path(__file__).parents[1] / "golden" / "sagemaker"
ECR = "111122223333.dkr.ecr.us-west-2.amazonaws.com"
MLFLOW = "arn:aws:sagemaker:us-west-2:111122223333:mlflow-tracking-server/ours"

CASES = {
    "one-machine": (),
    "two-on-spot": (
        "launch.nodes=2",
        "launch.max_hours=10",
        "launch.env={NCCL_DEBUG: INFO, NOTE: 'it''s $HOME \"quoted\"'}",
        "launch.setup=[\"echo 'it is' $HOME\", 'pip list']",
        "launch.sagemaker.instance_type=ml.p5en.48xlarge",
        "launch.sagemaker.spot={max_wait_hours: 24}",
        "launch.sagemaker.subnets=[subnet-0abc, subnet-0def]",
        "launch.sagemaker.security_group_ids=[sg-0abc]",
        "launch.sagemaker.patch={EnableInterContainerTrafficEncryption: true, "
        "RetryStrategy: {MaximumRetryAttempts: 2}}",
        "launch.sagemaker.kms_key=arn:aws:kms:us-west-2:111122223333:key/0a1b",
        "launch.sagemaker.tags={team: 'a b', cost-center: '42'}",
        "data.train=[{path: s3://corpora/web/}, {path: 'data/text/*.txt', weight: 2}]",
        "data.validation=[{path: s3://corpora/held-out.jsonl, name: held}]",
        "data.validation_fraction=null",
        "train.epochs=null",
        "track=[tensorboard]",
    ),
    "warm-and-tracked": (
        "launch.nproc_per_node=2",
        "launch.sagemaker.keep_alive_seconds=1800",
        "launch.sagemaker.patch={RemoteDebugConfig: {EnableRemoteDebug: true}}",
        "launch.sagemaker.input_mode=FastFile",
        "launch.sagemaker.image=111122223333.dkr.ecr.us-west-2.amazonaws.com/ours:1",
        "launch.sagemaker.checkpoint_uri=s3://other/runs/small",
        "launch.sagemaker.channels={books: s3://corpora/books}",
        f"launch.sagemaker.mlflow_arn={MLFLOW}",
        "data.train=/opt/ml/input/data/books/en",
        "track=[mlflow]",
        "mlflow.experiment=tries",
    ),
    "instance-groups": (
        "launch.sagemaker.instance_type=null",
        "launch.sagemaker.instance_groups=[{name: ours, instance_type: ml.g6.12xlarge, nodes: 2}, "
        "{name: new, instance_type: ml.g5.12xlarge}]",
    ),
    "file-systems": (
        "launch.sagemaker.subnets=[subnet-0abc]",
        "launch.sagemaker.security_group_ids=[sg-0abc]",
        "launch.sagemaker.file_systems=[{channel: text, type: FSxLustre, id: fs-0123456789abcdef0, path: /fsx/text}, "
        "{channel: home, type: EFS, id: fs-0a1b2c3d, path: /, writable: true}]",
        "launch.sagemaker.patch={ProfilerConfig: {ProfilingIntervalInMilliseconds: 500, "
        "ProfilingParameters: {a: '1'}}}",
        "data.train=/opt/ml/input/data/text/en",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_request_equals_the_golden_file(tmp_path, name):
    job = make_job(tmp_path, *CASES[name])
    texts = SageMakerLauncher().render(job)
    texts = {file: text.replace(str(tmp_path), "HERE") for file, text in texts.items()}
    recipe = yaml.safe_load(texts.pop("container-recipe.yaml"))
    kept = {key: recipe[key] for key in ("run", "data", "mlflow")}
    texts["container-recipe.yaml"] = yaml.safe_dump(kept, sort_keys=False)
    for file, text in texts.items():
        assert text == (GOLDEN / name / file).read_text(encoding="utf-8"), file


@pytest.mark.parametrize("name", CASES)
def test_the_request_is_valid_for_the_api(tmp_path, name):
    request = build_submission(make_job(tmp_path, *CASES[name])).request
    shape = api().operation_model("CreateTrainingJob").input_shape
    assert faults(request, shape) == []
    assert faults({**request, "RoleArn": "me"}, shape)  # the comparison can fail


VPC = ("launch.sagemaker.subnets=[subnet-0abc]", "launch.sagemaker.security_group_ids=[sg-0abc]")
FILES = "launch.sagemaker.file_systems=[{{channel: {}, path: /}}]"
PRIVATE = "launch.sagemaker.image=registry.corp.example:5000/team/echelon:0.1"
PULL = (
    "{TrainingRepositoryAccessMode: Vpc, TrainingRepositoryAuthConfig: {TrainingRepositoryCredentialsProviderArn: "
    "'arn:aws:lambda:us-west-2:111122223333:function:pull'}}"
)


def patched(folder: Path, patch: str, *overrides: str) -> dict:
    """The request of a job with `launch.sagemaker.patch`, as `--dry-run` shows it; checked with the API's model."""
    job = make_job(folder, *overrides, f"launch.sagemaker.patch={patch}")
    request = json.loads(SageMakerLauncher().render(job)["request.json"])
    assert faults(request, api().operation_model("CreateTrainingJob").input_shape) == []
    return request


def test_a_patch_is_merged_into_the_request(tmp_path):
    plain = build_submission(make_job(tmp_path)).request
    request = patched(
        tmp_path,
        "{InfraCheckConfig: {EnableInfraCheck: true}, ExperimentConfig: {ExperimentName: tries}, "
        "DebugHookConfig: {S3OutputPath: s3://my-bucket/debug}, StoppingCondition: {MaxPendingTimeInSeconds: 7200}, "
        "ProfilerRuleConfigurations: [{RuleConfigurationName: report, RuleEvaluatorImage: example/rules}], "
        "AlgorithmSpecification: {EnableSageMakerMetricsTimeSeries: null, "
        "MetricDefinitions: [{Name: mine, Regex: 'mine=([0-9]+)'}]}, "
        "InputDataConfig: [{ChannelName: train, ShuffleConfig: {Seed: 5}}]}",
    )
    assert request["InfraCheckConfig"] == {"EnableInfraCheck": True}
    assert request["StoppingCondition"] == {**plain["StoppingCondition"], "MaxPendingTimeInSeconds": 7200}
    algorithm = request["AlgorithmSpecification"]
    assert "EnableSageMakerMetricsTimeSeries" not in algorithm
    assert algorithm["MetricDefinitions"] == [
        *plain["AlgorithmSpecification"]["MetricDefinitions"],
        {"Name": "mine", "Regex": "mine=([0-9]+)"},
    ]
    train = next(each for each in request["InputDataConfig"] if each["ChannelName"] == "train")
    [before] = [each for each in plain["InputDataConfig"] if each["ChannelName"] == "train"]
    assert train == {**before, "ShuffleConfig": {"Seed": 5}}
    assert len(request["InputDataConfig"]) == len(plain["InputDataConfig"])
    untouched = set(plain) - {"AlgorithmSpecification", "StoppingCondition", "InputDataConfig"}
    assert all(request[name] == plain[name] for name in untouched)


def test_an_image_of_a_private_registry_is_pulled_through_the_vpc(tmp_path):
    pull = f"{{AlgorithmSpecification: {{TrainingImageConfig: {PULL}}}}}"
    request = patched(tmp_path, pull, PRIVATE, *VPC)
    assert request["AlgorithmSpecification"]["TrainingImageConfig"]["TrainingRepositoryAccessMode"] == "Vpc"
    assert request["AlgorithmSpecification"]["TrainingImage"] == "registry.corp.example:5000/team/echelon:0.1"
    check_job(make_job(tmp_path, "data.train=python-stdlib", PRIVATE, *VPC, f"launch.sagemaker.patch={pull}"))
    with pytest.raises(
        ConfigError, match=r"launch\.sagemaker\.patch=\{AlgorithmSpecification: \{TrainingImageConfig: "
    ):
        build_submission(make_job(tmp_path, PRIVATE, *VPC))
    with pytest.raises(ConfigError, match=r"is not in Amazon ECR.*; set launch\.sagemaker\.subnets and "):
        patched(tmp_path, pull, PRIVATE)
    for own in (
        find_image("us-west-2", True),
        find_image("cn-north-1", True),
        "111122223333.dkr.ecr-fips.us-gov-west-1.amazonaws.com/a/b@sha256:" + "0" * 64,
        "111122223333.dkr-ecr.us-west-2.on.aws/ours:1",
    ):
        build_submission(make_job(tmp_path, f"launch.sagemaker.image={own}"))


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("{InfraCheckConfigs: {}}", "patch.InfraCheckConfigs is not a member of .*; did you mean InfraCheck"),
        ("{Nothing: 1}", "patch.Nothing is not a member of a CreateTrainingJob request; the members are Train"),
        ("{TrainingJobName: mine}", "patch.TrainingJobName: echelon sets it from run.name; set that key instead."),
        ("{ResourceConfig: {InstanceCount: 4}}", "ResourceConfig.InstanceCount: echelon sets it from launch.nodes;"),
        ("{Environment: {A: b}}", "patch.Environment: echelon sets it from launch.env;"),
        ("{VpcConfig: null}", "patch.VpcConfig: echelon sets it from launch.sagemaker.subnets and"),
        ("{ResourceConfig: null}", "patch.ResourceConfig: null would also remove ResourceConfig.InstanceType, which"),
        ("{AlgorithmSpecification: {ContainerEntrypoint: [a]}}", "ContainerEntrypoint: echelon starts its own entry"),
        ("{InputDataConfig: [{ChannelName: echelon}]}", "the channel echelon holds the files of echelon"),
        ("{InputDataConfig: [{ChannelName: train, $patch: delete}]}", "the recipe reads the channel train"),
        ("{InputDataConfig: {train: 1}}", "patch.InputDataConfig: give a list of channels"),
        ("{InputDataConfig: [{ShuffleConfig: {Seed: 1}}]}", "has no ChannelName, which tells it from others"),
        ("{InfraCheckConfig: {Enable: true}}", "the request is not valid: .*Unknown parameter in InfraCheckConfig"),
        ("{InfraCheckConfig: 5}", "the request is not valid: .*Invalid type for parameter InfraCheckConfig"),
    ],
)  # fmt: skip
def test_an_invalid_patch_is_refused(tmp_path, patch, said):
    with pytest.raises(ConfigError, match="launch.sagemaker." + said if said.startswith("patch") else said):
        build_submission(make_job(tmp_path, f"launch.sagemaker.patch={patch}"))


def test_a_patch_must_not_contain_a_secret(tmp_path):
    job = make_job(tmp_path, "launch.sagemaker.patch={HyperParameters: {api_key: sesame-open-now}}")
    with pytest.raises(ConfigError, match=r"^launch\.sagemaker\.patch\.HyperParameters\.api_key looks like a secret"):
        check_job(job)


def test_the_members_of_a_patch_are_those_of_the_api():
    shape = api().operation_model("CreateTrainingJob").input_shape
    assert set(MEMBERS) == set(shape.members)
    for place in OWNED:
        first, _, inner = place.partition(".")
        assert not inner or inner in shape.members[first].members, place


def test_a_disabled_profiler_writes_nothing(tmp_path):
    job = make_job(tmp_path, "launch.sagemaker.patch={ProfilerConfig: {DisableProfiler: true}}")
    assert build_submission(job).request["ProfilerConfig"] == {"DisableProfiler": True}


def test_a_type_with_a_volume_has_a_size_and_a_key(tmp_path):
    key = "arn:aws:kms:us-west-2:111122223333:key/0a1b"
    settings = (f"launch.sagemaker.kms_key={key}", "launch.sagemaker.instance_type=ml.m5.large")
    request = build_submission(make_job(tmp_path, *settings, "launch.sagemaker.volume_gb=500")).request
    assert request["ResourceConfig"]["VolumeSizeInGB"] == 500
    assert request["ResourceConfig"]["VolumeKmsKeyId"] == request["OutputDataConfig"]["KmsKeyId"] == key


def api():
    return botocore.session.get_session().get_service_model("sagemaker")


def faults(value, shape, place="") -> list[str]:
    """Violations of the published model of the API: names, types, lengths, patterns, ranges."""
    found = []
    if shape.type_name == "structure":
        found += [f"{place}.{name} is unknown" for name in value if name not in shape.members]
        found += [f"{place}.{name} is missing" for name in shape.required_members if name not in value]
        for name in value.keys() & shape.members.keys():
            found += faults(value[name], shape.members[name], f"{place}.{name}")
        return found
    limits = shape.metadata
    size = value if shape.type_name in ("integer", "long") else 0 if isinstance(value, bool) else len(value)
    if not limits.get("min", size) <= size <= limits.get("max", size):
        found.append(f"{place}={value}: {size} is not {limits}")
    if shape.type_name == "list":
        found += [fault for each in value for fault in faults(each, shape.member, f"{place}[]")]
    if shape.type_name == "map":
        for name, each in value.items():
            found += faults(name, shape.key, place) + faults(each, shape.value, f"{place}.{name}")
    if shape.type_name == "string":
        pattern = limits.get("pattern", ".*").replace(r"\p{L}\p{Z}\p{N}", r"\w\s").replace(r"\p{Alnum}", "a-zA-Z0-9")
        if not re.fullmatch(pattern, value) or value not in limits.get("enum", [value]):
            found.append(f"{place}={value} is not {limits}")
    return found


def test_every_type_of_the_catalogue_is_in_the_api():
    resources = api().operation_model("CreateTrainingJob").input_shape.members["ResourceConfig"]
    assert set(INSTANCES) <= set(resources.members["InstanceType"].enum)


def test_metric_patterns_match_the_lines_of_training():
    row = {
        "step": 7, "loss": 10.25, "grad_norm": 0.125, "learning_rate": 3e-4, "tokens_per_second": 1234567.8,
        "mfu": 0.4212, "memory_peak_bytes": 3 * 2**30, "data_wait_seconds": 0.01, "step_seconds": 1.0, "skipped": False,
        "cost_usd": 1.25,
    }  # fmt: skip
    evaluated = {
        "step": 100, "sets": {},
        "loss": 2.5, "perplexity": 12.18, "bits_per_byte": None, "reward_accuracy": None, "reward_margin": None,
    }  # fmt: skip
    line, (evaluation,) = render_step(row, 1000, 3.0, 5.0), render_evaluation(evaluated)
    assert read_metrics(line) == {
        "train:step": 7, "train:loss": 10.25, "train:grad_norm": 0.125, "train:learning_rate": 3e-4,
        "train:tokens_per_second": 1234568, "train:mfu_percent": 42.1, "train:memory_gib": 3,
        "train:data_wait_percent": 1.0, "train:cost_usd": 1.25,
    }  # fmt: skip
    bound = render_step({**row, "cost_at_most": True}, 1000, 3.0, 5.0)
    assert "cost at most $1.25" in bound and read_metrics(bound) == read_metrics(line)
    assert read_metrics(evaluation) == {"eval:loss": 2.5, "eval:perplexity": 12.18}
    # An unknown value is a dash and gives no data point; other lines give none.
    unknown = render_step({**row, "loss": -0.5, "grad_norm": float("nan"), "mfu": None, "cost_usd": None}, 9, None)
    absent = {"train:grad_norm", "train:mfu_percent", "train:cost_usd"}
    assert read_metrics(unknown).keys() == read_metrics(line).keys() - absent
    assert read_metrics(unknown)["train:loss"] == -0.5
    assert read_metrics("  sample: a step to a loss 3.5 and lr 2") == {}


def read_metrics(line: str) -> dict[str, float]:
    found = {name: re.search(regex, line) for name, regex in METRICS}
    assert all(len(match.groups()) == 1 for match in found.values() if match)
    return {name: float(match[1]) for name, match in found.items() if match}


def test_requirements_follow_the_recipe(tmp_path):
    text = RECIPE.replace("config: {model_type: llama, hidden_size: 64}", "checkpoint: some/model")
    job = make_job(tmp_path, "adapter.method=qlora", "track=[wandb]", "checkpoint.remote=s3://b/run", text=text)
    staging = build_submission(job).staging
    lines = next(each for each in staging.uploads if each.address.endswith("requirements.txt")).source().decode()
    assert {"peft>=0.20", "bitsandbytes>=0.49", "wandb>=0.31,<1", "s3fs>=2024.6"} <= set(lines.splitlines())
    assert "torch" not in [re.split(r"[^\w-]", line)[0] for line in lines.splitlines()]
    plain = list_requirements(make_job(tmp_path, "data.train=python-stdlib").recipe)
    assert plain.splitlines() == [*CORE, OPTIONAL, *HELPFUL]
    on_cpus = make_job(tmp_path, "data.train=python-stdlib", "launch.sagemaker.instance_type=ml.m5.4xlarge").recipe
    assert list_requirements(on_cpus).splitlines() == [*CORE, OPTIONAL], "they have no GPU to read"


def test_the_container_installs_what_an_engine_or_a_precision_needs(tmp_path):
    def ask(*overrides: str) -> tuple[list[str], list[str]]:
        job = make_job(tmp_path, *overrides)
        return list_requirements(job.recipe).splitlines(), describe_packages(job.recipe)

    fp8 = ("train.precision=fp8", "launch.sagemaker.instance_type=ml.p5.48xlarge")
    assert "torchao>=0.16" in ask(*fp8)[0]
    assert ask(*fp8)[1] == [
        "packages: the container installs what its image lacks of echelon's extras float8 (train.precision=fp8)"
    ]
    rewards = ("objective.name=grpo", "rollout.max_new_tokens=8", "reward=math")
    assert "math-verify>=0.9" in ask(*rewards)[0]
    assert ask(*rewards)[1] == [
        "packages: the container installs what its image lacks of echelon's extras math (reward=math)"
    ]
    tensorflow = ("engine=tensorflow", "parallel=ddp", "launch.sagemaker.instance_type=ml.m5.4xlarge")
    assert {"tensorflow-cpu>=2.21,<2.22", "keras-hub>=0.32,<0.33"} <= set(ask(*tensorflow)[0])
    build_submission(make_job(tmp_path, *tensorflow))
    # Liger's kernels are for GPUs, and for layers that are not compiled.
    assert "liger-kernel>=0.8" in ask("train.compile=false")[0]
    assert "liger-kernel>=0.8" not in ask()[0]
    assert "liger-kernel>=0.8" not in ask("train.compile=false", "launch.sagemaker.instance_type=ml.m5.4xlarge")[0]


def test_an_engine_that_the_machines_cannot_run_is_refused(tmp_path):
    horovod = ("engine=horovod", "parallel=ddp", "launch.sagemaker.distribution={mpi: {enabled: true}}")
    with pytest.raises(ConfigError) as refused:
        build_submission(make_job(tmp_path, *horovod))
    assert str(refused.value) == (
        "engine=horovod: AWS's image does not have the package horovod, and pip cannot install it when the job starts; "
        "set launch.sagemaker.image to an image that has it (docs/engines.md), or use engine=native with parallel: "
        "ddp, and sync.compress.method=fp16."
    )
    own = make_job(tmp_path, *horovod, "launch.sagemaker.image=111122223333.dkr.ecr.us-west-2.amazonaws.com/ours:1")
    build_submission(own)
    [line] = describe_packages(own.recipe)
    assert "ours:1 must contain horovod, which cannot be checked here" in line
    alone = make_job(tmp_path, *horovod, "launch.sagemaker.image=ours:1", "launch.sagemaker.network_isolation=true")
    assert describe_packages(alone.recipe) == [
        "packages: the image ours:1 must have echelon with its extras horovod (engine=horovod); this cannot be "
        "checked here"
    ]
    with pytest.raises(ConfigError, match=r"^engine=tensorflow computes on CPUs, but .*=ml\.g5\.12xlarge has GPUs"):
        build_submission(make_job(tmp_path, "engine=tensorflow", "parallel=ddp"))


@pytest.mark.parametrize(
    ("instance", "kind", "said"),
    [
        ("ml.g5.12xlarge", "cpu", "an image for CPUs by its name, but ml.g5.12xlarge has"),
        ("ml.m5.xlarge", "cu133", "an image for GPUs by its name, but ml.m5.xlarge has no"),
    ],
)
def test_an_image_for_other_machines_is_refused(tmp_path, instance, kind, said):
    image = f"{ECR}/pytorch:2.13-{kind}-amzn2023-sagemaker"
    keys = (f"launch.sagemaker.instance_type={instance}", f"launch.sagemaker.image={image}")
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_submission(make_job(tmp_path, *keys))
    build_submission(make_job(tmp_path, *keys, "train.allow_cpu=true"))


def test_user_text_is_never_interpreted(tmp_path):
    job = make_job(tmp_path, 'launch.setup=["printf \'%s\' \\"$X\\""]', "launch.python=/opt/my env/bin/python")
    submission = build_submission(job)
    assert submission.request["AlgorithmSpecification"]["ContainerEntrypoint"] == ["bash", START]
    script = next(each for each in submission.staging.uploads if each.address.endswith("start.sh")).source().decode()
    here = tmp_path / "my env" / "python"
    here.parent.mkdir()
    here.write_text('#!/bin/sh\necho " $# $1"\n')
    here.chmod(0o755)
    ran = subprocess.run(
        ["bash", "-c", script.replace("/opt/my env/bin/python", str(here))],
        env={"X": "a  'b' $c"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == f"a  'b' $c 1 {ENTRY}\n"


def test_a_template_in_the_recipe_is_sent_with_it(tmp_path):
    """This includes a template that is longer than any path."""
    text = "{% for message in messages %}" + "{{ message['content'] }}" * 300 + "{% endfor %}"
    staging = build_submission(make_job(tmp_path, f"data.chat_template={json.dumps(text)}")).staging
    assert staging.recipe.data.chat_template == text


def test_paths_of_the_container(tmp_path):
    """Folders, globs, Megatron pairs, models and templates get their paths in the container."""
    for name in ("ids.bin", "ids.idx", "chat.jinja", "base/config.json", "base/model.safetensors", "base/.cache/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    text = RECIPE.replace("config: {model_type: llama, hidden_size: 64}", "checkpoint: ./base").replace("bytes", "base")
    job = make_job(
        tmp_path,
        "data.train=[ids, data/text/a.txt, s3://corpora/deep/*/x.jsonl]",
        "data.chat_template=chat.jinja",
        text=text,
    )
    staging = build_submission(job).staging
    root = "s3://my-bucket/echelon/jobs/small-1"
    assert [source.path for source in staging.recipe.data.train] == [
        "/opt/ml/input/data/train-0/ids",
        "/opt/ml/input/data/train-1/a.txt",
        "/opt/ml/input/data/train-2/*/x.jsonl",
    ]
    assert [source.label for source in staging.recipe.data.train] == ["ids", "a.txt", "x.jsonl"]
    assert staging.recipe.model.checkpoint == "/opt/ml/input/data/model/base"
    assert staging.recipe.tokenizer == "/opt/ml/input/data/tokenizer/base"
    assert staging.recipe.data.chat_template == "/opt/ml/input/data/echelon/chat_template.jinja"
    data = {(each.shown, each.address.removeprefix(root)) for each in staging.uploads if isinstance(each.source, Path)}
    assert data == {
        ("ids.idx", "/train-0/ids.idx"),
        ("ids.bin", "/train-0/ids.bin"),
        ("data/text/a.txt", "/train-1/a.txt"),
        ("base/config.json", "/model/base/config.json"),
        ("base/model.safetensors", "/model/base/model.safetensors"),
        ("base/config.json", "/tokenizer/base/config.json"),
        ("base/model.safetensors", "/tokenizer/base/model.safetensors"),
        ("chat.jinja", "/echelon/chat_template.jinja"),
    }
    addresses = {channel.name: channel.source for channel in staging.channels}
    assert addresses["train-2"] == "s3://corpora/deep/"


@pytest.mark.parametrize(
    ("address", "channel", "path"),
    [
        ("s3://corpora/books", "s3://corpora/books/", ""),
        ("s3://corpora/web-v1.2", "s3://corpora/web-v1.2/", ""),
        ("s3://my.corpora", "s3://my.corpora/", ""),
        ("s3://corpora/x.jsonl", "s3://corpora/x.jsonl", "/x.jsonl"),
        ("s3://corpora/x.jsonl/", "s3://corpora/x.jsonl/", ""),
        ("s3://corpora/ids/en.idx", "s3://corpora/ids/", "/en.idx"),
    ],
)
def test_a_channel_contains_only_what_its_address_names(tmp_path, address, channel, path):
    job = make_job(tmp_path, f"data.train={address}", f"launch.sagemaker.channels={{more: {address}}}")
    staging = build_submission(job).staging
    assert {each.source for each in staging.channels if each.name != "echelon"} == {channel}
    assert staging.recipe.data.train[0].path == f"/opt/ml/input/data/train{path}"


def test_an_invalid_address_is_refused_by_key_without_its_secret(tmp_path):
    for key in ("bucket", "checkpoint_uri"):
        with pytest.raises(
            ConfigError, match=rf"command line: launch\.sagemaker\.{key}=s3://\*\*\*@b/x is not"
        ) as refused:
            make_job(tmp_path, f"launch.sagemaker.{key}=s3://me:word@b/x")
        assert "word" not in str(refused.value)


def test_replaced_local_folders_are_reported(tmp_path):
    lines = build_submission(make_job(tmp_path, "run.dir=/data/run", "data.prepared_dir=/data/prepared")).lines
    assert "run.dir=/data/run is for this machine; in the container it is /opt/ml/checkpoints/small" in lines
    assert any(line.startswith("data.prepared_dir=/data/prepared is for this machine") for line in lines)


def test_hub_ids_and_the_standard_library_are_unchanged(tmp_path):
    text = RECIPE.replace("config: {model_type: llama, hidden_size: 64}", "checkpoint: some/model")
    recipe = build_submission(make_job(tmp_path, "data.train=python-stdlib", text=text)).staging.recipe
    assert (recipe.model.checkpoint, recipe.data.train[0].path) == ("some/model", "python-stdlib")


def test_images():
    assert find_image("eu-west-1", True) == (
        "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker"
    )
    assert find_image("cn-north-1", False) == (
        "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:2.13-cpu-amzn2023-sagemaker"
    )
    for image in (
        find_image("us-east-1", True),
        find_image("us-east-1", False),
        "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.11.0-gpu-py312-cu130-ubuntu22.04-sagemaker",
        "111122223333.dkr.ecr.us-east-1.amazonaws.com/ours:2.5.1-py38",
    ):
        check_image(image)


@pytest.mark.parametrize(
    ("name", "lack"),
    [
        ("pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker", "PyTorch 2.8, but echelon needs 2.11"),
        ("smdistributed-modelparallel:2.5.1-gpu-py311-cu124", "PyTorch 2.5, but echelon needs 2.11"),
        ("huggingface-pytorch-training:2.5.1-transformers4.49.0-gpu-py311", "PyTorch 2.5, but echelon needs 2.11"),
        ("pytorch-training:2.11.0-gpu-py310-cu130", "Python 3.10, but echelon needs 3.11"),
    ],
)
def test_an_image_that_is_too_old_is_refused(tmp_path, name, lack):
    image = f"763104351884.dkr.ecr.us-east-1.amazonaws.com/{name}"
    with pytest.raises(ConfigError, match=f"launch.sagemaker.image=.* has {lack} or later; use a newer image"):
        build_submission(make_job(tmp_path, f"launch.sagemaker.image={image}"))


def test_the_oldest_versions_equal_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={'.'.join(map(str, OLDEST_PYTHON))}"
    assert enter.OLDEST_PYTHON == OLDEST_PYTHON
    assert any(each.startswith(f"torch>={'.'.join(map(str, OLDEST_TORCH))},") for each in project["dependencies"])


REFUSED = {
    "launch.sagemaker.role": ["launch.sagemaker.role=null"],
    "launch.sagemaker.role=arn:aws:iam::1:role/x ": ["launch.sagemaker.role=arn:aws:iam::1:role/x"],
    "launch.sagemaker.region=Oregon ": ["launch.sagemaker.region=Oregon"],
    "launch.sagemaker.bucket is not set": ["launch.sagemaker.bucket=null"],
    "launch.sagemaker.instance_type is not set": ["launch.sagemaker.instance_type=null"],
    "launch.sagemaker.instance_type=ml.g5.13xlarge ": ["launch.sagemaker.instance_type=ml.g5.13xlarge"],
    "machines: {ml.g5.13xlarge: {gpus: 8": ["launch.sagemaker.instance_type=ml.g5.13xlarge"],
    "nearest GPU instance is ml.": ["launch.sagemaker.instance_type=ml.trn1.32xlarge"],
    "CUDA 12": ["launch.sagemaker.instance_type=ml.p3.16xlarge"],
    "use launch.nodes=4": ["launch.nodes='2:4'"],
    "launch.nproc_per_node=8 ": ["launch.nproc_per_node=8"],
    "launch.accelerator=H100 ": ["launch.accelerator=H100"],
    "or launch.sagemaker.spot.": [
        "launch.sagemaker.spot={max_wait_hours: 4}", "launch.sagemaker.keep_alive_seconds=60"],
    "training_plan_arn (reserved capacity)": [
        "launch.sagemaker.spot={max_wait_hours: 4}",
        "launch.sagemaker.training_plan_arn=arn:aws:sagemaker:us-west-2:111122223333:training-plan/p"],
    "launch.sagemaker.training_plan_arn=p ": ["launch.sagemaker.training_plan_arn=p"],
    "launch.sagemaker.mlflow_arn=here ": ["launch.sagemaker.mlflow_arn=here", "track=[mlflow]"],
    "track: prometheus needs a connection": ["track=[prometheus]"],
    "add mlflow to track": [f"launch.sagemaker.mlflow_arn={MLFLOW}"],
    "mlflow.tracking_uri and": [
        f"launch.sagemaker.mlflow_arn={MLFLOW}", "track=[mlflow]", "mlflow.tracking_uri=http://x"],
    "12xlarge has local disks": ["launch.sagemaker.volume_gb=500"],
    "launch.max_hours=2;": ["launch.sagemaker.spot={max_wait_hours: 1}"],
    "launch.max_hours=24, the default": ["launch.max_hours=null", "launch.sagemaker.spot={max_wait_hours: 10}"],
    "28 days": ["launch.max_hours=700"],
    "fault.notice_seconds=300": ["fault.notice_seconds=300"],
    "a file system is reached in its VPC": [FILES.format("t, type: EFS, id: fs-0a1b2c3d")],
    "file_systems.0.id=fs-x is not the id": [*VPC, FILES.format("t, type: EFS, id: fs-x")],
    "needs its mount name": [*VPC, FILES.format("t, type: FSxLustre, id: fs-0a1b2c3d")],
    "file_systems.0: use 1 to 64 letters": [*VPC, FILES.format("a b, type: EFS, id: fs-0a1b2c3d")],
    "file_systems.0: the job already has a channel echelon": [
        *VPC, FILES.format("echelon, type: EFS, id: fs-0a1b2c3d")],
    "launch.sagemaker.security_group_ids is missing": ["launch.sagemaker.subnets=[subnet-1]"],
    "launch.sagemaker.subnets is missing": ["launch.sagemaker.security_group_ids=[sg-1]"],
    "'subnet 1' is not an": ["launch.sagemaker.subnets=['subnet 1']", "launch.sagemaker.security_group_ids=[sg-1]"],
    "has 6 entries": ["launch.sagemaker.subnets=[s-1]", "launch.sagemaker.security_group_ids=[a, b, c, d, e, f]"],
    "set launch.sagemaker.wheels=download, or launch": ["launch.sagemaker.network_isolation=true"],
    "track: wandb needs the network": [
        "launch.sagemaker.network_isolation=true", "launch.sagemaker.image=i", "track=[wandb]"],
    "data.train.0.path=some/set is on the hub": [
        "launch.sagemaker.network_isolation=true", "launch.sagemaker.image=i",
        "data.train=[{path: some/set, format: hub}]"],
    "checkpoint.remote=file:///mnt/x": ["checkpoint.remote=file:///mnt/x"],
    "launch.env.LONG has 513 characters": ["launch.env={LONG: " + "x" * 513 + "}"],
    "launch.env has 101 variables": ["launch.env={" + ", ".join(f"V{n}: '1'" for n in range(101)) + "}"],
    "launch.sagemaker.tags has 51 entries": [
        "launch.sagemaker.tags={" + ", ".join(f"t{n}: '1'" for n in range(51)) + "}"],
    "launch.sagemaker.tags.a*b": ["launch.sagemaker.tags={a*b: c}"],
    "launch.python has 300 characters": ["launch.python=" + "p" * 300],
    "launch.sagemaker.image='a b'": ["launch.sagemaker.image=a b"],
    "launch.sagemaker.image has 256": ["launch.sagemaker.image=" + "i" * 256],
    "launch.sagemaker.channels.a b": ["launch.sagemaker.channels={a b: s3://bucket/x}"],
    "launch.sagemaker.channels.books=bucket/x is no": ["launch.sagemaker.channels={books: bucket/x}"],
    "data.train.0.path=s3:// is no": ["data.train=s3://"],
    "already has a channel train": ["launch.sagemaker.channels={train: s3://bucket/x}"],
    "already has a channel echelon": ["launch.sagemaker.channels={echelon: s3://bucket/x}"],
    "the job has 21 channels": ["data.train=[" + ", ".join(f"s3://corpora/{n}" for n in range(20)) + "]"],
    "data.train.0.path=absent": ["data.train=absent"],
    "the recipe has none": ["data.train=/opt/ml/input/data/books"],
    "tokenizer=./absent": ["tokenizer=./absent"],
    "mlflow.experiment has 300": [
        f"launch.sagemaker.mlflow_arn={MLFLOW}", "track=[mlflow]", "mlflow.experiment=" + "e" * 300],
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_invalid_requests_are_refused_before_submission(tmp_path, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        SageMakerLauncher().check(make_job(tmp_path, *REFUSED[words]))


def test_a_run_is_not_uploaded_as_a_model(tmp_path):
    (tmp_path / "runs" / "old" / "checkpoints").mkdir(parents=True)
    text = RECIPE.replace("config: {model_type: llama, hidden_size: 64}", "checkpoint: runs/old")
    with pytest.raises(ConfigError, match="runs/old is a run"):
        SageMakerLauncher().check(make_job(tmp_path, text=text))


def test_the_default_region_is_that_of_the_account(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    submission = build_submission(make_job(tmp_path, "launch.sagemaker.region=null"))
    assert ".ecr.eu-central-1." in submission.request["AlgorithmSpecification"]["TrainingImage"]


def test_rendering_needs_no_aws_package(tmp_path):
    program = (
        "import sys, echelon.launch.sagemaker; print({'boto3', 'botocore', 'sagemaker', 'torch'} & {*sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
    assert isinstance(find_launcher("sagemaker"), SageMakerLauncher)


def test_the_recipe_of_the_container_differs_only_in_paths(tmp_path):
    job = make_job(tmp_path)
    (tmp_path / "there").mkdir()
    there, _ = load_text(tmp_path / "there", SageMakerLauncher().render(job)["container-recipe.yaml"])
    paths = {"run": there.run, "data": there.data}
    assert there == job.recipe.model_copy(update=paths)
    assert json.loads(SageMakerLauncher().render(job)["request.json"]) == build_submission(job).request


def test_paths_of_the_container_are_not_checked_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = RECIPE.replace("config: {model_type: llama, hidden_size: 64}", "checkpoint: s3://models/llama")
    checked = check_job(make_job(tmp_path, text=text))
    assert "left to train: the model, and whether the plan fits the memory of the machines" in checked.lines[-2]
    assert "(model.checkpoint=s3://models/llama is not on this machine)" in checked.lines[-2]
    assert '"S3Uri": "s3://models/llama/"' in checked.texts["request.json"]
    auto = make_job(tmp_path, "launch.sagemaker.instance_type=auto", text=text).recipe
    with pytest.raises(ConfigError, match=r"instance_type=auto: model\.checkpoint=s3://models/llama is not on this"):
        settle_instance(auto)


def test_a_template_that_is_neither_a_name_nor_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.chat_template=absent\.jinja is neither a named template"):
        check_job(make_job(tmp_path, "data.chat_template=absent.jinja"))


def test_local_text_is_checked_before_it_is_uploaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data\.validation.*must not be trained on"):
        check_job(make_job(tmp_path, "data.validation=data/text/a.txt", "data.validation_fraction=null"))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "x.png").write_bytes(b"x")
    with pytest.raises(DataError, match="contains no text file"):
        check_job(make_job(tmp_path, "data.train=[pictures, s3://corpora/web]"))
