"""Imports of packages that would download or log something, or take long."""

import functools
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@functools.cache
def import_bitsandbytes() -> None:
    """Import bitsandbytes, if installed, without the kernels that it would download from the hub at import.

    Must be called before PEFT is imported, which imports bitsandbytes too.
    """
    if find_spec("bitsandbytes") is None:
        return
    absent = object()
    kernels = sys.modules.get("kernels", absent)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, logger.level = logger.level, logging.ERROR
    try:
        import bitsandbytes  # noqa: F401
    finally:
        logger.level = level
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
