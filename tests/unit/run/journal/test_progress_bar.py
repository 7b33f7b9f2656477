"""The progress bar and the colours of the console, on real pseudo-terminals and pipes."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest

from echelon.ground.launch_environment import find_look
from echelon.ground.logs import PLAIN, Look

# A run of 40 steps as rank 0 logs it: its arguments are the seconds of a step and the run folder.
RUN = """
import logging, sys, time
from pathlib import Path
from types import SimpleNamespace
from echelon.ground.logs import log_as_rank
from echelon.run.journal.journal import Journal
from echelon.run.folder.run_folder import RunFolder
from echelon.ground.launch_environment import find_log_level, find_look
seconds, folder = float(sys.argv[1]), RunFolder(Path(sys.argv[2]))
folder.create()
level, logger = find_log_level(), logging.getLogger("echelon.test")
log = (folder.path / "rank.log").open("w", buffering=1)
log_as_rank(int(sys.argv[3]), log, sys.stdout, level, folder.console_path, find_look(sys.stdout, level))
journal = Journal(folder, 40, 2, SimpleNamespace(first_sequence=lambda step: 8 * step))
took = 0.0
for step in range(1, 41):
    time.sleep(seconds)
    row = {"kind": "train", "step": step, "tokens": 8, "target_tokens": 8, "loss": 4 - step / 20, "grad_norm": 1.0,
           "learning_rate": 1e-3, "tokens_per_second": 1234.5, "step_seconds": seconds, "data_wait_seconds": 0.0,
           "mfu": None, "memory_peak_bytes": 2**30, "skipped": False}
    began = time.perf_counter()
    journal.train(row)
    took += time.perf_counter() - began
    if step == 20:
        logger.warning("a warning with hf_abcDEF0123456789abcdeFGH")
        logger.error("an error")
        journal.evaluation({"kind": "eval", "step": 20, "loss": 3.5, "perplexity": 33.1, "bits_per_byte": None,
                            "reward_accuracy": None, "reward_margin": None, "sets": {}})
logger.info("the last line")
journal.close(done=True)
(folder.path / "seconds").write_text(str(took / 40))
"""
VARIABLES = ("CI", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "LINES", "ECHELON_LOG_LEVEL")
ABOVE = ["a warning with ***", "an error", "eval at step 20: loss 3.5000  perplexity 33.10", "the last line"]


class Screen:
    """What a terminal shows after these bytes, and each text that was in its last line."""

    _TOKENS = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")

    def __init__(self, text):
        self.lines, self.last_lines, row, column = [""], [], 0, 0
        for code, kind, move, words in self._TOKENS.findall(text):
            if words:
                line = self.lines[row]
                self.lines[row] = line[:column].ljust(column) + words + line[column + len(words) :]
                column += len(words)
            elif move == "\n":
                row, column = row + 1, 0
                self.lines += [""] * (row == len(self.lines))
            elif move == "\r":
                self.last_lines.append(self.lines[row])
                column = 0
            elif (kind, code) == ("K", "2"):
                self.lines[row] = ""
            elif kind == "A":
                row -= int(code or 1)
            else:
                assert kind in "mhl", f"unknown control code {code}{kind}"


def run(tmp_path, terminal=True, seconds=0.02, rank=0, **variables):
    """Run it on a terminal of 100 columns, or a pipe; return its output."""
    env = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    env |= {"TERM": "xterm-256color"} | variables
    command = [sys.executable, "-c", RUN, str(seconds), str(tmp_path), str(rank)]
    if not terminal:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(command, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the end of a terminal
            break
        output += piece
    os.close(ours)
    assert process.wait(timeout=60) == 0, output
    return output.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_a_terminal_has_one_line_that_changes_below_the_log(tmp_path):
    output = run(tmp_path)
    screen = Screen(output)
    assert [line for line in screen.lines if line] == ABOVE, "the bar is gone, and everything else is still there"
    bars = [line for line in screen.last_lines if line.startswith("step ")]
    steps = [int(re.match(r"step (\d+)/40 .* \d+% +loss \d\.\d{4} +1,234 tok/s +eta \S+", line)[1]) for line in bars]
    assert steps == sorted(steps) and len(set(steps)) >= 3
    assert {len(line) for line in bars} == {100}, "as wide as the terminal"
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor is visible"
    assert "\x1b[33ma warning" in output and "\x1b[31man error" in output and "\x1b[1meval" in output
    kept = (tmp_path / "logs" / "console.log").read_text()
    plain = run(tmp_path / "piped", terminal=False)
    assert re.sub(r"eta \S+", "", kept) == re.sub(r"eta \S+", "", plain) and "\x1b" not in plain
    assert kept.count("\nstep ") == 20 and [line for line in kept.splitlines() if line[:4] != "step"] == ABOVE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "has_bar", "has_colours"),
    [
        ({"NO_COLOR": "1"}, True, False),
        ({"CI": "true"}, False, True),
        ({"TERM": "dumb"}, False, False),
        ({"ECHELON_LOG_LEVEL": "warning"}, False, True),
        ({"ECHELON_LOG_LEVEL": "debug"}, False, True),
    ],
    ids=["no colours", "in CI", "dumb", "quiet", "verbose"],
)
def test_variables_choose_the_look_of_a_terminal(tmp_path, variables, has_bar, has_colours):
    output = run(tmp_path, seconds=0.0, **variables)
    assert ("\x1b[2K" in output) == has_bar
    assert ("\x1b[33m" in output) == ("\x1b[31m" in output) == has_colours
    assert has_bar or variables.get("ECHELON_LOG_LEVEL") == "warning" or "step 40/40" in output


class _Stream:
    def __init__(self, is_terminal):
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "variables", "look"),
    [
        (False, {}, PLAIN),
        (False, {"FORCE_COLOR": "1"}, Look(has_colours=True)),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, PLAIN),
        (True, {"FORCE_COLOR": "1", "TERM": "dumb"}, Look(has_colours=True)),
        (True, {"NO_COLOR": ""}, Look(has_colours=True, has_bar=True)),
        (True, {"NO_COLOR": "1", "CI": "1"}, PLAIN),
    ],
)
def test_the_look_of_a_stream(monkeypatch, is_terminal, variables, look):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    assert find_look(_Stream(is_terminal), 20) == look


@pytest.mark.slow
def test_forced_colours_in_a_pipe_bring_no_bar(tmp_path):
    output = run(tmp_path, terminal=False, seconds=0.0, FORCE_COLOR="1")
    assert "\x1b[33ma warning with ***\x1b[0m\n" in output and "\x1b[2K" not in output
    assert output.count("\nstep ") == 20


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_a_closed_console_ends_nothing(tmp_path, terminal):
    env = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    env |= {"TERM": "xterm"} | ({} if terminal else {"FORCE_COLOR": "1"})
    ours, theirs = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", RUN, "0.05", str(tmp_path), "0"]
    process = subprocess.Popen(command, env=env, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    os.read(ours, 10)
    os.close(ours)
    assert (process.communicate(timeout=120)[1], process.returncode) == ("", 0)
    kept = (tmp_path / "logs" / "console.log").read_text()
    assert kept.count("step ") == 22 and kept.endswith("the last line\n")


def test_the_training_thread_does_not_draw(tmp_path, monkeypatch):
    from io import StringIO

    from rich.console import Console

    from echelon.run.journal.journal import ProgressBar

    drawn = []
    monkeypatch.setattr(ProgressBar, "_render", lambda self: drawn.append(time.monotonic()) or "")
    bar = ProgressBar(Console(file=StringIO(), force_terminal=True), 10_000)
    row = {"step": 1, "loss": 1.0, "tokens_per_second": 1.0, "mfu": None, "step_seconds": 1.0, "data_wait_seconds": 0.0}
    bar.step(row, None)
    num_first = len(drawn)  # the first figures are drawn at once
    began = time.monotonic()
    for step in range(2, 10_001):
        bar.step(row | {"step": step}, 1.0)
    seconds = time.monotonic() - began
    num_drawn = len(drawn) - num_first
    bar.stop()
    assert num_drawn <= 10 * seconds + 1
