"""The entry of a container, started from the files of a submitted job, where something is missing or in the way.

Slow: each start takes about half a minute.
"""

import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path

import psutil
import pytest
import yaml

from echelon.learn.data.prepare import prepare_data
from echelon.recipe.load import load_recipe
from tests.cases import needs_machines
from tests.launchers.containers import await_end, make_image, start_hosts, sync_to_s3
from tests.launchers.test_sagemaker_hosts import (  # noqa: F401 (submit is a fixture)
    RECIPE,
    SECONDS,
    SETTINGS,
    TEXT,
    await_step,
    check_model,
    rows_of,
    run,
    show,
    submit,
)
from tests.namespaces import machines
from tests.waiting import wait_until

pytest.importorskip("boto3", reason="no boto3 here; pip install boto3")
pytestmark = needs_machines()

LONG = 600
TOKEN = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ"
VAULT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.object_server import ObjectServer
server = ObjectServer()
import boto3
client = boto3.client("secretsmanager", endpoint_url=server.environment["AWS_ENDPOINT_URL"], region_name="us-east-1")
client.create_secret(Name="team/hf", SecretString=sys.argv[2])
Path(sys.argv[3]).write_text(str(server.port))
time.sleep(3600)
"""


def make_poor_image(folder, *without):
    """An image like `make_image`, without pip and these packages."""
    path = make_image(folder)
    packages = next((folder / "lib").glob("python*/site-packages"))
    for name in ("pip", *without):
        for entry in (packages / name, *packages.glob(f"{name}-*.dist-info")):
            entry.unlink()
    return path


@pytest.fixture(scope="module")
def image_without_pip(tmp_path_factory):
    return make_poor_image(tmp_path_factory.mktemp("image"))


@contextmanager
def vault_on(machine, folder):
    """A server on a machine that speaks Secrets Manager, with one secret; yields the variables that a job needs."""
    folder.mkdir()
    keys = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "the-secret-of-this-test"}
    env = {**os.environ, **keys}
    port = folder / "port"
    argv = [sys.executable, "-c", VAULT, str(Path(__file__).parents[2]), TOKEN, str(port)]
    process = machine.start(argv, env)
    try:
        wait_until(lambda: port.exists() and port.read_text(), SECONDS, process)
        yield {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port.read_text()}", **keys}
    finally:
        process.terminate()
        process.wait()


@contextmanager
def markers_beside(folder):
    """SageMaker's markers, made and removed beside every file below a folder."""
    ended = threading.Event()

    def work():
        while not ended.is_set():
            for place, _, names in os.walk(folder):
                for name in names:
                    for kind in ("uploading", "uploaded"):
                        with suppress(OSError):  # the folder was renamed or removed
                            Path(place, f"{name}.sagemaker-{kind}").touch()
                            Path(place, f"{name}.sagemaker-{kind}").unlink()
                    time.sleep(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def start_once(job, image, folder, checkpoints=None, stop_at=None):
    """One start under markers, with a vault on the same machine; return the code, the host and what S3 then holds."""
    with machines(1, folder.parent) as network, vault_on(network[0], folder.parent / f"vault-{folder.name}") as aws:
        request = {**job.request, "Environment": {**job.request["Environment"], **aws}}
        hosts = start_hosts(network, request, [job.channels], image, folder, checkpoints)
        with markers_beside(hosts[0].ml / "checkpoints"):
            if stop_at is not None:
                await_step(hosts, stop_at)
                check_secret(hosts[0])
                hosts[0].terminate()
            [code] = await_end(hosts, SECONDS)
        return code, hosts[0], sync_to_s3(hosts, folder.parent / f"bucket-{folder.name}")


def check_secret(host):
    """Check that the workers have the secret, and process 1 and its child do not."""
    below = [each.environ() for each in psutil.Process(host.process.pid).children(recursive=True)]
    assert any(env.get("RANK") == "0" and env.get("HF_TOKEN") == TOKEN for env in below), show([host])
    assert any("RANK" not in env and "HF_TOKEN" not in env for env in below)


def test_three_restarts_under_markers_without_aws_and_pip(submit, image_without_pip, tmp_path):  # noqa: F811
    """With a secret, and with a torn copy of the newest checkpoint at the second restart."""
    launch = {"sagemaker": SETTINGS | {"secrets": {"HF_TOKEN": "team/hf"}}}
    job = submit(1, launch=launch, train=RECIPE["train"] | {"steps": LONG})
    codes, [whole] = run(submit_without_secrets(job), 1, image_without_pip, tmp_path / "whole")
    assert codes == [0], show([whole])

    code, first, bucket = start_once(job, image_without_pip, tmp_path / "first", stop_at=20)
    assert code == 3, show([first])
    assert first.failure.startswith("stopped by SIGTERM") and not list(first.ml.glob("model/*"))
    again = rows_of(first)[-1][0] + 30
    code, second, bucket = start_once(job, image_without_pip, tmp_path / "second", bucket, stop_at=again)
    assert code == 3, show([second])
    newest = sorted(bucket.glob("tiny/checkpoints/step-*"))[-1]
    shard = next(newest.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:1000])

    again = rows_of(second)[-1][0] + 30
    code, third, bucket = start_once(job, image_without_pip, tmp_path / "third", bucket, stop_at=again)
    assert code == 3, show([third])
    assert "Skipping a damaged checkpoint" in third.log and "has 1000 bytes" in third.log
    code, last, bucket = start_once(job, image_without_pip, tmp_path / "last", bucket)
    assert code == 0 and last.failure is None, show([last])
    check_model(last)
    assert rows_of(last) == rows_of(whole)
    assert [row[0] for row in rows_of(last)] == list(range(1, LONG + 1))

    for host in (first, second, third, last):
        assert "pip" not in host.log and TOKEN not in host.log
        outputs = [path for place in ("model", "output") for path in (host.ml / place).rglob("*")]
        assert not [path for path in outputs if "sagemaker-upload" in path.name]
        files = [path for path in host.folder.rglob("*") if path.is_file()]
        assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
        assert ("data prepared by an earlier start is in" in host.log) == (host is not first)
    for manifest in bucket.glob("tiny/checkpoints/*/manifest.json"):
        assert not [name for name in json.loads(manifest.read_text())["files"] if "sagemaker-upload" in name]


def submit_without_secrets(job):
    """The same job with a recipe that names no secret: it needs no vault."""
    channels = dict(job.channels)
    copied = channels["echelon"].with_name("echelon-without-secrets")
    copied.mkdir()
    for path in channels["echelon"].iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    recipe = yaml.safe_load((copied / "recipe.yaml").read_text())
    del recipe["launch"]["sagemaker"]["secrets"]
    (copied / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return type(job)(job.request, {**channels, "echelon": copied})


def test_a_secret_that_cannot_be_read_ends_the_job_with_its_name(submit, image_without_pip, tmp_path):  # noqa: F811
    job = submit(1, launch={"sagemaker": SETTINGS | {"secrets": {"HF_TOKEN": "team/other"}}})
    code, host, _ = start_once(job, image_without_pip, tmp_path / "host")
    assert code == 1, show([host])
    assert host.failure.startswith("launch.sagemaker.secrets.HF_TOKEN=secretsmanager://team/other: AWS refused to read")
    assert "(ResourceNotFoundException)" in host.failure and TOKEN not in host.log


def test_without_a_network_the_job_says_what_to_set_or_installs_its_wheels(submit, tmp_path):  # noqa: F811
    image = make_image(tmp_path / "image")
    packages = next((tmp_path / "image" / "lib").glob("python*/site-packages"))
    for entry in (packages / "jinja2", *packages.glob("jinja2-*.dist-info")):
        entry.unlink()
    job = submit(1, train=RECIPE["train"] | {"steps": 3})
    started = time.monotonic()
    codes, [host] = run(job, 1, image, tmp_path / "without")
    assert codes == [1] and time.monotonic() - started < 120, show([host])
    assert host.failure.startswith("this container lacks jinja2>=3.1.6, and pip cannot reach a package index (NewConn")
    assert "launch.sagemaker.wheels=download" in host.failure and "NAT gateway" in host.failure

    with zipfile.ZipFile(tmp_path / "laptop" / "wheels.zip", "w") as archive:
        archive.write(pack_wheel("jinja2", tmp_path), f"{wheel_name('jinja2')}")
    wheels = tmp_path / "s3" / "wheels"
    wheels.mkdir()
    (tmp_path / "laptop" / "wheels.zip").rename(wheels / "wheels.zip")
    requirements = job.channels["echelon"] / "requirements.txt"
    requirements.write_text("--no-index\n" + requirements.read_text())
    codes, [host] = run(type(job)(job.request, {**job.channels, "wheels": wheels}), 1, image, tmp_path / "with")
    assert codes == [0] and host.failure is None, show([host])
    assert "echelon: installed jinja2 " in host.log
    assert f"jinja2=={distribution('jinja2').version}\n" in (host.ml / "checkpoints" / "packages.txt").read_text()
    check_model(host, 6.5)


def wheel_name(name):
    return f"{name}-{distribution(name).version}-py3-none-any.whl"


def pack_wheel(name, folder):
    """Write a wheel of a pure-Python package that is installed here."""
    path = folder / wheel_name(name)
    with zipfile.ZipFile(path, "w") as wheel:
        for file in distribution(name).files:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                wheel.write(file.locate(), str(file))
    return path


def test_a_job_with_prepared_data_reads_no_text(submit, image_without_pip, tmp_path):  # noqa: F811
    Path("text.txt").write_text(TEXT)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    made = prepare_data(load_recipe(Path("recipe.yaml"))[0])
    data = RECIPE["data"] | {"prepared_dir": str(made.path)}
    job = submit(1, data=data, train=RECIPE["train"] | {"steps": 3})
    assert sorted(job.channels) == ["echelon", "prepared"]
    codes, [host] = run(job, 1, image_without_pip, tmp_path / "host")
    assert codes == [0], show([host])
    assert f"held out, in /opt/ml/input/data/prepared/{made.path.name}" in host.log and "tokenizing" not in host.log
    check_model(host, 6.5)


def test_no_aws_command_is_needed(image_without_pip):
    """Else the tests above would show nothing."""
    path = f"{image_without_pip}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert subprocess.run(["/bin/sh", "-c", "command -v aws"], env={"PATH": path}, check=False).returncode != 0
