"""Rules for files and functions: size, complexity, docstrings and annotations."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.house.source_tree import ECHELON, Function, Module, SourceTree

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_COMPLEXITY = 15
MAX_ARGUMENTS = 8  # of a constructor
MAX_EXCEPTIONS = 5

# Functions that would be harder to read in parts, each with the reason.
EXCEPTIONS: dict[str, str] = {}

_REFERENCE = re.compile(r"See [`\w.']+( [`\w.']+)?\.?")
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.Assert)


def measure_complexity(function: ast.AST) -> int:
    """1, plus 1 for each if (also in an expression or comprehension), for, while, except, comprehension and assert,
    and for each operand of `and` and `or` after the first. Nested functions are included."""
    nodes = list(ast.walk(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    conditions = sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return 1 + sum(isinstance(node, _BRANCHES) for node in nodes) + operands + conditions


def find_long(module: Module) -> list[str]:
    """The file if it is too long, and its functions that are too long."""
    lines = module.text.count("\n")
    found = [f"{module.short}: {lines} lines"] if lines > MAX_FILE_LINES else []
    lengths = [(each.name, (each.end_lineno or each.lineno) - each.lineno + 1) for each in module.functions()]
    return found + [f"{module.short}.{name}: {length} lines" for name, length in lengths if length > MAX_FUNCTION_LINES]


def find_complex(tree: SourceTree, exceptions: Mapping[str, str]) -> list[str]:
    """Functions that are too complex, without the exceptions; and exceptions that are not needed."""
    sizes = {f"{module.short}.{each.name}": measure_complexity(each) for module in tree for each in module.functions()}
    above = {name: size for name, size in sizes.items() if size > MAX_COMPLEXITY}
    found = [f"{name}: complexity {size}" for name, size in above.items() if name not in exceptions]
    return found + [f"{name} is listed and need not be" for name in exceptions if name not in above]


def find_wide_constructors(tree: SourceTree) -> list[str]:
    """Constructors that take too many arguments: some of them belong together, in a value with a name."""
    sizes = {
        f"{module.short}.{owner.name}": len(node.args.args) + len(node.args.kwonlyargs) - 1
        for module in tree
        for owner in ast.walk(module.tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, Function) and node.name == "__init__"
    }
    return [f"{name}: {size} arguments" for name, size in sizes.items() if size > MAX_ARGUMENTS]


def find_undocumented(module: Module) -> list[str]:
    """The module, public classes, methods and functions that have no docstring. One with `@override` has its base's."""
    public = [node for node in module.tree.body if isinstance(node, ast.ClassDef | Function) and _is_public(node.name)]
    methods = [
        (f"{owner.name}.{node.name}", node)
        for owner in public
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, Function) and _is_public(node.name) and not _overrides(node)
    ]
    named = [("", module.tree), *((node.name, node) for node in public), *methods]
    return [f"{module.short} {name}".rstrip() for name, node in named if ast.get_docstring(node) is None]


def find_references(module: Module) -> list[str]:
    """Docstrings that say nothing but where to read: a method of a base class has `@override` instead."""
    documented = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef | Function)]
    docstrings = [(node.name, ast.get_docstring(node) or "") for node in documented]
    return [f"{module.short} {name}" for name, text in docstrings if _REFERENCE.fullmatch(text)]


def find_meaningless(module: Module) -> list[str]:
    """Variables and arguments named `each`: the noun that they stand for is better."""
    stored = [node for node in ast.walk(module.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    arguments = [node for node in ast.walk(module.tree) if isinstance(node, ast.arg)]
    named = [(node.id, node.lineno) for node in stored] + [(node.arg, node.lineno) for node in arguments]
    return [f"{module.short}:{line}" for name, line in named if name == "each"]


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _overrides(node: Function) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "override" for each in node.decorator_list)


def find_unannotated(module: Module) -> list[str]:
    """Functions with an argument or a result without annotation."""
    found = []
    for node in module.functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [each.arg for each in arguments if each.annotation is None and each.arg not in ("self", "cls")]
        if bare or node.returns is None:
            found.append(f"{module.short}.{node.name}")
    return found


def test_constructors_take_few_arguments():
    assert not find_wide_constructors(ECHELON)


def test_a_constructor_with_many_arguments_is_found(tmp_path):
    def tree(count):
        names = ", ".join(f"a{number}" for number in range(count - 1))
        write(tmp_path, f"class C:\n    def __init__(self, {names}, *, b): ...\n")
        return SourceTree(tmp_path)

    assert not find_wide_constructors(tree(MAX_ARGUMENTS))
    assert find_wide_constructors(tree(MAX_ARGUMENTS + 1)) == [f"house.a.C: {MAX_ARGUMENTS + 1} arguments"]


@pytest.mark.parametrize("module", ECHELON, ids=lambda module: module.short)
def test_sizes(module):
    assert not find_long(module)


def test_complexity():
    assert not find_complex(ECHELON, EXCEPTIONS)
    assert len(EXCEPTIONS) <= MAX_EXCEPTIONS


def test_no_variable_is_called_each():
    assert not [place for module in ECHELON for place in find_meaningless(module)]


@pytest.mark.parametrize("module", ECHELON, ids=lambda module: module.short)
def test_public_names_have_docstrings_and_annotations(module):
    assert not find_undocumented(module)
    assert not find_references(module)
    assert not find_unannotated(module)


def write(folder: Path, text: str) -> Module:
    (folder / "house").mkdir(exist_ok=True)
    (folder / "house" / "a.py").write_text(text, encoding="utf-8")
    return SourceTree(folder / "house").modules["house.a"]


def test_a_long_file_and_a_long_function_are_found(tmp_path):
    longest = "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert not find_long(write(tmp_path, longest + "\n" * (MAX_FILE_LINES - MAX_FUNCTION_LINES)))
    assert find_long(write(tmp_path, longest + "    y = 1\n")) == [f"a.f: {MAX_FUNCTION_LINES + 1} lines"]
    assert find_long(write(tmp_path, "\n" * (MAX_FILE_LINES + 1))) == [f"a: {MAX_FILE_LINES + 1} lines"]


@pytest.mark.parametrize(
    ("body", "complexity"),
    [
        ("return x", 1),
        ("if x:\n        pass\n    elif y:\n        pass", 3),
        ("return x and y or z", 3),
        ("return [a for b in x for a in b if a]", 4),
        ("return 1 if x else 2", 2),
        ("try:\n        pass\n    except OSError:\n        pass\n    except ValueError:\n        pass", 3),
        ("for a in x:\n        while a:\n            assert a", 4),
        ("def g():\n        if x:\n            pass", 2),
    ],
)
def test_complexity_is_counted(body, complexity):
    assert measure_complexity(ast.parse(f"def f():\n    {body}").body[0]) == complexity


def test_a_complex_function_and_an_unneeded_exception_are_found(tmp_path):
    def tree(operands: int) -> SourceTree:
        write(tmp_path, f"def f(x):\n    return {' and '.join(['x'] * operands)}\n")
        return SourceTree(tmp_path / "house")

    assert not find_complex(tree(MAX_COMPLEXITY), {})
    assert find_complex(tree(MAX_COMPLEXITY + 1), {}) == [f"a.f: complexity {MAX_COMPLEXITY + 1}"]
    assert not find_complex(tree(MAX_COMPLEXITY + 1), {"a.f": "a reason"})
    assert find_complex(tree(MAX_COMPLEXITY), {"a.f": "a reason"}) == ["a.f is listed and need not be"]


def test_missing_docstrings_and_annotations_are_found(tmp_path):
    module = write(tmp_path, "def f(x: int):\n    pass\nclass C:\n    def m(self, y) -> None:\n        pass\n")
    assert find_undocumented(module) == ["a", "a f", "a C", "a C.m"]
    assert find_unannotated(module) == ["a.f", "a.m"]
    fine = '"""A."""\ndef _f(x: int) -> None: ...\nclass _C:\n    def m(self) -> None: ...\n'
    fine += 'class D:\n    """A."""\n    @override\n    def m(self) -> None: ...\n'
    assert not find_undocumented(write(tmp_path, fine)) and not find_unannotated(write(tmp_path, fine))


@pytest.mark.parametrize(("text", "is_found"), [("See Rule.", True), ("See torch's `Store`.", True), ("See f: g.", 0)])
def test_a_docstring_that_only_refers_to_another_is_found(tmp_path, text, is_found):
    module = write(tmp_path, f'class C:\n    def m(self) -> None:\n        """{text}"""\n')
    assert find_references(module) == (["a m"] if is_found else [])


def test_variables_called_each_are_found(tmp_path):
    text = "for each in x:\n    f(each)\ny = [each for each in x]\nz = lambda each: 1\neach_one = 1\n"
    assert sorted(find_meaningless(write(tmp_path, text))) == ["a:1", "a:3", "a:4"]
