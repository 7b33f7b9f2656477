"""A rank that lives on when another one is lost; tests/faults/test_replaced_processes.py has whole jobs."""

import pytest
import torch.distributed as dist

from echelon.ground.variables import Place
from echelon.learn.distributed.mesh import ViewChanged
from echelon.run.lifecycle.kept_rank import RankGroup
from echelon.run.supervise.board import MembershipStore, View, name_member


def test_a_loss_while_a_group_forms_leaves_the_next_one_its_name():
    """A new process has formed no group before, and the others must look for it under the same name."""
    store = dist.HashStore()
    board, members = MembershipStore(store), tuple(name_member(rank, 0, 0) for rank in range(2))
    board.end(0)
    with pytest.raises(ViewChanged), RankGroup(board, store, View(0, members), Place(0, 2, 0, 2), "gloo") as group:
        group.form()
    with RankGroup(board, store, View(1, members[:1]), Place(0, 1, 0, 1), "gloo") as group:
        group.form()
        assert dist.group.WORLD.group_name == "0"
