"""One rank of a model that trains under a plan: what a training script of your own calls."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.checkpoints import Checkpoints, fill_from, find_checkpoint
from echelon.learn.data.feed import Feed, find_batch_place, open_feed
from echelon.learn.data.loader import BatchPlace, StepBatch
from echelon.learn.data.prepared import PreparedData
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.engines import Engine
from echelon.learn.engines.engine import Evaluation, Targets
from echelon.learn.evaluation import ModelPasses
from echelon.learn.model.model_folder import find_stops
from echelon.learn.objectives.loss_function import LossFn
from echelon.learn.objectives.objective import Objective, StepSums, build_objective
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe

if TYPE_CHECKING:
    from echelon.planner.memory_parts import MemoryParts
    from echelon.planner.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class CountedSums(StepSums):
    """The sums of a step on this rank, and its targets. `Learner.mean_loss` makes a loss of them."""

    targets: Targets
    num_tokens: int
    """Positions other than padding in this rank's part of the batch."""
    num_labels: int
    """Positions with a label in it."""
    batch_hash: int
    """Its term of the batch's hash."""

    @property
    def num_targets(self) -> Tensor:
        """The targets of all ranks, by which the gradients were divided: an int64 scalar on the device."""
        return self.targets.shared


@dataclass
class Learner(ModelPasses):
    """One rank of a model that trains under a plan: weights, optimizer and data, without a run around them.

    It writes no file unless `save` is called, and handles no signal. Every rank must call the collective methods in
    the same order. A step is `forward_backward`, `clip` and `step`.
    """

    recipe: Recipe
    plan: ParallelPlan
    """The plan that runs: with `train.micro_batch_size: auto` it may have a smaller micro batch than the given one."""
    config: PretrainedConfig
    """The model's HF config."""
    meshes: Meshes
    """The process groups of this rank, and its place in them."""
    device: torch.device
    engine: Engine
    data: PreparedData
    """The recipe's data and tokenizer."""
    memory: "MemoryParts | None" = None
    """The memory that the rehearsed step needed, by part; None if the engine does not measure it."""
    num_steps: int = field(default=0, init=False)
    """How many steps were taken, counting those before the checkpoint that was loaded."""
    _norm: Tensor | None = field(default=None, init=False)
    _feed: Feed | None = field(default=None, init=False)
    _checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        self._checkpoints = Checkpoints(self.recipe.checkpoint.keep_last)

    @classmethod
    def build(cls, recipe: Recipe, plan: ParallelPlan | None = None) -> "Learner":
        """Build the model, its shards and its optimizer with initial weights, and rehearse a step. Collective.

        Joins the process group that exists; else that of torchrun (RANK and WORLD_SIZE in the environment); else this
        process trains alone. Data that is not prepared yet is prepared by the first process, while others wait.

        Args:
            recipe: its sections model, tokenizer, data, objective, train, optim, parallel and engine count; those
                about the operation of a run do not.
            plan: how the ranks divide the work; None: as `echelon plan` chooses.

        Raises:
            ConfigError, PlanError, DataError: as `echelon train`, the same error on every rank.
        """
        # Here, because a loop that is given a learner needs nothing that builds one.
        from echelon.learn.micro_batch import build_rehearsed
        from echelon.learn.preparation import open_recipe

        spec, data = open_recipe(recipe, plan)
        engine, plan, memory = build_rehearsed(recipe, spec, data)
        return cls(recipe, plan, spec.config, spec.meshes, spec.device, engine, data, memory)

    @cached_property
    @override
    def objective(self) -> Objective:
        return build_objective(self.recipe.objective)

    @cached_property
    def shape(self) -> "ModelShape":
        """The sizes of the model."""
        return build_shape(self.config.to_dict(), self.recipe.adapter.is_adapter)

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The recipe's tokenizer."""
        return self.data.tokenizer

    @cached_property
    @override
    def stops(self) -> list[int]:
        return find_stops(self.config, self.data.manifest.stops)

    @cached_property
    @override
    def place(self) -> BatchPlace:
        return find_batch_place(self.recipe, self.plan, self.meshes)

    def open_feed(self) -> Feed:
        """Open this rank's batches of the recipe's data, in the order of a run. The caller closes it."""
        return open_feed(self.recipe, self.data, self.place)

    def batch(self, step: int) -> StepBatch:
        """Return this rank's part of the batch of a step, counted from 0, as `echelon train` feeds it.

        The next two are read ahead in a thread, so steps are best asked for in their order.
        """
        if self._feed is None:
            self._feed = self.open_feed()
        return self._feed.batch(step)

    def count_targets(self, batch: StepBatch, loss: Objective | LossFn | None = None) -> Targets:
        """Count a step's targets over all microbatches, as tensors on the device. Collective."""
        objective = self.find_objective(loss)
        count = torch.stack([objective.count(microbatch) for microbatch in batch.microbatches]).sum()
        shared = count.clone()
        self.meshes.sum_over_readers(shared)
        return Targets(count, shared)

    def forward_backward(
        self, batch: StepBatch, loss: Objective | LossFn | None = None, step: int | None = None
    ) -> CountedSums:
        """Compute the gradients of the mean loss of a batch, over the targets of all ranks. Collective.

        Targets are counted over all microbatches and ranks, and the summed loss is divided once by their number. So
        the gradients do not depend on how the batch is divided.

        Args:
            batch: this rank's part.
            loss: None for the recipe's objective. Every step may have another one.
            step: the number from which dropout is seeded; None for `batch.step`.
        """
        objective = self.find_objective(loss)
        with record_function("echelon data"):
            batch = batch.to(self.device)
        targets = self.count_targets(batch, objective)
        number = batch.step if step is None else step
        self._norm = None
        # A batch without any target has a loss of 0, which must not be divided by 0.
        sums = self.engine.forward_backward(number, batch.microbatches, targets.shared.clamp(min=1), objective)
        return CountedSums(
            sums.loss,
            sums.router,
            sums.expert_tokens,
            sums.measures,
            targets=targets,
            num_tokens=batch.num_tokens,
            num_labels=batch.num_labels,
            batch_hash=batch.hash,
        )

    def clip(self, max_norm: float | None = None) -> Tensor:
        """Scale the gradients to at most `max_norm`, and return their norm before that: a scalar on the device.

        None: the recipe's `optim.max_grad_norm`; math.inf only measures. The norm is of the whole model. Collective.
        """
        self._norm = self.engine.clip(self.recipe.optim.max_grad_norm if max_norm is None else max_norm)
        return self._norm

    def step(self, learning_rate: float, commit: Tensor | None = None) -> None:
        """Apply the gradients and drop them. Collective.

        Args:
            commit: a boolean scalar on the device, the same on every rank; false drops the gradients without applying
                them. None: they are applied unless their norm is not finite.
        """
        norm = self.clip(math.inf) if self._norm is None else self._norm
        self.engine.step(learning_rate, torch.isfinite(norm) if commit is None else commit)
        self._norm = None
        self.num_steps += 1

    def mean_loss(self, sums: CountedSums) -> float:
        """Return the mean loss per target of a step, over all ranks and replicas. Collective; waits for the device."""
        values = torch.stack([sums.loss.double(), sums.targets.own.double()])
        if not self.meshes.counts_loss:  # other ranks of tp and pp have the same loss, or none
            values.zero_()
        dist.all_reduce(values, group=self.meshes.everyone)
        loss, count = map(float, values.tolist())
        return loss / max(1.0, count)

    @override
    def passes(self, objective: Objective) -> AbstractContextManager[Evaluation]:
        return self.engine.evaluation(objective)

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint `step-N` into a folder, in the format of runs; returns when it is complete. Collective.

        N is `num_steps`. As in a run, the newest `checkpoint.keep_last` of the folder are kept.

        Raises:
            CheckpointError: it could not be written. Earlier checkpoints are unchanged.
        """
        self._checkpoints.save(Path(folder), self.num_steps, self.engine.state_dict())

    def load(self, folder: Path | str) -> None:
        """Continue from a checkpoint, whatever plan wrote it: `folder` itself, or the newest one in it. Collective.

        It may be one of a run: `runs/NAME/checkpoints`.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model.
        """
        checkpoint = find_checkpoint(Path(folder))
        self.engine.load(partial(fill_from, checkpoint, self.meshes.everyone))
        self.num_steps, self._norm = checkpoint.step, None

    @override
    def find_objective(self, loss: Objective | LossFn | None) -> Objective:
        objective = super().find_objective(loss)
        if objective.needs_reference and not self.objective.needs_reference:
            raise ConfigError(
                f"the loss {type(objective).__name__} needs a reference model, and this learner has none, because "
                f"objective.name={self.recipe.objective.name} needs none; name the objective in the recipe."
            )
        return objective

    def close(self) -> None:
        """Release what `batch` and `save` hold. Collective. The process group stays: another learner may use it."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        self._checkpoints.close()
