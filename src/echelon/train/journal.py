"""The run's written record: metrics.jsonl always, trackers beside it, the console for people. Rank 0 alone."""

import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TextIO

from echelon.errors import ConfigError
from echelon.run_folder import RunFolder
from echelon.train.console import render_evaluation, render_sample_line, render_step


class Tracker(Protocol):
    """Takes every row that metrics.jsonl takes."""

    def record(self, row: dict[str, Any]) -> None:
        """One row, of kind train or eval."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


class TensorBoard:
    """Event files under the run's `tensorboard/`; a resumed run goes on at its own step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        summary = _import_tracker("tensorboard", "torch.utils.tensorboard")
        self._writer = summary.SummaryWriter(str(folder), purge_step=first_step)

    def record(self, row: dict[str, Any]) -> None:
        """Every number of the row as a scalar named KIND/KEY."""
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise ConfigError for a tracker whose package is missing; called before any text is read or worker started."""
    if "tensorboard" in names:
        _import_tracker("tensorboard", "tensorboard")


def _import_tracker(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"track: {name} needs a package that is not installed; pip install 'echelon[{name}]', or leave it out of "
            "track."
        ) from error


def build_trackers(names: tuple[str, ...], folder: RunFolder, first_step: int) -> list[Tracker]:
    """The trackers that `track` names. Raises ConfigError where a package is missing."""
    builders = {"tensorboard": lambda: TensorBoard(folder.path / "tensorboard", first_step)}
    return [builders[name]() for name in names]


class Journal:
    """Writes each step's row, and the console's line every `log_every` steps."""

    def __init__(
        self, folder: RunFolder, console: TextIO, trackers: list[Tracker], num_steps: int, log_every: int
    ) -> None:
        self._file: IO[str] = folder.metrics_path.open("a", encoding="utf-8")
        self._samples_path = folder.samples_path
        self._console = console
        self._trackers = trackers
        self._num_steps = num_steps
        self._log_every = log_every
        self._started: tuple[int, float] | None = None

    def say(self, line: str) -> None:
        """A line for the person at the console."""
        print(line, file=self._console, flush=True)

    def train(self, row: dict[str, Any]) -> None:
        """One training step."""
        self._write(row)
        if self._is_logged(row["step"]):
            self.say(render_step(row, self._num_steps, self._remaining(row["step"])))

    def evaluation(self, row: dict[str, Any]) -> None:
        """One evaluation."""
        self._write(row)
        for line in render_evaluation(row):
            self.say(line)

    def samples(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """What the prompts became at one evaluation: into samples.jsonl, and a line each for the console."""
        with self._samples_path.open("a", encoding="utf-8") as file:
            for prompt, text in zip(prompts, texts, strict=True):
                file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
                self.say(render_sample_line(text))

    def close(self) -> None:
        """Flush everything."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.record(row)

    def _is_logged(self, step: int) -> bool:
        return step % self._log_every == 0 or step == 1 or step == self._num_steps

    def _remaining(self, step: int) -> float | None:
        """Time left at the mean pace since the second step of this start; the first one is slower."""
        now = time.monotonic()
        if self._started is None:
            self._started = (step, now)
            return None
        first, began = self._started
        return (now - began) / (step - first) * (self._num_steps - step)
