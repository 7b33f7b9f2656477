"""The workflows of GitHub start commands that exist, and actionlint finds no fault with them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def find_unknown_targets(commands: str, makefile: str) -> list[str]:
    """The targets of `make` in these commands that a Makefile does not have."""
    known = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
    return [target for target in re.findall(r"^make ([\w-]+)", commands, re.MULTILINE) if target not in known]


def test_a_target_that_does_not_exist_is_found():
    assert find_unknown_targets("make test PART=1\nmake tests\n", "test: a\n\techo\nNAME := b\n") == ["tests"]


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / ".pre-commit-config.yaml"], ids=lambda path: path.stem)
def test_workflows_start_targets_of_the_makefile(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = [step for job in content.get("jobs", {}).values() for step in job["steps"]]
    steps += [{"run": hook["entry"]} for repository in content.get("repos", []) for hook in repository["hooks"]]
    commands = "\n".join(step["run"] for step in steps if "run" in step)
    assert re.search(r"^make ", commands, re.MULTILINE)
    assert find_unknown_targets(commands, (ROOT / "Makefile").read_text(encoding="utf-8")) == []


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_finds_no_fault():
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
