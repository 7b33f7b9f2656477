"""`echelon drill` under another engine: every fault, and a run without one to compare with."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import write_recipe

FAULTS = 7


def drill(folder: Path, *settings: str) -> dict[str, dict[str, Any]]:
    """The findings by fault, of the small recipe with these settings on two processes; each was survived."""
    write_recipe(folder)
    command = [sys.executable, "-m", "echelon", "drill", "recipe.json", "--nproc", "2", "--json", *settings]
    ending = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    assert ending.returncode == 0, ending
    rows = [json.loads(line) for line in ending.stdout.splitlines() if line.startswith("{")]
    found = {row["fault"]: row for row in rows}
    assert len(found) == FAULTS, ending
    return found
