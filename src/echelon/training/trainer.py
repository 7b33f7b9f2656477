"""The trainer: one loop for every method, strategy and engine.

One step, read in five files: this one, `engines/native.py`, `parallel/step.py`, `objectives/objective.py` and
`sync/every_step.py`.
"""

import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.checkpoint.snapshot import Snapshots
from echelon.checkpoint.store import CheckpointStore
from echelon.data.loader import BatchLoader, StepBatch
from echelon.distributed.mesh import Meshes
from echelon.engines.engine import Engine
from echelon.errors import StoppedError, TrainingError
from echelon.inference.evaluate import EvalResults, Evaluator
from echelon.inference.sampler import PromptSampler
from echelon.objectives.objective import Objective
from echelon.planner.model_shape import ModelShape
from echelon.recipe import Recipe
from echelon.recipe.batches import Rhythm
from echelon.recipe.schedule import Schedule
from echelon.reporting.goodput import GoodputTracker
from echelon.reporting.journal import Journal
from echelon.runs.cost import name_limit
from echelon.stopping import LIMITS, StopRequest
from echelon.sync.synchronizer import Synchronizer
from echelon.training.bad_steps import StepJudge
from echelon.training.heartbeat import Heartbeat
from echelon.training.interval import SaveInterval
from echelon.training.metrics import (
    PendingMetrics,
    Stamp,
    StepMetrics,
    StepRecord,
    Targets,
    peak_memory_bytes,
    train_row,
)
from echelon.training.replicas import compare_replicas, describe_differences
from echelon.training.rollback import BadStep, pass_over, recover
from echelon.training.state import TrainState


@dataclass
class Trainer:
    """Drives an engine over a loader, step by step. Every rank holds one and calls its methods in the same order."""

    recipe: Recipe
    num_steps: int
    engine: Engine
    objective: Objective
    sync: Synchronizer
    judge: StepJudge
    schedule: Schedule
    loader: BatchLoader
    evaluator: Evaluator | None
    evaluations: Rhythm
    sampler: PromptSampler | None
    store: CheckpointStore
    snapshots: Snapshots
    meshes: Meshes
    device: torch.device
    shape: ModelShape
    num_trained: int | None
    peak_flops: float | None
    journal: Journal | None
    interval: SaveInterval
    state: TrainState = field(default_factory=TrainState)
    goodput: GoodputTracker = field(default_factory=GoodputTracker)
    heart: Heartbeat = field(default_factory=Heartbeat)
    stop: StopRequest = field(default_factory=StopRequest)

    def fit(self) -> TrainState:
        """Train to the last step, or until `evaluate.early_stopping` says so. Collective.

        Raises:
            TrainingError: a step was bad and the recipe stops there, with nothing of it applied; or replicas differ.
            CheckpointError: a checkpoint could not be written, three times in a row.
            StoppedError: a rank was asked to stop, or a budget is reached; all of them have saved at the same step.
        """
        self._peak_bytes: int | None = None
        self._stopped_by: str | None = None
        self._has_warned = False
        if self.state.step == 0 and self.recipe.fault.on_bad_step == "rollback":
            self._save()  # somewhere to go back to, from the first step on
        while True:
            try:
                self._go_on()
                break
            except BadStep as bad:
                with self.goodput.spending("recovering"):
                    recover(self, bad.metrics)
        with self.goodput.spending("saving"), self.heart.resting():
            while not self.store.wait():  # without its last checkpoint a run is not done
                self._save()
        return self.state

    def _go_on(self) -> None:
        """Train to the end, or until a step is so bad that training cannot simply go on: BadStep. Collective."""
        self.goodput.turn("training")
        self._mark = Stamp(self.device)
        pending: deque[PendingMetrics] = deque()
        self.heart.beat(f"step {self.state.step + 1}")
        if self.state.owes_evaluation or self._stopped_by is not None:
            self._pause(self.state.step)
        for step in range(self.state.step, self.num_steps):
            if self.stopped_early:
                break
            while (record := self.train_step(step)) is None:
                self.loader.seek(step)
            pending.append(PendingMetrics(record, self.meshes, self._peak_if_due(step)))
            # The host reads a step late, or several, so that it never waits for the step it has just launched.
            if len(pending) > self.sync.lag:
                self._account(pending.popleft())
            if self._stopped_by is not None or self._is_due(step + 1):
                self._account_all(pending)
                self._pause(step + 1)
        self._account_all(pending)

    def train_step(self, step: int) -> StepRecord | None:
        """One optimizer step over the microbatches of its batch; None where it is to be run again. Collective."""
        self.loader.reshare(*self.sync.begin_step(step))
        batch = next(self.loader).to(self.device)
        targets = self.count_targets(batch)
        sums = self.engine.forward_backward(step, batch.microbatches, targets.shared.clamp(min=1))
        grad_norm = self.engine.clip(self.recipe.optim.max_grad_norm)
        loss_scale = self.engine.loss_scale
        loss_scale = None if loss_scale is None else loss_scale.clone()
        is_suppressed = step + 1 in self.state.suppressed
        before = self.judge.mark()
        verdict = self.judge(grad_norm, self.sync.should_commit(grad_norm), loss_scale, is_suppressed)
        learning_rate = self.schedule(step)
        self.sync.apply(step, learning_rate, verdict.commit)
        if not self.sync.end_step(step):
            self.judge.rewind(before)
            return None
        return StepRecord(
            step=step,
            loss_sum=sums.loss,
            router_sum=sums.router,
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

    def count_targets(self, batch: StepBatch) -> Targets:
        """The step's targets over all microbatches; they stay on the device. Collective."""
        own = torch.stack([self.objective.count(microbatch) for microbatch in batch.microbatches]).sum()
        shared = own.clone()
        dist.all_reduce(shared, group=self.meshes.loss)
        return Targets(own, shared)

    def evaluate(self) -> EvalResults | None:
        """Losses on the held-out text, and samples of the prompts; None when a stop came in between. Collective."""
        assert self.evaluator is not None
        if self.journal is not None:
            self.journal.note("evaluation", self.state.step)
        with self.engine.evaluation() as evaluation:
            beat = partial(self.heart.beat, f"the evaluation after step {self.state.step}")
            results = self.evaluator.run(evaluation, self.stop, beat)
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
        saves = self._saves_at(done) or self.snapshots.is_due(done)
        return saves or self._evaluates_at(done) or self._verifies_at(done)

    def _verifies_at(self, done: int) -> bool:
        every = self.recipe.fault.verify_replicas_every
        return every is not None and done % every == 0

    def _saves_at(self, done: int) -> bool:
        return done == self.num_steps or self.interval.is_due(done) or self.store.agree_on_retry(done)

    def _evaluates_at(self, done: int) -> bool:
        return self.evaluator is not None and (done == self.num_steps or self.evaluations.is_due(done))

    def _pause(self, done: int) -> None:
        """Compare replicas, evaluate, then save, between two steps; their time does not count as a step's.

        Leaves when asked to stop.
        """
        is_best = False
        if self.recipe.fault.verify_replicas_every is not None:  # also before a save: what is saved is one replica's
            self._verify_replicas()
        if self._evaluates_at(done):
            with self.goodput.spending("evaluating"):
                results = self.evaluate() if self._stopped_by is None else None
            if results is None:
                self.state = replace(self.state, owes_evaluation=True)
            else:
                self.state = self.state.evaluated(results.select(self.recipe.evaluate.select_by).loss)
                is_best = self.state.best_step == done
        if self._stopped_by is not None:
            self._save_and_leave()
        if self._saves_at(done) or self.stopped_early or (is_best and self.recipe.checkpoint.keep_best):
            self._save_and_learn(done)
        elif self.snapshots.is_due(done):
            with self.goodput.spending("saving"), self.heart.resting():
                self.snapshots.save(done, self._tensors(), self._describe_state())
        self._mark = Stamp(self.device)

    def _verify_replicas(self) -> None:
        """Raise TrainingError where replicas hold different weights. Collective."""
        differences = compare_replicas(self.engine.state_dict(), self.meshes)
        if differences:
            self.store.wait()  # what is being saved was compared before
            if self.journal is not None:
                for each in differences:
                    self.journal.event("replicas_differ", step=self.state.step, **asdict(each))
            raise TrainingError(describe_differences(differences, self.state.step))

    def _save_and_learn(self, done: int) -> None:
        """Save, and let the interval see what that cost."""
        started = time.monotonic()
        with self.goodput.spending("saving"), self.heart.resting():
            self._save()
        stall = time.monotonic() - started
        news = self.interval.learn(done, stall, self.store.write_seconds or 0.0, self.meshes.everyone)
        if self.journal is not None and news is not None:
            self.journal.say(news)
        self._warn_of_slow_saves()

    def _warn_of_slow_saves(self) -> None:
        """Once, where a stop would not leave the time to save."""
        notice, taken = self.recipe.fault.notice_seconds, self.store.write_seconds
        if self.journal is not None and taken is not None and 0 < notice < taken and not self._has_warned:
            self._has_warned = True
            self.journal.say(
                f"A checkpoint took {taken:.1f} s until it was whole on disk, longer than "
                f"fault.notice_seconds={notice:g}: a stop by a signal may not get as far; raise it where whoever sends "
                "the signal waits longer, or save to a faster disk."
            )

    def _tensors(self) -> dict[str, Tensor]:
        return self.sync.tensors(self.engine.state_dict())

    def _describe_state(self) -> dict[str, Any]:
        """What of the run is no tensor, as JSON values."""
        return {
            "train": self.state.to_dict(),
            "sync": self.sync.state_dict(),
            "judge": self.judge.state_dict(),
            "goodput": self.goodput.state_dict(),
        }

    def _save(self) -> None:
        keep = self.state.best_step if self.recipe.checkpoint.keep_best else None
        self.store.save(self.state.step, self._tensors(), self._describe_state(), keep)

    def _save_and_leave(self) -> NoReturn:
        started = time.monotonic()
        self.goodput.turn("saving")
        self.goodput.stop()
        with self.heart.resting():
            self._save()
            while not self.store.wait():
                self._save()
        cause = self._stopped_by
        if cause in LIMITS:
            cause, remark = name_limit(self.recipe.budget, cause), "; raise it to go on"
        else:
            remark = f" of the {self.recipe.fault.notice_seconds:g} s that fault.notice_seconds gives"
        seconds = time.monotonic() - started
        raise StoppedError(f"stopped by {cause} at step {self.state.step}, saved in {seconds:.1f} s{remark}")

    def _account_all(self, pending: deque[PendingMetrics]) -> None:
        while pending:
            self._account(pending.popleft())

    def _account(self, pending: PendingMetrics) -> None:
        """Book one finished step and write its row; raise BadStep where it was too bad. Collective."""
        metrics = pending.read()
        self.heart.beat(f"step {metrics.step + 2}")
        seconds, self._mark = pending.finished.seconds_since(self._mark), pending.finished
        self.state = self.state.advanced(metrics.tokens, metrics.target_tokens)
        self.interval.saw_step(seconds)
        self.goodput.move("training", "data", metrics.data_wait_seconds)
        if not metrics.committed:
            self.goodput.move("training", "skipped", seconds - metrics.data_wait_seconds)
        if metrics.memory_peak_bytes is not None:
            self._peak_bytes = metrics.memory_peak_bytes
        self._stopped_by = self._stopped_by or metrics.stopped_by
        if self.journal is not None:
            self.journal.train(self._row(metrics, seconds))
        if metrics.is_bad:
            pass_over(self, metrics)

    def _row(self, metrics: StepMetrics, seconds: float) -> dict[str, object]:
        rate = metrics.tokens / seconds
        mfu = None
        if self.peak_flops is not None:
            length = self.recipe.data.sequence_len
            mfu = self.shape.mfu(rate, self.meshes.num_devices, self.peak_flops, length, self.num_trained)
        return train_row(
            metrics,
            tokens=self.state.tokens,
            target_tokens=self.state.target_tokens,
            tokens_per_second=rate,
            step_seconds=seconds,
            mfu=mfu,
            memory_peak_bytes=self._peak_bytes,
        )
