"""The all-reduce speed of pairs of machines, and which pairs are slow compared with the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

Pair = tuple[str, str]

# A pair is slow below this fraction of the usual bandwidth, or above this multiple of the usual latency plus a margin.
_SLOW, _LATE, _LATE_SECONDS = 0.25, 4.0, 0.002


@dataclass(frozen=True)
class Speed:
    """The speed of an all-reduce: latency in seconds, and bytes per second on each machine's network link."""

    latency_seconds: float
    bytes_per_second: float

    @property
    def rate(self) -> str:
        """The bandwidth with its unit."""
        megabytes = self.bytes_per_second / 1e6
        return f"{megabytes / 1000:.1f} GB/s" if megabytes >= 1000 else f"{megabytes:.3g} MB/s"

    @property
    def delay(self) -> str:
        """The latency with its unit."""
        return f"{self.latency_seconds * 1e3:.2g} ms"

    def better(self, other: "Speed") -> "Speed":
        """The better value of both, for each figure: disturbances only make a measurement worse."""
        return Speed(
            min(self.latency_seconds, other.latency_seconds), max(self.bytes_per_second, other.bytes_per_second)
        )


def find_slow(speeds: Mapping[Pair, Speed]) -> dict[Pair, str]:
    """The pairs that are much slower than usual, with the figures.

    Usual is the median over all hosts of each host's best pair, which one bad host or pair does not affect.
    """
    best: dict[str, Speed] = {}
    for pair, speed in speeds.items():
        for host in pair:
            best[host] = speed.better(best.get(host, speed))
    if not best:
        return {}
    usual = Speed(
        median(link.latency_seconds for link in best.values()), median(link.bytes_per_second for link in best.values())
    )
    slow = {}
    for pair, speed in speeds.items():
        if speed.bytes_per_second < _SLOW * usual.bytes_per_second:
            slow[pair] = f"{speed.rate} where {usual.rate} is usual"
        elif speed.latency_seconds > _LATE * usual.latency_seconds + _LATE_SECONDS:
            slow[pair] = f"{speed.delay} for an all-reduce where {usual.delay} is usual"
    return slow
