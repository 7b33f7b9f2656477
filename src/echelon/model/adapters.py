"""Adapters beside a decoder's frozen weights, through PEFT."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def disabled_adapter(model: nn.Module) -> Iterator[None]:
    """The model computes without its adapter, as it did before training. Nothing but the computation changes."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was
