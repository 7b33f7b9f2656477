"""The package of docs/new-parts.md, installed by pip, launches a run at its own target; nothing of echelon changes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.recipe_samples import DEMO

PAGE = Path(__file__).parents[2] / "docs" / "new-parts.md"
BLOCK = r"<!-- test: write (\S+) -->\n```\w+\n(.*?)^```$"

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder in which pip has installed the package."""
    folder = tmp_path_factory.mktemp("package")
    files = dict(re.findall(BLOCK, PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    assert set(files) == {"pyproject.toml", "echelon_nice.py"}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--target", str(folder / "site"), str(folder)], check=True
    )
    return folder / "site"


@pytest.fixture
def run(site, tmp_path):
    (tmp_path / "recipe.yaml").write_text(DEMO)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 500)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "echelon", *arguments],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_a_run_is_launched_followed_and_found_again(run, tmp_path):
    done = run("launch", "recipe.yaml", "launch.nice.by=19", "--to", "nice", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs on this machine at priority +19" in done.stdout and "step 10/10" in " ".join(done.stdout.split())
    [folder] = (tmp_path / "jobs").iterdir()
    assert (folder / "run.sh").read_text().startswith("nice -n 19 ")
    assert "  nice: {by: 19}\n" in (folder / "recipe.yaml").read_text()
    assert f"{folder.name}  nice  done  exit code 0  step 10" in run("status", folder.name).stdout
    assert "step 10/10" in " ".join(run("logs", folder.name).stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch.nice.by=20"], "command line: launch.nice.by=20 must be at most 19; use 19 or less."),
        (
            ["launch.nice.bye=1"],
            "command line: launch.nice.bye=1 must be left out: the section has no such key; remove it.",
        ),
        (["launch.nise.by=1"], "command line: launch.nise is not a recipe key"),
        (["launch.to=nise"], "launch.to=nise must be kubernetes, local"),
        (["launch.nodes=1+1"], "launch.nodes=1+1: no machine waits as a spare with launch.to=nice"),
    ],
)
def test_its_settings_are_checked(run, arguments, message):
    done = run("launch", "recipe.yaml", *([] if "launch.to=nise" in arguments else ["--to", "nice"]), *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
