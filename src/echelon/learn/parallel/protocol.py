"""What an engine asks of a model that is parallel over some ranks, and the answers that most kinds have in common."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.outputs import OutputsFn


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

    @override
    def backward(self, sums: Tensor, weights: Tensor) -> None:
        sums.backward(weights)  # type: ignore[no-untyped-call]

    @override
    def waiting(self) -> float | None:
        return None
