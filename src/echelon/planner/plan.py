"""ParallelPlan: how a run will run. The planner returns it, plan.json keeps it, the runtime consumes it unchanged."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from echelon.errors import PlanError
from echelon.extensions import is_extension
from echelon.recipe.names import OPTIMIZERS
from echelon.stored import read_as

DtypeName = Literal["float32", "bfloat16", "float16"]
Rounding = Literal["nearest", "stochastic", "kahan"]
ReduceGradients = Literal["each", "last"]
ActivationCheckpointing = Literal["none", "selective", "full"]
AdapterMethod = Literal["lora", "qlora", "dora"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Precision:
    """Dtype names of one policy.

    param: what parameters are stored in. compute: matrix products; where it differs from `param`, a plan that shards
    casts the gathered parameters and one that does not runs under autocast. reduce: gradient sums between ranks.
    master: what the optimizer updates. optimizer: its moments, unless it packs them. rounding: how an update that
    `master` cannot hold gets there; `kahan` keeps what is left over in a second number.
    """

    param: DtypeName = "float32"
    compute: DtypeName = "float32"
    reduce: DtypeName = "float32"
    master: DtypeName = "float32"
    optimizer: DtypeName = "float32"
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        """Raises PlanError for a dtype or a rounding that is not known."""
        for name, value in asdict(self).items():
            _check_choice(f"precision.{name}", value, get_args(Rounding if name == "rounding" else DtypeName))


_NAMES = ("targets", "saved")


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter beside frozen weights: what is trained, and how what is not is held.

    targets: the names of the linear layers that have one. num_trained_parameters: the adapter's, and the rows of new
    tokens. num_frozen_parameters: the model's without it, of which num_quantized_parameters are in 4 bits; every other
    one is in the compute dtype. saved: the names of modules that are trained whole, of whose parameters
    num_saved_inside are in decoder layers and num_saved_outside are not; num_looked_up of them are in a table that is
    no matmul.
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

    def __post_init__(self) -> None:
        """Raises PlanError for a method that is not known, and for targets that are not names."""
        _check_choice("adapter.method", self.method, get_args(AdapterMethod))
        for key in _NAMES:
            names = getattr(self, key)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise PlanError(f"plan.adapter.{key}={names!r} is not a list of names.")

    @property
    def num_trained_matmul_parameters(self) -> int:
        """What of the trained counts in the FLOP formula: all but tables that are looked up in."""
        return self.num_trained_parameters - self.num_looked_up

    def describe(self, compute: str) -> str:
        """A line for people: what is trained beside what, held in the dtype `compute`."""
        whole = f", with {', '.join(self.saved)} trained whole" if self.saved else ""
        packed = f", {self.num_quantized_parameters:,} of them in 4 bits" if self.num_quantized_parameters else ""
        total = self.num_trained_parameters + self.num_frozen_parameters
        return (
            f"adapter: {self.method} of rank {self.r} at {', '.join(self.targets)}{whole}: "
            f"{self.num_trained_parameters:,} of {total:,} parameters are trained "
            f"({self.num_trained_parameters / total:.2%}); the frozen ones are in {compute}{packed}"
        )


@dataclass(frozen=True)
class ParallelPlan:
    """Degrees, batch arithmetic and policies of one run; strategies are values of it.

    One global batch is num_replicas * dp_size * num_microbatches * micro_batch_size sequences, of which `num_fill` have
    no targets: they fill up a batch that the ranks of a resumed run cannot share evenly. `why` says, for people, what
    was chosen for them and from which numbers. Raises PlanError for a malformed field.
    """

    strategy: str
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    num_replicas: int = 1
    micro_batch_size: int = 1
    num_microbatches: int = 1
    num_fill: int = 0
    reshard_after_forward: bool = False
    reduce_gradients: ReduceGradients = "last"
    cpu_offload: bool = False
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False
    precision: Precision = field(default_factory=Precision)
    optimizer: str = "adamw"
    adapter: AdapterPlan | None = None
    lossy: bool = False
    why: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"plan.{name}={value!r} is not a whole number above 0.")
        if isinstance(self.num_fill, bool) or not isinstance(self.num_fill, int) or self.num_fill < 0:
            raise PlanError(f"plan.num_fill={self.num_fill!r} is not a whole number.")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"plan.{name}={getattr(self, name)!r} is not true or false.")
        _check_choice("reduce_gradients", self.reduce_gradients, get_args(ReduceGradients))
        if not is_extension(self.optimizer):
            _check_choice("optimizer", self.optimizer, tuple(OPTIMIZERS))
        _check_choice("activation_checkpointing", self.activation_checkpointing, get_args(ActivationCheckpointing))

    @property
    def dp_size(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Processes of the whole run."""
        return self.num_replicas * self.dp_size * self.cp * self.tp * self.pp

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step, without those that fill it up."""
        return self._num_fed - self.num_fill

    @property
    def _num_fed(self) -> int:
        return self.num_replicas * self.dp_size * self.num_microbatches * self.micro_batch_size

    @property
    def uses_fully_shard(self) -> bool:
        """Whether FSDP2 carries it. Else parameters are whole on every rank: DDP, or one process by itself."""
        return self.dp_shard > 1 or self.cpu_offload

    @property
    def uses_autocast(self) -> bool:
        """Whether the compute dtype comes from autocast over whole parameters, not from casting gathered ones."""
        return self.precision.compute != self.precision.param and not self.uses_fully_shard

    def describe(self) -> list[str]:
        """Lines printed at the start: the plan, the precision policy, the batch arithmetic, and why."""
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        sharding = ""
        if self.uses_fully_shard:
            gathered = "freed after use" if self.reshard_after_forward else "kept until backward"
            sharding = f"; gathered parameters {gathered}"
            sharding += "; parameters and optimizer state in host memory" if self.cpu_offload else ""
        when = "each microbatch" if self.reduce_gradients == "each" else "the last microbatch"
        reduction = f"; gradients reduced after {when}" if self.dp_size > 1 else ""
        policy = self.precision
        rounding = "" if policy.rounding == "nearest" else f" ({policy.rounding} rounding)"
        share = self.num_fill / self._num_fed
        fill = f" - {self.num_fill} empty ones ({share:.1%} of the computation is wasted)" if self.num_fill else ""
        moments = f"moments {policy.optimizer}" if self.optimizer != "adamw_8bit" else "moments in 8 bits"
        return [
            f"plan: {self.strategy} on {processes} (dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard})"
            f"{sharding}{reduction}; activation checkpointing {self.activation_checkpointing}; "
            f"compile {'on' if self.compile else 'off'}",
            f"precision: parameters {policy.param}, compute {policy.compute}, reduction {policy.reduce}, "
            f"master weights {policy.master}{rounding}, optimizer {self.optimizer} with {moments}",
            *([] if self.adapter is None else [self.adapter.describe(policy.compute)]),
            f"batch: {self.global_batch_size} sequences = {self.num_replicas * self.dp_size} ranks x "
            f"{self.num_microbatches} microbatches x {self.micro_batch_size} sequences{fill}",
            *(f"why: {line}" for line in self.why),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plan.json holds it; `from_dict` gives an equal plan back."""
        content = {**asdict(self), "why": list(self.why)}
        if self.adapter is not None:
            content["adapter"] |= {key: list(getattr(self.adapter, key)) for key in _NAMES}
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "ParallelPlan":
        """Plan of plan.json's content. Raises PlanError for missing, unknown or malformed fields."""
        _check_keys("plan", content, {item.name for item in fields(cls)})
        policy, why = content["precision"], content["why"]
        if not isinstance(policy, Mapping):
            raise PlanError(f"plan.precision={policy!r} is not a mapping of dtype names.")
        _check_keys("plan.precision", policy, {item.name for item in fields(Precision)})
        if not isinstance(why, list | tuple) or not all(isinstance(line, str) for line in why):
            raise PlanError(f"plan.why={why!r} is not a list of lines.")
        if not isinstance(content["strategy"], str):
            raise PlanError(f"plan.strategy={content['strategy']!r} is not a name.")
        adapter = _read_adapter(content["adapter"])
        return cls(**{**content, "precision": Precision(**policy), "adapter": adapter, "why": tuple(why)})


_COUNTS = (
    "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "num_replicas", "micro_batch_size", "num_microbatches",
)  # fmt: skip
_FLAGS = ("reshard_after_forward", "cpu_offload", "compile", "lossy")


def _read_adapter(content: Any) -> AdapterPlan | None:
    if content is None:
        return None
    if not isinstance(content, Mapping):
        raise PlanError(f"plan.adapter={content!r} is not a mapping.")
    # Plans were written before modules could be trained whole.
    content = {**{item.name: item.default for item in fields(AdapterPlan) if item.default is not MISSING}, **content}
    _check_keys("plan.adapter", content, {item.name for item in fields(AdapterPlan)})
    names = {key: tuple(content[key]) for key in _NAMES if isinstance(content[key], list)}
    return AdapterPlan(**{**content, **names})


def _check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"plan.{key}={value!r} is not one of {', '.join(choices)}.")


def _check_keys(where: str, content: Mapping[str, Any], names: set[str]) -> None:
    missing, unknown = sorted(names - set(content)), sorted(set(content) - names)
    if missing or unknown:
        found = " and ".join(
            f"{what} {', '.join(keys)}" for what, keys in (("misses", missing), ("has unknown", unknown)) if keys
        )
        raise PlanError(f"{where} {found}; it was written by another version of echelon: start again with --fresh.")


def load_plan(path: Path) -> ParallelPlan:
    """The plan of a plan.json. Raises PlanError naming the file where it is damaged."""
    try:
        return ParallelPlan.from_dict(read_as(path, dict[str, Any]))
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(
            f"{path} is not a plan that can be read ({error}); restore it, or go on with the run, which makes it again."
        ) from error
