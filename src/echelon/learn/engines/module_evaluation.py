"""Forward passes of torch modules without gradients: losses, log-probabilities, and logits with a cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn
from typing_extensions import override

from echelon.learn.data.loader import LONGEST, Microbatch, Padding
from echelon.learn.engines.engine import Evaluation
from echelon.learn.model.kv_cache import KeyValueCache, start_cache
from echelon.learn.objectives.objective import Objective
from echelon.learn.objectives.outputs import OutputsFn


class ModuleEvaluation(Evaluation):
    """Forward passes of a module that its ranks divide."""

    def __init__(
        self,
        module: Callable[[Microbatch, OutputsFn], Tensor],
        objective: Objective,
        padding: Padding = LONGEST,
        decoder: Any = None,
    ) -> None:
        """`padding`: the width that forward passes need. `decoder`: the model; None if some layers are elsewhere."""
        self._module = module
        self._objective = objective
        self._padding = padding
        self._decoder = decoder

    @override
    def sums(self, microbatch: Microbatch) -> Tensor:
        return self._module(microbatch, self._objective.evaluation_sums)

    @override
    def run(self, microbatch: Microbatch, compute: OutputsFn) -> Tensor:
        return self._module(microbatch, compute)

    @override
    def log_probabilities(self, microbatch: Microbatch, temperature: float = 1.0) -> Tensor:
        return self._module(microbatch, lambda outputs, batch: outputs.log_probabilities(batch.labels, temperature))

    @override
    def logits(self, input_ids: Tensor) -> Tensor:
        logits = self._module(self._pad(input_ids), lambda outputs, _: outputs.logits())
        return logits[:, : input_ids.shape[1]]

    @override
    def next_token_logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        return self._module(self._pad(input_ids), lambda outputs, _: outputs.logits_at(places))

    def _pad(self, input_ids: Tensor) -> Microbatch:
        """Pad on the right: attention is causal, so no token sees it."""
        return _unlabelled(nn.functional.pad(input_ids, (0, -input_ids.shape[1] % self._padding.multiple)))

    @override
    def start_cached(self) -> KeyValueCache | None:
        if self._decoder is None:
            return None
        return start_cache(self._decoder, self._padding.multiple, self._run_inside, self._padding.is_equal)

    def _run_inside(self, input_ids: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """Run a pass of the decoder inside the forward pass of the module, which gathers the weights."""
        return self._module(_unlabelled(input_ids), lambda outputs, _: run())


def _unlabelled(input_ids: Tensor) -> Microbatch:
    """A microbatch of tokens alone."""
    ids = np.arange(len(input_ids))
    return Microbatch(input_ids, input_ids, ids, ids)
