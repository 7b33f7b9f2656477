"""Imports of packages that would download or log something as they are imported, or take long."""

import functools
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Let loggers pass errors only."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.level = logging.ERROR
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.level = level


def import_float8() -> None:
    """Import torchao's float8 without its warnings, about kernels of other devices and about torch itself."""
    with _quiet("torchao", "torch.utils._pytree"):
        import torchao.float8  # noqa: F401


@functools.cache
def import_peft_backends() -> None:
    """Import bitsandbytes and torchao, if installed. Must be called before PEFT is imported, which imports both.

    bitsandbytes is imported without the kernels that it would download from the hub at import.
    """
    if find_spec("torchao") is not None:
        import_float8()
    if find_spec("bitsandbytes") is None:
        return
    absent = object()
    kernels = sys.modules.get("kernels", absent)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        with _quiet("bitsandbytes.backends.cpu.ops"):
            import bitsandbytes  # noqa: F401
    finally:
        del sys.modules["kernels"]
        if kernels is not absent:
            sys.modules["kernels"] = kernels  # type: ignore[assignment]


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect no garbage during the block, for the import of large packages.

    Nearly all objects that an import makes are there to stay. Looking through them again and again for garbage takes a
    quarter of the time that torch and transformers need.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
