"""Each single-process reference, trained once a session; and what `--publish` keeps of each comparison."""

from pathlib import Path

import pytest

from tests.parity import published_rows
from tests.parity.training import Row, train
from tests.workers import WorkerPool


def pytest_addoption(parser):
    group = parser.getgroup("parity")
    group.addoption(
        "--publish",
        metavar="FILE",
        type=Path,
        help="compare rows alone, and append what each differs by to FILE; rows that stand there are left out",
    )
    group.addoption(
        "--part", metavar="I/N", type=published_rows.parse_part, default=(1, 1), help="with --publish: one of N parts"
    )


def pytest_collection_modifyitems(config, items):
    path = config.getoption("--publish")
    if path is None:
        return
    rows = [item for item in items if "publish" in getattr(item, "fixturenames", ())]
    names = [str(item.callspec.params["row"]) for item in rows]
    chosen = published_rows.choose_rows(
        names, published_rows.read_measured([path]), published_rows.digest_source(), config.getoption("--part")
    )
    kept = []
    for item, name in zip(rows, names, strict=True):
        if name in chosen:
            chosen.remove(name)  # a row of the covering array stands in the whole product too
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_sessionfinish(session, exitstatus):
    if session.config.getoption("--publish") is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # every row stands in the file


@pytest.fixture(scope="session")
def publish(pytestconfig):
    """A function that keeps what a row differs by; None without `--publish`."""
    path = pytestconfig.getoption("--publish")
    if path is None:
        return None
    environment = published_rows.describe_machine()
    published_rows.begin(path, environment)

    def keep(row: Row, difference: published_rows.Difference, equal: bool, seconds: float) -> None:
        published_rows.append(path, published_rows.Measured(row, difference, equal, seconds, environment))

    return keep


@pytest.fixture(scope="module")
def eight_workers():
    """Twice as many as other tests need."""
    pool = WorkerPool(size=8)
    yield pool
    pool.close()


class References:
    """The single processes that rows are compared with, each trained once a session."""

    def __init__(self, workers, text, folders):
        self._workers, self._text, self._folders = workers, text, folders
        self._trained = {}

    def __call__(self, row):
        """The rows of its metrics."""
        if row not in self._trained:
            folder = self._folders.mktemp("reference")
            self._trained[row] = folder, train(self._workers, row, folder, self._text)
        return self._trained[row][1]

    def folder(self, row):
        """Where it was trained."""
        self(row)
        return self._trained[row][0]


@pytest.fixture(scope="session")
def references(workers, text, tmp_path_factory):
    """A function from a reference row to its metrics, trained once a session."""
    return References(workers, text, tmp_path_factory)
