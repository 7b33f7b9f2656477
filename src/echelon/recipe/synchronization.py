"""The section of the recipe about replicas: how they agree on the weights, and what they send for it."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from echelon.recipe.key_limits import OWN, Case, Limit, OnlyWith
from echelon.recipe.names import Options, SynchronizerName
from echelon.recipe.section import Count, CountOrZero, Flag, Number, Positive, Section, rule

CompressMethod = Literal["none", "bf16", "fp16", "int8", "powersgd", "topk", "randomk", "sign"]

Aggregate = Literal["weighted", "mean", "sum"]

EVERY_STEP, PARAMETER_SERVER = "every_step", "parameter_server"
APART = ("local_sgd", "diloco")
QUORUM = "quorum"
"""In a plan: `every_step` with `fault.on_lost_process: continue`, under which the replicas that are there agree."""
_METHODS: dict[str, tuple[CompressMethod, ...]] = {
    EVERY_STEP: ("none", "bf16", "fp16", "powersgd", "topk", "randomk", "sign"),
    "local_sgd": ("none", "bf16", "int8"),
    "diloco": ("none", "bf16", "int8"),
    PARAMETER_SERVER: ("none", "bf16", "fp16", "int8", "topk"),
}
_APART = OnlyWith("sync.name", (*APART, OWN))
_SERVED = OnlyWith("sync.name", (PARAMETER_SERVER, OWN))
CONTINUES = "fault.on_lost_process=continue"
_STALE = OnlyWith("sync.max_staleness", why="where no gradient is of older weights")


class CompressConfig(Section):
    """How gradients are compressed before they are sent between replicas."""

    around = "sync.compress."

    method: CompressMethod = Field(
        "none",
        description="`bf16` and `fp16` round, `powersgd` sends two thin matrices for each matrix, `topk` the largest "
        "values, `randomk` random ones, `sign` one bit each; what is not sent is added to the gradients of the next "
        "step. `int8` and `bf16` round the outer gradients of `local_sgd` and `diloco`, and what is pushed to "
        "a `parameter_server`.",
    )
    rank: Annotated[Count, OnlyWith("sync.compress.method", ("powersgd",))] = Field(
        4, description="columns of the thin matrices."
    )
    fraction: Annotated[Number, Field(gt=0, le=1), OnlyWith("sync.compress.method", ("topk", "randomk"))] = Field(
        0.01, description="the share of the values that is sent."
    )


def _default(usual: Any, **of_names: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda before: of_names.get(before.get("name", EVERY_STEP), usual)


class SyncConfig(Section):
    """How replicas agree on the weights. `parallel` describes the processes of one replica."""

    around = "sync."
    limits = (
        *(
            Case("sync.name", (name,), (Limit("sync.compress.method", methods, "does not send in this form"),))
            for name, methods in _METHODS.items()
        ),
        Case("sync.max_staleness", (), (
            Limit("sync.aggregate", ("weighted",), "applies the gradient of each process alone"),
        ), "use sync.max_staleness=0"),
    )  # fmt: skip

    name: SynchronizerName = Field(
        EVERY_STEP,
        description="`every_step` reduces gradients in every step, which is exact. `local_sgd` and `diloco`: replicas "
        "train separately for `sync.every` steps, and then take the mean of their changes, as it is (`local_sgd`) or "
        "as the gradient of an outer optimizer (`diloco`). With `parameter_server` the first processes own the "
        "weights and step them, with the gradients that all processes push to them; the loss of another one does not "
        "stop the rest.",
    )
    replicas: Annotated[Count, OnlyWith("sync.name", (*APART, OWN), also=CONTINUES)] = Field(
        default_factory=_default(1, local_sgd=2, diloco=2),
        description="the replicas, at least 2; they divide the processes. Default: 2.",
    )
    every: Annotated[Count, _APART] = Field(
        default_factory=_default(1, local_sgd=30, diloco=30), description="steps between synchronizations. Default: 30."
    )
    outer_learning_rate: Annotated[Positive, _APART] = Field(
        default_factory=_default(1.0, diloco=0.7),
        description="learning rate of the outer optimizer. Default: 0.7 for `diloco`, otherwise 1.",
    )
    outer_momentum: Annotated[Number, Field(ge=0, lt=1), OnlyWith("sync.name", ("diloco", OWN))] = Field(
        default_factory=_default(0.0, diloco=0.9), description="Nesterov momentum of the outer optimizer. Default: 0.9."
    )
    overlap: Annotated[Flag, _APART] = Field(
        False, description="outer gradients are sent during the next step, and applied one step late."
    )
    min_replicas: Annotated[Count, OnlyWith("fault.on_lost_process", ("continue",))] = Field(
        1, description="with fewer replicas than this the others wait until lost ones have returned."
    )
    servers: Annotated[Count, _SERVED] = Field(
        1, description="the processes that own a part of the weights and of the optimizer."
    )
    aggregate: Annotated[Aggregate, _SERVED] = Field(
        "weighted",
        description="a step takes the mean gradient of all targets (`weighted`, which is what `every_step` does), the "
        "mean of the processes' mean gradients (`mean`), or their sum (`sum`).",
    )
    max_staleness: Annotated[CountOrZero | None, _SERVED] = Field(
        0,
        description="by how many steps the weights may be older than those that a gradient is applied to. 0: every "
        "step waits for all processes. `null`: no limit.",
    )
    staleness_compensation: Annotated[Number, Field(ge=0), _SERVED, _STALE] = Field(
        0.0,
        description="the factor λ of delay-compensated SGD (arXiv:1609.08326). A gradient g of weights v is applied to "
        "weights w as g + λ g² (w - v). 0: as it is.",
    )
    compress: CompressConfig = Field(CompressConfig(), description="What replicas send instead of whole gradients.")
    options: Annotated[Options, OnlyWith("sync.name", (OWN,))] = Field(
        None, description="Arguments of a synchronizer of your own, by their names."
    )

    @property
    def is_exact(self) -> bool:
        """Whether the losses are those of a single process, up to rounding; unknown synchronizers are not."""
        is_served = self.name == PARAMETER_SERVER and (self.aggregate, self.max_staleness) == ("weighted", 0)
        return (is_served or self.name == EVERY_STEP) and self.compress.method == "none"

    @property
    def num_essential(self) -> int:
        """How many processes, the first ones, have state that no other process has."""
        return self.servers if self.name == PARAMETER_SERVER else 0

    @rule
    def _enough_replicas_exist(self) -> None:
        if self.min_replicas > (count := max(2, self.replicas)):
            raise ValueError(
                f"sync.min_replicas={self.min_replicas} is more than sync.replicas={count}, so after a "
                f"loss the others would wait forever; use at most {count}."
            )

    @rule
    def _an_agreement_needs_two(self) -> None:
        if self.name in APART and self.replicas == 1:
            raise ValueError(
                f"sync.replicas=1: sync.name={self.name} synchronizes at least two replicas; use 2 or more, or "
                "sync.name: every_step."
            )
