"""How many targets a step has: what its summed loss is divided by."""

from typing import NamedTuple

from torch import Tensor


class Targets(NamedTuple):
    """The number of targets of a step, int64 scalars on the device. The loss is divided by `shared`."""

    own: Tensor
    """On this rank."""
    shared: Tensor
    """On all ranks of this replica."""
