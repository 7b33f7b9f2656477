"""Whether the end of a start is that of the run, and a rank that lives on when another one is lost."""

import pytest
import torch.distributed as dist

from echelon.ground.stop_request import StopRequest
from echelon.ground.variables import Place
from echelon.learn.distributed.mesh import ViewChanged
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.kept_rank import RankGroup
from echelon.run.lifecycle.rank_run import goes_on
from echelon.run.supervise.board import MembershipStore, View, name_member
from echelon.run.supervise.outcome import LEAVING_VARIABLE


@pytest.mark.parametrize(
    ("may_leave", "agreed", "told", "expected"),
    [
        (True, "SIGTERM", False, True),  # an agent ends the ranks: a machine joins or leaves
        (True, "SIGTERM", True, False),  # somebody has told this machine, or all, to stop
        (True, "budget.max_hours", False, False),
        (True, None, False, False),  # an error
        (False, "SIGTERM", False, False),
    ],
)
def test_a_run_goes_on_if_only_the_machines_change(tmp_path, monkeypatch, may_leave, agreed, told, expected):
    monkeypatch.setenv(LEAVING_VARIABLE, str(int(may_leave)))
    folder = RunFolder(tmp_path / "run", tmp_path)
    if told:
        folder.stop_path.write_text("SIGTERM")
    stop = StopRequest()
    stop.agreed = agreed
    assert goes_on(folder, stop) is expected


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
