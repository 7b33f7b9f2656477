"""How much of echelon each important module imports, directly and through others."""

import pytest

from tests.house.source_tree import ECHELON, SourceTree

# Files and lines, at most, of what is imported at the top of modules. The first row is the loop.
REACH = {
    "run.training.trainer": (112, 18_950),
    "learn.learner": (88, 15_700),
    "learn.engines.native": (109, 19_750),
    "learn.engines.native_build": (127, 23_400),
    "learn.objectives.causal_lm": (46, 7_950),
    "learn.data.loader": (24, 3_700),
    "planner.plan": (17, 2_700),
    "learn.engines.engine": (30, 4_350),
    "run.lifecycle.rank_run": (195, 34_350),
}


# The same with the imports inside functions: all that a rank and its command may load. The last row is `Learner.build`.
FULL_REACH = {
    "run.lifecycle.rank_run": (275, 51_600),
    "run.lifecycle.session": (324, 63_300),
    "run.lifecycle.worker": (310, 59_650),
    "learn.learner": (182, 35_600),
}
ROWS = [(name, limits, False) for name, limits in REACH.items()] + [
    (name, limits, True) for name, limits in FULL_REACH.items()
]


def find_reach(tree: SourceTree, start: str, in_functions: bool = False) -> set[str]:
    """The modules that are loaded with a module: what they import, and the packages around them."""
    reached, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        around = name.rpartition(".")[0]
        waiting += [around] if around in tree.modules else []
        waiting += tree.imported(tree.modules[name], for_types=False, in_functions=in_functions)
    return reached


@pytest.mark.parametrize(("name", "limits", "in_functions"), ROWS)
def test_few_modules_are_imported(name, limits, in_functions):
    found = [ECHELON.modules[each] for each in find_reach(ECHELON, f"echelon.{name}", in_functions)]
    num_lines = sum(len(module.text.splitlines()) for module in found)
    assert (len(found) <= limits[0]) and (num_lines <= limits[1]), f"{name}: {len(found)} files, {num_lines} lines"


def test_what_a_module_imports_through_others_is_found(tmp_path):
    files = {
        "house/__init__.py": "",
        "house/a.py": "from house.low import b\ndef f():\n    import house.late",
        "house/low/__init__.py": "from house import e",
        "house/low/b.py": "if TYPE_CHECKING:\n    from house.d import x\nclass C:\n    from house.c import y",
        **dict.fromkeys((f"house/{name}.py" for name in ("c", "d", "e", "late")), "x = y = 1"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    tree, loaded = (
        SourceTree(tmp_path / "house"),
        {"house", "house.a", "house.low", "house.low.b", "house.c", "house.e"},
    )
    assert find_reach(tree, "house.a") == loaded
    assert find_reach(tree, "house.a", in_functions=True) == loaded | {"house.late"}
