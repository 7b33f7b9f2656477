"""What each machine fetches for itself: models of the hub; without a shared folder also data, and rank 0's small files.

All of this happens before there is a process group, over the rendezvous store, so no collective can time out during a
download or tokenization. Rank 0 announces the commits of models and waits for all ranks; the others wait for them.
Machines of a quorum are checked and prepared here too.
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError, EchelonError, LaunchError
from echelon.ground.hosts import HostGroup
from echelon.ground.launch_environment import find_place
from echelon.ground.logs import warnings_only
from echelon.ground.stored import read_text, write_text
from echelon.ground.variables import Place, read_environment
from echelon.learn.checkpoint.given_models import RECORD
from echelon.planner.hardware.detection import detect_launched_cluster
from echelon.planner.replica_limits import refuse_living_on
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.setup import prepare_run
from echelon.run.supervise.outcome import DONE, Outcome, is_final

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_COMMITS, _DONE, _FAILURE = "echelon/hub/commits", "echelon/hub/done", "echelon/hub/failure"
_GONE = "rank 0 ended before the run was prepared; see its message."
_POLL_SECONDS = 0.5
# How long the coordinator of an earlier start may survive.
_PATIENCE_SECONDS = 15.0


def send_run(folder: RunFolder, store: "Store") -> None:
    """On rank 0: publish the files that describe the run to the other machines."""
    files = {path.name: read_text(path) for path in _files(folder) if path.exists()}
    store.set("echelon/files", json.dumps({"files": files, "digest": folder.text.read_data_digest()}))


def receive_run(recipe: Recipe, folder: RunFolder, store: "Store", await_word: Callable[[], bool]) -> bool:
    """On the first rank of another machine: prepare the data here, then create the run folder like rank 0's.

    `recipe` has this machine's copies of hub files. `await_word` waits for rank 0 and returns whether there is anything
    to train, which this returns too. Raises ConfigError if this machine's data differs from rank 0's, and the errors of
    preparing it.
    """
    from echelon.learn.data.prepare import prepare_data

    with warnings_only("echelon.learn.data"):  # rank 0 logs it
        data = prepare_data(recipe)
    if not await_word():
        return False
    sent = json.loads(store.get("echelon/files"))
    if data.content_digest != sent["digest"]:
        raise ConfigError(
            "data.train: the data on this machine differs from that on rank 0's machine; give every "
            "machine the same files, under the same paths."
        )
    folder.create()
    folder.text.write_prepared_path(data.path, data.content_digest)
    for name, text in sent["files"].items():
        write_text(folder.path / name, text)
    return True


def mark_ready(store: "Store", place: Path) -> None:
    """On the first rank of a machine: let its other ranks continue. `place` is the folder of the machine's agent."""
    store.set(f"echelon/ready/{place}", "1")


def await_ready(store: "Store", place: Path) -> None:
    """On the other ranks of a machine: wait for the first one. Raises LaunchError when rank 0 is gone."""
    await_value(store, f"echelon/ready/{place}")


def await_value(store: "Store", key: str) -> bytes:
    """Wait without a timeout for the value of a key. Raises LaunchError when rank 0 is gone."""
    try:
        while not store.check([key]):
            time.sleep(_POLL_SECONDS)
        return store.get(key)
    except RuntimeError as error:
        raise LaunchError(_GONE) from error


def _files(folder: RunFolder) -> list[Path]:
    # The recipe comes last: a folder that has one counts as a run.
    return [
        folder.environment_path,
        folder.estimate_path,
        folder.plan_path,
        folder.hub_path,
        folder.path / RECORD,
        folder.recipe_path,
    ]


def announce_commits(commits: Mapping[str, str], store: "Store") -> None:
    """On rank 0: tell the first rank of every other machine to fetch these commits."""
    store.set(_COMMITS, json.dumps(dict(commits)))


def fetch_announced(recipe: Recipe, store: "Store", has_word: Callable[[], bool]) -> Recipe | None:
    """On every rank but 0: the recipe with this machine's copies, once its first rank has fetched what was announced.

    Ranks that are not the first of their machine get the recipe back at once. None: rank 0's result (`has_word`) came
    first, so there is nothing to train. Raises LaunchError when rank 0 is gone, else like `hub.fetch`; rank 0 is
    informed of the failure.
    """
    from echelon.learn.model.hub import fetch_models, with_copies

    try:
        if find_place().local_rank == 0:
            commits = _await_commits(store, has_word)
            if commits is None:
                return None
            fetch_models(recipe, commits)
            recipe = with_copies(recipe, commits)
        store.add(_DONE, 1)
    except EchelonError as error:
        store.set(_FAILURE, str(error.exit_code))
        raise
    except RuntimeError as error:
        raise LaunchError(_GONE) from error
    return recipe


def _await_commits(store: "Store", has_word: Callable[[], bool]) -> dict[str, str] | None:
    while not store.check([_COMMITS]):
        if has_word():
            return None
        time.sleep(_POLL_SECONDS)
    commits: dict[str, str] = json.loads(store.get(_COMMITS))
    return commits


def await_fetched(store: "Store") -> int | None:
    """On rank 0: wait until every rank has its files; returns the exit code of a rank that failed, else None."""
    while store.add(_DONE, 0) < find_place().world_size - 1:
        if store.check([_FAILURE]):
            return int(store.get(_FAILURE))
        time.sleep(_POLL_SECONDS)
    return None


def check_hosts(recipe: Recipe, group: HostGroup, asked: str) -> None:
    """Raise ConfigError if the machines of a group cannot keep processes that live on. `asked`: the key for that."""
    if group.coordinates is not None:  # in a job of Slurm or SageMaker, which end all machines when one is lost
        refuse_living_on(recipe)
    if group.is_elastic:
        raise ConfigError(
            f"--nodes {group.min_nodes}:{group.max_nodes} with {asked}: its number of machines is fixed, and one that "
            f"is lost may return; use --nodes {group.max_nodes}."
        )
    if not group.shares_files:
        raise ConfigError(
            f"{asked} on several machines needs a run folder that all of them share; set run.dir on a shared file "
            "system, or remove this key."
        )


class Preparation:
    """Prepares the run on the machine that keeps the replicas, once."""

    def __init__(self, recipe: Recipe, num_processes: int, num_machines: int) -> None:
        """`num_processes`: of each machine."""
        self._recipe = recipe
        self._place = Place(0, num_processes * num_machines, 0, num_processes)
        self._folder: RunFolder | None = None

    def prepare(self) -> Outcome | None:
        """Prepare the run; None if it can start, else how the job ends. The folder stays locked by this process."""
        if self._folder is not None:
            return None
        find_cluster = partial(detect_launched_cluster, self._place)
        try:
            run = prepare_run(self._recipe, False, find_cluster, read_environment(), _PATIENCE_SECONDS)
        except EchelonError as error:
            return Outcome(error.exit_code, str(error), is_final(error))
        if run is None:
            return Outcome(DONE)
        self._folder = run.folder
        return None

    def end(self) -> None:
        """Unlock the folder."""
        if self._folder is not None:
            self._folder.unlock()
