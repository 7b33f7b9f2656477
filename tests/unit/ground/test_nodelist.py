"""Slurm's host lists, compared with names written by hand."""

import pytest

from echelon.ground.errors import ConfigError
from echelon.ground.foreign_launchers import expand_nodelist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("gpu-a", ["gpu-a"]),
        ("gpu-a,gpu-b", ["gpu-a", "gpu-b"]),
        ("n[1-3,07],gpu-a", ["n1", "n2", "n3", "n07", "gpu-a"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("n[5]", ["n5"]),
        ("n[3,1-2]", ["n3", "n1", "n2"]),
        ("[1-2]", ["1", "2"]),
        ("n[1-2].cluster.local", ["n1.cluster.local", "n2.cluster.local"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1,3],b,c[2-3]x", ["a1", "a3", "b", "c2x", "c3x"]),
        ("10.0.0.7,10.0.0.8", ["10.0.0.7", "10.0.0.8"]),
        (" n1 , n2 ", ["n1", "n2"]),
    ],
)
def test_names(text, names):
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["n[1-3", "n]1[", "n[]", "n[3-1]", "n[a-b]", "n[1-2-3]", "n[1,,2]", "n[[1]]", "n 1"])
def test_an_invalid_list_is_named(text):
    with pytest.raises(ConfigError, match=r"is not a (Slurm node list|node range)"):
        expand_nodelist(text)
