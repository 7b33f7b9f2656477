"""The MLP of a layer in tiles of the sequence, one after another, so that what lies inside it exists for one tile only.

An MLP treats each position by itself, so the tiles together compute what it computes for the whole sequence (as in
Arctic Long Sequence Training, arXiv:2506.13996). The backward pass runs each tile forward again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.model.parts import find_layers, vocabulary_class
from echelon.learn.model.router import has_experts
from echelon.learn.model.small_copy import ConfigKey, random_tokens
from echelon.learn.model.traits import build_copies, describe_error, is_close, run_copy, undisturbed

_LENGTH = 12


def find_mlps(model: PreTrainedModel) -> frozenset[str]:
    """Return the names that MLPs have inside of the layers of a model, on meta or not, found by a small copy.

    Raises:
        ConfigError: a layer has experts, or nothing that treats each position by itself.
    """
    if has_experts(model):
        obstacle: str | frozenset[str] = "its layers have experts, of which each token meets only some"
    else:
        obstacle = _find_names(ConfigKey(model.config, vocabulary_class(model)))
    if isinstance(obstacle, frozenset):
        return obstacle
    raise ConfigError(
        f"train.activation_checkpointing.mlp_tiles: this {model.config.model_type} model has no MLP that can be cut "
        f"into tiles: {obstacle}; use train.activation_checkpointing=full."
    )


@lru_cache(maxsize=16)
def _find_names(key: ConfigKey) -> frozenset[str] | str:
    """Return the names of MLPs inside of layers, or why there are none, as a clause."""
    with undisturbed():
        try:
            small = build_copies(key.others[0], key.config, None, None)[0]
            names = [_find_in_layer(small, layer) for layer in find_layers(small)]
        except Exception as error:  # a family may fail in any way
            return f"a small copy of it does not run ({describe_error(error)})"
    if any(name is None for name in names):
        return "a layer has no part that treats each position by itself"
    return frozenset(name for name in names if name is not None)


def _find_in_layer(small: PreTrainedModel, layer: nn.Module) -> str | None:
    """Return the name of the MLP in a layer: a module with matrices that treats each position by itself."""
    calls: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def watch(name: str) -> Callable[..., None]:
        return lambda module, inputs, keywords, output: calls.update({name: ((*inputs, keywords), output)})

    hooks = [child.register_forward_hook(watch(name), with_kwargs=True) for name, child in layer.named_children()]
    try:
        run_copy(small, random_tokens(small, 2, _LENGTH))
    finally:
        for hook in hooks:
            hook.remove()
    for name, child in layer.named_children():
        (*inputs, keywords), output = calls.get(name, ((None, None, None), None))
        is_one = len(inputs) == 1 and not keywords and isinstance(output, Tensor) and output.shape == inputs[0].shape
        if is_one and sum(weight.dim() > 1 for weight in child.parameters()) > 1:
            tiles = torch.cat([child(tile) for tile in _cut(inputs[0], 3)], 1)
            if is_close(tiles, output):
                return name
    return None


def apply_tiles(layers: Iterable[nn.Module], names: frozenset[str], num_tiles: int) -> None:
    """Make the MLPs with these names compute the sequence in so many tiles, in place and without renaming."""
    for layer in layers:
        for name, child in layer.named_children():
            if name in names:
                child.forward = partial(_run_in_tiles, child, child.forward, num_tiles)


def _run_in_tiles(module: nn.Module, run: Callable[[Tensor], Tensor], num_tiles: int, states: Tensor) -> Tensor:
    """Return what `run`, the forward of a module, computes of [batch, seq, hidden]."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    kept = _Keep.apply(states, *trained)  # type: ignore[no-untyped-call]
    if kept.grad_fn is None:
        return torch.cat([run(tile) for tile in _cut(states, num_tiles)], 1)
    output: Tensor = _Tiles.apply(run, num_tiles, kept.grad_fn, kept, *trained)  # type: ignore[no-untyped-call]
    return output


def _cut(states: Tensor, num_tiles: int) -> Iterator[Tensor]:
    """Yield the tiles of [batch, seq, hidden], contiguous as some modules need it."""
    return (tile.contiguous() for tile in states.tensor_split(num_tiles, 1))


class _Keep(torch.autograd.Function):
    """Keeps the input. A layer that is recomputed has all that it kept once this has run, and stops before the MLP."""

    @staticmethod
    @override
    def forward(ctx: Any, states: Tensor, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        return states.view_as(states)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(None for _ in ctx.needs_input_grad[1:])


class _Tiles(torch.autograd.Function):
    """Computes tile by tile. Gradients of parameters are added up in fp32, and rounded once, as without tiles."""

    @staticmethod
    @override
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], num_tiles: int, keeper: Any, states: Tensor, *trained: Tensor
    ) -> Tensor:
        """`keeper`: what keeps `states`; `trained`: the parameters in `run` that get a gradient."""
        device = states.device
        ctx.run, ctx.num_tiles, ctx.keeper, ctx.trained = run, num_tiles, keeper, trained
        ctx.autocast = _repeat_autocast(device.type)
        ctx.drawn = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        with ctx.autocast():
            return torch.cat([run(tile) for tile in _cut(states, num_tiles)], 1)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Run each tile again, in the same order and with the same dropout, for its gradients."""
        [states] = ctx.keeper.saved_tensors
        of_states, sums = torch.empty_like(states), [torch.zeros_like(one, dtype=torch.float32) for one in ctx.trained]
        parts = _cut(states, ctx.num_tiles), _cut(gradient, ctx.num_tiles), of_states.tensor_split(ctx.num_tiles, 1)
        with _drawn_again(states.device, *ctx.drawn):
            for tile, of_output, of_tile in zip(*parts, strict=True):
                leaf = tile.detach().requires_grad_()
                with torch.enable_grad(), ctx.autocast():
                    output = ctx.run(leaf)
                grads = torch.autograd.grad(output, [leaf, *ctx.trained], of_output, allow_unused=True)
                of_tile.copy_(grads[0])
                for total, part in zip(sums, grads[1:], strict=True):
                    if part is not None:
                        total.add_(part)
        rounded = (total.to(one.dtype) for total, one in zip(sums, ctx.trained, strict=True))
        return None, None, None, of_states, *rounded


def _repeat_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context like the present one. Its casts are not kept: those of the forward pass have no gradient."""
    is_on, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return partial(torch.autocast, device_type, dtype=dtype, enabled=is_on, cache_enabled=False)


@contextmanager
def _drawn_again(device: torch.device, state: Tensor, of_device: Tensor | None) -> Iterator[None]:
    """A scope in which random numbers are those that followed these states."""
    with torch.random.fork_rng(devices=[] if of_device is None else [device]):
        torch.set_rng_state(state)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)
        yield
