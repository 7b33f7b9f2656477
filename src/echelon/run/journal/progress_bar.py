"""The progress bar of a run: the last line of a terminal, below the log lines, on rank 0."""

import time
from typing import TYPE_CHECKING, Any

from echelon.ground.logs import find_bar_console
from echelon.ground.sizes import render_duration
from echelon.run.journal.console import StepAverages

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

# Rendering takes a few milliseconds of a thread that shares the interpreter with the training.
_DRAWS_PER_SECOND = 4
# Speeds are averages over at least this long, so that they can be read.
_SPEED_SECONDS = 1.0


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


def find_progress_bar(num_steps: int) -> ProgressBar | None:
    """The bar of a run of `num_steps`; None if this process's console has no bar."""
    console = find_bar_console()
    return None if console is None else ProgressBar(console, num_steps)
