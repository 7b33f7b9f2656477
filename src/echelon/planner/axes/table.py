"""All axes of parallelism, and what they make together of a model."""

from collections.abc import Iterable, Sequence

from echelon.planner.axes.axis import Axis, RankLoad
from echelon.planner.axes.context import CONTEXT
from echelon.planner.axes.data import DATA
from echelon.planner.axes.expert import EXPERT
from echelon.planner.axes.pipeline import PIPELINE, list_loads
from echelon.planner.axes.tensor import TENSOR
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import AXIS_ORDER, ParallelPlan

LAYER_AXES: tuple[Axis, ...] = (TENSOR, CONTEXT, EXPERT)
"""The axes whose ranks compute a layer together, and so communicate in each."""
AXES: tuple[Axis, ...] = (DATA, *LAYER_AXES, PIPELINE)
"""Every axis, in the order of reports."""
MODEL_AXES: Sequence[Axis] = [axis for axis in AXES if axis.name in AXIS_ORDER]
"""The axes whose ranks read the same sequences: each divides the number of data-parallel ranks."""


def divide_shape(shape: ModelShape, plan: ParallelPlan) -> ModelShape:
    """Return the part of a model, with all its layers, that one rank stores and computes before it is sharded."""
    for axis in AXES:
        shape = axis.divide(shape, plan)
    return shape


def count_absent(part: ModelShape, plan: ParallelPlan) -> int:
    """Parameters of each layer of a rank's part that it never has, also not gathered."""
    return sum(axis.count_absent(part, plan) for axis in AXES)


def rank_loads(shape: ModelShape, plan: ParallelPlan, hidden_bytes: int = 0) -> list[RankLoad]:
    """Return what each rank of those that divide the layers holds; a single load if none do.

    Args:
        hidden_bytes: of the hidden states of one microbatch.
    """
    return list_loads(divide_shape(shape, plan), plan, hidden_bytes)


def keep_heaviest(loads: Iterable[RankLoad]) -> list[RankLoad]:
    """Of ranks with the same part of the model, the one that keeps the activations of the most microbatches."""
    most: dict[tuple[int, bool, int], RankLoad] = {}
    for load in loads:
        key = (id(load.shape), load.has_head, load.received_bytes)  # equal stages have the same shape object
        if key not in most or most[key].num_kept < load.num_kept:
            most[key] = load
    return list(most.values())
