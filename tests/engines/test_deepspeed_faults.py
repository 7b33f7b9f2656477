"""`echelon drill` with engine=deepspeed: killed processes, a hang, a signal, a full disk, NaN."""

from pathlib import Path

import pytest

from engine_drill import drill

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_every_fault_is_survived(tmp_path: Path) -> None:
    """The losses are those of a run without faults, bit for bit."""
    findings = drill(tmp_path, "engine=deepspeed", "parallel=zero2")
    assert all(each["identical"] for each in findings.values()), findings
    assert findings["a rank killed"]["starts"] == 1, "restarted by itself"
