"""`--version`, shell completion, and help that is not cut at 80 columns."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from echelon.cli.main import COMMANDS, app

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
