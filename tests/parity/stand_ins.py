"""Engines, synchronizers and callbacks that are not echelon's, for what the trainer must not depend on.

They are registered in the public tables, in the process of each rank.
"""

import os
import signal
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.ground.errors import EchelonError
from echelon.ground.stop_request import STOP_SIGNALS, StopRequest
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.engines import NonFinite, Rehearsal
from echelon.learn.objectives.objective import StepSums
from echelon.learn.sync.every_step import EveryStep
from echelon.recipe.load import load_recipe
from echelon.recipe.names import ENGINES, EngineRow
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.rank_run import run_training
from echelon.run.training.callbacks import Callback
from echelon.run.training.heartbeat import Heartbeat

ENGINES.loaded["bigram"] = EngineRow("tests.parity.stand_ins:Bigram")
ENGINES.loaded["poisoned bigram"] = EngineRow("tests.parity.stand_ins:PoisonedBigram")


class Bigram:
    """Predicts a token from the one before it by a table of logits: no module, no autograd, its own optimizer.

    What it saves are copies, so a checkpoint can be loaded only through `load`.
    """

    loss_scale = served = None

    def __init__(self, spec):
        size = spec.config.vocab_size
        self._table = torch.zeros(size, size, dtype=torch.float64)
        self._momentum, self._gradient = torch.zeros_like(self._table), torch.zeros_like(self._table)
        self._group = spec.meshes.loss
        self.rehearsed = None

    def describe(self, has_documents):
        return ("a table of logits",)

    def rehearse(self, microbatch, num_microbatches, objective):
        self.forward_backward(0, [microbatch] * num_microbatches, torch.ones(()), objective)
        self._gradient.zero_()
        return Rehearsal()

    def forward_backward(self, step, microbatches, num_targets, objective):
        assert not self._gradient.any(), "the gradients of the step before were neither applied nor dropped"
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in microbatches:
            loss, inputs, error = self._errors(microbatch)
            total += loss
            self._gradient.index_add_(0, inputs, error / num_targets)
        dist.all_reduce(self._gradient, group=self._group)
        return StepSums(total)

    def _errors(self, microbatch):
        known = (microbatch.labels != -100).flatten()
        inputs, labels = microbatch.input_ids.flatten()[known], microbatch.labels.flatten()[known]
        scores = self._table[inputs].log_softmax(-1)
        error = scores.exp()
        error[torch.arange(len(labels)), labels] -= 1
        return -scores[torch.arange(len(labels)), labels].sum(), inputs, error

    def clip(self, max_norm):
        norm = self._gradient.norm()
        if max_norm is not None:
            self._gradient *= (max_norm / norm).clamp(max=1)
        return norm

    def step(self, learning_rate, commit):
        momentum = 0.9 * self._momentum + self._gradient
        self._momentum = torch.where(commit, momentum, self._momentum)
        self._table = torch.where(commit, self._table - learning_rate * momentum, self._table)
        self._gradient.zero_()

    def weights(self):
        return {"table": self._table}

    def gradients(self):
        return {"table": self._gradient}

    def find_nonfinite(self, step, microbatch, num_targets, objective):
        self.forward_backward(step, [microbatch], num_targets, objective)
        is_finite = bool(self._gradient.isfinite().all())
        self._gradient.zero_()
        return None if is_finite else NonFinite(3, 0, "the table")

    def evaluation(self, objective):
        return nullcontext(self)

    def sums(self, microbatch):
        return self._errors(microbatch)[0].reshape(1)

    def next_token_logits(self, input_ids, places):
        return self._table[input_ids[torch.arange(len(places)), places]].float()

    def start_cached(self):
        return None

    def describe_end(self):
        return ()

    def describe_adapter(self):
        raise NotImplementedError

    def state_dict(self):
        return {"model.table": self._table.clone(), "optimizer.table.momentum": self._momentum.clone()}

    def load(self, fill):
        saved = self.state_dict()
        fill(saved)
        self._table, self._momentum = saved.values()


class PoisonedBigram(Bigram):
    """The batch of step 5 has a gradient that is not a number."""

    def forward_backward(self, step, microbatches, num_targets, objective):
        sums = super().forward_backward(step, microbatches, num_targets, objective)
        if step + 1 == 5:
            self._gradient.fill_(torch.nan)
        return sums


class Counting(EveryStep):
    """Counts steps, to see its state saved and restored."""

    def __init__(self, config, replica, meshes):
        super().__init__(config, replica, meshes)
        self._count = 0

    def end_step(self, step, is_last):
        self._count += 1
        return True

    def state_dict(self):
        return {"steps": self._count}

    def load_state_dict(self, state):
        self._count = state["steps"]


class Hesitant(EveryStep):
    """Runs step 3 twice; the first time its ranks read each other's part of the batch."""

    def __init__(self, config, replica, meshes):
        super().__init__(config, replica, meshes)
        self._repeats = {2}

    def shares(self, step):
        [share] = super().shares(step)
        return [share._replace(rank=share.size - 1 - share.rank) if step in self._repeats else share]

    def apply(self, step, learning_rate, commit):
        super().apply(step, learning_rate, commit & (step not in self._repeats))

    def end_step(self, step, is_last):
        if step in self._repeats:
            self._repeats.remove(step)
            return False
        return True


class Late(EveryStep):
    """Has its metrics read three steps late."""

    lag = 3


class Interruption(Callback):
    """Sends this process a signal when a step's row has been written; without one it fails."""

    def __init__(self, step: int, number: int | None) -> None:
        self._step, self._number = step, number

    def on_step_end(self, row):
        if row["step"] == self._step:
            if self._number is None:
                raise ZeroDivisionError("division by zero")
            os.kill(os.getpid(), self._number)


class Diary(Callback):
    """Writes down what it was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def on_start(self, step):
        self.lines.append(("start", step))

    def on_step_end(self, row):
        self.lines.append(("step", row["step"]))

    def on_evaluation(self, row):
        self.lines.append(("evaluation", row["step"]))

    def on_save(self, step):
        self.lines.append(("save", step))

    def on_end(self):
        self.lines.append(("end",))


@contextmanager
def listening(stop: StopRequest):
    """Signals are taken by `stop`, and by nobody afterwards: the process serves other tests."""
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    stop.listen(None, lambda name: None)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for each, handler in before.items():
            signal.signal(each, handler)


def train_rank_with(rank, world_size, path, plan, engine, sync, interruption):
    """One rank of a run, by these names of an engine and a synchronizer: the error it ended with, and the diary."""
    recipe, _ = load_recipe(Path(path))
    recipe = recipe.model_copy(update={"engine": engine, "sync": recipe.sync.model_copy(update={"name": sync})})
    runtime = Runtime(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    stop, diary = StopRequest(), Diary()
    callbacks = [diary] if interruption is None else [diary, Interruption(*interruption)]
    with listening(stop):
        try:
            folder = RunFolder(Path(recipe.run.dir))
            run_training(recipe, plan, folder, runtime, stop, Heartbeat(), callbacks)
        except (EchelonError, ZeroDivisionError) as error:
            return str(error), diary.lines
    return None, diary.lines
