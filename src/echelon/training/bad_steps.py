"""Which steps are bad: judged on the device, so that a good one costs no read by the host and no collective."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.recipe import FaultConfig


@dataclass(frozen=True)
class Verdict:
    """What was found of one step; scalars on the device.

    Attributes:
        commit: whether the update is applied.
        is_bad: whether the step counts as a bad one; an overflow that a loss scale mends is neither applied nor bad.
        in_a_row: how many bad steps in a row this is the last of.
    """

    commit: Tensor
    is_bad: Tensor
    in_a_row: Tensor


class StepJudge:
    """Judges every step, in order, from its global gradient norm, which is the same on every rank.

    The host learns of a bad step when the next one is under way already. Where it has to do something about it, the
    judge holds still from there on, applying nothing, so that the host finds the weights that the bad step met.
    """

    def __init__(self, fault: FaultConfig, device: torch.device) -> None:
        self._spike_factor = fault.spike_factor
        # `skip` needs the host only to stop; the others at once.
        self._patience = fault.max_bad_steps if fault.on_bad_step == "skip" else 1
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._is_held = torch.zeros((), dtype=torch.bool, device=device)
        # Norms of the last applied steps, the newest last; NaN where there was none yet.
        self._norms = torch.full((fault.spike_window,), torch.nan, device=device)

    def __call__(self, norm: Tensor, is_finite: Tensor, loss_scale: Tensor | None, is_suppressed: bool) -> Verdict:
        """Judge the next step.

        Args:
            norm: the global gradient norm; not finite too where a loss is not.
            is_finite: whether the synchronizer would apply the step.
            loss_scale: the factor on this step's loss; at 1 or above it may be what overflowed, and mends itself.
            is_suppressed: whether a rollback ruled that this step is never applied.
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
        # Sorted and indexed rather than `median`, whose kernel need not be deterministic; the lower one of two.
        median = self._norms.sort().values[(len(self._norms) - 1) // 2]
        return ~self._norms[0].isnan() & (norm > self._spike_factor * median)

    def mark(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the next verdict depends on, for `rewind`. Costs nothing: every verdict makes new tensors."""
        return self._in_a_row, self._is_held, self._norms

    def rewind(self, mark: tuple[Tensor, Tensor, Tensor]) -> None:
        """Forget every verdict since `mark`: its step is run again."""
        self._in_a_row, self._is_held, self._norms = mark

    def state_dict(self) -> dict[str, Any]:
        """What the next verdicts depend on, as JSON values. Waits for the device: for between two steps."""
        norms = self._norms[~self._norms.isnan()]
        return {"in_a_row": int(self._in_a_row), "norms": norms.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, also under another window; hold nothing any more."""
        kept = torch.tensor(state.get("norms", [])[-len(self._norms) :], dtype=self._norms.dtype)
        self._norms = torch.full_like(self._norms, torch.nan)
        self._norms[len(self._norms) - len(kept) :] = kept.to(self._norms.device)
        self._in_a_row = torch.full_like(self._in_a_row, state.get("in_a_row", 0))
        self._is_held = torch.zeros_like(self._is_held)
