"""Links between devices: inside a machine and between machines, with bandwidth and latency, each with its source.

Bandwidth is what collectives reach with large payloads (the bus bandwidth of nccl-tests), not the rate of the wire.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from echelon.ground.errors import PlanError
from echelon.ground.stored import read_as
from echelon.recipe.yaml_text import read_table


@dataclass(frozen=True)
class Link:
    """A link of one device.

    Attributes:
        bandwidth: bytes/s in one direction, of collectives.
        latency: seconds of a collective with an empty payload: inside a machine of eight devices, the three rounds of a
            tree; between machines of two of them.
        gather, scatter: bytes/s of all-gathers and reduce-scatters of sharded layers, where they were measured apart.
    """

    name: str
    bandwidth: float
    latency: float
    source: str
    gather: float | None = None
    scatter: float | None = None


@dataclass(frozen=True)
class _Speed:
    """What `echelon doctor` measured of an all-reduce."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class _Measured:
    """The part of the output of `echelon doctor --json` that is used."""

    pairs: tuple[_Speed, ...]
    together: _Speed | None


@dataclass(frozen=True)
class Links:
    """The links of every device: inside its machine, and its share of the network of its machine."""

    inside: Link
    between: Link
    assumed: bool = False

    def describe(self) -> str:
        """One line for the user."""
        words = " (the usual ones of this device, since none were given)" if self.assumed else ""
        inside, between = (
            f"{link.name} with {link.bandwidth / 1e9:.3g} GB/s per device" for link in (self.inside, self.between)
        )
        return f"links: {inside} inside a machine, {between} between machines{words}"


def _link(name: str, gigabytes_per_s: float, microseconds: float, source: str) -> Link:
    return Link(name, gigabytes_per_s * 1e9, microseconds * 1e-6, source)


_TABLE = read_table(Path(__file__).with_name("links.yaml"))
LINKS: dict[str, Link] = {name: _link(name, *row) for name, row in _TABLE["links"].items()}
_USUAL: dict[str, list[str]] = _TABLE["usual"]
_NVLINKS = {"V100": "nvlink2", "A100": "nvlink3", "H": "nvlink4", "B": "nvlink5", "GB": "nvlink5"}
_MEMORY = _link("memory", 1.0, 200, "gloo between processes of one machine; `echelon plan --calibrate` measures it")
_EFA_SHARE = 0.87  # of the rate of the network: 44 of 50 GB/s per device on a p5en
_TCP_SHARE = 0.8


def usual_links(device: str) -> Links:
    """The links that machines of this device usually have; those of PCIe and 100 Gbit/s Ethernet if it is unknown."""
    inside, between = _USUAL.get(device, ["pcie4", "tcp100"])
    return Links(_MEMORY if inside == "memory" else LINKS[inside], LINKS[between], assumed=True)


def parse_links(text: str, device: str, num_devices: int) -> Links:
    """Links for a text such as `nvlink,efa`: inside a machine, then between machines; `nvlink` is that of the device.

    The second may be a file with the output of `echelon doctor --json`, whose name ends in `.json`.

    Args:
        num_devices: of a machine, which share what `echelon doctor` measured between machines.

    Raises:
        PlanError: naming the known links, or what is wrong with the file.
    """
    usual, names = usual_links(device), [name.strip() for name in text.split(",")]
    if len(names) > 2 or not all(names):
        raise PlanError(f"links {text!r}: give one link inside a machine and one between machines, such as nvlink,efa.")
    if names[0].endswith(".json"):
        raise PlanError(f"links {text!r}: echelon doctor measures between machines; put {names[0]} second.")
    inside = _find_link(names[0].lower(), device)
    if len(names) == 1:
        return Links(inside, usual.between)
    if names[1].endswith(".json"):
        return Links(inside, _read_measured(Path(names[1]), num_devices))
    return Links(inside, _find_link(names[1].lower(), device))


def _read_measured(path: Path, num_devices: int) -> Link:
    """The share of each device in the network of its machine, by the output of `echelon doctor --json`.

    Bandwidth is that of an all-reduce of all hosts; if only pairs were measured, that of the slowest one. Latency is
    the median of the pairs. Each host had one process.
    """
    try:
        measured = read_as(path, _Measured)
        slowest = min(measured.pairs, key=lambda pair: pair.bytes_per_second)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"links: {path} has no measurement between machines ({error}); give the output of `echelon doctor --hosts "
            "A,B --json` without problems."
        ) from error
    whole = slowest if measured.together is None else measured.together
    latency = median(pair.latency_seconds for pair in measured.pairs)
    words = f"; {num_devices} devices of a machine share what one process measured" if num_devices > 1 else ""
    return Link(path.name, whole.bytes_per_second / num_devices, latency, f"echelon doctor{words}")


def _find_link(name: str, device: str) -> Link:
    if name == "nvlink":
        prefixes = [prefix for prefix in _NVLINKS if device.startswith(prefix)]
        if prefixes:
            return LINKS[_NVLINKS[max(prefixes, key=len)]]
    if name not in LINKS:
        raise PlanError(f"link {name!r} is not known for {device}; use {', '.join(LINKS)}.")
    return LINKS[name]


def machine_links(device: str, network_gbits: float, efa: bool, num_devices: int) -> Links:
    """The links of a machine type of the catalogue: those that its device usually has inside, its network between.

    Args:
        num_devices: the processes of a machine, which share its network.
    """
    share, latency = (_EFA_SHARE, 70e-6) if efa else (_TCP_SHARE, 100e-6)
    rate = network_gbits / 8 * share / max(1, num_devices) * 1e9
    name = f"{'EFA' if efa else 'Ethernet'} of {network_gbits:g} Gbit/s"
    return Links(usual_links(device).inside, Link(name, rate, latency, "the catalogue of instances"))
