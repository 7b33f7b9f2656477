"""PEFT's LoRA layer, whose adapter is added to the output of the frozen layer by one matrix product.

PEFT computes B(A(x)), scales it and adds it: three tensors of the output's size in the forward pass, and a scaled copy
of the output's gradient in the backward pass. On a CPU, each of these passes over memory takes as long as a product by
A. Here the product by B is added to the output of the frozen layer in place; or, where selective checkpointing keeps
that output for the backward pass, to a copy, which is not kept.

Layers that get the same input (q, k, v; gate, up) read it in one product by all of their A, one below the other, and
their backward pass has one product for its gradient. The first that runs leaves the others their part.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo.config
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from typing_extensions import override

from echelon.planner.model_shape import SHARED_INPUTS


class _Siblings:
    """Layers that get the same input, and what those that have run have left for the others: that input, and A x."""

    def __init__(self, layers: Sequence["AddingLinear"]) -> None:
        self.layers = layers
        self.left: tuple[Tensor, dict[int, Tensor]] | None = None


class AddingLinear(Linear):  # type: ignore[misc]
    """A LoRA layer without DoRA. It computes what its base class does, with one rounding instead of three."""

    siblings: _Siblings | None = None
    index: int = 0
    """Of this layer among its siblings."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return W x + scaling * B(A(x)), [..., out], in the dtype of W x."""
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        (name,) = self.active_adapters
        inputs = x.flatten(0, -2)  # the result of a product of matrices is no view, so that autograd copies nothing
        result: Tensor = self.base_layer(inputs)
        rows = self._reduce(x, inputs, name).to(result.dtype)
        expand = self.lora_B[name].weight.to(result.dtype).t()
        result = self._add(result, rows, expand, self.scaling[name])
        return result.view(*x.shape[:-1], result.shape[-1])

    def _reduce(self, x: Tensor, inputs: Tensor, name: str) -> Tensor:
        """Return A x, [tokens, r]. `inputs`: x as [tokens, in]. Another input than its siblings' costs time only."""
        if self.siblings is None:
            return self.lora_A[name](self.lora_dropout[name](inputs))  # type: ignore[no-any-return]
        left = self.siblings.left
        if left is None or left[0] is not x or self.index not in left[1]:
            weights = [layer.lora_A[name].weight for layer in self.siblings.layers]
            product = nn.functional.linear(inputs, torch.cat(weights))
            left = x, dict(enumerate(torch.split(product, [len(weight) for weight in weights], -1)))
        rows = left[1].pop(self.index)
        self.siblings.left = left if left[1] else None
        return rows

    def _add(self, result: Tensor, rows: Tensor, expand: Tensor, scaling: float) -> Tensor:
        add = torch.addmm if self.fan_in_fan_out else Tensor.addmm_  # Conv1D returns a view
        return add(result, rows, expand, alpha=scaling)


class CopyingLinear(AddingLinear):
    """The same for layers under selective checkpointing, which keeps the output of the frozen layer.

    That must not change. A batched product is not among the operations that are kept, so nothing is kept twice.
    """

    @override
    def _add(self, result: Tensor, rows: Tensor, expand: Tensor, scaling: float) -> Tensor:
        return torch.baddbmm(result[None], rows[None], expand[None], alpha=scaling)[0]


def add_by_products(model: nn.Module, keeps_products: bool) -> None:
    """Let the plain LoRA layers of a model add their adapters by one product. Their parameters stay what they are.

    Not for layers whose B is divided: its hooks would be passed over. `keeps_products`: whether the layers are under
    selective checkpointing.
    """
    for module in model.modules():
        if type(module) is Linear and not module.lora_variant:
            module.__class__ = CopyingLinear if keeps_products else AddingLinear
    for parent in model.modules():
        children = dict(parent.named_children())
        for names in SHARED_INPUTS:
            _share_input([children[name] for name in names if name in children])


def _share_input(layers: Sequence[nn.Module]) -> None:
    """Let those of the layers that have an adapter and no dropout, which draws a mask for each, read x once."""
    with_adapter = (layer for layer in layers if isinstance(layer, AddingLinear))
    plain = [
        layer for layer in with_adapter if all(isinstance(one, nn.Identity) for one in layer.lora_dropout.values())
    ]
    if len(plain) > 1:
        siblings = _Siblings(plain)
        for index, layer in enumerate(plain):
            layer.siblings, layer.index = siblings, index
        # After a layer, `left` is None as before it, so that a compiled layer that is recomputed need not set it again.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
