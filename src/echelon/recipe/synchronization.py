"""The section of the recipe about replicas: how they agree on the weights, and what they send for it."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from echelon.ground.extensions import is_extension
from echelon.recipe.names import Options, SynchronizerName, check_has_options
from echelon.recipe.section import Count, CountOrZero, Flag, Number, Positive, Section, rule

CompressMethod = Literal["none", "bf16", "fp16", "int8", "powersgd", "topk", "randomk", "sign"]

Aggregate = Literal["weighted", "mean", "sum"]

EVERY_STEP, QUORUM, PARAMETER_SERVER = "every_step", "quorum", "parameter_server"
APART = ("local_sgd", "diloco")
KEPT = (QUORUM, PARAMETER_SERVER)
"""Those under which a process may be lost while the others train on."""
_USUAL: dict[str, Any] = {
    "replicas": 1, "every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0, "overlap": False, "min_replicas": 1,
    "servers": 1, "aggregate": "weighted", "max_staleness": 0, "staleness_compensation": 0.0,
}  # fmt: skip
# Where a default depends on the name; those of DiLoCo are those of its paper, arXiv:2311.08105.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "local_sgd": {"replicas": 2, "every": 30},
    "diloco": {"replicas": 2, "every": 30, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    QUORUM: {"replicas": 2},
}
# The keys that have an effect under a name; all of them under one of your own.
_KEYS: dict[str, tuple[str, ...]] = {
    EVERY_STEP: (),
    "local_sgd": ("replicas", "every", "outer_learning_rate", "overlap"),
    "diloco": ("replicas", "every", "outer_learning_rate", "outer_momentum", "overlap"),
    QUORUM: ("replicas", "min_replicas"),
    PARAMETER_SERVER: ("servers", "aggregate", "max_staleness", "staleness_compensation"),
}
_NEEDED = {"rank": ("powersgd",), "fraction": ("topk", "randomk")}
_METHODS: dict[str, tuple[CompressMethod, ...]] = {
    EVERY_STEP: ("none", "bf16", "fp16", "powersgd", "topk", "randomk", "sign"),
    "local_sgd": ("none", "bf16", "int8"),
    "diloco": ("none", "bf16", "int8"),
    PARAMETER_SERVER: ("none", "bf16", "fp16", "int8", "topk"),
}


class CompressConfig(Section):
    """How gradients are compressed before they are sent between replicas."""

    method: CompressMethod = Field(
        "none",
        description="`bf16` and `fp16` round, `powersgd` sends two thin matrices for each matrix, `topk` the largest "
        "values, `randomk` random ones, `sign` one bit each; what is not sent is added to the gradients of the next "
        "step. `int8` and `bf16` round the outer gradients of `local_sgd` and `diloco`, and what is pushed to "
        "a `parameter_server`.",
    )
    rank: Count = Field(4, description="With `powersgd`: columns of the thin matrices.")
    fraction: Annotated[Number, Field(gt=0, le=1)] = Field(
        0.01, description="With `topk` and `randomk`: the share of the values that is sent."
    )

    @rule
    def _numbers_are_used(self) -> None:
        for key, methods in _NEEDED.items():
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default and self.method not in methods:
                raise ValueError(
                    f"sync.compress.{key}={value:g} has no effect with sync.compress.method={self.method}; set "
                    f"method: {' or '.join(methods)}, or remove {key}."
                )


def _default(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda given: _DEFAULTS.get(given.get("name", EVERY_STEP), {}).get(key, _USUAL[key])


class SyncConfig(Section):
    """How replicas agree on the weights. `parallel` describes the processes of one replica."""

    name: SynchronizerName = Field(
        EVERY_STEP,
        description="`every_step` reduces gradients in every step, which is exact. `local_sgd` and `diloco`: replicas "
        "train separately for `sync.every` steps, and then take the mean of their changes, as it is (`local_sgd`) or "
        "as the gradient of an outer optimizer (`diloco`). `quorum` is `every_step` between replicas, of which any "
        "may be lost and return while the others train on. With `parameter_server` the first processes own the "
        "weights and step them, with the gradients that all processes push to them.",
    )
    replicas: Count = Field(
        default_factory=_default("replicas"),
        description="The replicas; they divide the processes. Default: 2 for `local_sgd`, `diloco` "
        "and `quorum`, otherwise 1.",
    )
    every: Count = Field(
        default_factory=_default("every"),
        description="Steps between synchronizations. Default: 30 for `local_sgd` and `diloco`, otherwise 1.",
    )
    outer_learning_rate: Positive = Field(
        default_factory=_default("outer_learning_rate"),
        description="Learning rate of the outer optimizer. Default: 0.7 for `diloco`, otherwise 1.",
    )
    outer_momentum: Annotated[Number, Field(ge=0, lt=1)] = Field(
        default_factory=_default("outer_momentum"),
        description="Nesterov momentum of the outer optimizer. Default: 0.9 for `diloco`, otherwise 0.",
    )
    overlap: Flag = Field(
        False,
        description="With `local_sgd` and `diloco`: outer gradients are sent during the next step, and applied one "
        "step late.",
    )
    min_replicas: Count = Field(
        1, description="With `quorum`: with fewer replicas than this the others wait until lost ones have returned."
    )
    servers: Count = Field(
        1, description="With `parameter_server`: the processes that own a part of the weights and of the optimizer."
    )
    aggregate: Aggregate = Field(
        "weighted",
        description="With `parameter_server`: a step takes the mean gradient of all targets (`weighted`, which is "
        "what `every_step` does), the mean of the processes' mean gradients (`mean`), or their sum (`sum`).",
    )
    max_staleness: CountOrZero | None = Field(
        0,
        description="With `parameter_server`: by how many steps the weights may be older than those that a gradient "
        "is applied to. 0: every step waits for all processes. `null`: no limit.",
    )
    staleness_compensation: Annotated[Number, Field(ge=0)] = Field(
        0.0,
        description="With `parameter_server` and a `max_staleness` other than 0: the factor λ of delay-compensated SGD "
        "(arXiv:1609.08326). A gradient g of weights v is applied to weights w as g + λ g² (w - v). 0: as it is.",
    )
    compress: CompressConfig = Field(CompressConfig(), description="What replicas send instead of whole gradients.")
    options: Options = Field(None, description="Arguments of a synchronizer of your own, by their names.")

    @property
    def is_exact(self) -> bool:
        """Whether the losses are those of a single process, up to rounding; unknown synchronizers are not."""
        is_served = self.name == PARAMETER_SERVER and (self.aggregate, self.max_staleness) == ("weighted", 0)
        return (is_served or self.name in (EVERY_STEP, QUORUM)) and self.compress.method == "none"

    @property
    def num_essential(self) -> int:
        """How many processes, the first ones, have state that no other process has."""
        return self.servers if self.name == PARAMETER_SERVER else 0

    @rule
    def _options_are_taken(self) -> None:
        check_has_options("sync.name", self.name, self.options)

    @rule
    def _keys_belong_to_the_name(self) -> None:
        used = _KEYS.get(self.name, tuple(_USUAL))
        for key, usual in _USUAL.items():
            value = getattr(self, key)
            if key not in used and value != usual:
                names = [name for name, keys in _KEYS.items() if key in keys]
                shown = "null" if value is None else str(value).lower()
                raise ValueError(
                    f"sync.{key}={shown} has no effect with sync.name={self.name}; set sync.name: "
                    f"{' or '.join(names)}, or remove {key}."
                )

    @rule
    def _only_waiting_workers_are_added_up(self) -> None:
        if self.max_staleness != 0 and self.aggregate != "weighted":
            raise ValueError(
                f"sync.aggregate={self.aggregate} needs sync.max_staleness: 0: otherwise the gradient of each process "
                "is applied alone; remove one of the two keys."
            )

    @rule
    def _only_old_gradients_are_compensated(self) -> None:
        if self.staleness_compensation and self.max_staleness == 0:
            raise ValueError(
                f"sync.staleness_compensation={self.staleness_compensation:g} has no effect with sync.max_staleness=0, "
                "where no gradient is of older weights; set max_staleness to 1 or more, or to null, or remove "
                "staleness_compensation."
            )

    @rule
    def _method_belongs_to_the_name(self) -> None:
        method, possible = self.compress.method, _METHODS.get(self.name, ("none",))
        if method not in possible and not is_extension(self.name):
            raise ValueError(
                f"sync.compress.method={method} does not work with sync.name={self.name}; use {', '.join(possible)}."
            )

    @rule
    def _enough_replicas_exist(self) -> None:
        if self.min_replicas > self.replicas:
            raise ValueError(
                f"sync.min_replicas={self.min_replicas} is more than sync.replicas={self.replicas}, so after a "
                f"loss the others would wait forever; use at most {self.replicas}."
            )

    @rule
    def _an_agreement_needs_two(self) -> None:
        if self.name in (*APART, QUORUM) and self.replicas == 1:
            raise ValueError(
                f"sync.replicas=1: sync.name={self.name} synchronizes at least two replicas; use 2 or more, or "
                "sync.name: every_step."
            )
