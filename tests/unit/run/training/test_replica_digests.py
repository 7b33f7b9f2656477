"""The hash of weights compared with a second implementation, and which rank is named."""

import pytest
import torch

from echelon.run.training import replicas
from echelon.run.training.replicas import ReplicaDifference, describe_differences, find_odd_ranks, hash_bits

WORD = 2**64 - 1


def mix(value):
    """SplitMix64's finalizer with Python integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)]
)
def test_equals_a_scalar_implementation(monkeypatch, dtype, word):
    monkeypatch.setattr(replicas, "_CHUNK", 7)
    tensor = torch.randn(5, 6, dtype=dtype).T
    bits = [int(each) & WORD for each in tensor.contiguous().flatten().view(word)]
    expected = sum(mix(each ^ (place * 0x9E3779B97F4A7C15 & WORD)) for place, each in enumerate(bits, start=1))
    assert int(hash_bits(tensor)) & WORD == expected & WORD


def test_every_bit_and_position_changes_the_hash():
    tensor = torch.randn(40)
    known = {int(hash_bits(tensor))}
    for place in (0, 17, 39):
        for bit in range(32):
            flipped = tensor.clone()
            flipped.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
            known.add(int(hash_bits(flipped)))
    known |= {int(hash_bits(tensor.roll(1))), int(hash_bits(tensor[:39])), int(hash_bits(-tensor))}
    assert len(known) == 1 + 3 * 32 + 3
    assert int(hash_bits(torch.tensor([0.0]))) != int(hash_bits(torch.tensor([-0.0])))


def test_the_rank_that_differs_from_the_majority_is_named_or_both_of_two():
    same, other, third = (1, 2, 3), (1, 9, 3), (1, 2, 8)
    assert find_odd_ranks(dict.fromkeys((0, 1, 2, 3), same)) == ()
    assert find_odd_ranks({0: same, 1: same, 2: other}) == (2,)
    assert find_odd_ranks({0: same, 1: other}) == (0, 1)
    assert find_odd_ranks({1: third, 3: other, 5: same}) == (1, 3, 5)
    message = describe_differences([ReplicaDifference((2,), (0, 1, 2), "norm", 1)], 7)
    assert message.startswith("after step 7: rank 2 has other weights than rank 0, 1, and all must be equal")
