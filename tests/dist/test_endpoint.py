"""`echelon launch RUN --to sagemaker-endpoint`: a trained run, served by requests to a server with AWS's protocols."""

import json
import shutil
import sys

import boto3
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from echelon.ground.errors import LaunchError
from echelon.launch.sagemaker.service import Service
from tests.dist.command import CommandLine, write_recipe
from tests.object_server import ObjectServer
from tests.unit.launch.sagemaker.test_request import api, faults

pytestmark = pytest.mark.dist

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
AWS = {
    "role": "arn:aws:iam::111122223333:role/serve",
    "region": "us-west-2",
    "bucket": "s3://served-bucket/echelon",
    "endpoint": {"instance_type": "ml.g6.12xlarge", "env": {"SM_VLLM_MAX_MODEL_LEN": "64"}},
    "tags": {"team": "ours"},
}
OPERATIONS = {
    "create_model": "CreateModel",
    "create_endpoint_config": "CreateEndpointConfig",
    "create_endpoint": "CreateEndpoint",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the run `runs/tiny`, trained on conversations with a template of its own."""
    folder = tmp_path_factory.mktemp("trained")
    with (folder / "text.jsonl").open("w") as file:
        for number in range(80):
            turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{2 * number}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    data = {"train": "text.jsonl", "chat_template": TEMPLATE, "sequence_len": 64, "validation_fraction": 0.05}
    write_recipe(
        folder, data=data, tokenizer={"train": {"vocab_size": 300}}, train={"steps": 1}, launch={"sagemaker": AWS}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["echelon", "train", "recipe.json", "--nproc", "1"])
        from echelon.cli.main import main

        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    return folder


@pytest.fixture
def echelon(capfd, monkeypatch, trained):
    """The command in the folder of the run, without the jobs of other tests."""
    monkeypatch.chdir(trained)
    shutil.rmtree(trained / "jobs", ignore_errors=True)
    return CommandLine(capfd, monkeypatch)


@pytest.fixture
def aws(monkeypatch):
    server = ObjectServer()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield
    server.stop()


def dry_run(echelon, *overrides):
    """The requests, by operation, and what else was said."""
    ending = echelon("launch", "runs/tiny", "--to", "sagemaker-endpoint", "--dry-run", "--json", *overrides)
    files = json.loads(ending.out)["files"] if ending.out.startswith('{"files"') else {}
    return {name.removesuffix(".json"): json.loads(text) for name, text in files.items()}, ending


def test_the_requests_are_valid_and_as_worked_out_by_hand(echelon):
    requests, ending = dry_run(echelon)
    assert ending.code == 0 and "chat template: the one that the run was trained with" in ending.err
    for operation, request in requests.items():
        assert faults(request, api().operation_model(OPERATIONS[operation]).input_shape) == []
    name = requests["create_endpoint"]["EndpointName"]
    assert name.startswith("tiny-") and list(requests) == list(OPERATIONS)
    tags = [{"Key": "team", "Value": "ours"}]
    assert requests["create_endpoint"] == {"EndpointName": name, "EndpointConfigName": name, "Tags": tags}
    registry = "763104351884.dkr.ecr.us-west-2.amazonaws.com"
    place = {
        "S3Uri": f"s3://served-bucket/echelon/jobs/{name}/model/",
        "S3DataType": "S3Prefix",
        "CompressionType": "None",
    }
    assert requests["create_model"] == {
        "ModelName": name,
        "ExecutionRoleArn": AWS["role"],
        "PrimaryContainer": {
            "Image": f"{registry}/vllm:0.27.1-gpu-py312-cu130-ubuntu22.04-sagemaker",
            "ModelDataSource": {"S3DataSource": place},
            "Environment": {
                "HF_HUB_OFFLINE": "1", "SM_VLLM_SERVED_MODEL_NAME": "tiny",
                "SM_VLLM_TENSOR_PARALLEL_SIZE": "2",  # of 4 GPUs, because there are 2 heads
                "SM_VLLM_MAX_MODEL_LEN": "64",
            },
        },
        "EnableNetworkIsolation": False,
        "Tags": tags,
    }  # fmt: skip
    [variant] = requests["create_endpoint_config"]["ProductionVariants"]
    assert variant == {
        "VariantName": "AllTraffic", "ModelName": name, "InstanceType": "ml.g6.12xlarge", "InitialInstanceCount": 1,
        "ModelDataDownloadTimeoutInSeconds": 900, "ContainerStartupHealthCheckTimeoutInSeconds": 900,
        "InferenceAmiVersion": "al2023-ami-sagemaker-inference-gpu-4-1",
    }  # fmt: skip
    vpc = ("launch.sagemaker.subnets=[subnet-0a]", "launch.sagemaker.security_group_ids=[sg-0a]")
    key = "launch.sagemaker.kms_key=arn:aws:kms:us-west-2:111122223333:key/0a1b"
    private, _ = dry_run(echelon, *vpc, key, "launch.sagemaker.network_isolation=true")
    assert private["create_model"]["VpcConfig"] == {"SecurityGroupIds": ["sg-0a"], "Subnets": ["subnet-0a"]}
    assert private["create_model"]["EnableNetworkIsolation"] is True
    for operation, request in private.items():
        assert faults(request, api().operation_model(OPERATIONS[operation]).input_shape) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launch.sagemaker.role=null", "launch.sagemaker.bucket=null", "launch.sagemaker.endpoint.instance_type=null"],
         ["3 settings are not right", "launch.sagemaker.role", "launch.sagemaker.bucket", "--instance ml.g6.xlarge"]),
        (["--instance", "ml.m5.large"], ["launch.sagemaker.endpoint.instance_type=ml.m5.large has no NVIDIA GPU"]),
        (["--instance", "ml.g9.xlarge"], ["launch.sagemaker.endpoint.instance_type=ml.g9.xlarge is not in the"]),
        (["launch.sagemaker.endpoint.env={API_KEY: sesame-open-now}"], ["endpoint.env.API_KEY looks like a secret"]),
        (["--nodes", "2"], ["--nodes has no meaning with --to sagemaker-endpoint"]),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_before_anything_is_sent(echelon, overrides, said):
    ending = echelon("launch", "runs/tiny", "--to", "sagemaker-endpoint", *overrides)
    assert ending.code == 2 and all(words in ending.err for words in said), ending.err


def test_a_folder_that_is_no_run_and_a_model_without_text_are_refused(echelon, trained, tmp_path):
    ending = echelon("launch", "recipe.json", "--to", "sagemaker-endpoint")
    assert ending.code == 2 and "recipe.json is not a run folder" in ending.err
    scoring = tmp_path / "scoring"
    shutil.copytree(trained / "runs" / "tiny", scoring)
    recipe = (scoring / "recipe.yaml").read_text().replace("name: causal_lm", "name: reward")
    (scoring / "recipe.yaml").write_text(recipe)
    ending = echelon("launch", str(scoring), "--to", "sagemaker-endpoint")
    assert ending.code == 2 and "objective.name=reward: its model scores texts" in ending.err, ending.err
    config = scoring / "model" / "config.json"
    (scoring / "recipe.yaml").write_text(recipe.replace("name: reward", "name: causal_lm"))
    large = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 80}
    config.write_text(json.dumps(json.loads(config.read_text()) | large))
    ending = echelon("launch", str(scoring), "--to", "sagemaker-endpoint")
    assert ending.code == 2 and "the weights need" in ending.err and "use a type with more memory" in ending.err


def test_an_endpoint_from_launch_to_deletion(echelon, aws, tmp_path):
    s3 = boto3.client("s3", region_name="us-west-2")
    s3.create_bucket(Bucket="served-bucket", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    ending = echelon("launch", "runs/tiny", "--to", "sagemaker-endpoint", "--instance", "ml.g4dn.12xlarge")
    assert ending.code == 0, ending.err
    name = ending.out.split("created endpoint ")[1].split(";")[0]
    status = json.loads(echelon("status", name, "--json").out)["jobs"]
    assert [(job["name"], job["target"], job["state"]) for job in status] == [(name, "sagemaker-endpoint", "running")]

    place = f"echelon/jobs/{name}/model/"
    for entry in s3.list_objects_v2(Bucket="served-bucket", Prefix=place)["Contents"]:
        s3.download_file("served-bucket", entry["Key"], str(tmp_path / entry["Key"].removeprefix(place)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "7?"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == "<user>7?<|endoftext|><assistant>"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert str(model.dtype) == "torch.float16"  # T4 has no bf16

    sagemaker = boto3.client("sagemaker", region_name="us-west-2")
    container = sagemaker.describe_model(ModelName=name)["PrimaryContainer"]
    assert container["Environment"]["SM_VLLM_SERVED_MODEL_NAME"] == "tiny"
    assert echelon("cancel", name).out.startswith(f"deleted {name}")
    for listed, key in (("models", "Models"), ("endpoint_configs", "EndpointConfigs"), ("endpoints", "Endpoints")):
        assert getattr(sagemaker, f"list_{listed}")()[key] == []
    [job] = json.loads(echelon("status", name, "--json").out)["jobs"]
    assert (job["state"], job["detail"]) == ("stopped", "deleted")


def test_what_a_refused_request_leaves_behind_is_deleted(echelon, aws):
    sagemaker = boto3.client("sagemaker", region_name="us-west-2")
    requests, _ = dry_run(echelon, "--instance", "ml.g4dn.xlarge")  # a type that moto knows
    requests["create_endpoint"]["EndpointConfigName"] = "missing"
    with pytest.raises(LaunchError, match="the request create_endpoint"):
        Service("us-west-2").deploy(requests)
    for listed, key in (("models", "Models"), ("endpoint_configs", "EndpointConfigs")):
        assert getattr(sagemaker, f"list_{listed}")()[key] == []
