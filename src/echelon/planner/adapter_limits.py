"""Refuses an adapter that a model cannot have, by the sizes of its linear layers, or whose packages are missing."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError
from echelon.ground.extras import require_extra
from echelon.planner.adapter_plan import ROW_MULTIPLE, build_adapter_plan, targeted_linears
from echelon.planner.model_shape import ModelShape

if TYPE_CHECKING:
    from echelon.recipe.inputs import AdapterConfig


def check_packages(adapter: "AdapterConfig") -> None:
    """Raise ConfigError if the packages that an adapter requires are not installed."""
    if adapter.is_adapter:
        extra = "qlora" if adapter.method == "qlora" else "peft"
        require_extra(f"adapter.method={adapter.method}", extra, "or use adapter.method=full")


def check_ranks(adapter: "AdapterConfig", ranks: Mapping[str, int]) -> None:
    """Raise ConfigError if `adapter.r` is more than the ranks of the weights with an adapter allow, given by name."""
    largest, smallest = max(ranks, key=ranks.__getitem__), min(ranks, key=ranks.__getitem__)
    if adapter.r > ranks[largest]:
        raise ConfigError(
            f"adapter.r={adapter.r} exceeds the rank of every target layer; the largest is {ranks[largest]}, of "
            f"{largest}; use {ranks[largest]} or less, or adapter.method=full."
        )
    if adapter.init == "pissa" and adapter.r > ranks[smallest]:
        raise ConfigError(
            f"adapter.r={adapter.r}: adapter.init=pissa needs as many singular vectors, and {smallest} has only "
            f"{ranks[smallest]}; use {ranks[smallest]} or less."
        )


def check_rows(model_type: str, rows: Sequence[int]) -> None:
    """Raise ConfigError if the linear layers of a model, given by their input features, cannot be in 4 bits."""
    odd = [row for row in rows if row % ROW_MULTIPLE]
    if not rows or odd:
        what = f"a linear layer with {odd[0]} input features" if odd else "no plain linear layers"
        raise ConfigError(
            f"adapter.method=qlora: the decoder layers of {model_type} have {what}, and 4-bit quantisation requires "
            f"linear layers with a multiple of {ROW_MULTIPLE} input features; use adapter.method=lora."
        )


def check_adapter_shape(adapter: "AdapterConfig", shape: ModelShape) -> None:
    """Refuse an adapter of linear layers inside decoder layers that a model of this shape does not support.

    Raises ConfigError: the message names the key and a valid value.
    """
    plan = build_adapter_plan(adapter, shape)
    assert plan is not None
    if adapter.method == "qlora":
        check_rows(shape.model_type, [linear.in_features for linear in shape.linears])
    targets = targeted_linears(shape, plan)
    check_ranks(adapter, {linear.name: min(linear.in_features, linear.out_features) for linear in targets})
