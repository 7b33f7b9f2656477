"""GPUs whose driver reports a fault. NVML's library is the border: a module with its calls answers for a driver."""

import sys
import time
import types

import pytest

from echelon.ground.variables import SYSTEM_VARIABLE
from echelon.planner.hardware.health import GpuHealth, read_gpu_health

NEVER = object()


class NvmlError(Exception):
    """NVML's error."""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Install a driver with these GPUs: what each answers beyond a healthy one, by call."""
    monkeypatch.setenv(SYSTEM_VARIABLE, str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*gpus, links=18):
        healthy = {
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetRetiredPagesPendingStatus": NEVER,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 1,  # it is idle
        }
        nvml = types.ModuleType("pynvml")
        nvml.NVMLError = NvmlError
        nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
        nvml.nvmlDeviceGetCount = lambda: len(gpus)
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC = 1, 0
        nvml.nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
        nvml.nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
        nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
        nvml.NVML_NVLINK_MAX_LINKS, nvml.NVML_FEATURE_ENABLED = 18, 1

        def ask(name, index):
            found = gpus[index].get(name, healthy.get(name))
            if found is NEVER:
                raise NvmlError("Not Supported")
            return found

        def find(index):
            if gpus[index].get("lost"):
                raise NvmlError("GPU is lost")
            return index

        nvml.nvmlDeviceGetHandleByIndex = find
        nvml.nvmlDeviceGetPciInfo = lambda index: types.SimpleNamespace(busId=f"00000000:{index + 0x3A:02X}:00.0")
        nvml.nvmlDeviceGetNvLinkState = lambda index, link: int(link < gpus[index].get("links", links))
        for name in healthy:
            setattr(nvml, name, lambda index, *_, name=name: ask(name, index))
        monkeypatch.setitem(sys.modules, "pynvml", nvml)

    return install


def test_healthy_gpus_have_no_problem(driver):
    driver({}, {})
    assert read_gpu_health() == GpuHealth()


def test_a_machine_without_a_driver_has_no_problem(driver):
    driver({})

    def fail():
        raise NvmlError("Driver Not Loaded")

    sys.modules["pynvml"].nvmlInit = fail
    assert read_gpu_health() == GpuHealth()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"nvmlDeviceGetTotalEccErrors": 3}, "GPU 1 has 3 uncorrectable memory (ECC) errors"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, "GPU 1 has to be reset to remap a row"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 0, 1)}, "GPU 1 could not remap a row"),
        ({"nvmlDeviceGetRetiredPagesPendingStatus": 1}, "GPU 1 has to be reset to retire pages"),
        ({"lost": True}, "GPU 1 does not answer its driver (GPU is lost)"),
    ],
)
def test_a_fault_is_named_with_its_gpu_and_the_fix(driver, answers, words):
    driver({}, answers)
    [fault] = read_gpu_health().faults
    assert fault.startswith(words) and "--gpu-reset" in fault


@pytest.mark.parametrize(("reasons", "words"), [(0x40, "too hot"), (0x21, "too hot"), (0x80, "lacks power")])
def test_a_lowered_clock_is_a_slowdown(driver, reasons, words):
    driver({"nvmlDeviceGetCurrentClocksThrottleReasons": reasons})
    found = read_gpu_health()
    assert not found.faults and words in found.slowdowns[0]


def test_fewer_links_than_another_gpu_are_a_slowdown(driver):
    """Cards that are bridged in pairs have more than a third one in the machine."""
    driver({}, {"links": 17})
    found = read_gpu_health()
    assert not found.faults
    assert found.slowdowns[0].startswith("GPU 1 has 17 active NVLinks, and another GPU of the machine 18; unless it is")


def test_gpus_that_this_process_may_not_use_are_not_asked(driver, monkeypatch):
    driver({"lost": True}, {})
    for chosen in ("1", "", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert read_gpu_health() == GpuHealth()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    assert len(read_gpu_health().faults) == 1


def test_serious_and_recent_errors_of_the_kernels_log_are_found(driver, tmp_path):
    """An Xid of a program, one of another machine's GPU, one of long ago, and one twice."""
    driver({}, {})
    now = int(time.monotonic() * 1e6)
    lines = [
        (now, "PCI:0000:3a:00", 13, "Graphics Exception"),
        (now, "PCI:0000:77:00", 79, "GPU has fallen off the bus."),
        (now - 7200 * 10**6, "PCI:0000:3a:00", 48, "DBE"),
        (now - 60 * 10**6, "PCI:0000:3b:00", 79, "GPU has fallen off the bus."),
        (now, "PCI:0000:3b:00", 79, "GPU has fallen off the bus."),
    ]
    log = tmp_path / "dev" / "kmsg"
    log.parent.mkdir()
    log.write_text("".join(f"4,{n},{us},-;NVRM: Xid ({bus}): {x}, {s}\n" for n, (us, bus, x, s) in enumerate(lines)))
    [fault] = read_gpu_health().faults
    assert fault.startswith("GPU 1 had Xid 79, it has fallen off the bus; ")
