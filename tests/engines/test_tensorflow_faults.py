"""`echelon drill` with engine=tensorflow: killed processes, a hang, a signal, a full disk, NaN."""

from pathlib import Path

import pytest

from tests.engines.engine_drill import assert_every_fault_is_survived

pytest.importorskip("keras_hub")
pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_every_fault_is_survived(tmp_path: Path, strategy: str) -> None:
    """The losses are those of a run without faults, bit for bit."""
    settings = ("engine=tensorflow", f"tensorflow.strategy={strategy}", "parallel=ddp")
    assert_every_fault_is_survived(tmp_path, *settings)
