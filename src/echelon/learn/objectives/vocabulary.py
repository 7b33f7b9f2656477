"""Cross-entropy over a vocabulary that is divided over ranks: no rank has all logits of a token.

The maximum, the sum of exponentials and the logit of the label are reduced over the ranks, three numbers per token
(Shoeybi et al. 2019, section 3).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.learn.data.shards import NO_LABEL
from echelon.learn.model.parts import HeadArithmetic


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens whose logits this rank computes.

    Attributes:
        offset: the id of the first one.
        group: the ranks that have the others, with the same number of tokens each.
    """

    offset: int
    group: dist.ProcessGroup

    def scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probability of each label, [tokens], fp32, 0 for NO_LABEL. Collective over `group`.

        Its gradient is that of this rank's logits, if every rank is given the same upstream gradient.

        Args:
            logits: of this rank's tokens, [tokens, part of the vocabulary].
            labels: [tokens], ids of the whole vocabulary.
        """
        scores: Tensor = _Scores.apply(logits, labels, self)  # type: ignore[no-untyped-call]
        return scores

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens of the vocabulary, given those of this rank's. Collective over `group`.

        [tokens, part of the vocabulary] to [tokens, vocabulary]. Every rank must compute the same from the result: the
        gradient of this rank's logits is then its part of the whole one, and nothing is sent for it.
        """
        whole: Tensor = _Gathered.apply(logits, self)  # type: ignore[no-untyped-call]
        return whole

    def loss_and_gradient(
        self, logits: Tensor, labels: Tensor, arithmetic: HeadArithmetic, factor: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of all tokens, equal on every rank, and its gradient for this rank's logits. Collective.

        See `echelon.learn.objectives.loss.loss_and_gradient`; the logits are [tokens, part of the vocabulary].
        """
        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            scores = self.scores(arithmetic.apply(logits), labels)
        [gradient] = torch.autograd.grad(scores, [logits], torch.full_like(scores, -1.0) * factor)
        return -scores.detach().sum(), gradient


class _Gathered(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, vocabulary: VocabularyShard) -> Tensor:
        ctx.part = slice(vocabulary.offset, vocabulary.offset + logits.shape[-1])
        parts = [torch.empty_like(logits) for _ in range(vocabulary.group.size())]
        dist.all_gather(parts, logits.contiguous(), group=vocabulary.group)
        return torch.cat(parts, -1)

    @staticmethod
    @override
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream[0][:, ctx.part], None


class _Scores(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: VocabularyShard) -> Tensor:
        exponentials = logits.to(torch.float32, copy=True)
        largest = exponentials.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=vocabulary.group)
        exponentials.sub_(largest)
        columns = (labels - vocabulary.offset).unsqueeze(-1)
        is_here = (columns >= 0) & (columns < logits.shape[-1])
        places = columns.where(is_here, 0)
        at_label = exponentials.gather(-1, places).where(is_here, 0.0)
        exponentials.exp_()
        sums = torch.stack([exponentials.sum(-1, keepdim=True), at_label])
        dist.all_reduce(sums, group=vocabulary.group)
        counts = (labels != NO_LABEL).unsqueeze(-1)
        ctx.save_for_backward(exponentials.div_(sums[0]), places, is_here, counts)
        ctx.dtype = logits.dtype
        return (sums[1] - sums[0].log()).where(counts, 0.0).squeeze(-1)

    @staticmethod
    @override
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, places, is_here, counts = ctx.saved_tensors
        factors = upstream[0].unsqueeze(-1) * counts
        # The probabilities are not needed again.
        gradient = probabilities.mul_(-factors).scatter_add_(-1, places, factors * is_here)
        return gradient.to(ctx.dtype), None, None
