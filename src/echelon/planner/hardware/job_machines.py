"""The machines of a SageMaker job: one instance type, or several in instance groups."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError
from echelon.planner.hardware.accelerators import Accelerator
from echelon.planner.hardware.instances import Instance, Price, find_instance, list_instances

if TYPE_CHECKING:
    from echelon.recipe.launch_sections import LaunchConfig

_KEY = "launch.sagemaker.instance_groups"


@dataclass(frozen=True)
class MachineGroup:
    """`count` machines of one type. `name` is that of the instance group, None without groups."""

    name: str | None
    instance: Instance
    count: int


@dataclass(frozen=True)
class JobMachines:
    """All machines of a job, as given by `find_machines`."""

    groups: tuple[MachineGroup, ...]

    @property
    def count(self) -> int:
        """The number of machines."""
        return sum(group.count for group in self.groups)

    @cached_property
    def weakest(self) -> Instance:
        """One machine with the smallest figures of all types, on which a plan for all machines must fit.

        Of a job with one type, that type.
        """
        types = [group.instance for group in self.groups]
        if len({kind.name for kind in types}) == 1:
            return types[0]
        if trainium := [kind for kind in types if kind.neuron_devices]:
            return trainium[0]  # refused wherever a job is checked
        return replace(_combine(types), price=self.price)

    @property
    def price(self) -> Price | None:
        """The price of one machine, with several types their mean; None if one of them is unknown."""
        prices = [group.instance.price for group in self.groups]
        known_prices = [price for price in prices if price is not None]
        if len(known_prices) < len(prices):
            return None
        if len(set(known_prices)) == 1:
            return known_prices[0]
        total = sum(price.usd_per_hour * group.count for price, group in zip(known_prices, self.groups, strict=True))
        sources = "; ".join(dict.fromkeys(price.terms for price in known_prices))
        return Price(total / self.count, None, None, f"their mean; {sources}")

    def usd_per_hour(self, region: str) -> float | None:
        """The price of one machine, if the prices of all types are for this region or from the recipe."""
        prices = [group.instance.price for group in self.groups]
        if self.price is None or not all(price and price.region in (None, region) for price in prices):
            return None
        return self.price.usd_per_hour

    def describe(self) -> str:
        """`2 x ml.g5.12xlarge and 1 x ml.g6.12xlarge`."""
        return " and ".join(f"{group.count} x {group.instance.name}" for group in self.groups)


def find_machines(launch: "LaunchConfig") -> JobMachines:
    """The machines that `launch.sagemaker` names, from the catalogue and the recipe's own descriptions.

    Raises ConfigError for an unknown type, a wrong description, or groups that cannot train one model together.
    """
    settings = launch.sagemaker
    if not settings.instance_groups:
        instance = find_instance(settings.instance_type or "", region=settings.region)
        return JobMachines((MachineGroup(None, instance, launch.max_training),))
    machines = JobMachines(
        tuple(
            MachineGroup(
                group.name,
                find_instance(group.instance_type, f"{_KEY}.{index}.instance_type", settings.region),
                group.nodes,
            )
            for index, group in enumerate(settings.instance_groups)
        )
    )
    _check_groups(machines, launch)
    return machines


def count_asked_gpus(launch: "LaunchConfig", instance_type: str | None, group: str | None) -> tuple[int, str]:
    """The GPUs of a machine of a running job, from its type's name, and the recipe key that asked for them.

    `group`: its instance group, None without groups. Of a type that neither catalogue nor recipe know, at least one is
    expected if its family is named P or G, as AWS names those with GPUs.
    """
    by = "launch.sagemaker.instance_type" if group is None else f"{_KEY}, group {group}"
    types = list_instances()
    if instance_type in types:
        count = types[instance_type].gpus
    else:
        count = int(re.match(r"ml\.[gp]\d", instance_type or "") is not None)
    return count, f"{by}={instance_type}" if group is None else f"{by} ({instance_type})"


def _check_groups(machines: JobMachines, launch: "LaunchConfig") -> None:
    """Refuse groups of which some machines would be idle, or have a different number of processes."""
    by_gpus = sorted(machines.groups, key=lambda group: group.instance.gpus)
    fewest, most = by_gpus[0], by_gpus[-1]
    if most.instance.gpus and not fewest.instance.gpus and not fewest.instance.neuron_devices:
        raise ConfigError(
            f"{_KEY}: {fewest.name} ({fewest.instance.name}) has no GPUs, but every machine of a job trains; remove "
            "this group. Text is prepared before training starts, so it needs no machines of its own."
        )
    counts = [group.instance.num_processes for group in machines.groups]
    if launch.nproc_per_node == "auto" and len(set(counts)) > 1:
        listed = ", ".join(f"{group.name} {count}" for group, count in zip(machines.groups, counts, strict=True))
        raise ConfigError(
            f"{_KEY}: launch.nproc_per_node=auto gives machines of different groups different numbers of processes "
            f"({listed}), but a plan needs the same number on every machine; choose types with the same number, or set "
            f"launch.nproc_per_node={min(counts)}, which leaves the other devices unused."
        )


def _combine(types: list[Instance]) -> Instance:
    """One machine with the smallest figures of different types."""
    device = _find_weakest_device(types)
    return replace(
        min(types, key=lambda kind: kind.gpus),
        name=" and ".join(dict.fromkeys(kind.name for kind in types)),
        device=device,
        gpu_memory_gib=_smallest([kind.gpu_memory_gib for kind in types]),
        link=None,
        link_gigabytes_per_s=None,
        network_gbits=min(kind.network_gbits for kind in types),
        efa_interfaces=min(kind.efa_interfaces for kind in types),
        vcpus=min(kind.vcpus for kind in types),
        ram_gib=min(kind.ram_gib for kind in types),
        efa_rdma=all(kind.efa_rdma for kind in types),
        own_disks=all(kind.own_disks for kind in types),
        spot=None,
        bf16_supported=all(_has_bf16(kind) for kind in types) if device.name != "cpu" else None,
    )


def _find_weakest_device(types: list[Instance]) -> Accelerator:
    """A device with the smallest memory and rates of these types' devices."""
    devices = {kind.device.name: kind.device for kind in types if kind.device is not None}
    [first, *others] = devices.values()
    if not others:
        return first
    return Accelerator(
        " and ".join(devices),
        min((device.memory_bytes for device in devices.values() if device.memory_bytes is not None), default=None),
        _smallest([device.bf16_flops for device in devices.values()]),
        _smallest([device.fp32_flops for device in devices.values()]),
        _smallest([device.memory_bandwidth for device in devices.values()]),
        "the smallest figures of the types of the job",
    )


def _smallest(figures: list[float | None]) -> float | None:
    """The smallest figure; None if one is unknown."""
    known_figures = [figure for figure in figures if figure is not None]
    return min(known_figures) if len(known_figures) == len(figures) else None


def _has_bf16(instance: Instance) -> bool:
    if instance.bf16_supported is not None:
        return instance.bf16_supported
    return instance.device is not None and instance.device.bf16_flops is not None
