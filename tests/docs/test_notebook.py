"""The notebook of the documentation runs, in a kernel and as a script."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import echelon
from echelon.run.lifecycle.process_group import default_num_processes

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "first-run.ipynb"

pytestmark = pytest.mark.slow


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def check_results(folder):
    run = echelon.Run(folder / "runs" / "notebook")
    assert (run.status, run.step, run.plan.world_size) == ("done", 40, 1)
    assert (folder / "model" / "model.safetensors").is_file()


def test_the_notebook_runs_in_a_kernel(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    # A kernel of this Python, whichever kernels are installed.
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    probe = "import torch; print('group:', torch.distributed.is_initialized())"
    notebook.cells.append(nbformat.v4.new_code_cell(probe))
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = ["".join(each.get("text", "") for each in cell.get("outputs", [])) for cell in notebook.cells]
    assert any("step 40/40" in text for text in shown), "the run's messages are not shown below its cell"
    plans = [re.search(r"^cluster: (\d+) x ", text, re.MULTILINE) for text in shown]
    assert [found[1] for found in plans if found] == [str(default_num_processes()), "8"]
    planned, peak = next(re.findall(r"(\d+) MiB", text) for text in shown if text.startswith("planned: "))
    assert 0 < int(planned) < int(peak)
    assert shown[-1] == "group: False\n"
    check_results(tmp_path)


def test_the_cells_run_as_a_script(tmp_path):
    (tmp_path / "cells.py").write_text("\n".join(code_cells()))
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 40/40" in done.stdout
    check_results(tmp_path)
