"""The workflows of GitHub run nothing but make targets that exist; `make lint` checks the files themselves."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BESIDES = {"sudo apt-get update"}  # before make installs Debian packages


def find_unknown_commands(commands: str, makefile: str) -> list[str]:
    """The lines that do not start a target of the Makefile."""
    known = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
    targets = {line: re.match(r"make ([\w-]+)( [A-Z]+=.+)?$", line) for line in commands.splitlines()}
    return [line for line, match in targets.items() if line not in BESIDES and (not match or match[1] not in known)]


def test_other_commands_and_targets_that_do_not_exist_are_found():
    found = find_unknown_commands("make test PART=1\nmake tests\npip install x\n", "test: a\n\techo\nNAME := b\n")
    assert found == ["make tests", "pip install x"]


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / ".pre-commit-config.yaml"], ids=lambda path: path.stem)
def test_workflows_start_targets_of_the_makefile(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = [step for job in content.get("jobs", {}).values() for step in job["steps"]]
    steps += [{"run": hook["entry"]} for repository in content.get("repos", []) for hook in repository["hooks"]]
    commands = "\n".join(step["run"] for step in steps if "run" in step)
    assert re.search(r"^make ", commands, re.MULTILINE)
    assert find_unknown_commands(commands, (ROOT / "Makefile").read_text(encoding="utf-8")) == []
