"""What a replica keeps while its group is formed anew, and how it is sent to those that lack it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.learn.distributed.joint_group import together
from echelon.learn.distributed.objects import broadcast_object, gather_objects
from echelon.learn.model.sharding import local_part
from echelon.run.training.saver import RunContents
from echelon.run.training.state import GoodputState, JudgeState, SavedState
from echelon.run.training.trainer import Trainer


@dataclass
class HeldState:
    """The state of a run between two views, beside its tensors, which are in the engine.

    Attributes:
        saved: as in a checkpoint after the last committed step.
        owes_pause: whether the work that is due after that step may be unfinished.
        owes_save: whether a checkpoint was being written.
        rows: those of metrics.jsonl of the last step.
        stopped_by: what all replicas have agreed to stop for, if anything.
        is_whole: whether the tensors are those of `saved`: not once they are overwritten by those of a later step.
    """

    saved: SavedState
    owes_pause: bool
    owes_save: bool
    rows: tuple[dict[str, Any], ...]
    stopped_by: str | None
    is_whole: bool = True


def hold(trainer: Trainer) -> HeldState:
    """Return what this replica holds after its group has ended. Not collective."""
    step, accounting = trainer.train_step, trainer.accounting
    judge = step.judge.state_dict()
    saved = SavedState(
        train=trainer.state,
        judges=(JudgeState(judge["in_a_row"], tuple(judge["norms"])),),
        goodput=GoodputState(**accounting.goodput.state_dict()),
        sync=step.sync.state_dict(),
    )
    owes_save = trainer.owes_save or trainer.saver.store.is_saving
    return HeldState(saved, trainer.owes_pause, owes_save, tuple(accounting.latest), trainer.stop.agreed)


def heal(contents: RunContents, held: HeldState | None) -> HeldState | None:
    """Give every replica the state of one that has it; return it, or None if none has. Collective.

    Tensors are sent only if a replica lacks them or has those of another step: then each gets the same bits, each
    rank from the rank with the same index in its replica. Of
    replicas after the same step, one whose work after it may be unfinished is taken: the work is repeated by all.

    Under parameter servers the first one's state is taken, which is that of the rows it has written; workers pull the
    weights. If a server has no state, nothing was trained since this start.
    """
    meshes = contents.meshes
    group, membership = meshes.everyone, meshes.membership
    num_servers = 0 if membership is None else membership.num_essential
    mine = None if held is None else (held.saved.train.step, held.owes_pause, held.owes_save)
    everyone = gather_objects(mine, group)
    source = _choose_source(everyone, num_servers)
    if source is None:
        return None
    state = broadcast_object(held, group, source)
    assert state is not None
    if not num_servers and len({None if state_of_rank is None else state_of_rank[0] for state_of_rank in everyone}) > 1:
        _give_up(held, state.saved.train.step)
        _send(contents, source // (meshes.num_devices // meshes.grid.sizes["replica"]))
    contents.sync.load_state_dict(state.saved.sync)
    contents.judge.load_state_dict(asdict(state.saved.judges[0]))
    rows = tuple(row for row in state.rows if row["kind"] == "train" or not state.owes_pause)
    return replace(
        state, rows=rows, owes_save=any(state_of_rank is not None and state_of_rank[2] for state_of_rank in everyone)
    )


def _choose_source(everyone: Sequence[tuple[int, bool, bool] | None], num_servers: int) -> int | None:
    """The rank whose state all others take; None if none has any. See `heal`.

    `everyone`: the step of each rank, and whether it owes a pause and a save; None for one without state.
    """
    if num_servers:
        return None if None in everyone[:num_servers] else 0
    states = [state_of_rank for state_of_rank in everyone if state_of_rank is not None]
    return everyone.index(max(states)) if states else None


def _give_up(held: HeldState | None, step: int) -> None:
    """Say that what a replica holds is no longer whole, if the state after a later step is about to overwrite it."""
    if held is not None and held.saved.train.step < step:
        held.is_whole = False


def _send(contents: RunContents, source: int) -> None:
    """Overwrite every tensor of a checkpoint with that of one replica: each rank its part of it. Collective."""
    group = contents.meshes.outer
    assert group is not None, "some replica lacks what another one has"

    @torch.no_grad()
    def fill(tensors: Mapping[str, Tensor]) -> None:
        with together(group):  # stages of a pipeline have different numbers of tensors
            for name in sorted(tensors):
                part = local_part(tensors[name].detach())
                dense = part.contiguous()
                dist.broadcast(dense, group=group, group_src=source)
                part.copy_(dense)

    contents.engine.load(lambda tensors: contents.sync.load(tensors, fill))
