"""What the planner knows of an axis of parallelism stands in one room: few of its files name one."""

import re
from pathlib import Path

import pytest

from echelon.planner.axes.table import AXES
from tests.house.source_tree import ROOT

MOST = 5
# The name of the degree, or of the technique.
WORDS = {
    "dp": r"\bdp_(replicate|shard)\b",
    "tp": r"\btp\b|tensor[ -]parallel|sequence[ -]parallel",
    "cp": r"\bcp\b|context[ -]parallel",
    "ep": r"\bep\b|expert[ -]parallel",
    "pp": r"\bpp\b|pipeline",
}


def find_files(folder: Path, name: str) -> list[str]:
    """The files of a folder that name an axis, without the table of all axes."""
    files = [
        path for path in sorted(folder.rglob("*.py")) if path.name != "table.py" and path.parent.name != "hardware"
    ]
    return [path.name for path in files if re.search(WORDS[name], path.read_text(encoding="utf-8"), re.IGNORECASE)]


@pytest.mark.parametrize("name", [axis.name for axis in AXES])
def test_few_files_of_the_planner_name_an_axis(name):
    found = find_files(ROOT / "src" / "echelon" / "planner", name)
    assert len(found) <= MOST, f"{name} is named in {', '.join(found)}; put what they know into planner/axes/"


def test_a_file_that_names_an_axis_is_found(tmp_path):
    (tmp_path / "memory.py").write_text("ranks = plan.dp_shard * plan.cp\n")
    (tmp_path / "time.py").write_text('"""The seconds under tensor parallelism."""\nstep = capture(http)\n')
    found = {name: find_files(tmp_path, name) for name in WORDS}
    assert found == {"dp": ["memory.py"], "tp": ["time.py"], "cp": ["memory.py"], "ep": [], "pp": []}
