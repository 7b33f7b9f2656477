"""Diagnoses a bad step: its samples, and where the first non-finite value occurred."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.learn.data.loader import StepBatch
from echelon.learn.distributed.objects import gather_objects
from echelon.learn.engines.engine import NonFinite

if TYPE_CHECKING:
    from echelon.learn.learner import Learner

MAX_SAMPLES = 16


@dataclass(frozen=True)
class Diagnosis:
    """The result of rerunning a bad step, over all ranks.

    Attributes:
        finding: the first non-finite value; None if all values were finite, as in a spike.
        ranks: the ranks on which it occurred.
        world_size: the number of all ranks.
        sample_ids: the first few samples of the microbatches with a non-finite value, or of all microbatches.
        num_samples: the number of all such samples.
    """

    finding: NonFinite | None
    ranks: tuple[int, ...]
    world_size: int
    sample_ids: tuple[int, ...]
    num_samples: int

    def describe(self) -> str:
        """Describe the diagnosis in two sentences."""
        if self.finding is None:
            sentence = "When its batch was rerun, all values were finite"
        else:
            on = "" if len(self.ranks) == self.world_size else f", only on rank {', '.join(map(str, self.ranks))}"
            sentence = f"When its batch was rerun, the first non-finite value was {self.finding.describe()}{on}"
        return f"{sentence}. {self.describe_samples()}."

    def describe_samples(self) -> str:
        """List the sample ids."""
        more = self.num_samples - len(self.sample_ids)
        return f"Samples {', '.join(map(str, self.sample_ids))}{f' and {more} more' if more else ''}"

    def fields(self) -> dict[str, Any]:
        """Return JSON values for an event."""
        return {
            "first_nonfinite": None if self.finding is None else self.finding.describe(),
            "ranks": list(self.ranks),
            "sample_ids": list(self.sample_ids),
            "num_samples": self.num_samples,
        }


def diagnose(learner: "Learner", batch: StepBatch) -> Diagnosis:
    """Rerun this rank's batch of a bad step, one microbatch at a time, with every layer checked. Collective."""
    batch = batch.to(learner.device)
    num_targets = learner.count_targets(batch).shared.clamp(min=1)
    findings: list[tuple[NonFinite | None, list[int]]] = []
    for microbatch in batch.microbatches:
        finding = learner.engine.find_nonfinite(batch.step, microbatch, num_targets, learner.objective)
        findings.append((finding, microbatch.sample_ids.tolist()))
    return merge_findings(gather_objects(findings, learner.meshes.everyone))


def merge_findings(everyone: list[list[tuple[NonFinite | None, list[int]]]]) -> Diagnosis:
    """Merge the findings of all ranks and microbatches into one diagnosis."""
    entries = [(rank, finding, ids) for rank, of_rank in enumerate(everyone) for finding, ids in of_rank]
    findings = [(finding, rank) for rank, finding, _ in entries if finding is not None]
    first = min((finding for finding, _ in findings), default=None)
    # A non-finite loss shows the origin; non-finite gradients spread to other ranks by the reduction.
    origins = [entry for entry in entries if entry[1] is not None and first is not None and entry[1].part == first.part]
    # without doubles: peers read the same
    sample_ids = list(dict.fromkeys(sample_id for _, _, ids in origins or entries for sample_id in ids))
    ranks = sorted({rank for rank, _, _ in origins})
    return Diagnosis(first, tuple(ranks), len(everyone), tuple(sample_ids[:MAX_SAMPLES]), len(sample_ids))
