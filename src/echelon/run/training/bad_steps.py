"""Detects bad steps on the device, so that good steps need no synchronization and no collective; diagnoses them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.learn.data.loader import StepBatch
from echelon.learn.distributed.objects import gather_objects
from echelon.learn.engines.engine import NonFinite
from echelon.recipe.operation import FaultConfig

if TYPE_CHECKING:
    from echelon.learn.learner import Learner

MAX_SAMPLES = 16


@dataclass(frozen=True)
class Verdict:
    """The verdict on one step, as scalars on the device.

    Attributes:
        commit: whether the update is applied.
        is_bad: whether the step is bad; an overflow that the loss scale can correct is neither applied nor bad.
        in_a_row: number of consecutive bad steps up to this one.
    """

    commit: Tensor
    is_bad: Tensor
    in_a_row: Tensor

    def joined_with(self, other: "Verdict") -> "Verdict":
        """The verdict on a step of two shares, of which `other` is on the later one."""
        return Verdict(self.commit & other.commit, self.is_bad | other.is_bad, other.in_a_row)

    def emptied(self) -> "Verdict":
        """The verdict of a rank that reads nothing in the next step: nothing is wrong with it."""
        return Verdict(torch.ones_like(self.commit), torch.zeros_like(self.is_bad), self.in_a_row)


class StepJudge:
    """Judges every step, in order, from its global gradient norm, which is the same on every rank.

    The host sees a bad step only after it has launched the next one. If the host must act on it, the judge applies no
    further step, so that the weights stay those that the bad step ran with.
    """

    def __init__(self, fault: FaultConfig, device: torch.device) -> None:
        self._spike_factor = fault.spike_factor
        # With `skip` the host acts only to stop the run; otherwise at the first bad step.
        self._patience = fault.max_bad_steps if fault.on_bad_step == "skip" else 1
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._is_held = torch.zeros((), dtype=torch.bool, device=device)
        # Norms of the last applied steps, newest last; NaN for steps that do not exist yet.
        self._norms = torch.full((fault.spike_window,), torch.nan, device=device)

    def __call__(self, norm: Tensor, is_finite: Tensor, loss_scale: Tensor | None, is_suppressed: bool) -> Verdict:
        """Judge the next step.

        Args:
            norm: the global gradient norm; not finite if a loss is not.
            is_finite: whether the synchronizer would apply the step.
            loss_scale: the loss scale of this step; at 1 or above, the scaling may have overflowed, and will adapt.
            is_suppressed: whether a rollback excluded this step.
        """
        is_bad = ~is_finite if loss_scale is None else ~is_finite & (loss_scale < 1)
        if self._spike_factor is not None:
            is_bad = is_bad | self._is_spike(norm)
        if is_suppressed:
            is_bad = torch.ones_like(is_bad)
        commit = is_finite & ~is_bad & ~self._is_held
        in_a_row = torch.where(is_bad, self._in_a_row + 1, torch.where(commit, 0, self._in_a_row))
        if not is_suppressed:
            self._is_held = self._is_held | (is_bad & (in_a_row >= self._patience))
        if self._spike_factor is not None:
            newest = torch.cat([self._norms[1:], norm.to(self._norms).reshape(1)])
            self._norms = torch.where(commit, newest, self._norms)
        self._in_a_row = in_a_row
        return Verdict(commit, is_bad, in_a_row)

    def _is_spike(self, norm: Tensor) -> Tensor:
        assert self._spike_factor is not None
        # The lower median by sorting: the kernel of `median` may be nondeterministic.
        median = self._norms.sort().values[(len(self._norms) - 1) // 2]
        return ~self._norms[0].isnan() & (norm > self._spike_factor * median)

    def mark(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the current state for `rewind`. No copy is needed: every verdict creates new tensors."""
        return self._in_a_row, self._is_held, self._norms

    def rewind(self, mark: tuple[Tensor, Tensor, Tensor]) -> None:
        """Undo every verdict since `mark`, because its step is run again."""
        self._in_a_row, self._is_held, self._norms = mark

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values. Waits for the device, so call it between two steps."""
        norms = self._norms[~self._norms.isnan()]
        return {"in_a_row": int(self._in_a_row), "norms": norms.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, also with another window size; steps are applied again."""
        kept = torch.tensor(state.get("norms", [])[-len(self._norms) :], dtype=self._norms.dtype)
        self._norms = torch.full_like(self._norms, torch.nan)
        self._norms[len(self._norms) - len(kept) :] = kept.to(self._norms.device)
        self._in_a_row = torch.full_like(self._in_a_row, state.get("in_a_row", 0))
        self._is_held = torch.zeros_like(self._is_held)


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
        more = self.num_samples - len(self.sample_ids)
        samples = f"Samples {', '.join(map(str, self.sample_ids))}{f' and {more} more' if more else ''}"
        return f"{sentence}. {samples}."

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
