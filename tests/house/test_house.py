"""The house rules that a test can check: layers, sizes, docstrings, annotations, names, recipes."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from echelon.recipe import load_recipe
from echelon.sweep.document import load_sweep
from echelon.sweep.space import Space

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "echelon"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = {
    "errors": 0, "recipe": 0, "hardware": 0, "shape": 0, "plan": 0, "run_folder": 0, "planner": 0, "launch": 0,
    "batch": 0, "schedule": 0, "stopping": 0, "environment": 0, "manifest": 0, "instances": 0, "cost": 0,
    "stored": 0, "run_opening": 0, "progress": 0, "redaction": 0, "measured_shape": 0,
    "runtime": 1, "detection": 1, "mesh": 1,
    "machine": 1, "network": 1,
    "model": 2, "data": 2, "objective": 2, "loss": 2, "optim": 2, "optimizer": 2,
    "parallel": 3, "sync": 3, "checkpoint": 3,
    "engines": 4, "train": 4,
    "drill": 5, "sweep": 5, "cli": 5, "commands": 5, "__init__": 5, "__main__": 5,
}  # fmt: skip
TORCH_FREE = {
    "redaction",
    "errors",
    "recipe",
    "hardware",
    "instances",
    "cost",
    "shape",
    "measured_shape",
    "plan",
    "run_folder",
    "environment",
    "planner",
    "launch",
    "batch",
    "schedule",
    "stopping",
    "manifest",
    "stored",
    "run_opening",
    "progress",
}
SIBLINGS = {"parallel", "sync", "checkpoint"}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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
    here = part(path)
    for module in imports(path):
        if module.startswith("echelon."):
            there = module.split(".")[1]
            assert LAYERS[there] <= LAYERS[here], f"{here} (L{LAYERS[here]}) imports {there} (L{LAYERS[there]})"
            if here in SIBLINGS and there in SIBLINGS:
                assert here == there, f"{here} imports its sibling {there}"
    if here in TORCH_FREE:
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


def test_only_runtime_reads_the_environment():
    # But for a script that runs where echelon may not be importable yet.
    script = PACKAGE / "launch" / "sagemaker" / "enter.py"
    readers = [path for path in FILES if path != script and re.search(r"os\.(environ|getenv)", path.read_text())]
    assert {part(path) for path in readers} <= {"runtime"}, readers


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
