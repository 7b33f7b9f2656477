"""Text that may be shown: of strangers none controls a terminal or breaks a page; sizes in bytes."""

import json
import logging
import os
import pty
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from echelon.cli.commands.terminal import show, show_made, show_styled
from echelon.ground.errors import ConfigError
from echelon.ground.logs import log_to_console
from echelon.ground.redaction import make_encodable, make_printable
from echelon.ground.sizes import render_bytes
from echelon.run.report.blocks import Series
from echelon.run.report.picture import Chart, ChartAxis, draw_picture
from tests.unit.tools.report.test_report import Page, write_lines, write_run
from tests.unit.tools.report.test_watch import served

# Sets a terminal's title, and colours in one byte; turns text around; the half of a pair.
NASTY = "a\x1b]0;pwned\x07b\x9b31mc\x9d\u202ed\u2066e\x00\x08\rf\x7f\ud800g"
CLEAN = "a\ufffd]0;pwned\ufffdb\ufffd31mc\ufffd\ufffdd\ufffde\ufffd\ufffd\ufffdf\ufffd\ufffdg"
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def write_nasty_run(path):
    """A run in whose files every text is nasty."""
    environment = {
        "hostname": NASTY, "num_cores": 1, "platform": NASTY, "python": NASTY, "packages": {NASTY: NASTY},
        "git_revision": NASTY, "variables": {NASTY: NASTY}, "cluster": {"accelerator": {"name": NASTY}},
    }  # fmt: skip
    write_run(path, ending="failure", plan={"strategy": NASTY, NASTY: NASTY}, environment=environment)
    with (path / "events.jsonl").open("a") as events:
        for event in ("straggler", "restart", "warning", "failure"):
            row = {"event": event, "time": 1.8e9, "step": 41, "host": NASTY, "message": NASTY, "action": NASTY}
            events.write(json.dumps(row) + "\n")
    write_lines(path / "samples.jsonl", [{"step": 20, "prompt": NASTY, "text": NASTY}])
    (path / "recipe.yaml").write_text("model: {checkpoint: \u202ex}\n")
    (path / "logs").mkdir()
    (path / "logs" / "console.log").write_text(NASTY.replace("\ud800", "") + "\n")
    return path


def test_control_characters_are_replaced_and_nothing_else():
    assert make_printable(NASTY) == CLEAN
    text = "tab\tline\r\nä€😀\u200f\u2028⣿"
    assert make_printable(text) == make_encodable(text) == text
    assert make_encodable(NASTY) == NASTY.replace("\ud800", "\ufffd")


@pytest.mark.parametrize(
    "command",
    [
        "report a --text",
        "report a --text --compare a",
        "report a --live",
        "runs a",
        "status a",
        "logs a",
        "runs a --json",
    ],
)
def test_a_run_does_not_control_the_terminal(echelon, tmp_path, command):
    write_nasty_run(tmp_path / "a")
    code, out, err = echelon(*command.split())
    assert code == 0 and err == "" and out
    assert not CONTROL.search(out)
    if command in ("report a --text", "logs a"):
        assert "a\ufffd]0;pwned" in out


def test_a_run_does_not_break_its_pages(echelon, tmp_path):
    path = write_nasty_run(tmp_path / "a")
    for command in ("report a", "report a --compare a"):
        code, out, err = echelon(*command.split())
        assert code == 0 and err == "" and out.startswith("report: ")
    written = {each.name: each.read_text() for each in path.glob("*.html")}
    assert len(written) == 2
    with served(path) as (_, ask):
        status, live, _ = ask()
    assert status == 200
    for text in (*written.values(), live):
        assert not CONTROL.search(text) and Page(text).is_whole
    assert "a\ufffd]0;pwned" in written["report.html"] and "a\ufffd]0;pwned" in live


def test_a_picture_with_any_name_is_xml():
    chart = Chart(
        NASTY, ChartAxis(NASTY, "number"), ChartAxis(NASTY, "number"), [Series(NASTY, [(1.0, 1.0), (2.0, 2.0)])] * 2
    )
    assert ElementTree.fromstring(draw_picture([chart])).attrib["aria-label"] == CLEAN


def test_messages_and_log_lines_are_clean(capsys):
    assert str(ConfigError(NASTY)) == CLEAN
    log_to_console()
    logging.getLogger("echelon.test").info(NASTY)
    assert capsys.readouterr().out == f"{CLEAN}\n"


def test_text_that_a_model_makes_is_exact_in_a_pipe_and_clean_on_a_terminal(monkeypatch, capsys):
    show(NASTY)
    show_styled([(NASTY, "green")], coloured=False)
    assert capsys.readouterr().out == f"{CLEAN}\n{CLEAN}\n"
    show_made(NASTY)
    assert capsys.readouterr().out == NASTY.replace("\ud800", "\ufffd") + "\n"
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8", newline="") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        show_made(NASTY)
        monkeypatch.undo()
    assert os.read(ours, 4096).decode().rstrip("\r\n") == CLEAN
    os.close(ours)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10.24 * 2**20, "10.2 MiB"),
        (9.996 * 2**20, "10.0 MiB"), (99.96 * 2**20, "100 MiB"), (80e9, "74.5 GiB"), (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000 TiB"), (1023.9 * 2**20, "1024 MiB"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits_and_a_binary_unit(num_bytes, text):
    assert render_bytes(num_bytes) == text
