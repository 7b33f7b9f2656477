"""Tensor parallelism: the matrices of a decoder divided over ranks, by the plan that its architecture declares.

Heads and the intermediate width are divided as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), embedding and
head along the vocabulary. With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) each rank has a part of
every sequence outside of attention and MLP.

The hidden states between the modules of a layer, its *stream*, are plain tensors: whole on every rank, or its part of
the sequence. Inside a block (attention or MLP) they are whole. Parameters are DTensors, so `fully_shard` shards what is
divided, and adds up the gradients of what is not. Experts are divided in expert.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.model.adapters import ADAPTER
from echelon.learn.model.parts import find_layers, find_score_head
from echelon.learn.model.sharding import local_part
from echelon.learn.model.stage import own_layers
from echelon.learn.parallel import tensor_styles
from echelon.planner.plan import ParallelPlan

WHOLE, ALONG_SEQUENCE = Replicate(), Shard(1)
PACKED = tensor_styles.PACKED

# What transformers calls a way to divide a module, and PyTorch's style for it, given the placement of the stream.
STYLES: Mapping[str, Callable[[Placement], ParallelStyle]] = {
    "colwise": lambda stream: ColwiseParallel(),
    "rowwise": lambda stream: RowwiseParallel(output_layouts=stream),
    # Norms of heads, [batch, seq, heads, dim]: each rank has some of the heads, so gradients are added up over ranks.
    "replicated_with_grad_allreduce": lambda stream: SequenceParallel(sequence_dim=2, use_local_output=True),
    tensor_styles.ALL_HEADS: lambda stream: tensor_styles.NormOfAllHeads(),
    PACKED: lambda stream: ColwiseParallel(),
}


# What transformers leaves out of a plan although it is divided as elsewhere, by model type.
_ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {"layers.*.self_attn.o_proj": "rowwise"}
LEFT_OUT: Mapping[str, Mapping[str, str]] = {"granitemoe": _ATTENTION}


class _Whole(ParallelStyle):
    """Every rank has the module's parameters, and applies them to what it has of the input."""

    def __init__(self, given: Placement, use_local_output: bool) -> None:
        self._given, self._use_local_output = given, use_local_output

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            [given] = inputs
            return given if isinstance(given, DTensor) else _declare(given, mesh, self._given)

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if self._use_local_output else output

        return distribute_module(module, device_mesh, None, enter, leave)


# A and B of a low-rank adapter, by the style of the matrix beside it. Together they send one number per token and rank
# of the adapter.
ADAPTER_STYLES: dict[str, tuple[Callable[[Placement], ParallelStyle], Callable[[Placement], ParallelStyle]]] = {
    "colwise": (lambda stream: _Whole(WHOLE, use_local_output=False), lambda stream: ColwiseParallel()),
    "rowwise": (
        lambda stream: RowwiseParallel(output_layouts=stream),
        lambda stream: _Whole(stream, use_local_output=True),
    ),
}
ADAPTER_STYLES[PACKED] = ADAPTER_STYLES["colwise"]


class _Receive(ParallelStyle):
    """Converts the hidden states that enter a module: its first argument, or the argument `hidden_states`."""

    def __init__(self, convert: Callable[[Tensor, DeviceMesh], Tensor]) -> None:
        self._convert = convert

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def receive(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (self._convert(args[0], device_mesh), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self._convert(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(receive, with_kwargs=True)
        return module


class _Return(ParallelStyle):
    """Converts what a module returns."""

    def __init__(self, convert: Callable[[Tensor, DeviceMesh], Tensor]) -> None:
        self._convert = convert

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _module, _inputs, output: self._convert(output, device_mesh))
        return module


def _declare(hidden: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(hidden, mesh, [placement], run_check=False)


def _gather(hidden: Tensor, mesh: DeviceMesh, stream: Placement) -> DTensor:
    """The whole stream. As it stays a DTensor, its gradient is added up once for all matrices that read it."""
    return _declare(hidden, mesh, stream).redistribute(placements=[WHOLE])


def _gather_plain(hidden: Tensor, mesh: DeviceMesh, stream: Placement) -> Tensor:
    """The whole stream, for the head and for experts: what each rank has of them contributes a part of its gradient."""
    return _gather(hidden, mesh, stream).to_local(grad_placements=[Partial()])


def _gather_whole(hidden: Tensor, mesh: DeviceMesh, stream: Placement) -> Tensor:
    """The whole stream, for what every rank computes of it: each has its whole gradient."""
    return _gather(hidden, mesh, stream).to_local()


def _add_up(output: Tensor, mesh: DeviceMesh, stream: Placement) -> Tensor:
    """The stream, from outputs that are parts of a sum."""
    return _declare(output, mesh, Partial()).redistribute(placements=[stream]).to_local()


def _settle(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """A plain tensor, in place of one that waits for its sum when it is read: compiled code would lose its gradient."""
    return hidden.clone()


def _cut_sequence(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of every sequence."""
    return _declare(hidden, mesh, WHOLE).redistribute(placements=[ALONG_SEQUENCE]).to_local()


def _join_sequence(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole stream, which leaves a pipeline stage."""
    return _gather_whole(hidden, mesh, ALONG_SEQUENCE)


def find_divided(model: Any) -> dict[str, str]:
    """Return the modules of the decoder layers that are divided, by name in `model.base_model`, each with its style.

    Args:
        model: an HF causal language model, with or without an adapter.

    Raises:
        ConfigError: the architecture declares no plan, or one that leaves out a matrix or needs another style.
    """
    base, kind = model.base_model, model.config.model_type
    declared = base.config.base_model_tp_plan
    if not declared:
        raise ConfigError(
            f"parallel.tp above 1: transformers declares no tensor-parallel plan for {kind} (base_model_tp_plan); use "
            "parallel.dp_shard, or a model with a plan, such as llama."
        )
    declared = {**declared, **LEFT_OUT.get(kind, {})}
    inside = {id(module) for layer in find_layers(model) for module in layer.modules()}
    names = {name: id(module) for name, module in base.named_modules()}
    divided = {name: declared[key] for name in names if (key := _wildcard(name)) in declared and names[name] in inside}
    divided = tensor_styles.with_own_styles(base, divided)
    for name, style in divided.items():
        if style == tensor_styles.EXPERTS:
            tensor_styles.find_router(model, name)
        elif style not in STYLES:
            raise ConfigError(
                f"parallel.tp above 1: {name} of {kind} is divided as {style!r} by transformers, which echelon does "
                "not do; use parallel.dp_shard."
            )
    _check_complete(model, divided)
    return divided


def _wildcard(name: str) -> str:
    """The name with each number replaced by `*`, as plans spell it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _find_blocks(divided: Iterable[str]) -> set[str]:
    """The names of the modules around divided ones: attention and MLP."""
    return {name.rpartition(".")[0] for name in divided}


def _find_experts(divided: Mapping[str, str]) -> list[str]:
    """The names of the modules that hold the experts of a layer."""
    return [name for name, style in divided.items() if style == tensor_styles.EXPERTS]


def _check_complete(model: Any, divided: Mapping[str, str]) -> None:
    """Raise ConfigError for a parameter that is neither divided nor that of a norm, embedding or head.

    Inside a block, what is not divided would get a part of its gradient on each rank; outside, only norms can run on a
    part of the sequence.
    """
    blocks = tuple(f"{block}." for block in _find_blocks(divided))
    routers = [tensor_styles.find_router(model, name) for name in _find_experts(divided)]
    prefixes = tuple(f"{name}." for name in (*divided, *routers))
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    for name, parameter in model.base_model.named_parameters():
        is_norm = parameter.ndim == 1 and not name.startswith(blocks)
        if not (is_norm or name.startswith(prefixes) or parameter is embedding):
            raise ConfigError(
                f"parallel.tp above 1: the tensor-parallel plan of {model.config.model_type} in transformers leaves "
                f"out {name}, which every rank would train on a part of its input; use parallel.dp_shard."
            )


def apply_tensor_parallel(model: Any, plan: ParallelPlan, meshes: Meshes) -> None:
    """Divide a model on meta, or a pipeline stage of it, over the mesh `tp`, in place, but for experts.

    Names and tied weights stay as they are. The ranks of the mesh then compute together: each must run the same passes.

    Raises:
        ConfigError: see `find_divided`.
    """
    mesh = meshes.tp
    assert mesh is not None
    stream = ALONG_SEQUENCE if plan.sequence_parallel else WHOLE
    divided, base = find_divided(model), model.base_model
    norms, final_norm = _find_norms(base, divided, model.get_input_embeddings())
    with _keeping(model):
        experts = _find_experts(divided)
        dense = {name: style for name, style in divided.items() if name not in experts}
        _divide_matrices(base, dense, stream, mesh)
        for block in _find_blocks(dense):
            _apply(base.get_submodule(block), mesh, _Receive(partial(_gather, stream=stream)))
        _connect_experts(model, experts, stream, mesh)
        if plan.sequence_parallel:
            layers = own_layers(model)
            _apply(layers[0], mesh, _Receive(_cut_sequence))
            for norm in norms:
                _apply(norm, mesh, SequenceParallel(use_local_output=True))
            if final_norm is None:
                _apply(layers[-1], mesh, _Return(_join_sequence))
        if final_norm is not None:
            # Every rank has all of the head that scores texts, and so the whole gradient of its input.
            gather = _gather_plain if find_score_head(model) is None else _gather_whole
            _apply(final_norm, mesh, _Return(partial(gather, stream=stream)))
        _divide_vocabulary(model, mesh)
        if plan.compile and isinstance(embedding := model.get_input_embeddings(), nn.Embedding):
            _apply(embedding, mesh, _Return(_settle))


def _divide_matrices(base: nn.Module, styles: Mapping[str, str], stream: Placement, mesh: DeviceMesh) -> None:
    """Divide the matrices of the decoder, by name, each with its style."""
    packed = {name: tensor_styles.find_sizes(base, name) for name, style in styles.items() if style == PACKED}
    for name, style in styles.items():
        _divide(base.get_submodule(name), style, stream, mesh)
    for name, sizes in packed.items():
        _apply(base.get_submodule(name), mesh, _Return(partial(tensor_styles.keep_own, sizes=sizes)))
        if name.endswith("qkv_proj"):
            tensor_styles.divide_heads(base.get_submodule(name.rpartition(".")[0]), mesh.size())


def _connect_experts(model: Any, experts: Iterable[str], stream: Placement, mesh: DeviceMesh) -> None:
    """Exchange what goes into the blocks of experts and comes out of them; `experts`: their names in the decoder."""
    base = model.base_model
    for name in experts:
        router = tensor_styles.find_router(model, name)
        tensor_styles.connect_router(base.get_submodule(router), base.get_submodule(name), mesh)
    for block in _find_blocks(experts):
        _apply(base.get_submodule(block), mesh, _Receive(partial(_gather_plain, stream=stream)))
        _apply(base.get_submodule(block), mesh, _Return(partial(_add_up, stream=stream)))


def _apply(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    parallelize_module(module, mesh, style, src_data_rank=None)  # every rank makes its own part


@contextmanager
def _keeping(model: nn.Module) -> Iterator[None]:
    """Scope that keeps what PyTorch's styles do not: whether a parameter is trained, and plain buffers."""
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    yield
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trained[name])
    for module, before in buffers:
        module._buffers.update(before)


def _divide_vocabulary(model: Any, mesh: DeviceMesh) -> None:
    """Divide the embedding and the head, if they are in this pipeline stage; tied weights stay tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table, weight = getattr(embedding, "weight", None), getattr(head, "weight", None)
    if table is not None:
        _apply(embedding, mesh, RowwiseParallel(input_layouts=WHOLE, output_layouts=WHOLE))
    if weight is not None:
        _apply(head, mesh, ColwiseParallel(output_layouts=WHOLE))
    if weight is not None and weight is table:
        head.weight = embedding.weight


def _divide(module: Any, style: str, stream: Placement, mesh: DeviceMesh) -> None:
    """Divide a module, with its adapter if it has one."""
    if not hasattr(module, "base_layer"):
        _apply(module, mesh, STYLES[style](stream))
        return
    _apply(module.base_layer, mesh, STYLES[style](stream))
    for part, choose in zip((module.lora_A, module.lora_B), ADAPTER_STYLES[style], strict=True):
        _apply(part[ADAPTER], mesh, choose(stream))
    if ADAPTER in module.lora_magnitude_vector:
        magnitude = module.lora_magnitude_vector[ADAPTER]
        placement = WHOLE if style == "rowwise" else Shard(0)
        distributed = distribute_tensor(magnitude.weight, mesh, [placement], src_data_rank=None)
        magnitude.weight = nn.Parameter(distributed, requires_grad=magnitude.weight.requires_grad)
        group = mesh.get_group() if style == "rowwise" else None
        magnitude.forward = partial(_apply_dora, magnitude, group, stream)


def _apply_dora(
    magnitude: nn.Module,
    group: dist.ProcessGroup | None,
    stream: Placement,
    x: Tensor,
    *,
    lora_A: Any,
    lora_B: Any,
    scaling: float,
    base_layer: Any,
    base_result: Tensor,
    adapter_name: str = ADAPTER,
) -> Tensor:
    """What PEFT's DoraLinearLayer returns, for divided matrices.

    The norm of a row is that of all ranks. `group`: the ranks that have parts of every row; None if rows are whole.
    """
    base, a, b = (local_part(layer.weight.detach()).to(x.dtype) for layer in (base_layer, lora_A, lora_B))
    squares = (base + scaling * (b @ a)).square().sum(1)
    if group is not None:
        dist.all_reduce(squares, group=group)
    weight = magnitude.weight
    assert isinstance(weight, DTensor)
    gradient = Partial() if group is not None and stream == ALONG_SEQUENCE else weight.placements[0]
    scale = (weight.to_local(grad_placements=[gradient]) / squares.sqrt()).view(1, -1)
    bias = base_layer.bias
    result = base_result if bias is None else base_result - local_part(bias)
    added: Tensor = lora_B(lora_A(x))
    return (scale - 1) * result + scale * added * scaling


def _find_norms(
    base: nn.Module, divided: Iterable[str], embedding: nn.Module
) -> tuple[list[nn.Module], nn.Module | None]:
    """All norms outside of blocks; the one after the layers again, None in a pipeline stage without it."""
    blocks = tuple(f"{block}." for block in _find_blocks(divided))
    inside = {id(module) for layer in find_layers(base) for module in layer.modules()}
    owners = [
        (name, module)
        for name, module in base.named_modules()
        if module is not embedding and any(True for _ in module.parameters(recurse=False))
    ]
    norms = [module for name, module in owners if id(module) in inside and not name.startswith(blocks)]
    final = [module for _, module in owners if id(module) not in inside]
    assert len(final) <= 1, "one norm is after the layers"
    return [*norms, *final], final[0] if final else None
