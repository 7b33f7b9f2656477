"""The hook of mkdocs.yml: the pages keep their places in the repository, so their links work on GitHub and on the site.

`docs/index.md` has the order of the pages. What a page links to outside of `docs/` becomes a page as well, and so do
the notebook and the reference of the public names, from their docstrings.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = "docs/api.md"
# Pages that name what is public, in examples (`from echelon.a import B`) and in prose ("`B` in `echelon.a`").
API_SOURCES = ("python.md", "library.md", "loops.md", "batches.md")
API_HEAD = """# API

What [scripts](python.md), [one rank as a library](library.md), [loops](loops.md) and [parts of your own](batches.md)
may use, from the docstrings. Names below the first heading are those of `import echelon`.
"""


class Shown(File):
    """A page that is made of a file which is not Markdown."""

    def is_documentation_page(self) -> bool:
        return True

    @property
    def content_string(self) -> str:
        path = ROOT / self.src_uri
        if path.suffix == ".ipynb":
            from nbconvert import MarkdownExporter

            return MarkdownExporter().from_filename(str(path))[0]
        language = {".py": "python", ".yaml": "yaml", ".sh": "sh"}.get(path.suffix, "text")
        return f"# {path.name}\n\n`````{language}\n{path.read_text(encoding='utf-8')}\n`````\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from docs/index.md."""
    sections = read_index()
    sections[-1][1].append(("API", API))
    config.nav = [{"Home": "docs/index.md"}]
    config.nav += [{title: [{name: uri} for name, uri in pages]} for title, pages in sections]
    return config


def read_index() -> list[tuple[str, list[tuple[str, str]]]]:
    """The sections of docs/index.md that list pages: title, and the title and file of each page."""
    sections = []
    for section in re.split(r"^## ", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        pages = re.findall(r"^- \[(.+)\]\((.+)\)$", section, re.MULTILINE)
        if pages:
            sections.append((section.partition("\n")[0], [(name, f"docs/{path}") for name, path in pages]))
    return sections


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give every file its place in the repository, and add what the pages link to."""
    placed = [file for file in files if file.src_dir != config.docs_dir]
    placed += [place(path, config) for path in sorted(find_files())]
    placed.append(File.generated(config, API, content=render_api()))
    placed[-1].dest_uri = "api.html"
    return Files(placed)


def find_files() -> set[Path]:
    """All files of docs/, and those that they link to, and so on."""
    waiting = [path for path in DOCS.rglob("*") if path.is_file()]
    found = set[Path]()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += find_linked(path) if path.suffix == ".md" else []
    return found


def find_linked(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
        path = Path(os.path.normpath(page.parent / target))
        if path.is_relative_to(ROOT) and path.is_file():
            yield path


def place(path: Path, config: MkDocsConfig) -> File:
    """The file of the site for one of the repository."""
    uri = path.relative_to(ROOT).as_posix()
    plain = path.suffix in (".svg", ".png", ".css", ".json")
    kind = File if plain or path.suffix == ".md" else Shown
    goal = uri.removeprefix("docs/")
    goal = goal if plain else f"{goal.removesuffix('.md').removesuffix('.ipynb')}.html"
    return kind(uri, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=goal)


def render_api() -> str:
    """The page that mkdocstrings fills with the docstrings of the public names."""
    names = find_public_names()
    own = [name for name in names if name.count(".") == 1]
    others = [name for name in names if name.count(".") > 1]
    groups = [("import echelon", own), ("Parts and results", others)]
    lines = [API_HEAD]
    for title, members in groups:
        full = str(members is others).lower()
        options = f"    options: {{heading_level: 3, show_root_full_path: {full}}}\n"
        lines += [f"## {title}\n", *(f"::: {name}\n{options}" for name in members)]
    return "\n".join(lines)


def find_public_names() -> list[str]:
    """What `echelon` exports, and what the pages about Python name besides."""
    import echelon

    text = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in API_SOURCES)
    named = [(name, module) for name, module in re.findall(r"`(\w+)`\s+in\s+`(echelon\.[\w.]+)`", text)]
    for module, names in re.findall(r"^from (echelon\.[\w.]+) import (.+)$", text, re.MULTILINE):
        named += [(name.strip(), module) for name in names.split(",")]
    exported: list[Any] = list(echelon.__all__)
    return [f"echelon.{name}" for name in exported] + sorted(
        {f"{module}.{name}" for name, module in named if name not in exported}
    )
