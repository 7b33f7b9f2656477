"""Processes on several machines that live on when one is lost: whether these machines can keep them, and the
preparation of their run."""

from functools import partial

from echelon.ground.errors import ConfigError, EchelonError
from echelon.ground.hosts import HostGroup
from echelon.ground.variables import Place, read_environment
from echelon.planner.hardware.detection import detect_launched_cluster
from echelon.planner.replica_limits import refuse_living_on
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.setup import prepare_run
from echelon.run.supervise.outcome import DONE, Outcome, is_final

# How long the coordinator of an earlier start may survive.
_PATIENCE_SECONDS = 15.0


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
