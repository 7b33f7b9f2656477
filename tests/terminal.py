"""A command on a pseudo terminal: types, and reads what the terminal shows."""

import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

# Control sequences, such as those of readline for pasted text.
CONTROL = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


class Terminal:
    """`echelon` with these arguments, as the session leader of its own terminal. `shown`: the text not yet awaited."""

    def __init__(self, *arguments: Any, folder: Path | None = None, **environment: str) -> None:
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.chdir(folder or ".")
            command = [sys.executable, "-m", "echelon", *map(str, arguments)]
            os.execve(sys.executable, command, {**os.environ, "TERM": "xterm", **environment})
        self.shown = ""

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._end, text.encode())

    def await_text(self, pattern: str, seconds: float = 120) -> str:
        """Read until the pattern is shown; return the text up to its end."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert self._read(deadline), f"no {pattern}: {self.shown}"
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def await_end(self, seconds: float = 60) -> int:
        """Read to the end; return the exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        assert time.monotonic() < deadline, self.shown
        os.close(self._end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self, deadline: float) -> bool:
        """Read what there is; False at the end or at the deadline."""
        if not select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._end, 65536)
        except OSError:  # Linux reports a closed terminal as an error
            return False
        self.shown = CONTROL.sub("", self.shown + data.decode())
        return bool(data)
