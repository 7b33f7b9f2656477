"""The modules of a package with their imports and functions, for the tests of the code rules."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Modules whose tables name parts of higher layers: optimizers, file formats and objectives, whose rows say more than a
# place. All other parts that are found by name are entry points.
TABLES = {"recipe.names"}


@dataclass(frozen=True)
class Import:
    """`import source`, or `from source import names`; `source` is an absolute dotted name."""

    source: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """A file. `name` is its full dotted name; for an `__init__.py`, the name of the package."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def short(self) -> str:
        """The name without the outermost package: training.trainer."""
        return self.name.partition(".")[2] or "__init__"

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def functions(self) -> Iterator[Function]:
        """All functions, including methods and nested functions."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def imports(self, for_types: bool = True, in_functions: bool = True) -> Iterator[Import]:
        """`for_types`: include imports under `if TYPE_CHECKING`. `in_functions`: include those inside functions, and
        those by name, which are made when the name is used."""
        if in_functions and self.short not in TABLES:
            yield from map(Import, self._named())
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        for node in _walk(self.tree, for_types, in_functions):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                around = package.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(part for part in (around, node.module) if part)
                yield Import(source, tuple(alias.name for alias in node.names))

    def _named(self) -> Iterator[str]:
        """The modules that are imported by name: those of `import_module("a.b")`, and of places such as "a.b:Name"."""
        outermost = self.name.partition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
                yield from filter(None, map(self._read_text, node.args[:1]))
            elif place := re.fullmatch(rf"({outermost}(?:\.\w+)+):\w+", self._read_text(node) or ""):
                yield place[1]

    def _read_text(self, node: ast.AST) -> str | None:
        """The value of a text, also of an f-string that begins with a constant of the module."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.FormattedValue):
            return self._constants.get(ast.unparse(node.value))
        parts = [self._read_text(part) for part in node.values] if isinstance(node, ast.JoinedStr) else [None]
        return None if None in parts else "".join(part or "" for part in parts)

    @cached_property
    def _constants(self) -> Mapping[str, str]:
        """The texts that module-level names stand for."""
        assigned = [node for node in self.tree.body if isinstance(node, ast.Assign)]
        values = {ast.unparse(node.targets[0]): getattr(node.value, "value", None) for node in assigned}
        return {name: value for name, value in values.items() if isinstance(value, str)}


def _walk(node: ast.AST, for_types: bool, in_functions: bool) -> Iterator[ast.AST]:
    """`ast.walk` without the excluded parts."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function) and not in_functions:
            continue
        if isinstance(child, ast.If) and not for_types and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _walk(child, for_types, in_functions)


class SourceTree:
    """The modules of a package, by name."""

    def __init__(self, package: Path) -> None:
        self.package = package
        paths = sorted(package.rglob("*.py"))
        dotted = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in paths]
        names = [name.removesuffix(".__init__") for name in dotted]
        self.modules = {name: Module(name, path) for name, path in zip(names, paths, strict=True)}

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())

    def imported(self, module: Module, for_types: bool = True, in_functions: bool = True) -> set[str]:
        """The modules of this package that a module imports; see `Module.imports`.

        `from a import b` imports the module a.b if it exists, otherwise a.
        """
        found = set[str]()
        for each in module.imports(for_types, in_functions):
            members = {name for part in each.names if (name := f"{each.source}.{part}") in self.modules}
            found |= members
            if not each.names or len(members) < len(each.names):
                found.add(each.source)
        return (found & self.modules.keys()) - {module.name}


ECHELON = SourceTree(ROOT / "src" / "echelon")


def read_layers(document: str) -> tuple[dict[str, int], set[str]]:
    """Read the table of packages in docs/architecture.md: the layer of each package by its dotted name, and those that
    import no torch."""
    rows = re.findall(r"^\| L(\d+) \| (.*?) \| (yes|no) \|", document, re.MULTILINE)
    named = [(name, int(number), torch) for number, cell, torch in rows for name in re.findall(r"`([\w/.]+)`", cell)]
    dotted = [(name.removesuffix(".py").rstrip("/").replace("/", "."), layer, torch) for name, layer, torch in named]
    assert len({name for name, *_ in dotted}) == len(dotted), "a package is in two rows of the table of packages"
    return {name: layer for name, layer, _ in dotted}, {name for name, _, torch in dotted if torch == "no"}


LAYERS, WITHOUT_TORCH = read_layers((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))


def find_row(layers: Mapping[str, int], module: str) -> str | None:
    """The row of the table for a module: its own, or that of the innermost package; None: there is none."""
    parts = module.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in around if name in layers), None)


def find_layer(layers: Mapping[str, int], module: str) -> int | None:
    """The layer of a module; None if it has no row."""
    row = find_row(layers, module)
    return None if row is None else layers[row]
