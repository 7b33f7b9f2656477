"""MLflow: a tracking server, or by default a SQLite file next to the run folder."""

import json
import logging
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from echelon.ground.redaction import redact, redact_text
from echelon.ground.variables import read_environment, set_default_variables
from echelon.recipe.document import Recipe
from echelon.recipe.render import recipe_mapping
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers.tracker import Opened, scalars

# Read when mlflow is imported. By default it would retry for minutes; the forwarder has its own retries.
set_default_variables(
    {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }
)

from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run  # noqa: E402
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor  # noqa: E402

KEY_TAG = "echelon.run_key"
STEP_TAG = "echelon.step"
# Without this tag MLflow's UI shows an experiment without traces as one of evaluations.
_KIND = {"mlflow.experimentKind": "custom_model_development"}
# https://mlflow.org/docs/latest/api_reference/rest-api.html#request-limits
MAX_METRICS, MAX_PARAMS, MAX_KEY, MAX_VALUE = 1000, 100, 250, 6000
_FORBIDDEN = re.compile(r"[^\w\-. :/]")


def find_tracking_uri(recipe: Recipe, folder: Path) -> str:
    """Return `mlflow.tracking_uri`, else MLFLOW_TRACKING_URI, else the SQLite file next to the run folder."""
    uri = recipe.mlflow.tracking_uri or read_environment().get("MLFLOW_TRACKING_URI")
    return uri or f"sqlite:///{folder.absolute().parent / 'mlflow.db'}"


class Mlflow:
    """An MLflow run, identified by a tag with the run's key.

    Each row's step is also a metric, `train/step`. Its last value shows which rows the store has, so that a batch is
    not stored twice if the response was lost.
    """

    name = "mlflow"
    is_store = True

    def __init__(self, recipe: Recipe, folder: RunFolder, resumed_step: int) -> None:
        # Its log lines are not needed, and may contain the password of an address.
        logging.getLogger("mlflow").setLevel(logging.CRITICAL + 1)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._recipe = recipe
        self._folder = folder
        self._uri = find_tracking_uri(recipe, folder.path)
        self._monitor: SystemMetricsMonitor | None = None

    def open(self, run_key: str, given: Mapping[str, int]) -> Opened:
        """Find or create the run, and log its parameters, dataset and files of the run folder."""
        self._client = MlflowClient(self._uri)
        experiment = self._find_experiment()
        run = self._find_run(experiment, run_key)
        self._run_id = run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_params(set(run.data.params))
        self._log_data()
        folder = self._folder
        for path in (folder.recipe_path, folder.plan_path, folder.estimate_path, folder.environment_path):
            self._client.log_artifact(self._run_id, str(path))
        variables = {**read_environment(), **self._recipe.launch.env}
        if variables.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true").lower() not in ("false", "0"):
            self._start_monitor()
        steps = {name.removesuffix("/step"): int(value) for name, value in run.data.metrics.items() if "/step" in name}
        return Opened(defaultdict(int, steps), self._describe(experiment))

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Send every number of the rows, in as few requests as MLflow's limit allows."""
        now = time.time_ns() // 10**6
        batch: list[Metric] = []
        for row in rows:
            numbers = {**scalars(row), f"{row['kind']}/step": row["step"]}
            metrics = [Metric(_legal(key), float(value), now, row["step"]) for key, value in numbers.items()]
            if len(batch) + len(metrics) > MAX_METRICS:
                self._client.log_batch(self._run_id, metrics=batch)
                batch = []
            batch += metrics
        self._client.log_batch(self._run_id, metrics=batch)

    def finish(self, done: bool) -> None:
        """Log metrics.jsonl, and the model if the recipe says so, and close the run."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        if done:
            self._client.log_artifact(self._run_id, str(self._folder.metrics_path))
            if self._recipe.mlflow.log_model:
                self._log_model()
        self._client.set_terminated(self._run_id, "FINISHED" if done else "FAILED")

    def _find_experiment(self) -> str:
        name = self._recipe.mlflow.experiment
        if (experiment := self._client.get_experiment_by_name(name)) is not None:
            return str(experiment.experiment_id)
        # By default MLflow would put a local store's files into ./mlruns of the current folder.
        database = self._uri.removeprefix("sqlite:///")
        artifacts = str(Path(database).absolute().parent / "mlartifacts") if database != self._uri else None
        return str(self._client.create_experiment(name, artifact_location=artifacts, tags=_KIND))

    def _find_run(self, experiment: str, run_key: str) -> Run:
        if runs := self._client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{run_key}'"):
            return runs[0]
        tags = {KEY_TAG: run_key, "mlflow.source.name": "echelon", "mlflow.source.type": "LOCAL"}
        return self._client.create_run(experiment, tags=tags, run_name=self._recipe.run.name)

    def _log_params(self, known: set[str]) -> None:
        """Log the keys of the recipe. MLflow's parameters cannot change: those of the first start stay."""
        params = [Param(key, value) for key, value in flatten(redact(recipe_mapping(self._recipe))) if key not in known]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])

    def _log_data(self) -> None:
        """Log the training text as a dataset of the run, with the digest of its tokens."""
        if (digest := self._folder.text.read_data_digest()) is None:
            return
        sources = json.dumps(redact(recipe_mapping(self._recipe))["data"]["train"])
        dataset = Dataset(self._recipe.run.name, digest[:36], "local", sources)
        context = [InputTag("mlflow.data.context", "training")]
        self._client.log_inputs(self._run_id, [DatasetInput(dataset, context)])
        self._client.set_tag(self._run_id, "echelon.data_digest", digest)

    def _start_monitor(self) -> None:
        """Start MLflow's own thread, which stops permanently at its first failure."""
        if self._monitor is not None:
            self._monitor.finish()
        self._monitor = SystemMetricsMonitor(self._run_id, resume_logging=True, tracking_uri=self._uri)
        self._monitor.start()

    def _log_model(self) -> None:
        """Export the newest checkpoint, store it as an artifact of its step, and register it once."""
        from echelon.learn.checkpoint.export import export_run

        step = self._folder.newest_step()
        artifact = f"model/step-{step:08d}"
        # A name that the checkpoint store removes if a killed process leaves it behind.
        exported = self._folder.checkpoints_dir / ".writing-export"
        shutil.rmtree(exported, ignore_errors=True)
        try:
            self._client.log_artifacts(self._run_id, str(export_run(self._folder.path, exported)), artifact)
        finally:
            shutil.rmtree(exported, ignore_errors=True)
        if isinstance(name := self._recipe.mlflow.log_model, str):
            self._register(name, f"runs:/{self._run_id}/{artifact}")

    def _register(self, name: str, source: str) -> None:
        if not self._client.search_registered_models(f"name = '{name}'"):
            self._client.create_registered_model(name)
        versions = self._client.search_model_versions(f"name = '{name}' and run_id = '{self._run_id}'")
        if all(version.tags.get(STEP_TAG) != source for version in versions):
            self._client.create_model_version(name, source, self._run_id, tags={STEP_TAG: source})

    def _describe(self, experiment: str) -> str:
        where = redact_text(self._uri)
        if self._uri.startswith("http"):
            return f"mlflow run {self._run_id} at {where.rstrip('/')}/#/experiments/{experiment}/runs/{self._run_id}"
        return f"mlflow run {self._run_id} in {where}; to view it: mlflow ui --backend-store-uri {where}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as text) of a nested mapping, truncated to MLflow's limits for parameters."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield _legal(name)[:MAX_KEY], text[:MAX_VALUE]


def _legal(key: str) -> str:
    """Replace the characters that MLflow does not allow in a name."""
    return _FORBIDDEN.sub("_", key)
