"""What a process does with memory that it frees, counted by the kernel."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="concerns glibc's malloc"
)

LARGE = """
import resource, torch
from echelon.hardware import heap
getattr(heap, {name!r})()
for _ in range(20):
    torch.ones(2**24)  # 64 MiB, larger than glibc ever keeps by itself
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

LAYERS = """
import re, torch
from echelon.hardware import heap
getattr(heap, {name!r})()
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


def measure(program, name):
    code = program.format(name=name)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_kept_memory_is_used_again_without_page_faults():
    assert measure(LARGE, "keep_freed_memory") < 5 * 2**14 / 100
    assert measure(LARGE, "return_freed_memory") > 5 * 2**14 / 100  # 2**14 pages of 4 KiB; fewer if pages are huge


def test_returned_memory_is_free_for_others():
    assert measure(LAYERS, "return_freed_memory") < 16 * 1024
    assert measure(LAYERS, "keep_freed_memory") > 128 * 1024
