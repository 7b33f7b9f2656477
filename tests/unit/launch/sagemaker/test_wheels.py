"""Wheels that a job brings: collected by the real pip from an index over HTTP, and what a job without them says."""

import io
import json
import os
import zipfile

import pytest

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.sagemaker.install import collect_wheels, find_python
from echelon.launch.sagemaker.launcher import SageMakerLauncher
from echelon.launch.sagemaker.request import build_submission
from tests.unit.launch.sagemaker.sagemaker_jobs import RECIPE, make_job
from tests.unit.launch.sagemaker.test_install import build_wheel, index  # noqa: F401 (a fixture)

DOWNLOAD = "launch.sagemaker.wheels=download"
VPC = ("launch.sagemaker.subnets=[subnet-1]", "launch.sagemaker.security_group_ids=[sg-1]")
HUB = RECIPE.replace("config: {model_type: llama, hidden_size: 64}", "checkpoint: some/model").replace(
    "tokenizer: bytes", ""
)


def test_pip_collects_what_the_image_lacks_for_its_python_and_never_torch(index, tmp_path, monkeypatch):  # noqa: F811
    for name, value in index.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    build_wheel(tmp_path / "index" / "gadget", "gadget", "1.0", ["torch>=2,<3", "part; python_version >= '3'"])
    build_wheel(tmp_path / "index" / "torch", "torch", "2.99", ["huge"])
    for tag in ("cp312-cp312-manylinux_2_28_x86_64", "cp310-cp310-manylinux_2_28_x86_64", "cp312-cp312-win_amd64"):
        build_wheel(tmp_path / "index" / "part", "part", "1.0", tag=tag)
    archive = zipfile.ZipFile(io.BytesIO(collect_wheels("--no-index\ngadget>=1\n", (3, 12))))
    assert sorted(archive.namelist()) == [
        "gadget-1.0-py3-none-any.whl",
        "part-1.0-cp312-cp312-manylinux_2_28_x86_64.whl",
    ]
    with pytest.raises(LaunchError, match=r"could not collect the packages for Python 3.11: .*part"):
        collect_wheels("gadget>=1\n", (3, 11))


def test_the_python_of_an_image_is_that_of_its_tag():
    assert find_python(None) == (3, 12)
    assert find_python("763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker") == (3, 12)
    assert find_python("1.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.11-gpu-py311-cu130-ubuntu") == (3, 11)
    with pytest.raises(ConfigError, match=r"image=mine:latest is unknown.*give a folder of wheels"):
        find_python("mine:latest")


def test_wheels_are_a_channel_of_the_job(tmp_path):
    def stage(*overrides):
        submission = build_submission(make_job(tmp_path, *overrides))
        shown = [line for line in submission.staging.render_uploads().splitlines() if "/wheels/" in line]
        channels = {each.name: each.source for each in submission.staging.channels}
        uploads = submission.staging.uploads
        text = next(each for each in uploads if each.address.endswith("requirements.txt")).source().decode()
        return shown, channels.get("wheels"), text.startswith("--no-index\n")

    prefix = "s3://my-bucket/echelon/jobs/small-1/wheels/"
    collected = f"(wheels for Python 3.12, collected by pip) -> {prefix}wheels.zip"
    assert stage(DOWNLOAD) == ([collected], prefix, True)
    assert stage() == ([], None, False)
    assert stage("launch.sagemaker.wheels=s3://team/wheels") == ([], "s3://team/wheels/", True)
    build_wheel(tmp_path / "mine", "part", "1.0")
    folder = "launch.sagemaker.wheels=mine"
    name = "part-1.0-py3-none-any.whl"
    assert stage(folder) == ([f"mine/{name} -> {prefix}mine/{name}"], prefix, True)
    (tmp_path / "mine" / name).rename(tmp_path / "mine" / "part.zip")
    for given, said in (
        ("mine", "mine has no wheel"),
        ("gone", "not found from"),
        ("/opt/ml/input/x", "give a folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            stage(f"launch.sagemaker.wheels={given}")


def test_a_job_in_a_vpc_says_what_needs_the_internet(tmp_path):
    def ask(*overrides, text=RECIPE):
        lines = SageMakerLauncher().check(make_job(tmp_path, *overrides, text=text))
        return [line for line in lines if line.startswith("VPC: ")]

    pip = "pip installs what the image lacks (or set launch.sagemaker.wheels=download)"
    hub = "model.checkpoint=some/model is on the hub (or give a folder or an s3:// address)"
    nat = "VPC: launch.sagemaker.subnets need a NAT gateway, because "
    assert ask(text=HUB) == ask(*VPC, DOWNLOAD) == []
    assert ask(*VPC) == [nat + pip]
    assert ask(*VPC, DOWNLOAD, text=HUB) == [nat + hub]
    assert ask(*VPC, text=HUB) == [f"{nat}{pip}, and {hub}"]
    assert ask(*VPC, DOWNLOAD, "launch.sagemaker.network_isolation=true") == []


def test_with_wheels_the_image_of_aws_needs_no_network(tmp_path):
    request = json.loads(
        build_submission(make_job(tmp_path, DOWNLOAD, "launch.sagemaker.network_isolation=true")).render_request()
    )
    assert request["EnableNetworkIsolation"] is True
    assert [each["ChannelName"] for each in request["InputDataConfig"]] == ["echelon", "train", "wheels"]
