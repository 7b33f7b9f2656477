"""The house rules that a test can check: layers, sizes, docstrings, annotations, names, recipes."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from echelon.recipe import load_recipe
from echelon.sweep.space import Space
from echelon.sweep.sweep_file import load_sweep

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "echelon"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = {
    0: ("errors", "redaction", "extensions", "stored", "stopping", "progress", "recipe", "hardware", "planner", "runs",
        "launch", "supervise", "doctor"),
    1: ("distributed",),
    2: ("model", "data", "objectives", "optimizer"),
    3: ("parallel", "sync", "checkpoint"),
    4: ("engines", "inference", "reporting", "training"),
    5: ("lifecycle",),
    6: ("api", "drill", "sweep", "commands", "cli", "__init__", "__main__"),
}  # fmt: skip
SIBLINGS = {"parallel", "sync", "checkpoint"}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    """Without `echelon.`: train.trainer."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def package(module: str) -> str:
    return module.split(".")[0]


def layer(module: str) -> int:
    return next(number for number, names in LAYERS.items() if package(module) in names)


def imports(path: Path, top_level_only: bool = False):
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def functions(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    here = module_name(path)
    for there in imports(path):
        if there.startswith("echelon."):
            there = there.removeprefix("echelon.")
            assert layer(there) <= layer(here), f"{here} (L{layer(here)}) imports {there} (L{layer(there)})"
            if {package(here), package(there)} <= SIBLINGS:
                assert package(here) == package(there), f"{here} imports its sibling {there}"
    if layer(here) == 0:
        heavy = {name.split(".")[0] for name in imports(path, top_level_only=True)} & {"torch", "transformers"}
        assert not heavy, f"{path.name} must import without {heavy}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sizes(path):
    lines = path.read_text().count("\n")
    assert lines <= 500, f"{path}: {lines} lines"
    for node in functions(path):
        length = node.end_lineno - node.lineno + 1
        assert length <= 80, f"{path}:{node.lineno} {node.name}: {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_names_have_docstrings_and_annotations(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no module docstring"
    for node in ast.walk(tree):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        for child in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(child, ast.FunctionDef) and not child.name.startswith("_") and not node.name.startswith("_"):
                assert ast.get_docstring(child), f"{path}:{child.lineno} {node.name}.{child.name} has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"
    for node in functions(path):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [item.arg for item in arguments if item.annotation is None and item.arg not in ("self", "cls")]
        assert not bare and node.returns is not None, f"{path}:{node.lineno} {node.name} is not annotated: {bare}"


def test_no_file_is_called_utils():
    banned = {"utils", "common", "helper", "helpers", "manager", "base", "misc"}
    assert not [path for path in FILES if path.stem in banned]


def test_one_module_touches_the_environment():
    # But for a script that runs where echelon may not be importable yet.
    admitted = {PACKAGE / "supervise" / "launch_environment.py", PACKAGE / "launch" / "sagemaker" / "enter.py"}
    found = {path for path in FILES if re.search(r"os\.(environ|(get|put|unset)env)|import environ", path.read_text())}
    assert found == admitted


def test_print_is_for_the_console():
    for path in FILES:
        if part(path) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert any(keyword.arg == "file" for keyword in node.keywords), f"{path}:{node.lineno} prints"


def test_no_unfiled_todo():
    for path in FILES:
        assert not re.search(r"\b(TODO|FIXME|XXX)\b(?!.*#\d+)", path.read_text()), path


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_loads(path):
    load_recipe(path)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "sweeps").glob("*.yaml")), ids=lambda path: path.name)
def test_every_sweep_loads(path):
    sweep = load_sweep(path)
    Space(sweep, path).check(sweep.sweep.sampler == "grid")


def test_every_test_file_has_a_name_of_its_own():
    """pytest imports them all by name alone."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_every_test_is_collected(pytestconfig):
    """pytest leaves out folders by name, by default also those called dist or build."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {folder.name for path in (ROOT / "tests").rglob("test_*.py") for folder in path.relative_to(ROOT).parents}
    assert not {name for name in folders if name and any(fnmatch(name, pattern) for pattern in patterns)}
