"""Whether a job sees the GPUs that it asked for: what torch sees, the NVIDIA driver, and the fix if they do not agree.

Compatibility libraries: https://docs.nvidia.com/deploy/cuda-compatibility/. Oldest drivers: release notes of CUDA.
"""

import importlib.util
import platform
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.ground.cores import read_system_file
from echelon.ground.errors import ConfigError, first_line
from echelon.ground.variables import AskedGpus, find_asked_gpus, find_system_root, read_environment

_OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""For each major version of CUDA, the oldest driver with which its libraries work."""

_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_COMPAT_FOLDERS = ("usr/local/cuda/compat", "usr/local/cuda/compat/lib.real")
_HIDING = ("", "-1", "none", "void", "nodevfiles")


@dataclass(frozen=True)
class Compat:
    """Compatibility libraries to be put first on LD_LIBRARY_PATH, and the line that says why."""

    folder: str
    line: str


def find_needed(num_processes: int | None = None) -> AskedGpus | None:
    """The GPUs that this process's job needs on this machine; None if it asked for none.

    `num_processes`: processes on this machine, if their number is given; they need no more GPUs than that.
    """
    asked = find_asked_gpus()
    if asked is None:
        return None
    if asked.count is None:  # whatever this machine has
        installed = count_installed()
        by = f"{asked.by}, and this machine has {installed} NVIDIA GPU{'s' if installed > 1 else ''}"
        return AskedGpus(1, by) if installed else None
    return asked if num_processes is None else AskedGpus(min(asked.count, num_processes), asked.by)


def check_gpus(needed: AskedGpus | None, allow_cpu: bool) -> str | None:
    """Raise ConfigError if this process sees fewer GPUs than `find_needed` returned.

    Returns a line for the user if it sees none and `train.allow_cpu` allows it.
    """
    if needed is None or needed.count is None or (fault := explain_missing(needed.count)) is None:
        return None
    whose = f"{needed.by}: {_number(needed.count)} asked for on {platform.node()}, but {fault}"
    if count_visible():
        raise ConfigError(f"{whose}.")
    if allow_cpu:
        return f"train.allow_cpu=true: training on the CPU; {whose}"
    raise ConfigError(f"{whose}. To train on the CPU all the same, set train.allow_cpu=true.")


def check_image_devices(key: str, image: str, machine: str, num_gpus: int, allow_cpu: bool) -> None:
    """Raise ConfigError if an image is by its name for machines without GPUs and `machine` has some, or the reverse.

    `key`: the recipe key of the image. Names that say nothing are checked where the job runs.
    """
    name = image.rpartition("/")[2]
    is_for_cpus = re.search(r"[-_:.]cpu\b", name) is not None
    is_for_gpus = re.search(r"[-_:.](cu(da)?\d+|gpu\b)", name) is not None
    if is_for_cpus == is_for_gpus or is_for_gpus == (num_gpus > 0) or allow_cpu:
        return
    has = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}" if num_gpus else "no GPU"
    raise ConfigError(
        f"{key}={image} is an image for {'CPUs' if is_for_cpus else 'GPUs'} by its name, but {machine} has {has}; use "
        "another image or machine, or set train.allow_cpu=true to train on the CPU."
    )


def explain_missing(needed: int) -> str | None:
    """Why torch sees fewer than `needed` GPUs here, with the versions and the fix; None if it sees them."""
    import torch

    if (visible := count_visible()) >= needed:
        return None
    driver = read_driver()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    if hip := getattr(torch.version, "hip", None):
        build = f"ROCm {hip}"
    seen = f"torch sees {visible or 'none'}"
    state = "no NVIDIA driver was found" if driver is None else f"the NVIDIA driver is {driver}"
    cause = _explain_some_missing() if visible else _explain_none(driver)
    return f"{seen}; {state}, and torch {torch.__version__} is built for {build}. {cause}"


def count_expected(needed: AskedGpus | None) -> int:
    """The GPUs that torch should see: those of `find_needed`, else at least one if this machine has any."""
    if needed is not None and needed.count is not None:
        return needed.count
    return int(count_installed() > 0 or read_driver() is not None)


def count_visible() -> int:
    """The number of GPUs that torch can use in this process."""
    import torch

    with warnings.catch_warnings():  # the reason is part of the message
        warnings.simplefilter("ignore")
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def count_installed() -> int:
    """The number of NVIDIA GPUs on this machine's PCI bus, whether or not they can be used."""
    devices = (find_system_root() / "sys/bus/pci/devices").glob("*")
    return sum(
        read_system_file(str(device / "vendor")).strip() == _NVIDIA
        and read_system_file(str(device / "class")).startswith(_DISPLAYS)
        for device in devices
    )


def read_driver() -> str | None:
    """The version of the NVIDIA driver of this machine's kernel; None if it is not loaded."""
    match = _MODULE.search(read_system_file(str(find_system_root() / "proc/driver/nvidia/version")))
    return match[1] if match else None


def find_compat(env: Mapping[str, str]) -> Compat | None:
    """The compatibility libraries that this image has and torch needs here; None if they are first on the path already.

    They let CUDA run with the older driver of a machine with data-centre GPUs, and have to be found before libcuda is
    loaded. Does not import torch.
    """
    if (driver := read_driver()) is None or (cuda := _read_cuda_build()) is None:
        return None
    oldest = _OLDEST_DRIVERS.get(_numbers(cuda)[0])
    if oldest is None or _numbers(driver) >= _numbers(oldest):
        return None
    for name in _COMPAT_FOLDERS:
        folder = find_system_root() / name
        versions = [_numbers(path.name.removeprefix("libcuda.so.")) for path in folder.glob("libcuda.so.*.*")]
        if versions and max(versions) > _numbers(driver):
            if env.get("LD_LIBRARY_PATH", "").split(":")[0] == str(folder):
                return None
            needs = f"NVIDIA driver {driver} is older than CUDA {cuda} needs ({oldest})"
            return Compat(str(folder), f"{needs}: using the compatibility libraries in {folder}")
    return None


def _explain_none(driver: str | None) -> str:
    """Why torch sees no GPU, and the fix."""
    import torch

    cuda = torch.version.cuda
    if cuda is None and not getattr(torch.version, "hip", None):
        return "Install a torch that is built for CUDA, or use an image that has one"
    if cuda is None:
        return f"torch says: {_ask_torch()}; check the driver of this machine's GPUs"
    if driver is None:
        return (
            "Check with nvidia-smi that this machine has a GPU and a working driver, and use another machine if not; a "
            "container shows the driver of its machine"
        )
    if (oldest := _OLDEST_DRIVERS.get(_numbers(cuda)[0])) and _numbers(driver) < _numbers(oldest):
        usable = [major for major, least in _OLDEST_DRIVERS.items() if _numbers(driver) >= _numbers(least)]
        image = f", or a torch or image built for CUDA {max(usable)}" if usable else ""
        path = read_environment().get("LD_LIBRARY_PATH", "")
        tried = "; the compatibility libraries of this image do not help here" if "/cuda/compat" in path else ""
        return f"CUDA {cuda} needs driver {oldest} or later: use machines with a newer driver{image}{tried}"
    if not _has_driver_library():
        return (
            "libcuda.so.1 is not in this container: its runtime must pass the GPUs on (Kubernetes: NVIDIA's device "
            "plugin and runtimeClassName; Docker: --gpus all; Apptainer: --nv; pyxis: NVIDIA_VISIBLE_DEVICES)"
        )
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if (value := read_environment().get(name)) is not None and value.lower() in _HIDING:
            return f"{name}={value!r} hides every GPU: remove the variable"
    return f"torch says: {_ask_torch()}; check with nvidia-smi, restart the machine or use another one"


def _explain_some_missing() -> str:
    value = read_environment().get("CUDA_VISIBLE_DEVICES")
    fewer = "ask for fewer, with as many processes (launch.nproc_per_node)"
    if value is not None:
        return f"CUDA_VISIBLE_DEVICES={value} may hide the others: remove the variable, or {fewer}"
    return f"Check with nvidia-smi whether the others have failed; use another machine, or {fewer}"


def _ask_torch() -> str:
    """The reason that torch gives for not using a GPU."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return first_line(error).rstrip(".")
    return "no reason"


def _has_driver_library() -> bool:
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _read_cuda_build() -> str | None:
    """The CUDA version that the installed torch is built for, without importing it; None for any other build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    match = re.search(r"^cuda\b.*= *'([\d.]+)'", read_system_file(str(Path(spec.origin).with_name("version.py"))), re.M)
    return match[1] if match else None


def _number(count: int) -> str:
    return "1 GPU was" if count == 1 else f"{count} GPUs were"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
