"""`echelon drill` with engine=tensorflow: killed processes, a hang, a signal, a full disk, NaN."""

from pathlib import Path

import pytest

from tests.engines.engine_drill import assert_every_fault_is_survived

pytest.importorskip("keras_hub")
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_every_fault_is_survived(tmp_path: Path) -> None:
    """The losses are those of a run without faults, bit for bit."""
    assert_every_fault_is_survived(tmp_path, "engine=tensorflow", "parallel=ddp")
