"""What glibc's malloc does with memory that this process frees; other C libraries keep their own ways.

The constants and their meaning are those of mallopt(3).
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_RETURNED_BYTES = 1024**2


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, and use it again.

    By default glibc maps each large tensor anew and unmaps it when it is freed, so that every step pays for the page
    faults of all its activations: 5 to 15 % of a training step in benchmarks/results/cpu-steps.md.
    """
    _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: -1})


def return_freed_memory() -> None:
    """Let this process return memory to the system as soon as it is freed, in pieces of a MiB or more.

    By default glibc raises the size from which it does so to 32 MiB. Layers that are gathered one after the other then
    leave holes behind that later ones do not fit, in the end as many bytes as the whole model.
    """
    _set({_MMAP_THRESHOLD: _RETURNED_BYTES})


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
