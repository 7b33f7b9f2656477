import time
from types import SimpleNamespace

import pytest
import torch

from echelon.ground.errors import PlanError
from echelon.planner.hardware import detection
from echelon.planner.hardware.accelerators import ACCELERATORS, Cluster, find_accelerator, parse_devices


def test_published_constants():
    # dense peak rates: H100 989 TFLOP/s and 3350 GB/s, A100 312, T4 has no bf16
    assert ACCELERATORS["H100"].bf16_flops == 989e12
    assert ACCELERATORS["H100"].memory_bandwidth == 3350e9
    assert ACCELERATORS["A100-40"].memory_bytes == 40 * 10**9
    assert ACCELERATORS["A100-80"].peak_flops("bfloat16") == 312e12
    assert ACCELERATORS["A100-80"].peak_flops("float32") == 19.5e12
    assert ACCELERATORS["T4"].bf16_flops is None and ACCELERATORS["V100"].peak_flops("bfloat16") is None
    # 36 and 1 PFLOP/s sparse of 8 and 1 GPUs; sheets of the HGX B300 and the RTX PRO 6000 Server Edition
    assert ACCELERATORS["B300"].bf16_flops == 36e15 / 2 / 8
    assert ACCELERATORS["RTXPRO6000"].bf16_flops == 1e15 / 2
    assert all(accelerator.source for accelerator in ACCELERATORS.values())


@pytest.mark.parametrize(
    ("text", "name", "devices", "nodes"),
    [
        ("64xH100", "H100", 64, 8),
        ("1xa100-40", "A100-40", 1, 1),
        (" 4 x RTX 4090 ", "RTX4090", 4, 1),
        ("8xGB200", "GB200", 8, 1),
        ("16xcpu", "cpu", 16, 1),
    ],
)
def test_parse_devices(text, name, devices, nodes):
    cluster = parse_devices(text)
    assert (cluster.accelerator.name, cluster.num_devices, cluster.num_nodes) == (name, devices, nodes)
    assert cluster.kind == ("cpu" if name == "cpu" else "cuda")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xH1000", ["H1000", "did you mean H100", "RTX4090"]),
        ("8xA100", ["did you mean A100-", "A100-80"]),
        ("H100", ["COUNTxNAME", "8xH100"]),
        ("0xH100", ["at least one"]),
        ("12xH100", ["12 devices", "8 or 16"]),
    ],
)
def test_parse_devices_refuses(text, words):
    with pytest.raises(PlanError) as caught:
        parse_devices(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_bf16_support_comes_from_the_hardware_or_else_the_table():
    assert parse_devices("1xL4").has_bf16
    assert not parse_devices("1xV100").has_bf16
    assert not parse_devices("2xcpu").has_bf16
    assert Cluster(ACCELERATORS["cpu"], 2, 2, "cpu", bf16_supported=True).has_bf16


@pytest.mark.parametrize(
    ("device_name", "memory_gib", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80"),
        ("NVIDIA H100 80GB HBM3", 79.2, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32"),
        ("Tesla T4", 14.6, "T4"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA H100 PCIe", 79.2, None),
        ("NVIDIA B300", 268.6, "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, "RTXPRO6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6, None),
        ("NVIDIA Quadro P400", 2, None),
    ],
)
def test_find_accelerator_by_the_name_of_the_driver(device_name, memory_gib, name):
    found = find_accelerator(device_name, int(memory_gib * 2**30))
    assert (found and found.name) == name


def see_gpu(monkeypatch, name):
    """Make torch report one GPU of this name. This process must not compute on it."""

    def refuse(dtype_name):
        raise AssertionError("the parent of the workers has used the GPU")

    properties = SimpleNamespace(name=name, total_memory=10**11, major=9, minor=0)
    for key, value in {
        "is_available": True,
        "device_count": 1,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
    }.items():
        monkeypatch.setattr(f"torch.cuda.{key}", lambda *args, value=value, **kwargs: value)
    monkeypatch.setattr(detection, "measure_matmul_flops", refuse)


@pytest.mark.slow
def test_an_unknown_gpu_is_measured_in_another_process(monkeypatch):
    """There is none on this machine, so the other process measures the CPU."""
    see_gpu(monkeypatch, "NVIDIA Z9000")
    accelerator = detection.detect_cluster(1).accelerator
    assert (accelerator.name, accelerator.memory_bytes) == ("NVIDIA Z9000", 10**11)
    assert accelerator.bf16_flops > 1e8 and accelerator.fp32_flops > 1e8


def test_a_gpu_that_cannot_be_measured_has_no_rates(monkeypatch, caplog):
    see_gpu(monkeypatch, "NVIDIA Z9000")
    monkeypatch.setattr(detection.sys, "executable", "false")
    accelerator = detection.detect_cluster(1).accelerator
    assert accelerator.bf16_flops is None and accelerator.fp32_flops is None
    assert "the speed of the GPU could not be measured" in caplog.text


def test_a_cpu_that_emulates_a_type_is_measured_with_small_matmuls_once(monkeypatch):
    """A large matmul in fp16 takes 5 s on one core of such a CPU, and each process of a run measures."""
    slow, sizes, multiply = torch.float16, [], torch.mm

    def emulated(left, right):
        is_first = (left.dtype, len(left)) not in sizes  # as if another program ran in between
        sizes.append((left.dtype, len(left)))
        time.sleep(0.02 if left.dtype == slow or is_first else 0)
        return multiply(left, right)

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(torch, "mm", emulated)
    detection.measure_matmul_flops.cache_clear()
    rates = {name: detection.measure_matmul_flops(name) for name in ("float16", "float32")}
    assert 0 < rates["float16"] <= 2 * 256**3 / 0.02
    assert {size for dtype, size in sizes if dtype == slow} == {256}
    assert {size for dtype, size in sizes if dtype != slow} == {256, 1024}
    count = len(sizes)
    assert rates == {name: detection.measure_matmul_flops(name) for name in rates} and len(sizes) == count
    detection.measure_matmul_flops.cache_clear()
