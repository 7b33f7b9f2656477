"""Runs with trackers: the stores after a crash and a resume, and a server that is killed during a run."""

import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from echelon.ground.sockets import find_free_port
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import await_line, finish, read_lines, start, write_recipe
from tests.waiting import wait_until

pytestmark = pytest.mark.dist

SECRET = "hf_AbCdEf0123456789"


@pytest.fixture
def echelon(echelon, monkeypatch):
    """The command, with secrets in its environment."""
    for name in ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return echelon


def open_client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def read_points(client, run_id, key):
    return [(point.step, point.value) for point in client.get_metric_history(run_id, key)]


def expected_points(run, kind, key):
    return [(row["step"], row[key]) for row in read_lines(run.metrics_path) if row["kind"] == kind]


@pytest.mark.slow
def test_one_tracking_run_across_a_resume_with_a_registered_model(echelon, tmp_path):
    """Step 4 is lost and repeated by the resumed run; then a tracker is added to the finished run."""
    # The learning rate must not depend on the number of steps.
    flat = {"learning_rate": 1e-3, "min_learning_rate_fraction": 1.0}
    write_recipe(
        tmp_path, train={"steps": 4, "eval_every": 2}, optim=flat, track=["mlflow"], mlflow={"log_model": "tiny"}
    )
    run = RunFolder(Path("runs/tiny"))
    echelon("train", "recipe.json", "--nproc", "1").succeeded()
    os.truncate(run.checkpoints_dir / "step-00000004" / ".metadata", 10)
    ending = echelon("train", "recipe.json", "train.steps=7", "--nproc", "1")
    assert ending.code == 0 and "Resuming from step-00000003" in ending.out
    assert "track: mlflow keeps the values of steps 4 to 4 from" in ending.out
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert f"to view it: mlflow ui --backend-store-uri {uri}" in ending.out

    client = open_client(uri)
    [found] = client.search_runs([client.get_experiment_by_name("echelon").experiment_id])
    for kind in ("train", "eval"):
        assert read_points(client, found.info.run_id, f"{kind}/loss") == expected_points(run, kind, "loss")
    assert found.info.status == "FINISHED"
    check_model(client, found.info.run_id)
    # Nothing is missing, so nothing is opened.
    assert "track:" not in echelon("train", "recipe.json", "train.steps=7").out
    ending = echelon(
        "train", "recipe.json", "train.steps=7", "track=[mlflow, wandb]", "launch.env={WANDB_MODE: offline}"
    )
    assert ending.code == 0 and "track: wandb run" in ending.out
    assert list((run.path / "wandb").glob("offline-run-*/*.wandb"))
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def check_model(client, run_id):
    """Check that each end of the run has a model version, and that the newest one equals the last checkpoint."""
    from tests.families import load_run_model

    versions = sorted(client.search_model_versions("name = 'tiny'"), key=lambda each: int(each.version))
    assert [version.source for version in versions] == [f"runs:/{run_id}/model/step-{n:08d}" for n in (4, 7)]
    path = client.download_artifacts(run_id, versions[-1].source.removeprefix(f"runs:/{run_id}/"))
    stored = AutoModelForCausalLM.from_pretrained(path).state_dict()
    live = load_run_model(Path("runs/tiny"), torch.device("cpu")).state_dict()
    assert all(torch.equal(stored[name], live[name]) for name in live)


@pytest.mark.slow
def test_an_absent_server_does_not_stop_training(echelon, tmp_path):
    """The address contains a password, which is never shown."""
    write_recipe(tmp_path, train={"steps": 3}, track=["mlflow"])
    address = f"http://me:{SECRET}@127.0.0.1:{find_free_port('127.0.0.1')}"
    ending = finish(start("train", "recipe.json", "--nproc", "1", MLFLOW_TRACKING_URI=address)).succeeded()
    [line] = [line for line in ending.out.splitlines() if "mlflow fails" in line]
    assert "training continues" in line and "***@127.0.0.1" in line
    assert "track: mlflow is missing 4 of 4 rows; run the same command again to send them" in ending.out
    assert len(read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")) == 4
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert SECRET not in ending.out + ending.err
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_failed_run_reports_its_cause_despite_its_tracker(echelon, tmp_path):
    write_recipe(tmp_path, train={"steps": 30}, optim={"learning_rate": 1e30, "max_grad_norm": None}, track=["mlflow"])
    ending = echelon("train", "recipe.json", "--nproc", "2")
    assert ending.code == 1 and "both must be finite" in ending.err, ending


class MlflowServer:
    """A real `mlflow server` on a SQLite store, which can be killed and started again."""

    def __init__(self, folder, store="server.db"):
        self._folder, self._store, self._port = folder, folder / store, find_free_port("127.0.0.1")
        self.uri = f"http://127.0.0.1:{self._port}"

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self._port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self._store}"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        with (self._folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_until(self._is_healthy, 300, self._process)

    def kill(self):
        """SIGKILL, to it and all its workers."""
        with suppress(ProcessLookupError):  # it was killed before
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_healthy(self):
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=1).status == 200
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture
def server(tmp_path):
    server = MlflowServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("returns", [True, False], ids=["comes back", "stays away"])
def test_killing_the_server_during_a_run_loses_nothing(echelon, tmp_path, server, returns):
    """Rank 1 is suspended meanwhile, so that the run waits on a machine of any speed."""
    write_recipe(
        tmp_path, train={"steps": 1200, "log_every": 100}, checkpoint={"every": 600}, track=["mlflow"],
        mlflow={"tracking_uri": server.uri, "log_model": True},
    )  # fmt: skip
    run = RunFolder(tmp_path / "runs" / "tiny")
    process = start("train", "recipe.json", "--nproc", "2")
    await_line(run.metrics_path, '"step": 2,', process, seconds=300)
    os.kill(run.read_pids()[1], signal.SIGSTOP)
    await_line(run.path / "trackers" / "mlflow.json", '"train"', process, seconds=300)
    server.kill()
    assert len(read_lines(run.metrics_path)) < 1200, "the run was over before its rank was suspended"
    os.kill(run.read_pids()[1], signal.SIGCONT)
    if returns:
        await_line(run.metrics_path, '"step": 100,', process, seconds=300)
        os.kill(run.read_pids()[1], signal.SIGSTOP)  # however long the server takes to restart
        server.start()
        os.kill(run.read_pids()[1], signal.SIGCONT)
    ending = finish(process, 500).succeeded()
    assert [row["step"] for row in read_lines(run.metrics_path) if row["kind"] == "train"] == list(range(1, 1201))
    if not returns:
        assert "track: mlflow is missing" in ending.out and "run the same command again to send them" in ending.out
        server.start()
    # Also if the server is too slow to accept all rows before the run ends.
    if "track: mlflow is missing" in ending.out:
        ending = echelon("train", "recipe.json")
    assert ending.code == 0 and "track: mlflow is missing" not in ending.out, ending

    client = open_client(server.uri)
    [found] = client.search_runs([client.get_experiment_by_name("echelon").experiment_id])
    for kind in ("train", "eval"):
        assert read_points(client, found.info.run_id, f"{kind}/loss") == expected_points(run, kind, "loss")
    assert found.info.status == "FINISHED"
    assert "model" in {each.path for each in client.list_artifacts(found.info.run_id)}


# Every chart on the page: its title and the points of its curve.
_READ_CHARTS = """() => Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map(chart => {
    const title = chart.closest('[data-testid="experiment-view-compare-runs-card"]').innerText.match(/\\((.*)\\)/)[1];
    const curve = chart.data[0];
    return [title, Array.from(curve.x).map((step, index) => [step, curve.y[index]])];
}))"""


@pytest.mark.slow
def test_a_browser_draws_the_curves(echelon, tmp_path):
    """MLflow's UI shows the store that was written without a server."""
    browsers = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium or Chrome")
    write_recipe(tmp_path, train={"steps": 8, "eval_every": 2}, track=["mlflow"])
    assert echelon("train", "recipe.json", "--nproc", "1").code == 0
    run, server = RunFolder(tmp_path / "runs" / "tiny"), MlflowServer(tmp_path, "runs/mlflow.db")
    client = open_client(f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("echelon").experiment_id
    [found] = client.search_runs([experiment])
    server.start()
    try:
        with browsers.sync_playwright() as playwright:
            page = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]).new_page()
            page.set_viewport_size({"width": 1400, "height": 6000})  # a chart is drawn when it scrolls into view
            page.goto(f"{server.uri}/#/experiments/{experiment}/runs/{found.info.run_id}/model-metrics")
            page.wait_for_function(
                f"names => {{ const charts = ({_READ_CHARTS})(); return names.every(name => charts[name]?.length) }}",
                arg=["train/loss", "eval/loss"],
                timeout=60_000,
            )
            charts = page.evaluate(_READ_CHARTS)
    finally:
        server.kill()
    for kind in ("train", "eval"):
        assert [tuple(point) for point in charts[f"{kind}/loss"]] == expected_points(run, kind, "loss")
