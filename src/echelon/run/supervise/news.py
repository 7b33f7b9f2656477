"""Forward the stops of this machine to its workers, and share stops and deaths between machines while they run."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from echelon.ground.errors import LaunchError
from echelon.ground.stop_request import ECHO_SECONDS, STOP_SIGNALS, read_stop_file
from echelon.ground.stored import read_text, write_text
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.hangs import Waiting, WaitingRanks
from echelon.run.supervise.meeting import Meeting

logger = logging.getLogger(__name__)

ENDING_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)
"""These end the job at once; STOP_SIGNALS let it save first."""

_LOOK_SECONDS, _WAITS_SECONDS = 0.2, 1.0


class AgentStopped(BaseException):
    """A signal ends this agent, and with it the ranks of its machine, without a save. `name`: that of the signal."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextmanager
def stops_forwarded(notice_seconds: float, stop_file: Path) -> Iterator[Sequence[object]]:
    """The first signal asks the workers to save and stop; a second one, or the end of the notice, ends the agent.

    So do `ENDING_SIGNALS`, at once.

    Yields a sequence that is non-empty once a signal has arrived. Raises AgentStopped in the main thread. Afterwards
    restores the earlier handlers.
    """
    asked: list[tuple[str, float]] = []

    def stop(number: int, _: object) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if not asked:
            asked.append((name, now))
            with suppress(OSError):  # the disk may be full
                if notice_seconds > 0:
                    write_text(stop_file, name)
                    signal.setitimer(signal.ITIMER_REAL, notice_seconds)
                    return
        elif number != signal.SIGALRM and now - asked[0][1] < ECHO_SECONDS:
            return
        raise AgentStopped(asked[0][0])

    def end(number: int, _: object) -> None:
        raise AgentStopped(signal.Signals(number).name)

    mine = (*STOP_SIGNALS, signal.SIGALRM)
    before = {signum: signal.getsignal(signum) for signum in (*mine, *ENDING_SIGNALS)}
    for signum in mine:
        signal.signal(signum, stop)
    for signum in ENDING_SIGNALS:
        if before[signum] is not signal.SIG_IGN:  # under nohup the job outlives its terminal
            signal.signal(signum, end)
    try:
        yield asked
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def news_shared(meeting: Meeting, folder: RunFolder, shares_deaths: bool = True) -> Iterator[None]:
    """Share stops and deaths with the other machines of an attempt during the block.

    `shares_deaths`: whether a death on one machine ends the ranks of all. A lost coordinator counts as a death: the
    ranks leave, and the main thread's next use of the meeting fails.
    """
    news = _News(meeting, folder, shares_deaths)
    thread = threading.Thread(target=news.share, name="folder-news", daemon=True)
    thread.start()
    try:
        yield
    finally:
        news.over.set()
        thread.join()


class _News:
    def __init__(self, meeting: Meeting, folder: RunFolder, shares_deaths: bool) -> None:
        self.over = threading.Event()
        self._meeting = meeting
        self._folder = folder
        self._shares_deaths = shares_deaths
        self._ranks = WaitingRanks(folder.outcomes_dir)
        self._told, self._shown = Waiting(), Waiting()
        self._looked_at = 0.0

    def share(self) -> None:
        """Look at the folder until the attempt is over. Forwards each stop and each death once."""
        is_stop_known, is_death_known = False, not self._shares_deaths
        try:
            while not self.over.wait(_LOOK_SECONDS):
                self._meeting.check()
                self._share_slowness()
                self._share_waits()
                is_stop_known = is_stop_known or self._share_stop()
                is_death_known = is_death_known or self._share_death()
        except (RuntimeError, LaunchError):
            with suppress(OSError):
                write_text(self._folder.death_path, "the coordinator is lost\n")

    def _share_waits(self) -> None:
        """Tell the others if ranks of this machine rest, or have found a hang; and these what others say."""
        if not self._shares_deaths or time.monotonic() - self._looked_at < _WAITS_SECONDS:
            return
        self._looked_at = time.monotonic()
        with suppress(OSError):  # the disk may be what hangs
            if (waiting := self._ranks.read()) != self._told:
                self._told = waiting
                self._meeting.post("waiting", waiting=asdict(waiting))
            if (said := self._meeting.now().waiting) is not None and said != self._shown:
                self._shown = said
                self._ranks.show_all(said)

    def _share_slowness(self) -> None:
        """Say which rank rank 0 of this machine has found slow: if a spare waits, its machine may leave."""
        if self._folder.slow_path.exists():
            self._meeting.post("slow", rank=int(read_text(self._folder.slow_path)))
            self._folder.slow_path.unlink()

    def _share_stop(self) -> bool:
        meeting = self._meeting
        if meeting.host in meeting.now().leaving and not self._folder.stop_path.exists():
            logger.warning("this machine is slow; a spare takes its place")
            write_text(self._folder.stop_path, signal.SIGTERM.name)
        if (name := read_stop_file(self._folder.stop_path)) is not None:
            meeting.ask(name)
        elif (name := meeting.asked) is not None:
            write_text(self._folder.stop_path, name)
            if not self._folder.read_pids():
                os.kill(os.getpid(), signal.Signals[name])  # the main thread is waiting for machines
                time.sleep(_LOOK_SECONDS)
        else:
            return False
        if not self._folder.read_pids():  # there is no rank yet that could save
            os.kill(os.getpid(), signal.SIGALRM)  # `stops_forwarded` treats it as the end of the notice
        return True

    def _share_death(self) -> bool:
        if self._folder.death_path.exists():
            self._meeting.post("death")
        elif self._meeting.now().is_dead:
            write_text(self._folder.death_path, "another machine has lost a rank\n")
        else:
            return False
        return True
