"""PEFT's LoRA layer, whose adapter is added to the output of the frozen layer by one matrix product.

PEFT computes B(A(x)), scales it and adds it: three tensors of the output's size in the forward pass, and a scaled copy
of the output's gradient in the backward pass. On a CPU, each of these passes over memory takes as long as a product by
A. Here the product by B is added to the output of the frozen layer in place; or, where selective checkpointing keeps
that output for the backward pass, to a copy, which is not kept.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from typing_extensions import override


class AddingLinear(Linear):  # type: ignore[misc]
    """A LoRA layer without DoRA. It computes what its base class does, with one rounding instead of three."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return W x + scaling * B(A(x)), [..., out], in the dtype of W x."""
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        (name,) = self.active_adapters
        inputs = x.flatten(0, -2)  # the result of a product of matrices is no view, so that autograd copies nothing
        result: Tensor = self.base_layer(inputs)
        rows = self.lora_A[name](self.lora_dropout[name](inputs)).to(result.dtype)
        expand = self.lora_B[name].weight.to(result.dtype).t()
        result = self._add(result, rows, expand, self.scaling[name])
        return result.view(*x.shape[:-1], result.shape[-1])

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
