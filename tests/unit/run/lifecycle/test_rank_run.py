"""Whether the end of a start is that of the run: then its numbers are shown."""

import pytest

from echelon.ground.stop_request import StopRequest
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.rank_run import goes_on
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
