"""The decoder layers whose work a calibration times: those of Llama, as they are trained."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def inner_width(width: int) -> int:
    """The width between the products of an MLP of Llama: 8/3 of the hidden one, in whole sixteens."""
    return -(-8 * width // 3 // 16) * 16


def build_layer(width: int, head_dim: int) -> "torch.nn.Module":
    """A decoder layer of Llama, as it is trained."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    size = min(head_dim, width)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner_width(width),
        num_attention_heads=width // size,
        num_key_value_heads=width // size,
        head_dim=size,
        attn_implementation="sdpa",
    )
    layer: torch.nn.Module = LlamaDecoderLayer(config, 0)
    return layer


def pass_through(layers: "Sequence[Any]", hidden: "Tensor") -> Callable[[], None]:
    """The forward and the backward pass of layers, one after the other, with rotary positions that turn nothing.

    `hidden`: of shape (sequences, tokens, width).
    """
    shape = (1, hidden.shape[1], layers[0].self_attn.head_dim)
    positions = (hidden.new_ones(shape), hidden.new_zeros(shape))

    def step() -> None:
        passed: Any = hidden
        for layer in layers:
            passed = layer(passed, position_embeddings=positions)
        passed.sum().backward()
        for layer in layers:
            layer.zero_grad(set_to_none=True)

    return step


def divide_layer(layer: "torch.nn.Module", kind: str) -> None:
    """Divide the matrices over all processes; norms are distributed tensors that every process has, as in training."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    styles = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    parallelize_module(layer, mesh, styles)
    for name, module in layer.named_modules():
        if name.endswith("layernorm"):
            distribute_module(
                module,
                mesh,
                None,
                lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),  # type: ignore[arg-type]
                lambda _, output, mesh: output.to_local(),
            )
