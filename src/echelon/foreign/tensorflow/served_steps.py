"""The training steps under ParameterServerStrategy: weights, gradients and moments are on parameter servers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from echelon.foreign.tensorflow.decoder import Decoder
from echelon.foreign.tensorflow.library import Library
from echelon.foreign.tensorflow.passes import Array, Passes, to_int32
from echelon.foreign.tensorflow.steps import GRADIENTS, WEIGHTS, Steps
from echelon.foreign.tensorflow.update import AdamW, zeros_beside
from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.objects import broadcast_object, gather_objects
from echelon.learn.objectives.loss import IGNORE


class ServedModel:
    """The model on the parameter servers, as the coordinator (rank 0) directs it.

    A step is synchronous. One function per rank computes the gradients of the rank's microbatches, on any free worker.
    It reads each weight once, and writes its gradient into a row of its own, so repeating a function after a lost
    connection changes nothing. Then the servers add up the rows in the order of the ranks.
    """

    def __init__(self, library: Library, coordinator: Any, decoder: Decoder, optimizer: AdamW, num_ranks: int) -> None:
        """Built in the scope of the coordinator's strategy, as `decoder` and `optimizer` are."""
        tf = library.tf
        self.decoder, self._optimizer, self._coordinator = decoder, optimizer, coordinator
        self._tf, self._strategy, self._num_ranks = tf, coordinator.strategy, num_ranks
        self._variables = [variable for group in decoder.variables.values() for variable in group]
        self._rows = [zeros_beside(library, variable, [num_ranks]) for variable in self._variables]
        self._sums = [zeros_beside(library, variable) for variable in self._variables]
        many, scalar = tf.TensorSpec([None, None, None], tf.int32), tf.TensorSpec([], tf.float32)
        signature = [many, many, scalar, tf.TensorSpec([], tf.int32)]
        self._differentiate = tf.function(self._differentiate_share, input_signature=signature)
        self.add_up = tf.function(self._add_up_all)
        self._measure = tf.function(self._measure_all)
        self._scale = tf.function(self._scale_all, input_signature=[scalar])
        self._update = tf.function(self._update_all, input_signature=[scalar, scalar, scalar])

    def accumulate(self, shares: Sequence[tuple[Array, Array]], divisor: float) -> list[float]:
        """Set the gradients to those of all ranks' shares of a batch; return the summed loss of each.

        `shares`: by rank, the ids and labels of its microbatches, int32 [microbatches, batch, seq].
        """
        # Tensors of this process. TensorFlow would copy arrays to the worker and then ask it for their shapes, with
        # Python's interpreter locked: if the worker is stopped, no thread here would notice.
        losses = [
            self._coordinator.schedule(
                self._differentiate, args=tuple(map(self._tf.constant, (ids, labels, np.float32(divisor), rank)))
            )
            for rank, (ids, labels) in enumerate(shares)
        ]
        self._coordinator.join()
        self.add_up()
        return [float(loss.fetch()) for loss in losses]

    def clear(self) -> None:
        """Set the gradients to zero."""
        self._scale(np.float32(0))

    def norm(self) -> float:
        """Return the norm of all gradients."""
        return float(self._measure())

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a number."""
        self._scale(np.float32(factor))

    def update(self, rate: float, step: int) -> None:
        """Apply the gradients: see Steps."""
        size, root = self._optimizer.correct(rate, step)
        self._update(np.float32(rate), np.float32(size), np.float32(root))

    def find(self, key: str) -> Mapping[str, list[Any]]:
        """Return the variables of a key: see Steps."""
        if key == GRADIENTS:
            return self.decoder.group(self._sums)
        return self.decoder.variables if key == WEIGHTS else self._optimizer.moments[key]

    def _differentiate_share(self, ids: Any, labels: Any, divisor: Any, rank: Any) -> Any:
        tf = self._tf
        weights = [tf.identity(variable) for variable in self._variables]  # each is sent once, however often it is used

        def add(number: Any, total: Any, sums: list[Any]) -> tuple[Any, Any, list[Any]]:
            with tf.GradientTape() as tape, self.decoder.computing_with(weights):
                tape.watch(weights)
                loss = self.decoder.loss_sum(self.decoder.hidden_states(ids[number]), labels[number])
            # 0 * loss is 0, or NaN for a loss that is not finite: then all gradients are.
            found = tape.gradient(loss, weights, output_gradients=(1 + 0 * loss) / divisor)
            return (
                number + 1,
                total + loss,
                [one + tf.convert_to_tensor(gradient) for one, gradient in zip(sums, found, strict=True)],
            )

        start = (tf.constant(0), tf.constant(0.0), [tf.zeros_like(weight) for weight in weights])
        _, total, sums = tf.while_loop(lambda number, *_: number < tf.shape(ids)[0], add, start)
        for row, gradient in zip(self._rows, sums, strict=True):
            row.scatter_update(tf.IndexedSlices(gradient[None], rank[None]))
        return total

    def _add_up_all(self) -> None:
        for total, rows in zip(self._sums, self._rows, strict=True):
            self._strategy.extended.update(total, self._set_to_sum, args=(rows,))

    def _set_to_sum(self, total: Any, rows: Any) -> None:
        total.assign(self._tf.add_n(self._tf.unstack(rows, num=self._num_ranks)))

    def _measure_all(self) -> Any:
        tf = self._tf
        squares = []
        for gradient in self._sums:
            with tf.device(gradient.device):
                squares.append(tf.reduce_sum(tf.square(gradient)))
        return tf.sqrt(tf.add_n(squares))

    def _scale_all(self, factor: Any) -> None:
        for gradient in self._sums:
            self._strategy.extended.update(gradient, lambda total, factor: total.assign(total * factor), args=(factor,))

    def _update_all(self, rate: Any, size: Any, root: Any) -> None:
        self._optimizer.apply(self._strategy, self.decoder.group(self._sums), rate, size, root)


class ServedSteps(Steps):
    """Rank 0 directs the model on the servers; the other ranks send it their batches and get its results."""

    def __init__(
        self,
        library: Library,
        model: ServedModel | None,
        make_copy: Callable[[], Decoder],
        everyone: dist.ProcessGroup,
    ) -> None:
        """`model`: on rank 0 alone. `make_copy` makes a decoder in this process, for passes without gradients."""
        self._library, self.model, self._everyone = library, model, everyone
        self._make_copy = make_copy
        self._rank = dist.get_rank(everyone)

    @override
    def accumulate(self, microbatches: Sequence[Microbatch], divisor: float) -> float:
        ids, labels = (
            [microbatch.input_ids for microbatch in microbatches],
            [microbatch.labels for microbatch in microbatches],
        )
        shares = gather_objects((_stack(ids, 0), _stack(labels, IGNORE)), self._everyone)
        losses = self._tell(None if self.model is None else self.model.accumulate(shares, divisor))
        return float(losses[self._rank])

    @override
    def clear(self) -> None:
        if self.model is not None:
            self.model.clear()

    @override
    def norm(self) -> float:
        return float(self._tell(None if self.model is None else self.model.norm()))

    @override
    def scale(self, factor: float) -> None:
        if self.model is not None:
            self.model.scale(factor)

    @override
    def update(self, rate: float, step: int) -> None:
        """Returns when the servers are done, so that no process leaves before."""
        if self.model is not None:
            self.model.update(rate, step)
        dist.barrier(self._everyone)

    @override
    def passes(self) -> Passes:
        """Every process gets a copy of the weights."""
        decoder, passes = self._copy
        decoder.write(decoder.variables, self.read(WEIGHTS))
        return passes

    @functools.cached_property
    def _copy(self) -> tuple[Decoder, Passes]:
        decoder = self._make_copy()
        return decoder, Passes(self._library, decoder)

    @override
    def read(self, key: str) -> dict[str, Array]:
        values = {} if self.model is None else self.model.decoder.read(self.model.find(key))
        shapes = self._tell({name: value.shape for name, value in values.items()})
        for name, shape in shapes.items():
            values.setdefault(name, np.empty(shape, np.float32))
            dist.broadcast(torch.from_numpy(values[name]), group=self._everyone, group_src=0)
        return values

    @override
    def write(self, key: str, values: Mapping[str, Array]) -> None:
        if self.model is not None:
            self.model.decoder.write(self.model.find(key), values)

    def _tell(self, value: Any) -> Any:
        """What rank 0 has, on every rank."""
        return broadcast_object(value, self._everyone)


def _stack(tensors: Sequence[torch.Tensor], filler: int) -> Array:
    """The microbatches [batch, seq] as one int32 array, with `filler` at the ends of narrower ones."""
    width = max(tensor.shape[1] for tensor in tensors)
    return np.stack(
        [np.pad(to_int32(tensor), ((0, 0), (0, width - tensor.shape[1])), constant_values=filler) for tensor in tensors]
    )
