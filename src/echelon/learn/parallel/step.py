"""Forward and backward over a step's microbatches, in one stage, and what an engine asks of a parallel model for it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.model.router import RouterTap
from echelon.learn.model.seeds import derive_seed, seed_generators
from echelon.learn.model.sharding import free_gradients
from echelon.learn.objectives.objective import Objective, StepSums, count_measures, training_sums
from echelon.learn.objectives.outputs import OutputsFn


class ForwardBackward(Protocol):
    """Runs a step's microbatches and leaves gradients of sum(loss + strength * router loss) / num_targets."""

    def __call__(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> StepSums:
        """Collective. Returns this rank's sums."""


class Parallel(Protocol):
    """A model made parallel over some ranks.

    Attributes:
        num_rehearsals: the number of steps with reduced gradients until memory for gradients is where it will stay.
        num_rehearsed: microbatches that need as much memory as a step of many: the second one finds the gradients of
            the first, and a pipeline keeps the activations of several.
        stage_of: the index of the pipeline stage of each module, by its name in the decoder; empty without a pipeline.
        counted_elsewhere: names of parameters whose gradients another stage counts in the global norm.
    """

    num_rehearsals: int
    num_rehearsed: int
    stage_of: Mapping[str, int]
    counted_elsewhere: frozenset[str]

    def clear_gradients(self) -> None:
        """Forget the gradients, so that the next backward pass begins a new sum."""

    def isolated(self) -> AbstractContextManager[None]:
        """Scope of microbatches that send nothing: the memory and the order of a real pass, with meaningless values.

        A rank may fail in it without a peer that waits for it in a collective. After an error the module must be built
        again.
        """

    def evaluation(self) -> AbstractContextManager[Callable[[Microbatch, OutputsFn], Tensor]]:
        """Scope of forward passes without gradients; leaves parameters as training expects them.

        The passes are collective where the model is divided; every rank gets the result.
        """

    def begin_step(self, step: int) -> None:
        """Tell the index of the step whose microbatches follow."""

    def reduce(self) -> None:
        """Sum what the backward passes of a step have left over the ranks, if they have not done so themselves."""

    def settle(self, commit: Tensor) -> None:
        """Keep what was not sent of the gradients for later steps, where `commit` (a boolean scalar) is true."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the live tensors of a checkpoint beside weights and optimizer: see `Reducer.tensors`."""

    def waiting(self) -> float | None:
        """Return the share of the last step in which this rank waited for other stages; None without a pipeline."""


class DataParallel(Parallel, Protocol):
    """A module made parallel over the data axes."""

    module: nn.Module

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """Scope of a forward pass and its backward pass; gradients are final after the one with `is_last`."""

    def backward(self, sums: Tensor, weights: Tensor) -> None:
        """Add the gradients of the weighted sum of what the module returned in the scope before."""


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
            rank = () if microbatch.part is None else (microbatch.part.rank,)
            seed = derive_seed(self._seed, step, int(microbatch.batch_indices[0]), *rank)
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


class SendsWhole(Parallel):
    """What holds for every parallelism that sends gradients whole."""

    @override
    def begin_step(self, step: int) -> None:
        """Nothing to do."""

    @override
    def reduce(self) -> None:
        """Nothing to do."""

    @override
    def settle(self, commit: Tensor) -> None:
        """Nothing to do."""

    @override
    def tensors(self) -> Mapping[str, Tensor]:
        return {}


class Undivided(SendsWhole, DataParallel):
    """What holds for every parallelism in which each rank runs all layers."""

    stage_of: Mapping[str, int] = {}
    counted_elsewhere: frozenset[str] = frozenset()
    num_rehearsals, num_rehearsed = 1, 2
    _parameters: list[nn.Parameter]

    @override
    def clear_gradients(self) -> None:
        """Free their memory."""
        free_gradients(self._parameters)

    @override
    def backward(self, sums: Tensor, weights: Tensor) -> None:
        sums.backward(weights)  # type: ignore[no-untyped-call]

    @override
    def waiting(self) -> float | None:
        return None
