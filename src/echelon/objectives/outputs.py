"""The forward pass of a decoder as objectives use it, and the module that runs it."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from echelon.data.loader import Microbatch
from echelon.model.adapters import disabled_adapter
from echelon.model.attention import document_inputs
from echelon.model.parts import find_parts
from echelon.model.router import RouterTap, balance_sum, number_sequences
from echelon.model.traits import Traits, find_traits
from echelon.objectives.document_rows import DocumentRows, lay_out_rows
from echelon.objectives.loss import (
    IGNORE,
    LossAndGradient,
    chunked_log_probabilities,
    chunked_loss_sum,
    loss_and_gradient,
    token_log_probabilities,
    token_loss_sum,
)


class DecoderOutputs:
    """One forward pass of a decoder, run at first use, that provides losses, log-probabilities or logits.

    Must be used inside the forward of the module that data parallelism wraps, where the head's weight is unsharded.
    If the layers run elsewhere, as with pipeline stages, `hidden` provides their result.
    """

    def __init__(
        self,
        model: Any,
        traits: Traits,
        batch: Microbatch,
        reference: "ObjectiveModule | None" = None,
        tap: RouterTap | None = None,
        hidden: Callable[[], Tensor] | None = None,
        of_chunk: LossAndGradient = loss_and_gradient,
    ) -> None:
        """`hidden`: returns the last hidden states after the final norm, [batch, seq, hidden]; None runs the backbone.

        It requires a model whose head's arithmetic is known, and a reference that is a separate copy of the model.
        `of_chunk`: see `chunked_loss_sum`.
        """
        self._model = model
        self._traits = traits
        self._parts = find_parts(model, traits.arithmetic)
        assert hidden is None or self._parts is not None, "hidden states need a head that is known"
        self._batch = batch
        self._reference = reference
        self._tap = tap
        self._given_hidden = hidden
        self._of_chunk = of_chunk
        self._router_logits: list[Tensor] = []

    @cached_property
    def _inputs(self) -> dict[str, Any]:
        batch, inputs = self._batch, {"input_ids": self._batch.input_ids, "use_cache": False}
        if self._rows is not None:
            return inputs | {"input_ids": self._rows.spread(batch.input_ids)}
        if batch.documents is None or batch.position_ids is None or self._traits.mask is None:
            return inputs
        most = None if batch.document_shape is None else batch.document_shape[0]
        return inputs | document_inputs(self._model, self._traits.mask, batch.documents, batch.position_ids, most)

    @cached_property
    def _rows(self) -> DocumentRows | None:
        """The documents in rows of their own, if no mask keeps them apart; padding after them changes no document."""
        return lay_out_rows(self._batch) if self._batch.documents is not None and self._traits.mask is None else None

    @cached_property
    def _hidden(self) -> Tensor:
        if self._given_hidden is not None:
            return self._given_hidden()
        assert self._parts is not None
        return self._collect(self._run(self._parts.backbone).last_hidden_state)

    @cached_property
    def _logits(self) -> Tensor:
        return self._collect(self._run(self._model).logits)

    def _collect(self, values: Tensor) -> Tensor:
        """Return outputs of the model, [rows, width, dim], for each position of the microbatch, [batch, seq, dim]."""
        return values if self._rows is None else self._rows.collect(values)

    def _run(self, module: nn.Module) -> Any:
        if self._tap is None:
            return module(**self._inputs)
        with self._tap.collecting() as self._router_logits:
            return module(**self._inputs)

    def router_loss_sum(self, token_weights: Tensor) -> Tensor:
        """Return the weighted sum of the sequences' balance losses, averaged over routers: an fp32 scalar.

        Must be called after the pass has run. 0 for a model without a router loss.

        Args:
            token_weights: [batch, seq], fp32; the weight of a sequence is their sum.
        """
        if self._tap is None:
            return token_weights.new_zeros(())
        routers, batch = self._tap.routers, self._batch
        filled = batch.labels != IGNORE if batch.filled is None else batch.filled
        if (rows := self._rows) is None:
            sequences = number_sequences(filled, token_weights, batch.documents)
        else:
            sequences = number_sequences(
                rows.spread(filled) & rows.filled, rows.spread(token_weights) * rows.filled, None
            )
        pairs = zip(self._router_logits, routers, strict=True)
        return torch.stack([balance_sum(logits, router, sequences) for logits, router in pairs]).mean()

    def token_loss_sum(self, labels: Tensor) -> Tensor:
        """Return the sum of token cross-entropies for shifted labels [batch, seq]: an fp32 scalar."""
        parts = self._parts
        if parts is None:
            return token_loss_sum(self._logits.flatten(0, -2), labels.flatten())
        head = (parts.head_weight, parts.head_bias, parts.arithmetic)
        return chunked_loss_sum(self._hidden, labels, *head, self._of_chunk)

    def log_probabilities(self, labels: Tensor) -> Tensor:
        """Return the log-probability of each label: [batch, seq], fp32, 0 for IGNORE."""
        parts = self._parts
        if parts is None:
            return token_log_probabilities(self._logits.flatten(0, -2), labels.flatten()).view_as(labels)
        return chunked_log_probabilities(self._hidden, labels, parts.head_weight, parts.head_bias, parts.arithmetic)

    def reference_log_probabilities(self, labels: Tensor) -> Tensor:
        """Return the log-probabilities under the initial weights, without dropout and gradient.

        Uses the frozen copy if there is one, else this model with its adapter disabled. Collective if weights are
        sharded: they are gathered once more.
        """
        if self._reference is not None:
            with torch.no_grad():
                scores: Tensor = self._reference(self._batch, lambda outputs, _: outputs.log_probabilities(labels))
            return scores
        assert self._given_hidden is None, "a pass without the adapter needs all layers here"
        trains = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), disabled_adapter(self._model):
                return DecoderOutputs(self._model, self._traits, self._batch).log_probabilities(labels)
        finally:
            self._model.train(trains)

    def logits_at(self, places: Tensor) -> Tensor:
        """Return fp32 logits of the token after position `places` [batch] of each sequence: [batch, vocabulary]."""
        rows = torch.arange(len(places), device=places.device)
        parts = self._parts
        if parts is None:
            return self._logits[rows, places].float()
        return parts.arithmetic.apply(parts.head(self._hidden[rows, places])).float()


Reading = Callable[[DecoderOutputs, Microbatch], Tensor]
"""Computes a result from a forward pass, for example `objective.loss_sum`."""


class ObjectiveModule(nn.Module):
    """A decoder whose forward returns the result of a `Reading`: in training, the objective's summed loss.

    Data parallelism wraps this module, so that the head and the loss run inside its hooks, which gather weights and
    reduce gradients. The decoder's parameter names have the prefix `model.` here.
    """

    def __init__(self, model: Any, tap: RouterTap | None = None, traits: Traits | None = None) -> None:
        """`tap`: the router tap, if a router loss is trained. `traits`: those of the model; None finds them."""
        super().__init__()
        self.model = model
        self._tap = tap
        self._traits = find_traits(model) if traits is None else traits
        # In a tuple, so that it is not registered: a frozen reference must not be wrapped, stepped or saved with this
        # module's parameters.
        self._reference: tuple[ObjectiveModule | None] = (None,)
        self._of_chunk: LossAndGradient = loss_and_gradient

    @property
    def reference(self) -> "ObjectiveModule | None":
        """The frozen copy of the initial weights; None for an objective that needs none, or has an adapter to omit."""
        return self._reference[0]

    def refer_to(self, reference: "ObjectiveModule") -> None:
        """Set a frozen copy of the initial weights as the reference of the objective."""
        self._reference = (reference,)

    def compile_loss(self, backend: str) -> None:
        """Compile what lies between the head's logits and their gradient."""
        self._of_chunk = torch.compile(loss_and_gradient, backend=backend, fullgraph=True)

    def forward(self, batch: Microbatch, read: Reading, hidden: Callable[[], Tensor] | None = None) -> Tensor:
        """Return the result of `read` on the forward pass of one microbatch. `hidden`: see DecoderOutputs."""
        outputs = DecoderOutputs(self.model, self._traits, batch, self._reference[0], self._tap, hidden, self._of_chunk)
        return read(outputs, batch)
