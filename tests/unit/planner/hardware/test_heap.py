"""What a process does with memory that it frees, counted by the kernel."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="concerns glibc's malloc"
)

# Page faults while tensors larger than glibc ever keeps by itself are allocated again.
LARGE = """
import resource
for _ in range(20):
    torch.ones(2**24)  # 64 MiB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

# Memory in KiB that stays after tensors are freed between small ones that are kept.
LAYERS = """
import re
def held(): return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
before, kept = held(), []
for _ in range(20):
    layer = torch.ones(2**21)  # 8 MiB, of which a small result stays
    kept.append(torch.ones(64))
    del layer
layers = [torch.ones(2**21) for _ in range(20)]
ends = [torch.ones(64) for _ in range(20)]
del layers
print(held() - before)
"""


@pytest.fixture(scope="module")
def measured():
    """By setting, what both programs print, one after the other in one process."""
    found = {}
    for name in ("keep_freed_memory", "return_freed_memory"):
        code = f"import torch\nfrom echelon.planner.hardware import heap\nheap.{name}()\n{LAYERS}{LARGE}"
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        found[name] = dict(zip(("kept", "faults"), map(int, out.split()), strict=True))
    return found


@pytest.mark.slow
def test_kept_memory_is_used_again_without_page_faults(measured):
    assert measured["keep_freed_memory"]["faults"] < 80
    assert measured["return_freed_memory"]["faults"] >= 5 * 2**5  # pages of 2 MiB at most


@pytest.mark.slow
def test_returned_memory_is_free_for_others(measured):
    assert measured["return_freed_memory"]["kept"] < 16 * 1024
    assert measured["keep_freed_memory"]["kept"] > 128 * 1024
