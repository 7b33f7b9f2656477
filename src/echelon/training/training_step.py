"""One optimizer step, without any synchronization between host and device.

The code of a step is in five files: this one, `engines/native.py`, `parallel/step.py`, `objectives/objective.py` and
`sync/every_step.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import record_function

from echelon.data.loader import BatchLoader, StepBatch
from echelon.distributed.mesh import Meshes
from echelon.engines import Engine
from echelon.objectives.objective import Objective
from echelon.recipe.schedule import Schedule
from echelon.stopping import StopRequest
from echelon.sync import Synchronizer
from echelon.training.bad_steps import StepJudge
from echelon.training.diagnosis import Diagnosis, diagnose
from echelon.training.metrics import Measured, PendingMetrics, StepRecord, Targets


@dataclass
class TrainingStep:
    """Runs a step's microbatches through an engine, and applies the update unless the step is bad. Collective.

    `num_steps`: those of the run.
    """

    engine: Engine
    objective: Objective
    sync: Synchronizer
    judge: StepJudge
    schedule: Schedule
    loader: BatchLoader
    meshes: Meshes
    device: torch.device
    max_grad_norm: float | None
    stop: StopRequest
    num_steps: int

    def __call__(
        self, step: int, is_suppressed: bool = False, measure: Callable[[], Measured] = Measured
    ) -> PendingMetrics:
        """Run the loader's next step; repeat it if the synchronizer asks for that.

        Args:
            step: its index, from 0.
            is_suppressed: whether a rollback excluded the step: it runs, but is not applied.
            measure: returns what this rank measured since its last step, for the metrics.

        After an error, the judge is as before the step.
        """
        before = self.judge.mark()
        try:
            while (pending := self._attempt(step, is_suppressed, measure)) is None:
                self.loader.seek(step)
                self.judge.rewind(before)
        except BaseException:
            self.judge.rewind(before)
            raise
        return pending

    def _attempt(self, step: int, is_suppressed: bool, measure: Callable[[], Measured]) -> PendingMetrics | None:
        """Run the step once; return None if it changed nothing and must be run again."""
        self.loader.reshare(*self.sync.begin_step(step))
        with record_function("echelon data"):
            batch = next(self.loader).to(self.device)
        targets = self.count_targets(batch)
        sums = self.engine.forward_backward(step, batch.microbatches, targets.shared.clamp(min=1))
        with record_function("echelon clip"):
            grad_norm = self.sync.clip(step, targets.shared, self.max_grad_norm)
        loss_scale = self.engine.loss_scale
        loss_scale = None if loss_scale is None else loss_scale.clone()
        verdict = self.judge(grad_norm, self.sync.should_commit(grad_norm), loss_scale, is_suppressed)
        learning_rate = self.schedule(step)
        record = StepRecord(
            step=step,
            loss_sum=sums.loss,
            router_sum=sums.router,
            expert_tokens=sums.expert_tokens,
            targets=targets,
            grad_norm=grad_norm,
            verdict=verdict,
            loss_scale=loss_scale,
            learning_rate=learning_rate,
            num_tokens=batch.num_tokens,
            num_labels=batch.num_labels,
            batch_hash=batch.hash,
            data_wait_seconds=self.loader.wait_seconds,
            stop_flags=self.stop.flags(),
        )
        pending = None
        if self.sync.lag == 0:
            pending = PendingMetrics(record, self.meshes, measure())
            pending.collect()
        with record_function("echelon update"):
            self.sync.apply(step, learning_rate, verdict.commit)
        if not self.sync.end_step(step, is_last=step + 1 == self.num_steps):
            return None
        if pending is None:
            return PendingMetrics(record, self.meshes, measure())
        pending.finish()
        return pending

    def count_targets(self, batch: StepBatch) -> Targets:
        """Count the step's targets over all microbatches, as tensors on the device. Collective."""
        own = torch.stack([self.objective.count(microbatch) for microbatch in batch.microbatches]).sum()
        shared = own.clone()
        dist.all_reduce(shared, group=self.meshes.loss)
        return Targets(own, shared)

    def diagnose(self, step: int) -> Diagnosis:
        """Rerun the batch of an earlier step, without applying it, to find non-finite values. Collective."""
        batch = self.loader.batch(step).to(self.device)
        num_targets = self.count_targets(batch).shared.clamp(min=1)
        return diagnose(self.engine, batch, num_targets, self.meshes.everyone)
