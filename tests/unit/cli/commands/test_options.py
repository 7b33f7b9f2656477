"""A command is made of a function: its parameters are arguments and options, its docstring the help."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from echelon.cli import main
from echelon.cli.api import models
from echelon.cli.commands.options import OptionsOf, make_command

GIVEN: dict[str, Any] = {}


def shared(
    target: "Unknown", data: Annotated[str | Path | None, typer.Option("--data", metavar="PATH")] = None, *,  # noqa: F821
    step: str | int | None = None, words: Sequence[str] = (), left_out: object = None, twice: str = "of the function",
) -> None:  # fmt: skip
    """Do it.

    Args:
        data: text; or what `step`
            has written in `a file`.
        words: one word.
        twice: not this line.
    """


def own(
    path: Path, *, twice: str = "of the command", by: Literal["time", "cost"] | None = None,
    is_fast: Annotated[bool, typer.Option("--fast", "-f", help="Not this one.")] = False,
    count: Annotated[int, typer.Option(min=1, help="A number.")] = 2,
    **others: Annotated[Any, OptionsOf(["models:shared"], without=["left_out"])],
) -> None:  # fmt: skip
    """Do this. More of it.

    Args:
        twice: this line.
        is_fast: `count` is not needed.
    """
    GIVEN.update(path=path, twice=twice, is_fast=is_fast, count=count, by=by, **others)


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(models, "shared", shared, raising=False)
    GIVEN.clear()
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(make_command(own))
    return lambda words: CliRunner(env={"COLUMNS": "100"}).invoke(app, words)


def test_parameters_become_options(call):
    defaults = {"twice": "of the command", "is_fast": False, "count": 2, "by": None, "data": None, "step": None}
    assert not call("a").exit_code
    assert GIVEN | {"words": [*GIVEN["words"]]} == {"path": Path("a"), **defaults, "words": []}
    assert not call("a --twice b -f --count 3 --by cost --data c --step 4 --words d --words e").exit_code
    given = {"twice": "b", "is_fast": True, "count": 3, "by": "cost", "data": Path("c"), "step": "4"}
    assert {"path": Path("a"), **given, "words": ["d", "e"]} == GIVEN


@pytest.mark.parametrize("words", ["", "--count 0", "--by luck", "--left-out b", "--no-fast", "--target b"])
def test_what_no_parameter_takes_is_refused(call, words):
    assert call(f"a {words}" if words else "").exit_code == 2 and not GIVEN


def test_the_help_is_the_docstring(call):
    lines = [" ".join(line.split()) for line in call("--help").output.splitlines()]
    assert "Do this. More of it." in lines and "Args:" not in lines
    assert {"--twice <str> This line. [default: of the command]", "-f, --fast --count is not needed."} <= {*lines}
    assert {"--count <int range> A number. [default: 2; x>=1]", "--words <list[str]> One word."} <= {*lines}
    assert "--data PATH Text; or what --step has written in a file." in lines


def test_every_option_of_a_command_has_a_help():
    commands = [get_command(main.app).get_command(None, name) for name in main.COMMANDS]
    silent = [f"{command.name} {option.name}" for command in commands for option in command.params if not option.help]
    assert len(commands) == 18 and not silent
