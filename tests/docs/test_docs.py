"""The documentation is correct: its commands and Python run, its recipes load, and its links have a target.

Each page is one session in one folder, which contains `text.txt` and the repository's `recipes/`. In page order:

- Every `$ ` line of a ```console block runs in a shell. If output is shown below it, the real output must match, where
  `...` matches anything. A command whose shown output begins with `echelon: ` must fail; every other one must succeed.
  What follows `(Pdb) ` in the shown output is typed into the command, which must fail if the last line is `q`.
- Every ```yaml block loads as a recipe; a fragment is merged into the recipe of `echelon init`. A block that begins
  with `# NAME.yaml` is also written to that file.
- Every ```python block runs; the blocks of a page share their variables.

`<!-- test: skip -->` above a block skips it. `<!-- test: write NAME -->` writes the block to a file, for example of
another tool. `<!-- test: KEY=VALUE ... -->` adds overrides to the block's `echelon train` commands, to shorten them.
"""

import doctest
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.recipe.document import Recipe
from echelon.recipe.keys import recipe_keys
from echelon.recipe.load import load_recipe
from echelon.recipe.render import render_starter
from tests.docs import layout
from tests.hub_server import HubServer, push_model
from tests.workers import WARM

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "echelon"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

BLOCK = re.compile(
    r"(?:^<!-- test: (?P<option>[^\n]*) -->\n\n?)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
ELLIPSIS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PROMPT = r"^\(Pdb\) (.+)$"
TIMEOUT_SECONDS = 120

on_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the option of the comment above it."""

    language: str
    text: str
    option: str
    line: int


def read_blocks(page: Path) -> list[Block]:
    content = page.read_text(encoding="utf-8")
    return [
        Block(match["language"], match["text"], match["option"] or "", content[: match.start("text")].count("\n") + 1)
        for match in BLOCK.finditer(content)
    ]


def read_commands(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = re.sub(r"\\\n", " ", part).partition("\n")
        yield command, output.strip()


def run_command(
    command: str, arguments: list[str] | None, folder: Path, environment: dict[str, str], output: Path, errors: Path
) -> None:
    """Run the `echelon` command in this process, or a shell if there are no arguments; exit with its code."""
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(".stdin", os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has replaced it
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    if arguments is None:
        os.execve("/bin/sh", ["sh", "-c", command], environment)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    from echelon.cli.main import main

    main()


class Session:
    """A folder in which the blocks of a page run in order. `outputs`: what each command has printed, by command."""

    def __init__(self, folder: Path, seconds: float = TIMEOUT_SECONDS) -> None:
        """`seconds`: the time limit of a command."""
        self.outputs: dict[str, str] = {}
        self._folder = folder
        self._seconds = seconds
        self._names: dict[str, Any] = {"__name__": "documentation"}
        shutil.copy(ROOT / "LICENSE", folder / "text.txt")  # text that is the same on every machine
        (folder / "recipes").symlink_to(ROOT / "recipes")
        commands = folder / ".bin"
        commands.mkdir()
        (commands / "echelon").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m echelon "$@"\n')
        (commands / "echelon").chmod(0o755)
        path = os.pathsep.join([str(commands), os.path.dirname(sys.executable), os.environ["PATH"]])
        self._environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}

    def use_hub(self, url: str) -> None:
        """Let commands in a shell use this hub; commands in the preloaded process were imported without one."""
        del self._environment["HF_HUB_OFFLINE"]
        self._environment |= {
            "HF_ENDPOINT": url,
            "TOKEN": "let-me-in",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def run_page(self, page: Path) -> None:
        """Run the blocks of a page."""
        for block in read_blocks(page):
            if name := re.fullmatch(r"write (\S+)", block.option):
                (self._folder / name[1]).write_text(block.text)
            elif block.option != "skip":
                self.run(block)

    def run(self, block: Block) -> None:
        """Run one block."""
        match block.language:
            case "console":
                for command, shown in read_commands(block.text):
                    self._check(command, shown, block.option)
            case "yaml":
                self._load(block.text)
            case "python":
                with chdir(self._folder):
                    exec(compile(block.text, f"line {block.line}", "exec"), self._names)

    def _check(self, command: str, shown: str, overrides: str) -> None:
        typed = re.findall(PROMPT, shown, re.MULTILINE)
        (self._folder / ".stdin").write_text("".join(f"{line}\n" for line in typed))
        shown = re.sub(rf"{PROMPT}\n?", "(Pdb) ", shown, flags=re.MULTILINE).strip()
        code, output, errors = self._run(command, overrides)
        self.outputs[command] = output
        details = f"$ {command}\n{output}{errors}"
        fails = re.search("^echelon: ", shown, re.MULTILINE) is not None or typed[-1:] == ["q"]
        assert (code != 0) == fails, f"exit code {code}: {details}"
        got = (errors if shown.startswith("echelon: ") else output + errors if fails else output).strip()
        assert not shown or doctest.OutputChecker().check_output(shown, got, ELLIPSIS), f"{details}shown:\n{shown}"

    def _run(self, command: str, overrides: str) -> tuple[int | None, str, str]:
        """Run a command; return its exit code (None after a timeout), stdout and stderr.

        In a command that is only `echelon` and arguments, torch is preloaded.
        """
        arguments = shlex.split(command, comments=True)
        plain = arguments[0] == "echelon" and not re.search(r"[|<>;&$]", "".join(arguments))
        arguments += overrides.split() if arguments[1:2] == ["train"] else []
        paths = self._folder / ".stdout", self._folder / ".stderr"
        given = (command, arguments if plain else None, self._folder, self._environment, *paths)
        process: Any = WARM.Process(target=run_command, args=given)
        process.start()
        process.join(self._seconds)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            return None, *(path.read_text() for path in paths)
        return process.exitcode, *(path.read_text() for path in paths)

    def _load(self, text: str) -> None:
        """Load a recipe, or the starter recipe with the keys of a fragment as overrides."""
        if name := re.match(r"# (\S+\.yaml)\n", text):
            (self._folder / name[1]).write_text(text)
        path = self._folder / ".block.yaml"
        path.write_text(text if re.search(r"^run:", text, re.MULTILINE) else render_starter())
        overrides = []
        if path.read_text() != text:
            for section, value in yaml.safe_load(text).items():
                keys = value.items() if isinstance(value, dict) and section not in ("parallel", "tokenizer") else ()
                overrides += [f"{section}.{key}={yaml.safe_dump(item, default_flow_style=True)}" for key, item in keys]
                overrides += [] if keys else [f"{section}={yaml.safe_dump(value, default_flow_style=True)}"]
        load_recipe(path, [override.removesuffix("\n").removesuffix("\n...") for override in overrides])


# Pages whose content other tests also run: only `make slow` runs these.
SLOW_PAGES = {
    "adapters.md", "batches.md", "checkpoints.md", "choosing-a-strategy.md", "classification.md",
    "context-parallelism.md", "debugging.md", "distillation.md", "elastic.md", "evaluation.md", "faults.md",
    "fine-tuning.md", "hangs.md", "hub.md", "launching.md", "library.md", "logging.md", "loops.md", "optimization.md",
    "parameter-server.md", "preference-tuning.md", "python.md", "quantized-checkpoints.md", "quorum.md",
    "remote-checkpoints.md", "replicas.md", "reports.md", "reward-models.md", "rewards.md", "run-folder.md",
    "sagemaker-settings.md", "sagemaker.md", "schedules.md", "slurm.md", "streaming.md",
    "sweeps.md", "tracking.md",
}  # fmt: skip
# Pages whose commands take minutes: tests/docs/test_tutorials.py runs them.
TUTORIALS = {"tutorial-chat.md", "tutorial-rewards.md", "tutorial-text.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW_PAGES else [])
        for page in PAGES
        if page.name not in TUTORIALS
    ],
    ids=lambda page: page.name,
)
def test_blocks_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    session = Session(tmp_path)
    if page.name == "hub.md":
        hub = HubServer()
        request.addfinalizer(hub.stop)
        push_model(hub, "team/base", tmp_path / ".model")
        session.use_hub(hub.url)
    session.run_page(page)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "llms.txt"], ids=lambda page: page.name)
def test_links_have_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        goal = (page.parent / name).resolve() if name else page
        assert goal.exists(), target
        if anchor:
            assert anchor in find_anchors(goal), target


def find_anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_has_every_page_once() -> None:
    named = re.findall(r"^- \[.+\]\((.+)\)$", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(
        page.name for page in (ROOT / "docs").iterdir() if page.suffix in (".md", ".ipynb") and page.name != "index.md"
    )


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "recipe.md"], ids=lambda page: page.name)
def test_backquoted_names_exist(page: Path) -> None:
    """Paths, tests and recipe keys in backquotes exist. (recipe.md is excluded: it also lists other tools' keys.)"""
    keys = set(recipe_keys(Recipe))
    sections = {key.split(".")[0] for key in keys if "." in key}
    for name in re.findall(r"`([^`\n]+)`", BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if match := re.fullmatch(r"((?:src|tests|recipes|docs|benchmarks)/[\w./-]+?)(?:::(\w+))?", name):
            assert (ROOT / match[1]).exists(), name
            assert match[2] is None or f"def {match[2]}(" in (ROOT / match[1]).read_text(), name
        elif match := re.fullmatch(r"(\w+)/(?:\w+/)*(?:\w+\.py)?", name):
            assert match[1] not in os.listdir(PACKAGE) or (PACKAGE / name).exists(), name
        elif re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name) and name.split(".")[0] in sections:
            assert name in keys or name.endswith((".json", ".yaml", ".py", ".md", ".db")), f"{name} is not a recipe key"


def test_the_layout_is_that_of_the_source() -> None:
    assert layout.PAGE.read_text(encoding="utf-8") == layout.render(), "run python -m tests.docs.layout"


class TestTheTest:
    """Tests that the checks above can fail."""

    def run(self, tmp_path: Path, language: str, text: str) -> None:
        Session(tmp_path).run(Block(language, text, "", 1))

    @pytest.mark.parametrize(
        ("language", "text"),
        [
            ("console", "$ echo one\ntwo\n"),
            ("console", "$ false\n"),
            ("console", "$ echo 'echelon: refused'\nechelon: refused\n"),
            ("yaml", "train: {step: 3}\n"),
            ("python", "assert False\n"),
        ],
    )
    def test_a_wrong_block_fails(self, tmp_path: Path, language: str, text: str) -> None:
        with pytest.raises(Exception):  # noqa: B017
            self.run(tmp_path, language, text)

    @pytest.mark.parametrize(
        ("language", "text"),
        [
            ("console", "$ echo one; echo two\none\n...\n$ echo a \\\n  b\na b\n"),
            ("console", "$ echo 'echelon: refused' >&2; exit 2\nechelon: refused\n"),
            ("yaml", "parallel: {dp_replicate: 2, dp_shard: auto}\ntrain: {tokens: 2e9, precision: bf16}\n"),
        ],
    )
    def test_a_correct_block_passes(self, tmp_path: Path, language: str, text: str) -> None:
        self.run(tmp_path, language, text)

    def test_markers_are_read(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("text\n\n<!-- test: skip -->\n```console\n$ false\n```\n\n```python\npass\n```\n")
        assert [(block.language, block.option) for block in read_blocks(page)] == [("console", "skip"), ("python", "")]
