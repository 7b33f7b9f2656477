"""Trackers such as TensorBoard and MLflow, each fed from metrics.jsonl by a forwarder. Only on rank 0."""

from echelon.ground.errors import ConfigError
from echelon.ground.extensions import find_named
from echelon.ground.extras import find_missing_package, require_extra
from echelon.recipe.document import Recipe
from echelon.recipe.names import TRACKERS
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers.forwarder import ForwarderState, MetricsForwarder
from echelon.run.journal.trackers.tracker import Tracker, has_login

__all__ = ["MetricsForwarder", "catch_up", "check_trackers", "start_trackers"]


def check_trackers(recipe: Recipe) -> None:
    """Raise ConfigError for a tracker that cannot work: a missing package, a password in an address, no key for W&B.

    Called before any text is read or worker started; makes no request to a server.
    """
    for name in recipe.track:
        if name in TRACKERS.own:
            require_extra(f"track: {name}", name, "or remove it from track")
        else:
            find_named("track", name, TRACKERS, Tracker)
    if recipe.mlflow.tracking_uri is not None and has_login(recipe.mlflow.tracking_uri):
        raise ConfigError(
            "mlflow.tracking_uri contains a user name or password, and the run folder must not store secrets; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment instead, or the whole address "
            "as MLFLOW_TRACKING_URI."
        )
    if "wandb" in recipe.track:
        _check_wandb_key(recipe)


def _check_wandb_key(recipe: Recipe) -> None:
    """Refuse online W&B without a key: W&B itself would prompt at the terminal, or fail after training has begun."""
    import wandb
    from wandb.sdk.lib import wbauth

    settings = wandb.Settings()
    if recipe.launch.env.get("WANDB_MODE", settings.mode) != "online":
        return
    if (
        wbauth.authenticate_session(host=settings.base_url, source="echelon", prompt=False, update_session=False)
        is None
    ):
        raise ConfigError(
            f"track: wandb has no key for {settings.base_url}; run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline in the environment or in launch.env to write to the run folder."
        )


def start_trackers(recipe: Recipe, folder: RunFolder, resumed_step: int) -> list[MetricsForwarder]:
    """Start a forwarder for each tracker in `track`. `resumed_step`: step of the checkpoint, 0 without one."""
    return [_start(name, recipe, folder, resumed_step) for name in recipe.track]


def catch_up(recipe: Recipe, folder: RunFolder) -> None:
    """Send missing rows to the trackers of a finished run: after an outage, or all rows for a new tracker."""
    behind = [name for name in recipe.track if not ForwarderState.read(folder.tracker_path(name)).complete]
    names = [name for name in behind if find_missing_package(name) is not None or TRACKERS[name].is_store]
    if not names:
        return
    check_trackers(recipe)
    folder.lock()
    try:
        forwarders = [_start(name, recipe, folder, None) for name in names]
        for forwarder in forwarders:
            forwarder.close(done=True)
    finally:
        folder.unlock()


def _start(name: str, recipe: Recipe, folder: RunFolder, resumed_step: int | None) -> MetricsForwarder:
    # Its package is imported here, in the main thread: concurrent imports can fail.
    tracker: Tracker = TRACKERS[name](recipe, folder, resumed_step or 0)
    forwarder = MetricsForwarder(tracker, folder.tracker_path(name), folder.metrics_path, resumed_step)
    forwarder.start()
    return forwarder
