"""The wheel of echelon that a job brings: what is in it, and that pip installs it with the project's requirements."""

import io
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

from packaging.requirements import Requirement

from echelon import __version__
from echelon.ground.extras import EXTRAS
from echelon.launch import source_bundle as bundle

FOR_DEVELOPERS = {"test", "slow", "site", "lint", "release"}


def test_the_wheel_has_the_source_of_echelon():
    name, wheel = bundle.build_wheel()
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        names = archive.namelist()
        assert archive.read("echelon/launch/job.py") == (bundle.PACKAGE / "launch" / "job.py").read_bytes()
    assert "echelon/__init__.py" in names and not any("__pycache__" in name for name in names)
    bundle.build_wheel.cache_clear()
    assert bundle.build_wheel() == (name, wheel)


def test_pip_installs_the_wheel_of_a_job(tmp_path):
    name, wheel = bundle.build_wheel()
    (tmp_path / name).write_bytes(wheel)
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--target", str(tmp_path / "site"), str(tmp_path / name)], check=True)
    [info] = (tmp_path / "site").glob("*.dist-info")
    found = PathDistribution(info)
    assert found.version == __version__ and found.entry_points["echelon"].value == "echelon.cli.main:main"
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in found.requires or ()]
    for extra in ("", *EXTRAS):
        lines = [*project["dependencies"], *project["optional-dependencies"].get(extra, ())]
        chosen = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})]
        assert {(each.name, each.specifier) for each in chosen} == {
            (each.name, each.specifier) for each in map(Requirement, lines)
        }
    env = {"PYTHONPATH": str(tmp_path / "site"), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-P", "-m", "echelon", "--version"]
    assert subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True).stdout == (
        f"echelon {__version__}\n"
    )


def test_requirements_equal_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [bundle.TORCH, *bundle.CORE, *bundle.HELPFUL] == project["dependencies"]
    extras = {extra: tuple(names) for extra, names in project["optional-dependencies"].items()}
    assert {extra: names for extra, names in extras.items() if extra not in FOR_DEVELOPERS} == EXTRAS
