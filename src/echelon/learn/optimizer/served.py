"""The part of the weights that a parameter server owns: copies of parameters, and the optimizer that steps them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from echelon.learn.optimizer.stepper import Optimizer, build_optimizer
from echelon.recipe.training import OptimConfig


def divide_names(sizes: Mapping[str, int], num_servers: int) -> list[list[str]]:
    """Return the names that each server owns: the largest first, each to the server with the fewest bytes.

    The names of a server keep their order. The result depends on nothing but the arguments.

    Args:
        sizes: bytes by name.
    """
    totals, owners = [0] * num_servers, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = totals.index(min(totals))
        totals[owners[name]] += sizes[name]
    return [[name for name in sizes if owners[name] == server] for server in range(num_servers)]


@dataclass(frozen=True)
class Served:
    """What a server owns. Its parameters are copies: a worker in the same process computes with its own weights.

    Attributes:
        applied: the shares of steps, by step and share, that were applied alone since workers last waited for all.
    """

    parameters: dict[str, nn.Parameter]
    optimizer: Optimizer
    applied: set[tuple[int, int]] = field(default_factory=set)

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Set the parameters to these weights, by name, of a checkpoint: nothing was applied to them."""
        self.applied.clear()
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])


def build_served(
    model: nn.Module,
    config: OptimConfig,
    master_weights: str,
    seed: int,
    num_servers: int,
    server: int,
    compile_backend: str | None = None,
) -> Served:
    """Copy what server number `server` owns of a materialised model. From `num_servers` on it owns nothing."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in trained.items()}
    names = divide_names(sizes, num_servers)[server] if server < num_servers else []
    copies = {name: nn.Parameter(trained[name].detach().clone()) for name in names}
    optimizer = build_optimizer(model, config, master_weights, seed, compile_backend=compile_backend, stepped=copies)
    return Served(copies, optimizer)
