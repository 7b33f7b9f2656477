"""The trainer: one loop for every method, strategy and engine.

One step, read in five files: this one, `engines/native.py`, `parallel/step.py`, `objective.py` and `sync/__init__.py`.
"""

import time
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint.store import CheckpointStore
from echelon.data.loader import BatchLoader, StepBatch
from echelon.engines import Engine
from echelon.errors import StoppedError, TrainingError
from echelon.mesh import Meshes
from echelon.objective import Objective
from echelon.recipe import Recipe
from echelon.schedule import Schedule
from echelon.shape import ModelShape
from echelon.stopping import StopRequest
from echelon.sync import Synchronizer
from echelon.train.evaluate import EvalResults, Evaluator
from echelon.train.journal import Journal
from echelon.train.metrics import (
    PendingMetrics,
    Stamp,
    StepMetrics,
    StepRecord,
    peak_memory_bytes,
    train_row,
)
from echelon.train.sampler import PromptSampler
from echelon.train.state import TrainState


@dataclass
class Trainer:
    """Drives an engine over a loader, step by step. Every rank holds one and calls its methods in the same order."""

    recipe: Recipe
    num_steps: int
    engine: Engine
    objective: Objective
    sync: Synchronizer
    schedule: Schedule
    loader: BatchLoader
    evaluator: Evaluator | None
    sampler: PromptSampler | None
    store: CheckpointStore
    meshes: Meshes
    device: torch.device
    shape: ModelShape
    peak_flops: float | None
    journal: Journal | None
    state: TrainState = field(default_factory=TrainState)
    stop: StopRequest = field(default_factory=StopRequest)

    def fit(self) -> TrainState:
        """Train to the last step, or until `evaluate.early_stopping` says so. Collective.

        Raises:
            TrainingError: the loss or the gradient norm was not finite; nothing of that step was applied.
            CheckpointError: a checkpoint could not be written, three times in a row.
            StoppedError: a rank was asked to stop; all of them have saved at the same step.
        """
        self._mark = Stamp(self.device)
        self._peak_bytes: int | None = None
        self._stopped_by: str | None = None
        pending: PendingMetrics | None = None
        if self.state.owes_evaluation:
            self._pause(self.state.step)
        for step in range(self.state.step, self.num_steps):
            if self.stopped_early:
                break
            running = PendingMetrics(self.train_step(step), self.meshes.loss, self._peak_if_due(step))
            # The host reads one step late, so that it never waits for the step it has just launched.
            if pending is not None:
                self._account(pending)
            pending = running
            if self._stopped_by is not None or self._is_due(step + 1):
                self._account(pending)
                pending = None
                self._pause(step + 1)
        if pending is not None:
            self._account(pending)
        while not self.store.wait():  # without its last checkpoint a run is not done
            self._save(self.state.step)
        return self.state

    def train_step(self, step: int) -> StepRecord:
        """One optimizer step over the microbatches of its batch. Collective."""
        batch = next(self.loader).to(self.device)
        num_targets = self.count_targets(batch)
        self.sync.begin_step(step)
        loss_sum = self.engine.forward_backward(step, batch.microbatches, num_targets.clamp(min=1))
        grad_norm = self.engine.clip(self.recipe.optim.max_grad_norm)
        commit = self.sync.should_commit(grad_norm)
        learning_rate = self.schedule(step)
        loss_scale = self.engine.loss_scale
        loss_scale = None if loss_scale is None else loss_scale.clone()
        self.engine.step(learning_rate, commit)
        self.sync.end_step(step)
        return StepRecord(
            step=step,
            loss_sum=loss_sum,
            num_targets=num_targets,
            grad_norm=grad_norm,
            commit=commit,
            loss_scale=loss_scale,
            learning_rate=learning_rate,
            num_tokens=batch.num_tokens,
            batch_hash=batch.hash,
            data_wait_seconds=self.loader.wait_seconds,
            stop_flags=self.stop.flags(),
        )

    def count_targets(self, batch: StepBatch) -> Tensor:
        """The step's number of targets over all microbatches and ranks; stays on the device. Collective."""
        count = torch.stack([self.objective.count(microbatch) for microbatch in batch.microbatches]).sum()
        dist.all_reduce(count, group=self.meshes.loss)
        return count

    def evaluate(self) -> EvalResults | None:
        """Losses on the held-out text, and samples of the prompts; None when a stop came in between. Collective."""
        assert self.evaluator is not None
        if self.journal is not None:
            self.journal.note("evaluation", self.state.step)
        with self.engine.evaluation() as evaluation:
            results = self.evaluator.run(evaluation, self.stop)
            if results is None:
                self._stopped_by = self.evaluator.stopped_by
                return None
            texts = None if self.sampler is None else self.sampler.run(evaluation)
        if self.journal is not None:
            self.journal.evaluation(results.row(self.state.step))
            self.journal.note("evaluated", self.state.step)
            if self.sampler is not None and texts is not None:
                self.journal.samples(self.state.step, self.sampler.prompts, texts)
        return results

    @property
    def stopped_early(self) -> bool:
        """Whether the loss has not become lower for `evaluate.early_stopping` evaluations."""
        patience = self.recipe.evaluate.early_stopping
        return patience is not None and self.state.evaluations_since_best >= patience

    def _peak_if_due(self, step: int) -> int | None:
        """This rank's memory, as this start begins and at the steps that are logged."""
        is_due = self._peak_bytes is None or (step + 1) % self.recipe.train.log_every == 0
        return peak_memory_bytes(self.device) if is_due else None

    def _is_due(self, done: int) -> bool:
        return self._saves_at(done) or self._evaluates_at(done)

    def _saves_at(self, done: int) -> bool:
        every = self.recipe.checkpoint.every_steps
        is_regular = done == self.num_steps or (isinstance(every, int) and done % every == 0)
        return is_regular or self.store.is_retry_due(done)

    def _evaluates_at(self, done: int) -> bool:
        every = self.recipe.train.eval_every
        return self.evaluator is not None and (done == self.num_steps or (every is not None and done % every == 0))

    def _pause(self, done: int) -> None:
        """Evaluate, then save, between two steps; their time does not count as a step's. Leaves when asked to stop."""
        is_best = False
        if self._evaluates_at(done):
            results = self.evaluate() if self._stopped_by is None else None
            if results is None:
                self.state = replace(self.state, owes_evaluation=True)
            else:
                self.state = self.state.evaluated(results.select(self.recipe.evaluate.select_by).loss)
                is_best = self.state.best_step == done
        if self._stopped_by is not None:
            self._save_and_leave(done)
        if self._saves_at(done) or self.stopped_early or (is_best and self.recipe.checkpoint.keep_best):
            self._save(done)
        self._mark = Stamp(self.device)

    def _save(self, done: int) -> None:
        state = {"train": self.state.to_dict(), "sync": self.sync.state_dict()}
        keep = self.state.best_step if self.recipe.checkpoint.keep_best else None
        self.store.save(done, self.engine.state_dict(), state, keep)

    def _save_and_leave(self, done: int) -> NoReturn:
        started = time.monotonic()
        self._save(done)
        while not self.store.wait():
            self._save(done)
        raise StoppedError(
            f"stopped by {self._stopped_by} at step {done}, saved in {time.monotonic() - started:.1f} s of the "
            f"{self.recipe.fault.notice_seconds:g} s that fault.notice_seconds gives"
        )

    def _account(self, pending: PendingMetrics) -> None:
        """Book one finished step, write its row, and stop the run if it did not commit. Collective."""
        metrics = pending.read()
        seconds, self._mark = pending.finished.seconds_since(self._mark), pending.finished
        self.state = self.state.advanced(metrics.tokens, metrics.target_tokens)
        if metrics.memory_peak_bytes is not None:
            self._peak_bytes = metrics.memory_peak_bytes
        self._stopped_by = self._stopped_by or metrics.stopped_by
        if self.journal is not None:
            self.journal.train(self._row(metrics, seconds))
        if not metrics.committed and not metrics.overflowed:
            self.store.wait()  # every rank stops here, so the save under way can be whole first
            raise TrainingError(
                f"step {metrics.step + 1}: loss={metrics.loss} and gradient norm={metrics.grad_norm}, and both must be "
                "finite; the update was not applied, and the checkpoints before it are kept. Lower "
                "optim.learning_rate, lengthen optim.warmup_steps or set optim.max_grad_norm, and train anew with "
                "--fresh or another run.name."
            )

    def _row(self, metrics: StepMetrics, seconds: float) -> dict[str, object]:
        rate = metrics.tokens / seconds
        mfu = None
        if self.peak_flops is not None:
            mfu = self.shape.mfu(rate, self.meshes.data_size, self.peak_flops, self.recipe.data.sequence_len)
        return train_row(
            metrics,
            tokens=self.state.tokens,
            target_tokens=self.state.target_tokens,
            tokens_per_second=rate,
            step_seconds=seconds,
            mfu=mfu,
            memory_peak_bytes=self._peak_bytes,
        )
