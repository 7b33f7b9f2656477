"""The rows that benchmarks/peers.py writes for the other trainers have the targets of echelon's own samples."""

from types import SimpleNamespace

import numpy as np

from echelon.learn.objectives.loss import IGNORE
from peer_sides import Rows
from peers import write_rows


def test_what_follows_the_end_of_the_text_is_no_target(tmp_path):
    """The text ends with 6, and 0 fills up its last sequence."""
    inputs, labels = [[1, 2, 3, 4], [5, 6, 0, 0]], [[2, 3, 4, 5], [6, IGNORE, IGNORE, IGNORE]]
    write_rows(tmp_path / "rows.npy", SimpleNamespace(inputs=np.array(inputs), labels=np.array(labels)))
    rows = Rows(tmp_path / "rows.npy")
    assert [rows[number]["input_ids"].tolist() for number in range(len(rows))] == inputs
    for name in ("labels", "shift_labels"):  # the second is shifted in advance, the first only asks for a loss
        assert [rows[number][name].tolist() for number in range(len(rows))] == labels
