"""The arrangement of a plan's ranks along named axes, with the process groups and meshes derived from it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.learn.distributed.sequence_part import SequencePart
from echelon.planner.plan import ParallelPlan
from echelon.recipe.synchronization import QUORUM

AXES = ("replica", "pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("replica", "dp_replicate", "dp_shard")
LOSS_AXES = ("dp_replicate", "dp_shard", "cp")
# The axes of the mesh that tensors are sharded over. `shard` combines dp_shard and cp: context parallelism only divides
# activations, so parameters are sharded over its ranks too.
MESH_AXES = {
    "replica": ("replica",),
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "shard": ("dp_shard", "cp"),
    "tp": ("tp",),
}
# Those of the mesh of experts: `efsdp` and `ep` are two axes of the same ranks.
EXPERT_AXES = {**MESH_AXES, "efsdp": MESH_AXES["shard"], "ep": MESH_AXES["shard"]}


class ViewChanged(Exception):
    """The replicas must form a new group: one was lost, or waits to join. The run goes on with what this one holds."""


class Membership(Protocol):
    """This rank's part in a view: the replicas that train together until one of them is lost or another joins."""

    num_replicas: int
    """Those of a view in which none is lost."""
    num_essential: int
    """How many replicas, the first ones, have state that no other has; they are in every view."""

    @property
    def number(self) -> int:
        """That of the view, from 0."""

    def new_group(self, purpose: str = "checkpoints") -> dist.ProcessGroup:
        """Form another group of all ranks of the view. Collective. An error of one rank is one of its replica's."""

    def begin_step(self) -> None:
        """Begin a step that ends in `agree`: an all-reduce between that fails raises its error there. Collective."""

    def sees_next(self) -> bool:
        """Whether another view is to follow this one. The first rank looks; false on all others."""

    def agree(self, values: torch.Tensor) -> torch.Tensor:
        """Return the last sum of a step over all ranks, if a rank of this replica has it. Collective over the replica.

        Raises the error of the step's first all-reduce that failed, if none has. `values`: fp64, [values], of which the
        first is that of `sees_next`; anything where an all-reduce of the step failed on this rank.
        """

    def vote(self) -> None:
        """Wait until all ranks, whose states differ, have voted. Collective. Raises ViewChanged if one is lost."""

    def check(self) -> None:
        """Raise ViewChanged if the last step found that the view ends. The same on every replica of the view."""

    def is_ending(self) -> bool:
        """Whether this view is over, or another one is to follow it."""

    def raise_change(self, error: BaseException) -> None:
        """Raise ViewChanged if an error comes from the end of this view."""

    def at_end(self, stop: Callable[[], None]) -> None:
        """Have this called before the group is left: it stops threads that use groups of the view."""


class Grid:
    """The ranks of a plan as an array with one dimension per axis of AXES. No communication.

    Neighbouring ranks differ along the last axis of the plan's `order`; replicas are outermost.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        sizes = (plan.num_replicas, plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp)
        self.sizes: Mapping[str, int] = dict(zip(AXES, sizes, strict=True))
        """The size of every axis, including those of size 1."""
        order = ("replica", *plan.order)
        arranged = np.arange(math.prod(sizes)).reshape([self.sizes[axis] for axis in order])
        self._ranks = arranged.transpose([order.index(axis) for axis in AXES])

    def size(self, axes: Sequence[str]) -> int:
        """Return the number of ranks that differ only along these axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every axis."""
        [coordinate] = np.argwhere(self._ranks == rank).tolist()
        return dict(zip(AXES, coordinate, strict=True))

    def table(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return the ranks in the order of AXES, as a tensor of these sizes."""
        return torch.from_numpy(self._ranks.reshape(sizes).copy())

    def peers(self, axes: Sequence[str]) -> list[list[int]]:
        """Return all ranks, grouped into lists of ranks that differ only along these axes."""
        inside = [AXES.index(axis) for axis in axes]
        outside = [index for index in range(len(AXES)) if index not in inside]
        ranks: list[list[int]] = self._ranks.transpose(*outside, *inside).reshape(-1, self.size(axes)).tolist()
        return ranks


@dataclass(frozen=True)
class Meshes:
    """The meshes and process groups of a rank. Built by `build_mesh`.

    Attributes:
        device_type: device type of the tensors that the groups reduce.
        grid: the arrangement of all ranks.
        place: this rank's coordinate on every axis.
        shard: the mesh for `fully_shard`: [shard], or [dp_replicate, shard] for hybrid sharding, where shard is
            dp_shard and cp together. None if the plan does not shard parameters.
        tp: the mesh for tensor parallelism, a slice of the same mesh as `shard`; None without it.
        experts: the mesh [efsdp, ep] of the ranks of the axis `shard`, behind dp_replicate if there are replicas, and
            before tp if there is tensor parallelism: the ranks of ep, which are neighbours, share the experts, and
            those of efsdp shard each share. None without expert parallelism.
        loss: the ranks over which losses and target counts are summed: dp x cp at this rank's pp and tp, in one
            replica.
        everyone: all ranks, for metrics and stop requests. With several replicas it uses gloo, so that a slow replica
            does not block the CUDA streams of another.
        outer: the ranks of all replicas with the same coordinates in their replica; None with one replica.
        is_one_model: whether the replicas sum their gradients in every step, and so are one model: those of a quorum.
        pp: the stages of this rank's pipeline; None without one.
        cp: the ranks that share this rank's sequences; None if each sequence is on one rank.
        membership: this replica's part in a view, where replicas may be lost and join; None elsewhere.
        number: that of this replica in the whole run; its place in a group changes when others are lost.
        is_one_machine: whether all ranks are on one machine, where they divide the work of an update.
    """

    device_type: str
    grid: Grid
    place: Mapping[str, int]
    shard: DeviceMesh | None
    tp: DeviceMesh | None
    experts: DeviceMesh | None
    loss: dist.ProcessGroup
    everyone: dist.ProcessGroup
    outer: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None
    is_one_model: bool = False
    membership: Membership | None = None
    number: int = 0
    is_one_machine: bool = True

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all ranks, which writes the files of a run."""
        return dist.get_rank(self.everyone) == 0

    def sum_over_readers(self, values: torch.Tensor) -> None:
        """Sum values in place over the ranks that read different parts of a batch whose gradients are summed.

        Collective: every rank calls it.
        """
        all_reduce(values, self.loss)
        if self.is_one_model and self.outer is not None:
            all_reduce(values, self.outer)

    @property
    def data_size(self) -> int:
        """The number of ranks that read different sequences; cp, tp and pp peers read the same."""
        return self.grid.size(DATA_AXES)

    @property
    def data_rank(self) -> int:
        """This rank's index among the ranks that read different sequences, 0 <= data_rank < data_size."""
        sizes, place = self.grid.sizes, self.place
        within = place["dp_replicate"] * sizes["dp_shard"] + place["dp_shard"]
        return place["replica"] * sizes["dp_replicate"] * sizes["dp_shard"] + within

    @property
    def sequence_part(self) -> SequencePart:
        """What this rank holds of each sequence that it reads: all of it without context parallelism."""
        return SequencePart(self.place["cp"], self.grid.sizes["cp"])

    @property
    def num_devices(self) -> int:
        """The number of ranks of the run."""
        return self.grid.size(AXES)

    @property
    def counts_data(self) -> bool:
        """Whether this rank reports tokens, labels and batch hash for the peers that read the same sequences."""
        return self.place["tp"] == self.place["cp"] == self.place["pp"] == 0

    @property
    def counts_routers(self) -> bool:
        """Whether this rank reports the tokens of the routers of its stage: one of its tp peers."""
        return self.place["tp"] == 0

    @property
    def counts_loss(self) -> bool:
        """Whether this rank reports its loss: one of its tp peers, on the last stage. Each cp peer has its own part."""
        return self.place["tp"] == 0 and self.place["pp"] == self.grid.sizes["pp"] - 1


def build_mesh(plan: ParallelPlan, device_type: str, is_one_machine: bool = True) -> Meshes:
    """Build the groups and meshes of a plan. Collective: every rank calls it, after the process group exists.

    A group of all ranks is the default group, so a plan that only replicates creates no group.
    """
    grid = Grid(plan)
    world, place = _init_world(plan, grid, device_type), grid.place(dist.get_rank())
    assert dist.group.WORLD is not None
    several = plan.num_replicas > 1
    needs_hosts = several and sends_by_nccl(device_type)
    return Meshes(
        device_type=device_type,
        grid=grid,
        place=place,
        shard=None if world is None else world["dp_replicate", "shard"] if plan.dp_replicate > 1 else world["shard"],
        tp=world["tp"] if world is not None and plan.tp > 1 else None,
        experts=None if world is None or plan.ep == 1 else _divide_shards(world, plan),
        loss=_find_group(grid, LOSS_AXES, world),
        everyone=dist.new_group(backend="gloo", group_desc="everyone") if needs_hosts else dist.group.WORLD,
        outer=_find_group(grid, ("replica",), world) if several else None,
        pp=_find_group(grid, ("pp",), world) if plan.pp > 1 else None,
        cp=_find_group(grid, ("cp",), world) if plan.cp > 1 else None,
        is_one_model=plan.sync.name == QUORUM,
        number=place["replica"],
        is_one_machine=is_one_machine,
    )


def sends_by_nccl(device_type: str) -> bool:
    """Whether ranks send what is on this kind of device over NCCL. A test of NCCL's order on a CPU says yes."""
    return device_type == "cuda"


def lone_mesh(device_type: str) -> Meshes:
    """The place of a process that computes alone, in whatever group it is: `loss` and `everyone` are None."""
    grid, groups = Grid(ParallelPlan("ddp")), list[Any]([None] * 8)
    return Meshes(device_type, grid, grid.place(0), *groups)


def _init_world(plan: ParallelPlan, grid: Grid, device_type: str) -> DeviceMesh | None:
    """Create the root mesh of all DTensors of the run, without axes of size 1, except `shard`.

    Every axis of size 1 would create a group per rank.
    """
    if not plan.uses_fully_shard:
        return None
    sizes = {name: grid.size(axes) for name, axes in MESH_AXES.items()}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return DeviceMesh(device_type, grid.table(tuple(kept.values())), mesh_dim_names=tuple(kept))


def _divide_shards(world: DeviceMesh, plan: ParallelPlan) -> DeviceMesh:
    """Divide the axis `shard` into [efsdp, ep], between dp_replicate and tp. All DTensors share the root mesh."""
    sizes = (world["shard"].size() // plan.ep, plan.ep)
    before = ("dp_replicate",) if plan.dp_replicate > 1 else ()
    after = ("tp",) if plan.tp > 1 else ()
    index = (world.mesh_dim_names or ()).index("shard")  # torch 2.11 takes a number only
    return world._unflatten(index, sizes, ("efsdp", "ep"))[(*before, "efsdp", "ep", *after)]


def _find_group(grid: Grid, axes: Sequence[str], world: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the group of the ranks that differ only along these axes; an existing one if possible."""
    assert dist.group.WORLD is not None
    peers = grid.peers(axes)
    if len(peers) == 1:
        return dist.group.WORLD
    if world is not None:
        for name in world.mesh_dim_names or ():
            if grid.peers(MESH_AXES[name]) == peers:
                return world.get_group(name)
    mine, _ = dist.new_subgroups_by_enumeration(peers, group_desc="_".join(axes))  # type: ignore[no-untyped-call]
    return mine  # type: ignore[no-any-return]


def start_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dist.Work | None:
    """Begin an all-reduce in place. Collective. None for one rank alone, which with Gloo would wait for a thread."""
    if dist.get_world_size(group) == 1:
        return None
    work: dist.Work | None = dist.all_reduce(tensor, op, group, async_op=True)
    return work


def wait_for(works: Iterable[dist.Work | None]) -> None:
    """Wait for operations. Elsewhere a wait that a loss has not ended is not found: `LossWatch` looks for it."""
    for work in filter(None, works):
        work.wait()


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """`start_all_reduce`, and wait until the result may be used. Collective."""
    wait_for([start_all_reduce(tensor, group, op)])
