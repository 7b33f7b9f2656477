"""`echelon train`: a new job on this machine, this machine's agent of a larger job, or one rank of it."""

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from echelon.cli.commands.arguments import (
    FreshOption,
    NprocOption,
    OverridesArgument,
    RecipeArgument,
    parse_nproc,
    read_recipe,
)
from echelon.cli.commands.terminal import report_failure, show, stdout_kept_for_result
from echelon.ground.errors import ConfigError, EchelonError, LaunchError, explain_storage_error, render_traceback
from echelon.ground.logs import keep_console
from echelon.ground.stop_request import BEFORE_TRAINING, STOP_SIGNALS, stops_told

if TYPE_CHECKING:
    from echelon.ground.hosts import HostGroup
    from echelon.ground.launch_environment import Role
    from echelon.recipe.document import Recipe
    from echelon.run.supervise.outcome import Outcome

logger = logging.getLogger(__name__)

# A launcher ends every rank when one exits: the silent ranks wait, so that rank 0 can print its message.
_SPEAKING_SECONDS = 1.0
_PROFILE = "profile.steps=[20,5]"
# A breakpoint in a reader stops only in this process.
_READ_HERE = "data.prepare_workers=1"


def train(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    nproc: NprocOption = "auto",
    fresh: FreshOption = False,
    nodes: Annotated[str | None, typer.Option(metavar="N|MIN:MAX|N+S")] = None,
    rendezvous: Annotated[str | None, typer.Option(metavar="HOST:PORT|etcd://HOST:PORT/NAME")] = None,
    interface: str | None = None,
    profile: bool = False,
    here: bool = False,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Train a recipe, or resume its run. Resumes from the newest complete checkpoint.

    Args:
        nodes: number of machines, MIN:MAX, or N+SPARES; the same on each.
        rendezvous: where the machines meet: one of them, and a free port; or an etcd, and a name for this job.
        interface: network interface. Default: the one that reaches HOST.
        profile: record steps for a profiler: short for profile.steps=[20,5].
        here: run one rank in this terminal, where breakpoint() works; alone by default.
        rank: with `here`: which rank of `nproc`. Default: 0.
        as_json: print the run as one JSON object at the end; the lines go to stderr.
    """
    from echelon.ground.launch_environment import keep_hub_cache_beside, launch_role

    overrides = [*(overrides or []), *([_PROFILE] if profile else []), *([_READ_HERE] if here else [])]
    num_processes = parse_nproc(nproc)
    group = _read_group(nodes, rendezvous, interface)
    role = "agent" if group is not None else launch_role()
    here_rank = _check_here(here, rank, role)
    if here and num_processes is None and rank is None:
        num_processes = 1
    if role != "agent":  # of several machines: rank 0's machine keeps the console
        keep_console()
    recipe = _read_as_rank(recipe_path, overrides) if role == "worker" else read_recipe(recipe_path, overrides)
    keep_hub_cache_beside(recipe.run.dir)
    with _faults_logged(recipe.run.dir / "logs" / "parent.log"):
        with stdout_kept_for_result(as_json):
            if role == "worker":
                _train_as_rank(recipe, fresh)
            if role == "agent":
                _train_as_agent(recipe, [str(recipe_path), *(overrides or [])], group, num_processes, fresh)
            outcome = _train_locally(recipe, num_processes, fresh, here_rank)
        if as_json:
            _show_result(recipe.run.dir, outcome)
        _finish(outcome, at_once=here)


def _check_here(here: bool, rank: int | None, role: "Role") -> int | None:
    """The rank that runs in this terminal; None without --here. Raises ConfigError."""
    if not here:
        if rank is not None:
            raise ConfigError(f"--rank {rank} is the rank that --here runs in this terminal; add --here.")
        return None
    if role != "local":
        raise ConfigError(
            "--here starts the other ranks itself, on this machine; use it without --nodes and outside of a job of "
            "torchrun, mpirun, srun or SageMaker."
        )
    return rank or 0


def _read_as_rank(path: Path, overrides: list[str] | None) -> "Recipe":
    """Read the recipe, as every rank under another launcher does; only rank 0 logs and reports errors."""
    from echelon.ground.launch_environment import find_place

    speaks = find_place().rank == 0
    try:
        return read_recipe(path, overrides, quiet=not speaks)
    except EchelonError as error:
        if speaks:
            raise
        time.sleep(_SPEAKING_SECONDS)
        raise typer.Exit(error.exit_code) from error


def _train_locally(recipe: "Recipe", num_processes: int | None, fresh: bool, here: int | None) -> "Outcome":
    """Train on this machine; `here`: the rank that runs in this process, in its terminal."""
    from echelon.run.lifecycle.model_checks import check_early
    from echelon.run.supervise.workers import workers_warmed

    with ExitStack() as scopes:
        scopes.enter_context(stops_told(BEFORE_TRAINING))
        if here is not None:
            from echelon.run.lifecycle.terminal_rank import breakpoints_without_signals

            scopes.enter_context(breakpoints_without_signals())
        is_alone = here is not None and num_processes == 1
        warm = None if is_alone else scopes.enter_context(workers_warmed(num_processes))
        check_early(recipe, fresh)
        from echelon.run.lifecycle.session import train_locally

        return train_locally(recipe, num_processes, fresh, warm, here)


def _show_result(run_dir: Path, outcome: "Outcome") -> None:
    """Show the run as `echelon runs --json` does, if it is done, or stopped after a save."""
    from echelon.run.folder.overview import summarize_run
    from echelon.run.supervise.outcome import DONE, STOPPED

    if outcome.code in (DONE, STOPPED):
        show(json.dumps(summarize_run(run_dir).to_dict()))


def _train_as_rank(recipe: "Recipe", fresh: bool) -> NoReturn:
    from echelon.ground.launch_environment import find_host_dir
    from echelon.run.lifecycle.session import train_as_rank, train_hosted
    from echelon.run.supervise.outcome import Outcome

    if (host_dir := find_host_dir()) is not None:
        train_hosted(recipe, host_dir)
    try:
        outcome = train_as_rank(recipe, fresh)
    except EchelonError as error:
        outcome = Outcome(error.exit_code, str(error))
    _finish(outcome, at_once=True)


def _train_as_agent(
    recipe: "Recipe", arguments: list[str], group: "HostGroup | None", num_processes: int | None, fresh: bool
) -> NoReturn:
    from echelon.ground.launch_environment import find_host_group
    from echelon.ground.variables import set_default_variables
    from echelon.run.lifecycle.session import train_on_hosts
    from echelon.run.supervise.outcome import Outcome

    # Suppresses C++ traces of every thread after a lost coordinator, which is reported in one line.
    set_default_variables({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    try:
        outcome, speaks = train_on_hosts(recipe, arguments, group or find_host_group(), num_processes, fresh)
    except LaunchError as error:
        outcome, speaks = Outcome(error.exit_code, str(error)), True
    for signum in STOP_SIGNALS:  # a signal now would replace the job's exit code
        signal.signal(signum, signal.SIG_IGN)
    _finish(outcome, at_once=True, silent=not speaks)  # threads may wait in torch's store


def _read_group(nodes: str | None, rendezvous: str | None, interface: str | None) -> "HostGroup | None":
    from echelon.ground.hosts import parse_group

    if nodes is None and rendezvous is None:
        if interface is not None:
            raise ConfigError(
                f"--interface {interface} requires --nodes and --rendezvous; add them, or remove --interface."
            )
        return None
    if nodes is None or rendezvous is None:
        raise ConfigError(
            "--nodes and --rendezvous require each other; give both, such as --nodes 2 --rendezvous a:29400."
        )
    return parse_group(nodes, rendezvous, interface)


@contextmanager
def _faults_logged(log: Path) -> Iterator[None]:
    """Write the traceback of an unexpected error to the run folder, if it exists, and print one line."""
    try:
        yield
    except (EchelonError, typer.Exit):
        raise
    except Exception as error:
        if explain_storage_error(error, log.parent.parent) or not log.parent.is_dir():
            raise
        from echelon.ground.stored import open_to_append

        with suppress(OSError), open_to_append(log) as file:
            file.write(render_traceback(error).encode())
        report_failure(f"{type(error).__name__}: {error}; see {log}", 1)
        raise typer.Exit(1) from error


def _finish(outcome: "Outcome", at_once: bool = False, silent: bool = False) -> NoReturn:
    """Print the outcome's message, unless another machine does, and exit with its code.

    `at_once`: exit without the interpreter's teardown, which may hang.
    """
    if outcome.message and not silent:
        report_failure(outcome.message, outcome.code)
    if at_once:
        from echelon.run.lifecycle.worker import leave

        leave(outcome.code)
    raise typer.Exit(outcome.code)
