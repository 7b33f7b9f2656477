"""The errors a user can meet. Each carries the exit code its command ends with.

A message states the value given, the rule, and the change that fixes it, with the recipe key:
`parallel.tp=3 does not divide num_key_value_heads=8; use tp=1, 2, 4 or 8.`
"""

import errno
import traceback

from echelon.redaction import redact_text

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class EchelonError(Exception):
    """Anything echelon reports in one message without a traceback, and without what looks like a secret."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(redact_text(message))


class ConfigError(EchelonError, ValueError):
    """The recipe or the command line asks for something that is wrong or not built."""

    exit_code = 2


class HubUnreachableError(ConfigError):
    """The Hugging Face hub cannot be asked from this machine, whose cache lacks what is wanted; another one may do.

    `reason` is the message without what would help here.
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


class StoppedError(EchelonError):
    """The run was asked to stop and did, with everything saved; the same command goes on."""

    exit_code = 3


class TrainingError(EchelonError):
    """Training itself failed: a loss or a gradient norm that is not finite, or whatever ended a rank."""


def first_line(error: BaseException) -> str:
    """What a library's error says, cut to the start of its first line; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def render_traceback(error: BaseException) -> str:
    """The traceback of an unexpected error, as Python prints it, without what looks like a secret."""
    return redact_text("".join(traceback.format_exception(error)))


def is_disk_full(error: BaseException) -> bool:
    """Whether the system refused to write because a disk, or a quota, is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def explain_storage_error(error: BaseException, place: object) -> str | None:
    """One line for a disk that is full, or a file that may not be written; None for any other error.

    `place` is named where the system does not say which file it was.
    """
    if is_disk_full(error):
        return f"the disk is full ({getattr(error, 'filename', None) or place}); free space and run it again"
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:
        return f"{error.filename or place} cannot be used: {error.strerror}; choose a folder you can write to"
    return None
