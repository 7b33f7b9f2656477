"""What the planner asks of an axis of parallelism, and the inputs of the answers. The loops are over `table.py`.

Collectives between the ranks of an axis take latency plus bytes over bandwidth, by level: the form alpha + n * beta of
Hockney (1994). One over several machines runs inside the machines and between them at once, on all network cards, so it
takes as long as the slower of the two.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from echelon.planner.hardware.accelerators import Cluster, DeviceKind
from echelon.planner.hardware.links import Links
from echelon.planner.layer_time import LayerTime, Step
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import DTYPE_BYTES, AdapterPlan, ParallelPlan
from echelon.recipe.training import ParallelConfig

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe


@dataclass(frozen=True)
class RankLoad:
    """What one rank has to hold: the whole model, or some of its layers."""

    shape: ModelShape
    """The model with this rank's layers alone."""
    adapter: AdapterPlan | None
    """The part of the plan's adapter there."""
    num_kept: int = 1
    """Microbatches whose activations are kept at once."""
    num_deferred: int = 0
    """Backward passes that wait at once for the gradients of their weights, each through one of the rank's stages."""
    num_stages: int = 1
    has_head: bool = True
    """Whether the loss is computed here."""
    received_bytes: int = 0
    """Of the buffers for hidden states and their gradients."""


@dataclass(frozen=True)
class Sender:
    """A rank whose sent bytes are counted."""

    part: ModelShape
    """The part of the model that one rank stores and computes, with all layers."""
    load: RankLoad
    rank: int
    """Of the ranks that divide the layers."""
    plan: ParallelPlan
    kind: DeviceKind

    @property
    def tokens(self) -> int:
        """Of one microbatch."""
        return self.plan.microbatch_tokens

    @property
    def layers(self) -> int:
        """Of this rank."""
        return self.load.shape.num_layers

    @property
    def number(self) -> int:
        """Bytes of a number of the hidden states."""
        return DTYPE_BYTES[self.plan.precision.compute]

    @property
    def hidden(self) -> float:
        """Bytes of the hidden states of one microbatch, whole also where ranks divide them along the sequence."""
        return float(self.tokens * self.part.hidden_size * self.number)

    @property
    def again(self) -> float:
        """The share of the layers whose forward pass is repeated whole."""
        return 1 / self.plan.checkpoint_every if self.plan.activation_checkpointing == "full" else 0.0


def ring_share(size: int) -> float:
    """What each of `size` ranks sends in a ring, of a tensor that they have parts of."""
    return (size - 1) / size


@dataclass(frozen=True)
class CommunicationGroup:
    """The ranks of one or more axes that communicate: `size` of them, `local` on each machine that has any."""

    size: int
    local: int
    links: Links

    @property
    def num_machines(self) -> int:
        """Machines that the ranks are on."""
        return -(-self.size // self.local)

    @property
    def latency(self) -> float:
        """Seconds of a collective without a payload: rounds of a tree inside a machine, and of one between them."""
        inside = math.ceil(math.log2(self.local)) if self.local > 1 else 0
        between = math.ceil(math.log2(self.num_machines)) if self.num_machines > 1 else 0
        return inside * self.links.inside.latency / 3 + between * self.links.between.latency

    def all_gather(self, num_bytes: float, measured: float | None = None) -> float:
        """Seconds until every rank has the `num_bytes` that they have parts of; a reduce-scatter takes as long.

        `measured`: bytes/s inside a machine, with the copies of a sharded layer.
        """
        if self.size == 1 or not num_bytes:
            return 0.0
        inside = num_bytes * (self.local - 1) / self.local / (measured or self.links.inside.bandwidth)
        nodes = self.num_machines
        between = num_bytes * (nodes - 1) / nodes / (self.local * self.links.between.bandwidth)
        return self.latency + max(inside, between)

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds until every rank has the sum of `num_bytes` of each: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(num_bytes)

    def all_to_all(self, num_bytes: float) -> float:
        """Seconds until every rank has sent equal parts of its `num_bytes` to all."""
        if self.size == 1 or not num_bytes:
            return 0.0
        remote = (self.size - self.local) / self.size
        inside = num_bytes * (self.local - 1) / self.size / self.links.inside.bandwidth
        return self.latency + max(inside, num_bytes * remote / self.links.between.bandwidth)

    def send(self, num_bytes: float) -> float:
        """Seconds until the next rank has `num_bytes`; between machines if any rank's neighbour is on another one."""
        if self.size == 1:
            return 0.0
        if self.num_machines > 1:
            return self.links.between.latency + num_bytes / self.links.between.bandwidth
        return self.links.inside.latency / 3 + num_bytes / self.links.inside.bandwidth  # one round of a collective


def find_group(plan: ParallelPlan, cluster: Cluster, axes: Sequence[str]) -> CommunicationGroup:
    """The ranks that differ only along these axes. Inner axes are placed on the devices of a machine first."""
    size, stride, inner = 1, 1, True
    for axis in reversed(plan.order):
        degree = getattr(plan, axis)
        if axis in axes:
            size, inner = size * degree, False
        elif inner:
            stride *= degree
    local = min(size, max(1, cluster.devices_per_node // stride))
    return CommunicationGroup(size, math.gcd(local, size) if size % local else local, cluster.known_links)


def nearest(values: list[int], target: int, each_side: int = 2) -> list[int]:
    """The values closest to a target on both sides, including the target if it is among them, sorted."""
    below, above = [v for v in values if v <= target], [v for v in values if v > target]
    return below[-each_side:] + above[:each_side]


@dataclass(frozen=True)
class Choices:
    """What a search over plans may choose from: `divide`: also layers among stages, and long sequences."""

    recipe: "Recipe"
    shape: ModelShape
    replica: Cluster
    divide: bool


class Axis:
    """An axis. Each default is the answer of an axis that is not concerned."""

    name: ClassVar[str]
    """The field of a plan, and the key of `parallel`, with its degree."""

    def check_options(self, parallel: ParallelConfig, shape: ModelShape) -> None:
        """Raise ConfigError for an option that does not fit the degree or the model."""

    def settings(self, parallel: ParallelConfig, world: int, shape: ModelShape, sequence_len: int) -> dict[str, Any]:
        """Return the fields of a plan for `world` processes that this axis sets.

        Raises:
            ConfigError, PlanError: the degree does not fit the model or the processes.
        """
        return {self.name: getattr(parallel, self.name)}

    def check(self, recipe: "Recipe", shape: ModelShape, plan: ParallelPlan) -> None:
        """Raise ConfigError or PlanError for a model or a recipe that this degree does not work with, and the fix."""

    def micro_batch_sizes(self, recipe: "Recipe", plan: ParallelPlan, sizes: list[int], fill: bool) -> list[int]:
        """Return those of the sizes, largest first, that may be chosen. `fill`: for a run that resumes."""
        return sizes

    def takes(self, plan: ParallelPlan, num_microbatches: int) -> bool:
        """Whether a step may have this number of microbatches."""
        return True

    def describe(self, shape: ModelShape, plan: ParallelPlan) -> list[str]:
        """Return lines for the user about what the axis costs."""
        return []

    def divide(self, shape: ModelShape, plan: ParallelPlan) -> ModelShape:
        """Return the part of each layer, of the embedding and of the head that one rank stores and computes."""
        return shape

    def count_absent(self, shape: ModelShape, plan: ParallelPlan) -> int:
        """Parameters of a layer of the divided shape that a rank never has, also not gathered."""
        return 0

    def kept_bytes(self, shape: ModelShape, plan: ParallelPlan, number: int) -> int:
        """Bytes that a layer keeps for its backward pass in addition, per token, in numbers of so many bytes."""
        return 0

    def result_bytes(self, shape: ModelShape, plan: ParallelPlan, number: int) -> float:
        """Bytes of the results of a layer's collectives that selective checkpointing keeps, per token, likewise."""
        return 0.0

    def attention_bytes(self, shape: ModelShape, plan: ParallelPlan, number: int) -> int:
        """Bytes that the backward pass of a layer's attention holds for a moment, per token, likewise."""
        return 0

    def mask_numbers(self, plan: ParallelPlan) -> tuple[int, int]:
        """Return the size of the masks that a layer's attention needs in its backward pass, and that of the largest.

        Each is a boolean of one byte first, then a number of the compute dtype.
        """
        return 0, 0

    def buffer_bytes(self, shape: ModelShape, plan: ParallelPlan, tokens: int, kind: DeviceKind) -> int:
        """Bytes that a layer needs while it sends, for these tokens of a microbatch."""
        return 0

    def layer_seconds(self, step: Step, layer: LayerTime) -> float:
        """Exposed communication of one layer and microbatch, forward and backward."""
        return 0.0

    def sent_bytes(self, sender: Sender) -> dict[str, float]:
        """Bytes that a rank sends in a step, by the name of a report."""
        return {}

    def meetings(self, plan: ParallelPlan, num_layers: int) -> dict[str, tuple[int, int]]:
        """The ranks that wait for each other and how often in a step, by the name of a report."""
        return {}

    def degrees(self, choices: Choices) -> list[int]:
        """The degrees that a search tries."""
        return [1]

    def variants(self, base: ParallelConfig, choices: Choices) -> Iterator[ParallelConfig]:
        """The mappings that a search tries of one whose degrees along the other axes are chosen."""
        yield base
