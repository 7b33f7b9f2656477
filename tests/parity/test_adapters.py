"""Adapters under every data-parallel strategy: the curve of one process, whose own is that of PEFT."""

import pytest

from test_parity import check
from training import Row, with_ranks

pytestmark = pytest.mark.dist

ROWS = [
    with_ranks(Row(parallel=parallel, adapter=adapter), ranks)
    for adapter, ranks, parallel in (
        ("lora", 2, "ddp"), ("lora", 2, "zero1"), ("lora", 4, "fsdp"),
        ("qlora", 2, "ddp"), ("qlora", 4, "zero1"), ("qlora", 2, "fsdp"),
        ("dora", 4, "ddp"), ("dora", 2, "zero1"), ("dora", 2, "fsdp"), ("pissa", 2, "fsdp"), ("rslora", 2, "ddp"),
    )
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_process(workers, references, text, tmp_path, row):
    check(workers, references, text, tmp_path, row)
