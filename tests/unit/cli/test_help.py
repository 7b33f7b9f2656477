"""Commands are made of functions; `--version`, shell completion, help that is not cut, commands of earlier versions."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from echelon.cli import main
from echelon.cli.api import models
from echelon.cli.commands.options import OptionsOf, make_command
from echelon.cli.main import COMMANDS, FORMER, app
from tests.house.source_tree import ROOT

_HELP_OF = [[], ["checkpoint"], *([name] for name in COMMANDS), *(["checkpoint", name] for name in ("list", "verify"))]


@pytest.mark.parametrize("words", _HELP_OF, ids=" ".join)
def test_no_line_of_the_help_is_cut(words):
    answer = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*words, "--help"])
    assert answer.exit_code == 0
    lines = [line for line in answer.output.splitlines() if not line.startswith("Usage:")]
    assert len(lines) > 5
    assert [line for line in lines if line.rstrip().endswith("...") or len(line) > 80] == []


def test_every_command_says_what_it_does():
    listed = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"]).output.split("Commands:")[1].splitlines()[1:]
    assert [line.split()[0] for line in listed] == [*COMMANDS, "checkpoint"]
    assert all(len(line.split()) > 3 and line.endswith(".") for line in listed)


def test_the_help_imports_no_recipes():
    code = "from echelon.cli.main import app; app(['--help'], standalone_mode=False)"
    code += "; import sys; assert not {'echelon.recipe', 'yaml', 'numpy', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_version_is_shown():
    answer = CliRunner().invoke(app, ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"echelon {version('echelon')}\n")


def test_the_shell_completes_commands_and_options():
    def complete(line: str) -> list[str]:
        asked = {"_ECHELON_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        script = "import sys; sys.argv = ['echelon']; from echelon.cli.main import main; main()"
        return subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **asked}, capture_output=True, text=True, check=True
        ).stdout.split()

    assert complete("echelon ex") == ["export"]
    assert complete("echelon train --fr") == ["--fresh"]


RECIPE = str(ROOT / "recipes" / "pretrain-1.3b.yaml")


@pytest.mark.parametrize("name", FORMER)
def test_an_earlier_name_is_read_as_the_new_one(name):
    ended, new = (
        CliRunner().invoke(app, ["--quiet", name, "--help"]),
        CliRunner().invoke(app, [*FORMER[name], "--help"]),
    )
    assert (ended.exit_code, ended.stdout) == (0, new.stdout)
    assert ended.stderr == f"echelon {name} is now echelon {' '.join(FORMER[name])}\n"


def test_what_programs_read_stays_alone_on_stdout():
    ended = CliRunner().invoke(app, ["schema"])
    assert json.loads(ended.stdout)["type"] == "object" and ended.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", RECIPE, "--dry-run"], "--dry-run shows what --accept N would submit; add --accept N"),
        (["plan", RECIPE, "--quote", "--devices", "8xH100"], "--quote plans for every instance type; remove --devices"),
        (["report", "a", "--live", "--compare", "b"], "--live follows one run; remove --compare and --text."),
    ],
)
def test_options_without_a_meaning_together_are_refused(arguments, message):
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code != 0 and message in str(ended.exception)


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
