"""The time that a GPU (on a CPU: the operations of torch) spends in each kernel, by torch's profiler."""

import re

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from measuring import synchronize

# The first pattern found in a kernel's name decides. Names of cuBLAS, CUTLASS, cuDNN, FlashAttention, Triton and torch.
KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    "communication": r"nccl",
    "matrix products": r"triton_tem|gemm|nvjet|cutlass|cublas|xmma|(^|:)(mm|bmm|addmm|linear)$|mkldnn|gemv",
    "fused (Triton)": r"^triton",
    "optimizer, clipping": r"multi_tensor|adam|foreach|norm_kernel|vector_norm|lpnorm",
    "copies, fills": r"memcpy|memset|copy|fill|catarray",
}


def find_kind(name):
    """The kind of work of a kernel, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), "other")


class Kernels:
    """A profile of a block of steps."""

    def __init__(self):
        self._on_gpu = torch.cuda.is_available()
        self._profiler = profile(activities=[ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU])

    def start(self):
        """Start recording."""
        synchronize()
        self._profiler.start()

    def stop(self):
        """Stop recording; return [[name, seconds, calls], ...], the longest first."""
        synchronize()
        self._profiler.stop()
        found = []
        for event in self._profiler.key_averages():
            is_kernel = event.device_type == DeviceType.CUDA if self._on_gpu else True
            microseconds = event.self_device_time_total if self._on_gpu else event.self_cpu_time_total
            if is_kernel and microseconds > 0:
                found.append([event.key, microseconds / 1e6, event.count])
        return sorted(found, key=lambda each: -each[1])


def render_kernels(kernels, num_steps, limit=12):
    """Two Markdown tables: the share of each kind of work, and the kernels that take longest."""
    whole = sum(seconds for _, seconds, _ in kernels) or 1.0
    kinds = {}
    for name, seconds, _ in kernels:
        kinds[find_kind(name)] = kinds.get(find_kind(name), 0.0) + seconds
    lines = ["| kind of work | ms a step | share |", "|---|---|---|"]
    for kind, seconds in sorted(kinds.items(), key=lambda each: -each[1]):
        lines.append(f"| {kind} | {1e3 * seconds / num_steps:.2f} | {seconds / whole:.1%} |")
    lines += ["", "| kernel | kind | calls a step | ms a step | share |", "|---|---|---|---|---|"]
    for name, seconds, calls in kernels[:limit]:
        short = name.replace("|", "/")[:70]
        lines.append(
            f"| `{short}` | {find_kind(name)} | {calls / num_steps:.1f} | {1e3 * seconds / num_steps:.2f} "
            f"| {seconds / whole:.1%} |"
        )
    return "\n".join(lines)
