"""Packages in a container: what is missing, and how the real pip installs or collects it, from an index or wheels."""

import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.sagemaker import install as installing
from echelon.launch.sagemaker.install import collect_wheels, find_python
from echelon.launch.sagemaker.launcher import SageMakerLauncher
from echelon.launch.sagemaker.request import build_submission
from echelon.launch.source_bundle import CORE, HELPFUL
from tests.unit.launch.sagemaker.sagemaker_jobs import RECIPE, make_job

SOURCE = str(Path(installing.__file__).parents[3])
INSTALL = """
import os, sys
from pathlib import Path
from echelon.launch.sagemaker.install import install_missing
install_missing(Path(sys.argv[1]), Path(sys.argv[2]), os.environ)
"""


def build_wheel(folder, name, version, needs=(), tag="py3-none-any"):
    """Write a wheel of an empty package."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {each}" for each in needs),
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


class Container:
    """Starts of one container image: each has its own packages, and all have the same checkpoint folder."""

    def __init__(self, place):
        self.place = place
        self.channel = place / "data" / "echelon"
        self.channel.mkdir(parents=True)
        self.checkpoints = place / "checkpoints"
        self.starts = 0
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        # What pip's own files on this machine say is no part of the test.
        self.env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}

    def start(self, requirements, **variables):
        """Install the requirements in a new container; return the code, the log and the versions of the packages."""
        self.starts += 1
        site = self.place / f"site-{self.starts}"
        (self.channel / "requirements.txt").write_text(requirements)
        env = self.env | {"PIP_TARGET": str(site), "PYTHONPATH": f"{SOURCE}{os.pathsep}{site}"} | variables
        argv = [sys.executable, "-c", INSTALL, str(self.channel), str(self.checkpoints)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
        found = (path.name.removesuffix(".dist-info") for path in site.glob("*.dist-info"))
        return done.returncode, done.stderr, dict(each.split("-") for each in found)


@pytest.fixture
def started(tmp_path):
    return Container(tmp_path)


@pytest.fixture
def index(tmp_path):
    """A package index over HTTP: the folder `wheels`, with a page for each package."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "index")))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield {"PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/"}
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("without", [[], ["packaging"]], ids=["packaging", "its copy in pip"])
def test_what_is_missing_is_what_the_versions_say(monkeypatch, without):
    for name in without:
        monkeypatch.setitem(sys.modules, name, None)
        for part in ("requirements", "version"):
            monkeypatch.setitem(sys.modules, f"{name}.{part}", None)
    here = {"torch": "2.11.0a0+nv25", "pyyaml": "6.0.2", "numpy": "2.0", "transformers": "5.18.0.dev0"}
    monkeypatch.setattr(installing, "find_installed", lambda name: here.get(name.lower()))
    lines = ["# needed", "", "--extra-index-url https://example.org", "torch>=2.11,<2.14", "PyYAML>=6", "numpy==2.0.0"]
    lines += ["transformers>=5.17,<6", "one>=1; sys_platform == 'win32'", "two; python_version < '3.2'"]
    assert installing.find_missing(lines) == []
    more = ["numpy<2", "fsspec[s3]>=2024.6", "four==2; python_version >= '3.9' and sys_platform != 'win32'"]
    assert installing.find_missing([*lines, *more]) == more
    assert installing.find_missing(lines, {"numpy": "1.9", "other": "3"}) == ["numpy==2.0.0"]


def test_an_image_that_cannot_read_requirements_is_named(monkeypatch):
    for name in ("packaging", "pip"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"{name}.requirements", raising=False)
        for each in [each for each in sys.modules if each.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, each)
    with pytest.raises(LaunchError, match="lacks packages that echelon needs, and its image has no pip; set launch"):
        installing.find_missing(["numpy>=1"])


@pytest.mark.slow
def test_the_torch_of_the_image_is_not_replaced(started, index, tmp_path, monkeypatch):
    build_wheel(tmp_path / "index" / "torch", "torch", "99.0")
    build_wheel(tmp_path / "index" / "gadget", "gadget", "1.0", ["torch>=99"])
    code, log, packages = started.start("gadget>=1\n", **index)
    assert code == 1 and packages == {} and "pip could not install gadget>=1: " in log


def test_without_missing_packages_neither_pip_nor_network_is_used(started, tmp_path):
    (tmp_path / "broken" / "pip").mkdir(parents=True)
    (tmp_path / "broken" / "pip" / "__main__.py").write_text("raise SystemExit('pip was called')")
    lines = "".join(f"{line}\n" for line in (*CORE, "# Training can do without these:", *HELPFUL))
    path = f"{tmp_path / 'broken'}{os.pathsep}{SOURCE}"
    assert started.start(lines, PYTHONPATH=path, PIP_INDEX_URL="http://127.0.0.1:9/") == (0, "", {})
    assert not started.checkpoints.exists()


@pytest.mark.slow
def test_a_restart_installs_the_versions_of_the_first_start(started, index, tmp_path):
    def publish(version):
        for name, needs in (("gadget", ["part"]), ("part", [])):
            build_wheel(tmp_path / "index" / name, name, version, needs)

    publish("1.0")
    code, log, packages = started.start("gadget>=1,<2\n", **index)
    assert (code, packages) == (0, {"gadget": "1.0", "part": "1.0"}), log
    assert "echelon: pip install gadget>=1,<2\n" in log and "echelon: installed gadget 1.0, part 1.0\n" in log
    kept = (started.checkpoints / "packages.txt").read_text().splitlines()
    assert kept[1:] == [f"# Python 3.{sys.version_info[1]}", "gadget==1.0", "part==1.0"]

    publish("1.1")
    code, log, packages = started.start("gadget>=1,<2\n", **index)
    assert (code, packages) == (0, {"gadget": "1.0", "part": "1.0"}), log
    assert "pip install gadget>=1,<2, with the versions of the last start (in packages.txt)" in log

    for path in (tmp_path / "index").rglob("*-1.0-*"):
        path.unlink()
    code, log, packages = started.start("gadget>=1,<2\n", **index)
    assert (code, packages) == (0, {"gadget": "1.1", "part": "1.1"}), log
    assert "the versions of the last start cannot be installed, so pip chooses others: " in log
    assert "gadget==1.1\npart==1.1\n" in (started.checkpoints / "packages.txt").read_text()


def test_a_file_of_versions_adds_no_package_and_no_option(started, index, tmp_path):
    for name in ("gadget", "intruder"):
        build_wheel(tmp_path / "index" / name, name, "1.0")
    started.checkpoints.mkdir()
    lines = [
        f"# Python 3.{sys.version_info[1]}",
        "intruder==1.0",
        "--index-url http://127.0.0.1:9/",
        "gadget==1.0 -e .",
    ]
    (started.checkpoints / "packages.txt").write_text("\n".join(lines))
    code, log, packages = started.start("gadget>=1\n", **index)
    assert (code, packages) == (0, {"gadget": "1.0"}), log


@pytest.mark.slow
def test_wheels_of_the_job_need_no_index(started):
    build_wheel(started.place / "data" / "wheels" / "mine", "part", "1.0")
    build_wheel(started.place, "gadget", "1.0", ["part"])
    with zipfile.ZipFile(started.place / "data" / "wheels" / "wheels.zip", "w") as archive:
        archive.write(started.place / "gadget-1.0-py3-none-any.whl", "gadget-1.0-py3-none-any.whl")
    closed = {"PIP_INDEX_URL": "http://127.0.0.1:9/"}
    code, log, packages = started.start("--no-index\ngadget>=1\n", **closed)
    assert (code, packages) == (0, {"gadget": "1.0", "part": "1.0"}), log
    code, log, packages = started.start("--no-index\ngadget>=2\n", **closed)
    assert code == 1 and packages == {}
    assert "pip could not install gadget>=2: " in log and "add them to launch.sagemaker.wheels" in log


def test_optional_packages_end_no_job(started, index, tmp_path):
    build_wheel(tmp_path / "index" / "gadget", "gadget", "1.0")
    lines = "gadget>=1\n# Training can do without these:\nno-such-meter>=1\n"
    code, log, packages = started.start(lines, **index)
    assert (code, packages) == (0, {"gadget": "1.0"}), log
    assert "no-such-meter>=1 cannot be installed, and training goes on without: " in log


@pytest.fixture
def channel(tmp_path):
    (tmp_path / "data" / "echelon").mkdir(parents=True)
    (tmp_path / "data" / "echelon" / "requirements.txt").write_text("no-such-package>=1\n")
    return tmp_path / "data" / "echelon"


def test_an_image_without_pip_is_named(channel, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(installing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError) as refused:
        installing.install_missing(channel, tmp_path, {})
    assert str(refused.value) == (
        "this container lacks no-such-package>=1, and its image has no pip; set launch.sagemaker.image to an image "
        "that has them, or has pip."
    )
    (channel / "requirements.txt").write_text(f"{installing.OPTIONAL}\nno-such-package>=1\n")
    installing.install_missing(channel, tmp_path, {})
    assert "no-such-package>=1 cannot be installed, and training goes on without" in capfd.readouterr().err


def test_an_index_without_a_connection_is_named_with_the_ways(channel, tmp_path):
    env = os.environ | {"PIP_INDEX_URL": "http://me:word@127.0.0.1:9/simple"}
    with pytest.raises(LaunchError) as refused:
        installing.install_missing(channel, tmp_path, env)
    message = str(refused.value)
    assert "this container lacks no-such-package>=1, and pip cannot reach a package index (NewConn" in message
    assert "launch.sagemaker.wheels=download" in message and "NAT gateway" in message and "word" not in message
    (channel / "requirements.txt").write_text("--no-index\nno-such-package>=1\n")
    with pytest.raises(LaunchError, match=r"there is no wheel in the channel wheels; check launch.sagemaker.wheels"):
        installing.install_missing(channel, tmp_path, env)


DOWNLOAD = "launch.sagemaker.wheels=download"
VPC = ("launch.sagemaker.subnets=[subnet-1]", "launch.sagemaker.security_group_ids=[sg-1]")
HUB = RECIPE.replace("config: {model_type: llama, hidden_size: 64}", "checkpoint: some/model").replace(
    "tokenizer: bytes", ""
)


def test_pip_collects_what_the_image_lacks_for_its_python_and_never_torch(index, tmp_path, monkeypatch):
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
