"""ParallelPlan: how a run is executed. The planner returns it, plan.json stores it, the runtime uses it unchanged."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError, with_config

from echelon.ground.errors import PlanError
from echelon.ground.stored import read_as, validator_of
from echelon.recipe.names import NATIVE, OptimizerName, SynchronizerName
from echelon.recipe.synchronization import EVERY_STEP, Aggregate, CompressMethod, SyncConfig
from echelon.recipe.training import AxisName, CpMethod, Float8Scaling, PipelineSchedule

DtypeName = Literal["float32", "bfloat16", "float16"]
Rounding = Literal["nearest", "stochastic", "kahan"]
ReduceGradients = Literal["each", "last"]
ActivationCheckpointing = Literal["none", "selective", "full"]
AdapterMethod = Literal["lora", "qlora", "dora"]
LossKind = Literal["cross_entropy", "function", "likeliest", "divergence", "divergence_and_labels", "mixture"]

AXIS_ORDER: tuple[AxisName, ...] = get_args(AxisName)
"""The axes of the processes of one replica, outermost first."""
SHARDING: tuple[AxisName, ...] = ("dp_shard", "cp")
"""The axes whose ranks together shard the parameters of a layer."""

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
    """Dtype names of one policy."""

    param: DtypeName = "float32"
    """Of stored parameters."""
    compute: DtypeName = "float32"
    """Of matrix products. If it differs from `param`, a sharded plan casts the gathered parameters and any other plan
    runs under autocast."""
    reduce: DtypeName = "float32"
    """Of gradient sums between ranks."""
    master: DtypeName = "float32"
    """Of the weights that the optimizer updates."""
    optimizer: DtypeName = "float32"
    """Of the optimizer's moments, unless it packs them."""
    rounding: Rounding = "nearest"
    """How an update is rounded to `master`; `kahan` keeps the remainder in a second number."""
    float8: bool = False
    """Whether the linear layers of decoder layers round the inputs of their products from `compute` to float8."""
    float8_scaling: Float8Scaling = "tensorwise"


@with_config(_STRICT)
@dataclass(frozen=True)
class AdapterPlan:
    """An adapter on frozen weights: the trained parameters, and the storage of the frozen ones."""

    method: AdapterMethod
    r: int
    dropout: float
    targets: tuple[str, ...]
    """Names of the linear layers with an adapter."""
    num_trained_parameters: int
    """Those of the adapter, the rows of new tokens and the saved modules."""
    num_frozen_parameters: int
    """All others. Those that are not in 4 bits are in the compute dtype."""
    num_quantized_parameters: int = 0
    """Frozen parameters in 4 bits."""
    double_quant: bool = False
    saved: tuple[str, ...] = ()
    """Names of modules that are trained in full."""
    num_saved_inside: int = 0
    """Parameters of saved modules in decoder layers."""
    num_saved_outside: int = 0
    """Parameters of saved modules outside of decoder layers."""
    num_looked_up: int = 0
    """Parameters of saved modules in look-up tables, which are not matmuls."""
    experts: tuple[str, ...] = ()
    """Names, in their layer, of the expert weights with an adapter."""
    num_adapted_experts: int = 0
    """Frozen parameters in these expert weights."""
    num_quantized_experts: int = 0
    """Frozen parameters in 4 bits in expert weights."""

    @property
    def num_trained_matmul_parameters(self) -> int:
        """The trained parameters that count in the FLOP formula: all except look-up tables."""
        return self.num_trained_parameters - self.num_looked_up


@with_config(_STRICT)
@dataclass(frozen=True)
class SyncPlan:
    """How replicas agree: the section `sync` of the recipe, whose keys have the same names and meaning."""

    name: SynchronizerName | Literal["quorum"] = EVERY_STEP
    every: Count = 1
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    overlap: bool = False
    method: CompressMethod = "none"
    """How gradients are compressed; `rank` and `fraction` are settings of it."""
    rank: Count = 4
    fraction: Share = 0.01
    servers: Count = 1
    aggregate: Aggregate = "weighted"
    max_staleness: CountOrZero | None = 0
    staleness_compensation: float = 0.0
    is_exact: bool = True
    """Whether losses are those of a single process."""


def build_sync_plan(config: SyncConfig) -> SyncPlan:
    """The part of a plan that the section `sync` of a recipe sets, with the keys of its section `compress`."""
    names = [item.name for item in fields(SyncPlan)]
    sources = {name: config if hasattr(config, name) else config.compress for name in names}
    return SyncPlan(**{name: getattr(source, name) for name, source in sources.items()})


@with_config(_STRICT)
@dataclass(frozen=True)
class RolloutPlan:
    """The answers of a step: of the section `rollout` of the recipe, whose keys have the same names and meaning."""

    group_size: Count
    max_new_tokens: Count
    """In all turns together."""
    updates: Count
    max_num_seqs: Count
    """Answers that a rank samples at once."""
    gathers_once: bool = False
    """Whether weights that are freed after use in a training step stay whole while answers are sampled."""


@with_config(_STRICT)
@dataclass(frozen=True)
class ParallelPlan:
    """Degrees, batch arithmetic and policies of one run; strategies are values of it.

    One global batch is num_replicas * dp_size * num_microbatches * micro_batch_size sequences.
    """

    strategy: str
    """A name of `parallel`, or one made of its degrees, as `fsdp+tp`."""
    engine: str = NATIVE
    """That of the recipe, which runs the plan."""
    dp_replicate: Count = 1
    """Ranks with copies of the same shard of the model."""
    dp_shard: Count = 1
    """Ranks that shard the model, its gradients and the optimizer, and read different sequences."""
    cp: Count = 1
    """Ranks that divide each sequence."""
    tp: Count = 1
    """Ranks that divide each matrix."""
    pp: Count = 1
    """Ranks that divide the decoder layers."""
    ep: Count = 1
    """Ranks that divide the experts; among those that shard."""
    num_replicas: Count = 1
    """Replicas that agree as `sync` says."""
    sync: SyncPlan = field(default_factory=SyncPlan)
    order: tuple[AxisName, ...] = AXIS_ORDER
    """The axes, outermost first."""
    sequence_parallel: bool = False
    """Whether the ranks of `tp` divide norms and residuals along the sequence."""
    cp_method: CpMethod | None = None
    schedule: PipelineSchedule | None = None
    stages: tuple[Count, ...] = ()
    """Decoder layers of each pipeline stage; empty without a pipeline. Stage s is on rank s modulo `pp`."""
    sequence_len: Count = 1
    """Tokens of a sequence."""
    micro_batch_size: Count = 1
    """Sequences of one microbatch on one rank."""
    num_microbatches: Count = 1
    num_fill: CountOrZero = 0
    """Sequences without targets: they pad a batch that the ranks of a resumed run cannot share evenly."""
    rows_per_sequence: Count = 1
    """Rows that a sequence takes in a forward pass: 2 for preference pairs of a model without a document mask."""
    keeps_reference: bool = False
    """Whether each rank keeps its part of a frozen copy of the initial weights, with which the objective compares."""
    num_teacher_parameters: CountOrZero = 0
    """Parameters of a frozen teacher, of which each rank keeps its part."""
    teacher_hidden_size: CountOrZero = 0
    """Of a teacher in memory; 0 if its config is not here."""
    loss: LossKind = "cross_entropy"
    """Cross-entropy, or another function of logits; in distillation of a teacher's likeliest tokens, or of its logits:
    a KL divergence, the same and cross-entropy, or divergences from the mixture."""
    num_reward_parameters: CountOrZero = 0
    """Parameters of frozen reward models, which each rank that judges answers keeps whole."""
    reshard_after_forward: bool = False
    """Whether gathered parameters are freed after use."""
    reduce_gradients: ReduceGradients = "last"
    """Whether gradients are reduced after each microbatch, or once after the last."""
    holds_snapshots: bool = False
    """Whether each rank holds snapshots of the training state in memory: of its own part, and of another rank's."""
    cpu_offload: bool = False
    """Whether parameters and optimizer state are in host memory."""
    prefetch: Count | None = None
    """Layers gathered ahead of the one that runs; None for PyTorch's own order, which gathers one ahead."""
    activation_checkpointing: ActivationCheckpointing = "none"
    checkpoint_every: Count = 1
    """Activation checkpointing is of layers whose number, from 1, this divides."""
    activation_memory_budget: Share | None = None
    """Share of the activations of compiled layers that PyTorch keeps; None for all that it keeps by itself."""
    mlp_tiles: Count = 1
    """Tiles of the sequence in which the MLP of a layer runs, one after another."""
    activation_offloading: bool = False
    activation_loading_horizon: CountOrZero = 1
    """Layers whose offloaded activations are loaded ahead of the one that is differentiated."""
    compile: bool = False
    attn_implementation: str | None = None
    """That of the recipe; None: echelon chooses it by the device, the model and the data."""
    documents_apart: bool = False
    """Whether the documents of a sequence do not attend to each other."""
    precision: Precision = field(default_factory=Precision)
    optimizer: OptimizerName = "adamw"
    adapter: AdapterPlan | None = None
    rollout: RolloutPlan | None = None
    """What the model answers in each step, if it is trained on its own answers."""
    why: tuple[str, ...] = ()
    """Lines for the user about automatic choices and the figures behind them."""

    @property
    def dp_size(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_readers(self) -> int:
        """Ranks of all replicas that read different sequences."""
        return self.num_replicas * self.dp_size

    @property
    def num_shards(self) -> int:
        """Ranks that shard the parameters of a layer."""
        return self.dp_shard * self.cp

    @property
    def num_whole_copies(self) -> int:
        """Copies of the weights in the whole run."""
        return self.num_replicas * self.dp_replicate

    @property
    def num_copies(self) -> int:
        """Copies of the weights that agree: replicas, or without them the copies inside the only one."""
        return self.num_replicas if self.num_replicas > 1 else self.dp_replicate

    @property
    def num_reductions(self) -> int:
        """How often gradients are summed over ranks in a step."""
        return self.num_microbatches if self.reduce_gradients == "each" else 1

    @property
    def sequence_ranks(self) -> int:
        """Ranks that divide norms and residuals along the sequence, in addition to `cp`."""
        return self.tp if self.sequence_parallel else 1

    @property
    def divides_matrices(self) -> bool:
        """Whether a rank has parts of matrices, as distributed tensors."""
        return self.tp > 1

    @property
    def divides_sequences(self) -> bool:
        """Whether a rank attends to tokens that others compute."""
        return self.cp > 1

    def divides_graphs(self, has_experts: bool) -> bool:
        """Whether a compiled layer is several graphs, with what ranks exchange between them."""
        return self.ep > 1 or (self.tp > 1 and has_experts)

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages of a rank; without a pipeline the whole model is one."""
        return len(self.stages) // self.pp if self.stages else 1

    @property
    def part_len(self) -> int:
        """Tokens of a sequence that one rank computes."""
        return -(-self.sequence_len // self.cp)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch that one rank computes, in all rows of its sequences."""
        return self.micro_batch_size * self.rows_per_sequence * self.part_len

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
        return self.num_fed - self.num_fill

    @property
    def num_read(self) -> int:
        """Sequences of one optimizer step on one rank."""
        return self.num_microbatches * self.micro_batch_size

    @property
    def num_fed(self) -> int:
        """Sequences of one optimizer step, with padding sequences."""
        return self.num_readers * self.num_read

    @property
    def uses_fully_shard(self) -> bool:
        """Whether the plan uses FSDP2. Otherwise every rank has full parameters: DDP, or a single process.

        Beside tensor and pipeline parallelism DDP does not work, so replicas are HSDP with a shard axis of 1. A
        strategy that shards uses FSDP2 on one rank as well, so that it rounds alike on any number of ranks.
        """
        return self.shards or self.divides_matrices or self.pp > 1

    @property
    def gathers_float8(self) -> bool:
        """Whether the weights of linear layers are cast to float8 before they are gathered."""
        policy = self.precision
        return policy.float8 and policy.float8_scaling == "tensorwise" and self.num_shards > 1 and not self.cpu_offload

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a gathered number of a decoder layer's weights; norms, which are few, count like matrices."""
        return 1 if self.gathers_float8 else DTYPE_BYTES[self.precision.compute]

    def degrees(self) -> dict[str, int]:
        """The degree of each axis inside a replica."""
        return {axis: getattr(self, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}

    def name_degrees(self) -> str:
        """The degrees above 1, as in `dp_shard 8, tp 8, pp 4`; empty on one device."""
        return ", ".join(f"{axis} {degree}" for axis, degree in self.degrees().items() if degree > 1)

    def show_degrees(self) -> str:
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

    @property
    def shards(self) -> bool:
        """Whether ranks have parts of parameters that they gather, or move from host memory, to use them."""
        is_alone = self.dp_replicate == self.dp_shard == 1
        return self.num_shards > 1 or self.cpu_offload or (is_alone and self.strategy in _SHARDED)

    @property
    def uses_autocast(self) -> bool:
        """Whether the compute dtype comes from autocast over whole parameters, not from casting gathered ones."""
        return self.precision.compute != self.precision.param and not self.uses_fully_shard

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
            ("plan.rollout", RolloutPlan, content.get("rollout")),
        ):
            if isinstance(part, Mapping) and (missing := {item.name for item in fields(kind)} - part.keys()):
                raise _explain_version(where, "misses", missing)
        try:
            plan = validator_of(cls).validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise _explain(error) from error
        if sorted(plan.order) != sorted(AXIS_ORDER):
            raise PlanError(f"plan.order={plan.order!r} is not valid: it must name each of {AXIS_ORDER} once.")
        if plan.num_shards % plan.ep:
            raise PlanError(f"plan.ep={plan.ep} is not valid: it must divide dp_shard * cp = {plan.num_shards}.")
        return plan


_VERSIONS = {"missing": "misses", "unexpected_keyword_argument": "has unknown"}


def _explain(error: ValidationError) -> PlanError:
    """The error of the first fault, together with other fields of the same section that have the same fault."""
    errors = error.errors(include_url=False)
    *parents, _ = first = ("plan", *map(str, errors[0]["loc"]))
    if what := _VERSIONS.get(errors[0]["type"]):
        alike = [problem["loc"] for problem in errors if problem["type"] == errors[0]["type"]]
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
