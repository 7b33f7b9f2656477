"""Sizes in bytes as text."""

import pytest

from echelon.ground.sizes import render_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10.24 * 2**20, "10.2 MiB"),
        (9.996 * 2**20, "10.0 MiB"), (99.96 * 2**20, "100 MiB"), (80e9, "74.5 GiB"), (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000 TiB"), (1023.9 * 2**20, "1024 MiB"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits_and_a_binary_unit(num_bytes, text):
    assert render_bytes(num_bytes) == text
