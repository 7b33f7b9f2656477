"""Machine types of Amazon SageMaker training: devices, memory, network and, if known, price.

`instances.yaml` has the figures with their sources. A price is for one machine on demand; if it is unknown,
`budget.usd_per_hour` sets it.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from echelon.ground.errors import ConfigError
from echelon.planner.hardware.accelerators import ACCELERATORS, Accelerator, Cluster
from echelon.planner.hardware.links import machine_links
from echelon.recipe.yaml_text import read_table

if TYPE_CHECKING:
    from echelon.planner.hardware.price_files import PricedMachine

Link = Literal["PCIe", "NVLink", "NVSwitch", "NeuronLink"]


@dataclass(frozen=True)
class Price:
    """US dollars per hour for one machine, on demand if not said otherwise; the bill depends on region and contract.

    A price without a region and a date is for whatever region the job runs in.
    """

    usd_per_hour: float
    region: str | None
    date: str | None
    source: str

    @property
    def terms(self) -> str:
        """Region and date, as in `us-west-2, 2026-09-01`; the source of a price without them."""
        return self.source if self.region is None else f"{self.region}, {self.date}"

    def describe(self) -> str:
        """Format the price as `$63.296/h (us-west-2, 2026-09-01)`."""
        return f"${self.usd_per_hour:g}/h ({self.terms})"


@dataclass(frozen=True)
class Instance:
    """One machine type. None: not present, or unknown.

    Attributes:
        name: SageMaker's name, `ml.p5.48xlarge`.
        gpus: GPUs per machine; 0 for CPU types and Trainium.
        device: one GPU, as in `ACCELERATORS` or described in a file; `cpu` for CPU types; None for Trainium.
        gpu_memory_gib: memory of one accelerator, from EC2; plans use that of `device`, from its datasheet.
        link: the link between the accelerators of one machine.
        link_gigabytes_per_s: bandwidth of the link per accelerator, both directions together.
        network_gbits: network bandwidth of one machine; for small types the burst limit.
        efa_interfaces: network cards with EFA; 0: no EFA.
        efa_rdma: whether EFA supports RDMA to GPU memory.
        neuron_devices: Trainium chips.
        own_disks: whether it has local NVMe disks, of fixed size and encrypted by the hardware; SageMaker then
            provides no volume.
        bf16_supported: as in `Cluster`.
        spot: the price of a spot machine, from a file of prices.
    """

    name: str
    gpus: int
    device: Accelerator | None
    gpu_memory_gib: float | None
    link: Link | None
    link_gigabytes_per_s: float | None
    network_gbits: float
    efa_interfaces: int
    vcpus: int
    ram_gib: int
    price: Price | None = None
    efa_rdma: bool = False
    neuron_devices: int = 0
    own_disks: bool = True
    bf16_supported: bool | None = None
    spot: Price | None = None

    @property
    def accelerator(self) -> str | None:
        """The name of the device."""
        return None if self.device is None else self.device.name

    @property
    def num_processes(self) -> int:
        """The number of training processes per machine: one per GPU, else one per two cores and at least one."""
        return self.gpus or max(1, self.vcpus // 2)


_TABLE = read_table(Path(__file__).with_name("instances.yaml"))
_PRICES: dict[str, Price] = {
    f"ml.{name}": Price(usd, table["region"], table["date"], table["source"])
    for table in _TABLE["prices"]
    for name, usd in table["usd_per_hour"].items()
}


def _build_instance(
    name: str, family: Mapping[str, Any], num_devices: int, network: float, efa: int, vcpus: int, ram: int
) -> Instance:
    """The type of a family in the table, with the figures of its size."""
    is_trainium = "device" not in family
    return Instance(
        f"ml.{name}",
        gpus=0 if is_trainium else num_devices,
        device=None if is_trainium else ACCELERATORS[family["device"]],
        gpu_memory_gib=family.get("gpu_memory_gib"),
        link=family.get("link") if num_devices > 1 else None,
        link_gigabytes_per_s=family.get("link_gigabytes_per_s") if num_devices > 1 else None,
        network_gbits=network,
        efa_interfaces=efa,
        vcpus=vcpus,
        ram_gib=ram,
        price=_PRICES.get(f"ml.{name}"),
        efa_rdma=name.startswith(tuple(_TABLE["rdma"])),
        neuron_devices=num_devices if is_trainium else 0,
        own_disks=family.get("own_disks", True),
    )


INSTANCES: dict[str, Instance] = {
    f"ml.{name}.{size}": _build_instance(f"{name}.{size}", family["machine"], *figures)
    for name, family in _TABLE["families"].items()
    for size, figures in family["sizes"].items()
}


def find_instance(name: str, key: str = "launch.sagemaker.instance_type", region: str | None = None) -> Instance:
    """The type of this name, with or without `ml.`, in the catalogue or in the user's files of prices.

    `key` is the recipe key of the name; `region` is where it runs, for its price. Raises ConfigError with the nearest
    names and how to describe a type; also for a wrong description.
    """
    from echelon.planner.hardware.price_files import find_price_folder

    types = list_instances(region)
    alias = f"ml.{name.strip().lower().removeprefix('ml.')}"
    if name in types:
        return types[name]
    if alias in types:
        return types[alias]
    family = [name for name in types if name.startswith(f"{alias.rpartition('.')[0]}.")]
    hint = ", ".join(family or difflib.get_close_matches(alias, types, n=3)) or ", ".join([*list(_PRICES)[:3], "auto"])
    raise ConfigError(
        f"{key}={name} is not in the catalogue of instances; use one of {hint}, or describe it in a file in "
        f"{find_price_folder()}: `machines: {{{alias}: {{gpus: 8, accelerator: H200, ...}}}}` (docs/cost.md)."
    )


def list_instances(region: str | None = None) -> dict[str, Instance]:
    """The catalogue with the prices and the machines of the user's files, by name.

    Prices are those of `region` where one is known, and the newest. Raises ConfigError for a wrong description.
    """
    from echelon.planner.hardware.price_files import read_price_rows

    types = dict(INSTANCES)
    for row in read_price_rows():
        for machine in row.read_machines():
            types[machine.name] = _describe_type(machine)
        for kind, prices in (("price", row.usd_per_hour), ("spot", row.spot_usd_per_hour)):
            for key, usd in prices.items():
                if (name := key if key in types else f"ml.{key}") in types:
                    choices = [getattr(types[name], kind), Price(usd, row.region, row.date, row.source)]
                    # prices of the region come first, then the newest
                    best = max(filter(None, choices), key=lambda price: (price.region == region, price.date or ""))
                    types[name] = replace(types[name], **{kind: best})
    return types


def _describe_type(given: "PricedMachine") -> Instance:
    """The type that a file describes. Raises ConfigError for one of the catalogue, and for a wrong device."""
    key = f"machines.{given.name}"
    if given.name in INSTANCES:
        raise ConfigError(f"{key} is in the catalogue of instances; remove the description, which needs only a price.")
    device = _describe_device(key, given)
    return Instance(
        given.name,
        given.gpus,
        device,
        given.gpu_memory_gib,
        link=None,
        link_gigabytes_per_s=None,
        network_gbits=given.network_gbits,
        efa_interfaces=given.efa_interfaces,
        vcpus=given.vcpus,
        ram_gib=given.memory_gib,
        efa_rdma=given.efa_rdma,
        own_disks=given.gpus > 0 if given.local_disks is None else given.local_disks,
        # The GPUs without bf16, V100 and T4, are in the table.
        bf16_supported=None if device.name in ACCELERATORS else True,
    )


def _describe_device(key: str, given: "PricedMachine") -> Accelerator:
    """The device of a described type, with the memory of its datasheet or the given one, whichever is smaller."""
    if not given.gpus:
        if given.accelerator is not None or given.gpu_memory_gib is not None:
            raise ConfigError(f"{key}.gpus=0 contradicts accelerator and gpu_memory_gib; remove them, or correct gpus.")
        return ACCELERATORS["cpu"]
    if given.accelerator is None or given.accelerator.lower() == "cpu":
        raise ConfigError(f"{key}.accelerator is missing: give the name of its GPU, such as H200.")
    by_name = {name.lower(): accelerator for name, accelerator in ACCELERATORS.items()}
    device = by_name.get(given.accelerator.lower())
    stated = None if given.gpu_memory_gib is None else int(given.gpu_memory_gib * 2**30)
    if device is not None:
        assert device.memory_bytes is not None
        return device if stated is None else replace(device, memory_bytes=min(device.memory_bytes, stated))
    if stated is None:
        raise ConfigError(
            f"{key}.accelerator={given.accelerator} is not one of {', '.join(list(ACCELERATORS)[:-1])}; also give "
            "gpu_memory_gib, the memory of one GPU."
        )
    return Accelerator(given.accelerator, stated, None, None, None, "a file of prices")


def cluster_of(instance: Instance, count: int, num_processes: int | None = None) -> Cluster:
    """The cluster of `count` such machines, with `num_processes` on each (default: the type's own number).

    Raises ConfigError for Trainium, and if a machine has fewer GPUs than processes.
    """
    if instance.neuron_devices:
        raise ConfigError(
            f"launch.sagemaker.instance_type={instance.name}: echelon does not train on Trainium; the nearest GPU "
            f"instance is {nearest_gpu_instance(instance).name}."
        )
    per_machine = num_processes or instance.num_processes
    if instance.gpus and per_machine > instance.gpus:
        raise ConfigError(
            f"launch.nproc_per_node={per_machine} is more than the {instance.gpus} GPUs of an {instance.name}; use "
            f"{instance.gpus} or fewer, or auto."
        )
    assert instance.device is not None
    accelerator, memory, total = instance.device, instance.ram_gib * 2**30, count * per_machine
    if not instance.gpus:
        return Cluster(replace(accelerator, memory_bytes=memory // per_machine), total, per_machine, "cpu")
    links = machine_links(accelerator.name, instance.network_gbits, instance.efa_interfaces > 0, per_machine)
    return Cluster(
        accelerator, total, per_machine, "cuda", instance.bf16_supported, host_memory_bytes=memory, links=links
    )


def nearest_gpu_instance(trainium: Instance) -> Instance:
    """The GPU type with the smallest sufficient total memory; among equals, the nearest network bandwidth."""
    assert trainium.neuron_devices and trainium.gpu_memory_gib is not None
    needed = trainium.neuron_devices * trainium.gpu_memory_gib
    larger = [kind for kind in INSTANCES.values() if kind.gpus and kind.gpus * (kind.gpu_memory_gib or 0) >= needed]
    return min(
        larger,
        key=lambda kind: (kind.gpus * (kind.gpu_memory_gib or 0), abs(kind.network_gbits - trainium.network_gbits)),
    )


def efa_environment(instance: Instance) -> dict[str, str]:
    """Variables that make libfabric use EFA; empty for a type without EFA.

    SageMaker's launchers set them from a list of types that lacks p5en, p6, trn2, g6, g6e, g7e and some of g5; setting
    them twice is harmless.
    """
    if not instance.efa_interfaces:
        return {}
    variables = {"FI_PROVIDER": "efa"}
    if instance.efa_rdma:
        variables |= {"FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}
    return variables
