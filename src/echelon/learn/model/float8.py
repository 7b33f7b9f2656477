"""Linear layers whose matrix products are in float8, by torchao. Weights stay in the dtype in which they are stored.

Inputs, weights and output gradients are scaled by the largest value of the whole tensor, or of each row, at each use,
and cast to e4m3 (gradients of whole tensors to e5m2); the products accumulate in fp32 (Micikevicius et al. 2022,
arXiv:2209.05433). Weights that are scaled as a whole are gathered in float8: each rank casts its shard.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from echelon.ground.errors import ConfigError
from echelon.ground.extras import require_extra
from echelon.learn.model.parts import find_layers
from echelon.planner.experts import find_recorded_routers
from echelon.recipe.training import Float8Scaling

_MULTIPLE = 16  # the kernels of products in float8 take tiles of this many rows and columns


def check_package() -> None:
    """Raise ConfigError if torchao is not installed."""
    require_extra("train.precision=fp8", "float8", "or use train.precision=bf16")


def find_float8_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that compute in float8, by name: those of the decoder layers whose sizes the kernels support.

    Routers of experts are left out, because small differences in their output choose other experts. The head is left
    out, because the loss is most sensitive to its rounding.

    Raises:
        ConfigError: there are none.
    """
    inside = {id(module) for layer in find_layers(model) for module in layer.modules()}
    linear = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and id(module) in inside
    }
    routers = {id(module) for router, _ in find_recorded_routers(model).values() for module in router.modules()}
    plain = {name: module for name, module in linear.items() if id(module) not in routers}
    sizes = {name: (module.in_features, module.out_features) for name, module in plain.items()}
    fitting = {
        name: plain[name] for name, (rows, columns) in sizes.items() if rows % _MULTIPLE == columns % _MULTIPLE == 0
    }
    if not fitting:
        raise ConfigError(
            f"train.precision=fp8: the decoder layers of {type(model).__name__} have no linear layer whose sizes are "
            f"multiples of {_MULTIPLE}; use train.precision=bf16."
        )
    return fitting


def apply_float8(model: nn.Module, emulate: bool, scaling: Float8Scaling = "tensorwise", gathers: bool = False) -> None:
    """Replace linear layers of a model, on meta or not, in place; parameters and their names stay.

    Args:
        emulate: compute the products of the rounded values in the compute dtype, which runs on every device.
        gathers: the weights are sharded by FSDP, which is to gather them in float8; for tensorwise scales.

    Raises:
        ConfigError: no layer can compute in float8, or torchao is not installed.
    """
    check_package()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = find_float8_layers(model)
    options: dict[str, Any] = {"emulate": emulate, "enable_fsdp_float8_all_gather": gathers}
    config = replace(Float8LinearConfig.from_recipe_name(scaling), **options)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)


def share_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8, from their shards. Collective.

    Without it each layer finds its own while it is gathered, by a collective of its own. To be called after each change
    of the weights.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
