"""The log output of a real run with two processes: on the console with --quiet and --verbose, and in the rank logs."""

import re

import pytest

from command import CommandLine, assert_no_orphan, write_recipe

pytestmark = pytest.mark.dist

RECORD = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING) (?:rank (\d) )?(echelon[\w.]*): (.*)")


@pytest.fixture
def echelon(tmp_path, monkeypatch, capfd):
    """The command in a temporary folder; no process that it starts may outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHELON_TEST_MARK", str(tmp_path))
    write_recipe(tmp_path)
    yield CommandLine(capfd, monkeypatch)
    assert_no_orphan()


def records(text):
    """(level, rank, logger, message) of each log record."""
    return [match.groups() for line in text.splitlines() if (match := RECORD.fullmatch(line))]


def test_a_quiet_run_prints_nothing_but_logs_everything(echelon, tmp_path):
    ending = echelon("train", "recipe.json", "--nproc", "2", "-q")
    assert (ending.code, ending.out, ending.err) == (0, "", "")
    log = records((tmp_path / "runs" / "tiny" / "logs" / "rank-00000.log").read_text())
    steps = [message for _, _, name, message in log if name == "echelon.reporting.journal" and "step" in message]
    assert len(steps) >= 6 and {(level, rank) for level, rank, *_ in log} == {("INFO", "0")}


def test_a_verbose_run_prints_time_rank_and_logger(echelon, tmp_path):
    ending = echelon("-v", "train", "recipe.json", "--nproc", "2")
    assert ending.code == 0
    shown = records(ending.out)
    assert len(shown) == len(ending.out.splitlines()), "every line is a record"
    assert {rank for _, rank, *_ in shown} == {None, "0"}
    assert {level for level, *_ in shown} == {"DEBUG", "INFO"}
    for rank in range(2):
        log = records((tmp_path / "runs" / "tiny" / "logs" / f"rank-{rank:05d}.log").read_text())
        assert ("DEBUG", str(rank), "echelon.distributed.runtime") in {each[:3] for each in log}
