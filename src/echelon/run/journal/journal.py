"""Writes metrics.jsonl, which trackers read, and the console lines of a run. Only on rank 0."""

import json
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, fields
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import is_disk_full
from echelon.ground.logs import EMPHASIZED, ON_PROGRESS_BAR, find_bar_console
from echelon.ground.sizes import render_bytes, render_duration, render_gib
from echelon.ground.stored import open_to_append
from echelon.planner.memory_parts import MemoryParts
from echelon.recipe.batches import BatchSchedule
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.budget import CostMeter
from echelon.run.journal.network import NetworkWatch
from echelon.run.journal.recovery import RecoveryWatch
from echelon.run.journal.trackers import MetricsForwarder

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

logger = logging.getLogger(__name__)

# Rendering takes a few milliseconds of a thread that shares the interpreter with the training.
_DRAWS_PER_SECOND = 4
# Speeds are averages over at least this long, so that they can be read.
_SPEED_SECONDS = 1.0
_SAMPLE_WIDTH = 100
# Metrics of training from rewards that only metrics.jsonl and the report have.
_ONLY_IN_ROWS = re.compile(
    r"entropy|mismatch(_\w+)?|(sample|update|reward)_seconds|reward_(\w+_)?std|uniform_groups|ended_tokens\w*|clipped_\w+"
)
# Figures of a train row that are averaged by time, and those that are summed.
_RATES, _TIMES = ("tokens_per_second", "mfu"), ("step_seconds", "data_wait_seconds")


class ProgressBar:
    """Step, loss, speed and remaining time of a run, in one line that a thread redraws a few times a second.

    The training thread only stores the newest figures.
    """

    def __init__(self, console: "Console", num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._averages = StepAverages()
        self._averaged_at = 0.0
        self._speed: float | None = None
        self._figures: tuple[int, list[str]] = (0, [])
        self._live: Live | None = None

    def step(self, row: dict[str, Any], remaining_seconds: float | None) -> None:
        """Show the row of a training step from now on; the first one starts the bar."""
        self._averages.add(row)
        now = time.monotonic()
        if self._live is None or now - self._averaged_at >= _SPEED_SECONDS:
            self._averaged_at = now
            self._speed = self._averages.take(row)["tokens_per_second"]
        loss, speed, cost = row["loss"], self._speed, row.get("cost_usd")
        texts = [
            "loss -" if loss is None else f"loss {loss:.4f}",
            "- tok/s" if speed is None else f"{speed:,.0f} tok/s",
            f"eta {render_duration(remaining_seconds)}",
            *([] if cost is None else [f"${cost:.2f}"]),
        ]
        self._figures = row["step"], texts
        if self._live is None:
            self._live = self._start()

    def stop(self) -> None:
        """Remove the bar; lines above it stay."""
        if self._live is not None:
            self._live.stop()

    def _start(self) -> "Live":
        from rich.live import Live

        live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=_DRAWS_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        live.start()
        self._console.show_cursor(True)  # a killed process cannot show it again
        return live

    def _render(self) -> "RenderableType":
        """One line as wide as the terminal; in the drawing thread."""
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table

        step, texts = self._figures
        line = Table.grid(padding=(0, 2, 0, 0), expand=True)
        counts = f"step {step}/{self._num_steps}", f"{step / self._num_steps:.0%}"
        cells: tuple[RenderableType, ...] = (counts[0], Bar(self._num_steps, step), counts[1], *texts)
        for cell in cells:
            line.add_column(no_wrap=True, ratio=1 if isinstance(cell, Bar) else None)
        line.add_row(*cells)
        return line


# Between two console lines of steps, where the recipe asks for one in each step; longer steps have a line each.
_LINE_SECONDS = 10.0


class Journal:
    """Writes a row per step, and a console line every `log_every` steps, with averages since the line before.

    With `log_every` 1, the lines of short steps are _LINE_SECONDS apart, unless debug messages are logged.

    On a terminal a progress bar shows the steps instead of lines; the logs have the lines.
    `shows_mfu`: whether the console lines have the MFU.
    """

    def __init__(
        self, folder: RunFolder, num_steps: int, log_every: int, batches: BatchSchedule, shows_mfu: bool = True
    ) -> None:
        self._folder = folder
        self._file = open_to_append(folder.metrics_path)
        self._unwritten = b""
        self._num_steps = num_steps
        self._log_every = log_every
        self._batches = batches
        self._shows_mfu = shows_mfu
        self._averages = StepAverages()
        console = find_bar_console()
        self._bar = None if console is None else ProgressBar(console, num_steps)
        self._started: tuple[int, float] | None = None
        self._line_at = -_LINE_SECONDS
        self.forwarders: list[MetricsForwarder] = []
        """What sends the rows to trackers; `close` waits for them."""
        self.recovery: RecoveryWatch | None = None
        """What each step is reported to, if set."""
        self.meter: CostMeter | None = None
        """Counts the run's time and money, if set."""
        self.network: NetworkWatch | None = None
        """Counts the bytes that ranks send, if set."""
        self.memory_lines: list[str] = []
        """The memory by part that `memory` was given, as a table."""

    def train(self, row: dict[str, Any], further: Iterable[str] = ()) -> None:
        """Write the row of a training step, adding the run's cost so far.

        `further`: the keys of an own loop's metrics, which the console shows too.
        """
        is_logged, expected = self._takes_line(row["step"]), None
        remaining = self._remaining(row["step"]) if is_logged or self._bar is not None else None
        if self.meter is not None:
            self.meter.saw_step(row["step_seconds"])
            row["cost_usd"] = self.meter.usd
            expected = self.meter.expect_usd(remaining)
        if self.network is not None:
            self.network.saw_step(row["sent_bytes"])
        self._write(row)
        if self.recovery is not None:
            self.recovery.stepped(row["step"])
        self._averages.add(row)
        if is_logged:
            shown = self._averages.take(row) | ({} if self._shows_mfu else {"mfu": None})
            shown["cost_at_most"] = self.meter is not None and self.meter.at_most
            line = render_step(shown, self._num_steps, remaining, expected, further)
            logger.info(line, extra=ON_PROGRESS_BAR)
        if self._bar is not None:
            self._bar.step(row, remaining)

    def evaluation(self, row: dict[str, Any]) -> None:
        """Write the row of an evaluation."""
        self._write(row)
        for line in render_evaluation(row):
            logger.info(line, extra=EMPHASIZED)

    def missing(self, step: int, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return those of the rows after this step that metrics.jsonl does not have."""
        there = {(row["kind"], row["step"]) for row in self._folder.rows.rows_backwards() if row["step"] >= step}
        return [row for row in rows if (row["kind"], row["step"]) not in there]

    def note(self, event: str, step: int) -> None:
        """Append a line to events.jsonl; errors are ignored."""
        with suppress(OSError):
            self.event(event, step=step)

    def memory(self, step: int, planned: MemoryParts, measured: MemoryParts) -> None:
        """Write the memory of a step, by part, to events.jsonl, and keep it for the end of the run."""
        self.event("memory", step=step, planned=asdict(planned), measured=asdict(measured))
        self.memory_lines = render_memory(planned, measured)

    def measured(self, lines: Sequence[str]) -> None:
        """Log what a run that reached its end has measured, after its memory, and write it to events.jsonl."""
        for line in (*self.memory_lines, *lines):
            logger.info(line)
        if lines:
            with suppress(OSError):  # the disk may be full
                self.event("measured", lines=list(lines))

    def samples(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Write the samples of an evaluation to samples.jsonl, and log the start of each on one line."""
        for text in texts:
            line = " ".join(text.split())
            logger.info(f"  sample: {line if len(line) <= _SAMPLE_WIDTH else line[:_SAMPLE_WIDTH] + '...'}")
        self.keep_samples(step, [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)])

    def keep_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows with a `prompt` and a `text` to samples.jsonl. On a full disk they are not written."""
        try:
            with open_to_append(self._folder.samples_path) as file:
                file.write("".join(json.dumps({"step": step, **row}) + "\n" for row in rows).encode())
        except OSError as error:
            if not is_disk_full(error):
                raise
            logger.warning(
                f"The disk is full: the samples of step {step} were not written to {self._folder.samples_path.name}."
            )

    def event(self, event: str, **fields: Any) -> None:
        """Append a line to events.jsonl."""
        self._folder.rows.append_event(event, **fields)

    def cut(self, step: int) -> None:
        """Remove all rows after the step that the run has returned to. If there are any, reads the whole file."""
        if self._folder.rows.last_step() <= step:
            return
        self.flush()
        self._file.close()
        self._folder.rows.cut_metrics(step)
        self._file = open_to_append(self._folder.metrics_path)
        self._started = None
        self._averages = StepAverages()
        for forwarder in self.forwarders:
            forwarder.reread()

    def flush(self) -> None:
        """Write rows that could not be written to a full disk. Raises OSError if they still cannot."""
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self, done: bool = False) -> None:
        """Remove the progress bar, and flush everything, trackers included. `done`: the run reached its last step."""
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        for forwarder in self.forwarders:
            forwarder.close(done)

    def _write(self, row: dict[str, Any]) -> None:
        self._unwritten += (json.dumps(row) + "\n").encode()
        try:
            self.flush()
        except OSError as error:
            # A save that filled the disk frees the space and is retried: until then the rows wait here.
            if not is_disk_full(error):
                raise

    def _takes_line(self, step: int) -> bool:
        """Whether this step has a console line, which is then the newest one."""
        is_end = step in (1, self._num_steps)
        if self._log_every > 1 or logger.isEnabledFor(logging.DEBUG):
            return is_end or step % self._log_every == 0
        now = time.monotonic()
        is_due = is_end or now - self._line_at >= _LINE_SECONDS
        self._line_at = now if is_due else self._line_at
        return is_due

    def _remaining(self, step: int) -> float | None:
        """Estimate the remaining time, from the mean time per sequence since the second step of this start.

        The first step is slower, and does not count.
        """
        now = time.monotonic()
        if self._started is None:
            self._started = (step, now)
            return None
        first, began = self._started
        fed = self._batches.first_sequence
        return (now - began) / (fed(step) - fed(first)) * (fed(self._num_steps) - fed(step))


def render_step(
    row: dict[str, Any],
    num_steps: int,
    remaining_seconds: float | None,
    expected_usd: float | None = None,
    further: Iterable[str] = (),
) -> str:
    """Return the console line of a train row: step, loss, norm, rate, speed, MFU, memory, data wait, ETA, cost.

    An unknown MFU is left out. `further`: keys of the row, shown after the norm; of training from rewards, some.
    """
    width = len(str(num_steps))
    # All metrics of an own loop, and the most important of rewards.
    shown = [name for name in further if "reward_spread" not in row or not _ONLY_IN_ROWS.fullmatch(name)]
    seconds = row["step_seconds"]
    wait = None if not seconds else min(1.0, row["data_wait_seconds"] / seconds)
    fields = [
        f"step {row['step']:>{width}}/{num_steps}",
        f"loss {_number(row['loss'], '.4f')}",
        f"grad_norm {_number(row['grad_norm'], '.3f')}",
        *(f"{name} {_number(row[name], '.4g')}" for name in shown),
        f"lr {row['learning_rate']:.2e}",
        f"tok/s {_number(row['tokens_per_second'], '.0f')}",
        *([] if row["mfu"] is None else [f"mfu {_percent(row['mfu'])}"]),
        f"peak_mem {'-' if row['memory_peak_bytes'] is None else render_gib(row['memory_peak_bytes'])}",
        f"wait {_percent(wait)}",
        f"eta {render_duration(remaining_seconds)}",
    ]
    if row.get("cost_usd") is not None:
        whole = "" if expected_usd is None else f" of ~${expected_usd:.2f}"
        bound = "at most " if row.get("cost_at_most") else ""
        fields.append(f"cost {bound}${row['cost_usd']:.2f}{whole}")
    if row["skipped"]:
        fields.append("SKIPPED")
    return "  ".join(fields)


class StepAverages:
    """Averages tokens per second, MFU and data wait over the steps since the last console line."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Count a train row."""
        self._rows.append({name: row.get(name) for name in (*_RATES, *_TIMES)})

    def take(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return this row, the last that was added, with the averages in place of its own figures, and start anew."""
        rows, self._rows = self._rows, []
        times = {name: sum(row[name] or 0.0 for row in rows) for name in _TIMES}
        seconds = times["step_seconds"]
        rates = {
            name: sum(row[name] * row["step_seconds"] for row in rows) / seconds
            for name in _RATES
            if seconds and all(row[name] is not None for row in rows)
        }
        return {**row, **times, **rates}


_MEASURES = {
    "kl": ".4f", "agreement": ".1%", "perplexity": ".2f", "bits_per_byte": ".4f", "reward_accuracy": ".1%",
    "reward_margin": ".4f", "accuracy": ".1%", "macro_f1": ".4f",
}  # fmt: skip
"""The metrics of an eval row that the console shows, in this order, and their forms."""


def render_evaluation(row: dict[str, Any]) -> list[str]:
    """Return the console lines of an eval row: the total, and each set if there are several; or of each benchmark."""
    if "tasks" in row:
        return [f"{name} at step {row['step']}: {_metrics(values)}" for name, values in row["tasks"].items()]
    lines = [f"eval at step {row['step']}: {_losses(row)}"]
    if len(row["sets"]) > 1:
        lines += [f"  {name}: {_losses(values)}" for name, values in row["sets"].items()]
    return lines


def render_memory(planned: MemoryParts, measured: MemoryParts) -> list[str]:
    """Return the lines of a table of the memory of tensors by part, with the sums of both columns."""
    names = [*(field.name for field in fields(MemoryParts)), "total"]
    left, right = ([*astuple(parts), sum(astuple(parts))] for parts in (planned, measured))
    rows = [
        (name.replace("_", " "), render_bytes(one), render_bytes(other))
        for name, one, other in zip(names, left, right, strict=True)
        if one or other or name != "frozen_models"
    ]
    head = ("tensors of one process", "planned", "measured")
    return [f"{name:<22}  {plan:>10}  {actual:>10}" for name, plan, actual in (head, *rows)]


def _losses(values: dict[str, Any]) -> str:
    if values["loss"] is None:
        return f"no result: {'no answer could be judged' if 'reward' in values else 'it has no targets'}"
    if "reward" in values:
        solved = f"solved {values['solved']:.1%} of " if "solved" in values else ""
        return f"reward {values['reward']:.4f}  {solved}{values['answers']:,} answers"
    forms = {name: form for name, form in _MEASURES.items() if values.get(name) is not None}
    return "  ".join([f"loss {values['loss']:.4f}", *(f"{name} {values[name]:{form}}" for name, form in forms.items())])


def _metrics(values: Mapping[str, float | None]) -> str:
    """The metrics of a benchmark, each with its standard error."""
    shown = []
    for name, value in values.items():
        metric, comma, chosen = name.partition(",")
        if value is not None and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr{comma}{chosen}")
            shown.append(f"{name} {value:.4f}" + ("" if error is None else f" (+- {error:.4f})"))
    return "  ".join(shown)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f}%"
