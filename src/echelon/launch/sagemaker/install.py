"""Installs the packages that echelon needs and a container's image lacks, with pip.

Uses only the standard library, since it runs before anything is installed. The versions that pip chose are kept in the
checkpoint folder, which SageMaker brings back at every start, so that a restart installs the same ones.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echelon.ground.errors import LaunchError

PINS = "packages.txt"
"""The file in the checkpoint folder with the versions that pip installed, `NAME==VERSION` in each line."""

OPTIONAL = "# Training can do without these:"
"""The line of the requirements after which only optional ones follow."""

NO_INDEX = "--no-index"
"""The first line of the requirements if the wheels come with the job."""

_NAME = r"[A-Za-z0-9][\w.-]*"
_REQUIREMENT = re.compile(rf"({_NAME})(?:\[[^\]]*\])?((?:\s*(?:==|!=|<=|>=|<|>)\s*[\d.]+\s*,?)*)(?:;(.*))?")
_BOUND = re.compile(r"(==|!=|<=|>=|<|>)\s*([\d.]+)")
_CLAUSE = re.compile(r"\s*(\w+)\s*(==|!=|<=|>=|<|>)\s*(['\"])([^'\"]*)\3\s*")
_PIN = re.compile(rf"({_NAME})==([\w.!+]+)")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda here, bound: here == bound,
    "!=": lambda here, bound: here != bound,
    "<=": lambda here, bound: here <= bound,
    ">=": lambda here, bound: here >= bound,
    "<": lambda here, bound: here < bound,
    ">": lambda here, bound: here > bound,
}
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
# The variables of environment markers (https://packaging.python.org/specifications/dependency-specifiers).
_MARKERS = {
    "sys_platform": sys.platform,
    "platform_system": platform.system(),
    "platform_machine": platform.machine(),
    "os_name": os.name,
    "implementation_name": sys.implementation.name,
    "python_version": _PYTHON,
    "python_full_version": platform.python_version(),
}
_MOST_PINS = 2000

# Where packets are dropped, as in a subnet without a NAT gateway, pip would wait for minutes with its own values.
WARM_CACHE = Path("/opt/ml/sagemaker/warmpoolcache")
"""The folder that SageMaker keeps for the next job on warm machines, if the account has it."""

_PATIENCE = {"PIP_RETRIES": "2", "PIP_DEFAULT_TIMEOUT": "10"}
_UNREACHABLE = re.compile(r"after connection broken by '(\w+)")


class _ObstacleError(Exception):
    """Why pip cannot install anything here, and the fix, as the end of a message."""


def install_missing(channel: Path, checkpoints: Path, env: Mapping[str, str]) -> None:
    """Install what `requirements.txt` of a channel lists and this Python lacks. Uses neither pip nor the network if
    nothing is missing.

    If the requirements begin with `--no-index`, packages are installed from the wheels in the channel `wheels`, a
    sibling of `channel`. Raises LaunchError if a required package cannot be installed.
    """
    requirements = channel / "requirements.txt"
    lines = requirements.read_text(encoding="utf-8").splitlines() if requirements.exists() else []
    pins = _read_pins(checkpoints / PINS)
    if not (missing := find_missing(lines, pins)):
        return
    end = lines.index(OPTIONAL) if OPTIONAL in lines else len(lines)
    needed = find_missing(lines[:end], pins)
    try:
        with _chosen_options(lines, channel.parent / "wheels") as options:
            _check_obstacles(options)
            chosen = _install(missing, needed, options, pins, env)
    except _ObstacleError as obstacle:
        if needed:
            raise LaunchError(f"this container lacks {', '.join(needed)}, and {obstacle}") from None
        _say(f"{', '.join(missing)} cannot be installed, and training goes on without: {obstacle}")
        return
    _keep_pins(checkpoints / PINS, {**pins, **chosen})
    importlib.invalidate_caches()


def find_missing(lines: Sequence[str], pins: Mapping[str, str] | None = None) -> list[str]:
    """The requirements that apply here and are missing, have the wrong version, or can only be evaluated by pip.

    A vendor build such as 2.11.0a0+nv counts as that version, so that NVIDIA's torch is not replaced. With `pins`, by
    `_plain_name`, also those whose version is another one than at the last start.
    """
    wanted = [line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith(("#", "-"))]
    return [line for line in wanted if not _is_satisfied(line, pins or {})]


def _is_satisfied(requirement: str, pins: Mapping[str, str]) -> bool:
    if (match := _REQUIREMENT.fullmatch(requirement)) is None:
        return False
    if match[3] is not None and not _applies(match[3]):
        return True
    installed = find_installed(match[1])
    if installed is None or pins.get(_plain_name(match[1]), installed) != installed:
        return False
    here = _release(installed)
    return all(_COMPARISONS[sign](here, _release(bound)) for sign, bound in _BOUND.findall(match[2]))


def _applies(marker: str) -> bool:
    """Whether a requirement with this environment marker is for this Python; also if only pip can tell."""
    for clause in marker.split(" and "):
        match = _CLAUSE.fullmatch(clause)
        if match is None or match[1] not in _MARKERS:
            return True
        here, bound = _MARKERS[match[1]], match[4]
        if match[1].startswith("python_"):
            applies = _COMPARISONS[match[2]](_release(here), _release(bound))
        else:
            applies = _COMPARISONS[match[2]](here, bound)
        if not applies:
            return False
    return True


def find_installed(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _release(version: str) -> list[int]:
    """The numbers of a version without trailing zeros: 2.11 and 2.11.0+cu128 are the same."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


@contextmanager
def _chosen_options(lines: Sequence[str], wheels: Path) -> Iterator[list[str]]:
    """The options of the requirements; with `--no-index` also the folders of wheels. Archives are unpacked."""
    options = [line for line in lines if line.startswith("-")]
    if NO_INDEX not in options:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="wheels-") as unpacked:
        for archive in sorted(wheels.rglob("*.zip")):
            shutil.unpack_archive(archive, unpacked)
        folders = sorted({path.parent for place in (wheels, Path(unpacked)) for path in place.rglob("*.whl")})
        yield [*options, *(f"--find-links {folder}" for folder in folders)]


def _check_obstacles(options: Sequence[str]) -> None:
    """Raise _ObstacleError if it is known that pip cannot install anything."""
    if importlib.util.find_spec("pip") is None:
        raise _ObstacleError("its image has no pip; set launch.sagemaker.image to an image that has them, or has pip.")
    if NO_INDEX in options and not any(option.startswith("--find-links") for option in options):
        raise _ObstacleError("there is no wheel in the channel wheels; check launch.sagemaker.wheels.")


def _install(
    missing: list[str], needed: list[str], options: Sequence[str], pins: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, str]:
    """Install packages; return the versions of all that pip has installed, by plain name.

    If the versions of the last start cannot be installed, pip chooses others; if optional packages cannot, they are
    left out. Raises LaunchError if the `needed` ones cannot be installed, and _ObstacleError.
    """
    known = f", with the versions of the last start (in {PINS})" if pins else ""
    _say(f"pip install {' '.join(missing)}{known}")
    chosen, cause = _run_pip(missing, options, pins, env)
    if chosen is None and pins:
        _say(f"the versions of the last start cannot be installed, so pip chooses others: {cause}")
        chosen, cause = _run_pip(missing, options, {}, env)
    if chosen is None and needed != missing:
        left_out = [line for line in missing if line not in needed]
        _say(f"{', '.join(left_out)} cannot be installed, and training goes on without: {cause}")
        chosen, cause = _run_pip(needed, options, {}, env) if needed else ({}, "")
    if chosen is None:
        fix = "add them to launch.sagemaker.wheels" if NO_INDEX in options else "let the job reach a package index"
        raise LaunchError(f"pip could not install {', '.join(needed)}: {cause}; use an image that has them, or {fix}.")
    if chosen:
        _say(f"installed {', '.join(f'{name} {version}' for name, version in sorted(chosen.items()))}")
    return chosen


def _run_pip(
    wanted: Sequence[str], options: Sequence[str], pins: Mapping[str, str], env: Mapping[str, str]
) -> tuple[dict[str, str] | None, str]:
    """The versions that pip installed, or None and the cause. Raises _ObstacleError without a connection."""
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PIP_NO_INPUT": "1"}
    # Debian's rule against pip in its system Python protects a system; a container is disposable.
    settings["PIP_BREAK_SYSTEM_PACKAGES"] = "1"
    if WARM_CACHE.is_dir():
        settings["PIP_CACHE_DIR"] = str(WARM_CACHE / "pip")
    with tempfile.TemporaryDirectory(prefix="pip-") as folder:
        requirements, constraints, report = (Path(folder, name) for name in ("wanted.txt", "pins.txt", "report.json"))
        requirements.write_text("\n".join([*options, *wanted]) + "\n", encoding="utf-8")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--report", str(report), "-r", str(requirements)]
        pip = subprocess.run(
            [*argv, "-c", str(constraints)],
            env={**_PATIENCE, **env, **settings},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        sys.stderr.write(pip.stderr)
        if pip.returncode == 0:
            installed = json.loads(report.read_text(encoding="utf-8"))["install"] if report.exists() else []
            named = (package["metadata"] for package in installed)
            return {_plain_name(package["name"]): str(package["version"]) for package in named}, ""
    if broken := _UNREACHABLE.search(pip.stderr):
        raise _ObstacleError(
            f"pip cannot reach a package index ({broken[1]}). Set launch.sagemaker.wheels=download, which sends the "
            "packages with the job, or launch.sagemaker.image to an image that has them; or give "
            "launch.sagemaker.subnets a NAT gateway, or PIP_INDEX_URL in launch.env for an index inside your network."
        )
    return None, find_cause(pip.stderr)


def find_cause(stderr: str) -> str:
    """Why pip failed: its errors, or else its last line."""
    said = [line for line in stderr.splitlines() if line.strip()]
    causes = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")] or said[-1:]
    return " ".join(causes)[:600]


def _read_pins(path: Path) -> dict[str, str]:
    """The versions of the last start, by plain name; empty if there are none, or they are of another Python.

    They only choose among the versions that the requirements allow, so a file that somebody else wrote adds no package.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:_MOST_PINS]
    except (OSError, UnicodeDecodeError):
        return {}
    if f"# Python {_PYTHON}" not in lines:
        return {}
    found = (_PIN.fullmatch(line) for line in lines)
    return {_plain_name(match[1]): match[2] for match in found if match is not None}


def _keep_pins(path: Path, pins: Mapping[str, str]) -> None:
    """Write the versions for later starts. A folder that cannot be written is a line in the log."""
    head = f"# Installed by pip at a start; later starts with these checkpoints install the same.\n# Python {_PYTHON}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(head + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)), encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        _say(f"the versions of packages are not kept for later starts: {error}")


def _say(line: str) -> None:
    sys.stderr.write(f"echelon: {line}\n")
    sys.stderr.flush()
