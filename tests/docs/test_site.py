"""The pages of `make site`: their links have targets, they load nothing from elsewhere, and show what GitHub shows."""

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from markdown_it import MarkdownIt
from typing_extensions import override

import echelon
from tests.docs.test_docs import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
SECTIONS = ["Start", "Train", "Fine-tune", "Scale", "Operate", "Extend"]
# Elements that Markdown makes. Not p: paragraphs in lists differ without a difference to see.
ELEMENTS = {"h1", "h2", "h3", "h4", "li", "table", "tr", "pre", "code", "img", "strong", "em"}

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The anchors of a page, what it links to and loads, and how many elements its article has."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = {""}, list[str](), list[str]()
        self.elements = Counter[str]()
        self._inside = False
        self.feed(html)

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._inside |= tag == "article"
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("link", "script", "img", "source", "iframe"):
            self.loaded += [values[name] for name in ("href", "src") if name in values]
        if self._inside and tag in ELEMENTS:
            self.elements[tag] += 1

    @override
    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "article"


def is_elsewhere(target: str) -> bool:
    return bool(re.match(r"(\w+:)?//|\w+:", target))


def find_broken(pages: dict[str, Page], site: Path) -> list[str]:
    """The links inside of the site whose file or anchor does not exist; `pages` has the pages by their place."""
    broken = []
    for place, page in pages.items():
        for target in (*page.links, *page.loaded):
            if is_elsewhere(target):
                continue
            parts = urlsplit(urljoin(place, target))
            goal = unquote(parts.path)
            goal = f"{goal}index.html" if goal.endswith("/") or not goal else goal
            found = (site / goal).is_file()
            if found and goal in pages:
                found = unquote(parts.fragment) in pages[goal].anchors
            if not found:
                broken.append(f"{place}: {target}")
    return broken


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; building them fails at a warning."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    paths = [path for path in site.rglob("*.html") if path.name != "404.html"]  # which does not know its place
    return {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")) for path in paths}


def test_every_link_has_a_target(site: Path, pages: dict[str, Page]) -> None:
    assert len(pages) > len(DOCS) and sum(len(page.links) for page in pages.values()) > 5000
    assert find_broken(pages, site) == []


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Page]) -> None:
    assert {target for page in pages.values() for target in page.loaded if is_elsewhere(target)} == set()
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text(encoding="utf-8")), path


def test_the_pages_show_what_github_shows(pages: dict[str, Page]) -> None:
    """For example, Python-Markdown wants lists in lists indented by four spaces, GitHub by two or more."""
    github = MarkdownIt("commonmark").enable("table")
    for path in DOCS:
        html = github.render(path.read_text(encoding="utf-8"))
        assert pages[f"{path.stem}.html"].elements == Page(f"<article>{html}</article>").elements, path.name


def test_every_table_is_one(site: Path) -> None:
    """Rows of a table that were wrapped as text are a paragraph with the line below the head."""
    assert [path.name for path in site.rglob("*.html") if "--|--" in path.read_text(encoding="utf-8")] == []


def test_the_tabs_are_the_sections_of_the_index(site: Path, pages: dict[str, Page]) -> None:
    assert [title for title, _ in importlib.import_module("tests.docs.site_hook").read_index()] == SECTIONS
    tabs = re.findall(r'class="md-tabs__link">\s*(.*?)\s*</a>', (site / "index.html").read_text(), re.DOTALL)
    assert tabs == ["Home", *SECTIONS]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\[([\w-]+)\]\(docs/index\.md#([\w-]+)\)", readme)
    assert [(name.capitalize(), anchor) for name, anchor in named] == [(name, name.lower()) for name in SECTIONS]


def test_public_names_are_described(site: Path, pages: dict[str, Page]) -> None:
    names = (name for name in dir(echelon.Learner) if not name.startswith("_"))
    methods = {name for name in names if callable(method := getattr(echelon.Learner, name)) and method.__doc__}
    wanted = {f"echelon.{name}" for name in echelon.__all__} | {f"echelon.Learner.{name}" for name in methods}
    wanted |= {"echelon.learn.answers.rollouts.Rollouts.batch", "echelon.learn.optimizer.rules.Rule.update"}
    assert wanted <= pages["api.html"].anchors
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "api.html#echelon.Learner.forward_backward" in index and "first-run.html" in index


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.html").touch()
    first = Page('<a href="b.html#here">1</a><a href="b.html#gone">2</a><img src="c.svg"><a href="https://x">3</a>')
    assert find_broken({"a.html": first, "b.html": Page('<h1 id="here">b</h1>')}, tmp_path) == [
        "a.html: b.html#gone", "a.html: c.svg"
    ]  # fmt: skip
