"""Rules between modules: layers, imports, names. Each rule is a function that lists the violations."""

import ast
import re
from collections import Counter
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house.source_tree import ECHELON, LAYERS, WITHOUT_TORCH, SourceTree, find_layer, find_row

SIBLINGS = {"learn.parallel", "learn.sync", "learn.checkpoint"}
HEAVY = {"torch", "transformers"}
MAX_ROOMS = 10
# The modules that put a rank together, and how many others each may import.
ASSEMBLERS = ("learn.learner", "run.lifecycle.assemble", "run.lifecycle.run_learner", "run.lifecycle.accounts")
MAX_PARTS = 20
MAX_SHARED_NAMES = 6
VAGUE = {"utils", "common", "helper", "helpers", "manager", "base", "misc"}
# What launchers tell a process: a run's operation reads it, and hands a rank what it needs.
OF_LAUNCHERS = {f"ground.{name}" for name in ("launch_environment", "hosts", "foreign_launchers")}


def find_unplaced(tree: SourceTree, layers: Mapping[str, int]) -> list[str]:
    """Modules without a layer, and rows of the table for modules that do not exist."""
    names = [module.short for module in tree]
    unplaced = [f"{name} has no layer" for name in names if find_layer(layers, name) is None]
    stale = [row for row in layers if not any(f"{name}.".startswith(f"{row}.") for name in names)]
    return unplaced + [f"{row} has a layer and is not there" for row in stale]


def find_upward_imports(tree: SourceTree, layers: Mapping[str, int], without_torch: Collection[str] = ()) -> list[str]:
    """Imports of a higher layer, also for types; of a sibling; of torch at the top, in packages without torch."""
    found = []
    for module in tree:
        here = find_layer(layers, module.short) or 0
        for target in (tree.modules[name] for name in sorted(tree.imported(module))):
            there = find_layer(layers, target.short) or 0
            if there > here:
                found.append(f"{module.short} (L{here}) imports {target.short} (L{there})")
            rooms = {".".join(name.short.split(".")[:2]) for name in (module, target)}
            if len(rooms & SIBLINGS) == 2:
                found.append(f"{module.short} imports its sibling {target.short}")
        if find_row(layers, module.short) in without_torch:
            outside = {part.source.partition(".")[0] for part in module.imports(for_types=False, in_functions=False)}
            found += [f"{module.short} imports {name} at its top" for name in sorted(outside & HEAVY)]
    return found


def find_imports_of_launchers(tree: SourceTree) -> list[str]:
    """Imports by the library of what reads the variables of launchers, also inside functions and for types."""
    return [
        f"{module.short} imports {target.short}"
        for module in tree
        if module.short.startswith("learn.")
        for target in (tree.modules[name] for name in sorted(tree.imported(module)))
        if target.short in OF_LAUNCHERS
    ]


def find_undeclared_imports(tree: SourceTree) -> list[str]:
    """Imports of another wing that the docstring of the own wing, `May import: ...`, does not allow."""
    found = []
    for module in tree:
        wing = module.short.partition(".")[0]
        text = ast.get_docstring(tree.modules[f"{tree.package.name}.{wing}"].tree) or "" if "." in module.short else ""
        declared = re.search(r"May import: (.*?)[.;]", " ".join(text.split()))
        if declared is None or declared[1] == "everything":
            continue
        allowed = {wing, *re.findall(r"\w+", declared[1])}
        wings = {tree.modules[name].short.partition(".")[0] for name in tree.imported(module)} - {"__init__"}
        found += [f"{module.short} imports {name}" for name in sorted(wings - allowed)]
    return found


def find_cycles(tree: SourceTree) -> list[str]:
    """The first import cycle. Imports inside functions and for types count."""
    graph = {module.short: {tree.modules[name].short for name in tree.imported(module)} for module in tree}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def find_imports_of_own_package(tree: SourceTree) -> list[str]:
    """Modules that import the `__init__` of their own package, which imports them."""
    return [
        f"{module.short} imports its package {name}"
        for module in tree
        for name in sorted(tree.imported(module, for_types=False))
        if module.name.startswith(f"{name}.")
    ]


def find_rooms(tree: SourceTree) -> list[str]:
    """The folders and files at the top of the package, if there are too many."""
    rooms = {module.short.partition(".")[0] for module in tree} - {"__init__", "__main__"}
    return sorted(rooms) if len(rooms) > MAX_ROOMS else []


def find_wide_assemblers(tree: SourceTree, names: Collection[str]) -> list[str]:
    """Modules of these that import too many others: part of the assembly belongs in a module of its own."""
    sizes = {name: len(tree.imported(tree.modules[f"{tree.package.name}.{name}"], for_types=False)) for name in names}
    return [f"{name} imports {size} modules" for name, size in sizes.items() if size > MAX_PARTS]


def find_shared_names(tree: SourceTree) -> list[str]:
    """File names that occur twice, if there are too many.

    A command may be named like the module that it calls, and an axis of the planner like the file that applies it.
    """
    files = [module.path for module in tree if not module.path.name.startswith("__")]
    counts = Counter(path.name for path in files if path.parent.name not in ("commands", "axes"))
    shared = sorted(name for name, count in counts.items() if count > 1)
    return shared if len(shared) > MAX_SHARED_NAMES else []


def find_vague_names(tree: SourceTree) -> list[str]:
    """Files whose name does not describe their content."""
    return [str(module.path) for module in tree if module.path.stem in VAGUE]


def test_every_file_has_one_layer():
    assert not find_unplaced(ECHELON, LAYERS)


def test_imports_point_down():
    assert not find_upward_imports(ECHELON, LAYERS, WITHOUT_TORCH)


def test_the_library_does_not_ask_the_launcher():
    assert not find_imports_of_launchers(ECHELON)


def test_every_wing_imports_what_its_docstring_says():
    wings = {module.short.partition(".")[0] for module in ECHELON if "." in module.short}
    told = {
        wing for wing in wings if "May import:" in (ast.get_docstring(ECHELON.modules[f"echelon.{wing}"].tree) or "")
    }
    assert told == wings
    assert not find_undeclared_imports(ECHELON)


def test_imports_make_no_cycle():
    assert not find_cycles(ECHELON)


def test_no_module_imports_its_own_package():
    assert not find_imports_of_own_package(ECHELON)


def test_few_rooms_are_at_the_top():
    assert not find_rooms(ECHELON)


def test_no_assembler_puts_too_many_parts_together():
    assert not find_wide_assemblers(ECHELON, ASSEMBLERS)


def test_few_file_names_occur_twice():
    assert not find_shared_names(ECHELON)


def test_no_file_is_called_utils():
    assert not find_vague_names(ECHELON)


def plant(folder: Path, files: Mapping[str, str]) -> SourceTree:
    """Write a package with these files, and an `__init__.py` in each folder."""
    for name, content in {"house/__init__.py": "", **{f"house/{name}": text for name, text in files.items()}}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        (path.parent / "__init__.py").touch()
    return SourceTree(folder / "house")


PLANTED_LAYERS = {"__init__": 1, "low": 0, "low.heavy": 1, "high": 1, "learn": 1}


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        ({"low/a.py": "import house.high.b", "high/b.py": ""}, "low.a (L0) imports high.b (L1)"),
        ({"low/a.py": "def f():\n    from house.high import b", "high/b.py": ""}, "low.a (L0) imports high.b (L1)"),
        ({"low/a.py": "from ..high.b import c", "high/b.py": "c = 1"}, "low.a (L0) imports high.b (L1)"),
        ({"low/a.py": "from house.low.heavy import c", "low/heavy.py": "c = 1"}, "low.a (L0) imports low.heavy (L1)"),
        ({"low/a.py": "import_module('house.high.b')", "high/b.py": ""}, "low.a (L0) imports high.b (L1)"),
        (
            {"low/a.py": "def f():\n    return importlib.import_module('house.high.b').c", "high/b.py": ""},
            "low.a (L0) imports high.b (L1)",
        ),
        ({"low/a.py": "ROWS = {'c': 'house.high.b:c'}", "high/b.py": ""}, "low.a (L0) imports high.b (L1)"),
        (
            {"low/a.py": "HIGH = 'house.high'\nROWS = {'c': Row(f'{HIGH}.b:c')}", "high/b.py": ""},
            "low.a (L0) imports high.b (L1)",
        ),
        ({"low/a.py": "try:\n    import torch.nn\nfinally:\n    pass"}, "low.a imports torch at its top"),
        (
            {"learn/sync/a.py": "import house.learn.parallel.b", "learn/parallel/b.py": ""},
            "learn.sync.a imports its sibling learn.parallel.b",
        ),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path, files, finding):
    assert find_upward_imports(plant(tmp_path, files), PLANTED_LAYERS, {"low"}) == [finding]


def test_allowed_imports_are_not_found(tmp_path):
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\n"
    files = {
        "low/a.py": types + "def f():\n    import torch",
        "low/heavy.py": "import torch",
        "high/b.py": "from house.low import a",
    }
    assert find_upward_imports(plant(tmp_path, files), PLANTED_LAYERS, {"low"}) == []


def test_a_file_without_a_layer_and_a_row_without_a_file_are_found(tmp_path):
    tree = plant(tmp_path, {"low/a.py": "", "lost/b.py": "", "low/heavy.py": ""})
    assert find_unplaced(tree, PLANTED_LAYERS) == [
        "lost has no layer",
        "lost.b has no layer",
        "high has a layer and is not there",
        "learn has a layer and is not there",
    ]


@pytest.mark.parametrize(
    "waiting",
    [
        "from house.a import x",
        "def f():\n    from house.a import x",
        "class C:\n    def f(self):\n        import house.a",
        "if TYPE_CHECKING:\n    from house.a import x",
        "def f():\n    return import_module('house.a').x",
        "ROWS = {'x': 'house.a:x'}",
    ],
)
def test_a_cycle_is_found(tmp_path, waiting):
    tree = plant(tmp_path, {"a.py": "from house.b import y\nx = 1", "b.py": "from house import c", "c.py": waiting})
    [cycle] = find_cycles(tree)
    assert set(cycle.split(" <- ")) == {"a", "b", "c"}


@pytest.mark.parametrize("line", ["from house.room import VALUE", "from . import VALUE", "import house.room"])
def test_an_import_of_the_own_package_is_found(tmp_path, line):
    tree = plant(tmp_path, {"room/__init__.py": "VALUE = 1", "room/a.py": f"def f():\n    {line}", "room/b.py": ""})
    assert find_imports_of_own_package(tree) == ["room.a imports its package house.room"]
    (tmp_path / "house" / "room" / "a.py").write_text("from house.room import b")  # a sibling module, by package
    assert find_imports_of_own_package(SourceTree(tmp_path / "house")) == []


def test_too_many_rooms_are_found(tmp_path):
    names = [f"m{number}/a.py" for number in range(MAX_ROOMS)]
    assert not find_rooms(plant(tmp_path, dict.fromkeys(names, "")))
    assert "one_more" in find_rooms(plant(tmp_path, {"one_more.py": ""}))


def test_an_import_that_a_wing_does_not_declare_is_found(tmp_path):
    tree = plant(
        tmp_path, {"low/a.py": "from house.high import b", "high/b.py": "from house.learn import c", "learn/c.py": ""}
    )
    for wing, text in (("low", "May import: learn."), ("high", "May import: learn; no torch.")):
        (tree.package / wing / "__init__.py").write_text(f'"""A wing.\n\n{text}\n"""')
    assert find_undeclared_imports(SourceTree(tree.package)) == ["low.a imports high"]


def test_a_library_that_asks_the_launcher_is_found(tmp_path):
    files = {"learn/a.py": "def f():\n    from house.ground import hosts", "ground/hosts.py": ""}
    assert find_imports_of_launchers(plant(tmp_path, files)) == ["learn.a imports ground.hosts"]


def test_an_assembler_of_too_many_parts_is_found(tmp_path):
    parts = {f"low/m{number}.py": "" for number in range(MAX_PARTS)}
    text = "\n".join(f"from house.low import m{number}" for number in range(MAX_PARTS))
    tree = plant(tmp_path, {**parts, "a.py": text, "b.py": f"{text}\nimport house.a"})
    assert find_wide_assemblers(tree, ("a", "b")) == [f"b imports {MAX_PARTS + 1} modules"]


def test_too_many_shared_names_are_found(tmp_path):
    names = [f"m{number}.py" for number in range(MAX_SHARED_NAMES)]
    twice = {f"{room}/{name}": "" for room in ("low", "high", "commands") for name in names}
    assert not find_shared_names(plant(tmp_path, {**twice, "commands/extra.py": "", "low/extra.py": ""}))
    assert "extra.py" in find_shared_names(plant(tmp_path, {"high/extra.py": ""}))


def test_a_vague_name_is_found(tmp_path):
    assert find_vague_names(plant(tmp_path, {"low/helpers.py": "", "low/a.py": ""})) == [
        str(tmp_path / "house" / "low" / "helpers.py")
    ]
