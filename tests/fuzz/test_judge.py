"""The time limit of a fuzz test: a wait ends, and a busy machine is no wait."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.fuzz.judge import TooLong, limited_time


def test_a_wait_and_a_loop_end():
    for block in (lambda: time.sleep(60), lambda: [None for _ in iter(int, 1)]):
        started = time.monotonic()
        with pytest.raises(TooLong), limited_time(0.2):
            block()
        assert time.monotonic() - started < 30
    with limited_time(0.2):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_time_of_other_programs_is_not_counted():
    """On a processor shared with two busy programs, 0.6 seconds of work take two seconds."""
    before = os.sched_getaffinity(0)
    processor = min(before)
    code = "print(flush=True)\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for pid in (0, *(other.pid for other in others)):
            os.sched_setaffinity(pid, {processor})
        for other in others:
            other.stdout.readline()  # it has started
        started, worked = time.monotonic(), time.thread_time()
        with limited_time(1.0):
            while time.thread_time() - worked < 0.6:
                pass
        assert time.monotonic() - started > 1.0
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.communicate()
