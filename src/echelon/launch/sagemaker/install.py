"""Installs the packages that echelon needs and a container's image lacks, with pip.

For containers without a package index, pip collects their wheels on the machine that launches. In a container this runs
before anything is installed: requirements are read by `packaging`, which transformers brings, else by pip's copy of it.
The versions that pip chose are kept in the checkpoint folder, which SageMaker brings back at every start, so that a
restart installs the same ones. The image's torch is never replaced.
"""

import importlib
import importlib.metadata
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError, LaunchError

PINS = "packages.txt"
"""The file in the checkpoint folder with the versions that pip installed, `NAME==VERSION` in each line."""

OPTIONAL = "# Training can do without these:"
"""The line of the requirements after which only optional ones follow."""

NO_INDEX = "--no-index"
"""The first line of the requirements if the wheels come with the job."""

_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.!+]+)")
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
_MOST_PINS = 2000
_NO_PIP = "its image has no pip; set launch.sagemaker.image to an image that has them, or has pip."

# Where packets are dropped, as in a subnet without a NAT gateway, pip would wait for minutes with its own values.
WARM_CACHE = Path("/opt/ml/sagemaker/warmpoolcache")
"""The folder that SageMaker keeps for the next job on warm machines, if the account has it."""

_PATIENCE = {"PIP_RETRIES": "2", "PIP_DEFAULT_TIMEOUT": "10"}
_UNREACHABLE = re.compile(r"after connection broken by '(\w+)")

WHEELS_KEY = "launch.sagemaker.wheels"
DOWNLOAD = "download"
WHEELS_CHANNEL = "wheels"
WHEELS_ARCHIVE = "wheels.zip"

# AWS's images: https://github.com/aws/deep-learning-containers. Their Amazon Linux 2023 has glibc 2.34.
_PYTHON_OF_AWS = (3, 12)
_OLDEST_GLIBC, _NEWEST_GLIBC = 5, 34
# Stands for the torch of the image, so that pip downloads neither torch nor CUDA.
_STAND_IN = "2.13.0+echelon"


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
            chosen = _install(missing, needed, options, pins, env)
    except _ObstacleError as obstacle:
        if needed:
            raise LaunchError(f"this container lacks {', '.join(needed)}, and {obstacle}") from None
        _say(f"{', '.join(missing)} cannot be installed, and training goes on without: {obstacle}")
        return
    _keep_pins(checkpoints / PINS, {**pins, **chosen})
    importlib.invalidate_caches()


def find_missing(lines: Sequence[str], pins: Mapping[str, str] | None = None) -> list[str]:
    """The requirements that apply here and are missing, or have the wrong version.

    A vendor build such as 2.11.0a0+nv counts as that version. With `pins`, by `_plain_name`, also those whose version
    is another one than at the last start. Raises LaunchError if there is nothing that reads requirements.
    """
    requirements = [line for line in lines if line.strip() and not line.startswith(("#", "-"))]
    return [line for line in requirements if not _is_satisfied(line, pins or {})]


def _is_satisfied(line: str, pins: Mapping[str, str]) -> bool:
    requirement = _import_parser("requirements").Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    installed = find_installed(requirement.name)
    if installed is None or pins.get(_plain_name(requirement.name), installed) != installed:
        return False
    return bool(requirement.specifier.contains(_import_parser("version").Version(installed).base_version))


def _import_parser(part: str) -> Any:
    for package in ("packaging", "pip._vendor.packaging"):
        with suppress(ImportError):
            return importlib.import_module(f"{package}.{part}")
    raise LaunchError(f"this container lacks packages that echelon needs, and {_NO_PIP}")


def find_installed(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def _chosen_options(lines: Sequence[str], wheels: Path) -> Iterator[list[str]]:
    """The options of the requirements; with `--no-index` also the folders of wheels. Archives are unpacked.

    Raises _ObstacleError if it is known that pip cannot install anything.
    """
    if importlib.util.find_spec("pip") is None:
        raise _ObstacleError(_NO_PIP)
    options = [line for line in lines if line.startswith("-")]
    with tempfile.TemporaryDirectory(prefix="wheels-") as unpacked:
        if NO_INDEX in options:
            for archive in sorted(wheels.rglob("*.zip")):
                shutil.unpack_archive(archive, unpacked)
            folders = sorted({path.parent for root in (wheels, Path(unpacked)) for path in root.rglob("*.whl")})
            if not folders:
                raise _ObstacleError("there is no wheel in the channel wheels; check launch.sagemaker.wheels.")
            options += [f"--find-links {folder}" for folder in folders]
        yield options


def _install(
    missing: list[str], needed: list[str], options: Sequence[str], pins: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, str]:
    """Install packages; return the versions of all that pip has installed, by plain name.

    If the versions of the last start cannot be installed, pip chooses others; if optional packages cannot, they are
    left out. Raises LaunchError if the `needed` ones cannot be installed, and _ObstacleError.
    """
    attempts: list[tuple[list[str], Mapping[str, str], str]] = []
    note = ""
    if pins:
        note = f", with the versions of the last start (in {PINS})"
        attempts.append((missing, pins, "the versions of the last start cannot be installed, so pip chooses others"))
    if left_out := ", ".join(line for line in missing if line not in needed):
        attempts.append((missing, {}, f"{left_out} cannot be installed, and training goes on without"))
    _say(f"pip install {' '.join(missing)}{note}")
    cause = ""
    for packages, versions, otherwise in [*attempts, (needed, {}, "")]:
        chosen, cause = _run_pip(packages, options, versions, env) if packages else ({}, "")
        if chosen:
            _say(f"installed {', '.join(f'{name} {version}' for name, version in sorted(chosen.items()))}")
        if chosen is not None:
            return chosen
        if otherwise:
            _say(f"{otherwise}: {cause}")
    fix = "add them to launch.sagemaker.wheels" if NO_INDEX in options else "let the job reach a package index"
    raise LaunchError(f"pip could not install {', '.join(needed)}: {cause}; use an image that has them, or {fix}.")


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
        image = {"torch": version} if (version := find_installed("torch")) else {}
        fixed = "".join(f"{name}=={version}\n" for name, version in {**pins, **image}.items())
        constraints.write_text(fixed, encoding="utf-8")
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
    matches = (_PIN.fullmatch(line) for line in lines)
    return {_plain_name(match[1]): match[2] for match in matches if match is not None}


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


def find_python(image: str | None) -> tuple[int, int]:
    """The Python version of an image: that of its tag, or of AWS's images. Raises ConfigError if it is unknown."""
    if image is None:
        return _PYTHON_OF_AWS
    if match := re.search(r":.*-py(\d)(\d+)\b", image):
        return int(match[1]), int(match[2])
    if re.search(r"\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/(?:huggingface-)?pytorch[\w-]*:.*amzn2023", image):
        return _PYTHON_OF_AWS
    raise ConfigError(
        f"{WHEELS_KEY}={DOWNLOAD}: the Python version of launch.sagemaker.image={image} is unknown, because its tag "
        f"has no -py312 or the like; give a folder of wheels: run `pip wheel -r requirements.txt` in the image, and "
        f"set {WHEELS_KEY} to that folder."
    )


@cache
def collect_wheels(requirements: str, python: tuple[int, int]) -> bytes:
    """An archive of the wheels of these requirements and all that they need, except torch, for Linux on x86-64.

    Raises LaunchError with pip's message.
    """
    if importlib.util.find_spec("pip") is None:
        raise LaunchError(
            f"{WHEELS_KEY}={DOWNLOAD} requires pip, which {sys.executable} does not have; run `{sys.executable} -m "
            f"ensurepip`, or set {WHEELS_KEY} to a folder of wheels."
        )
    with tempfile.TemporaryDirectory(prefix="wheels-") as scratch:
        downloads, lines, pins = Path(scratch, "found"), Path(scratch, "wanted.txt"), Path(scratch, "pins.txt")
        stand_in = _write_stand_in(Path(scratch))
        packages = [line for line in requirements.splitlines() if not line.startswith("-")]
        lines.write_text("\n".join(packages) + "\n", encoding="utf-8")
        pins.write_text(f"torch=={_STAND_IN}\n", encoding="utf-8")
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        argv += ["--dest", str(downloads), "-r", str(lines), "-c", str(pins), "--find-links", str(stand_in.parent)]
        done = subprocess.run([*argv, *_platform_options(python)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LaunchError(
                f"{WHEELS_KEY}={DOWNLOAD}: pip could not collect the packages for Python {python[0]}.{python[1]}: "
                f"{find_cause(done.stderr)}; set {WHEELS_KEY} to a folder of wheels."
            )
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(downloads.iterdir()):
                if path.name != stand_in.name:
                    archive.write(path, path.name)
    return buffer.getvalue()


def _platform_options(python: tuple[int, int]) -> list[str]:
    version = f"{python[0]}{python[1]}"
    options = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    for abi in (f"cp{version}", "abi3", "none"):
        options += ["--abi", abi]
    systems = [f"manylinux_2_{minor}" for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    for system in (*systems, "manylinux2014", "manylinux2010", "manylinux1", "linux"):
        options += ["--platform", f"{system}_x86_64"]
    return options


def _write_stand_in(place: Path) -> Path:
    """Write an empty wheel named torch, of a version that only it has."""
    folder = place / "stand-in"
    folder.mkdir()
    info = f"torch-{_STAND_IN}.dist-info"
    path = folder / f"torch-{_STAND_IN}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {_STAND_IN}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path
