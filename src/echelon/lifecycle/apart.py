"""Machines that share no folder: each prepares its own text, and gets the run's small files from rank 0.

All of it happens before there is a process group, by the store in which the ranks meet, so that no collective is open
however long tokenizing takes.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import ConfigError, LaunchError
from echelon.recipe import Recipe
from echelon.runs.run_folder import RunFolder
from echelon.stored import write_text

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_POLL_SECONDS = 0.5


def send_run(folder: RunFolder, store: "Store") -> None:
    """On rank 0: let the other machines have what says how the run goes."""
    files = {path.name: path.read_text(encoding="utf-8") for path in _files(folder) if path.exists()}
    store.set("echelon/files", json.dumps({"files": files, "digest": folder.read_data_digest()}))


def receive_run(recipe: Recipe, folder: RunFolder, store: "Store", await_word: Callable[[], bool]) -> bool:
    """On the first rank of another machine: prepare the text here, then make the run folder like rank 0's.

    `recipe` has this machine's copies of what comes from the hub. `await_word` waits for rank 0 and says whether there
    is anything to train; so does this. Raises ConfigError when this machine's text is not rank 0's, and what preparing
    raises.
    """
    from echelon.data.prepare import prepare_data

    data = prepare_data(recipe, lambda line: None)
    if not await_word():
        return False
    sent = json.loads(store.get("echelon/files"))
    if data.content_digest != sent["digest"]:
        raise ConfigError(
            "data.train: the text on this machine is not what rank 0's machine has: their tokens differ; give every "
            "machine the same files, under the same paths."
        )
    folder.create()
    folder.write_prepared_path(data.path, data.content_digest)
    for name, text in sent["files"].items():
        write_text(folder.path / name, text)
    return True


def mark_ready(store: "Store", place: Path) -> None:
    """On the first rank of a machine: let its other ranks go on. `place` is the machine's agent's folder."""
    store.set(f"echelon/ready/{place}", "1")


def await_ready(store: "Store", place: Path) -> None:
    """On the other ranks of a machine: wait for the first one. Raises LaunchError when rank 0 is gone."""
    try:
        while not store.check([f"echelon/ready/{place}"]):
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:
        raise LaunchError("rank 0 ended before the run was prepared; see its message.") from error


def _files(folder: RunFolder) -> list[Path]:
    # The recipe comes last: a folder that has one counts as a run.
    return [folder.environment_path, folder.estimate_path, folder.plan_path, folder.hub_path, folder.recipe_path]
