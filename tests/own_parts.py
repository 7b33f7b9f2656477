"""The source of an external package with one class of each kind that a recipe can name."""

PACKAGE = '''
"""Parts for echelon, none of which it knows."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from echelon.learn.data.readers.record import Reader, Record, Span
from echelon.learn.objectives.objective import Objective
from echelon.learn.sync.every_step import EveryStep
from echelon.run.training.callbacks import Callback


@dataclass(frozen=True)
class SignMomentum:
    """The sign of the momentum."""

    config: object
    is_layer_matrix: bool
    momentum: float = 0.5

    def build_state(self, parameter, layout):
        return {"momentum": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}

    def update(self, items, rate, weight_decay, commit):
        for item in items:
            momentum = item.state["momentum"].lerp(item.gradient, 1 - self.momentum)
            moved = item.weight * (1 - rate * weight_decay) - rate * momentum.sign()
            item.weight.copy_(torch.where(commit, moved, item.weight))
            item.state["momentum"].copy_(torch.where(commit, momentum, item.state["momentum"]))


class Verses(Reader):
    """Documents between lines of stars."""

    def __init__(self, stars="***", fault=None):
        self.stars = stars
        if fault:
            raise ValueError(fault)

    def cut(self, file, piece_bytes=2**20):
        if file.size:
            yield Span(file, 0, file.size, file.size, True)

    def read(self, span, reading):
        for verse in span.file.path.read_text(encoding="utf-8").split(self.stars):
            if verse.strip():
                yield Record(verse.strip().encode())


class Slower(EveryStep):
    """Applies a share of every step, and counts them."""

    def __init__(self, config, replica, meshes, factor=1.0):
        super().__init__(config, replica, meshes)
        self.replica, self.factor, self.steps = replica, factor, 0

    def apply(self, step, learning_rate, commit):
        self.steps += 1
        self.replica.step(learning_rate * self.factor, commit)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state.get("steps", 0)


class Diary(Callback):
    """Writes down what it is told."""

    def __init__(self, path):
        self.path = Path(path)

    def note(self, *words):
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\\n")

    def on_start(self, step):
        self.note("start", step)

    def on_step_end(self, row):
        self.note("step", row["step"], row["loss"])

    def on_save(self, step):
        self.note("save", step)

    def on_end(self):
        self.note("end")


class ZLoss:
    """Cross-entropy, each label's log-probability squared beside it. It does without echelon's base class."""

    needs_reference = False
    unit = "target_tokens"
    measures = ()
    batch_means = ()

    def __init__(self, config, weight=0.0):
        self.weight = weight

    def batch_sums(self, batch, run):
        return torch.zeros(0)

    def count(self, batch):
        return (batch.labels != -100).sum()

    def token_weights(self, batch):
        return (batch.labels != -100).float()

    def loss_sum(self, outputs, batch):
        scores = outputs.log_probabilities(batch.labels)
        return -scores.sum() + self.weight * scores.square().sum()

    def evaluation_sums(self, outputs, batch):
        return self.loss_sum(outputs, batch).reshape(1)


class Unfinished(Objective):
    """An objective without a loss."""


def smoothed(logits, labels, extra, smoothing=0.0):
    """Cross-entropy with smoothed labels."""
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
'''


def write_package(folder, name="their_parts", text=PACKAGE):
    """Write the package to a folder; return its name."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return name
