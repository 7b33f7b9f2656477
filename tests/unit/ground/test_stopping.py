"""Stop requests: received while the main thread is busy, separate from their echo, forced by a second one."""

import signal
import subprocess
import sys
import time

import pytest

from echelon.ground.stop_request import STOP_SIGNALS, StopRequest, agreed_stop, read_stop_file

LISTENER = """
import os, sys, time
from pathlib import Path
from echelon.ground import stop_request as stopping
stop = stopping.StopRequest()
stop.listen(Path(sys.argv[1]), lambda name: (print("again", name, flush=True), os._exit(7)))
print("listening", flush=True)
while stop.name is None:
    time.sleep(0.01)
print("asked", stop.name, stop.flags(), flush=True)
time.sleep(30)
"""


@pytest.fixture
def listener(tmp_path):
    """A process that listens for stop requests, and the stop file of its launcher."""
    word = tmp_path / "stop"
    process = subprocess.Popen([sys.executable, "-c", LISTENER, str(word)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "listening\n"
    yield process, word
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_requests_a_stop_and_a_second_one_ends_the_process(listener, number):
    process, _ = listener
    process.send_signal(number)
    flags = [*(float(each == number) for each in STOP_SIGNALS), 0.0, 0.0, 0.0]
    assert process.stdout.readline() == f"asked {number.name} {flags}\n"
    process.send_signal(signal.SIGTERM)  # within a second: the same request from another sender
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "again SIGTERM\n"
    assert process.wait(5) == 7


def test_the_stop_file_requests_a_stop_once(listener):
    process, word = listener
    word.write_text("SIGUSR1")
    assert process.stdout.readline().startswith("asked SIGUSR1")
    time.sleep(1.5)
    assert process.poll() is None, "the file that stays was taken for a second request"


def test_ranks_agree_on_a_signal_that_any_of_them_received(tmp_path):
    asked, others = StopRequest(), [StopRequest(), StopRequest()]
    asked.ask("SIGINT")
    sums = [sum(each) for each in zip(*(stop.flags() for stop in (asked, *others)), strict=True)]
    assert agreed_stop(sums) == "SIGINT"
    assert agreed_stop([0.0] * len(sums)) is None
    assert read_stop_file(tmp_path / "none") is None


def test_a_limit_is_agreed_upon_and_a_signal_after_it_is_the_first():
    stop = StopRequest()
    stop.limit = "budget.max_hours"
    assert agreed_stop(stop.flags()) == "budget.max_hours" and stop.seconds_left(60) > 1e9
    stop.ask("SIGTERM")  # a second request would have ended the process
    assert agreed_stop(stop.flags()) == "SIGTERM" and stop.seconds_left(60) < 61


BLOCKED = """
import sys
from echelon.ground import stop_request as stopping
stopping.LATE_SECONDS = 0.5
try:
    with stopping.stops_told("stopped by {signal}; and told"):
        print("begun", flush=True)
        HOW
except Exception as error:
    print("echelon:", error, file=sys.stderr, flush=True)
    import time; time.sleep(60)  # as threads that are waited for at the exit
"""
NATIVE = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", ["import time; time.sleep(60)", NATIVE], ids=["python", "native"])
def test_a_stopped_command_ends_in_time_whatever_its_main_thread_does(how, number):
    """In Python code, whose exit is held up; and in a native function that no handler interrupts."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED.replace("HOW", how)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.1)
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert told == f"echelon: stopped by {number.name}; and told\n"


LOST = """
import sys, time
from echelon.ground import stop_request as stopping

class Slow:
    def __del__(self):
        print("begun", flush=True)
        time.sleep(0.5)

try:
    with stopping.stops_told("stopped by {signal}; and told"):
        Slow()
        time.sleep(60)
except Exception as error:
    print("echelon:", error, file=sys.stderr, flush=True)
    sys.exit(3)
"""


def test_a_stop_in_a_finalizer_is_not_lost():
    """Python drops what a finalizer raises: the command would go on, after a traceback."""
    process = subprocess.Popen([sys.executable, "-c", LOST], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, told) == (3, "echelon: stopped by SIGTERM; and told\n")
