"""The catalogue of instance types, compared with values from AWS's tables."""

from dataclasses import replace

import pytest

from echelon.ground.errors import ConfigError
from echelon.planner.hardware.accelerators import ACCELERATORS
from echelon.planner.hardware.instances import (
    INSTANCES,
    Price,
    cluster_of,
    efa_environment,
    find_instance,
    nearest_gpu_instance,
)
from echelon.recipe.yaml_text import render_yaml


@pytest.mark.parametrize(
    ("name", "gpus", "accelerator", "network", "efa", "vcpus", "ram", "usd", "region"),
    [
        ("ml.p5.48xlarge", 8, "H100", 3200, 32, 192, 2048, 63.296, "us-west-2"),
        ("p5.4xlarge", 1, "H100", 100, 1, 16, 256, None, None),
        ("ml.p4d.24xlarge", 8, "A100-40", 400, 4, 96, 1152, 25.2513, "us-west-2"),
        ("ML.P6-B300.48xlarge", 8, "B300", 6400, 16, 192, 4096, None, None),
        ("ml.g5.12xlarge", 4, "A10G", 40, 1, 48, 192, 7.09, "us-east-1"),
        ("ml.g6e.48xlarge", 8, "L40S", 400, 4, 192, 1536, None, None),
        ("ml.g7e.12xlarge", 2, "RTXPRO6000", 400, 1, 48, 512, 10.3576, "us-west-2"),
        ("ml.m5.xlarge", 0, "cpu", 10, 0, 4, 16, None, None),
    ],
)
def test_rows(name, gpus, accelerator, network, efa, vcpus, ram, usd, region):
    found = find_instance(name)
    assert (found.gpus, found.accelerator, found.network_gbits) == (gpus, accelerator, network)
    assert (found.efa_interfaces, found.vcpus, found.ram_gib) == (efa, vcpus, ram)
    price = found.price
    assert (price and price.usd_per_hour, price and price.region) == (usd, region)


def test_the_table_is_consistent():
    for name, instance in INSTANCES.items():
        assert name == instance.name and name.startswith("ml.")
        assert instance.price is None or (instance.price.date and instance.price.source and instance.price.region)
        assert (instance.accelerator in ACCELERATORS) != bool(instance.neuron_devices)
        if instance.gpus:  # the planner's memory never exceeds that of the machine
            memory = ACCELERATORS[instance.accelerator].memory_bytes
            assert memory <= instance.gpu_memory_gib * 2**30 * 1.002, name
            assert (instance.link is None) == (instance.gpus == 1)
    # EC2: InstanceStorageSupported.
    assert {name.split(".")[1] for name, each in INSTANCES.items() if not each.own_disks} == {"p3", "m5", "c5"}


def test_an_unknown_type_names_its_family():
    with pytest.raises(ConfigError, match=r"ml\.p5\.24xlarge is not .*ml\.p5\.4xlarge, ml\.p5\.48xlarge"):
        find_instance("ml.p5.24xlarge")
    with pytest.raises(
        ConfigError, match=r"x9\.huge is not .* auto, or describe it in a file .*ml\.x9\.huge: \{gpus: 8"
    ):
        find_instance("x9.huge")


@pytest.fixture
def describe(tmp_path, monkeypatch):
    """Describes `ml.x9.huge`, or another machine, in a file of prices."""
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))

    def write(name="ml.x9.huge", price=None, **figures):
        row = {"region": "here", "date": "2026-11-20", "source": "mine", "machines": {name: figures}}
        row |= {"usd_per_hour": {name: price}} if price else {}
        (tmp_path / "prices").mkdir(exist_ok=True)
        (tmp_path / "prices" / "mine.yaml").write_text(render_yaml([row]))

    return write


X9 = {"gpus": 8, "accelerator": "h200", "vcpus": 192, "memory_gib": 2048, "network_gbits": 3200}


def test_a_described_type_is_used_like_one_of_the_catalogue(describe):
    describe(**X9, efa_interfaces=16, efa_rdma=True, price=40)
    known = find_instance("p5en.48xlarge")  # the same machine under another name
    assert find_instance("x9.huge") == replace(
        known,
        name="ml.x9.huge",
        gpu_memory_gib=None,
        link=None,
        link_gigabytes_per_s=None,
        price=Price(40, "here", "2026-11-20", "mine"),
    )
    assert find_instance("ml.x9.huge").price.describe() == "$40/h (here, 2026-11-20)"
    assert cluster_of(find_instance("x9.huge"), 2) == cluster_of(known, 2)
    with pytest.raises(ConfigError, match=r"x9\.giant is not .*; use one of ml\.x9\.huge, or"):
        find_instance("x9.giant")


def test_an_unknown_gpu_has_the_given_memory_and_bf16(describe):
    describe(**X9 | {"accelerator": "R100", "gpu_memory_gib": 288})
    cluster = cluster_of(find_instance("x9.huge"), 1)
    assert (cluster.accelerator.name, cluster.accelerator.memory_bytes) == ("R100", 288 * 2**30)
    assert cluster.has_bf16 and cluster.accelerator.bf16_flops is None
    # Of a known GPU the smaller of both figures: 141 GB are 131.3 GiB.
    describe(**X9, gpu_memory_gib=70)
    half = cluster_of(find_instance("x9.huge"), 1)
    assert (half.accelerator.memory_bytes, half.accelerator.bf16_flops) == (70 * 2**30, 989e12)
    describe(**X9, gpu_memory_gib=141)
    assert cluster_of(find_instance("x9.huge"), 1).accelerator.name == "H200"
    describe(gpus=0, vcpus=8, memory_gib=32, network_gbits=10)
    cpus = find_instance("x9.huge")
    assert (cpus.accelerator, cpus.num_processes, cpus.own_disks) == ("cpu", 4, False)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"gpus": 8}, r"mine.yaml is not a list of prices \(vcpus"),
        ({**X9, "accelerator": None}, "accelerator is missing: give the name of its GPU"),
        ({**X9, "accelerator": "R100"}, "accelerator=R100 is not one of V100, .* also give gpu_memory_gib"),
        ({**X9, "gpus": 0}, "gpus=0 contradicts accelerator and gpu_memory_gib"),
        ({**X9, "name": "ml.p5.48xlarge"}, "ml.p5.48xlarge is in the catalogue of instances; remove the description"),
    ],
)
def test_a_wrong_description_is_refused(describe, figures, said):
    describe(**figures)
    with pytest.raises(ConfigError, match=said):
        find_instance("x9.huge")


def test_clusters():
    two = cluster_of(find_instance("ml.p5.48xlarge"), 2)
    assert (two.num_devices, two.devices_per_node, two.num_nodes, two.accelerator.name) == (16, 8, 2, "H100")
    assert (cluster_of(find_instance("ml.m5.xlarge"), 3).num_devices, two.kind) == (6, "cuda")
    assert cluster_of(find_instance("ml.p5.48xlarge"), 1, 4).num_devices == 4
    with pytest.raises(ConfigError, match=r"nproc_per_node=9 is more than the 8 GPUs of an ml\.p5\.48xlarge"):
        cluster_of(find_instance("ml.p5.48xlarge"), 1, 9)


def test_trainium_is_refused_with_the_nearest_gpu_type():
    # 32 GiB -> 44.7 of one L40S; 16 x 32 = 512 -> 640 of p4de, whose network is nearer than p5's; 1536 -> p6-b300
    nearest = {"trn1.2xlarge": "g6e.xlarge", "trn1.32xlarge": "p4de.24xlarge", "trn2.48xlarge": "p6-b300.48xlarge"}
    for name, other in nearest.items():
        assert nearest_gpu_instance(find_instance(name)).name == f"ml.{other}"
    with pytest.raises(ConfigError, match=r"Trainium; the nearest GPU instance is ml\.p4de\.24xlarge"):
        cluster_of(find_instance("trn1.32xlarge"), 1)


def test_efa_variables():
    rdma = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}
    assert efa_environment(find_instance("p5en.48xlarge")) == rdma
    assert efa_environment(find_instance("g6e.12xlarge")) == {"FI_PROVIDER": "efa"}
    assert efa_environment(find_instance("g5.xlarge")) == {}
