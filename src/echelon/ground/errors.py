"""The errors a user can see. Each has the exit code of its command.

A message states the value given, the rule, and the change that fixes it, with the recipe key:
`parallel.tp=3 does not divide num_key_value_heads=8; use tp=1, 2, 4 or 8.`
"""

import errno
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from echelon.ground.redaction import make_printable, redact_text

# Messages of allocators that raise a RuntimeError: torch's on CPUs, and C++'s own.
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|bad_alloc")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Fault:
    """The parts of one line of a message, which programs read; None: the line does not have it.

    `place` is the line of the file, or `command line`. `key` is a recipe's dotted key, or an option such as `--nproc`.
    """

    place: str | None = None
    key: str | None = None
    value: str | None = None
    rule: str | None = None
    fix: str | None = None

    @override
    def __str__(self) -> str:
        """The line: `recipe.yaml, line 9: train.steps=0 must be at least 1; use a larger number.`"""
        place = f"{self.place}: " if self.place else ""
        subject = " ".join(filter(None, (self.key if self.value is None else f"{self.key}={self.value}", self.rule)))
        text = f"{place}{subject}; {self.fix}" if self.fix else f"{place}{subject}"
        return text if text.endswith(("?", ".")) else f"{text}."

    def within(self, message: str) -> "Fault":
        """This fault without the parts that the message does not have: it has no secrets."""
        shown = {name: part for name, part in vars(self).items() if part is not None and part in message}
        return Fault(**shown)


class EchelonError(Exception):
    """An error reported as one message without a traceback, with secrets and control characters replaced.

    `faults`: the parts of the message's lines, if who raises the error gives them.
    """

    exit_code = 1

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        shown = make_printable(redact_text(message))
        super().__init__(shown)
        self.faults = tuple(fault.within(shown) for fault in faults)


class ConfigError(EchelonError, ValueError):
    """The recipe or the command line is wrong, or asks for what echelon cannot do."""

    exit_code = 2


class MissingSettingError(ConfigError):
    """A setting without which nothing can be submitted is not set; the message says how to set it.

    `placeholders`: values by dotted key with which `--dry-run` shows what would be submitted.
    """

    def __init__(self, message: str, placeholders: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.placeholders = placeholders


class HubUnreachableError(ConfigError):
    """The Hugging Face hub cannot be reached from this machine and the file is not cached; other machines may reach it.

    `reason` is the message without the fix.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}. {remedy}" if remedy else reason)
        self.reason = reason


class PlanError(EchelonError, ValueError):
    """The recipe is well-formed but cannot run on this cluster."""

    exit_code = 2


class DataError(EchelonError):
    """The text, the tokenizer or the prepared shards cannot be used as they are."""

    exit_code = 2


class CheckpointError(EchelonError):
    """A checkpoint is damaged, hostile, or could not be written."""


class LaunchError(EchelonError):
    """Processes could not be started, could not meet, or died."""


class BusyError(LaunchError):
    """The target refused a job for now, because of a quota or too many requests; it may accept it later."""


class StoppedError(EchelonError):
    """The run stopped on request, with everything saved; the same command resumes it."""

    exit_code = 3


class TrainingError(EchelonError):
    """Training itself failed: a non-finite loss or gradient norm, or another error that ended a rank."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened; its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of native code in Rust, which no `except Exception` catches."""
    return type(error).__name__ == "PanicException"


def render_traceback(error: BaseException) -> str:
    """The traceback of an unexpected error, as Python prints it, with secrets and control characters replaced."""
    return make_printable(redact_text("".join(traceback.format_exception(error))))


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in host memory or on a device."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "MemoryError"} or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))
    ):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def explain_storage_error(error: BaseException, place: object) -> str | None:
    """One line for a full disk or a file that is not writable; None for any other error.

    The message names `place` if the error has no file name.
    """
    if is_disk_full(error):
        return f"the disk is full ({getattr(error, 'filename', None) or place}); free space and run it again"
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:
        return f"{error.filename or place} cannot be accessed: {error.strerror}; choose a folder you can write to"
    return None
