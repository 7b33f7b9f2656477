"""Fixtures for all tests."""

import argparse
import atexit
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.workers import WorkerPool

# The tests' models are so small that a second thread only waits for the first. Set before torch is imported, also for
# the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The user's calibrations and measured runs would change plans. No test finds one that it has not made.
os.environ["ECHELON_CACHE"] = tempfile.mkdtemp(prefix="echelon-cache-")
atexit.register(shutil.rmtree, os.environ["ECHELON_CACHE"], ignore_errors=True)

# `make test &` in a shell ignores SIGINT, and nohup ignores SIGHUP; child processes would inherit that.
# Processes that a test starts handle signals as a user's do; pytest itself still survives its terminal under nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Remove the handlers and levels that a command or an example in this process has set, so that caplog sees all.

    Also before a test: a fixture of its module may have run a command.
    """
    restore_logging()
    yield
    restore_logging()
    os.environ.pop("ECHELON_LOG_LEVEL", None)


def restore_logging() -> None:
    logger = logging.getLogger("echelon")
    logger.handlers.clear()
    logger.propagate = True
    for name, each in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "echelon" and isinstance(each, logging.Logger):
            each.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Four warm worker processes, shared by the whole session."""
    pool = WorkerPool(size=4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text that every machine has: the source of Python's argparse."""
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(Path(argparse.__file__).read_text())
    return path


@pytest.fixture
def started() -> Callable[[], list[BaseProcess]]:
    """The live child processes that the test has started, without those of the worker pool."""
    before = {process.pid for process in multiprocessing.active_children()}
    return lambda: [process for process in multiprocessing.active_children() if process.pid not in before]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --slow-part."""
    parser.addoption(
        "--slow-part", metavar="K/N", help="run part K of N; a new test moves no other test to another part"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the given part. Their names decide, so that a part is the same in each run."""
    if part := config.getoption("--slow-part"):
        number, total = map(int, part.split("/"))
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % total == number - 1]


# The make targets of the tests that a run may leave out, by their folder.
TARGETS = {name: f"make {name}" for name in ("engines", "faults", "fuzz", "gpu", "launchers", "parity")}
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_collection_finish() -> None:
    """Let the collector skip what stays to the end, the modules and the tests: it looks through a million objects."""
    gc.collect()
    gc.freeze()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the slow and the GPU tests that a run leaves out. Workers of xdist tell their controller."""
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("gpu")):
            continue
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        item.config.stash.setdefault(LEFT_OUT, Counter())[TARGETS.get(folder, "make slow")] += 1
    if items and hasattr(items[0].config, "workeroutput"):
        items[0].config.workeroutput["left out"] = dict(items[0].config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of xdist has counted."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests were not run, and what runs them."""
    if left_out := config.stash.get(LEFT_OUT, None):
        counts = ", ".join(f"{number:,} by `{target}`" for target, number in sorted(left_out.items()))
        terminalreporter.write_line(f"Not run: {counts}.")
