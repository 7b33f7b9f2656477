"""Machine types of Amazon SageMaker training: devices, memory, network and, if known, price.

Counts, memory, cores and network are from EC2's DescribeInstanceTypes; links between GPUs are from AWS's product pages.
A price is for one machine on demand, and has a region, a date and a source; if it is unknown, `budget.usd_per_hour`
sets it.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from echelon.errors import ConfigError
from echelon.hardware.accelerators import ACCELERATORS, Accelerator, Cluster
from echelon.hardware.links import machine_links

if TYPE_CHECKING:
    from echelon.recipe.launching import InstanceTypeConfig

EXTRA_TYPES = "launch.sagemaker.extra_types"
"""The recipe key with the types that the catalogue lacks."""

Link = Literal["PCIe", "NVLink", "NVSwitch", "NeuronLink"]


@dataclass(frozen=True)
class Price:
    """US dollars per hour for one machine on demand; the bill depends on region and contract.

    A price in the recipe has no date, and is for whatever region the job runs in.
    """

    usd_per_hour: float
    region: str | None
    date: str | None
    source: str

    @property
    def terms(self) -> str:
        """Region and date, as in `us-west-2, 2026-09-01`; the source of a price in the recipe."""
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
        device: one GPU, as in `ACCELERATORS` or described in the recipe; `cpu` for CPU types; None for Trainium.
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

    @property
    def accelerator(self) -> str | None:
        """The name of the device."""
        return None if self.device is None else self.device.name

    @property
    def num_processes(self) -> int:
        """The number of training processes per machine: one per GPU, else one per two cores and at least one."""
        return self.gpus or max(1, self.vcpus // 2)


_WEST = ("us-west-2", "2026-09-01", "AWS price list, Studio JupyterLab meter of the type, as quoted publicly")
_EAST = ("us-east-1", "2026-08", "AWS price list, training rate, as quoted publicly")

# In dollars per hour. If both rates were found, the training rate is used.
_PRICES: dict[str, Price] = {
    f"ml.{name}": Price(usd, *where)
    for where, prices in (
        (
            _WEST,
            {
                "p4d.24xlarge": 25.2513, "p5.48xlarge": 63.296, "g4dn.xlarge": 0.7364,
                "g5.xlarge": 1.41, "g5.24xlarge": 10.18, "g5.48xlarge": 20.36,
                "g6.xlarge": 1.127, "g6.24xlarge": 8.344, "g6.48xlarge": 16.688,
                "g7e.2xlarge": 4.2039, "g7e.12xlarge": 10.3576, "g7e.24xlarge": 20.7152, "g7e.48xlarge": 41.4304,
            },
        ),
        (
            _EAST,
            {
                "g5.2xlarge": 1.515, "g5.12xlarge": 7.09, "g6.2xlarge": 1.222, "g6.12xlarge": 5.752,
                "g6e.2xlarge": 2.80, "g6e.12xlarge": 13.12,
            },
        ),
    )
    for name, usd in prices.items()
}  # fmt: skip

# Types whose EFA supports GPU RDMA; on others libfabric's provider refuses to start if RDMA is requested.
_RDMA = ("p4d.", "p4de.", "p5.48", "p5e.", "p5en.", "p6-", "trn1.32", "trn1n.", "trn2.")

# Families without local disks.
_NO_DISKS = ("p3", "m5", "c5")

# size: GPUs, Gbit/s, EFA interfaces, cores, GiB of RAM
_Sizes = dict[str, tuple[int, float, int, int, int]]

_G5_SIZES: _Sizes = {
    "xlarge": (1, 10, 0, 4, 16), "2xlarge": (1, 10, 0, 8, 32), "4xlarge": (1, 25, 0, 16, 64),
    "8xlarge": (1, 25, 1, 32, 128), "16xlarge": (1, 25, 1, 64, 256), "12xlarge": (4, 40, 1, 48, 192),
    "24xlarge": (4, 50, 1, 96, 384), "48xlarge": (8, 100, 1, 192, 768),
}  # fmt: skip

# family: accelerator, GiB of one, link of several, its GB/s, sizes
_FAMILIES: dict[str, tuple[str, float | None, Link | None, float | None, _Sizes]] = {
    "p3": ("V100", 16, "NVLink", 300, {
        "2xlarge": (1, 10, 0, 8, 61), "8xlarge": (4, 10, 0, 32, 244), "16xlarge": (8, 25, 0, 64, 488),
    }),
    "p3dn": ("V100-32", 32, "NVLink", 300, {"24xlarge": (8, 100, 1, 96, 768)}),
    "p4d": ("A100-40", 40, "NVSwitch", 600, {"24xlarge": (8, 400, 4, 96, 1152)}),
    "p4de": ("A100-80", 80, "NVSwitch", 600, {"24xlarge": (8, 400, 4, 96, 1152)}),
    "p5": ("H100", 80, "NVSwitch", 900, {"4xlarge": (1, 100, 1, 16, 256), "48xlarge": (8, 3200, 32, 192, 2048)}),
    "p5e": ("H200", 141, "NVSwitch", 900, {"48xlarge": (8, 3200, 32, 192, 2048)}),
    "p5en": ("H200", 141, "NVSwitch", 900, {"48xlarge": (8, 3200, 16, 192, 2048)}),
    "p6-b200": ("B200", 179, "NVSwitch", 1800, {"48xlarge": (8, 3200, 8, 192, 2048)}),
    "p6-b300": ("B300", 268.6, "NVSwitch", 1800, {"48xlarge": (8, 6400, 16, 192, 4096)}),
    "g4dn": ("T4", 16, "PCIe", None, {
        "xlarge": (1, 25, 0, 4, 16), "2xlarge": (1, 25, 0, 8, 32), "4xlarge": (1, 25, 0, 16, 64),
        "8xlarge": (1, 50, 1, 32, 128), "12xlarge": (4, 50, 1, 48, 192), "16xlarge": (1, 50, 1, 64, 256),
    }),
    "g5": ("A10G", 22.4, "PCIe", None, _G5_SIZES),
    "g6": ("L4", 22.4, "PCIe", None, _G5_SIZES),
    "g6e": ("L40S", 44.7, "PCIe", None, {
        "xlarge": (1, 20, 0, 4, 32), "2xlarge": (1, 20, 0, 8, 64), "4xlarge": (1, 20, 0, 16, 128),
        "8xlarge": (1, 25, 1, 32, 256), "16xlarge": (1, 35, 1, 64, 512), "12xlarge": (4, 100, 1, 48, 384),
        "24xlarge": (4, 200, 2, 96, 768), "48xlarge": (8, 400, 4, 192, 1536),
    }),
    "g7e": ("RTXPRO6000", 96, "PCIe", None, {
        "2xlarge": (1, 50, 0, 8, 64), "4xlarge": (1, 50, 0, 16, 128), "8xlarge": (1, 100, 1, 32, 256),
        "12xlarge": (2, 400, 1, 48, 512), "24xlarge": (4, 800, 2, 96, 1024), "48xlarge": (8, 1600, 4, 192, 2048),
    }),
    "m5": ("cpu", None, None, None, {
        "large": (0, 10, 0, 2, 8), "xlarge": (0, 10, 0, 4, 16), "2xlarge": (0, 10, 0, 8, 32),
        "4xlarge": (0, 10, 0, 16, 64), "12xlarge": (0, 12, 0, 48, 192), "24xlarge": (0, 25, 0, 96, 384),
    }),
    "c5": ("cpu", None, None, None, {
        "xlarge": (0, 10, 0, 4, 8), "2xlarge": (0, 10, 0, 8, 16), "4xlarge": (0, 10, 0, 16, 32),
        "9xlarge": (0, 12, 0, 36, 72), "18xlarge": (0, 25, 0, 72, 144),
    }),
}  # fmt: skip

# family: GiB of one chip, and of each size the chips, Gbit/s, EFA interfaces, cores, GiB of RAM
_TRAINIUM: dict[str, tuple[float, _Sizes]] = {
    "trn1": (32, {"2xlarge": (1, 12.5, 0, 8, 32), "32xlarge": (16, 800, 8, 128, 512)}),
    "trn1n": (32, {"32xlarge": (16, 1600, 16, 128, 512)}),
    "trn2": (96, {"48xlarge": (16, 3200, 16, 192, 2048)}),
}


def _build_instances() -> Iterator[Instance]:
    for family, (accelerator, memory, link, speed, sizes) in _FAMILIES.items():
        for size, (gpus, network, efa, vcpus, ram) in sizes.items():
            name = f"ml.{family}.{size}"
            joined = (link, speed) if gpus > 1 else (None, None)
            rdma = f"{family}.{size}".startswith(_RDMA)
            yield Instance(
                name,
                gpus,
                ACCELERATORS[accelerator],
                memory,
                *joined,
                network,
                efa,
                vcpus,
                ram,
                _PRICES.get(name),
                rdma,
                own_disks=family not in _NO_DISKS,
            )
    for family, (memory, sizes) in _TRAINIUM.items():
        for size, (chips, network, efa, vcpus, ram) in sizes.items():
            yield Instance(
                f"ml.{family}.{size}",
                gpus=0,
                device=None,
                gpu_memory_gib=memory,
                link="NeuronLink" if chips > 1 else None,
                link_gigabytes_per_s=None,
                network_gbits=network,
                efa_interfaces=efa,
                vcpus=vcpus,
                ram_gib=ram,
                efa_rdma=f"{family}.{size}".startswith(_RDMA),
                neuron_devices=chips,
            )


INSTANCES: dict[str, Instance] = {instance.name: instance for instance in _build_instances()}


def find_instance(
    name: str,
    extra_types: "Iterable[InstanceTypeConfig]" = (),
    key: str = "launch.sagemaker.instance_type",
) -> Instance:
    """The type of this name, with or without `ml.`, in the catalogue or in `launch.sagemaker.extra_types`.

    `key` is the recipe key of the name. Raises ConfigError with the nearest names and how to describe a type; also for
    a wrong description.
    """
    known = list_instances(extra_types)
    wanted = f"ml.{name.strip().lower().removeprefix('ml.')}"
    if wanted in known:
        return known[wanted]
    family = [each for each in known if each.startswith(f"{wanted.rpartition('.')[0]}.")]
    hint = ", ".join(family or difflib.get_close_matches(wanted, known, n=3)) or ", ".join([*list(_PRICES)[:3], "auto"])
    raise ConfigError(
        f"{key}={name} is not in the catalogue of instances; use one of {hint}, or describe "
        f"it: {EXTRA_TYPES}=[{{name: {wanted}, gpus: 8, accelerator: H200, vcpus: 192, memory_gib: 2048, "
        "network_gbits: 3200}]."
    )


def list_instances(extra_types: "Iterable[InstanceTypeConfig]") -> dict[str, Instance]:
    """The catalogue and the types described in the recipe, by name. Raises ConfigError for a wrong description."""
    return INSTANCES | {given.name: _describe_type(f"{EXTRA_TYPES}.{i}", given) for i, given in enumerate(extra_types)}


def _describe_type(key: str, given: "InstanceTypeConfig") -> Instance:
    """The type that the recipe describes; of a type in the catalogue only the price may differ."""
    name = given.name
    price = None if given.usd_per_hour is None else Price(given.usd_per_hour, None, None, EXTRA_TYPES)
    if name in INSTANCES:
        known = INSTANCES[name]
        figures = {
            "gpus": known.gpus, "accelerator": known.accelerator, "gpu_memory_gib": known.gpu_memory_gib,
            "vcpus": known.vcpus, "memory_gib": known.ram_gib, "network_gbits": known.network_gbits,
            "efa_interfaces": known.efa_interfaces, "efa_rdma": known.efa_rdma, "local_disks": known.own_disks,
        }  # fmt: skip
        for field, figure in figures.items():
            if getattr(given, field) not in (None, figure):
                raise ConfigError(
                    f"{key}.{field}={getattr(given, field)} contradicts the catalogue of instances, in which "
                    f"{name} has {figure}; remove it."
                )
        return known if price is None else replace(known, price=price)
    gpus, vcpus, memory, network = given.gpus, given.vcpus, given.memory_gib, given.network_gbits
    if gpus is None or vcpus is None or memory is None or network is None:
        needed = ("gpus", "vcpus", "memory_gib", "network_gbits")
        missing = [field for field in needed if getattr(given, field) is None]
        raise ConfigError(
            f"{key}.{missing[0]} is missing: {name} is not in the catalogue of instances; give {', '.join(needed)}, "
            "and with GPUs accelerator."
        )
    device = _describe_device(key, gpus, given)
    return Instance(
        name,
        gpus,
        device,
        given.gpu_memory_gib,
        link=None,
        link_gigabytes_per_s=None,
        network_gbits=network,
        efa_interfaces=given.efa_interfaces or 0,
        vcpus=vcpus,
        ram_gib=memory,
        price=price,
        efa_rdma=bool(given.efa_rdma),
        own_disks=gpus > 0 if given.local_disks is None else given.local_disks,
        # The GPUs without bf16, V100 and T4, are in the table.
        bf16_supported=None if device.name in ACCELERATORS else True,
    )


def _describe_device(key: str, gpus: int, given: "InstanceTypeConfig") -> Accelerator:
    """The device of a described type, with the memory of its datasheet or the given one, whichever is smaller."""
    if not gpus:
        if given.accelerator is not None or given.gpu_memory_gib is not None:
            raise ConfigError(f"{key}.gpus=0 contradicts accelerator and gpu_memory_gib; remove them, or correct gpus.")
        return ACCELERATORS["cpu"]
    if given.accelerator is None or given.accelerator.lower() == "cpu":
        raise ConfigError(f"{key}.accelerator is missing: give the name of its GPU, such as H200.")
    by_name = {known.lower(): each for known, each in ACCELERATORS.items()}
    known = by_name.get(given.accelerator.lower())
    stated = None if given.gpu_memory_gib is None else int(given.gpu_memory_gib * 2**30)
    if known is not None:
        assert known.memory_bytes is not None
        return known if stated is None else replace(known, memory_bytes=min(known.memory_bytes, stated))
    if stated is None:
        raise ConfigError(
            f"{key}.accelerator={given.accelerator} is not one of {', '.join(list(ACCELERATORS)[:-1])}; also give "
            "gpu_memory_gib, the memory of one GPU."
        )
    return Accelerator(given.accelerator, stated, None, None, None, EXTRA_TYPES)


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
    accelerator, memory = instance.device, instance.ram_gib * 2**30
    if not instance.gpus:
        return Cluster(
            replace(accelerator, memory_bytes=memory // per_machine), count * per_machine, per_machine, "cpu"
        )
    links = machine_links(accelerator.name, instance.network_gbits, instance.efa_interfaces > 0, per_machine)
    return Cluster(
        accelerator,
        count * per_machine,
        per_machine,
        "cuda",
        instance.bf16_supported,
        host_memory_bytes=memory,
        links=links,
    )


def nearest_gpu_instance(trainium: Instance) -> Instance:
    """The GPU type with the smallest sufficient total memory; among equals, the nearest network bandwidth."""
    assert trainium.neuron_devices and trainium.gpu_memory_gib is not None
    needed = trainium.neuron_devices * trainium.gpu_memory_gib
    candidates = [
        (instance.gpus * (instance.gpu_memory_gib or 0), abs(instance.network_gbits - trainium.network_gbits), instance)
        for instance in INSTANCES.values()
        if instance.gpus
    ]
    return min((each for each in candidates if each[0] >= needed), key=lambda each: each[:2])[2]


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
