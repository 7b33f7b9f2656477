"""One rank of a run, as a process: `python -m echelon.run.lifecycle.worker RUN_DIR`.

Its output is in logs/rank-N.log and its outcome in .outcomes/rank-N.json; the parent process reports to the user.
"""

import logging
import os
import re
import sys
import threading
import time
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TextIO

from echelon.ground.errors import (
    EchelonError,
    PlanError,
    StoppedError,
    TrainingError,
    explain_storage_error,
    is_out_of_memory,
    render_traceback,
)
from echelon.ground.launch_environment import (
    find_host_dir,
    find_log_level,
    find_look,
    find_member,
    find_place,
    find_terminal_rank,
    is_managed,
    shares_files,
)
from echelon.ground.logs import log_as_rank
from echelon.ground.open_files import explain_open_files
from echelon.ground.quiet_imports import garbage_kept
from echelon.ground.redaction import redact_text
from echelon.ground.run_files import is_run
from echelon.ground.stop_request import StopRequest
from echelon.ground.stored import open_to_append
from echelon.learn.distributed.runtime import Runtime, stop_runtime, use_deterministic_algorithms
from echelon.planner.hardware.gpu_check import check_gpus, find_needed
from echelon.planner.hardware.heap import keep_freed_memory
from echelon.run.folder.run_folder import RunFolder, describe_gone
from echelon.run.lifecycle.process_group import start_runtime, watch_starter
from echelon.run.supervise.hangs import explain_hang, read_records
from echelon.run.supervise.outcome import (
    DONE,
    FAILED,
    STOPPED,
    RankOutcome,
    is_final,
    is_peer_leaving,
    is_secondary,
    read_outcomes,
    report,
    reserve_outcome,
    write_outcome,
)

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from echelon.planner.plan import ParallelPlan
    from echelon.recipe.document import Recipe
    from echelon.run.supervise.hangs import WaitingPeers
    from echelon.run.training.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_LOOKS_IN_VAIN = 4
# So many ranks of several machines may look at each other's files.
_MOST_SHARING = 64
# Between a peer's death and this rank's exit: time for this rank to write its own error, if it has one.
_LAST_WORDS_SECONDS = 1.0

# torch's message about an operation that `torch.use_deterministic_algorithms` forbids.
_UNREPEATABLE = re.compile(r"(\S+) does not have a deterministic implementation")


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a rank started by `echelon train`. Exits with 0 unless it really failed, so that only failures are restarted;
    the true code is in the outcome."""
    watch_starter()
    [run_dir] = sys.argv[1:] if argv is None else argv
    process = RankProcess(RunFolder(Path(run_dir), find_host_dir()))
    process.listen(process.folder.stop_path)
    process.leave_after_peers()
    output = redirect_output(process.folder)
    member = find_member()
    outcome = process.run() if member is None else process.run_replica(member, output)
    failed = outcome.code == FAILED and not (outcome.secondary and is_peer_leaving(process.folder.outcomes_dir))
    leave(1 if failed else 0)


class RankProcess:
    """This process as a rank of a job: the run that it trains, what it is asked, and what makes it leave.

    One thread, the lookout, sees what the main thread would not: a collective waits for a lost rank forever.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.stop = StopRequest()
        self._rank = find_place().rank
        self._looks: list[Callable[[], None]] = []
        self._looks_in_vain = 0

    def listen(self, stop_file: Path | None = None) -> None:
        """Let a signal ask this rank to save and stop; a second one ends it immediately, without harm to checkpoints.

        `stop_file`: where echelon's agent of this machine writes a signal, if there is one.
        """

        def leave_at_once(name: str) -> NoReturn:
            self._leave(f"ended immediately by a second signal, {name}; unsaved work is lost", final=True)

        self.stop.listen(stop_file, leave_at_once)

    def leave_after_peers(self) -> None:
        """Exit when another rank has died, after a moment for this rank to write its own error."""
        with suppress(OSError):  # on a full disk only the agent detects a death
            self.folder.write_pid(self._rank)

        def look() -> None:
            if not self.folder.death_path.exists():
                return
            time.sleep(_LAST_WORDS_SECONDS)
            if self._rank in {outcome.rank for outcome in read_outcomes(self.folder.outcomes_dir)}:
                leave(1)
            self._leave("ended because another rank had died", secondary=True)

        self.look_for(look)

    def look_for(self, look: Callable[[], None]) -> None:
        """Let the lookout call `look` from now on, some times a second."""
        self._looks.append(look)
        if len(self._looks) == 1:
            threading.Thread(target=self._look_out, name="lookout", daemon=True).start()

    def _look_out(self) -> None:
        while True:
            for look in list(self._looks):
                with suppress(OSError):  # a file system may fail for a moment, and another look must not end with it
                    look()
            time.sleep(_LOOK_SECONDS)

    def _leave(self, message: str, *, secondary: bool = False, final: bool = False) -> NoReturn:
        with suppress(OSError):  # the folder of outcomes may be gone, its disk full
            write_outcome(self.folder.outcomes_dir, report(self._rank, FAILED, message, secondary, final))
        leave(1)

    @contextmanager
    def stopped_early(self) -> Iterator[None]:
        """End this process if it is asked to stop during the block, when there is nothing to save yet."""

        def look() -> None:
            if self.stop.name is not None:
                self._leave(f"stopped by {self.stop.name} before training began", final=True)

        self.look_for(look)
        try:
            yield
        finally:
            self._looks.remove(look)

    def leave_without_folder(self) -> None:
        """Exit when the run folder is gone, since the work of this rank could not be saved.

        On a folder that several machines share rank 0 looks for all. The agent reports it, if there is one, or rank 0.
        """

        def look() -> None:
            self._looks_in_vain = 0 if is_run(self.folder.path) else self._looks_in_vain + 1
            if self._looks_in_vain < _LOOKS_IN_VAIN:  # a file system may lose sight of a file for a moment
                return
            message = describe_gone(self.folder.path)
            if self._rank == 0 and not is_managed() and find_host_dir() is None:
                logger.error(f"echelon: {message}")
            self._leave(message, final=True)

        if self._rank == 0 or not shares_files() or find_place().is_one_machine:
            self.look_for(look)

    def run(
        self, store: "Store | None" = None, tell_error: Callable[[BaseException], None] | None = None
    ) -> RankOutcome:
        """Train this rank from the run folder to the end; returns the outcome, which is also written to the folder.

        Collective: every rank calls it. `store` is the result of `open_store`. `tell_error` writes the traceback of an
        error; by default it goes to stderr, which is this rank's log.
        """
        with OutcomeReport(self.folder, self._rank, tell_error) as ending:
            _check_gpus(self.folder)
            runtime = start_runtime(store=store)
            if runtime.device.type == "cpu":
                keep_freed_memory()
            recipe, plan = load_agreed_run(self.folder, runtime)
            if recipe.train.deterministic:
                use_deterministic_algorithms()
            with garbage_kept():
                from echelon.run.lifecycle.rank_run import run_training
            from echelon.run.training.callbacks import build_callbacks

            self.leave_without_folder()
            heartbeat = build_heartbeat(recipe, self.folder, runtime)
            callbacks = build_callbacks(recipe.train.callbacks) if runtime.rank == 0 else ()
            run_training(recipe, plan, self.folder, runtime, self.stop, heartbeat, callbacks)
        code = ending.outcome.code
        stop_runtime(failed=code != DONE and (code != STOPPED or self.stop.agreed is None))
        return ending.outcome

    def run_replica(self, member: str, output: "Output") -> RankOutcome:
        """`run`, of a process that lives on when another one is lost. `member`: the name of this start of it."""
        folder = self.folder
        with OutcomeReport(folder, self._rank) as ending:
            from echelon.recipe.load import load_recipe

            keep_freed_memory()
            _check_gpus(folder)
            recipe, _ = load_recipe(folder.recipe_path)
            if recipe.train.deterministic:
                use_deterministic_algorithms()
            with garbage_kept():
                from echelon.run.lifecycle.kept_rank import KeptRank
                from echelon.run.lifecycle.replica import ReplicaProcess
            self.leave_without_folder()
            arguments = folder, find_place(), member, self.stop, partial(build_heartbeat, recipe, folder)
            if recipe.fault.on_lost_process == "replace":
                KeptRank(*arguments).train()
            else:
                ReplicaProcess(*arguments, partial(output.show, folder)).train()
        return ending.outcome


def _check_gpus(folder: RunFolder) -> None:
    """Raise ConfigError if GPUs that the job asked for are missing now: some may have failed since the last start."""
    if is_managed() and (needed := find_needed()) is not None:  # other ranks have checked it already
        from echelon.recipe.load import load_recipe

        check_gpus(needed, load_recipe(folder.recipe_path)[0].train.allow_cpu)


def build_heartbeat(recipe: "Recipe", folder: RunFolder, runtime: Runtime) -> "Heartbeat":
    """The watchdog that ends this rank when training hangs."""
    # Imported before a hang, because the disk may be what hangs.
    from echelon.run.training.flight_record import write_record
    from echelon.run.training.heartbeat import Heartbeat

    peers = build_waiting_peers(folder, runtime)

    def leave_late(what: str, seconds: float) -> NoReturn:
        leave_hanging(folder, runtime, f"{what} did not end within {seconds:g} s", write_record, peers)

    limit = recipe.fault.hang_seconds if find_terminal_rank() is None else None
    return Heartbeat(limit, leave_late, peers)


def build_waiting_peers(folder: RunFolder, runtime: Runtime) -> "WaitingPeers | None":
    """The ranks of which this one knows in a long wait; None if it knows of none.

    The agents of several machines tell of each other's ranks. Without them ranks look at each other's files in the run
    folder, but not in large jobs: a shared file system would not bear it.
    """
    from echelon.run.supervise.hangs import WaitingPeers

    rank, size = runtime.rank, runtime.world_size
    if find_host_dir() is not None and find_member() is None:
        first = rank - runtime.local_rank
        local_ranks = range(first, first + runtime.local_world_size)
        return WaitingPeers(folder.outcomes_dir, rank, local_ranks, has_distant=len(local_ranks) < size)
    if not shares_files() or size > max(_MOST_SHARING, runtime.local_world_size):
        return None
    return WaitingPeers(RunFolder(folder.path).outcomes_dir, rank, range(size))


def leave_hanging(
    folder: RunFolder,
    runtime: Runtime,
    what: str,
    write_record: Callable[[Path, int], None],
    peers: "WaitingPeers | None",
) -> NoReturn:
    """Report a hang, with the unresponsive ranks and its explanation if known; then end this process.

    `write_record` writes what this rank did to a folder, for its peers; None if it shares no files with them.
    """
    silent: list[int] = []
    verdict = ""
    if peers is not None:
        with suppress(OSError):  # the disk may be what hangs
            shared = RunFolder(folder.path).outcomes_dir
            with suppress(ImportError, LookupError, ValueError):  # a hang is reported also without its explanation
                write_record(shared, runtime.rank)
            silent = peers.find_unresponsive()
            verdict = explain_hang([record for record in read_records(shared) if record.rank not in silent], silent)
    rank = find_place().rank  # of a replica this is its number, which is not its rank in a view
    who = f"rank {', '.join(map(str, silent))} does not answer" if silent else "every rank waits"
    reason = "; ".join(filter(None, (f"{what} (fault.hang_seconds), and {who}", verdict)))
    message = f"{reason}; see {folder.log_path(rank)} for what each thread did"
    with suppress(OSError):
        write_outcome(folder.outcomes_dir, report(rank, FAILED, message))
    leave(1)


def load_agreed_run(folder: RunFolder, runtime: Runtime) -> "tuple[Recipe, ParallelPlan]":
    """Load the recipe and the plan of the run folder, after checking that every rank sees the same ones.

    Collective: every rank calls it, and all raise PlanError together, with the ranks that see different files.
    """
    from echelon.learn.distributed.objects import gather_objects
    from echelon.planner.plan import load_plan
    from echelon.recipe.load import load_recipe
    from echelon.run.lifecycle.setup import digest_run

    digests = gather_objects(digest_run(folder), None)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0] or digest == 0]
    if differing:
        ranks = ", ".join(map(str, differing))
        raise PlanError(
            f"run.dir={folder.path}: rank {ranks} does not see the recipe.yaml and plan.json of rank 0; "
            "put run.dir on a file system that all machines share."
        )
    recipe, _ = load_recipe(folder.recipe_path)
    plan = load_plan(folder.plan_path)
    if plan.world_size != runtime.world_size:
        raise PlanError(
            f"plan.json is for {plan.world_size} processes, but {runtime.world_size} were started; "
            "start as many as planned, or let `echelon train` make a new plan."
        )
    return recipe, plan


class OutcomeReport:
    """Turns the end of its block into this rank's outcome, writes it, and suppresses the exception."""

    def __init__(self, folder: RunFolder, rank: int, tell_error: Callable[[BaseException], None] | None = None) -> None:
        """`tell_error`: see `run_rank`."""
        self._folder = folder
        self._rank = rank
        self._tell_error = tell_error or (lambda error: sys.stderr.write(render_traceback(error)))
        self.outcome = report(rank, DONE, "")

    def __enter__(self) -> "OutcomeReport":
        """The report; its `outcome` is set when the block has ended."""
        self._was_run = is_run(self._folder.path)
        with suppress(OSError):
            reserve_outcome(self._folder.outcomes_dir, self._rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Report; a traceback goes to this rank's log only."""
        if isinstance(error, BdbQuit):
            error = explain_quit(error, self._rank)
        if error is None:
            self.outcome = report(self._rank, DONE, "")
        elif self._was_run and not is_run(self._folder.path):  # the missing folder is the cause
            self.outcome = report(self._rank, FAILED, describe_gone(self._folder.path), final=True)
        elif isinstance(error, EchelonError):
            self.outcome = report(self._rank, error.exit_code, str(error), is_secondary(error), is_final(error))
        else:
            message = explain_error(error, self._rank, self._folder)
            self.outcome = report(self._rank, FAILED, message, is_secondary(error))
        if trace is not None and error is not None and is_secondary(error):
            _write_place(self._folder, self._rank, trace)
        # A full disk must not replace the error with its own.
        with suppress(OSError):
            write_outcome(self._folder.outcomes_dir, self.outcome)
        if error is not None:
            with suppress(OSError):
                self._tell_error(error)
        return True


def _write_place(folder: RunFolder, rank: int, trace: TracebackType) -> None:
    """Write what this rank did as it lost a peer, for the explanation by the agent."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    with suppress(ImportError, LookupError, OSError, ValueError):  # the error is reported also without it
        from echelon.run.training.flight_record import write_record

        write_record(folder.outcomes_dir, rank, trace.tb_frame)


def explain_quit(error: BdbQuit, rank: int) -> EchelonError:
    """The error to report if the debugger was left with `quit`, or found no terminal to read from."""
    if find_terminal_rank() == rank:
        told: EchelonError = StoppedError("stopped by quit in the debugger")
    else:
        told = TrainingError(
            f"rank {rank} reached a breakpoint, but only a rank in a terminal can stop there; start the same command "
            f"with --here --rank {rank}."
        )
    told.__cause__ = error
    return told


def explain_error(error: BaseException, rank: int, folder: RunFolder) -> str:
    """One line for an unexpected error, with the path of its traceback; some common errors include a fix."""
    where = f"see {folder.log_path(rank)}"
    if storage := explain_storage_error(error, folder.path):
        return f"rank {rank}: {storage}; {where}"
    if files := explain_open_files(error):
        return f"rank {rank}: {files}; {where}"
    if is_out_of_memory(error):
        return (
            f"rank {rank} ran out of memory; lower train.micro_batch_size, set train.activation_checkpointing: full, "
            f"or shard more (parallel: fsdp); {where}"
        )
    summary = redact_text((str(error).strip().splitlines() or [""])[0])
    if operation := _UNREPEATABLE.match(summary):
        return (
            f"rank {rank}: train.deterministic=true, and {operation[1]} has no deterministic implementation on this "
            f"device; use another model.attn_implementation or model, or set train.deterministic=false; {where}"
        )
    return f"rank {rank} failed: {type(error).__name__}: {summary}; {where}"


class Output(NamedTuple):
    """The stdout and stderr that a process was started with."""

    stdout: TextIO
    stderr: TextIO

    def show(self, folder: RunFolder) -> None:
        """Log to this stdout too, and to the file that keeps the console."""
        level = find_log_level()
        log_as_rank(
            find_place().rank, sys.stdout, self.stdout, level, folder.console_path, find_look(self.stdout, level)
        )


def redirect_output(folder: RunFolder) -> Output:
    """Redirect this process's stdout and stderr, also of native code, and its log records to the rank's log.

    Rank 0 also logs to its former stdout, and to the file that keeps the console. Returns the former ones.
    """
    rank = find_place().rank
    folder.create()
    sys.stdout.flush()
    sys.stderr.flush()
    stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8")
    with open_to_append(folder.log_path(rank)) as log, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # a breakpoint in a worker must not read from the user's terminal
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    output = Output(stdout, stderr)
    if rank == 0:
        output.show(folder)
    else:
        log_as_rank(rank, sys.stdout, level=find_log_level())
    return output


def leave(code: int) -> NoReturn:
    """End the process immediately. Everything is written, and the threads of a process group may hang or abort the
    interpreter's shutdown, so that a finished rank would count as failed."""
    with suppress(OSError):  # the log's disk may be full
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
