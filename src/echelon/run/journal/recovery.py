"""Measures the time that a run needs to recover after it lost its processes, by phase."""

import logging
from contextlib import suppress
from dataclasses import asdict, dataclass

from echelon.ground.launch_environment import LastEnd, find_last_end, read_clock
from echelon.run.folder.run_folder import RunFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovery:
    """Seconds of each phase of a recovery, up to the end of the first step.

    Attributes:
        detection_seconds: from the death of the first process until all had ended; None if no parent observed it.
        restart_seconds: until the new processes had met; if no parent observed the end, since the last sign of life.
        load_seconds: until the model was built, and the checkpoint loaded if there is one.
        first_step_seconds: until the first step was done.
        repeated_steps: steps that had been done before and are repeated.
    """

    detection_seconds: float | None
    restart_seconds: float
    load_seconds: float
    first_step_seconds: float
    repeated_steps: int

    def describe(self, is_loss: bool = False) -> str:
        """Return the line for the console. `is_loss`: of a rank, while the others have kept their processes."""
        steps = "1 step" if self.repeated_steps == 1 else f"{self.repeated_steps} steps"
        detected = "" if self.detection_seconds is None else f"processes ended {self.detection_seconds:.1f} s, "
        since = "after the failure" if detected else "after the loss" if is_loss else "since the last sign of life"
        return (
            f"recovered, {since}: {detected}rendezvous {self.restart_seconds:.1f} s, load {self.load_seconds:.1f} s, "
            f"first step {self.first_step_seconds:.1f} s; {steps} lost"
        )


class RecoveryWatch:
    """Measures a recovery on rank 0, from the start of this process to its first step."""

    def __init__(self, folder: RunFolder, end: LastEnd | None = None) -> None:
        """Must be created as soon as the ranks have met, before metrics.jsonl is cut.

        `end`: when a rank was lost, where the others have kept their processes.
        """
        self._folder = folder
        self._up_at = self._loaded_at = read_clock()
        self._done_before = folder.rows.last_step()
        self.lost_at = None if end is None else end.time
        self._end = end or find_last_end(folder.metrics_path)

    def loaded(self) -> None:
        """Record that the checkpoint is loaded."""
        self._loaded_at = read_clock()

    def stepped(self, step: int) -> None:
        """Record that a step is done; after a failure, the first call writes the event and logs the line."""
        if self._end is None:
            return
        recovery = Recovery(
            detection_seconds=self._end.detection_seconds,
            restart_seconds=max(0.0, self._up_at - self._end.time),
            load_seconds=self._loaded_at - self._up_at,
            first_step_seconds=read_clock() - self._loaded_at,
            repeated_steps=max(0, self._done_before - step + 1),
        )
        self._end = None
        with suppress(OSError):  # the disk may be full
            self._folder.rows.append_event("recovered", step=step, **asdict(recovery))
        logger.info(recovery.describe(is_loss=self.lost_at is not None))
