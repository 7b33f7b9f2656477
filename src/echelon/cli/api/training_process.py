"""`echelon.train`: a separate process prepares the run and supervises its workers.

So the caller, for example a notebook, has no process group, signal handler, GPU memory or data of the run, and a script
needs no `if __name__ == "__main__"` guard for the tokenizing processes. The process works like `echelon train`: it
receives the recipe on standard input, prints the run's lines, and writes its result to a file.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from echelon.cli.api.recipes import RecipeLike, load_recipe
from echelon.cli.api.run import Run
from echelon.ground.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EchelonError,
    LaunchError,
    PlanError,
    StoppedError,
    TrainingError,
    explain_storage_error,
    render_traceback,
)
from echelon.ground.launch_environment import find_log_level, keep_hub_cache_beside, launch_role
from echelon.ground.logs import keep_console, keep_line, log_to_console
from echelon.ground.scratch import scratch_folder
from echelon.ground.stop_request import BEFORE_TRAINING, handled, start_watchdog, stops_told
from echelon.ground.stored import read_as, write_json
from echelon.ground.variables import read_environment
from echelon.recipe.document import Recipe
from echelon.recipe.load import build_recipe
from echelon.recipe.render import recipe_mapping
from echelon.run.lifecycle.model_checks import check_early
from echelon.run.supervise.agent import worker_argv
from echelon.run.supervise.outcome import DONE, FAILED, REFUSED, STOPPED, Outcome
from echelon.run.supervise.workers import workers_warmed

# Signals that are forwarded to the run, which then saves and stops, if they would otherwise end the caller at once.
_HANDED_ON = (signal.SIGTERM, signal.SIGUSR1)
_BY_CODE = {REFUSED: ConfigError, STOPPED: StoppedError, FAILED: TrainingError}
# An error is raised in the caller as the first of these classes that it is an instance of.
_ERRORS = (
    ConfigError, PlanError, DataError, CheckpointError, LaunchError, StoppedError, TrainingError, EchelonError,
)  # fmt: skip


@dataclass(frozen=True)
class _Ending:
    """The result of the process: the name of the error class, or None, and the message."""

    error: str | None
    message: str = ""


def _with(error: type[EchelonError], message: str) -> _Ending:
    return _Ending(next(kind.__name__ for kind in _ERRORS if issubclass(error, kind)), message)


def train(
    recipe: RecipeLike,
    nproc: int | Literal["auto"] = "auto",
    *,
    fresh: bool = False,
    on_line: Callable[[str], None] | None = None,
) -> Run:
    """Train on this machine until the run ends. Like the command, resumes an existing run from its newest checkpoint.

    An interrupt (Ctrl-C, or a notebook's stop button) makes the run save a checkpoint and stop, and is then raised in
    the caller; a second one ends the run at once. Calling `train` again resumes the run. SIGTERM also saves and stops.

    Args:
        recipe: a Recipe, the path of its file, or a mapping.
        nproc: the number of processes; `auto` is one per GPU, or one per two CPU cores.
        fresh: move an existing run aside instead of resuming it.
        on_line: called with each line of the run, in this thread; None prints them.

    Returns:
        The finished run.

    Raises:
        ConfigError, PlanError or DataError: the request is invalid; nothing was started.
        StoppedError: a signal or a budget stopped the run after a save.
        TrainingError, LaunchError or CheckpointError: training or a process failed.
        KeyboardInterrupt: after an interrupt, see above.
    """
    recipe = load_recipe(recipe)
    if nproc != "auto" and (not isinstance(nproc, int) or nproc < 1):
        raise ConfigError(f"nproc={nproc!r} is neither a number of processes nor 'auto'; use for example nproc=2.")
    if (role := launch_role()) != "local":
        raise ConfigError(
            f"echelon.train() starts its own processes, but the environment shows that a launcher started this one "
            f"({role}); start the script with plain python, or use the command: torchrun ... -m echelon train RECIPE."
        )
    request = {"recipe": recipe_mapping(recipe), "nproc": None if nproc == "auto" else nproc, "fresh": fresh}
    with scratch_folder("train") as scratch:
        answer = scratch / "ending.json"
        interrupted = _follow(_start(request, answer), _print if on_line is None else on_line)
        ending = _read_ending(answer)
    if interrupted:
        raise KeyboardInterrupt(ending.message or f"{recipe.run.dir} finished before the interrupt took effect")
    for error in _ERRORS:
        if error.__name__ == ending.error:
            raise error(ending.message)
    return Run(recipe.run.dir)


def _start(request: dict[str, Any], answer: Path) -> "subprocess.Popen[str]":
    """Start the process in its own session, so that it receives signals of a terminal or notebook only through us."""
    process = subprocess.Popen(
        worker_argv("echelon.cli.api.training_process", str(os.getpid()), str(answer)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        # Whatever can be imported here, for example extensions of the recipe, can be imported there.
        env={**read_environment(), "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)},
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin as stream:
        json.dump(request, stream)
    return process


def _follow(process: "subprocess.Popen[str]", on_line: Callable[[str], None]) -> bool:
    """Pass on the lines until the process ends. Returns whether there was an interrupt."""
    interrupted = False
    assert process.stdout is not None
    try:
        with _signals_handed_on(process), process.stdout:
            while True:
                try:
                    for line in process.stdout:
                        on_line(line.rstrip("\n"))
                    process.wait()
                    return interrupted
                except KeyboardInterrupt:
                    interrupted = True
                    process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:  # `on_line` raised
            process.terminate()
            process.wait()


def _signals_handed_on(process: "subprocess.Popen[str]") -> AbstractContextManager[None]:
    """Forward signals to the process, from the main thread and only for signals without a handler of the caller."""
    alone = threading.current_thread() is threading.main_thread()
    mine = [number for number in _HANDED_ON if alone and signal.getsignal(number) is signal.SIG_DFL]
    return handled(mine, lambda number, _: process.send_signal(number))


def _read_ending(answer: Path) -> _Ending:
    try:
        return read_as(answer, _Ending)
    except (OSError, ValueError):
        message = (
            "the process that supervised the run was killed, and its workers with it; see logs/ in the run folder."
        )
        return _with(LaunchError, message)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the process that `train` starts: `python -m echelon.cli.api.training_process CALLER_PID ANSWER < REQUEST`."""
    caller, answer = sys.argv[1:]
    start_watchdog(int(caller))
    log_to_console(find_log_level())
    keep_console()
    request = json.load(sys.stdin)
    recipe, _ = build_recipe(request["recipe"])
    try:
        outcome = _train(recipe, request["nproc"], request["fresh"])
        ending = _Ending(None) if outcome.code == DONE else _with(_BY_CODE[outcome.code], outcome.message)
    except EchelonError as error:
        ending = _with(type(error), str(error))
    except Exception as error:
        message = explain_storage_error(error, recipe.run.dir)
        fault = f"{type(error).__name__}: {error}; this is a fault in echelon:\n{render_traceback(error)}"
        ending = _with(EchelonError, message or fault)
    if ending.error is not None:
        keep_line(f"echelon: {ending.message}")
    write_json(Path(answer), asdict(ending))


def _train(recipe: Recipe, nproc: int | None, fresh: bool) -> Outcome:
    keep_hub_cache_beside(recipe.run.dir)
    with stops_told(BEFORE_TRAINING), workers_warmed(nproc) as warm:
        check_early(recipe, fresh)
        from echelon.run.lifecycle.session import train_locally

        return train_locally(recipe, nproc, fresh, warm)


if __name__ == "__main__":
    main()
