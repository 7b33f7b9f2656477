"""Trackers with real stores: MLflow's SQLite, read by its client, and W&B's offline files."""

import json
import struct
import sys
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.recipe.render import render_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers import check_trackers
from tests.unit.recipe_samples import SMALL, load_text

SECRET = "hf_AbCdEf0123456789"
LONG = "x" * 7000


def build_run(folder, *overrides):
    """A run folder in the state before the first step of `echelon train`, and its recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe, _ = load_text(folder, SMALL, f"run.dir={folder / 'runs' / 'small'}", *overrides)
    run = RunFolder(recipe.run.dir)
    run.create()
    run.recipe_path.write_text(render_recipe(recipe))
    for path in (run.plan_path, run.estimate_path, run.environment_path):
        path.write_text("{}")
    run.text.write_prepared_path(folder / "prepared", digest="0123456789abcdef0123456789abcdef")
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in train_rows(1, 5)))
    return recipe, run


def train_rows(start, stop):
    return [
        {"kind": "train", "step": step, "loss": 1 / step, "grad_norm": None, "batch_hash": "0a", "skipped": False}
        for step in range(start, stop)
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One folder of runs with a shared SQLite store, because creating its tables takes seconds."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def no_store(monkeypatch):
    """An environment without a configured store."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_mlflow_stores_the_run_once_however_often_it_is_opened(store, no_store):
    from mlflow import MlflowClient

    from echelon.run.journal.trackers.mlflow import Mlflow

    overrides = [f"model.config.note={LONG}", f"model.config.hf_token={SECRET}"]
    recipe, run = build_run(store, *overrides, "launch.env={MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING: 'false'}")
    first = Mlflow(recipe, run, 0)
    opened = first.open("key-1", {})
    assert opened.held["train"] == 0 and f"sqlite:///{store}/runs/mlflow.db" in opened.where
    # More rows than fit in a request, a row with sets, and a batch that is sent twice after a lost response.
    first.send(train_rows(1, 700))
    sets = {"sets": {"code": {"loss": 2.5}}}
    first.send([{"kind": "eval", "step": 699, "loss": 3.0, **sets}])

    longer, _ = build_run(
        store, *overrides, "launch.env={MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING: 'false'}", "train.steps=20"
    )
    second = Mlflow(longer, run, 0)
    held = second.open("key-1", {}).held
    assert (held["train"], held["eval"], held["other"]) == (699, 699, 0)
    second.send(train_rows(700, 703))
    second.finish(done=True)

    client = MlflowClient(f"sqlite:///{store}/runs/mlflow.db")
    [found] = client.search_runs([client.get_experiment_by_name("echelon").experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(step, 1 / step) for step in range(1, 703)]
    assert found.data.metrics["eval/code/loss"] == 2.5 and "train/grad_norm" not in found.data.metrics
    assert (found.info.status, found.info.run_name) == ("FINISHED", recipe.run.name)
    params = found.data.params
    assert params["model.config.hf_token"] == "***" and params["model.config.note"] == LONG[:6000]
    assert params["train.steps"] == str(recipe.train.steps)  # MLflow parameters cannot change
    [dataset] = found.inputs.dataset_inputs
    assert dataset.dataset.digest == found.data.tags["echelon.data_digest"] == run.text.read_data_digest()
    assert {each.path for each in client.list_artifacts(found.info.run_id)} == {
        "recipe.yaml", "plan.json", "estimate.json", "environment.json", "metrics.jsonl",
    }  # fmt: skip
    assert SECRET.encode() not in (store / "runs" / "mlflow.db").read_bytes()


def test_another_key_is_another_run(store, no_store):
    from mlflow import MlflowClient

    from echelon.run.journal.trackers.mlflow import Mlflow

    recipe, run = build_run(store, "launch.env={MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING: 'false'}")
    tracker = Mlflow(recipe, run, 0)
    assert tracker.open("key-2", {"train": 5}).held["train"] == 0  # the store decides, not the ledger
    tracker.finish(done=False)
    client = MlflowClient(f"sqlite:///{store}/runs/mlflow.db")
    [experiment] = client.search_experiments(filter_string="name != 'Default'")
    newest = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])[0]
    assert newest.info.status == "FAILED"


def test_the_tracking_uri_comes_from_recipe_environment_or_run_folder(tmp_path, monkeypatch):
    from echelon.run.journal.trackers.mlflow import find_tracking_uri

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://one:1")
    recipe, run = build_run(tmp_path)
    assert find_tracking_uri(recipe, run.path) == "http://one:1"
    recipe, run = build_run(tmp_path, "mlflow.tracking_uri=http://two:2")
    assert find_tracking_uri(recipe, run.path) == "http://two:2"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    recipe, run = build_run(tmp_path)
    assert find_tracking_uri(recipe, run.path) == f"sqlite:///{tmp_path}/runs/mlflow.db"


def test_parameters_have_names_and_lengths_that_mlflow_accepts():
    from echelon.run.journal.trackers.mlflow import flatten

    values = {"a": {"b": [1, "x"], "empty": {}}, r"layers\.[0-9]+": 2.0, "n" * 300: None, "t": True}
    assert list(flatten(values)) == [
        ("a.b", '[1, "x"]'), ("a.empty", "{}"), ("layers_._0-9__", "2.0"), ("n" * 250, "null"), ("t", "true"),
    ]  # fmt: skip


@pytest.mark.slow
def test_wandb_keeps_one_run_in_files_across_resumes(tmp_path, no_store):
    from echelon.run.journal.trackers.wandb import WeightsAndBiases

    recipe, run = build_run(
        tmp_path, "launch.env={WANDB_MODE: offline, WANDB_PROJECT: mine}", f"model.config.hf_token={SECRET}"
    )
    first = WeightsAndBiases(recipe, run, 0)
    assert first.open("key-3", {}).held["train"] == 0
    first.send([*train_rows(1, 4), {"kind": "eval", "step": 3, "loss": 5.0}])
    first.finish(done=False)
    second = WeightsAndBiases(recipe, run, 0)
    assert second.open("key-3", {"train": 3, "eval": 3}).held["train"] == 3
    second.send(train_rows(4, 6))
    second.finish(done=True)

    files = sorted((run.path / "wandb").glob("offline-run-*/run-key-3.wandb"))
    records = [record for file in files for record in read_wandb(file)]
    assert [(record.run.run_id, record.run.project) for record in records if record.HasField("run")] == [
        ("key-3", "mine"), ("key-3", "mine"),
    ]  # fmt: skip
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1, 0]
    history = [read_history(record) for record in records if record.HasField("history")]
    assert {row["_step"]: row["train/loss"] for row in history} == {step: 1 / step for step in range(1, 6)}
    assert [row["eval/loss"] for row in history if "eval/loss" in row] == [5.0]
    config = {item.key: item.value_json for record in records if record.HasField("run")
              for item in record.run.config.update}  # fmt: skip
    assert json.loads(config["optim"])["name"] == "adamw"
    assert not [path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def read_wandb(path):
    """Read the records of a .wandb file: a header of 7 bytes, then LevelDB's log format, blocks of 32 KiB in which each
    piece has a checksum, a length and a kind (1 whole, 2 first, 3 middle, 4 last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, payload = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        payload += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield Record.FromString(payload)
            payload = b""


def read_history(record):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["track=[mlflow]", f"mlflow.tracking_uri=http://me:{SECRET}@host"], "MLFLOW_TRACKING_PASSWORD"),
        (["track=[mlflow]", f"mlflow.tracking_uri=https://{SECRET}@host"], "MLFLOW_TRACKING_URI"),
        (["track=[wandb]", "launch.env={WANDB_MODE: online}"], "WANDB_MODE=offline"),
    ],
)
def test_invalid_tracker_settings_are_refused_before_the_start(tmp_path, no_store, monkeypatch, overrides, words):
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    recipe, _ = load_text(tmp_path, SMALL, *overrides)
    with pytest.raises(ConfigError, match=words) as caught:
        check_trackers(recipe)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_refused_with_the_extra_that_installs_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    recipe, _ = load_text(tmp_path, SMALL, f"track=[{name}]")
    with pytest.raises(ConfigError, match=rf"not installed; run pip install '{name}"):
        check_trackers(recipe)


def test_commands_without_tracking_import_no_tracker(tmp_path):
    import subprocess

    code = "import sys, echelon.cli.main, echelon.run.lifecycle.setup; "
    code += "print({'mlflow', 'wandb', 'tensorboard'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[5])
    assert result.stdout.strip() == "set()", result
