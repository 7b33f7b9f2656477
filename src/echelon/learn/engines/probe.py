"""Finds the layer of a decoder that first produces a non-finite value."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.learn.engines.engine import Finding
from echelon.learn.model.sharding import local_part

_MAX_VALUES = 2**32  # more than a stage has values


class Probe:
    """A scope that checks every module's output, and its gradient, for non-finite values, on the device.

    The hooks do not change any value, so the passes inside are those of training, except that compilation is off: hooks
    inside a compiled layer would not be called. Submodules finish before their parent, so the innermost one is found.
    """

    def __init__(self, decoder: Any, stage_of: Mapping[str, int] | None = None) -> None:
        """`stage_of`: the index of the pipeline stage of each module, by name; None or empty without a pipeline."""
        self._decoder = decoder
        self._stage_of = stage_of or {}
        self._outputs: list[tuple[str, Tensor]] = []
        self._gradients: list[tuple[str, Tensor]] = []
        self._scope = ExitStack()

    def __enter__(self) -> "Probe":
        self._scope.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in self._decoder.named_modules():
            if name:
                hook = module.register_forward_hook(partial(self._look, name))
                self._scope.callback(hook.remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._scope.close()

    def find(self, loss: Tensor) -> Finding | None:
        """Return the first non-finite value in the passes of the scope. `loss`: their loss."""
        for place, name in _not_finite(self._outputs):
            return Finding(0, self._number(name, place), name)
        if not bool(torch.isfinite(loss)):
            return Finding(1, 0, self._name_head())
        for place, name in _not_finite(self._gradients):
            return Finding(2, self._number(name, place, is_backward=True), name)
        gradients = {
            name: parameter.grad for name, parameter in self._decoder.named_parameters() if parameter.grad is not None
        }
        flags = [(name, _is_finite(local_part(gradient))) for name, gradient in gradients.items()]
        for place, name in _not_finite(flags):
            return Finding(3, self._number(name.rpartition(".")[0], place), name)
        return None

    def _number(self, module: str, place: int, is_backward: bool = False) -> int:
        """Return the place of a value in the passes of all stages, given that on this rank."""
        stage = self._stage_of.get(module, 0)
        return (-stage if is_backward else stage) * _MAX_VALUES + place

    def _look(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._outputs.append((name, _is_finite(tensor.detach())))
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_back, name))  # type: ignore[no-untyped-call]

    def _look_back(self, name: str, gradient: Tensor) -> None:
        self._gradients.append((name, _is_finite(gradient)))

    def _name_head(self) -> str:
        """Return the head's name. It may have no hook call: the chunked loss uses its weight directly."""
        head = self._decoder.get_output_embeddings()
        names = (name for name, module in self._decoder.named_modules() if module is head)
        return next(names, "the model's head")


def _is_finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(local_part(tensor)).all()


def _not_finite(flags: list[tuple[str, Tensor]]) -> Iterator[tuple[int, str]]:
    if flags:
        finite = torch.stack([flag for _, flag in flags]).tolist()
        yield from ((place, name) for place, (name, _) in enumerate(flags) if not finite[place])
