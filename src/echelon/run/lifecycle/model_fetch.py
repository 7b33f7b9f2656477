"""Downloads from the Hugging Face hub: the first rank of each machine fetches what the run needs.

All of this happens before there is a process group, over the rendezvous store, so no collective can time out during a
download. Rank 0 announces the commits and waits for all ranks; the others wait for its announcement.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from echelon.ground.errors import EchelonError, LaunchError
from echelon.ground.launch_environment import find_place
from echelon.recipe import Recipe

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_COMMITS, _DONE, _FAILURE = "echelon/hub/commits", "echelon/hub/done", "echelon/hub/failure"
_POLL_SECONDS = 0.5


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
        raise LaunchError("rank 0 ended before the run was prepared; see its message.") from error
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
