"""Accelerators and clusters: the figures used by the planner, each with its source.

FLOP/s are dense peaks (no sparsity); memory is in the datasheet's decimal gigabytes. For the larger devices this is
slightly less than the driver reports, so a plan made on a laptop is conservative; a run uses the driver's figure.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from echelon.ground.errors import PlanError
from echelon.planner.hardware.calibration_store import Calibration
from echelon.planner.hardware.links import Links, parse_links, usual_links
from echelon.recipe.yaml_text import read_table

DeviceKind = Literal["cpu", "cuda"]

# A CPU has fast bf16 if its matmuls are this much faster than in fp32. CPUs with bf16 instructions (AMX, AVX-512 bf16)
# are at least three times as fast; those without are slower than in fp32.
CPU_BF16_MARGIN = 1.5


@dataclass(frozen=True)
class Accelerator:
    """One device. FLOP/s and bytes/s are per device; None if unknown or not applicable."""

    name: str
    memory_bytes: int | None
    bf16_flops: float | None
    fp32_flops: float | None
    memory_bandwidth: float | None
    source: str

    def peak_flops(self, compute_dtype: str) -> float | None:
        """Dense peak in FLOP/s for a dtype name, the denominator of MFU. fp16 has the rate of bf16."""
        return self.fp32_flops if compute_dtype == "float32" else self.bf16_flops


def _gpu(
    name: str, gigabytes: float, bf16_tflops: float | None, fp32_tflops: float, gigabytes_per_s: float, source: str
) -> Accelerator:
    bf16_flops = None if bf16_tflops is None else bf16_tflops * 1e12
    return Accelerator(name, int(gigabytes * 1e9), bf16_flops, fp32_tflops * 1e12, gigabytes_per_s * 1e9, source)


ACCELERATORS: dict[str, Accelerator] = {
    **{name: _gpu(name, *row) for name, row in read_table(Path(__file__).with_name("accelerators.yaml")).items()},
    "cpu": Accelerator(
        "cpu", None, None, None, None, "memory and the rate of matrix products are measured when a run starts"
    ),
}

# Those with float8 tensor cores: compute capability 8.9 and later.
_FLOAT8 = {"H100", "H200", "B200", "B300", "GB200", "L4", "L40S", "RTXPRO6000", "RTX4090"}


@dataclass(frozen=True)
class Cluster:
    """Equal devices on equal machines; one process drives one device.

    `memory_bytes` of a CPU cluster's accelerator is one process's share of its machine (None: unknown).
    `bf16_supported` is as reported by the running hardware; None: as in the table, or as measured.
    `host_memory_bytes` is the main memory of one machine, without that of its GPUs (None: unknown).
    `float8_supported`: likewise; None: as in the table.
    `can_compile`: whether the machines have what `torch.compile` needs on a CPU.
    `links`: None: the usual ones of the device.
    `calibration`: what was measured on this machine; None: nothing.
    """

    accelerator: Accelerator
    num_devices: int
    devices_per_node: int
    kind: DeviceKind
    bf16_supported: bool | None = None
    host_memory_bytes: int | None = None
    can_compile: bool = True
    float8_supported: bool | None = None
    links: Links | None = None
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        """Raises PlanError unless the devices fill whole machines."""
        if self.num_devices < 1 or self.devices_per_node < 1:
            raise PlanError(
                f"a cluster of {self.num_devices} devices with {self.devices_per_node} per machine is empty; "
                "give at least one of each."
            )
        if self.num_devices % self.devices_per_node:
            below = self.num_devices // self.devices_per_node * self.devices_per_node
            fits = " or ".join(str(n) for n in (below, below + self.devices_per_node) if n)
            raise PlanError(
                f"{self.num_devices} devices do not fill machines of {self.devices_per_node} each; use {fits} devices."
            )

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.num_devices // self.devices_per_node

    @property
    def known_links(self) -> Links:
        """The links given for this cluster, else the usual ones of its devices."""
        return usual_links(self.accelerator.name) if self.links is None else self.links

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 matrix products are fast here."""
        if self.bf16_supported is not None:
            return self.bf16_supported
        bf16_flops, fp32_flops = self.accelerator.bf16_flops, self.accelerator.fp32_flops
        if self.kind == "cpu" and bf16_flops is not None and fp32_flops is not None:
            return bf16_flops >= CPU_BF16_MARGIN * fp32_flops
        return bf16_flops is not None

    @property
    def has_float8(self) -> bool:
        """Whether the devices multiply matrices in float8."""
        return self.accelerator.name in _FLOAT8 if self.float8_supported is None else self.float8_supported


def parse_devices(text: str, devices_per_node: int = 8) -> Cluster:
    """Cluster for a text such as "8xH100", "2xcpu" or "64xH100@nvlink,efa" (COUNTxNAME; case and spaces do not matter).

    After @: the link inside a machine, and the one between machines, which may be a file from `echelon doctor --json`.

    Fewer devices than `devices_per_node` are one smaller machine; CPU processes are always on one machine.
    Raises PlanError naming the known accelerators.
    """
    devices, _, links = text.partition("@")
    match = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*([\w .-]+?)\s*", devices)
    if match is None:
        raise PlanError(f"devices={text!r} is not COUNTxNAME; write it like 8xH100 or 2xcpu.")
    count, name = int(match[1]), re.sub(r"[\s_]", "", match[2]).lower()
    by_key = {full_name.lower(): accelerator for full_name, accelerator in ACCELERATORS.items()}
    if name not in by_key:
        longer = [key for key in by_key if key.startswith(name)]
        close = [by_key[key].name for key in longer or difflib.get_close_matches(name, by_key, n=2)]
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise PlanError(f"devices={text!r}: {match[2]!r} is not known; {hint}Known: {', '.join(ACCELERATORS)}.")
    if count == 0:
        raise PlanError(f"devices={text!r}: at least one device is needed.")
    accelerator = by_key[name]
    if accelerator.name == "cpu":
        return Cluster(accelerator, count, count, "cpu")
    local = min(count, devices_per_node)
    parsed = parse_links(links, accelerator.name, local) if links else None
    return Cluster(accelerator, count, local, "cuda", links=parsed)


def find_accelerator(device_name: str, memory_bytes: int) -> Accelerator | None:
    """Table entry for a driver's device name ("NVIDIA A100-SXM4-40GB"), chosen by memory if a name has two sizes.

    None if the device is not in the table. PCIe and NVL variants of H100 are slower and not in the table.
    """
    # The Workstation and Max-Q editions of this name are different devices.
    words = re.sub(r"(?i)\bRTX\s+PRO\s+6000\s+Blackwell\s+Server\b", "RTXPRO6000", device_name)
    words = re.sub(r"(?i)\bRTX\s+", "RTX", words)
    if re.search(r"(?i)H100.*(PCIe|NVL)", words):
        return None
    candidates = [
        accelerator
        for accelerator in ACCELERATORS.values()
        if accelerator.memory_bytes is not None and re.search(rf"\b{accelerator.name.split('-')[0]}\b", words)
    ]
    return min(candidates, key=lambda known: abs((known.memory_bytes or 0) - memory_bytes), default=None)
