"""What a run minimises: losses are summed here and divided once, by the global number of what they are summed over."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.data.loader import Microbatch
from echelon.model.adapters import disabled_adapter
from echelon.model.attention import document_inputs
from echelon.model.parts import DecoderParts, find_parts
from echelon.model.router import RouterTap, balance_sum, number_sequences
from echelon.objectives.loss import (
    IGNORE,
    chunked_log_probabilities,
    chunked_loss_sum,
    token_log_probabilities,
    token_loss_sum,
)
from echelon.recipe import Recipe


class DecoderOutputs:
    """One forward pass of a decoder, run when first asked for: hands out losses, log-probabilities or logits.

    Must be used inside the forward of the module that data parallelism wraps: that is where the head's weight is whole.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: DecoderParts,
        batch: Microbatch,
        reference: "ObjectiveModule | None" = None,
        tap: RouterTap | None = None,
    ) -> None:
        self._model = model
        self._parts = parts
        self._batch = batch
        self._reference = reference
        self._tap = tap
        self._router_logits: list[Tensor] = []

    @cached_property
    def _inputs(self) -> dict[str, Any]:
        batch, inputs = self._batch, {"input_ids": self._batch.input_ids, "use_cache": False}
        if batch.documents is None or batch.position_ids is None:
            return inputs
        return inputs | document_inputs(self._model, batch.documents, batch.position_ids)

    @cached_property
    def _hidden(self) -> Tensor:
        assert self._parts.backbone is not None
        hidden: Tensor = self._run(self._parts.backbone).last_hidden_state
        return hidden

    @cached_property
    def _logits(self) -> Tensor:
        logits: Tensor = self._run(self._model).logits
        return logits

    def _run(self, module: nn.Module) -> Any:
        if self._tap is None:
            return module(**self._inputs)
        with self._tap.collecting() as self._router_logits:
            return module(**self._inputs)

    def router_loss_sum(self, token_weights: Tensor) -> Tensor:
        """Balance losses of the sequences, each times its weight, the mean over routers: a scalar, fp32.

        To be called once the pass has run. 0 for a model without a router loss.

        Args:
            token_weights: [batch, seq], fp32, of which a sequence's weight is the sum.
        """
        if self._tap is None:
            return token_weights.new_zeros(())
        routers, batch = self._tap.routers, self._batch
        filled = batch.labels != IGNORE if batch.filled is None else batch.filled
        sequences = number_sequences(filled, token_weights, batch.documents)
        pairs = zip(self._router_logits, routers, strict=True)
        return torch.stack([balance_sum(logits, router, sequences) for logits, router in pairs]).mean()

    def token_loss_sum(self, labels: Tensor) -> Tensor:
        """Sum of token cross-entropies against shifted labels [batch, seq]; scalar, fp32."""
        if self._parts.head is None:
            return token_loss_sum(self._logits.flatten(0, -2), labels.flatten())
        parts = self._parts
        return chunked_loss_sum(self._hidden, labels, parts.head_weight, parts.head_bias, parts.arithmetic)

    def log_probabilities(self, labels: Tensor) -> Tensor:
        """Log-probability of each label: [batch, seq], fp32, 0 where there is none."""
        if self._parts.head is None:
            return token_log_probabilities(self._logits.flatten(0, -2), labels.flatten()).view_as(labels)
        parts = self._parts
        return chunked_log_probabilities(self._hidden, labels, parts.head_weight, parts.head_bias, parts.arithmetic)

    def reference_log_probabilities(self, labels: Tensor) -> Tensor:
        """The same under the weights that training started from: no dropout, no gradient.

        Of the frozen copy where there is one, else of this model without its adapter. Collective where weights are
        sharded: they are gathered once more.
        """
        if self._reference is not None:
            with torch.no_grad():
                scores: Tensor = self._reference(self._batch, lambda outputs, _: outputs.log_probabilities(labels))
            return scores
        trains = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), disabled_adapter(self._model):
                return DecoderOutputs(self._model, self._parts, self._batch).log_probabilities(labels)
        finally:
            self._model.train(trains)

    def logits_at(self, places: Tensor) -> Tensor:
        """Logits of the token after position `places` [batch] of each sequence: [batch, vocabulary], fp32."""
        rows = torch.arange(len(places), device=places.device)
        head = self._parts.head
        if head is None:
            return self._logits[rows, places].float()
        return self._parts.arithmetic.apply(head(self._hidden[rows, places])).float()


Reading = Callable[[DecoderOutputs, Microbatch], Tensor]
"""What is taken from a forward pass, for example `objective.loss_sum`."""


class Objective(Protocol):
    """A loss that is a sum over countable things: target tokens for language modelling, pairs for DPO."""

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with the weights that training started from."""
        ...

    @property
    def unit(self) -> str:
        """What is counted, as eval rows name it: target_tokens, or pairs."""
        ...

    @property
    def measures(self) -> tuple[str, ...]:
        """What evaluation reports beside the loss: the columns of `evaluation_sums` after the first."""
        ...

    def count(self, batch: Microbatch) -> Tensor:
        """How many terms `loss_sum` adds up for this microbatch on this rank: int64 scalar on the batch's device."""
        ...

    def token_weights(self, batch: Microbatch) -> Tensor:
        """The count shared out over the tokens that it is of: [batch, seq], fp32, which add up to the count."""
        ...

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The summed loss, fp32 scalar, connected to every trained parameter even when the count is zero."""
        ...

    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The summed loss and the sum of each measure over the same terms: [1 + measures], fp32."""
        ...


class CausalLM:
    """Next-token prediction: the cross-entropy of every labelled token."""

    needs_reference = False
    unit = "target_tokens"
    measures: tuple[str, ...] = ()

    def count(self, batch: Microbatch) -> Tensor:
        """Labelled tokens of the microbatch."""
        return (batch.labels != IGNORE).sum()

    def token_weights(self, batch: Microbatch) -> Tensor:
        """1 for a labelled token."""
        return (batch.labels != IGNORE).float()

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Summed cross-entropy of the labelled tokens."""
        return outputs.token_loss_sum(batch.labels)

    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The summed cross-entropy alone."""
        return self.loss_sum(outputs, batch).reshape(1)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization: of two answers to one prompt the chosen one is made likelier (Rafailov et al.
    2023, arXiv:2305.18290).

    The margin m of a pair is what log p(chosen) - log p(rejected) has grown by since the reference, log-probabilities
    being summed over the answer's tokens. Losses of a pair:

    sigmoid: -(1 - label_smoothing) log sigmoid(beta m) - label_smoothing log sigmoid(-beta m)
    ipo: (m - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036)

    The reward of an answer is beta times what its log-probability has grown by. A pair is two documents of a sequence,
    the chosen one even; it counts if any of its tokens has a label.
    """

    beta: float
    loss: str = "sigmoid"
    label_smoothing: float = 0.0

    needs_reference = True
    unit = "pairs"
    measures = ("reward_accuracy", "reward_margin")

    def count(self, batch: Microbatch) -> Tensor:
        """Pairs with a label."""
        return _labelled_pairs(batch).sum()

    def token_weights(self, batch: Microbatch) -> Tensor:
        """A pair's labelled tokens have equal parts of it."""
        labelled = (batch.labels != IGNORE).float()
        of_document = _sum_by_document(labelled, batch)
        of_pair = of_document[:, 0::2] + of_document[:, 1::2]
        assert batch.documents is not None
        return labelled / of_pair.gather(1, batch.documents.clamp(min=0) // 2).clamp(min=1)

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Summed loss of the pairs."""
        return self._sum_losses(self._margins(outputs, batch), _labelled_pairs(batch))

    def evaluation_sums(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The summed loss; how many chosen answers have the larger reward; by how much, summed."""
        margins, counts = self._margins(outputs, batch), _labelled_pairs(batch)
        right, rewards = (margins > 0) & counts, self.beta * margins * counts
        return torch.stack([self._sum_losses(margins, counts), right.sum().float(), rewards.sum()])

    def _margins(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The margin of each pair: [batch, pairs], fp32."""
        reference = outputs.reference_log_probabilities(batch.labels)
        growth = _sum_by_document(outputs.log_probabilities(batch.labels) - reference, batch)
        return growth[:, 0::2] - growth[:, 1::2]

    def _sum_losses(self, margins: Tensor, counts: Tensor) -> Tensor:
        if self.loss == "ipo":
            losses = (margins - 1 / (2 * self.beta)) ** 2
        else:
            scaled, wrong = self.beta * margins, self.label_smoothing
            losses = -(1 - wrong) * F.logsigmoid(scaled) - wrong * F.logsigmoid(-scaled)
        return (losses * counts).sum()


def _labelled_pairs(batch: Microbatch) -> Tensor:
    """Which pairs there are: boolean [batch, pairs], room for as many as a sequence could hold."""
    labels = _sum_by_document((batch.labels != IGNORE).float(), batch)
    return labels[:, 0::2] + labels[:, 1::2] > 0


def _sum_by_document(values: Tensor, batch: Microbatch) -> Tensor:
    """Sums over each document of a sequence: [batch, seq] to [batch, documents], an even number, as many as may be.

    How many there are only the device knows. Padding has no labels, so its zeros may go to any document.
    """
    assert batch.documents is not None, "pairs are documents"
    num_rows, length = values.shape
    width = length + length % 2
    rows = torch.arange(num_rows, device=values.device)[:, None] * width
    places = rows + batch.documents.clamp(min=0)
    return values.new_zeros(num_rows * width).index_add(0, places.flatten(), values.flatten()).view(num_rows, width)


def build_objective(recipe: Recipe) -> Objective:
    """The objective that the recipe names."""
    wanted = recipe.objective
    return DPO(wanted.beta, wanted.loss, wanted.label_smoothing) if wanted.name == "dpo" else CausalLM()


def training_sums(objective: Objective) -> Reading:
    """What a training step takes from a forward pass: [2], the summed loss and the summed router loss."""

    def read(outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        loss = objective.loss_sum(outputs, batch)
        return torch.stack([loss, outputs.router_loss_sum(objective.token_weights(batch))])

    return read


class ObjectiveModule(nn.Module):
    """A decoder whose forward returns what is read from it: the objective's summed loss, in training.

    Data parallelism wraps this module, so that the head and the loss run where its hooks have made the weights
    whole and are ready to reduce gradients. The decoder's own parameter names start with `model.` here.
    """

    def __init__(self, model: nn.Module, tap: RouterTap | None = None) -> None:
        """`tap`: of a model whose router loss is trained."""
        super().__init__()
        self.model: Any = model
        self._tap = tap
        # In tuples, so that they are not registered: parts a second time, and a reference not at all, since nothing
        # that wraps, steps or saves this module's parameters is about a frozen copy.
        self._parts = (find_parts(model),)
        self._reference: tuple[ObjectiveModule | None] = (None,)

    def refer_to(self, reference: "ObjectiveModule") -> None:
        """Give it a frozen copy of the starting weights, for objectives that compare with them."""
        self._reference = (reference,)

    def forward(self, batch: Microbatch, read: Reading) -> Tensor:
        """What `read` takes from the forward pass of one microbatch."""
        return read(DecoderOutputs(self.model, self._parts[0], batch, self._reference[0], self._tap), batch)
