"""Wheels for containers without a package index: collected by pip on the machine that launches, for those of a job."""

import io
import re
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.sagemaker.install import find_cause

KEY = "launch.sagemaker.wheels"
DOWNLOAD = "download"
CHANNEL = "wheels"
ARCHIVE = "wheels.zip"

# AWS's images: https://github.com/aws/deep-learning-containers. Their Amazon Linux 2023 has glibc 2.34.
_PYTHON_OF_AWS = (3, 12)
_OLDEST_GLIBC, _NEWEST_GLIBC = 5, 34
# Stands for the torch of the image, so that pip downloads neither torch nor CUDA.
_STAND_IN = "2.13.0+echelon"


def find_python(image: str | None) -> tuple[int, int]:
    """The Python version of an image: that of its tag, or of AWS's images. Raises ConfigError if it is unknown."""
    if image is None:
        return _PYTHON_OF_AWS
    if match := re.search(r":.*-py(\d)(\d+)\b", image):
        return int(match[1]), int(match[2])
    if re.search(r"\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/(?:huggingface-)?pytorch[\w-]*:.*amzn2023", image):
        return _PYTHON_OF_AWS
    raise ConfigError(
        f"{KEY}={DOWNLOAD}: the Python version of launch.sagemaker.image={image} is unknown, because its tag has no "
        f"-py312 or the like; give a folder of wheels: run `pip wheel -r requirements.txt` in the image, and set "
        f"{KEY} to that folder."
    )


@cache
def collect_wheels(requirements: str, python: tuple[int, int]) -> bytes:
    """An archive of the wheels of these requirements and all that they need, except torch, for Linux on x86-64.

    Raises LaunchError with pip's message.
    """
    if find_spec("pip") is None:
        raise LaunchError(
            f"{KEY}={DOWNLOAD} requires pip, which {sys.executable} does not have; run `{sys.executable} -m "
            f"ensurepip`, or set {KEY} to a folder of wheels."
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
                f"{KEY}={DOWNLOAD}: pip could not collect the packages for Python {python[0]}.{python[1]}: "
                f"{find_cause(done.stderr)}; set {KEY} to a folder of wheels."
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
