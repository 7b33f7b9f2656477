"""Writes constraints.txt, the versions that the tests ran with, from this environment: `python -m tests.constraints`.

The file has echelon's dependencies, those of its extras, and what these need. It has no tools of contributors, and no
labels of builds such as +cpu, so the same file serves a CUDA build of torch.
"""

import platform
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FILE = ROOT / "constraints.txt"
TOOLS = {"test", "slow", "site", "lint", "release"}  # extras of contributors
HEAD = """# The versions of echelon's dependencies with which its tests have run: pip install -c constraints.txt .
# `make constraints` wrote this on Python {python}, {system}, from an environment that has no package of these extras:
# {missing}
"""


def read_requirements(root: Path = ROOT) -> dict[str, list[Requirement]]:
    """What echelon needs on this system, by extra; "" is every installation."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: [need for need in map(Requirement, texts) if need.marker is None or need.marker.evaluate()]
        for extra, texts in groups.items()
        if extra not in TOOLS
    }


def read_constraints(text: str) -> dict[str, str]:
    """The version of each package in a file of constraints."""
    lines = [line.partition("==") for line in text.splitlines() if not line.startswith("#")]
    return {name: version for name, _, version in lines}


def find_version(name: str) -> str | None:
    """The installed version without the label of its build; None if the package is not installed."""
    try:
        return Version(metadata.version(name)).public
    except metadata.PackageNotFoundError:
        return None


def find_versions(requirements: Iterable[Requirement]) -> dict[str, str]:
    """The installed versions of these packages and of what they need; packages that are not installed are left out."""
    waiting, seen, found = list(requirements), set(), {}
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        version = find_version(name)
        for extra in ("", *need.extras):
            if version is None or (name, extra) in seen:
                continue
            seen.add((name, extra))
            found[name] = version
            others = map(Requirement, metadata.requires(name) or [])
            waiting += [other for other in others if other.marker is None or other.marker.evaluate({"extra": extra})]
    return dict(sorted(found.items()))


def find_faults(groups: dict[str, list[Requirement]], versions: dict[str, str], missing: Iterable[str]) -> list[str]:
    """Requirements that their constraint contradicts, and those without one that are not of the extras `missing`."""
    faults = []
    for extra, needs in groups.items():
        for need in needs:
            version = versions.get(canonicalize_name(need.name))
            if version is None and extra not in missing:
                faults.append(f"{need}: no version")
            elif version is not None and not need.specifier.contains(version, prereleases=True):
                faults.append(f"{need}: {version}")
    return faults


def render() -> str:
    """The file for this environment. Raises SystemExit if it lacks a package that every installation needs."""
    groups = read_requirements()
    versions = find_versions(need for needs in groups.values() for need in needs)
    missing = [extra for extra, needs in groups.items() if any(find_version(need.name) is None for need in needs)]
    if faults := find_faults(groups, versions, set(missing) - {""}):
        sys.exit(f"this environment is not one for echelon: {'; '.join(faults)}; run `make test`, then this again")
    python = ".".join(platform.python_version_tuple()[:2])
    head = HEAD.format(python=python, system=platform.system(), missing=", ".join(sorted(missing)))
    return head + "".join(f"{name}=={version}\n" for name, version in versions.items())


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
    print(f"wrote {len(read_constraints(FILE.read_text(encoding='utf-8')))} versions to {FILE.name}")
