"""A job submitted to a local AWS server, then run on emulated hosts from only the uploads and the request.

Slow: each start of two hosts takes about a minute.
"""

import json
import queue
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from echelon.cli.main import main
from tests.cases import needs_machines
from tests.dist.command import EXACT, RECIPE, TEXT, finish, start
from tests.launchers.containers import await_end, make_image, start_hosts, sync_to_s3
from tests.namespaces import machines
from tests.object_server import BUCKET, ObjectServer
from tests.training_service import TrainingServer
from tests.waiting import wait_until

boto3 = pytest.importorskip("boto3", reason="no boto3 here; pip install boto3")
pytestmark = needs_machines()

STEPS = 150
SECONDS = 300
SETTINGS = {
    "role": "arn:aws:iam::111122223333:role/training",
    "region": "us-east-1",
    "instance_type": "ml.m5.xlarge",
    "image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/echelon:latest",
    "bucket": f"s3://{BUCKET}/team",
}


@dataclass(frozen=True)
class Job:
    """A submitted job: the request, and the files of each channel in S3."""

    request: dict[str, Any]
    channels: dict[str, Path]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A Python installation without echelon."""
    return make_image(tmp_path_factory.mktemp("image"))


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """Run `echelon launch --to sagemaker` against a new local server; return the job with its channels."""
    server = ObjectServer()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    place = tmp_path / "laptop"
    place.mkdir()
    monkeypatch.chdir(place)

    def launch(nodes, **sections):
        (place / "text.txt").write_text(TEXT)
        launch = {"nproc_per_node": 2 // nodes, "sagemaker": SETTINGS} | sections.pop("launch", {})
        launch.setdefault("nodes", nodes)
        train = RECIPE["train"] | {"steps": STEPS}
        recipe = RECIPE | {"train": train, "checkpoint": {"every": 50}, "parallel": "fsdp"} | sections
        (place / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"track": ["tensorboard"], "launch": launch}))
        monkeypatch.setattr("sys.argv", ["echelon", "launch", "recipe.yaml", "--to", "sagemaker"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return fetch(tmp_path / "s3")

    yield launch
    server.stop()


def fetch(target):
    """The newest job, its request and its channels."""
    [path] = Path("jobs").glob("*/request.json")
    request = json.loads(path.read_text())
    told = boto3.client("sagemaker").describe_training_job(TrainingJobName=request["TrainingJobName"])
    for field in ("ContainerEntrypoint", "ContainerArguments"):
        asked = request["AlgorithmSpecification"].get(field)
        assert told["AlgorithmSpecification"].get(field) == asked
    return Job(request, download_channels(told, target))


def download_channels(request, target):
    """The files of a job's channels, each in a folder."""
    s3, channels = boto3.client("s3"), {}
    for channel in request["InputDataConfig"]:
        prefix = channel["DataSource"]["S3DataSource"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
        folder = channels[channel["ChannelName"]] = target / channel["ChannelName"]
        for each in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
            file = folder / each["Key"].removeprefix(prefix)
            file.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(BUCKET, each["Key"], str(file))
    return channels


def run(job, count, image, folder, checkpoints=None, meanwhile=lambda hosts: None, channels=None):
    """Start the job, call `meanwhile` with the running hosts, wait; return exit codes and hosts."""
    with machines(count, folder.parent) as network:
        given = channels or [job.channels] * count
        hosts = start_hosts(network, job.request, given, image, folder, checkpoints)
        meanwhile(hosts)
        return await_end(hosts, SECONDS), hosts


def await_step(hosts, step):
    """Wait until the first host, which has rank 0, has recorded a step."""
    rows, deadline = hosts[0].ml / "checkpoints" / "tiny" / "metrics.jsonl", time.monotonic() + SECONDS
    while not rows.exists() or f'"kind": "train", "step": {step},' not in rows.read_text():
        assert time.monotonic() < deadline and all(host.process.poll() is None for host in hosts), show(hosts)
        time.sleep(0.05)


def show(hosts):
    return "\n".join(f"== {host.name}: {host.failure}\n{host.log}" for host in hosts)


def rows_of(host):
    lines = (host.ml / "output" / "data" / "metrics.jsonl").read_text().splitlines()
    return [[row[key] for key in EXACT] for row in map(json.loads, lines) if row["kind"] == "train"]


def check_model(host, loss=5.5):
    """Check that transformers loads the model that SageMaker would copy to S3."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = host.ml / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)("1 plus 1", return_tensors="pt").input_ids
    assert ids.shape == (1, 8)
    assert model(ids, labels=ids).loss < loss
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not [path for path in folder.iterdir() if path.is_dir()]


def test_two_hosts_stop_and_resume_on_other_hosts_exactly(submit, image, tmp_path):
    job = submit(2)
    codes, hosts = run(job, 2, image, tmp_path / "whole")
    assert codes == [0, 0], show(hosts)
    assert [host.failure for host in hosts] == [None, None]
    whole, other = hosts
    check_model(whole)
    assert not list(other.ml.glob("model/*")) and not (other.ml / "output" / "data" / "metrics.jsonl").exists()
    assert list(whole.ml.glob("output/tensorboard/events*"))
    assert sorted(path.name for host in hosts for path in host.ml.glob("output/data/logs/*")) == [
        "console.log",
        "rank-00000.log",
        "rank-00001.log",
    ]
    assert len(rows_of(whole)) == STEPS

    stopped_at = []

    def stop(hosts):
        await_step(hosts, 5)
        stopped_at.append(time.monotonic())
        for host in hosts:
            host.terminate()

    codes, hosts = run(job, 2, image, tmp_path / "stopped", meanwhile=stop)
    assert codes == [3, 3], show(hosts)
    assert time.monotonic() - stopped_at[0] < 120
    first = hosts[0]
    assert "stopped by SIGTERM" in first.failure and "the newest checkpoint is step" in first.failure
    assert all(host.failure.startswith("stopped by SIGTERM") for host in hosts)
    assert not list(first.ml.glob("model/*"))
    last = rows_of(first)[-1][0]
    assert 5 <= last < STEPS
    bucket = sync_to_s3(hosts, tmp_path / "bucket")
    assert (bucket / "tiny" / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()

    codes, hosts = run(job, 2, image, tmp_path / "resumed", checkpoints=bucket)
    assert codes == [0, 0], show(hosts)
    assert f"step {last + 1}/" in " ".join(hosts[0].log.split())
    assert "step 1/" not in " ".join(hosts[0].log.split())
    assert rows_of(hosts[0]) == rows_of(whole)
    check_model(hosts[0])
    assert not list(hosts[1].ml.glob("model/*"))


def test_two_hosts_of_different_types_train_one_model(submit, image, tmp_path):
    """A plan for the smaller machine."""
    groups = [
        {"name": "large", "instance_type": "ml.m5.2xlarge", "nodes": 1},
        {"name": "small", "instance_type": "ml.m5.xlarge", "nodes": 1},
    ]
    settings = {name: value for name, value in SETTINGS.items() if name != "instance_type"}
    launch = {"nodes": 1, "sagemaker": settings | {"instance_groups": groups}}
    job = submit(2, launch=launch, budget={"usd_per_hour": 4.5}, train=RECIPE["train"] | {"steps": 3})
    sent = job.request["ResourceConfig"]["InstanceGroups"]
    assert [each["InstanceType"] for each in sent] == ["ml.m5.2xlarge", "ml.m5.xlarge"]
    codes, hosts = run(job, 2, image, tmp_path / "hosts")
    assert codes == [0, 0], show(hosts)
    assert "container: algo-1 of 2 (ml.m5.2xlarge, group large)" in hosts[0].log
    assert "container: algo-2 of 2 (ml.m5.xlarge, group small)" in hosts[1].log
    assert len(rows_of(hosts[0])) == 3
    environment = json.loads((hosts[0].ml / "output" / "data" / "environment.json").read_text())
    # One process per machine: the memory is that of an ml.m5.xlarge, if this machine has more.
    assert environment["cluster"]["accelerator"]["memory_bytes"] <= 16 * 2**30
    assert "$4.5/h x 2 machines (budget.usd_per_hour)" in hosts[0].log
    check_model(hosts[0], 6.5)


def test_one_host_with_setup_lines_and_hostile_values(submit, image, tmp_path):
    greeting = 'it\'s "5 $HOME" `x`\nand more'
    launch = {"env": {"GREETING": greeting}, "setup": ['export SEEN="$GREETING"', 'printf "<%s>" "$SEEN"']}
    train = RECIPE["train"] | {"steps": 3}
    job = submit(1, launch=launch, train=train)
    codes, [host] = run(job, 1, image, tmp_path / "hosts")
    assert codes == [0], show([host])
    assert f"<{greeting}>" in host.log
    check_model(host)


def test_a_budgets_end_is_a_success_with_a_model(submit, image, tmp_path):
    """At a dollar per second, the start alone uses up the budget: the run ends as soon as it trains."""
    job = submit(1, budget={"max_usd": 1, "usd_per_hour": 3600})
    codes, [host] = run(job, 1, image, tmp_path / "hosts")
    assert codes == [0], show([host])
    assert "echelon: stopped by budget.max_usd=1 at step" in host.log
    assert host.failure is None
    check_model(host, 6.0)


def test_a_channel_missing_on_one_host_is_the_reported_cause(submit, image, tmp_path):
    job = submit(2)
    without = {name: path for name, path in job.channels.items() if name != "train"}
    codes, hosts = run(job, 2, image, tmp_path / "hosts", channels=[job.channels, without])
    assert codes == [1, 2], show(hosts)
    channel = "/opt/ml/input/data/train"
    said = f"data.train.0.path={channel}/text.txt: there is no {channel} in the container of algo-2; "
    assert hosts[1].failure.startswith(said)
    assert "stopped by SIGTERM" in hosts[0].failure


def test_a_dead_rank_is_the_reported_cause_on_every_host(submit, image, tmp_path):
    job = submit(2, fault={"max_restarts": 0})

    def kill(hosts):
        await_step(hosts, 2)
        processes = psutil.Process(hosts[1].process.pid).children(recursive=True)
        [worker] = [each for each in processes if each.environ().get("RANK") == "1"]
        worker.kill()

    codes, hosts = run(job, 2, image, tmp_path / "hosts", meanwhile=kill)
    assert codes == [1, 1], show(hosts)
    for host in hosts:
        assert "rank 1 (pid " in host.failure and "was killed by SIGKILL" in host.failure


def test_an_invalid_recipe_is_the_reported_cause(submit, image, tmp_path):
    job = submit(1)
    recipe = job.channels["echelon"] / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 150", "steps: 'many'"))
    codes, [host] = run(job, 1, image, tmp_path / "hosts")
    assert codes == [2]
    assert "train.steps" in host.failure and "many" in host.failure


def test_a_sweep_runs_the_container_of_every_trial(image, tmp_path, monkeypatch):
    """`echelon sweep --to sagemaker` is killed while its jobs run, and the same command takes them over."""
    jobs = {}
    with machines(2, tmp_path) as network:
        free = queue.SimpleQueue()
        for machine in network:
            free.put(machine)

        def work(job):
            place, machine = tmp_path / "hosts" / job.name, free.get()
            channels = download_channels(job.request, place / "s3")
            [host] = start_hosts([machine], job.request, [channels], image, place)
            jobs[job.name] = host
            while (code := host.process.poll()) is None:
                time.sleep(0.2)
            upload_checkpoints(host, job.request)
            free.put(machine)
            return f"AlgorithmError: {host.failure}, exit code: {code}" if code else None

        server = TrainingServer(work)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "text.txt").write_text(TEXT)
        recipe = RECIPE | {"train": RECIPE["train"] | {"steps": 6, "eval_every": 3}, "fault": {"max_restarts": 0}}
        recipe |= {"launch": {"nproc_per_node": 1, "sagemaker": SETTINGS}}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        search = {"optim.learning_rate": [1e-3, 1e-2, 1e30]}
        sweep = {"sweep": {"name": "lr", "sampler": "grid", "parallel": 2}, "recipe": "recipe.yaml", "search": search}
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
        process = start("sweep", "sweep.yaml", "--to", "sagemaker", cwd=tmp_path)
        wait_until(lambda: len(jobs) >= 2, SECONDS, process)
        process.kill()
        process.communicate()
        ending = finish(start("sweep", "sweep.yaml", "--to", "sagemaker", cwd=tmp_path), 2 * SECONDS)
        server.stop()
    assert ending.code == 0, ending
    assert len(server.jobs) == 3 and server.most_at_once == 2
    trials = {
        each["parameters"]["optim.learning_rate"]: each
        for each in json.loads((tmp_path / "sweeps/lr/results.json").read_text())["trials"]
    }
    assert [trials[rate]["state"] for rate in (1e-3, 1e-2, 1e30)] == ["done", "done", "failed"]
    assert "finite" in trials[1e30]["message"]
    for rate in (1e-3, 1e-2):
        name = Path(trials[rate]["run"]).name
        [host] = [host for job, host in jobs.items() if job.startswith(f"lr-{name}-1-")]
        rows = (host.ml / "checkpoints" / f"lr-{name}" / "metrics.jsonl").read_text().splitlines()
        losses = [row["loss"] for row in map(json.loads, rows) if row["kind"] == "eval"]
        assert trials[rate]["value"] == losses[-1]


def test_a_gpu_instance_without_gpus_is_refused_unless_the_recipe_allows_it(submit, image, tmp_path):
    """The machines of the tests have no GPUs; the request, and so the container, names a type that has some."""
    on_gpus = {"launch": {"nproc_per_node": 1, "sagemaker": SETTINGS | {"instance_type": "ml.g5.xlarge"}}}
    job = submit(2, **on_gpus)
    codes, hosts = run(job, 2, image, tmp_path / "refused")
    assert 2 in codes and set(codes) <= {1, 2}, show(hosts)  # 1: stopped by the platform when the other one had ended
    refused = hosts[codes.index(2)]
    said = f"launch.sagemaker.instance_type=ml.g5.xlarge: 1 GPU was asked for on {refused.name}, but torch sees none"
    assert refused.failure.startswith(said)
    assert not refused.checkpoints and "container: " not in refused.log
    shutil.rmtree("jobs")
    train = {"train": RECIPE["train"] | {"steps": 3, "allow_cpu": True}}
    job = submit(1, **on_gpus, **train)
    codes, hosts = run(job, 1, image, tmp_path / "allowed")
    assert codes == [0], show(hosts)
    assert "train.allow_cpu=true: training on the CPU; launch.sagemaker.instance_type=ml.g5.xlarge" in hosts[0].log
    assert (hosts[0].ml / "model" / "config.json").exists()


def upload_checkpoints(host, request):
    """Copy the files of the run folders to S3, as SageMaker does by the end of a job."""
    s3 = boto3.client("s3")
    bucket, _, prefix = request["CheckpointConfig"]["S3Uri"].removeprefix("s3://").partition("/")
    for path in (host.ml / "checkpoints").glob("*/*.*"):
        if path.is_file() and not path.name.startswith("."):
            key = f"{prefix}/{path.relative_to(host.ml / 'checkpoints')}"
            s3.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
