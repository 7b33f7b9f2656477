"""The sequences of each training step, as a pure function of the number of tokens trained on before it."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cache


@dataclass(frozen=True)
class BatchStage:
    """Consecutive steps with the same batch size: the first step, and the first sequence that it trains on."""

    first_step: int
    first_sequence: int
    size: int


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size of every step. Built by `constant_batch` or `ramp_batch`. No stage is empty.

    Steps and sequences are counted from 0, over all ranks. Each sequence counts as `sequence_len` tokens, including its
    padding, so the schedule does not depend on the data.
    """

    sequence_len: int
    stages: tuple[BatchStage, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that occur, in sequences, smallest first."""
        return tuple(stage.size for stage in self.stages)

    def sequences(self, step: int) -> int:
        """The number of sequences in a step."""
        return self._stage(step).size

    def first_sequence(self, step: int) -> int:
        """The number of sequences in all earlier steps, which is the index of the first sequence of this step."""
        stage = self._stage(step)
        return stage.first_sequence + (step - stage.first_step) * stage.size

    def first_token(self, step: int) -> int:
        """The number of tokens in all earlier steps, including padding."""
        return self.first_sequence(step) * self.sequence_len

    def num_steps(self, num_sequences: int) -> int:
        """The smallest number of steps that trains on this many sequences."""
        starts = [stage.first_sequence for stage in self.stages]
        stage = self.stages[max(0, bisect_right(starts, num_sequences - 1) - 1)]
        return stage.first_step + -(-(num_sequences - stage.first_sequence) // stage.size)

    def describe(self) -> str:
        """Return a line for the user that describes the batch ramp."""
        first, last = self.stages[0], self.stages[-1]
        return (
            f"batch ramp: {first.size:,} -> {last.size:,} sequences in {len(self.stages)} sizes over "
            f"{self.first_token(last.first_step):,} tokens; {last.size:,} from step {last.first_step + 1:,} on"
        )

    def _stage(self, step: int) -> BatchStage:
        return self.stages[bisect_right([stage.first_step for stage in self.stages], step) - 1]


@dataclass(frozen=True)
class Rhythm:
    """The steps after which a periodic action is due: every N steps, or every N sequences.

    If neither is given, it is never due. Depends only on the step.
    """

    batches: BatchSchedule
    every_steps: int | None = None
    every_sequences: Fraction | None = None

    def is_due(self, done: int) -> bool:
        """Return whether the action is due after this number of steps."""
        if self.every_sequences is not None:
            before, after = self.batches.first_sequence(max(0, done - 1)), self.batches.first_sequence(done)
            return before // self.every_sequences < after // self.every_sequences
        return self.every_steps is not None and done % self.every_steps == 0

    def first_steps(self, count: int) -> tuple[int, ...]:
        """Return the first `count` steps after which the action is due, counted from 1."""
        if self.every_sequences is None:
            return () if self.every_steps is None else tuple(self.every_steps * (n + 1) for n in range(count))
        steps: list[int] = []
        while len(steps) < count:
            reached = self.batches.first_sequence(steps[-1] if steps else 0)
            target = (reached // self.every_sequences + 1) * self.every_sequences
            steps.append(self.batches.num_steps(math.ceil(target)))
        return tuple(steps)


def constant_batch(size: int, sequence_len: int) -> BatchSchedule:
    """Return a schedule with the same number of sequences in every step."""
    return BatchSchedule(sequence_len, (BatchStage(0, 0, size),))


@cache
def ramp_batch(start: int, size: int, increment: int, over_tokens: int, sequence_len: int) -> BatchSchedule:
    """Return a schedule that grows from `start` to `size` sequences by `increment`, after equal numbers of tokens.

    This is the rule of Megatron-LM's `--rampup-batch-size`: with K = (size - start) / increment, a step that follows t
    tokens has start + floor(t K / over_tokens) * increment sequences, at most `size`. `increment` divides size - start.
    """
    num_increments, rest = divmod(size - start, increment)
    assert num_increments > 0 and rest == 0, f"a batch from {start} to {size} by {increment}"
    stages: list[BatchStage] = []
    step = sequence = 0
    for index in range(num_increments):
        # In integers: the first step boundary at which the tokens reach the end of this stage.
        stop = -(-(index + 1) * over_tokens // (num_increments * sequence_len))
        if sequence < stop:
            stage = BatchStage(step, sequence, start + index * increment)
            stages.append(stage)
            num_steps = -(-(stop - sequence) // stage.size)
            step, sequence = step + num_steps, sequence + num_steps * stage.size
    return BatchSchedule(sequence_len, (*stages, BatchStage(step, sequence, size)))
