"""`echelon drill` with other engines: killed processes, a hang, a signal, a full disk, NaN."""

from pathlib import Path

import pytest

from tests.engines.engine_drill import assert_every_fault_is_survived

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize(
    ("engine", "package", "parallel"),
    [("deepspeed", "deepspeed", "zero2"), ("tensorflow", "keras_hub", "ddp"), ("horovod", "horovod", "ddp")],
)
def test_every_fault_is_survived(tmp_path: Path, engine: str, package: str, parallel: str) -> None:
    """The losses are those of a run without faults, bit for bit."""
    pytest.importorskip(package)
    assert_every_fault_is_survived(tmp_path, f"engine={engine}", f"parallel={parallel}")
