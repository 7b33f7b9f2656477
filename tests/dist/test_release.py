"""`make release` refuses what is not ready, and otherwise builds, tries and tags; in a real git repository."""

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec

import pytest

from tests import release
from tests.house.source_tree import ROOT

INIT = '"""A package of this name, for the release."""\n\n__version__ = "0.1.0"\n'
COMMAND = '''
import sys

DEMO = """
eval at step 1: loss 6.0  perplexity 403.4
eval at step 2: loss 5.0  perplexity 148.4
eval at step 3: loss 4.0  perplexity 54.6
== letting it continue 'def'
def read(self): return self if self is not None else self
== done
next: more
"""

def main():
    print({"--version": "echelon 0.1.0", "plan": "cluster: 8 x H100", "demo": DEMO}[sys.argv[1]])
'''
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "echelon"
dynamic = ["version"]
description = "A package of this name."
readme = "README.md"
license-files = ["LICENSE"]

[project.scripts]
echelon = "echelon.command:main"

[tool.setuptools.dynamic]
version = {attr = "echelon.__version__"}

[tool.setuptools.packages.find]
where = ["src"]
"""
TABLE = 'print("suite, tests")\nraise SystemExit(0)\n'

needs_tools = pytest.mark.skipif(
    not (find_spec("build") and find_spec("twine")), reason="build and twine are not installed: make release does that"
)


@pytest.fixture
def project(tmp_path):
    """A small package named echelon, committed on main, and ready for its release."""
    for folder in ("src/echelon", "tests", "recipes"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in {
        "src/echelon/__init__.py": INIT,
        "src/echelon/command.py": COMMAND,
        "pyproject.toml": PROJECT,
        "README.md": "# echelon\n",
        "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-01-02\n",
        "CITATION.cff": "cff-version: 1.2.0\n",
        "constraints.txt": "",
        "recipes/pretrain-1.3b.yaml": "",
        "tests/__init__.py": "",
        "tests/check.py": TABLE,
        ".gitignore": "dist/\n*.egg-info/\n__pycache__/\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    shutil.copy(release.__file__, tmp_path / "tests")
    for name in ("LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    git(tmp_path, "config", "user.name", "A Name")
    git(tmp_path, "config", "user.email", "name@example.com")
    commit(tmp_path)
    return tmp_path


def git(folder, *arguments):
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Change")


def start(folder, *options):
    argv = [sys.executable, "-m", "tests.release", *options]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def replace(folder, name, old, new):
    text = (folder / name).read_text(encoding="utf-8")
    assert old in text
    (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    commit(folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("src/echelon/__init__.py", '"0.1.0"', '"0.1.0.dev1"', "__version__ = '0.1.0.dev1' is no release"),
        ("src/echelon/__init__.py", '"0.1.0"', '"0.2.0"', "CHANGELOG.md has no heading '## [0.2.0] - "),
        ("pyproject.toml", 'dynamic = ["version"]', 'version = "0.1.0"', "pyproject.toml has a version of its own"),
        ("CITATION.cff", "cff", "version: 0.1.0\ncff", "CITATION.cff has a version of its own"),
        ("CHANGELOG.md", "2026-01-02", "2999-01-02", "CHANGELOG.md dates 0.1.0 2999-01-02, which is after today"),
        ("CHANGELOG.md", "2026-01-02", "2.1.2026", "CHANGELOG.md dates 0.1.0 '2.1.2026'; write the date like 20"),
        (
            "tests/check.py",
            "(0)",
            "('red')",
            "not all tests have passed with this source; run make check:\nsuite, tests\nred",
        ),
    ],
)
def test_a_source_that_is_not_ready_is_refused(project, name, old, new, message):
    replace(project, name, old, new)
    code, printed = start(project)
    assert code == 1 and message in printed
    assert "nothing was built or tagged" in printed and not (project / "dist").exists()
    assert git(project, "tag") == ""


def test_a_commit_that_is_not_ready_is_refused(project):
    git(project, "tag", "v0.1.0")
    git(project, "switch", "--quiet", "--create", "topic")
    (project / "new.txt").touch()
    code, printed = start(project)
    assert code == 1
    assert "the branch is topic, and releases are made from main" in printed
    assert "1 files are changed or unknown to git; commit or remove them: ?? new.txt" in printed
    assert "the tag v0.1.0 exists" in printed
    assert printed.count("MISSING") == 1 and printed.count("ok ") == 3


def test_a_tag_of_another_version_is_refused(project):
    code, printed = start(project, "--wheel", "--tag", "v0.2.0")
    assert code == 2 and "--tag v0.2.0 is not that of __version__ = '0.1.0': v0.1.0" in printed


@pytest.mark.slow
@needs_tools
def test_a_release_is_built_tried_and_tagged(project):
    replace(project, "tests/check.py", "(0)", "(1)")
    code, printed = start(project, "--dry-run")
    assert code == 1 and "nothing was tagged; 1 missing" in printed
    assert git(project, "tag") == ""
    replace(project, "tests/check.py", "(1)", "(0)")

    code, printed = start(project)
    assert code == 0, printed
    assert printed.count("ok ") == 6
    assert "-m twine upload dist/echelon-0.1.0-py3-none-any.whl dist/echelon-0.1.0.tar.gz" in printed
    assert git(project, "cat-file", "-t", "v0.1.0") == "tag\n"
    assert git(project, "rev-parse", "v0.1.0^{commit}") == git(project, "rev-parse", "HEAD")
    with tarfile.open(project / "dist" / "echelon-0.1.0.tar.gz") as archive:
        assert "echelon-0.1.0/recipes/pretrain-1.3b.yaml" in archive.getnames()


@pytest.mark.slow
@needs_tools
def test_files_that_a_wheel_lacks_and_a_command_that_fails_are_found(project):
    (project / "src" / "echelon" / "page.css").touch()  # no package data
    replace(project, "src/echelon/command.py", "echelon 0.1.0", "echelon 0.0.9")
    replace(project, "src/echelon/command.py", "loss 5.0", "loss 6.5")
    replace(project, "src/echelon/command.py", "self if self is not None else self", "1")
    replace(project, "src/echelon/command.py", "next: more", "")
    code, printed = start(project, "--wheel")
    assert code == 1
    assert "the wheel lacks echelon/page.css" in printed
    assert "echelon --version prints 'echelon 0.0.9' instead of 'echelon 0.1.0'" in printed
    assert "the held-out losses of echelon demo are [6.0, 6.5, 4.0]; they should fall" in printed
    assert "the sample of echelon demo does not read like Python: 'def read(self): return 1'" in printed
    assert "echelon demo does not end with what to do next: == done" in printed


@pytest.mark.slow
@needs_tools
def test_the_wheel_of_this_source_works(tmp_path):
    git(tmp_path, "clone", "--quiet", ROOT, "echelon")
    code, printed = start(tmp_path / "echelon", "--wheel", "--tag", f"v{release.read_version()}")
    assert code == 0, printed
