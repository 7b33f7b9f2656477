"""The entry point of a SageMaker container: runs as process 1 and uses only the standard library.

It is uploaded next to `echelon.zip`, since the image may not have echelon. The kernel drops signals that process 1 does
not handle and makes it the parent of every orphan. So it only forwards signals, reaps processes and waits for its one
child. The child makes echelon importable and does the rest (`container.py`). On every failure the cause is written to
the failure file, of which SageMaker shows the first 1024 characters.
"""

# ruff: noqa: E402 (signals are handled before anything else is imported)

import signal

_EARLY: list[int] = []
if __name__ == "__main__":
    for _each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(_each, lambda number, frame: _EARLY.append(number))

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FAILURE_CHARACTERS = 1024
OLDEST_PYTHON = (3, 11)  # as in request.py, which this file cannot import

_PACKAGE = "echelon.zip"


class EntryError(Exception):
    """The container cannot start training; the message is one sentence."""

    exit_code = 1


class RefusedError(EntryError):
    """The container cannot do what the job asks for; starting it again would not help."""

    exit_code = 2


class _StoppedEarly(BaseException):
    """A stop signal arrived before training began."""


def main(base: Path) -> int:
    """Run process 1 of the container whose files are in `base`; returns its exit code."""
    child = os.fork()
    if child == 0:
        return work(base)

    def forward(number: int, _: "FrameType | None") -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    _listen(forward)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    hint = " (often because the machine ran out of memory)" if -code == signal.SIGKILL else ""
    write_failure(base, f"echelon's own process was killed by {signal.Signals(-code).name}{hint}")
    return 128 - code


def work(base: Path) -> int:
    """Run the child: train the recipe in the channel `echelon`; returns the exit code of the container."""

    def stop(number: int, _: "FrameType | None") -> None:
        raise _StoppedEarly(signal.Signals(number).name)

    try:
        _listen(stop)
        channel = base / "input" / "data" / "echelon"
        make_importable(channel)
        check_gpus(base)
        installing = importlib.import_module("echelon.launch.sagemaker.install")
        installing.install_missing(channel, base / "checkpoints", os.environ)
        container = importlib.import_module("echelon.launch.sagemaker.container")
        outcome = container.run(base, dict(os.environ))
        code, message = outcome.code, outcome.message
    except _StoppedEarly as stopped:
        code, message = 1, f"stopped by {stopped} before training began; start the same job again"
        _say(message)
    except Exception as error:  # the platform shows only the failure file and the code
        code, message = getattr(error, "exit_code", 1), str(error)
        if not hasattr(error, "exit_code"):
            message = _hide_secrets(f"{type(error).__name__}: {error}")
            sys.stderr.write(_hide_secrets(traceback.format_exc()))
        _say(message)
    # Python removes its handlers before it exits: a signal that arrives then would change the exit code.
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if code != 0:
        write_failure(base, message)
    return int(code)


def _listen(handler: "Callable[[int, FrameType | None], None]") -> None:
    """Handle stop signals with `handler`, including one that has already arrived."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, handler)
    if _EARLY:
        handler(_EARLY[0], None)


def _hide_secrets(text: str) -> str:
    """Redact secrets if echelon can be imported; anything that fails earlier has read no secret."""
    with suppress(ImportError):
        return str(importlib.import_module("echelon.ground.redaction").redact_text(text))
    return text


def write_failure(base: Path, message: str) -> None:
    """Write the failure file for SageMaker. The first cause is kept; later ones are its consequences."""
    path = base / "output" / "failure"
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(message if len(message) <= FAILURE_CHARACTERS else message[: FAILURE_CHARACTERS - 1] + "…")


def make_importable(channel: Path) -> None:
    """Make this process and its children find echelon. Raises EntryError if this Python is too old."""
    if sys.version_info < OLDEST_PYTHON:
        raise EntryError(
            f"python3 of this image is {sys.version.split()[0]}, but echelon needs "
            f"{'.'.join(map(str, OLDEST_PYTHON))} or newer; set launch.sagemaker.image to an image that has it."
        )
    package = channel / _PACKAGE
    shipped = read_version(package)
    if _find_installed("echelon") == shipped:
        _say(f"using echelon {shipped} from the image")
    else:
        folder = tempfile.mkdtemp(prefix="echelon-")
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = folder if not before else f"{folder}{os.pathsep}{before}"
        _say(f"using echelon {shipped} from the channel")


def check_gpus(base: Path) -> None:
    """Raise RefusedError if the instance has GPUs and torch does not see them, before anything is downloaded.

    In an image without the packages of echelon the check fails, and `echelon train` makes it once they are installed.
    """
    checked = subprocess.run(
        [sys.executable, "-m", "echelon.launch.sagemaker.container", str(base)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if checked.returncode == RefusedError.exit_code:
        raise RefusedError((checked.stderr.strip().splitlines() or ["GPUs are missing"])[-1])


def _find_installed(name: str) -> "str | None":
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_version(package: Path) -> str:
    """The version of echelon in a zip file. Raises EntryError if the file is not one."""
    try:
        with zipfile.ZipFile(package) as archive:
            match = re.search(r'__version__ = "([^"]+)"', archive.read("echelon/__init__.py").decode("utf-8"))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise EntryError(f"{package} is not a zip of echelon's source: {error}; submit the job again.") from error
    return match[1] if match else "unknown"


def _say(line: str) -> None:
    print(f"echelon: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path("/opt/ml")))
