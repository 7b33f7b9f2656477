"""What a bad step was made of: its samples, and where its numbers first stopped being finite."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from echelon.data.loader import StepBatch
from echelon.engines.engine import Engine, Finding

MAX_SAMPLES = 16


@dataclass(frozen=True)
class Diagnosis:
    """What running a bad step again has shown, over all ranks.

    Attributes:
        finding: the first thing that was not finite; None where all was, or where the step was only a spike.
        ranks: those that found something.
        world_size: of how many.
        sample_ids: of the microbatches where something was not finite, or of all where none was; the first few.
        num_samples: how many there are of them.
    """

    finding: Finding | None
    ranks: tuple[int, ...]
    world_size: int
    sample_ids: tuple[int, ...]
    num_samples: int

    def describe(self) -> str:
        """Two sentences."""
        if self.finding is None:
            found = "Run again, its batch gives nothing that is not finite"
        else:
            on = "" if len(self.ranks) == self.world_size else f", on rank {', '.join(map(str, self.ranks))} alone"
            found = f"First not finite, when its batch is run again: {self.finding.describe()}{on}"
        return f"{found}. {self.describe_samples()}."

    def describe_samples(self) -> str:
        """The samples, as many as are kept."""
        more = self.num_samples - len(self.sample_ids)
        return f"Samples {', '.join(map(str, self.sample_ids))}{f' and {more} more' if more else ''}"

    def fields(self) -> dict[str, Any]:
        """JSON values for an event."""
        return {
            "first_nonfinite": None if self.finding is None else self.finding.describe(),
            "ranks": list(self.ranks),
            "sample_ids": list(self.sample_ids),
            "num_samples": self.num_samples,
        }


def diagnose(engine: Engine, batch: StepBatch, num_targets: Tensor, group: dist.ProcessGroup) -> Diagnosis:
    """Run a bad step's batch again, a microbatch at a time, and look at every layer. Collective.

    Args:
        batch: this rank's, on its device.
        num_targets: over all ranks.
    """
    found: list[tuple[Finding | None, list[int]]] = []
    for microbatch in batch.microbatches:
        finding = engine.find_nonfinite(batch.step, microbatch, num_targets)
        found.append((finding, microbatch.sample_ids.tolist()))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, found, group=group)
    return _merge(everyone)


def _merge(everyone: list[list[tuple[Finding | None, list[int]]]]) -> Diagnosis:
    """One diagnosis of what each rank found in each of its microbatches."""
    entries = [(rank, finding, ids) for rank, found in enumerate(everyone) for finding, ids in found]
    findings = [(finding, rank) for rank, finding, _ in entries if finding is not None]
    first = min((finding for finding, _ in findings), default=None)
    # A loss that is not finite is an earlier sign than a gradient, which other ranks have only from the sum.
    origins = [entry for entry in entries if entry[1] is not None and first is not None and entry[1].part == first.part]
    sample_ids = [each for _, _, ids in origins or entries for each in ids]
    ranks = sorted({rank for rank, _, _ in origins})
    return Diagnosis(first, tuple(ranks), len(everyone), tuple(sample_ids[:MAX_SAMPLES]), len(sample_ids))
