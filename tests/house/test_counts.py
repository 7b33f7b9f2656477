"""How much there is: counts that may only fall. A test fails above a limit, and below it until the limit is lowered."""

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup as Group
from typer.main import get_command

from echelon.cli.main import app
from echelon.recipe.document import Recipe
from echelon.recipe.keys import section_fields, subsection
from echelon.recipe.section import Section
from tests.house.source_tree import ECHELON, ROOT, SourceTree

MAX_ARGUMENTS = 8
VAGUE_NAMES = {"found", "given", "here", "known", "own", "place", "wanted"}  # a variable has the name of what it holds


def count_files(tree: SourceTree) -> int:
    """The files of the package."""
    return len(tree.modules)


def count_lines(tree: SourceTree) -> int:
    """Their lines, with comments and empty ones."""
    return sum(len(module.text.splitlines()) for module in tree)


def count_raises(tree: SourceTree) -> int:
    """`raise` of an exception that is called with arguments: each is a text that somebody must understand."""
    nodes = (node for module in tree for node in ast.walk(module.tree))
    return sum(isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and bool(node.exc.args) for node in nodes)


def count_vague_names(tree: SourceTree) -> int:
    """Assignments to variables with vague names, in loops and in classes too; parameters do not count."""
    names = (node for module in tree for node in ast.walk(module.tree) if isinstance(node, ast.Name))
    return sum(node.id in VAGUE_NAMES and isinstance(node.ctx, ast.Store) for node in names)


def find_doubled_classes(tree: SourceTree) -> list[str]:
    """Names of classes that several modules define."""
    names = Counter(
        name for module in tree for name in {node.name for node in module.tree.body if isinstance(node, ast.ClassDef)}
    )
    return sorted(name for name, count in names.items() if count > 1)


def find_wide_functions(tree: SourceTree) -> list[str]:
    """Functions and methods with many arguments."""
    sizes = {
        f"{module.short}.{node.name}": len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
        for module in tree
        for node in module.functions()
    }
    return sorted(name for name, size in sizes.items() if size > MAX_ARGUMENTS)


def count_keys(section: type[Section], seen: set[type[Section]] | None = None) -> int:
    """The keys of a section and of those inside it. A section that stands in two places counts once."""
    seen = set() if seen is None else seen
    if section in seen:
        return 0
    seen.add(section)
    inner = [subsection(field.annotation) for field in section_fields(section).values()]
    return sum(1 if child is None else count_keys(child, seen) for child in inner)


def count_commands(group: Group) -> int:
    """The commands that the help shows, and those of its groups."""
    commands = [group.get_command(None, name) for name in group.list_commands(None)]
    shown = [command for command in commands if not command.hidden]
    return sum(count_commands(command) if isinstance(command, Group) else 1 for command in shown)


def count_arrows(tree: SourceTree, package: str) -> int:
    """Pairs of rooms, the modules and packages directly inside a package, of which the first imports the second."""
    start = f"{package}."
    rooms = {name: name.removeprefix(start).partition(".")[0] for name in tree.modules if name.startswith(start)}
    targets = {(room, target) for name, room in rooms.items() for target in tree.imported(tree.modules[name])}
    return len({(room, rooms[target]) for room, target in targets if rooms.get(target, room) != room})


def count_test_lines() -> int:
    """The lines of the tests."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))


# What is counted, the limit, and how far below it the count may be.
COUNTS: dict[str, tuple[Callable[[], int], int, int]] = {
    "files": (lambda: count_files(ECHELON), 481, 0),
    "lines": (lambda: count_lines(ECHELON), 95_967, 250),
    "raises with a text": (lambda: count_raises(ECHELON), 1_325, 5),
    "vague names of variables": (lambda: count_vague_names(ECHELON), 117, 0),
    "class names of several modules": (lambda: len(find_doubled_classes(ECHELON)), 0, 0),
    "functions with more than 8 arguments": (lambda: len(find_wide_functions(ECHELON)), 19, 0),
    "arrows in the planner": (lambda: count_arrows(ECHELON, "echelon.planner"), 110, 0),
    "recipe keys": (lambda: count_keys(Recipe), 290, 0),
    "commands": (lambda: count_commands(get_command(app)), 21, 0),
    "lines of tests": (count_test_lines, 82_650, 500),
}


@pytest.mark.parametrize(("name", "row"), COUNTS.items())
def test_a_count_only_falls(name, row):
    count, limit, slack = row[0](), row[1], row[2]
    assert count <= limit, f"{name}: {count:,}, at most {limit:,}: remove as many as you add"
    assert count >= limit - slack, f"{name}: {count:,}; lower its limit from {limit:,}"


def plant(folder: Path, **files: str) -> SourceTree:
    """Write a package with these files."""
    for name, text in {"__init__": "", **files}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return SourceTree(folder)


def test_what_is_counted_is_found(tmp_path):
    tree = plant(
        tmp_path,
        a="class Twice: ...\nclass Once: ...\ndef f(a, b, c, d, *, e, f, g, h): ...\nown = row = here[known]\n",
        b="class Twice: ...\ndef g():\n    from . import a\n    raise OSError('text')\n    raise\n    raise KeyError\n",
        c="from . import a, b\nclass C:\n    class Once: ...\n    def wide(self, b, c, d, e, f, g, h, i): ...\n",
    )
    assert (count_files(tree), count_lines(tree), count_raises(tree)) == (4, 14, 1)
    assert count_vague_names(tree) == 1
    assert find_doubled_classes(tree) == ["Twice"]
    assert find_wide_functions(tree) == ["c.wide"]
    assert count_arrows(tree, tmp_path.name) == 3


class Inner(Section):
    """A section."""

    a: int = 1
    b: int = 2


class Outer(Section):
    """A section with two others of one class, one of them in a list."""

    inner: Inner = Inner()
    others: tuple[Inner, ...] = ()
    c: int = 3


def test_keys_of_sections_are_counted_once():
    assert count_keys(Outer) == 3


def test_hidden_commands_are_not_counted():
    app, inner = typer.Typer(), typer.Typer()
    app.add_typer(inner, name="inner")
    for name, hidden in (("a", False), ("b", True)):
        app.command(name, hidden=hidden)(lambda: None)
        inner.command(name, hidden=hidden)(lambda: None)
    inner.command("c")(lambda: None)
    assert count_commands(get_command(app)) == 3
