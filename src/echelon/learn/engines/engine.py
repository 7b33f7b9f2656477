"""The Engine protocol: the trainer calls it for backward passes, clipping and optimizer steps."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.sync.synchronizer import Replica, StateFill
from echelon.planner.plan import ParallelPlan

if TYPE_CHECKING:
    from echelon.learn.checkpoint.adapter_folder import AdapterContent
    from echelon.learn.model.kv_cache import KeyValueCache
    from echelon.learn.objectives.objective import Objective, StepSums
    from echelon.learn.objectives.outputs import OutputsFn
    from echelon.planner.memory_parts import MemoryParts
    from echelon.recipe.document import Recipe


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from."""

    recipe: "Recipe"
    config: PretrainedConfig
    """The model's HF config, with its vocabulary size."""
    plan: ParallelPlan
    meshes: Meshes
    device: torch.device
    compile_backend: str = "inductor"
    new_token_ids: Sequence[int] = ()
    """The ids of `model.new_tokens`, whose rows are trained in addition to an adapter."""
    needs_reference: bool = False
    """Whether an objective will ask for log-probabilities under the initial weights."""


class Targets(NamedTuple):
    """The number of targets of a step, int64 scalars on the device. The loss is divided by `shared`."""

    own: Tensor
    """On this rank."""
    shared: Tensor
    """On all ranks of this replica."""


@dataclass(frozen=True, order=True)
class NonFinite:
    """The first value in a microbatch that was not finite. Findings are ordered by when they occur.

    Attributes:
        part: 0 a module's output, 1 the loss, 2 the gradient of a module's output, 3 that of a parameter.
        place: where it is among the values of that part, over all pipeline stages.
        name: of the module or parameter, as in `transformers`.
    """

    part: Literal[0, 1, 2, 3]
    place: int
    name: str

    def describe(self) -> str:
        """Return a noun phrase for a message."""
        return (
            f"the output of {self.name}",
            f"the loss, although the output of every layer is finite (it is computed with {self.name})",
            f"the gradient of the output of {self.name}",
            f"the gradient of {self.name}",
        )[self.part]


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsed step, the same on every rank.

    Attributes:
        short: the ranks that ran out of memory; unless there are none, the engine is unusable.
        memory: the memory that the step needed, by part, each the largest of all ranks; None if it is not known.
    """

    short: Sequence[int] = ()
    memory: "MemoryParts | None" = None


class Evaluation(Protocol):
    """Forward passes without gradients or dropout. Every method is collective."""

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Return the summed loss of a held-out microbatch and the objective's measures: `Objective.evaluation_sums`."""

    def run(self, microbatch: Microbatch, compute: "OutputsFn") -> Tensor:
        """Return what a function computes of the forward pass of a microbatch, the same on ranks with its sequences."""

    def log_probabilities(self, microbatch: Microbatch, temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each label of a microbatch on this rank: [batch, seq], fp32, 0 for none.

        `temperature`: divides the logits.
        """

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return fp32 logits [batch, seq, vocabulary] of the token after each position of ids [batch, seq].

        They need 4 bytes for each position and entry of the vocabulary: give few positions.
        """

    def next_token_logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Return fp32 logits [batch, vocabulary] of the token after position `places` [batch] of ids [batch, seq]."""

    def start_cached(self) -> "KeyValueCache | None":
        """Return an empty cache of keys and values for passes of this model; None if this engine keeps none."""


class Engine(Replica, Protocol):
    """Runs the training steps of a model under a plan. Every method is collective.

    It also has the methods of `Replica`: weights, gradients, clip and step, and `served`. The loss scale depends on
    whether the gradient norm is finite, not on whether the step is applied.
    """

    def describe(self, has_documents: bool) -> Sequence[str]:
        """Return lines for the user, printed at the start of a run, about how the model is trained.

        `has_documents`: whether sequences have documents that must not attend to each other.
        """

    def rehearse(self, microbatch: Microbatch, num_microbatches: int, objective: "Objective") -> Rehearsal:
        """Run a full step with copies of a microbatch without targets; the weights do not change.

        Called once, before the first step: buffers get the same layout in a fresh start and in a resumed one, and it is
        known whether the memory suffices. An engine that runs microbatches one after the other may run only two.
        """

    def forward_backward(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: "Objective"
    ) -> "StepSums":
        """Compute the gradients of sum(loss) / num_targets, including the router loss; return this rank's sums.

        `objective` may be another one in each step.
        """

    def regroup(self, meshes: Meshes) -> None:
        """Go on among the replicas of these meshes, after some were lost or have joined. Not collective."""

    def discard(self) -> None:
        """Drop the gradients of a step that was not finished, because a replica was lost. Not collective."""

    def find_nonfinite(
        self, step: int, microbatch: Microbatch, num_targets: Tensor, objective: "Objective"
    ) -> NonFinite | None:
        """Rerun a microbatch of a step with every layer checked; return the first non-finite value on this rank."""

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale of the next step, a live scalar tensor on the device; None without loss scaling."""

    def evaluation(self, objective: "Objective") -> AbstractContextManager["Evaluation"]:
        """Return a scope of forward passes without gradients or dropout; gathered weights stay gathered in it."""

    def describe_end(self) -> Sequence[str]:
        """Return lines for the user, printed at the end of a run, about what was measured in its last step."""

    def describe_adapter(self) -> "AdapterContent":
        """Return the trained adapter, unsharded, on every rank."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor of a checkpoint, by names that do not depend on the plan: live tensors or copies."""

    def load(self, fill: StateFill) -> None:
        """Call `fill` on tensors with the names and shapes of `state_dict`, and continue with the loaded values."""
