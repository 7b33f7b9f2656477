"""The CPU cores that this process may use."""

import os
from pathlib import Path


def num_cores() -> int:
    """The number of CPU cores this process may use: its affinity, limited by the container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota, _, period = read_system_file("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def read_system_file(path: str) -> str:
    """The text of a system file, such as one below /sys; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
