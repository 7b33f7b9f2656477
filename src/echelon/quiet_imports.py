"""Imports of packages that would download or log something as they are imported."""

import functools
import logging
import sys
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
