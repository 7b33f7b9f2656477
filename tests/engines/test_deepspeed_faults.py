"""`echelon drill` with engine=deepspeed: killed processes, a hang, a signal, a full disk, NaN."""

from pathlib import Path

import pytest

from tests.engines.engine_drill import assert_every_fault_is_survived

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_every_fault_is_survived(tmp_path: Path) -> None:
    """The losses are those of a run without faults, bit for bit."""
    assert_every_fault_is_survived(tmp_path, "engine=deepspeed", "parallel=zero2")
