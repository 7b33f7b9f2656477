"""benchmarks/peers.py: rows with the targets of echelon's own samples, right figures, and unequal losses fail it."""

import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest

from echelon.learn.objectives.loss import IGNORE
from peer_report import compare_losses, find_differences, render_picture, render_table
from peer_sides import Rows
from peers import write_rows

FALLING = [9.0 - 0.01 * step for step in range(200)]


def make_results(**losses):
    """Two turns of each side with 1,024 tokens a step: steps of 0.5 to 2 s, and of the peers twice that."""

    def run(name, series):
        slower = 1 if name == "echelon" else 2
        turns = [[slower * seconds for seconds in (0.5, 1.0, 2.0)]] * 2
        return {"turns": turns, "group": 0, "peak": 2**30, "start": 4.25, "losses": series}

    sides = [
        {"engine": name, "mode": "ddp", "variant": "usual", "name": f"{name}, ddp, usual", "words": "as <shipped>"}
        for name in losses
    ]
    return {
        "machine": "a machine", "work": "512 tokens", "tokens": 1024, "turns": 2, "limits": [4096.0, 4096.0],
        "search": {"fabric, ddp": {"eager": 1.5}}, "remarks": [], "sides": sides,
        "runs": {f"{name}, ddp, usual": [run(name, series)] for name, series in losses.items()},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "is_small"),
    [
        (FALLING, True),
        ([loss + 0.004 * (-1) ** step for step, loss in enumerate(FALLING)], True),
        ([FALLING[0] + 0.05, *FALLING[1:]], False),  # other weights
        ([*FALLING[:100], FALLING[100] + 0.2, *FALLING[101:]], False),  # another batch
        ([9.0 - 0.0095 * step for step in range(200)], False),  # another learning rate
    ],
    ids=["equal", "rounding", "first", "one step", "slower"],
)
def test_losses_of_other_work_are_found(losses, is_small):
    assert compare_losses(losses, FALLING).is_small is is_small


def test_a_shorter_run_is_compared_over_its_steps():
    assert compare_losses(FALLING[:20], FALLING).largest == 0


def test_a_side_with_other_losses_fails_the_comparison():
    other = [loss + 0.3 for loss in FALLING]
    found, remarks = find_differences(make_results(echelon=FALLING, fabric=other, expert=FALLING), [])
    assert [remark.split(":")[0] for remark in remarks] == ["fabric, ddp, usual"]
    assert "failed" in remarks[0]
    assert found["fabric, ddp, usual"].largest == pytest.approx(0.3)
    assert found["echelon, ddp, usual"].largest == 0


def test_a_side_alone_is_compared_with_itself():
    results = make_results(echelon=FALLING)
    results["runs"]["echelon, ddp, usual"].append(results["runs"]["echelon, ddp, usual"][0] | {"losses": [8.0]})
    assert "echelon, ddp, usual: failed" in find_differences(results, [])[1][0]


def test_the_table_has_the_figures_by_hand():
    results = make_results(echelon=FALLING, expert=FALLING)
    differences, _ = find_differences(results, [])
    lines = render_table(results, differences).splitlines()
    ours, theirs = (
        [cell.strip() for line in lines if line.startswith(f"| {name}") for cell in line.split("|")[3:-1]]
        for name in ("echelon", "expert")
    )
    assert ours == [
        "1,024 (1,024 to 1,024)", "1.00 (1.00 to 1.00)", "25%", "0.500", "1.000", "2.000", "1,024", "4.2 (4.2 to 4.2)",
        "0.0000",
    ]  # fmt: skip
    assert theirs[:2] == ["512 (512 to 512)", "2.00 (2.00 to 2.00)"]


def test_the_picture_is_well_formed_and_to_scale():
    picture = ET.fromstring(render_picture(make_results(echelon=FALLING, expert=FALLING)))
    bars = [each for each in picture.iter("{http://www.w3.org/2000/svg}rect") if each.get("fill") != "white"]
    assert [float(bar.get("width")) for bar in bars] == [120.0, 60.0]  # a quarter and an eighth of the 480 of the limit


def test_what_follows_the_end_of_the_text_is_no_target(tmp_path):
    """The text ends with 6, and 0 fills up its last sequence."""
    inputs, labels = [[1, 2, 3, 4], [5, 6, 0, 0]], [[2, 3, 4, 5], [6, IGNORE, IGNORE, IGNORE]]
    write_rows(tmp_path / "rows.npy", SimpleNamespace(inputs=np.array(inputs), labels=np.array(labels)))
    rows = Rows(tmp_path / "rows.npy")
    assert [rows[number]["input_ids"].tolist() for number in range(len(rows))] == inputs
    for name in ("labels", "shift_labels"):  # the second is shifted in advance, the first only asks for a loss
        assert [rows[number][name].tolist() for number in range(len(rows))] == labels
