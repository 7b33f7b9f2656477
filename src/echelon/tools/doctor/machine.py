"""The checks of `echelon doctor` on this machine, before anything is trained on it."""

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from echelon.ground.cores import num_cores
from echelon.ground.errors import LaunchError
from echelon.ground.hosts import address_of
from echelon.ground.open_files import count_ranks, read_limits
from echelon.ground.sizes import render_bytes
from echelon.ground.variables import read_environment
from echelon.planner.hardware.detection import machine_memory_bytes
from echelon.planner.hardware.efa import explain_no_efa, find_plugin, is_efa_wanted
from echelon.planner.hardware.gpu_check import count_expected, count_visible, explain_missing, find_needed
from echelon.planner.hardware.health import free_memory_bytes, read_gpu_health
from echelon.run.folder.environment import find_version
from echelon.tools.doctor.link_probe import ProbeProcess, measure_here
from echelon.tools.doctor.verdict import Finding

REQUIRED = {"torch": ">=2.11,<2.14", "transformers": ">=5.17,<6"}
"""As in pyproject.toml, which cannot be queried in a checkout that is not installed."""

_PYTHON = (3, 11)
_GIBIBYTE = 2**30
# With less, even a small model cannot be loaded, saved, or fed by several processes.
_LEAST_MEMORY, _LEAST_DISK, _LEAST_SHARED = 2 * _GIBIBYTE, 5 * _GIBIBYTE, 256 * 2**20
# Enough for ranks on dozens of machines.
_LEAST_OPEN_FILES = 4096
_CLOCK_SECONDS = 2.0
# A correct clock is not before the time when this code was written.
_EARLIEST = 1_750_000_000.0


def examine_machine(folder: Path) -> Iterator[Finding]:
    """Yield one finding per check, in order of dependence. `folder`: where runs will be."""
    yield _judge_python()
    for package, required in REQUIRED.items():
        yield _judge_package(package, required)
    yield from judge_devices()
    yield _judge_memory()
    yield from _judge_shared_memory()
    yield _judge_open_files()
    yield _judge_disk(folder)
    yield _judge_clock(folder)
    yield _judge_interfaces()
    yield from _judge_efa()
    yield _judge_gloo()


def _judge_python() -> Finding:
    words = f"{platform.python_version()} at {sys.executable}"
    least = ".".join(map(str, _PYTHON))
    return Finding("python", words, "" if sys.version_info >= _PYTHON else f"use Python {least} or newer")


def _judge_package(package: str, required: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    if (version := find_version(package)) is None:
        return Finding(package, "not installed", f"pip install '{package}{required}'")
    is_right = SpecifierSet(required).contains(version, prereleases=True)
    return Finding(package, version, "" if is_right else f"pip install '{package}{required}'")


def judge_devices() -> Iterator[Finding]:
    """Yield a finding for each GPU, or one about what torch does not see."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing CUDA library is an OSError
        yield Finding("devices", f"torch cannot be imported: {error}", "install torch again")
        return
    asked = find_needed()
    expected = count_expected(asked)
    if (fault := explain_missing(expected)) is not None:
        whose = "this machine has" if asked is None else f"{asked.by}: this job asked for"
        yield Finding("devices", f"{whose} {expected} GPU{'s' if expected > 1 else ''}", fault)
    elif not count_visible():
        yield Finding("devices", f"{num_cores()} CPU cores")
    if not count_visible():
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        words = f"{torch.cuda.get_device_name(index)}, {render_bytes(free)} of {render_bytes(total)} free"
        taken = free < total / 2
        yield Finding("devices", words, "end the processes that use the GPU; `nvidia-smi` lists them" if taken else "")
    health = read_gpu_health()
    for problem in (*health.faults, *health.slowdowns):
        words, _, remedy = problem.partition("; ")
        yield Finding("devices", words, remedy)


def _judge_memory() -> Finding:
    total = machine_memory_bytes()
    free = min(total, free_memory_bytes())
    words = f"{render_bytes(free)} of {render_bytes(total)} free"
    return Finding("memory", words, "" if free >= _LEAST_MEMORY else "end other programs, or give the container more")


def _judge_shared_memory() -> Iterator[Finding]:
    if not (shm := Path("/dev/shm")).is_dir():
        return
    free = shutil.disk_usage(shm).free
    remedy = "give the container more: docker run --shm-size 8g, or launch.kubernetes.shared_memory"
    yield Finding("/dev/shm", f"{render_bytes(free)} free", "" if free >= _LEAST_SHARED else remedy)


def _judge_open_files() -> Finding:
    _, hard = read_limits()
    words = f"up to {hard:,} for a process, enough for a job of about {count_ranks(hard):,} ranks"
    remedy = "raise the hard limit, nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536:65536"
    return Finding("open files", words, "" if hard >= _LEAST_OPEN_FILES else remedy)


def _judge_disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    words = f"{render_bytes(free)} free at {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("disk", f"{folder} is not writable", "start in a folder you can write to")
    return Finding("disk", words, "" if free >= _LEAST_DISK else "free space, or start in a folder on another disk")


def _judge_clock(folder: Path) -> Finding:
    """Compare the clock with that of the folder's file system, which may be on a server."""
    now = time.time()
    if now < _EARLIEST:
        return Finding("clock", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)), "set it with NTP")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".echelon-doctor-") as file:
            offset = os.fstat(file.fileno()).st_mtime - now
    except OSError:
        return Finding("clock", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)))
    words = f"{abs(offset):.1f} s from the clock of the folder's file system"
    return Finding("clock", words, "" if abs(offset) < _CLOCK_SECONDS else "set both with NTP")


def _judge_interfaces() -> Finding:
    names = [name for _, name in socket.if_nameindex()]
    pairs = [f"{name} {address}" for name in names if (address := address_of(name))]
    # If the addresses cannot be queried, list at least the names.
    return Finding("interfaces", ", ".join(pairs or names) or "none", "" if names else "enable the loopback interface")


def _judge_efa() -> Iterator[Finding]:
    """Whether NCCL can use EFA, where this machine has it or the environment asks for it."""
    env = read_environment()
    if is_efa_wanted(env):
        fault = explain_no_efa(env)
        yield Finding("efa", f"NCCL's plugin is {find_plugin(env)}" if fault is None else "not usable", fault or "")


def _judge_gloo() -> Finding:
    command = [sys.executable, "-m", "echelon.tools.doctor.network"]
    try:
        speed = measure_here(lambda name: ProbeProcess(name, command))
    except LaunchError as error:
        return Finding(
            "gloo", f"two processes on this machine cannot run an all-reduce: {error}", "check that `lo` is up"
        )
    return Finding("gloo", f"two processes here: {speed.rate}, {speed.delay} for an all-reduce")
