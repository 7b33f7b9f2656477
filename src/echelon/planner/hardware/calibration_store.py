"""What `echelon plan --calibrate` measured on this machine: its rates and links, kept for later plans.

A calibration belongs to a machine, its device and the versions that were measured: `find_calibration` finds no other.
"""

import hashlib
import json
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from echelon.ground.cores import num_cores, read_system_file
from echelon.ground.stored import read_as, write_json
from echelon.planner.hardware.links import Link, Links, usual_links

CPU = "cpu"
_FORMAT = "3"  # of the file
_GPUS = Path("/proc/driver/nvidia/gpus")
_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class Calibration:
    """The measured speed of one device of this machine. On a CPU a device is one core, while the others work, too.

    Attributes:
        machine: `describe_machine()` when it was measured.
        date: of the measurement, as YYYY-MM-DD.
        device: "cpu", or the GPU's name as the driver reports it.
        num_devices: GPUs, or cores of the CPU.
        product_flops: FLOP/s of large matrix products, by dtype.
        small_dim: a product in which one dim is half of this size takes twice as long per FLOP.
        attention_flops: FLOP/s of the forward pass of causal attention in the training dtype; masked scores do not
            count.
        attention_backward: the speed of its backward pass, as a share of that.
        stream_bandwidth: bytes/s that a copy of large tensors reads and writes.
        pointwise_bandwidth: bytes/s that the operations of a layer outside its products read and write.
        logit_seconds: of the loss, forward and backward, per logit.
        launch_seconds: in which the host runs one layer of hardly any size, forward and backward.
        latency: seconds of an all-gather without a payload between two devices, beside work; an all-reduce has two.
        bandwidth: bytes/s that each device sends in an all-reduce of a large tensor; 0 with a single device.
        gather_bandwidth, scatter_bandwidth: likewise, of the all-gather and the reduce-scatter of a sharded layer, with
            the copies to and from its parameters.
        wrapper_seconds, hook_seconds, dispatch_seconds: that a layer of hardly any size takes longer, forward and
            backward, with `fully_shard` over one rank, if it is sharded over several, and if it is divided into
            distributed tensors; without the collectives.
        jitter: jitter * sqrt(s) is the standard deviation of the time of a process that computes for s seconds.
    """

    machine: dict[str, str]
    date: str
    device: str
    num_devices: int
    product_flops: dict[str, float]
    small_dim: float
    attention_flops: float
    attention_backward: float
    stream_bandwidth: float
    pointwise_bandwidth: float
    logit_seconds: float
    launch_seconds: float
    latency: float
    bandwidth: float
    gather_bandwidth: float = 0.0
    scatter_bandwidth: float = 0.0
    wrapper_seconds: float = 0.0
    hook_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    jitter: float = 0.0

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are cores, which processes share."""
        return self.device == CPU

    def cores_of(self, num_processes: int) -> float:
        """The cores of each process of a CPU: one for each of its threads, or its share of a core."""
        if num_processes > self.num_devices:
            return self.num_devices / num_processes
        return float(self.num_devices // num_processes)

    def links(self, num_processes: int) -> Links:
        """The measured link inside the machine. What processes of a CPU send, its cores copy, which they share."""
        usual = usual_links(self.device)
        if not self.bandwidth:
            return usual
        share = min(1.0, self.cores_of(num_processes)) if self.is_cpu else 1.0
        source = f"measured by echelon plan --calibrate on {self.date}"
        inside = Link(
            "calibrated",
            self.bandwidth,
            3 * self.latency / share,  # a link's is that of the three rounds of eight devices
            source,
            gather=self.gather_bandwidth or None,
            scatter=self.scatter_bandwidth or None,
        )
        return Links(inside, usual.between)

    def describe_rates(self) -> Iterator[str]:
        """Lines for the user: what was measured."""
        what = "core, while all others work" if self.is_cpu else "GPU"
        yield f"calibrated: {self.num_devices} x {self.device}, for each {what}:"
        for dtype, rate in self.product_flops.items():
            yield f"  matrix products in {dtype:<12} {rate / 1e9:12,.1f} GFLOP/s"
        yield f"  {'attention':<31} {self.attention_flops / 1e9:12,.1f} GFLOP/s"
        yield f"  {'copies of large tensors':<31} {self.stream_bandwidth / 1e9:12,.1f} GB/s"
        yield f"  {'pointwise operations of a layer':<31} {self.pointwise_bandwidth / 1e9:12,.1f} GB/s"
        yield f"  {'launching a layer':<31} {self.launch_seconds * 1e3:12.2f} ms"
        if self.bandwidth:
            yield f"  {'all-reduce':<31} {self.bandwidth / 1e9:12,.2f} GB/s, {self.latency * 1e6:.0f} us"
            yield f"  {'gathering sharded layers':<31} {self.gather_bandwidth / 1e9:12,.2f} GB/s"
            yield f"  {'reducing their gradients':<31} {self.scatter_bandwidth / 1e9:12,.2f} GB/s"
            yield f"  {'hooks of fully_shard on one rank':<31} {self.wrapper_seconds * 1e3:11.2f} ms"
            yield f"  {'hooks of a sharded layer':<31} {self.hook_seconds * 1e3:12.2f} ms"
            yield f"  {'dispatch of a divided layer':<31} {self.dispatch_seconds * 1e3:12.2f} ms"
            if self.jitter:
                yield f"  {'irregularity of 1 s of work':<31} {self.jitter * 1e3:12.2f} ms"

    def describe(self) -> str:
        """One line for the user, about a plan that uses it."""
        return f"rates: measured on this machine on {self.date} by echelon plan --calibrate"


def describe_machine() -> dict[str, str]:
    """This machine and the versions that its speed depends on, without importing torch."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_system_file("/proc/cpuinfo"), re.MULTILINE)
    gpus = sorted(_read_gpu(path) for path in _GPUS.iterdir()) if _GPUS.is_dir() else []
    return {
        "host": platform.node(),
        "processor": match[1] if match else platform.machine(),
        "cores": str(num_cores()),
        "gpus": ", ".join(gpus),
        "python": platform.python_version(),
        **{name: _find_version(name) for name in _PACKAGES},
    }


def _read_gpu(folder: Path) -> str:
    match = re.search(r"^Model:\s*(.+)$", read_system_file(str(folder / "information")), re.MULTILINE)
    return match[1].strip() if match else folder.name


def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def calibration_path(cache_dir: Path) -> Path:
    """The file of this machine's calibration."""
    key = json.dumps({**describe_machine(), "format": _FORMAT}, sort_keys=True)
    return cache_dir / "calibrations" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def store_calibration(cache_dir: Path, calibration: Calibration) -> Path:
    """Keep it for later plans; returns its file. Raises OSError if the folder cannot be written."""
    path = calibration_path(cache_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(calibration))
    return path


def find_calibration(cache_dir: Path) -> Calibration | None:
    """That of this machine as it is now; None if there is none, or if its file cannot be read."""
    try:
        calibration = read_as(calibration_path(cache_dir), Calibration)
    except (OSError, ValueError):
        return None
    return calibration if calibration.machine == describe_machine() else None
