"""The tutorials run as a reader runs them, and their pictures show what such a run prints.

The pages check their own results: the loss of the text tutorial, the share of right answers of the chat tutorial.
`make pictures` draws the pictures anew from what these tests see.
"""

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.consoles import draw_console, read_console
from tests.docs.test_docs import ROOT, TUTORIALS, Session
from tests.terminal import Terminal

PICTURES = ROOT / "docs" / "pictures"
# For each command of a page. The trainings take one to three minutes on two idle cores.
SECONDS = 3600

# Lines of a training that depend on the machine.
OF_THE_MACHINE = ("why:", "plan:", "precision:", "batch:", "useful time")

Check = Callable[..., None]


def form_of(line: str) -> str:
    """A line without numbers, and without the words that the assistant reverses."""
    line = re.sub(r"\S*\d\S*|-(?=\s|$)", "#", " ".join(line.split()))
    return re.sub(r"^(> Reverse )?[a-z]+$", r"\1WORD", line)


def check_lines(picture: str, shown: str, num_lines: int | None = None) -> None:
    """Check that each line of a picture, or of its first ones, has the form of a line that was shown now."""
    forms = [form_of(line) for line in shown.splitlines()]
    for line in read_console(picture)[:num_lines]:
        whole, cut, _ = line.partition("…")
        form = form_of(whole[: whole.rfind(" ")] if cut else whole)
        found = any(each.startswith(form) if cut else each == form for each in forms)
        assert found or line.startswith(OF_THE_MACHINE), f"not shown now: {line}"


@pytest.fixture
def check_picture(request: pytest.FixtureRequest) -> Check:
    """Checks a picture of the pages against what was shown now; with --draw-pictures, draws it instead."""

    def check(name: str, shown: str, title: str, num_lines: int | None = None) -> None:
        if (folder := request.config.getoption("--draw-pictures")) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(draw_console(shown, title), encoding="utf-8")
        else:
            check_lines((PICTURES / name).read_text(encoding="utf-8"), shown, num_lines)

    return check


def shorten(output: str, head: int, tail: int) -> str:
    lines = output.splitlines()
    return "\n".join([*lines[:head], "...", *lines[-tail:]])


@pytest.mark.slow
def test_from_a_folder_of_text_to_a_first_model(tmp_path: Path, check_picture: Check) -> None:
    session = Session(tmp_path, SECONDS)
    session.run_page(ROOT / "docs" / "tutorial-text.md")
    train = "echelon train first.yaml"
    check_picture("train.svg", f"$ {train}\n{shorten(session.outputs[train], 24, 16)}", "a training")
    [(sample, output)] = [each for each in session.outputs.items() if "generate" in each[0]]
    check_picture("sample.svg", f"$ {sample}\n{output}", "a sample", num_lines=1)


@pytest.mark.slow
def test_from_right_answers_to_rewards(tmp_path: Path, check_picture: Check) -> None:
    session = Session(tmp_path, SECONDS)
    session.run_page(ROOT / "docs" / "tutorial-rewards.md")
    command = "echelon report runs/grpo-arithmetic --text"
    _, head, rest = session.outputs[command].partition("Rewards\n")
    section = (head + rest).partition("\nLoss\n")[0].rstrip()
    check_picture("rewards.svg", f"$ {command}\n...\n{section}", "rewards", num_lines=4)


@pytest.mark.slow
def test_from_chats_to_an_assistant(tmp_path: Path, check_picture: Check) -> None:
    Session(tmp_path, SECONDS).run_page(ROOT / "docs" / "tutorial-chat.md")
    questions = (tmp_path / "questions.txt").read_text().splitlines()[:4]
    command = "generate runs/assistant --chat --temperature 0 --max-tokens 64"
    terminal = Terminal(*command.split(), folder=tmp_path, PYTHONPATH=str(ROOT / "src"))
    shown = terminal.await_text(r"\n> ")
    for question in questions:
        terminal.type(f"{question}\n")
        shown += terminal.await_text(r"\n[^>]+\n> ")
    terminal.type("\x04")
    assert terminal.await_end() == 0
    shown = shown.replace("\r", "").removesuffix("\n> ")
    assert [line.removeprefix("> ") for line in shown.splitlines()[1::2]] == questions
    check_picture("chat.svg", f"$ echelon {command}\n{shown}", "a conversation")


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_small_complete_and_used(path: Path) -> None:
    picture = path.read_text(encoding="utf-8")
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"url\((?!#)|href|@font-face", picture)  # nothing is loaded from elsewhere
    assert len(picture) < 40_000
    assert any(f"(pictures/{path.name})" in (ROOT / "docs" / page).read_text(encoding="utf-8") for page in TUTORIALS)


def test_a_line_that_was_not_shown_is_found() -> None:
    shown = "$ echelon train\nstep 1/10  loss 2.5  eta 3m10s\neval at step 10: " + "loss 2.5 " * 20
    check_lines(draw_console(shown, "a <training>"), shown.replace("2.5", "3.75").replace("3m10s", "-"))
    for line in ("step 1/10  loss 2.5", "eval at step 10: " + "perplexity 3 " * 20, "evaluation"):
        with pytest.raises(AssertionError, match="not shown now"):
            check_lines(draw_console(line, "a training"), shown)
    check_lines(draw_console("> Reverse stream\nmaerts", ""), "> Reverse word\ndrow")
