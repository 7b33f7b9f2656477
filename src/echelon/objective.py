"""What a run minimises: losses are summed here and divided once, by the global number of targets."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from echelon.data.loader import Microbatch
from echelon.loss import IGNORE, chunked_loss_sum, token_loss_sum
from echelon.model.parts import DecoderParts, find_parts


class DecoderOutputs:
    """One forward pass of a decoder, before its head: hands out the loss or the logits, whichever is asked for.

    Must be used inside the forward of the module that data parallelism wraps: that is where the head's weight is whole.
    """

    def __init__(self, model: nn.Module, parts: DecoderParts, input_ids: Tensor) -> None:
        self._parts = parts
        self._hidden: Tensor | None = None
        self._logits: Tensor | None = None
        if parts.backbone is not None:
            self._hidden = parts.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        else:
            self._logits = model(input_ids=input_ids, use_cache=False).logits

    def token_loss_sum(self, labels: Tensor) -> Tensor:
        """Sum of token cross-entropies against shifted labels [batch, seq]; scalar, fp32."""
        if self._hidden is None:
            assert self._logits is not None
            return token_loss_sum(self._logits.flatten(0, -2), labels.flatten())
        head = self._parts.head
        assert head is not None
        return chunked_loss_sum(self._hidden, labels, self._parts.head_weight, head.bias, self._parts.arithmetic)

    def logits_at(self, places: Tensor) -> Tensor:
        """Logits of the token after position `places` [batch] of each sequence: [batch, vocabulary], fp32."""
        rows = torch.arange(len(places), device=places.device)
        if self._hidden is None:
            assert self._logits is not None
            return self._logits[rows, places].float()
        head = self._parts.head
        assert head is not None
        return self._parts.arithmetic.apply(head(self._hidden[rows, places])).float()


class Objective(Protocol):
    """A loss that is a sum over countable things: target tokens for language modelling, pairs for DPO."""

    def count(self, batch: Microbatch) -> Tensor:
        """How many terms `loss_sum` adds up for this microbatch on this rank: int64 scalar on the batch's device."""
        ...

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """The summed loss, fp32 scalar, connected to every trained parameter even when the count is zero."""
        ...


class CausalLM:
    """Next-token prediction: the cross-entropy of every labelled token."""

    def count(self, batch: Microbatch) -> Tensor:
        """Labelled tokens of the microbatch."""
        return (batch.labels != IGNORE).sum()

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Summed cross-entropy of the labelled tokens."""
        return outputs.token_loss_sum(batch.labels)


class NextToken:
    """Hands out logits where an objective would hand out its loss: what sampling needs of the module below."""

    def __init__(self, places: Tensor) -> None:
        self._places = places

    def count(self, batch: Microbatch) -> Tensor:
        """How many sequences there are."""
        return torch.tensor(len(self._places), device=self._places.device)

    def loss_sum(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """Not a loss: the logits after `places` of each sequence, [batch, vocabulary]."""
        return outputs.logits_at(self._places)


class ObjectiveModule(nn.Module):
    """A decoder whose forward returns the objective's summed loss.

    Data parallelism wraps this module, so that the head and the loss run where its hooks have made the weights
    whole and are ready to reduce gradients. The decoder's own parameter names start with `model.` here.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self._parts = (find_parts(model),)  # in a tuple, so that the parts are not registered a second time

    def forward(self, batch: Microbatch, objective: Objective) -> Tensor:
        """The summed loss of one microbatch, fp32 scalar."""
        return objective.loss_sum(DecoderOutputs(self.model, self._parts[0], batch.input_ids), batch)
