"""Writes docs/layout.md from the docstrings of all packages and modules: `python -m tests.docs.layout`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "echelon"
PAGE = ROOT / "docs" / "layout.md"

HEAD = """# Layout

Every package and file of `src/echelon`, with the first sentence of its docstring. [architecture.md](architecture.md)
explains the packages and which of them may import which. This page is generated: `python -m tests.docs.layout`.
"""


def render() -> str:
    """Return the page."""
    return HEAD + "".join(_render_package(package) for package in [PACKAGE, *_find_packages(PACKAGE)])


def _find_packages(folder: Path) -> Iterator[Path]:
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield inner
        yield from _find_packages(inner)


def _render_package(package: Path) -> str:
    name = package.relative_to(PACKAGE.parent).as_posix()
    files = [path for path in sorted(package.glob("*.py")) if not path.name.startswith("__")]
    lines = [f"- `{path.name}`: {describe(path)}" for path in files]
    return "\n".join([f"\n## {name}/\n", describe(package / "__init__.py"), *([""] if lines else []), *lines, ""])


def describe(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    sentence = re.match(r".*?[.:](?= [A-Z`]|$)", text)
    return (sentence[0] if sentence else text).rstrip(".:")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
