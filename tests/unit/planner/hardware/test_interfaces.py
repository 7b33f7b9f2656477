"""Counters of network interfaces, from files as the kernel writes them."""

import sys

import pytest

from echelon.run.journal.network import InterfaceBytes, read_interfaces, subtract_interfaces

NET_DEV = """\
Inter-|   Receive |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs ...
    lo: 1000      10    0    0    0     0          0         0     1000      10    0    0    0     0       0          0
  eth0:7000000000 90    0    0    0     0          0         5 2500 20    0    0    0     0       0          0
"""  # fmt: skip


def test_counters_of_ethernet_and_infiniband(tmp_path):
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/dev").write_text(NET_DEV)
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("250\n")
    (counters / "port_rcv_data").write_text("1000\n")
    found = read_interfaces(tmp_path)
    assert found == {
        "lo": InterfaceBytes(1000, 1000),
        "eth0": InterfaceBytes(2500, 7_000_000_000),
        "mlx5_0:1": InterfaceBytes(sent=1000, received=4000),
    }
    before = {"lo": InterfaceBytes(1000, 1000), "eth0": InterfaceBytes(500, 6_000_000_000)}
    assert subtract_interfaces(found, before) == {
        "eth0": InterfaceBytes(2000, 1_000_000_000),
        "mlx5_0:1": InterfaceBytes(1000, 4000),  # it was not there before
    }
    assert read_interfaces(tmp_path / "nothing") == {}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these counters")
def test_counters_of_this_machine():
    assert "lo" in read_interfaces()
