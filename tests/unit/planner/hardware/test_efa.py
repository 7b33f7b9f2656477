"""NCCL's plugin for EFA, in images emulated by their files: found, hidden, missing, and what is said by whom."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.ground.variables import SYSTEM_VARIABLE, read_environment
from echelon.planner.hardware.efa import explain_no_efa, find_plugin
from echelon.tools.doctor.machine import examine_machine
from echelon.tools.doctor.verdict import Finding
from tests.unit.recipe_samples import DEMO

ASKED = {"FI_PROVIDER": "efa"}
AWS = "opt/amazon/ofi-nccl/lib64/libnccl-net-ofi.so"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with these files, with GPUs and EFA unless left out; returns its root."""

    def build(*files: str, efa: bool = True, devices: bool = True, gpus: bool = True) -> Path:
        root = tmp_path / "root"
        driver = root / "sys/bus/pci/drivers/efa"
        driver.mkdir(parents=True)
        (root / "dev/infiniband").mkdir(parents=True)
        if efa:
            card = root / "sys/class/infiniband/rdmap0/device"
            card.mkdir(parents=True)
            (card / "driver").symlink_to(driver)
        if devices:
            (root / "dev/infiniband/uverbs0").touch()
        if gpus:
            gpu = root / "sys/bus/pci/devices/0000:53:00.0"
            gpu.mkdir(parents=True)
            (gpu / "vendor").write_text("0x10de\n")
            (gpu / "class").write_text("0x030200\n")
        for file in files:
            name, _, text = file.partition("=")
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setenv(SYSTEM_VARIABLE, str(root))
        return root

    return build


def test_a_plugin_that_the_linker_finds(machine):
    root = machine(AWS, "usr/local/libs/libnccl-net.so", "etc/ld.so.conf.d/a.conf=/usr/local/libs\n")
    assert find_plugin({}) == root / "usr/local/libs/libnccl-net.so"
    assert find_plugin({"LD_LIBRARY_PATH": "/opt/venv/lib:/opt/amazon/ofi-nccl/lib64:"}) == root / AWS
    assert find_plugin({"NCCL_NET_PLUGIN": f"/{AWS}"}) == root / AWS
    assert explain_no_efa(ASKED) is None


@pytest.mark.parametrize("env", [ASKED, {}])
def test_a_missing_plugin_is_explained(machine, env):
    machine()
    assert explain_no_efa(env) == (
        "NCCL finds no plugin for EFA (libnccl-net.so, of aws-ofi-nccl), so NCCL sends over TCP between machines, "
        "which is many times slower; use an image that has it, such as AWS's deep learning container for EC2 "
        "(docs/kubernetes.md)"
    )


def test_a_plugin_outside_of_the_path_is_named(machine):
    root = machine(AWS)
    said = explain_no_efa({**ASKED, "LD_LIBRARY_PATH": "/opt/venv/lib"})
    assert said.endswith(f"; {root / AWS} is there: add {(root / AWS).parent} to LD_LIBRARY_PATH")


def test_a_missing_device_is_explained(machine):
    machine(AWS, efa=False, devices=False)
    assert re.match(r"FI_PROVIDER=efa asks for EFA, but this machine has no EFA device, so NCCL", explain_no_efa(ASKED))
    assert explain_no_efa({}) is None


def test_a_container_without_the_devices_is_explained(machine):
    machine("usr/lib64/libnccl-net.so", devices=False)
    assert "this container does not have its devices (/dev/infiniband)" in explain_no_efa({})


def test_nothing_is_said_where_efa_is_not_wanted(machine):
    machine(gpus=False)
    assert explain_no_efa({}) is None  # gloo sends between CPUs
    assert explain_no_efa({**ASKED, "NCCL_NET": "Socket"}) is None
    assert explain_no_efa({**ASKED, "NCCL_NET_PLUGIN": "none"}) is None


def test_the_doctor_judges_it(machine, tmp_path, monkeypatch):
    for name in ("_judge_gloo", "judge_devices"):  # slow, and about other things
        monkeypatch.setattr(f"echelon.tools.doctor.machine.{name}", lambda: ())
    monkeypatch.setenv("FI_PROVIDER", "efa")
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    root = machine()

    def judge() -> list[tuple[str, bool]]:
        found = [each for each in examine_machine(tmp_path) if isinstance(each, Finding)]
        return [(each.words, each.is_well) for each in found if each.subject == "efa"]

    assert judge() == [("not usable", False)]
    (root / "usr/lib64").mkdir(parents=True)
    (root / "usr/lib64/libnccl-net.so").touch()
    assert judge() == [(f"NCCL's plugin is {root / 'usr/lib64/libnccl-net.so'}", True)]
    monkeypatch.setenv("FI_PROVIDER", "tcp")
    (root / "sys/class/infiniband/rdmap0/device/driver").unlink()
    assert judge() == []


def test_a_machine_of_several_warns_before_training(machine, tmp_path):
    """The real command, as the first of two pods starts it; the second never comes."""
    machine()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(DEMO)
    (tmp_path / "text.txt").write_text("text " * 1000)
    command = [sys.executable, "-m", "echelon", "train", str(recipe), "--nproc", "1", "--nodes", "2",
               "--rendezvous", "127.0.0.1:29461"]  # fmt: skip
    started = subprocess.Popen(
        command, env={**read_environment(), **ASKED, "LD_LIBRARY_PATH": ""}, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said = ""
        assert started.stdout is not None
        for line in started.stdout:
            said += line
            if "network: " in line:
                break
        assert "network: NCCL finds no plugin for EFA (libnccl-net.so, of aws-ofi-nccl), so NCCL sends over TCP" in said
    finally:
        started.kill()
        started.communicate()
