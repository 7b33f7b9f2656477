"""What a run minimises: losses are summed, and divided once by the global number of terms."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from echelon.ground.extensions import build_named, check_options, check_parameters, find_named, is_extension
from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.loss_function import LossFn, name_of
from echelon.learn.objectives.outputs import DecoderOutputs, OutputsFn, RunFn
from echelon.recipe.names import OBJECTIVES
from echelon.recipe.objective import ObjectiveConfig

_KEY = "objective.name"
_PLACES = {name: row.place for name, row in OBJECTIVES.items()}
_PARAMETERS = ("logits", "labels", "extra")
_FORM = "give it these parameters, or name a class like echelon's Objective"
# The members that an object which is not derived from `Objective` may lack.
_OPTIONAL = ("labels",)


@dataclass(frozen=True)
class StepSums:
    """What a step's microbatches add up to on this rank: fp64 scalars on the device.

    `loss` is the objective's alone. `router`: the balance losses of sequences, each times its targets; None where no
    router loss is trained. `expert_tokens`: the tokens of each router's experts, [routers, experts]; None likewise. A
    router is counted where its pipeline stage is. `measures`: those of a MeasuredObjective.
    """

    loss: Tensor
    router: Tensor | None = None
    expert_tokens: Tensor | None = None
    measures: Tensor | None = None


class Objective(ABC):
    """A loss that is a sum over countable terms: target tokens for language modelling, pairs for DPO.

    A subclass defines `loss_sum`. The other methods hold for a sum over labelled tokens; override `count` and
    `token_weights` together for other terms, `measures` and `evaluation_sums` together for more metrics, and
    `batch_means` and `batch_sums` for a loss of more than its own terms.
    """

    needs_reference: bool = False
    """Whether it needs a reference model: the weights that training started from."""
    unit: str = "target_tokens"
    """The name of its terms in eval rows: target_tokens, pairs, answers, or texts."""
    measures: tuple[str, ...] = ()
    """The metrics that evaluation reports besides the loss: the columns of `evaluation_sums` after the first."""
    labels: tuple[str, ...] = ()
    """The labels of texts that evaluation counts. For each there are three more columns of `evaluation_sums`: the texts
    that have it, those that the model gives it, and those of which both is true."""

    @property
    def batch_means(self) -> tuple[str, ...]:
        """What the loss must know of the whole batch before: means over its terms on all ranks, in `Microbatch.extra`.

        In training the batch is that of the step, in evaluation the held-out set. One value per sequence, fp32.
        """
        return ()

    def count(self, batch: Microbatch) -> Tensor:
        """Count the terms of `loss_sum` for this microbatch on this rank: int64 scalar on the batch's device."""
        return (batch.labels != IGNORE).sum()

    def token_weights(self, batch: Microbatch) -> Tensor:
        """Distribute the count over its tokens: weights [batch, seq], fp32, which add up to the count."""
        return (batch.labels != IGNORE).float()

    def batch_sums(self, batch: Microbatch, run: RunFn) -> Tensor:
        """Return the sum of each of `batch_means` over the terms of a microbatch on this rank: [batch_means].

        Args:
            run: runs a forward pass without gradient and dropout; collective, so it must be called on every rank, or on
                none. A sum that needs no model leaves it.
        """
        return torch.zeros(len(self.batch_means), device=batch.labels.device)

    @abstractmethod
    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss, an fp32 scalar, connected to every trained parameter even if the count is zero."""

    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss and the sum of each measure over the same terms: [1 + measures + 3 labels], fp32."""
        return self.loss_sum(outputs, batch).reshape(1)


def sequence_weights(labels: Tensor) -> Tensor:
    """Return equal weights for the labelled tokens of a sequence, [batch, seq], fp32, which add up to 1, or to 0."""
    labelled = (labels != IGNORE).float()
    return labelled / labelled.sum(1, keepdim=True).clamp(min=1)


class MeasuredObjective(Objective):
    """An objective of which a training step adds up more than the loss."""

    step_measures: tuple[str, ...] = ()
    """What it adds up: the columns of `step_sums` after the first, and of `CountedSums.measures`."""

    @abstractmethod
    def step_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss and the sum of each of `step_measures`: [1 + step_measures], fp32.

        The loss alone is differentiated.
        """

    @override
    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the summed loss."""
        return self.step_sums(outputs, batch)[0]


class LogitsLoss(Objective):
    """The sum of a loss function over labelled tokens. It gets chunks of tokens, never all logits at once."""

    def __init__(self, function: LossFn) -> None:
        """`function`: see LossFn."""
        self._function = function

    @override
    def __str__(self) -> str:
        return name_of(self._function)

    @override
    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Return the sum of the function over the tokens of the microbatch."""
        return outputs.logits_loss_sum(self._function, batch.labels, batch.extra)


def find_labels(objective: Objective) -> tuple[str, ...]:
    """Return the labels of texts that an objective counts; none for an object that does not name any."""
    return getattr(objective, "labels", ())


def as_objective(loss: Objective | LossFn) -> Objective:
    """Return an objective unchanged, and a function (logits, labels, extra) as the objective that sums it over tokens.

    Raises TypeError for anything else, and for an object with only some members of an objective.
    """
    if isinstance(loss, Objective):
        return loss
    if isinstance(loss, type) or not callable(getattr(loss, "loss_sum", loss)):
        raise TypeError(f"{loss!r} is not a loss; use an Objective, or a function of ({', '.join(_PARAMETERS)}).")
    if not hasattr(loss, "loss_sum"):
        return LogitsLoss(loss)
    required = [name for name in vars(Objective) if not name.startswith("_") and name not in _OPTIONAL]
    if missing := [name for name in required if not hasattr(loss, name)]:
        raise TypeError(
            f"{type(loss).__name__} has no {missing[0]}; derive it from "
            "echelon.learn.objectives.objective.Objective, which has defaults."
        )
    return cast(Objective, loss)


def find_loss(name: str) -> LossFn | None:
    """Import the loss function that `objective.name` names; None if it names anything but a function.

    So a class is an objective and a function is a loss, whose parameters after the first three are options. Raises
    ConfigError for a function with other parameters: it is never called.
    """
    loss = find_named(_KEY, name, _PLACES)
    if not is_extension(name) or not inspect.isfunction(loss):
        return None
    check_parameters(_KEY, name, loss, _PARAMETERS, "a loss", _FORM)
    return loss


def build_objective(config: ObjectiveConfig) -> Objective:
    """Build the objective that the recipe names, a class or a loss function. Raises ConfigError."""
    if (function := find_loss(config.name)) is not None:
        check_options(_KEY, config.name, function, len(_PARAMETERS), config.options)
        return LogitsLoss(partial(function, **(config.options or {})))
    return as_objective(build_named(_KEY, config.name, _PLACES, Objective, config, options=config.options))


def count_measures(objective: Objective) -> int:
    """Return how many sums a training step has besides the losses."""
    return len(objective.step_measures) if isinstance(objective, MeasuredObjective) else 0


def training_sums(objective: Objective) -> OutputsFn:
    """Return the function of a training step: summed loss, summed router loss and measures, [2 + count_measures]."""

    def compute(outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        if isinstance(objective, MeasuredObjective):
            sums = objective.step_sums(outputs, batch)
        else:
            sums = objective.loss_sum(outputs, batch).reshape(1)
        router = outputs.router_loss_sum(objective.token_weights(batch)).reshape(1)
        return torch.cat([sums[:1], router, sums[1:].detach()])

    return compute


def with_batch_means(
    objective: Objective,
    microbatches: Sequence[Microbatch],
    num_terms: Tensor,
    run: RunFn,
    add_up: Callable[[Tensor], object],
) -> Sequence[Microbatch]:
    """Return this rank's microbatches of a step with the `batch_means` in `extra`, if they have none. Collective.

    Args:
        num_terms: the terms on all ranks, at least 1.
        run: see `Objective.batch_sums`.
        add_up: sums a tensor in place over the ranks with other sequences.
    """
    names = objective.batch_means
    if all(name in microbatch.extra for microbatch in microbatches for name in names):
        return microbatches
    moved = [batch.to(num_terms.device) for batch in microbatches]
    sums = torch.stack([objective.batch_sums(batch, run).double() for batch in moved]).sum(0)
    add_up(sums)
    return put_means(objective, microbatches, sums / num_terms)


def put_means(objective: Objective, microbatches: Sequence[Microbatch], means: Tensor) -> Sequence[Microbatch]:
    """Return the microbatches with known means, [batch_means], one value for each sequence."""
    named = list(zip(objective.batch_means, means.float(), strict=True))
    return [
        batch.with_extra(**{name: mean.expand(len(batch.labels)) for name, mean in named}) for batch in microbatches
    ]
