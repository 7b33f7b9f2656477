"""The decoder layers whose work a calibration times: those of Llama, as they are trained."""

from collections.abc import Callable
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


def pass_through(layer: Any, hidden: "Tensor") -> Callable[[], None]:
    """The forward and the backward pass of a layer, with rotary positions that turn nothing."""
    shape = (1, hidden.shape[1], layer.self_attn.head_dim)
    positions = (hidden.new_ones(shape), hidden.new_zeros(shape))

    def step() -> None:
        layer(hidden, position_embeddings=positions).sum().backward()
        layer.zero_grad(set_to_none=True)

    return step


def build_pointwise(
    device: "torch.device", dtype: "torch.dtype", tokens: int, width: int, head_dim: int
) -> Callable[[], object]:
    """Two norms, of which three and two products read, rotary positions, a gate, two sums and the order of heads."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    head_dim, inner = min(head_dim, width), inner_width(width)
    layer: Any = build_layer(width, head_dim).to(device, dtype)
    widths = (width, width, inner, inner, width, width, width, width)
    inputs = [torch.randn(1, tokens, each, device=device, dtype=dtype, requires_grad=True) for each in widths]
    cosine = torch.ones(1, tokens, head_dim, device=device, dtype=dtype)
    sine = torch.zeros_like(cosine)

    def run() -> None:
        hidden, down, gate, up, query, key, mixed, out = inputs
        heads = [each.view(1, tokens, -1, head_dim).transpose(1, 2) for each in (query, key)]
        after = hidden + out
        first, second = layer.input_layernorm(hidden), layer.post_attention_layernorm(after)
        results = [
            *apply_rotary_pos_emb(*heads, cosine, sine),
            *(first.view_as(first) for _ in range(3)),
            *(second.view_as(second) for _ in range(2)),
            mixed.view(1, -1, tokens, head_dim).transpose(1, 2).reshape(1, tokens, width),
            layer.mlp.act_fn(gate) * up,
            after + down,
        ]
        torch.autograd.backward(results, [torch.ones_like(each) for each in results])
        for each in (*inputs, *layer.parameters()):
            each.grad = None

    return run


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
