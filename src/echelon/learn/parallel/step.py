"""Forward and backward over a step's microbatches, in one stage."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.model.router import RouterTap
from echelon.learn.model.seeds import derive_seed, seed_generators
from echelon.learn.objectives.objective import Objective, StepSums, count_measures, training_sums
from echelon.learn.parallel.protocol import DataParallel


class ForwardBackward(Protocol):
    """Runs a step's microbatches and leaves gradients of sum(loss + strength * router loss) / num_targets."""

    def __call__(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> StepSums:
        """Collective. Returns this rank's sums."""


class SingleStage(ForwardBackward):
    """Every rank runs the whole depth of the model, one microbatch after the other."""

    def __init__(
        self, parallel: DataParallel, seed: int, router_strength: float | None = None, tap: RouterTap | None = None
    ) -> None:
        """`router_strength`: the factor on the router loss, whose logits `tap` delivers; None where none is trained."""
        self._parallel = parallel
        self._seed = seed
        self._router_strength = router_strength
        self._tap = tap

    @override
    def __call__(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> StepSums:
        factors = loss_factors(objective, self._router_strength, num_targets.device)
        total = torch.zeros_like(factors, dtype=torch.float64)
        compute = training_sums(objective)
        for index, microbatch in enumerate(microbatches):
            # Random state is not saved but derived, so that dropout is the same after a resume.
            # Ranks that share a sequence hold other positions of it.
            place = () if microbatch.part is None else (microbatch.part.rank,)
            seed = derive_seed(self._seed, step, int(microbatch.batch_indices[0]), *place)
            seed_generators(seed, num_targets.device)
            is_last = index == len(microbatches) - 1
            with record_function("echelon forward"), self._parallel.microbatch(is_last):
                sums = self._parallel.module(microbatch, compute)
            with record_function("echelon backward"):
                self._parallel.backward(sums, poison_if_not_finite(factors, sums) / num_targets)
            total += sums.detach()
        if self._tap is None:
            return StepSums(total[0], measures=total[2:])
        return StepSums(total[0], total[1], self._tap.take_expert_tokens(total.device), total[2:])


def loss_factors(objective: Objective, router_strength: float | None, device: torch.device) -> Tensor:
    """Return the factors of the gradients of `training_sums`: 1 for the loss, the strength of the router loss, 0s."""
    factors = torch.zeros(2 + count_measures(objective), device=device)
    factors[0].fill_(1.0)
    factors[1].fill_(router_strength or 0.0)
    return factors


def poison_if_not_finite(factors: Tensor | float, sums: Tensor) -> Tensor:
    """Return the factors that multiply the gradients of the sums, but NaN where a sum is not finite.

    A loss can be infinite while its gradient is finite. NaN makes every gradient NaN, and so is the norm that all ranks
    see, which keeps the step from being applied. Nothing is read on the host, so no rank waits for its device.
    """
    return factors + 0 * sums.detach()  # 0 * loss is 0, or NaN if the loss is infinite or NaN
