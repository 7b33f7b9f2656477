"""A quorum on several machines: whether these machines can have one, and the preparation of its run."""

from functools import partial

from echelon.ground.errors import ConfigError, EchelonError
from echelon.ground.hosts import HostGroup
from echelon.ground.variables import Place, read_environment
from echelon.planner.hardware.detection import detect_launched_cluster
from echelon.planner.replica_limits import refuse_quorum
from echelon.recipe import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.setup import prepare_run
from echelon.run.supervise.outcome import DONE, Outcome, is_final

# How long the coordinator of an earlier start may survive.
_PATIENCE_SECONDS = 15.0


def check_quorum_hosts(recipe: Recipe, group: HostGroup) -> None:
    """Raise ConfigError if the machines of a group cannot keep a quorum."""
    if group.coordinates is not None:  # in a job of Slurm or SageMaker, which end all machines when one is lost
        refuse_quorum(recipe)
    if group.is_elastic:
        raise ConfigError(
            f"--nodes {group.min_nodes}:{group.max_nodes} with sync.name=quorum: its number of machines is fixed, and "
            f"the others go on without one that is lost until it returns; use --nodes {group.max_nodes}."
        )
    if not group.shares_files:
        raise ConfigError(
            "sync.name=quorum on several machines needs a run folder that all of them share; set run.dir on a shared "
            "file system, or use sync.name: every_step."
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
