"""Tests and benchmarks use what is public, so that a private name can change without them.

A private name that is replaced as text (`monkeypatch.setattr`, `mock.patch.object`) is not counted: tests plant faults
that way.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.source_tree import ROOT

# At most four accesses, each with a reason: ("tests/parity/test_x.py", "trainer._name"): "why no public way exists".
ALLOWED: dict[tuple[str, str], str] = {}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def find_defined(tree: ast.AST) -> set[str]:
    """The private names that a file defines: functions, classes, variables, and attributes that it assigns to self."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return set(filter(is_private, names))


def find_reaches(tree: ast.AST, names_of_echelon: set[str]) -> Iterator[str]:
    """The places where a file imports or reads a private name of echelon. Names that it defines itself are its own."""
    private = names_of_echelon - find_defined(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "echelon":
                yield from (f"{module}.{each.name}" for each in names if is_private(each.name))
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name) if name in private:
                yield ast.unparse(node)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]) if name in private:
                yield ast.unparse(node)


def read_names_of_echelon() -> set[str]:
    return set().union(*(find_defined(ast.parse(path.read_text())) for path in (ROOT / "src").rglob("*.py")))


def list_files() -> list[Path]:
    return [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_tests_and_benchmarks_use_what_is_public():
    names = read_names_of_echelon()
    found = {
        (path.relative_to(ROOT).as_posix(), reach)
        for path in list_files()
        for reach in find_reaches(ast.parse(path.read_text()), names)
    }
    assert found == set(ALLOWED), "use or add a public name"
    assert len(ALLOWED) < 5 and all(ALLOWED.values())


def test_it_finds_what_it_forbids():
    names = {"_decoder", "_merge", "_own"}
    tree = ast.parse(
        "from echelon.run.training.bad_steps import _merge\n"
        "from transformers.modeling import _other\n"
        "class Own(Base):\n"
        "    def __init__(self):\n"
        "        self._own = self._decoder = super()._merge\n"
        "engine._merge(config._attn_implementation, own._own)\n"
        "getattr(engine, '_merge')\n"
        "monkeypatch.setattr(engine, '_merge', None)\n"
    )
    assert sorted(find_reaches(tree, names)) == [
        "echelon.run.training.bad_steps._merge", "engine._merge", "getattr(engine, '_merge')"
    ]  # fmt: skip
    assert "_retries" in read_names_of_echelon() and len(list_files()) > 300
