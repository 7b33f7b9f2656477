"""One rank of a job in the terminal of the command, where a debugger can stop it; the others run in the background.

The rank's stdin and stdout are those of the command, so `breakpoint()` works. No rank of such a job has a time limit:
the others wait in their next collective while someone looks at a step.
"""

import io
import os
import signal
import sys
import termios
import threading
import time
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from pdb import Pdb
from types import FrameType
from typing import NoReturn, TextIO

from echelon.ground.errors import EchelonError, StoppedError, render_traceback
from echelon.ground.launch_environment import (
    AGENT_PID_VARIABLE,
    TERMINAL_VARIABLE,
    find_log_level,
    find_look,
    find_thread_count,
    rank_environment,
    store_environment,
)
from echelon.ground.logs import keep_console_in, keep_line, log_as_rank, log_to_console
from echelon.ground.sockets import host_store_at
from echelon.ground.stop_request import STOP_SIGNALS, StopRequest
from echelon.ground.stored import open_to_append
from echelon.ground.variables import read_environment, set_variables
from echelon.run.lifecycle.worker import RankProcess, leave
from echelon.run.supervise.agent import network_variables
from echelon.run.supervise.outcome import DONE, FAILED, Outcome, find_cause, read_outcomes
from echelon.run.supervise.workers import LocalRanks, WarmStart, Workers

_ADDRESS = "127.0.0.1"
_LOOK_SECONDS = 0.2
# Between the death of another rank and the end of this one, which may wait for it in a collective forever.
_LAST_WORDS_SECONDS = 5.0


class TerminalRank:
    """Rank `rank` of a job, in this process. Use it once: the process joins a process group."""

    def __init__(self, job: Workers, rank: int, warm: WarmStart | None = None) -> None:
        """`warm`: the process that forks the other ranks; without one each starts an interpreter."""
        self._job = job
        self._rank = rank
        self._folder = job.folder
        self._others = LocalRanks(job.folder, warm)
        self._is_over = threading.Event()
        self._terminal = termios.tcgetattr(0) if os.isatty(0) else None

    def run(self) -> Outcome:
        """Train to the end; returns how the job ended. No other rank outlives the call. For the main thread."""
        count = self._job.num_processes
        store = host_store_at(_ADDRESS) if count > 1 else None
        rendezvous = {} if store is None else store_environment(_ADDRESS, store.port)
        common = {**network_variables(_ADDRESS), **rendezvous, TERMINAL_VARIABLE: str(self._rank)}
        environment = {**read_environment(), **self._job.env, **common}
        try:
            for rank in range(count):
                if rank != self._rank:
                    variables = rank_environment(rank, count, rank, count)
                    self._others.start(self._job.argv, rank, {**environment, **variables})
            watch = threading.Thread(target=self._others.wait, name="other-ranks", daemon=True)
            watch.start()
            job_variables = {name: value for name, value in self._job.env.items() if name != AGENT_PID_VARIABLE}
            set_variables({**job_variables, **common, **rank_environment(self._rank, count, self._rank, count)})
            if self._train():
                watch.join()
        finally:
            self._is_over.set()
            self._others.end()
        return self._find_outcome()

    def _train(self) -> bool:
        """Run this rank, and report its outcome; returns whether the other ranks are about to end in the same way."""
        import torch

        if (threads := find_thread_count()) is not None:
            torch.set_num_threads(threads)
        process = RankProcess(self._folder)
        self._listen_for_stops(process.stop)
        process.look_for(self._leave_after_others)
        with self._logged() as log:
            outcome = process.run(tell_error=lambda error: self._tell_error(error, log))
        return outcome.code == DONE or process.stop.agreed is not None

    @contextmanager
    def _logged(self) -> Iterator[TextIO]:
        """Write log records to this rank's log file during the block, those of rank 0 to the console as well."""
        level, console = find_log_level(), sys.stdout if self._rank == 0 else None
        look = find_look(sys.stdout, level)
        self._folder.create()
        with open_to_append(self._folder.log_path(self._rank)) as file:
            log = io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", line_buffering=True)
            log_as_rank(self._rank, log, console, level, None if console is None else self._folder.console_path, look)
            try:
                yield log
            finally:
                log_to_console(level, console, look)
                keep_console_in(self._folder.console_path, self._rank)

    def _tell_error(self, error: BaseException, log: TextIO) -> None:
        """Write a traceback to the log, and that of an unexpected error to the terminal too."""
        log.write(render_traceback(error))
        if not isinstance(error, EchelonError | BdbQuit):
            sys.stderr.write(render_traceback(error))

    def _listen_for_stops(self, stop: StopRequest) -> None:
        """Make a signal ask all ranks to save and stop, or end the job at once while the debugger waits for a line."""

        def leave_debugger(number: int, frame: FrameType | None) -> None:
            if _is_in_debugger(frame):
                raise StoppedError(f"stopped by {signal.Signals(number).name} in the debugger")

        def end(name: str) -> NoReturn:
            self._end(f"ended immediately by a second signal, {name}; unsaved work is lost")

        stop.listen(None, end)
        for number in STOP_SIGNALS:
            signal.signal(number, leave_debugger)

    def _leave_after_others(self) -> None:
        """End this process some time after another rank has died, but not while the debugger waits for a line."""
        if not self._folder.death_path.exists():
            return
        message = self._find_outcome().message or "another rank has ended"
        main = threading.main_thread().ident
        assert main is not None
        if _is_in_debugger(sys._current_frames().get(main)):
            sys.stderr.write(f"\nechelon: {message}; this rank cannot go on\n")
        while _is_in_debugger(sys._current_frames().get(main)):
            time.sleep(_LOOK_SECONDS)
        if not self._is_over.wait(_LAST_WORDS_SECONDS):
            self._end(message)

    def _find_outcome(self) -> Outcome:
        outcomes = read_outcomes(self._folder.outcomes_dir)
        return find_cause(outcomes, self._others.deaths, self._folder.logs_dir).outcome

    def _end(self, message: str) -> NoReturn:
        """End all ranks without cleanup, with a message, from any thread."""
        self._others.kill()
        if self._terminal is not None:  # the debugger may be reading a line
            termios.tcsetattr(0, termios.TCSADRAIN, self._terminal)
        line = f"echelon: {message}"
        sys.stderr.write(f"{line}\n")
        keep_line(line)
        leave(FAILED)


def _is_in_debugger(frame: FrameType | None) -> bool:
    """Whether Python's debugger, or one derived from it, runs in this frame: it waits for a line, or shows one."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "bdb":
            return True
        frame = frame.f_back
    return False


@contextmanager
def breakpoints_without_signals() -> Iterator[None]:
    """Let `breakpoint()` leave Ctrl-C as it is: pdb would take it over. PYTHONBREAKPOINT chooses another debugger."""

    def stop_here(*, header: str | None = None) -> None:
        debugger = Pdb(nosigint=True)
        if header is not None:
            debugger.message(header)
        debugger.set_trace(sys._getframe(1))

    before = sys.breakpointhook
    if "PYTHONBREAKPOINT" not in read_environment():
        sys.breakpointhook = stop_here
    try:
        yield
    finally:
        sys.breakpointhook = before
