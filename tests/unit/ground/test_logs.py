"""Log records go to a console and to a log per rank, and nowhere by default."""

import io
import logging
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from echelon.cli.main import app
from echelon.ground.errors import ConfigError
from echelon.ground.launch_environment import find_log_level
from echelon.ground.logs import RankFilter, keep_console, keep_console_in, keep_line, log_as_rank, log_to_console

LOGGER = logging.getLogger("echelon.learn.data.prepare")
DETAILED = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "


class Stream(io.StringIO):
    """A console that records each write and counts flushes."""

    def __init__(self):
        super().__init__()
        self.writes, self.flushes = [], 0

    def write(self, text):
        self.writes.append(text)
        return super().write(text)

    def flush(self):
        self.flushes += 1


def test_a_console_line_is_the_message_in_one_write():
    console = Stream()
    log_to_console(console=console)
    LOGGER.info("data: %d tokens", 5)
    LOGGER.warning("The disk is full.")
    LOGGER.debug("not shown")
    assert console.writes == ["data: 5 tokens\n", "The disk is full.\n"] and console.flushes >= 2


def test_the_level_selects_what_the_console_shows():
    quiet, verbose = Stream(), Stream()
    log_to_console(logging.WARNING, quiet)
    LOGGER.info("news")
    LOGGER.warning("trouble")
    log_to_console(logging.DEBUG, verbose)
    LOGGER.debug("detail")
    assert quiet.getvalue() == "trouble\n"  # and nothing from the second call on
    assert re.fullmatch(rf"{DETAILED}DEBUG echelon\.learn\.data\.prepare: detail\n", verbose.getvalue())


@pytest.mark.parametrize(
    ("level", "shown", "logged"),
    [
        (logging.DEBUG, ["detail", "news", "trouble"], ["DEBUG", "INFO", "WARNING"]),
        (logging.INFO, ["news", "trouble"], ["INFO", "WARNING"]),
        (logging.WARNING, ["trouble"], ["INFO", "WARNING"]),  # a log is complete even with a quiet console
    ],
)
def test_a_rank_has_a_log_and_rank_0_also_a_console(level, shown, logged):
    log, console = Stream(), Stream()
    log_as_rank(3, log, console, level)
    LOGGER.debug("detail")
    LOGGER.info("news")
    LOGGER.warning("trouble")
    assert [line.split(": ")[-1] for line in console.getvalue().splitlines()] == shown
    found = [
        re.fullmatch(rf"{DETAILED}(\w+) rank 3 echelon\.learn\.data\.prepare: \w+", line)
        for line in log.getvalue().splitlines()
    ]
    assert [each and each[1] for each in found] == logged


def test_secrets_are_redacted():
    console = Stream()
    log_to_console(console=console)
    LOGGER.info("using %s", "hf_abcDEF0123456789abcdeFGH")
    assert console.getvalue() == "using ***\n"


def test_a_kept_console_has_what_came_before_its_file_and_what_a_quiet_console_omits(tmp_path):
    console, path = Stream(), tmp_path / "console.log"
    path.write_text("an earlier start\n")
    log_to_console(logging.WARNING, console)
    keep_console()
    LOGGER.info("early")
    keep_console_in(path)
    keep_console_in(tmp_path / "another.log")  # an agent does it before every attempt
    LOGGER.warning("hf_abcDEF0123456789abcdeFGH")
    keep_line("echelon: it ended with hf_abcDEF0123456789abcdeFGH")
    LOGGER.debug("not shown")
    assert path.read_text() == "an earlier start\nearly\n***\nechelon: it ended with ***\n"
    assert console.getvalue() == "***\n" and not (tmp_path / "another.log").exists()
    log_to_console(console=console)
    LOGGER.info("later")
    keep_line("later")
    assert "later" not in path.read_text()


def test_rank_0_keeps_its_console(tmp_path):
    log, console, path = Stream(), Stream(), tmp_path / "console.log"
    log_as_rank(0, log, console, copy=path)
    LOGGER.info("news")
    assert path.read_text() == console.getvalue() == "news\n"


def test_a_file_that_cannot_be_opened_ends_nothing(tmp_path):
    console = Stream()
    log_to_console(console=console)
    keep_console_in(tmp_path / "missing" / "console.log")
    LOGGER.info("news")
    assert console.getvalue() == "news\n"


def test_handlers_of_the_caller_are_kept_and_can_show_the_rank():
    mine = logging.StreamHandler(io.StringIO())
    mine.addFilter(RankFilter(7))
    mine.setFormatter(logging.Formatter("%(rank)s %(message)s"))
    logging.getLogger("echelon").addHandler(mine)
    log_to_console(console=Stream())
    log_to_console(console=Stream())
    LOGGER.info("news")
    assert mine.stream.getvalue() == "7 news\n"
    assert len(logging.getLogger("echelon").handlers) == 2


def test_importing_installs_no_handler():
    code = (
        "import logging, echelon.cli.main, echelon.run.lifecycle.worker; print(logging.getLogger('echelon').handlers)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_closed_pipe_does_not_end_the_process():
    code = (
        "import logging, sys; from echelon.ground.logs import log_to_console; log_to_console(); sys.stdin.read()\n"
        "for number in range(3): logging.getLogger('echelon').info('line')\n"
        "sys.stderr.write('goes on')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == "goes on" and process.wait(timeout=30) == 0
    process.stderr.close()


def test_a_full_disk_does_not_end_the_process():
    console = Stream()
    with open("/dev/full", "wb", buffering=0) as full:
        log_as_rank(0, io.TextIOWrapper(full, write_through=True), console)
        LOGGER.info("news")
        LOGGER.info("more")
    assert console.getvalue() == "news\nmore\n"


def commands(group, name="echelon"):
    for each in group.commands:
        command = group.get_command(None, each)
        yield from (
            commands(command, f"{name} {each}") if hasattr(command, "commands") else [(f"{name} {each}", command)]
        )


def test_every_command_takes_the_options():
    found = dict(commands(get_command(app)))
    assert {"echelon train", "echelon checkpoint verify", "echelon import"} <= found.keys()
    for name, command in found.items():
        options = [option for parameter in command.params for option in parameter.opts]
        assert {"-v", "--verbose", "-q", "--quiet"} <= set(options), name


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["-q", "init"], logging.WARNING),
        (["init", "--quiet"], logging.WARNING),
        (["--verbose", "init"], logging.DEBUG),
        (["-q", "init", "-v"], logging.DEBUG),
        (["init"], logging.INFO),
    ],
)
def test_the_options_set_the_level_of_this_process_and_its_children(echelon, arguments, level):
    assert not echelon(*arguments, "recipe.yaml")[0]
    assert logging.getLogger("echelon").level == find_log_level() == level


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("ECHELON_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"^ECHELON_LOG_LEVEL=loud is not a log level; use one of debug, info"):
        find_log_level()
