"""Sweeps as SageMaker jobs, over HTTP: the jobs' machines write a known loss to S3 instead of training."""

import json
import threading
from pathlib import Path

import boto3
import pytest
import yaml

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.job import Launcher
from echelon.recipe.load import load_recipe
from echelon.tools.sweep import conduct
from echelon.tools.sweep.conduct import StopWord, check_sweep, run_sweep, share_slots
from tests.log_lines import LogLines
from tests.object_server import BUCKET
from tests.training_service import TrainingServer
from tests.unit.recipe_samples import SMALL
from tests.unit.tools.sweep.sweep_jobs import GRID, loss_of

LAUNCH = f"""
launch:
  to: sagemaker
  nproc_per_node: 1
  sagemaker: {{role: arn:aws:iam::111122223333:role/t, region: us-east-1, bucket: s3://{BUCKET}/team,
              instance_type: ml.g5.xlarge}}
budget: {{usd_per_hour: 2}}
"""


class Killed(BaseException):
    """Emulates SIGKILL to the sweep."""


class Machines:
    """The machines of all jobs, which train as soon as `may_train`."""

    def __init__(self):
        self.trained = []
        self.may_train = lambda: True
        self.over = threading.Event()

    def __call__(self, job):
        s3 = boto3.client("s3")
        address = job.request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
        key = f"{address.removeprefix(f's3://{BUCKET}/')}recipe.yaml"
        Path(f"{job.name}.yaml").write_bytes(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        recipe, _ = load_recipe(Path(f"{job.name}.yaml"))
        assert str(recipe.run.dir) == f"/opt/ml/checkpoints/{recipe.run.name}"
        while not self.may_train():
            if job.stop.is_set() or self.over.wait(0.02):
                return "stopped by SIGTERM"
        if recipe.optim.learning_rate == 1e-2:
            return "AlgorithmError: train.loss is not finite\nat step 3, exit code: 1"
        self.trained.append(recipe.run.name)
        rows = [{"kind": "eval", "step": 10, "loss": loss_of(recipe)}]
        prefix = job.request["CheckpointConfig"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
        for name in ("metrics.jsonl", "checkpoints/step-00000010/weights", "not-of-a-run"):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{recipe.run.name}/{name}", Body=text.encode())
        return None


@pytest.fixture
def machines():
    return Machines()


@pytest.fixture
def serve(tmp_path, monkeypatch, machines):
    """Start the service; sweeps look for the ends of jobs all the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Launcher, "look_seconds", 0.02)
    monkeypatch.setattr(conduct, "draw_plots", lambda *rest: ([], []))
    (tmp_path / "text.txt").write_text("hello")
    servers = []

    def start(**settings):
        servers.append(TrainingServer(machines, **settings))
        for name, value in servers[0].environment.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        return servers[0]

    yield start
    machines.over.set()
    for server in servers:
        server.stop()


def sweep(stop=None, text=SMALL + LAUNCH, **settings):
    Path("recipe.yaml").write_text(text)
    keys = {"name": "lr", "sampler": "grid", "parallel": 2, **settings}
    Path("sweep.yaml").write_text(yaml.safe_dump({"sweep": keys, "recipe": "recipe.yaml", "search": GRID}))
    lines = LogLines().lines
    checked = check_sweep(Path("sweep.yaml"))
    ending, results = run_sweep(checked, share_slots(checked), stop or StopWord())
    return ending, results, lines


def test_trials_are_jobs_and_their_results_come_from_s3(serve, machines):
    server = serve()
    machines.may_train = lambda: len(server.jobs) > 1
    ending, results, lines = sweep(max_failures=9)
    assert ending.state == "done" and len(server.jobs) == 6 and server.most_at_once == 2
    done = {each["trial"]: each["value"] for each in results["trials"] if each["state"] == "done"}
    failed = [each for each in results["trials"] if each["state"] == "failed"]
    # By hand: (log10(lr) + 3)^2 + weight_decay.
    assert sorted(done.values()) == pytest.approx([0.0, 0.1, 1.0, 1.1])
    assert results["trials"][0]["parameters"] == {"optim.learning_rate": 1e-3, "optim.weight_decay": 0.0}
    assert len(failed) == 2 and all("train.loss is not finite" in each["message"] for each in failed)
    addresses = {job.request["CheckpointConfig"]["S3Uri"] for job in server.jobs.values()}
    assert len(addresses) == 6
    here = Path(results["trials"][0]["run"])
    assert [path.name for path in here.iterdir()] == ["metrics.jsonl"]  # no weights, nothing else
    # Six jobs of a tenth of an hour at $2.
    assert "cost: $1.20 billed for 6 jobs" in lines


@pytest.mark.slow
def test_a_job_that_was_submitted_but_not_recorded_is_found(serve, machines, monkeypatch):
    server = serve()

    def kill(job, submitted):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("echelon.launch.records.record_job", kill)
        with pytest.raises(Killed):
            sweep(max_failures=9)
    assert len(server.jobs) == 1 and not list(Path("sweeps/lr/jobs").glob("*/job.json"))
    ending, _, _ = sweep(max_failures=9)
    assert ending.state == "done" and len(server.jobs) == 6
    assert sorted(machines.trained) == sorted(set(machines.trained)) and len(machines.trained) == 4


@pytest.mark.slow
def test_a_lost_answer_does_not_start_a_second_job(serve, machines):
    server = serve(lost=2)
    ending, _, _ = sweep(max_failures=9)
    assert ending.state == "done" and len(server.jobs) == 6


@pytest.mark.slow
def test_a_quota_makes_trials_wait(serve, machines):
    server = serve(quota=1)
    machines.may_train = lambda: server.refused > 0
    ending, results, lines = sweep(max_failures=9)
    assert ending.state == "done" and server.most_at_once == 1
    assert [each["state"] for each in results["trials"]].count("done") == 4
    assert any("waits for another one to end: AWS refused creating the training job" in line for line in lines)


@pytest.mark.slow
def test_a_stopped_sweep_stops_its_jobs_and_the_next_resumes_them(serve, machines):
    server = serve()
    machines.may_train = lambda: False
    stop = StopWord()

    def ask():
        while len(server.jobs) < 2:
            pass
        stop.name = "SIGINT"

    threading.Thread(target=ask, daemon=True).start()
    ending, _, _ = sweep(stop, max_failures=9)
    assert ending.state == "stopped" and "its trials have saved" in ending.message
    assert {job.state for job in server.jobs.values()} == {"Stopped"}
    machines.may_train = lambda: True
    ending, _, _ = sweep(max_failures=9)
    assert ending.state == "done" and len(server.jobs) == 8  # two were started again, from the same checkpoints
    addresses = [job.request["CheckpointConfig"]["S3Uri"] for job in server.jobs.values()]
    assert len(set(addresses)) == 6


@pytest.mark.slow
def test_a_service_that_does_not_answer_fails_no_trial(serve, machines):
    server = serve()
    server.stop()
    with pytest.raises(LaunchError):
        sweep()
    server.start()
    assert sweep(max_failures=9)[0].state == "done"


@pytest.mark.slow
def test_the_target_of_a_sweep_in_s3_is_fixed(serve, machines):
    serve()
    sweep(max_failures=9)
    with pytest.raises(ConfigError, match=r"launch\.to: sagemaker -> slurm"):
        sweep(text=SMALL + LAUNCH.replace("to: sagemaker", "to: slurm"))
