"""Constructs that are allowed in few files or none: environment access, print, branches on names, TODOs."""

import ast
import re
from collections.abc import Collection
from pathlib import Path
from typing import get_args

import pytest

from echelon.recipe.inputs import AdapterConfig
from echelon.recipe.names import OneOf
from echelon.recipe.objective import ObjectiveConfig
from echelon.recipe.synchronization import SyncConfig
from echelon.recipe.training import EngineName, OptimConfig, ParallelName
from tests.house.source_tree import ECHELON, Module, SourceTree

# The second one runs in a container, where echelon may not be importable yet.
ENVIRONMENT_READERS = {"ground.variables", "ground.launch_environment", "launch.sagemaker.enter"}
# Which read files that no stranger made: of the system, of echelon's own package, of live ranks, of this machine's
# tools; and checkpoints, whose files are compared with their manifest first.
UNLIMITED_READERS = {
    "learn.model.config", "run.training.straggler", "run.report.page",
    "run.report.picture", "tools.drill.trial",
    "ground.stop_request", "learn.data.limits", "ground.cores", "run.journal.network",
    "learn.checkpoint.carrier",
    "foreign.zero_folder", "run.folder.remote", "launch.sagemaker.container",
    "launch.sagemaker.install", "launch.source_bundle", "launch.local", "launch.ray.driver",
}  # fmt: skip
# Where choices are table rows; the training loop must not know which one was made.
NAMELESS_ROOM = "run.training"
PRIVATE = {
    "_world", "_register_backend", "_set_default_backend", "_get_backend", "_device_types", "_set_default_timeout",
}  # fmt: skip


def list_choices() -> set[str]:
    """The names of strategies, engines and methods in the types of the recipe, without `auto`."""
    fields = [ParallelName, AdapterConfig.model_fields["method"].annotation]
    named = [model.model_fields["name"].metadata for model in (SyncConfig, ObjectiveConfig, OptimConfig)]
    own = {name for field in fields for name in get_args(field) if isinstance(name, str)}
    named.append(get_args(EngineName))
    return own.union(*(each.own for metadata in named for each in metadata if isinstance(each, OneOf))) - {"auto"}


def find_environment_reads(tree: SourceTree, readers: Collection[str]) -> list[str]:
    """Modules that read or write environment variables, except the allowed ones."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

    def reads(module: Module) -> bool:
        attributes = {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and _is_os(node)}
        imported = {name for each in module.imports() if each.source == "os" for name in each.names}
        return bool(names & (attributes | imported))

    return [module.short for module in tree if module.short not in readers and reads(module)]


def _is_os(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "os"


def find_branches_on(module: Module, names: Collection[str]) -> list[str]:
    """Comparisons and matches with one of these names, alone or in a collection, and uses of `startswith`."""
    found = []
    for node in ast.walk(module.tree):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            compared = list(node.args) if node.func.attr in ("startswith", "endswith") else []
        constants = {each.value for part in compared for each in ast.walk(part) if isinstance(each, ast.Constant)}
        named = sorted(each for each in constants if isinstance(each, str) and each in names)
        found += [f"{module.short}:{node.lineno} asks for {name}" for name in named]
    return found


def find_prints(module: Module) -> list[str]:
    """Calls of `print` without `file`."""
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    prints = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    return [
        f"{module.short}:{call.lineno} prints"
        for call in prints
        if not any(keyword.arg == "file" for keyword in call.keywords)
    ]


def find_direct_output(module: Module) -> list[str]:
    """Calls that write to stdout or stderr, of which `commands.terminal` alone makes text of strangers harmless."""
    writers = ("print", "typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write", "Console")
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    return [f"{module.short}:{call.lineno} writes directly" for call in calls if ast.unparse(call.func) in writers]


def find_unlimited_reads(module: Module) -> list[str]:
    """Calls of `Path.read_text` and `Path.read_bytes`: those of `stored` have a limit, and read only regular files."""
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    methods = [call for call in calls if isinstance(call.func, ast.Attribute)]
    read = [call for call in methods if ast.unparse(call.func).endswith((".read_text", ".read_bytes"))]
    return [f"{module.short}:{call.lineno} reads without a limit" for call in read]


def find_odd_loggers(module: Module) -> list[str]:
    """Loggers with a name other than their module's, and messages passed through a parameter `say`.

    The logger of a library, which is only configured, may have its own name.
    """
    odd = [
        f"{module.short}:{node.lineno} logs under another name"
        for node in module.tree.body
        if isinstance(node, ast.Assign)
        and [ast.unparse(target) for target in node.targets] == ["logger"]
        and ast.unparse(node.value) != "logging.getLogger(__name__)"
    ]
    arguments = (node for node in ast.walk(module.tree) if isinstance(node, ast.arg))
    return odd + [f"{module.short}:{each.lineno} takes {each.arg}" for each in arguments if each.arg == "say"]


def find_unfiled(module: Module) -> list[str]:
    """TODO comments without an issue number."""
    lines = enumerate(module.text.splitlines(), 1)
    return [f"{module.short}:{n}" for n, line in lines if re.search(r"\b(TODO|FIXME|XXX)\b(?!.*#\d+)", line)]


def find_sizes_by_hand(module: Module) -> list[str]:
    """Replacement fields that divide by a unit of bytes and are followed by its name; `render_bytes` does that."""
    by_hand = re.compile(r"/ *(1e[369]|10 ?\*\* ?[369]|2 ?\*\* ?[123]0|10(00|24))\b[^{}]*\} ?[kKMGT]i?B\b(?!/s)")
    return [f"{module.short}:{n}" for n, line in enumerate(module.text.splitlines(), 1) if by_hand.search(line)]


def test_few_modules_touch_the_environment():
    assert not find_environment_reads(ECHELON, ENVIRONMENT_READERS)
    assert set(find_environment_reads(ECHELON, ())) == ENVIRONMENT_READERS


def test_the_training_loop_never_branches_on_a_name():
    loop = [module for module in ECHELON if module.short.startswith(f"{NAMELESS_ROOM}.")]
    assert loop
    assert not [found for module in loop for found in find_branches_on(module, list_choices())]


def test_print_is_for_the_console():
    assert not [found for module in ECHELON for found in find_prints(module)]


def test_commands_print_through_one_module():
    commands = [
        each for each in ECHELON if each.short.startswith("cli.commands.") and each.short != "cli.commands.terminal"
    ]
    assert commands and not [found for module in commands for found in find_direct_output(module)]


def test_files_of_strangers_are_read_within_limits():
    readers = {module.short for module in ECHELON if find_unlimited_reads(module)}
    assert readers and not readers - UNLIMITED_READERS


def test_a_module_logs_under_its_own_name():
    assert not [found for module in ECHELON for found in find_odd_loggers(module)]


def test_private_parts_of_the_groups_of_torch_are_named_in_one_module():
    named = [(module, node) for module in ECHELON for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    assert {module.short for module, node in named if node.attr in PRIVATE} == {"learn.distributed.torch_internals"}


def test_no_todo_without_an_issue():
    assert not [found for module in ECHELON for found in find_unfiled(module)]


def test_one_function_formats_sizes():
    assert not [found for module in ECHELON for found in find_sizes_by_hand(module)]


# `pip install 'echelon[NAME]'`: at the package index echelon is another project.
NAMESAKE = re.compile(r"\bechelon\[[a-z]")


def find_namesake(root: Path) -> list[str]:
    """The texts for users that would install the other project of this name."""
    files = [
        root / "README.md",
        *(path for name in ("src", "docs", "docker", "recipes") for path in (root / name).rglob("*")),
    ]
    texts = {path: path.read_bytes().decode("utf-8", "replace") for path in files if path.is_file()}
    return [f"{path}: {found[0]}" for path, text in texts.items() if (found := NAMESAKE.search(text))]


def test_nothing_installs_the_other_project_of_this_name(tmp_path):
    assert not find_namesake(Path(__file__).parents[2])
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("pip install '.[s3]'; echelon[...]", encoding="utf-8")
    (tmp_path / "docs" / "page.md").write_text("$ pip install 'echelon[s3]'", encoding="utf-8")
    assert [found.partition(": ")[2] for found in find_namesake(tmp_path)] == ["echelon[s"]


def write(folder: Path, text: str) -> SourceTree:
    (folder / "house").mkdir(exist_ok=True)
    (folder / "house" / "a.py").write_text(text, encoding="utf-8")
    return SourceTree(folder / "house")


@pytest.mark.parametrize(
    "text", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "def f():\n    from os import environ, sep"]
)
def test_a_read_of_the_environment_is_found(tmp_path, text):
    tree = write(tmp_path, text)
    assert find_environment_reads(tree, ()) == ["a"]
    assert not find_environment_reads(tree, {"a"})
    assert not find_environment_reads(write(tmp_path, "import os\nos.getpid()\nenviron = 1"), ())


def test_choices_are_those_of_the_recipe():
    assert {"ddp", "fsdp", "native", "every_step", "diloco", "causal_lm", "dpo", "adamw", "lora"} <= list_choices()


@pytest.mark.parametrize(
    "text",
    [
        "plan.strategy == 'fsdp'",
        "'fsdp' != plan.strategy",
        "plan.strategy in ('ddp', 'fsdp')",
        "match plan.strategy:\n    case 'fsdp':\n        pass",
        "match plan.strategy:\n    case 'ddp' | 'fsdp':\n        pass",
        "plan.strategy.startswith('fsdp')",
    ],
)
def test_a_branch_on_a_name_is_found(tmp_path, text):
    module = write(tmp_path, text).modules["house.a"]
    assert [found.rpartition(" ")[2] for found in find_branches_on(module, {"fsdp"})] == ["fsdp"]
    assert not find_branches_on(module, {"zero1"})


def test_an_odd_logger_is_found(tmp_path):
    text = "logger = logging.getLogger('mine')\ndef run(say): pass\nlogger = logging.getLogger(__name__)\n"
    module = write(tmp_path, text).modules["house.a"]
    assert find_odd_loggers(module) == ["a:1 logs under another name", "a:2 takes say"]


def test_a_print_and_an_unfiled_note_are_found(tmp_path):
    text = "print('a')\nprint('b', file=stream)\n# TO" + "DO later\n# TO" + "DO(#12) later\n"
    module = write(tmp_path, text).modules["house.a"]
    assert find_prints(module) == ["a:1 prints"]
    assert find_unfiled(module) == ["a:3"]


def test_direct_output_is_found(tmp_path):
    text = "print('a', file=stream)\nsys.stdout.write('b')\nstream.write('c')\ntyper.echo('d')\n"
    module = write(tmp_path, text).modules["house.a"]
    assert find_direct_output(module) == [f"a:{n} writes directly" for n in (1, 2, 4)]


def test_an_unlimited_read_is_found(tmp_path):
    module = write(tmp_path, "path.read_text()\n(a / 'b').read_bytes()\nread_text(path)\n").modules["house.a"]
    assert find_unlimited_reads(module) == ["a:1 reads without a limit", "a:2 reads without a limit"]


def test_a_size_formatted_by_hand_is_found(tmp_path):
    text = (
        'a = f"{n / 1e9:.1f} GB"\nb = f"{n / 2**20:.0f} of {m / 2**20:.0f} MiB"\nc = f"{rate / 1e9:.1f} GB/s, 80 GB"\n'
    )
    assert find_sizes_by_hand(write(tmp_path, text).modules["house.a"]) == ["a:1", "a:2"]
