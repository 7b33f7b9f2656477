"""One optimizer step, without any synchronization between host and device.

docs/architecture.md follows a step from the loop to the optimizer's update, file by file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor
from torch.profiler import record_function

from echelon.ground.stop_request import StopRequest
from echelon.learn.data.feed import Feed
from echelon.learn.sync import DataShare, StepVote, Synchronizer
from echelon.recipe.schedule import Schedule, build_schedule
from echelon.run.training.bad_steps import Diagnosis, StepJudge, diagnose
from echelon.run.training.metrics import Measured, PendingMetrics, StepRecord

if TYPE_CHECKING:
    from echelon.learn.learner import CountedSums, Learner


@dataclass
class TrainingStep:
    """Runs a step's microbatches through a learner, and applies the update unless the step is bad. Collective."""

    learner: "Learner"
    sync: Synchronizer
    judge: StepJudge
    loader: Feed
    stop: StopRequest
    _latest: StepRecord | None = field(default=None, init=False)

    @cached_property
    def num_steps(self) -> int:
        """The number of steps of the run."""
        return self.learner.recipe.num_steps(self.learner.data.train.num_samples)

    @cached_property
    def schedule(self) -> Schedule:
        """The learning rate of each step, by its index."""
        recipe = self.learner.recipe
        return build_schedule(recipe.optim, self.num_steps, recipe.batches)

    def __call__(
        self, step: int, is_suppressed: bool = False, measure: Callable[[], Measured] = Measured
    ) -> PendingMetrics:
        """Run a step; repeat it if the synchronizer asks for that.

        Args:
            step: its index, from 0.
            is_suppressed: whether a rollback excluded the step: it runs, but is not applied.
            measure: returns what this rank measured since its last step, for the metrics.

        After an error, the judge is as before the step.
        """
        before = self.judge.mark()
        try:
            while (pending := self._attempt(step, is_suppressed, measure)) is None:
                self.judge.rewind(before)
        except BaseException:
            self.judge.rewind(before)
            raise
        return pending

    def _attempt(self, step: int, is_suppressed: bool, measure: Callable[[], Measured]) -> PendingMetrics | None:
        """Run the step once; return None if it changed nothing and must be run again."""
        record = pending = None
        for share in self.sync.shares(step):
            part = self._compute(step, share, is_suppressed)
            if self.sync.lag == 0:
                pending = PendingMetrics(part, self.learner.meshes, measure())
                if isinstance(self.sync, StepVote):
                    pending.agree(self.sync.agree)
                else:
                    pending.collect()
            with record_function("echelon update"):
                self.sync.apply(step, part.learning_rate, part.verdict.commit)
            record = part if record is None else record.joined_with(part)
        if not self.sync.end_step(step, is_last=step + 1 == self.num_steps):
            return None
        if pending is not None:
            pending.finish()
            return pending
        self._latest = self._without_share(step) if record is None else record
        return PendingMetrics(self._latest, self.learner.meshes, measure())

    def _without_share(self, step: int) -> StepRecord:
        """The record of a step of which this rank read nothing."""
        assert self._latest is not None, "every rank has a share of its first step"
        return self._latest.emptied(step, self.schedule(step), self.stop.flags())

    def _compute(self, step: int, share: DataShare, is_suppressed: bool) -> StepRecord:
        """Compute the gradients of a share of the step's batch, clip and judge them."""
        self.loader.reshare(*share)
        with record_function("echelon data"):
            batch = self.loader.batch(step)
        sums = self.learner.forward_backward(batch, step=step)
        with record_function("echelon clip"):
            grad_norm = self.sync.clip(step, sums.num_targets, self.learner.recipe.optim.max_grad_norm)
        return self.describe(step, sums, grad_norm, self.schedule(step), self.loader.wait_seconds, is_suppressed)

    def describe(
        self,
        step: int,
        sums: "CountedSums",
        grad_norm: Tensor,
        learning_rate: float,
        wait_seconds: float,
        is_suppressed: bool = False,
        further: Mapping[str, Tensor] | None = None,
    ) -> StepRecord:
        """Judge a step, and return its values on this rank. `further`: the metrics of an own loop."""
        loss_scale = self.learner.engine.loss_scale
        loss_scale = None if loss_scale is None else loss_scale.clone()
        verdict = self.judge(grad_norm, self.sync.should_commit(grad_norm), loss_scale, is_suppressed)
        return StepRecord(
            step=step,
            loss_sum=sums.loss,
            router_sum=sums.router,
            expert_tokens=sums.expert_tokens,
            targets=sums.targets,
            grad_norm=grad_norm,
            verdict=verdict,
            loss_scale=loss_scale,
            learning_rate=learning_rate,
            num_tokens=sums.num_tokens,
            num_labels=sums.num_labels,
            batch_hash=sums.batch_hash,
            data_wait_seconds=wait_seconds,
            stop_flags=self.stop.flags(),
            further=further or {},
        )

    def diagnose(self, step: int) -> Diagnosis:
        """Rerun the batch of an earlier step, without applying it, to find non-finite values. Collective."""
        return diagnose(self.learner, self.loader.fed(step))
