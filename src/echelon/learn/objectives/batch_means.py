"""What a loss must know of the whole batch of a step before it can be computed: means over the terms of all ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.objective import Objective
from echelon.learn.objectives.outputs import RunFn


def with_batch_means(
    objective: Objective,
    microbatches: Sequence[Microbatch],
    num_terms: Tensor,
    run: RunFn,
    add_up: Callable[[Tensor], object],
) -> Sequence[Microbatch]:
    """Return the microbatches of a step with the `batch_means` of the objective in `extra`. Collective.

    Means that are there already are kept.

    Args:
        microbatches: those of this rank.
        num_terms: the terms on all ranks, at least 1.
        run: see `Objective.batch_sums`.
        add_up: sums a tensor in place over the ranks with other sequences.
    """
    names = objective.batch_means
    if all(name in microbatch.extra for microbatch in microbatches for name in names):
        return microbatches
    here = (microbatch.to(num_terms.device) for microbatch in microbatches)
    sums = torch.stack([objective.batch_sums(microbatch, run).double() for microbatch in here]).sum(0)
    add_up(sums)
    return put_means(objective, microbatches, sums / num_terms)


def put_means(objective: Objective, microbatches: Sequence[Microbatch], means: Tensor) -> Sequence[Microbatch]:
    """Return the microbatches with known means, [batch_means], one value for each sequence."""
    named = dict(zip(objective.batch_means, means.float(), strict=True))
    return [
        microbatch.with_extra(**{name: mean.expand(len(microbatch.labels)) for name, mean in named.items()})
        for microbatch in microbatches
    ]
