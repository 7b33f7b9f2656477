"""Rules between modules: layers, imports, names. Each rule is a function that lists the violations."""

from collections import Counter
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_tree import ECHELON, LAYERS, SourceTree, find_layer

SIBLINGS = {"parallel", "sync", "checkpoint"}
HEAVY = {"torch", "transformers"}
MAX_TOP_MODULES = 18
MAX_SHARED_NAMES = 6
VAGUE = {"utils", "common", "helper", "helpers", "manager", "base", "misc"}

# What runs many ranks, and the entrances to it. Everything else is the library of one rank and what it stands on. The
# files of APART are stored beside the library and belong to operation, or to an engine of another tool.
OPERATION = ("runs", "supervise", "lifecycle", "training", "reporting", "report", "inference", "launch", "doctor")
OPERATION = (*OPERATION, "drill", "sweep", "api", "commands", "cli", "__init__", "__main__")
APART = (
    *(f"checkpoint.{name}" for name in ("remote", "remote_start", "upload", "object_store", "bundle")),
    *(f"engines.{name}" for name in ("deepspeed", "tensorflow", "horovod", "horovod_ranks")),
)


def find_unplaced(tree: SourceTree, layers: Mapping[str, int]) -> list[str]:
    """Modules without a layer, and rows of the table for modules that do not exist."""
    names = [module.short for module in tree]
    unplaced = [f"{name} has no layer" for name in names if find_layer(layers, name) is None]
    stale = [row for row in layers if not any(f"{name}.".startswith(f"{row}.") for name in names)]
    return unplaced + [f"{row} has a layer and is not there" for row in stale]


def find_upward_imports(tree: SourceTree, layers: Mapping[str, int]) -> list[str]:
    """Imports of a higher layer, also for types; at L3 imports of a sibling; at L0 of torch at the top of a module."""
    found = []
    for module in tree:
        here = find_layer(layers, module.short) or 0
        for target in (tree.modules[name] for name in sorted(tree.imported(module))):
            there = find_layer(layers, target.short) or 0
            if there > here:
                found.append(f"{module.short} (L{here}) imports {target.short} (L{there})")
            rooms = {each.short.partition(".")[0] for each in (module, target)}
            if len(rooms & SIBLINGS) == 2:
                found.append(f"{module.short} imports its sibling {target.short}")
        if here == 0:
            outside = {each.source.partition(".")[0] for each in module.imports(for_types=False, in_functions=False)}
            found += [f"{module.short} (L0) imports {name} at its top" for name in sorted(outside & HEAVY)]
    return found


def find_imports_of_operation(tree: SourceTree) -> list[str]:
    """Imports of the run's operation by the library and what it stands on, also inside functions and for types."""
    return [
        f"{module.short} imports {target.short}"
        for module in tree
        if not _is_in(module.short, OPERATION) and not _is_in(module.short, APART)
        for target in (tree.modules[name] for name in sorted(tree.imported(module)))
        if _is_in(target.short, OPERATION) or _is_in(target.short, APART)
    ]


def _is_in(module: str, rooms: Collection[str]) -> bool:
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


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


def find_loose_modules(tree: SourceTree) -> list[str]:
    """The modules at the top of the package, if there are too many: related modules belong in a subpackage."""
    top = sorted(path.name for path in tree.package.glob("*.py"))
    return top if len(top) > MAX_TOP_MODULES else []


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
    assert not find_upward_imports(ECHELON, LAYERS)


def test_the_library_imports_nothing_of_the_operation():
    assert not find_imports_of_operation(ECHELON)


def test_imports_make_no_cycle():
    assert not find_cycles(ECHELON)


def test_no_module_imports_its_own_package():
    assert not find_imports_of_own_package(ECHELON)


def test_few_modules_are_at_the_top():
    assert not find_loose_modules(ECHELON)


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


PLANTED_LAYERS = {"__init__": 1, "low": 0, "low.heavy": 1, "high": 1}


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        ({"low/a.py": "import house.high.b", "high/b.py": ""}, "low.a (L0) imports high.b (L1)"),
        ({"low/a.py": "def f():\n    from house.high import b", "high/b.py": ""}, "low.a (L0) imports high.b (L1)"),
        ({"low/a.py": "from ..high.b import c", "high/b.py": "c = 1"}, "low.a (L0) imports high.b (L1)"),
        ({"low/a.py": "from house.low.heavy import c", "low/heavy.py": "c = 1"}, "low.a (L0) imports low.heavy (L1)"),
        ({"low/a.py": "try:\n    import torch.nn\nfinally:\n    pass"}, "low.a (L0) imports torch at its top"),
        ({"sync/a.py": "import house.parallel.b", "parallel/b.py": ""}, "sync.a imports its sibling parallel.b"),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path, files, finding):
    layers = {**PLANTED_LAYERS, "sync": 1, "parallel": 1}
    assert find_upward_imports(plant(tmp_path, files), layers) == [finding]


@pytest.mark.parametrize(
    "line",
    [
        "from house.runs.b import x",
        "def f():\n    from house.runs import b",
        "if TYPE_CHECKING:\n    from house.runs.b import x",
    ],
)
def test_an_import_of_the_operation_is_found(tmp_path, line):
    files = {"model/a.py": line, "runs/b.py": "x = 1", "engines/horovod.py": "from house.runs import b"}
    assert find_imports_of_operation(plant(tmp_path, files)) == ["model.a imports runs.b"]
    into_part = {"model/a.py": "from house.engines import horovod"}
    assert find_imports_of_operation(plant(tmp_path, into_part)) == ["model.a imports engines.horovod"]


def test_allowed_imports_are_not_found(tmp_path):
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\n"
    files = {
        "low/a.py": types + "def f():\n    import torch",
        "low/heavy.py": "import torch",
        "high/b.py": "from house.low import a",
    }
    assert find_upward_imports(plant(tmp_path, files), PLANTED_LAYERS) == []


def test_a_file_without_a_layer_and_a_row_without_a_file_are_found(tmp_path):
    tree = plant(tmp_path, {"low/a.py": "", "lost/b.py": "", "low/heavy.py": ""})
    assert find_unplaced(tree, PLANTED_LAYERS) == [
        "lost has no layer",
        "lost.b has no layer",
        "high has a layer and is not there",
    ]


@pytest.mark.parametrize(
    "waiting",
    [
        "from house.a import x",
        "def f():\n    from house.a import x",
        "class C:\n    def f(self):\n        import house.a",
        "if TYPE_CHECKING:\n    from house.a import x",
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


def test_too_many_loose_modules_are_found(tmp_path):
    names = [f"m{number}.py" for number in range(MAX_TOP_MODULES - 1)]
    assert not find_loose_modules(plant(tmp_path, dict.fromkeys(names, "")))
    assert "one_more.py" in find_loose_modules(plant(tmp_path, {"one_more.py": ""}))


def test_too_many_shared_names_are_found(tmp_path):
    names = [f"m{number}.py" for number in range(MAX_SHARED_NAMES)]
    twice = {f"{room}/{name}": "" for room in ("low", "high", "commands") for name in names}
    assert not find_shared_names(plant(tmp_path, {**twice, "commands/extra.py": "", "low/extra.py": ""}))
    assert "extra.py" in find_shared_names(plant(tmp_path, {"high/extra.py": ""}))


def test_a_vague_name_is_found(tmp_path):
    assert find_vague_names(plant(tmp_path, {"low/helpers.py": "", "low/a.py": ""})) == [
        str(tmp_path / "house" / "low" / "helpers.py")
    ]
