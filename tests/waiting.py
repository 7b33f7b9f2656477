"""Waits for what other processes and threads do."""

import time
from collections.abc import Callable
from subprocess import Popen
from typing import Any


def wait_until(
    read: Callable[[], Any],
    seconds: float = 60,
    process: Popen[Any] | None = None,
    say: Callable[[], Any] = lambda: None,
) -> Any:
    """Return what `read` gives once it is true; fail after some seconds, or as soon as `process` ends before.

    `say`: what a failure shows.
    """
    deadline = time.monotonic() + seconds
    while not (value := read()):
        assert process is None or process.poll() is None, process and process.communicate()
        assert time.monotonic() < deadline, say()
        time.sleep(0.02)
    return value
