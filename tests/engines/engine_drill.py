"""`echelon drill` under another engine: every fault, and a run without one to compare with."""

import json
import subprocess
import sys
from pathlib import Path

from tests.dist.command import write_recipe

FAULTS = 7


def assert_every_fault_is_survived(folder: Path, *settings: str) -> None:
    """Drill the small recipe with these settings on two processes: the losses are those of a run without faults."""
    write_recipe(folder)
    command = [sys.executable, "-m", "echelon", "drill", "recipe.json", "--nproc", "2", "--json", *settings]
    ending = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    assert ending.returncode == 0, ending
    rows = [json.loads(line) for line in ending.stdout.splitlines() if line.startswith("{")]
    found = {row["fault"]: row for row in rows}
    assert len(found) == FAULTS, ending
    assert all(each["identical"] for each in found.values()), found
    assert found["a rank killed"]["starts"] == 1, "restarted by itself"
