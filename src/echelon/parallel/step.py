"""Forward and backward over a step's microbatches, in one stage."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from echelon.data.loader import Microbatch
from echelon.model.seeds import derive_seed
from echelon.objective import Objective
from echelon.parallel.data import DataParallel


class ForwardBackward(Protocol):
    """Runs a step's microbatches and leaves gradients of sum(loss) / num_targets on the parameters."""

    def __call__(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> Tensor:
        """Collective. Returns this rank's summed loss, an fp64 scalar on the device."""
        ...


class SingleStage:
    """Every rank runs the whole depth of the model, one microbatch after the other."""

    def __init__(self, parallel: DataParallel, seed: int) -> None:
        self._parallel = parallel
        self._seed = seed

    def __call__(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> Tensor:
        """See ForwardBackward."""
        total = torch.zeros((), dtype=torch.float64, device=num_targets.device)
        for index, microbatch in enumerate(microbatches):
            # Random state is not saved but derived, so that dropout is the same after a resume.
            torch.manual_seed(derive_seed(self._seed, step, int(microbatch.positions[0])))
            with self._parallel.microbatch(is_last=index == len(microbatches) - 1):
                loss = self._parallel.module(microbatch, objective)
            # 0 * loss is 0, or NaN for a loss that is not finite: then every gradient is NaN, and so is the norm that
            # all ranks see, which is what keeps such a step from being applied.
            loss.backward((1 + 0 * loss.detach()) / num_targets)
            total += loss.detach()
        return total
