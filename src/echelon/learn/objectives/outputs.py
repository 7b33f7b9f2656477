"""The forward pass of a decoder as objectives use it, and the module that runs it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.model.attention import document_inputs
from echelon.learn.model.context_attention import Context, divided_inputs
from echelon.learn.model.parts import DecoderParts, autocast_dtype, check_has_vocabulary, disabled_adapter, find_parts
from echelon.learn.model.router import RouterTap, Sequences, balance_sum, number_sequences
from echelon.learn.model.sharding import local_part
from echelon.learn.model.stage import Inflow, find_inlet, run_stage
from echelon.learn.model.traits import Traits, find_traits
from echelon.learn.objectives.loss import (
    IGNORE,
    SHARD_PASSES,
    LossAndGradient,
    VocabularyShard,
    chunked_log_probabilities,
    chunked_loss_sum,
    loss_and_gradient,
    token_log_probabilities,
    token_loss_sum,
)
from echelon.learn.objectives.loss_function import LossFn, chunked_function_sum, function_loss_sum
from echelon.planner.model_shape import FUNCTION_LOGITS, TEACHER_LOGITS


@dataclass(frozen=True)
class DocumentRows:
    """A microbatch [batch, seq] with each document in a row of its own, padded at the end: [batch * count, width].

    sources: the position of each place of a row in the flattened microbatch; 0 for padding. filled: whether a place is
    not padding. places: [batch, seq], the place of each position in the flattened rows; any place for padding.
    """

    sources: Tensor
    filled: Tensor
    places: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """Return values [batch, seq, ...] in rows, [batch * count, width, ...].

        Padding has the value of the first position.
        """
        return values.flatten(0, 1)[self.sources]

    def collect(self, values: Tensor) -> Tensor:
        """Return the values [batch * count, width, dim] of each position, [batch, seq, dim]; any for padding."""
        flat = values.flatten(0, 1).index_select(0, self.places.flatten())
        return flat.view(*self.places.shape, -1)


def lay_out_rows(batch: Microbatch) -> DocumentRows:
    """Lay out the documents of a microbatch. Its shape is known on the host, so that nothing waits for the device."""
    documents, positions = batch.documents, batch.position_ids
    assert documents is not None and positions is not None and batch.document_shape is not None, "it has documents"
    (num_rows, length), (count, width), device = documents.shape, batch.document_shape, documents.device
    numbers, columns = torch.arange(count, device=device), torch.arange(width, device=device)
    rows = torch.arange(num_rows, device=device)[:, None]
    lengths = (documents[:, :, None] == numbers).sum(1)
    starts = lengths.cumsum(1) - lengths + rows * length
    filled = (columns < lengths[:, :, None]).flatten(0, 1)
    sources = (starts[:, :, None] + columns).flatten(0, 1) * filled
    places = (rows * count + documents.clamp(min=0)) * width + positions.clamp(max=width - 1)
    return DocumentRows(sources, filled, places)


class DecoderOutputs:
    """One forward pass of a decoder, run at first use, that provides losses, log-probabilities or logits.

    Must be used inside the forward of the module that data parallelism wraps, where the head's weight is unsharded.
    In a pipeline stage the pass goes on from the hidden states of the stage before, its `inflow`.
    """

    def __init__(
        self, module: "ObjectiveModule", batch: Microbatch, inflow: Inflow | None = None, taps_routers: bool = True
    ) -> None:
        """`inflow`: what the stage goes on from; None for a whole model and the first stage.

        `taps_routers`: whether the pass counts for the router loss, if one is trained.
        """
        self._module = module
        self._model = module.model
        self._traits = module.traits
        self._context = module.context
        self._vocabulary_ranks = module.vocabulary_ranks
        self._tap = module.tap if taps_routers else None
        self._batch = batch
        self._inflow = inflow
        self._router_logits: list[Tensor] = []

    @cached_property
    def _parts(self) -> DecoderParts | None:
        check_has_vocabulary(self._model.config, "this model", "use a language model, or set objective.name=reward")
        return find_parts(self._model, self._traits.arithmetic)

    @cached_property
    def _inputs(self) -> dict[str, Any]:
        batch, inputs = self._batch, {"input_ids": self._batch.input_ids, "use_cache": False}
        dtype = None if self._inflow is None else self._inflow.hidden.dtype
        most_documents = None if batch.document_shape is None else batch.document_shape[0]
        rows = (batch.documents, batch.position_ids, most_documents, dtype)
        if self._context is not None:
            return inputs | divided_inputs(self._model, self._context, self._traits, batch.input_ids, batch.part, *rows)
        if self._rows is not None:
            return inputs | {"input_ids": self._rows.spread(batch.input_ids)}
        if batch.documents is None or batch.position_ids is None or self._traits.mask is None:
            return inputs
        return inputs | document_inputs(self._model, self._traits.mask, batch.documents, batch.position_ids, *rows[2:])

    @cached_property
    def _rows(self) -> DocumentRows | None:
        """The documents in rows of their own, if no mask keeps them apart; padding after them changes no document."""
        return lay_out_rows(self._batch) if self._batch.documents is not None and self._traits.mask is None else None

    @cached_property
    def hidden(self) -> Tensor:
        """The hidden states after the last layer that is here, [batch, seq, hidden]; after the final norm if it is."""
        return self._collect(self._run(self._model.base_model).last_hidden_state)

    @cached_property
    def _logits(self) -> Tensor:
        return self._collect(self._run(self._model).logits)

    @property
    def _head(self) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
        """The weight and the bias of the head on this rank, and the part of the vocabulary that they are of."""
        _ = self.hidden  # sharded weights are whole once the pass has run
        assert self._parts is not None
        weight, bias = local_part(self._parts.head_weight), self._parts.head_bias
        bias = None if bias is None else local_part(bias)
        if self._vocabulary_ranks is None:
            return weight, bias, None
        offset, passes = len(weight) * self._vocabulary_ranks.rank(), self._module.of_shard
        return weight, bias, VocabularyShard(offset, self._vocabulary_ranks, passes)

    def _collect(self, values: Tensor) -> Tensor:
        """Return outputs of the model, [rows, width, dim], for each position of the microbatch, [batch, seq, dim]."""
        return values if self._rows is None else self._rows.collect(values)

    def _run(self, module: nn.Module) -> Any:
        context = self._context if self._batch.part is None else None
        inflow = self._inflow
        if inflow is not None and self._rows is not None:
            inflow = Inflow(inflow.inlet, self._rows.spread(inflow.hidden))
        tapped = nullcontext(self._router_logits) if self._tap is None else self._tap.collecting()
        with nullcontext() if context is None else context.whole(), tapped as self._router_logits:
            return run_stage(module, inflow, **self._inputs)

    def router_loss_sum(self, token_weights: Tensor) -> Tensor:
        """Return the weighted sum of the sequences' balance losses, averaged over routers: an fp32 scalar.

        Must be called after the pass has run. 0 for a model without a router loss. In a stage, it is the share of the
        routers that are there: the shares of all stages add up to the average.

        Args:
            token_weights: [batch, seq], fp32; the weight of a sequence is their sum.
        """
        if self._tap is None or not self._tap.routers:
            return token_weights.new_zeros(())
        sequences = self._number_sequences(token_weights)
        self._tap.count_tokens(self._router_logits, sequences)
        pairs = zip(self._router_logits, self._tap.routers, strict=True)
        sums = torch.stack([balance_sum(logits, router, sequences) for logits, router in pairs])
        return sums.sum() / self._tap.num_routers

    def _number_sequences(self, token_weights: Tensor) -> Sequences:
        batch = self._batch
        filled = batch.labels != IGNORE if batch.filled is None else batch.filled
        if self._context is not None and (part := batch.part) is not None:
            doc = None if batch.documents is None else part.take(batch.documents)
            return number_sequences(filled, token_weights, doc, filled.shape[1] * part.size, self._context.peers.add_up)
        if (rows := self._rows) is None:
            return number_sequences(filled, token_weights, batch.documents)
        return number_sequences(rows.spread(filled) & rows.filled, rows.spread(token_weights) * rows.filled, None)

    def token_loss_sum(self, labels: Tensor) -> Tensor:
        """Return the sum of token cross-entropies for shifted labels [batch, seq]: an fp32 scalar."""
        if (parts := self._parts) is None:
            return token_loss_sum(self._logits.flatten(0, -2), labels.flatten())
        weight, bias, vocabulary = self._head
        return chunked_loss_sum(self.hidden, labels, weight, bias, parts.arithmetic, self._module.of_chunk, vocabulary)

    def logits_loss_sum(self, function: LossFn, labels: Tensor, extra: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the sum of a loss function over the tokens of labels [batch, seq]: an fp32 scalar.

        Args:
            extra: see `Microbatch.extra`. The function gets each as [tokens, ...], repeated if it is per sequence.
        """
        return self._sum_function(self._module.prepare_loss(function), labels, extra or {})

    def _sum_function(
        self, function: LossFn, labels: Tensor, extra: Mapping[str, Tensor], num_logits: int = FUNCTION_LOGITS
    ) -> Tensor:
        rows, parts = {name: _of_tokens(value, labels) for name, value in extra.items()}, self._parts
        if parts is None:
            return function_loss_sum(function, self._logits.flatten(0, -2), labels.flatten(), rows)
        weight, bias, vocabulary = self._head
        return chunked_function_sum(
            function, self.hidden, labels, rows, weight, bias, parts.arithmetic, vocabulary, num_logits
        )

    def compare_with_reference(
        self, functions: Sequence[LossFn], labels: Tensor, extra: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the sum of each loss function over the tokens of labels [batch, seq]: [functions], fp32.

        The functions find the logits of the frozen reference in their extra `teacher_logits`, [n, its vocabulary],
        fp32. They are computed with each chunk, within the reference's forward pass, where its head is unsharded.
        """
        reference = self._module.reference
        assert reference is not None, "the objective was built with a reference"
        _ = self._logits if self._parts is None else self.hidden  # before the reference's pass, without gradient
        differentiates, found = torch.is_grad_enabled(), []

        def compare(outputs: DecoderOutputs, _: Microbatch) -> Tensor:
            name, state, read = outputs.lazy_logits()
            with torch.set_grad_enabled(differentiates):
                for function in functions:
                    prepared = self._module.prepare_loss(function)

                    def with_teacher(
                        logits: Tensor, labels: Tensor, extra: Mapping[str, Tensor], prepared: LossFn = prepared
                    ) -> Tensor:
                        return prepared(logits, labels, {**extra, "teacher_logits": read(extra[name])})

                    found.append(self._sum_function(with_teacher, labels, {**extra, name: state}, TEACHER_LOGITS))
            return state.new_zeros(())  # the sums have graphs that the hooks of the reference must not see

        with torch.no_grad():
            reference(self._batch, compare)
        return torch.stack(found)

    def lazy_logits(self) -> tuple[str, Tensor, Callable[[Tensor], Tensor]]:
        """Return a name, a tensor for each token, [batch, seq, ...], and what makes fp32 logits of a chunk of it.

        Logits have no gradient. They can be read within the module's forward pass, where its head is unsharded.
        """
        if self._parts is None:
            return "teacher_outputs", self._logits, lambda logits: logits.float()
        weight, bias, vocabulary = self._head
        arithmetic, dtype = self._parts.arithmetic, autocast_dtype(self.hidden)
        head = [tensor.detach().to(dtype) for tensor in (weight, bias) if tensor is not None]

        def read(hidden: Tensor) -> Tensor:
            with torch.no_grad():
                logits = arithmetic.apply(F.linear(hidden.to(dtype), *head)).float()
                return logits if vocabulary is None else vocabulary.gather(logits)

        return "teacher_hidden", self.hidden, read

    def log_probabilities(self, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each label: [batch, seq], fp32, 0 for IGNORE.

        `temperature`: of the softmax, as in sampling: the logits are divided by it.
        """
        if (parts := self._parts) is None:
            logits = self._logits.flatten(0, -2).float() / temperature
            return token_log_probabilities(logits, labels.flatten()).view_as(labels)
        weight, bias, vocabulary = self._head
        arithmetic = parts.arithmetic if temperature == 1.0 else parts.arithmetic.at_temperature(temperature)
        return chunked_log_probabilities(self.hidden, labels, weight, bias, arithmetic, vocabulary)

    def reference_log_probabilities(self, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the log-probabilities under the initial weights, without dropout and gradient.

        Uses the frozen copy if there is one, else this model with its adapter disabled. Collective if weights are
        sharded: they are gathered once more.
        """
        if (reference := self._module.reference) is not None:
            with torch.no_grad():
                scores: Tensor = reference(
                    self._batch, lambda outputs, _: outputs.log_probabilities(labels, temperature)
                )
            return scores
        assert self._inflow is None, "a pass without the adapter needs all layers here"
        trains = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), disabled_adapter(self._model):
                outputs = DecoderOutputs(self._module, self._batch, taps_routers=False)
                return outputs.log_probabilities(labels, temperature)
        finally:
            self._model.train(trains)

    def scores(self) -> Tensor:
        """Return the scores of the text up to each position, by the head of a model that scores texts.

        [batch, seq, scores], fp32.
        """
        scores: Tensor = self._model.score(self.hidden)
        return scores.float()

    def logits(self) -> Tensor:
        """Return fp32 logits of the token after each position, without gradient: [batch, seq, vocabulary]."""
        _, state, read = self.lazy_logits()
        return read(state)

    def logits_at(self, places: Tensor) -> Tensor:
        """Return fp32 logits of the token after position `places` [batch] of each sequence: [batch, vocabulary]."""
        rows = torch.arange(len(places), device=places.device)
        if (parts := self._parts) is None:
            return self._logits[rows, places].float()
        return parts.arithmetic.apply(parts.head(self.hidden[rows, places])).float()


OutputsFn = Callable[[DecoderOutputs, Microbatch], Tensor]
"""Computes a tensor from the outputs of a forward pass and its microbatch, for example `objective.loss_sum`."""


RunFn = Callable[[Microbatch, OutputsFn], Tensor]
"""Runs a forward pass of a model on a microbatch, and returns what the function computes of it."""


class ObjectiveModule(nn.Module):
    """A decoder whose forward returns what an `OutputsFn` computes: in training, the objective's summed loss.

    Data parallelism wraps this module, so that the head and the loss run inside its hooks, which gather weights and
    reduce gradients. The decoder's parameter names have the prefix `model.` here.
    """

    def __init__(
        self,
        model: Any,
        tap: RouterTap | None = None,
        traits: Traits | None = None,
        context: Context | None = None,
        vocabulary_ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """`tap`: the router tap, if a router loss is trained. `traits`: those of the model; None finds them.

        `context`: how its attention is divided, if it is; a microbatch that is not cut then runs whole on each rank.
        `vocabulary_ranks`: the ranks that divide the head, in equal parts; None if each has all of it.
        """
        super().__init__()
        self.model = model
        self.tap = tap
        self.context = context
        self.traits = find_traits(model) if traits is None else traits
        self.vocabulary_ranks = vocabulary_ranks
        self.of_chunk: LossAndGradient = loss_and_gradient
        """The loss and the gradient of a chunk of cross-entropy: see `chunked_loss_sum`."""
        self.of_shard = SHARD_PASSES
        """The same of a divided vocabulary."""
        self.prepare_loss: Callable[[LossFn], LossFn] = lambda function: function
        """Returns a loss function as it runs: itself, or compiled."""
        # In a tuple, so that it is not registered: a frozen reference must not be wrapped, stepped or saved with this
        # module's parameters.
        self._reference: tuple[ObjectiveModule | None] = (None,)
        self._inlet = find_inlet(model)

    @property
    def reference(self) -> "ObjectiveModule | None":
        """The frozen copy of the initial weights, or the teacher; None for an objective that needs neither, or has an
        adapter to omit."""
        return self._reference[0]

    def refer_to(self, reference: "ObjectiveModule") -> None:
        """Set a frozen copy of the initial weights, or a frozen teacher, as the reference of the objective."""
        self._reference = (reference,)

    def compile_loss(self, backend: str) -> None:
        """Compile what lies between the head's logits and their gradient, and every loss function at its first use."""
        self.of_chunk = torch.compile(loss_and_gradient, backend=backend, fullgraph=True)
        self.of_shard = tuple(torch.compile(run, backend=backend, fullgraph=True) for run in SHARD_PASSES)
        self.prepare_loss = lru_cache(maxsize=8)(partial(torch.compile, backend=backend))

    @override
    def forward(self, batch: Microbatch, compute: OutputsFn, received: Tensor | None = None) -> Tensor:
        """Return what `compute` makes of the forward pass of one microbatch.

        `compute` runs in here, where the weights are unsharded and the hooks of data parallelism see the loss.

        Args:
            received: for a later pipeline stage, the hidden states of the stage before, [batch, seq, hidden].
        """
        inflow = None if self._inlet is None or received is None else Inflow(self._inlet, received)
        return compute(DecoderOutputs(self, batch, inflow), batch)


def _of_tokens(value: Tensor, labels: Tensor) -> Tensor:
    """Return an extra's value of each token, [tokens, ...]: that of the sequence if it has one per sequence."""
    value = value.unsqueeze(1) if value.dim() == 1 else value
    return value.expand(*labels.shape, *value.shape[2:]).flatten(0, 1)
