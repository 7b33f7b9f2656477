"""Secrets of a job in a container, from a server that speaks the API of Secrets Manager."""

import json
import os
import signal
import socket
import sys
import urllib.request

import pytest
import yaml

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.job_checks import refuse_secrets
from echelon.launch.sagemaker import container, enter, secrets_manager
from echelon.launch.sagemaker.launcher import SageMakerLauncher
from echelon.launch.sagemaker.secrets_manager import read_secrets
from echelon.recipe.load import load_recipe
from echelon.recipe.render import find_secret_keys, render_recipe
from echelon.recipe.sagemaker_sections import SageMakerConfig
from tests.object_server import ObjectServer
from tests.unit.launch.sagemaker.sagemaker_jobs import make_job
from tests.unit.recipe_samples import RECIPE

boto3 = pytest.importorskip("boto3", reason="no boto3 here; pip install boto3")

TOKEN = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ"
PLAIN = "correct horse battery staple"
NAME = "secretsmanager://team/hf"


@pytest.fixture
def vault(monkeypatch):
    """A client of a local Secrets Manager, in the region of a job."""
    server = ObjectServer()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST"))
    yield boto3.client("secretsmanager", region_name="us-east-1")
    server.stop()


def test_plain_secrets_and_keys_of_json_secrets_are_read_by_name_and_arn(vault):
    vault.create_secret(Name="team/hf", SecretString=TOKEN + "\n")
    keys = {"wandb": PLAIN, "count": 3}
    arn = vault.create_secret(Name="keys", SecretString=json.dumps(keys))["ARN"]
    asked = {"HF_TOKEN": NAME, "WANDB_API_KEY": f"{arn}#wandb", "AGAIN": "secretsmanager://keys#wandb"}
    assert read_secrets(asked, "us-east-1") == {"HF_TOKEN": TOKEN, "WANDB_API_KEY": PLAIN, "AGAIN": PLAIN}
    assert read_secrets({"A": f"{arn}#wandb"}, None) == {"A": PLAIN}
    assert read_secrets({}, None) == {}


def test_parameters_of_systems_manager_are_read_by_arn(vault):
    store = boto3.client("ssm", region_name="us-east-1")
    store.put_parameter(Name="/team/hf", Value=TOKEN, Type="SecureString")
    arn = store.get_parameter(Name="/team/hf")["Parameter"]["ARN"]
    assert arn.startswith("arn:aws:ssm:us-east-1:")
    assert read_secrets({"HF_TOKEN": arn}, None) == {"HF_TOKEN": TOKEN}
    with pytest.raises(LaunchError, match=r"\(ParameterNotFound\).*; correct its ARN"):
        read_secrets({"HF_TOKEN": arn + "x"}, None)
    assert SageMakerConfig(secrets={"HF_TOKEN": arn}).secrets == {"HF_TOKEN": arn}


@pytest.mark.parametrize(
    ("stored", "given", "said"),
    [
        ({"SecretString": TOKEN}, "secretsmanager://other", "(ResourceNotFoundException): Secrets Manager can't find"),
        ({"SecretString": TOKEN}, f"{NAME}#key", "the secret is not a JSON object; remove #key"),
        ({"SecretString": json.dumps({"a": TOKEN})}, NAME, f"is a JSON object with 1 keys; choose one: {{}}{NAME}#KEY"),
        ({"SecretString": json.dumps({"a": TOKEN})}, f"{NAME}#b", "names a key that it does not have"),
        ({"SecretString": json.dumps({"a": [TOKEN]})}, f"{NAME}#a", "names a key that is not text"),
        ({"SecretString": f"{TOKEN}\0{TOKEN}"}, NAME, "has a zero byte"),
        ({"SecretBinary": TOKEN.encode()}, NAME, "is a binary secret"),
    ],
)
def test_a_secret_that_cannot_be_read_is_named_without_its_content(vault, stored, given, said):
    vault.create_secret(Name="team/hf", **stored)
    with pytest.raises((ConfigError, LaunchError)) as refused:
        read_secrets({"HF_TOKEN": given}, "us-east-1")
    key = "launch.sagemaker.secrets.HF_TOKEN="
    assert str(refused.value).startswith(f"{key}{given}") and said.format(key) in str(refused.value)
    assert TOKEN not in repr(refused.value) and refused.value.__cause__ is None


def test_a_refusal_of_aws_names_the_permission(vault, monkeypatch):
    """moto allows everything to everybody, so botocore's own parser reads this answer."""
    arn = "arn:aws:secretsmanager:us-east-1:111122223333:secret:team/hf-AbCdEf"
    message = "User: arn:aws:sts::1:assumed-role/train/x is not authorized to perform: secretsmanager:GetSecretValue"
    code = "AccessDeniedException"

    def refuse(self, environ, respond):
        body = json.dumps({"__type": code, "Message": message}).encode()
        respond("400 Bad Request", [("Content-Type", "application/x-amz-json-1.1"), ("Content-Length", str(len(body)))])
        return [body]

    monkeypatch.setattr(ObjectServer, "_answer", refuse)
    server = ObjectServer()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.environment["AWS_ENDPOINT_URL"])
    with pytest.raises(LaunchError) as refused:
        read_secrets({"HF_TOKEN": arn}, None)
    server.stop()
    assert str(refused.value) == (
        f"launch.sagemaker.secrets.HF_TOKEN={arn}: AWS refused to read it in us-east-1 ({code}): {message}; the role "
        "of the job, launch.sagemaker.role, needs secretsmanager:GetSecretValue on it."
    )


def test_without_a_connection_the_endpoint_is_named(monkeypatch):
    monkeypatch.setattr(secrets_manager, "_ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATESTTESTTESTTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-of-this-test")
    with pytest.raises(LaunchError, match=r"add an endpoint for com\.amazonaws\.eu-west-1\.secretsmanager to the VPC"):
        read_secrets({"HF_TOKEN": NAME}, "eu-west-1")
    with pytest.raises(ConfigError, match="the region is unknown"):
        read_secrets({"HF_TOKEN": NAME}, None)


def test_a_recipe_has_the_place_of_a_secret_and_no_secret(tmp_path):
    def load(secrets):
        return make_job(tmp_path, f"launch.sagemaker.secrets={json.dumps(secrets)}").recipe

    arn = "arn:aws:secretsmanager:us-east-1:111122223333:secret:team/hf-AbCdEf#key"
    recipe = load({"HF_TOKEN": "team/hf", "WANDB_API_KEY": arn})
    assert recipe.launch.sagemaker.secrets == {"HF_TOKEN": NAME, "WANDB_API_KEY": arn}
    assert find_secret_keys(recipe) == []
    refuse_secrets(recipe)
    (tmp_path / "again.yaml").write_text(render_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml")[0] == recipe
    for variable, value, said in (
        ("HF-TOKEN", "team/hf", "is not the name of a variable"),
        ("HF_TOKEN", "a b", "is not the ARN or the name of a secret"),
        ("HF_TOKEN", TOKEN, "looks like a secret itself"),
        ("WANDB_API_KEY", "0f9a3b7c5d1e8f2a4b6c" * 2, "looks like a secret itself"),
        ("HF_TOKEN", "arn:aws:s3:::bucket/key", "is not the ARN or the name of a secret"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            load({variable: value})
        assert value not in str(refused.value)


def test_what_contradicts_a_secret_is_refused_and_the_job_says_what_it_reads(tmp_path):
    secrets = "launch.sagemaker.secrets={HF_TOKEN: team/hf}"
    lines = SageMakerLauncher().check(make_job(tmp_path, secrets))
    assert any("reads HF_TOKEN from AWS Secrets Manager; launch.sagemaker.role needs" in line for line in lines)
    texts = SageMakerLauncher().render(make_job(tmp_path, secrets))
    assert yaml.safe_load(texts["container-recipe.yaml"])["launch"]["sagemaker"]["secrets"] == {"HF_TOKEN": NAME}
    assert "HF_TOKEN" not in texts["request.json"]
    with pytest.raises(ConfigError, match=r"HF_TOKEN is both in launch.env and in launch.sagemaker.secrets"):
        SageMakerLauncher().check(make_job(tmp_path, secrets, "launch.env={HF_TOKEN: $X}"))
    image = "launch.sagemaker.image=111122223333.dkr.ecr.us-west-2.amazonaws.com/own:1"
    with pytest.raises(ConfigError, match=r"secrets are read over the network"):
        SageMakerLauncher().check(make_job(tmp_path, secrets, image, "launch.sagemaker.network_isolation=true"))


TRAINING = """
import os, sys
from pathlib import Path
print("echelon: 401 for the token", os.environ["WANDB_API_KEY"], file=sys.stderr, flush=True)
Path(sys.argv[1]).write_text(os.environ["HF_TOKEN"])
sys.exit(1)
"""


def test_only_the_training_gets_a_secret_and_nothing_shows_it(vault, tmp_path, monkeypatch, capfd):
    """The container's own code around a training that prints its secret."""
    vault.create_secret(Name="team/hf", SecretString=TOKEN)
    vault.create_secret(Name="keys", SecretString=json.dumps({"wandb": PLAIN}))
    base, seen = tmp_path / "ml", tmp_path / "seen"
    recipe = RECIPE | {
        "run": {"name": "tiny", "dir": str(base / "checkpoints" / "tiny")},
        "data": {"train": "python-stdlib", "sequence_len": 32},
        "launch": {"sagemaker": {"secrets": {"HF_TOKEN": "team/hf", "WANDB_API_KEY": "keys#wandb"}}},
    }
    (base / "input" / "data" / "echelon").mkdir(parents=True)
    (base / "input" / "data" / "echelon" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(enter, "make_importable", lambda *_: None)
    monkeypatch.setattr(container, "train_command", lambda *_: [sys.executable, "-c", TRAINING, str(seen)])
    monkeypatch.setattr(container, "await_names", lambda hosts: None)
    before = {each: signal.getsignal(each) for each in enter.STOP_SIGNALS}
    try:
        assert enter.work(base) == 1
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert seen.read_text() == TOKEN
    assert (base / "output" / "failure").read_text() == "401 for the token ***"
    told = capfd.readouterr()
    for secret in (TOKEN, PLAIN):
        assert secret not in told.out + told.err
        assert secret not in os.environ.values()
        assert not [path for path in base.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
