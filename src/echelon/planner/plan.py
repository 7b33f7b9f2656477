"""ParallelPlan: how a run is executed. The planner returns it, plan.json stores it, the runtime uses it unchanged."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from echelon.errors import PlanError
from echelon.planner.degrees import AXIS_ORDER
from echelon.recipe.engines import NATIVE
from echelon.recipe.names import OptimizerName, SynchronizerName
from echelon.recipe.synchronization import (
    EVERY_STEP,
    PARAMETER_SERVER,
    QUORUM,
    Aggregate,
    CompressMethod,
    SyncConfig,
)
from echelon.recipe.training import AxisName, CpMethod, PipelineSchedule
from echelon.stored import read_as

DtypeName = Literal["float32", "bfloat16", "float16"]
Rounding = Literal["nearest", "stochastic", "kahan"]
ReduceGradients = Literal["each", "last"]
ActivationCheckpointing = Literal["none", "selective", "full"]
AdapterMethod = Literal["lora", "qlora", "dora"]

_SHARDED = ("zero1", "zero2", "fsdp", "hsdp")
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# An unknown field means another version of echelon.
_STRICT = ConfigDict(extra="forbid")


@with_config(_STRICT)
@dataclass(frozen=True)
class Precision:
    """Dtype names of one policy.

    param: stored parameters. compute: matrix products; if it differs from `param`, a sharded plan casts the gathered
    parameters and any other plan runs under autocast. reduce: gradient sums between ranks. master: the weights that the
    optimizer updates. optimizer: its moments, unless it packs them. rounding: how an update is rounded to `master`;
    `kahan` keeps the remainder in a second number. float8: whether the linear layers of decoder layers round the inputs
    of their products from `compute` to float8.
    """

    param: DtypeName = "float32"
    compute: DtypeName = "float32"
    reduce: DtypeName = "float32"
    master: DtypeName = "float32"
    optimizer: DtypeName = "float32"
    rounding: Rounding = "nearest"
    float8: bool = False


@with_config(_STRICT)
@dataclass(frozen=True)
class AdapterPlan:
    """An adapter on frozen weights: the trained parameters, and the storage of the frozen ones.

    targets: the names of the linear layers with an adapter. experts: those of the expert weights with one, in their
    layer; num_adapted_experts of the frozen parameters are in them. num_trained_parameters: those of the adapter, the
    rows of new tokens and the saved modules. num_frozen_parameters: the others, of which num_quantized_parameters are
    in 4 bits, num_quantized_experts of these in experts; the rest are in the compute dtype. saved: the names of modules
    that are trained in full; num_saved_inside of their parameters are in decoder layers, num_saved_outside are not;
    num_looked_up of them are in look-up tables, which are not matmuls.
    """

    method: AdapterMethod
    r: int
    dropout: float
    targets: tuple[str, ...]
    num_trained_parameters: int
    num_frozen_parameters: int
    num_quantized_parameters: int = 0
    double_quant: bool = False
    saved: tuple[str, ...] = ()
    num_saved_inside: int = 0
    num_saved_outside: int = 0
    num_looked_up: int = 0
    experts: tuple[str, ...] = ()
    num_adapted_experts: int = 0
    num_quantized_experts: int = 0

    @property
    def num_trained_matmul_parameters(self) -> int:
        """The trained parameters that count in the FLOP formula: all except look-up tables."""
        return self.num_trained_parameters - self.num_looked_up

    def describe(self, compute: str) -> str:
        """The message about trained and frozen parameters; frozen ones are in the dtype `compute`."""
        whole = f", with {', '.join(self.saved)} trained in full" if self.saved else ""
        packed = f", {self.num_quantized_parameters:,} of them in 4 bits" if self.num_quantized_parameters else ""
        total = self.num_trained_parameters + self.num_frozen_parameters
        return (
            f"adapter: {self.method} of rank {self.r} at {', '.join((*self.targets, *self.experts))}{whole}: "
            f"{self.num_trained_parameters:,} of {total:,} parameters are trained "
            f"({self.num_trained_parameters / total:.2%}); the frozen ones are in {compute}{packed}"
        )


@with_config(_STRICT)
@dataclass(frozen=True)
class SyncPlan:
    """How replicas agree: the section `sync` of the recipe, whose keys have the same names and meaning.

    method, rank, fraction: how gradients are compressed. is_exact: whether losses are those of a single process.
    """

    name: SynchronizerName = EVERY_STEP
    every: Count = 1
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    overlap: bool = False
    method: CompressMethod = "none"
    rank: Count = 4
    fraction: Share = 0.01
    servers: Count = 1
    aggregate: Aggregate = "weighted"
    max_staleness: CountOrZero | None = 0
    staleness_compensation: float = 0.0
    is_exact: bool = True

    def describe(self, num_replicas: int, replica_size: int) -> str:
        """The message about how replicas agree."""
        words = [self.name]
        if self.name == PARAMETER_SERVER:
            words.append(f"{num_replicas} worker{'' if num_replicas == 1 else 's'}")
            words += [f"{self.servers} server{'' if self.servers == 1 else 's'}", f"aggregate {self.aggregate}"]
            if self.max_staleness != 0:
                limit = "any number of" if self.max_staleness is None else f"at most {self.max_staleness}"
                words.append(f"staleness of {limit} step{'' if self.max_staleness == 1 else 's'}")
            if self.staleness_compensation:
                words.append(f"compensated with {self.staleness_compensation:g}")
        elif num_replicas > 1:
            words.append(f"{num_replicas} replicas of {replica_size} process{'' if replica_size == 1 else 'es'}")
        if self.name == QUORUM:
            words.append("the loss of a process costs one repeated step")
        if self.every > 1:
            words.append(f"every {self.every} steps")
        if (self.outer_learning_rate, self.outer_momentum) != (1.0, 0.0):
            words.append(f"outer learning rate {self.outer_learning_rate:g}, momentum {self.outer_momentum:g}")
        if self.overlap:
            words.append("sent during the next step")
        if self.method != "none":
            words.append(f"gradients sent as {self._describe_method()}")
        lossy = "" if self.is_exact else "; lossy: the losses are not those of sync.name: every_step"
        return f"sync: {', '.join(words)}{lossy}"

    def _describe_method(self) -> str:
        if self.method == "powersgd":
            return f"PowerSGD of rank {self.rank}"
        if self.method in ("topk", "randomk"):
            return f"the {'largest' if self.method == 'topk' else 'a random'} {self.fraction:.3g} of their values"
        return {"sign": "signs"}.get(self.method, self.method)


def build_sync_plan(config: SyncConfig) -> SyncPlan:
    """The part of a plan that the section `sync` of a recipe sets."""
    outer = ("every", "outer_learning_rate", "outer_momentum", "overlap")
    names = ("name", *outer, "servers", "aggregate", "max_staleness", "staleness_compensation")
    compress = config.compress
    return SyncPlan(
        **{name: getattr(config, name) for name in names},
        method=compress.method,
        rank=compress.rank,
        fraction=compress.fraction,
        is_exact=config.is_exact,
    )


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


_ROWS = "pairs: the two answers run as sequences of their own, because no document mask keeps them apart in this model"


@with_config(_STRICT)
@dataclass(frozen=True)
class ParallelPlan:
    """Degrees, batch arithmetic and policies of one run; strategies are values of it.

    One global batch is num_replicas * dp_size * num_microbatches * micro_batch_size sequences, of which `num_fill` have
    no targets: they pad a batch that the ranks of a resumed run cannot share evenly. `rows_per_sequence`: the rows that
    a sequence takes in a forward pass, 2 for preference pairs of a model without a document mask. `why` has lines for
    the user about automatic choices and the figures behind them. `prefetch`: the layers gathered ahead of the one that
    runs; None for PyTorch's own order, which gathers one ahead. `order`: the axes, outermost first. `stages`: the
    decoder layers of each pipeline stage. `checkpoint_every`: activation checkpointing is of layers whose number, from
    1, this divides. `activation_memory_budget`: the share of the activations of compiled layers that PyTorch keeps;
    None for all that it keeps by itself. `activation_loading_horizon`: the layers whose offloaded activations are
    loaded ahead of the one that is differentiated. `engine`: that of the recipe, which runs the plan.
    """

    strategy: str
    engine: str = NATIVE
    dp_replicate: Count = 1
    dp_shard: Count = 1
    cp: Count = 1
    tp: Count = 1
    pp: Count = 1
    ep: Count = 1
    num_replicas: Count = 1
    sync: SyncPlan = field(default_factory=SyncPlan)
    order: tuple[AxisName, ...] = AXIS_ORDER
    sequence_parallel: bool = False
    cp_method: CpMethod | None = None
    schedule: PipelineSchedule | None = None
    stages: tuple[Count, ...] = ()
    micro_batch_size: Count = 1
    num_microbatches: Count = 1
    num_fill: CountOrZero = 0
    rows_per_sequence: Count = 1
    reshard_after_forward: bool = False
    reduce_gradients: ReduceGradients = "last"
    cpu_offload: bool = False
    prefetch: Count | None = None
    activation_checkpointing: ActivationCheckpointing = "none"
    checkpoint_every: Count = 1
    activation_memory_budget: Share | None = None
    activation_offloading: bool = False
    activation_loading_horizon: CountOrZero = 1
    compile: bool = False
    precision: Precision = field(default_factory=Precision)
    optimizer: OptimizerName = "adamw"
    adapter: AdapterPlan | None = None
    why: tuple[str, ...] = ()

    @property
    def lossy(self) -> bool:
        """Whether the losses differ from those of a single process by more than rounding, because of `sync`."""
        return not self.sync.is_exact

    @property
    def dp_size(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Processes of the whole run."""
        return self.num_replicas * self.replica_size

    @property
    def replica_size(self) -> int:
        """Processes of one replica."""
        return self.dp_size * self.num_peers

    @property
    def num_peers(self) -> int:
        """Ranks that read the same sequences, because they share the model or the sequence."""
        return self.cp * self.tp * self.pp

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step, without padding sequences."""
        return self._num_fed - self.num_fill

    @property
    def _num_fed(self) -> int:
        return self.num_replicas * self.dp_size * self.num_microbatches * self.micro_batch_size

    @property
    def uses_fully_shard(self) -> bool:
        """Whether the plan uses FSDP2. Otherwise every rank has full parameters: DDP, or a single process.

        Beside tensor and pipeline parallelism DDP does not work, so replicas are HSDP with a shard axis of 1. A
        strategy that shards uses FSDP2 on one rank as well, so that it rounds alike on any number of ranks.
        """
        return self._shards or self.tp > 1 or self.pp > 1

    def degrees(self) -> dict[str, int]:
        """The degree of each axis inside a replica."""
        return {axis: getattr(self, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}

    def name_degrees(self) -> str:
        """The degrees above 1, as in `dp_shard 8, tp 8, pp 4`; empty on one device."""
        return ", ".join(f"{axis} {degree}" for axis, degree in self.degrees().items() if degree > 1)

    @property
    def _shards(self) -> bool:
        is_alone = self.dp_replicate == self.dp_shard == 1
        return self.dp_shard * self.cp > 1 or self.cpu_offload or (is_alone and self.strategy in _SHARDED)

    @property
    def uses_autocast(self) -> bool:
        """Whether the compute dtype comes from autocast over whole parameters, not from casting gathered ones."""
        return self.precision.compute != self.precision.param and not self.uses_fully_shard

    def describe(self) -> list[str]:
        """Lines that say all: the plan, the precision policy, the batch arithmetic, and why."""
        sharding = self._describe_sharding() if self._shards else ""
        when = "each microbatch" if self.reduce_gradients == "each" else "the last microbatch"
        reduction = f"; gradients reduced after {when}" if self.dp_size * self.cp > 1 else ""
        return [
            f"plan: {self._describe_strategy()} ({self._describe_degrees()}){sharding}{reduction}; "
            f"activation checkpointing {self._describe_activations()}; {self._describe_compilation()}",
            self._describe_precision(),
            *([] if self.adapter is None else [self.adapter.describe(self.precision.compute)]),
            *self._describe_batch(),
            *(f"why: {line}" for line in self.why),
        ]

    def describe_briefly(self) -> list[str]:
        """The lines of `describe` that a run prints before its first step: what it does, not why, and warnings."""
        degrees = f" ({self.name_degrees()})" if self.num_peers > 1 else ""
        activations = self._describe_activations()
        saved = "" if activations == "none" else f"; activation checkpointing {activations}"
        policy = self.precision
        is_usual = policy.rounding == "nearest" and policy.param == "float32" and not policy.float8
        chosen = [line for line in self.why if " auto: " in line]
        return [
            f"plan: {self._describe_strategy()}{degrees}; computes in {policy.compute}{saved}; "
            f"{self._describe_compilation()}",
            *([] if is_usual else [self._describe_precision()]),
            *([] if self.adapter is None else [self.adapter.describe(policy.compute)]),
            *self._describe_batch(),
            *(f"why: {line}" for line in self.why if line not in chosen),
            *(["plan: its reasons and all settings are shown by --verbose and `echelon report`"] if chosen else []),
        ]

    def _describe_compilation(self) -> str:
        return f"compile {'on' if self.compile else 'off'}"

    def _describe_precision(self) -> str:
        policy = self.precision
        rounding = "" if policy.rounding == "nearest" else f" ({policy.rounding} rounding)"
        compute = f"{policy.compute}, in float8 in linear layers" if policy.float8 else policy.compute
        moments = f"moments {policy.optimizer}" if self.optimizer != "adamw_8bit" else "moments in 8 bits"
        return (
            f"precision: parameters {policy.param}, compute {compute}, reduction {policy.reduce}, "
            f"master weights {policy.master}{rounding}, optimizer {self.optimizer} with {moments}"
        )

    def _describe_batch(self) -> list[str]:
        rank = "rank" if self.num_peers == 1 else "data-parallel rank"
        share = self.num_fill / self._num_fed
        padding = f" - {_count(self.num_fill, 'padding sequence')} ({share:.1%} of the computation is wasted)"
        return [
            f"batch: {_count(self.global_batch_size, 'sequence')} = {_count(self.num_replicas * self.dp_size, rank)} x "
            f"{_count(self.num_microbatches, 'microbatch', 'es')} x {_count(self.micro_batch_size, 'sequence')}"
            f"{padding if self.num_fill else ''}",
            *([] if self.rows_per_sequence == 1 else [_ROWS]),
            *([] if self.sync == SyncPlan() else [self.sync.describe(self.num_replicas, self.replica_size)]),
        ]

    def _describe_strategy(self) -> str:
        strategy = self.strategy if self.engine == NATIVE else f"{self.strategy} by {self.engine}"
        return f"{strategy} on {_count(self.world_size, 'process', 'es')}"

    def _describe_degrees(self) -> str:
        """The degrees of data parallelism and the others above 1, with their options."""
        words = [f"dp_replicate {self.dp_replicate}", f"dp_shard {self.dp_shard}"]
        options = {
            "pp": self.schedule,
            "cp": self.cp_method,
            "tp": "sequence parallel" if self.sequence_parallel else None,
            "ep": None,
        }
        for name, option in options.items():
            if (degree := getattr(self, name)) > 1:
                words.append(f"{name} {degree}" + ("" if option is None else f" ({option})"))
        return " x ".join(words)

    def _describe_sharding(self) -> str:
        parts = [f"; gathered parameters {'freed after use' if self.reshard_after_forward else 'kept until backward'}"]
        if self.prefetch is not None:
            parts.append(f"; {self.prefetch} {'layer' if self.prefetch == 1 else 'layers'} gathered ahead")
        if self.cpu_offload:
            parts.append("; parameters and optimizer state in host memory")
        return "".join(parts)

    def _describe_activations(self) -> str:
        words = (
            self.activation_checkpointing if self.checkpoint_every == 1 else f"of 1 in {self.checkpoint_every} layers"
        )
        if self.activation_memory_budget is not None:
            words = f"by torch.compile within a memory budget of {self.activation_memory_budget:g}"
        if not self.activation_offloading:
            return words
        ahead = self.activation_loading_horizon
        loaded = "" if ahead == 1 else f", loaded {ahead} layers ahead"
        return f"{words}; activations in host memory{loaded}"

    def to_dict(self) -> dict[str, Any]:
        """The content of plan.json; `from_dict` returns an equal plan."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "ParallelPlan":
        """Plan of plan.json's content. Raises PlanError for missing, unknown or malformed fields."""
        for where, kind, part in (
            ("plan", cls, content),
            ("plan.precision", Precision, content.get("precision")),
            ("plan.sync", SyncPlan, content.get("sync")),
        ):
            if isinstance(part, Mapping) and (missing := {item.name for item in fields(kind)} - part.keys()):
                raise _explain_version(where, "misses", missing)
        try:
            plan = TypeAdapter(cls).validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise _explain(error) from error
        if sorted(plan.order) != sorted(AXIS_ORDER):
            raise PlanError(f"plan.order={plan.order!r} is not valid: it must name each of {AXIS_ORDER} once.")
        return plan


_VERSIONS = {"missing": "misses", "unexpected_keyword_argument": "has unknown"}


def _explain(error: ValidationError) -> PlanError:
    """The error of the first fault, together with other fields of the same section that have the same fault."""
    errors = error.errors(include_url=False)
    *parents, _ = first = ("plan", *map(str, errors[0]["loc"]))
    if what := _VERSIONS.get(errors[0]["type"]):
        alike = [each["loc"] for each in errors if each["type"] == errors[0]["type"]]
        return _explain_version(".".join(parents), what, {str(loc[-1]) for loc in alike if len(loc) == len(parents)})
    reason = errors[0]["msg"]
    return PlanError(f"{'.'.join(first)}={errors[0]['input']!r} is not valid: {reason[0].lower()}{reason[1:]}.")


def _explain_version(where: str, what: str, names: Iterable[str]) -> PlanError:
    return PlanError(
        f"{where} {what} {', '.join(sorted(names))}; it was written by another version of echelon: start again with "
        "--fresh."
    )


def load_plan(path: Path) -> ParallelPlan:
    """Load a plan.json. Raises PlanError with the path if it is damaged."""
    try:
        return ParallelPlan.from_dict(read_as(path, dict[str, Any]))
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(
            f"{path} is not a valid plan ({error}); restore it, or resume the run, which rewrites it."
        ) from error
