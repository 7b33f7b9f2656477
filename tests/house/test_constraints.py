"""constraints.txt has the versions that the tests run with, and pyproject.toml admits them."""

import pytest
from packaging.requirements import Requirement

from tests import constraints

VERSIONS = constraints.read_constraints(constraints.FILE.read_text(encoding="utf-8"))
MISSING = set(constraints.FILE.read_text(encoding="utf-8").splitlines()[2].removeprefix("# ").split(", "))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Pretends that a package is installed."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(name, version, *needs):
        head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines = head + [f"Requires-Dist: {need}" for need in needs]
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")

    return add


def test_every_requirement_has_a_tested_version():
    groups = constraints.read_requirements()
    assert groups.keys() >= MISSING and "" not in MISSING
    assert constraints.find_faults(groups, VERSIONS, MISSING) == []


def test_versions_are_those_that_the_tests_run_with():
    """`make test` installs these. `make newest` tries newer ones; `make constraints` writes down what has passed."""
    installed = {name: constraints.find_version(name) for name in VERSIONS}
    other = {name: version for name, version in installed.items() if version not in (None, VERSIONS[name])}
    assert other == {}, "this environment has other versions: pip install -c constraints.txt, or make constraints"


def test_builds_and_tools_are_not_constrained():
    assert not [version for version in VERSIONS.values() if "+" in version]
    assert not {"echelon", "ruff", "mypy", "pytest", "mkdocs", "twine"} & VERSIONS.keys()


def test_what_packages_need_is_found(install):
    install("planted_a", "1.0+cpu", 'planted_b[fast]>=1; python_version > "3"', 'planted_d; extra == "more"')
    install("planted_b", "2.1", 'planted_c; extra == "fast"', 'planted_never; python_version < "3"')
    install("planted_c", "3.0", "planted_a")  # a cycle
    install("planted_d", "4.0")
    found = constraints.find_versions([Requirement("Planted.A"), Requirement("planted-absent")])
    assert found == {"planted-a": "1.0", "planted-b": "2.1", "planted-c": "3.0"}


def test_a_version_that_is_not_admitted_is_found():
    groups = {"": [Requirement("one<2"), Requirement("two")], "far": [Requirement("three")]}
    assert constraints.find_faults(groups, {"one": "2.0"}, {"far"}) == ["one<2: 2.0", "two: no version"]
