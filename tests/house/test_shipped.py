"""Shipped recipes and sweeps load, files beside the modules are packaged, and all tests are run."""

import tomllib
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.recipe.load import load_recipe
from echelon.tools.sweep.space import Space
from echelon.tools.sweep.sweep_file import load_sweep
from tests.house.source_tree import ROOT


def check_sweep(path: Path) -> None:
    """Raise ConfigError for a sweep with a value that its recipe refuses."""
    sweep = load_sweep(path)
    Space(sweep, path).check(sweep.sweep.sampler == "grid")


def find_left_out(paths: Iterable[Path], patterns: Iterable[str]) -> set[str]:
    """Test folders that pytest skips; by default also folders named dist or build."""
    folders = {part for path in paths for part in path.parent.parts}
    return {name for name in folders if any(fnmatch(name, pattern) for pattern in patterns)}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_loads(path):
    load_recipe(path)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "sweeps").glob("*.yaml")), ids=lambda path: path.name)
def test_every_sweep_loads(path):
    check_sweep(path)


def find_unpackaged(package: Path, patterns: Iterable[str]) -> list[Path]:
    """Files of a package that are neither modules nor among its data, so that an installed echelon would lack them."""
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [path for path in files if path.suffix != ".py" and path not in packaged]


def test_every_file_beside_a_module_is_packaged(tmp_path):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["echelon"]
    assert not find_unpackaged(ROOT / "src" / "echelon", patterns)
    (tmp_path / "a.yaml").touch()
    (tmp_path / "b.toml").touch()
    assert find_unpackaged(tmp_path, patterns) == [tmp_path / "b.toml"]


def test_every_test_is_collected(pytestconfig):
    paths = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    assert not find_left_out(paths, pytestconfig.getini("norecursedirs"))


def test_a_recipe_and_a_sweep_that_do_not_load_are_found(tmp_path):
    sweep = next((ROOT / "recipes" / "sweeps").glob("*.yaml")).read_text(encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text("train: {step: 3}", encoding="utf-8")
    (tmp_path / "sweep.yaml").write_text(sweep + "\nunheard_of: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError):
        load_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(ConfigError):
        check_sweep(tmp_path / "sweep.yaml")


def test_tests_that_would_not_run_are_found():
    assert find_left_out([Path("tests/dist/test_x.py"), Path("tests/unit/test_y.py")], ["dist", ".*"]) == {"dist"}


def test_the_demo_is_the_one_that_the_command_trains():
    """A file, not a link into the source: the folder of recipes may be copied."""
    shipped = ROOT / "recipes" / "demo.yaml"
    assert not shipped.is_symlink()
    assert shipped.read_bytes() == (ROOT / "src" / "echelon" / "cli" / "commands" / "demo.yaml").read_bytes()
