"""Commands of earlier versions are those that have taken them in, with a line on stderr."""

import json

import pytest
from typer.testing import CliRunner

from echelon.cli.main import FORMER, app
from tests.house.source_tree import ROOT

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
