"""Sections of the recipe: steps and batch, optimizer, parallelism."""

import math
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from echelon.recipe.key_limits import OWN, OnlyWith
from echelon.recipe.names import DIALECTS, ENGINES, OneOf, OptimizerName, Options, OwnName
from echelon.recipe.section import (
    Count,
    Every,
    Flag,
    Number,
    Positive,
    PositiveOrZero,
    Section,
    Tokens,
    expand_list,
    name_or_mapping,
    read_amount,
    rule,
    show_number,
)

STEP_KEYS = ("steps", "tokens", "epochs")
BATCH_KEYS = ("global_batch_tokens", "global_batch_size")

Float8Scaling = Literal["tensorwise", "rowwise"]
ParallelName = Literal["auto", "ddp", "zero1", "zero2", "fsdp", "hsdp"]
EngineName = Annotated[str, OneOf(ENGINES, DIALECTS, outside=False)]
AxisName = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
"""The axes of the processes of one replica, outermost first where a recipe says nothing else."""
CpMethod = Literal["allgather", "ulysses", "ring"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class BatchRampConfig(Section):
    """A global batch that grows during training. Sizes have the unit of the batch key: tokens or sequences."""

    start: Tokens = Field(alias="from", description="Global batch at the start.")
    to: Tokens | None = Field(
        None, description="Global batch at the end. Default, and only allowed value: that of the batch key."
    )
    over_tokens: Tokens = Field(
        description="Tokens over which the batch grows; each size is used for the same number of tokens."
    )
    increment: Tokens = Field(description="Step of the batch size; must divide `to` minus `from`.")


class CallbackConfig(Section):
    """A callback of your own, called during training. Without options its name is enough."""

    name: OwnName = Field(description="The callback: `package.module:Name`.")
    options: Options = Field(None, description="Its arguments, by their names.")


_CallbackOrName = CallbackConfig | OwnName
Callbacks = Annotated[
    tuple[CallbackConfig, ...],
    BeforeValidator(partial(expand_list, key="name"), json_schema_input_type=_CallbackOrName | list[_CallbackOrName]),
]


class CheckpointingConfig(Section):
    """Activation checkpointing of some of the layers, within a share of their memory, or in tiles. Exactly one key."""

    every: Count | None = Field(None, description="Recompute every n-th layer in full; 2: half of the layers.")
    memory_budget: Number | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the activations of compiled layers that PyTorch keeps, from 0 (a layer's inputs alone) "
        "to 1. It chooses what costs the least to recompute.",
    )
    mlp_tiles: Count | None = Field(
        None,
        description="Recompute every layer in full, and its MLP in so many tiles of the sequence, one after another: "
        "for long sequences.",
    )

    @rule
    def _exactly_one_way(self) -> None:
        set_keys = [key for key, value in self if value is not None]
        if len(set_keys) != 1:
            raise ValueError(
                "train.activation_checkpointing takes one of every, memory_budget and mlp_tiles, for example "
                f"{{every: 2}} or {{memory_budget: 0.5}}; {' and '.join(set_keys) or 'none of them'} are given."
            )


CheckpointingName = Literal["auto", "none", "selective", "full"]
Checkpointing = Annotated[
    Annotated[CheckpointingName, Tag("name")] | Annotated[CheckpointingConfig, Tag("mapping")],
    Discriminator(name_or_mapping),
]


class TrainConfig(Section):
    """Length of the run, batch size and precision. The recipe sets the global batch; accumulation is derived."""

    steps: Count | None = Field(None, description="Optimizer steps. Exactly one of steps, tokens and epochs.")
    tokens: Tokens | None = Field(None, description="Tokens to train on, padding not counted, for example `2B`.")
    epochs: Positive | None = Field(None, description="Passes over the training data.")
    global_batch_tokens: Tokens | None = Field(
        None, le=10**12, description="Tokens per optimizer step over all processes; a multiple of `data.sequence_len`."
    )
    global_batch_size: Count | None = Field(
        None, le=10**9, description="Sequences per optimizer step over all processes. One of the two batch keys."
    )
    micro_batch_size: Count | Literal["auto"] = Field(
        "auto", description="Sequences per forward and backward pass on one device. Does not change the result."
    )
    batch_ramp: BatchRampConfig | None = Field(None, description="Start with a smaller global batch.")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8_rowwise"] = Field(
        "auto",
        description="Compute dtype; master weights and reductions stay fp32. `auto`: bf16 where it is fast. `fp8`: "
        "bf16, and float8 in the products of linear layers, on GPUs that have it, with a scale for each tensor, whose "
        "shards are gathered in float8; `fp8_rowwise`: one for each row, which rounds less and gathers in bf16.",
    )
    master_weights: Literal["fp32", "bf16_stochastic", "bf16_kahan"] = Field(
        "fp32",
        description="Dtype of the weights that the optimizer updates. To save memory with precision bf16: bf16 "
        "parameters, rounded stochastically, or with a bf16 remainder for each (Kahan summation).",
    )
    compile: Flag | Literal["auto"] = Field("auto", description="Compile the model with `torch.compile`.")
    activation_checkpointing: Checkpointing = Field(
        "auto",
        description="Recompute activations in the backward pass to save memory: `full` keeps a layer's input alone, "
        "`selective` also the results of matrix products and attention; `{every: 2}`, `{memory_budget: 0.5}`, "
        "`{mlp_tiles: 8}`. `auto`: "
        "`none`, `selective` or `full`, whichever is fastest with the largest micro batch that fits.",
    )
    activation_offloading: Flag | Count = Field(
        False,
        description="Keep what the layers save for the backward pass in host memory, copied beside the computation. "
        "For GPUs. A number: so many layers are loaded ahead of the one that is differentiated; `true`: 1.",
    )
    deterministic: Flag = Field(False, description="Use only operations whose results are bit for bit reproducible.")
    allow_cpu: Flag = Field(
        False,
        description="Train on the CPU if a launched job sees none of the GPUs that it asked for; otherwise it is "
        "refused.",
    )
    loop: OwnName | None = Field(
        None,
        description="A training loop of your own: a function of (learner, run), `package.module:function`. Absent: "
        "echelon's.",
    )
    callbacks: Callbacks = Field((), description="Your own code, called after steps, evaluations and saves.")
    log_every: Count = Field(1, description="Steps between console lines.")
    eval_every: Every | None = Field(
        100, description="Steps between evaluations, or passes over the data: `0.5 epochs`. `null`: only at the end."
    )

    @property
    def batch_key(self) -> str:
        """The key that sets the global batch size."""
        return next(key for key in BATCH_KEYS if getattr(self, key) is not None)

    @rule
    def _exactly_one_length_and_one_batch(self) -> None:
        for keys, what in ((STEP_KEYS, "how long to train"), (BATCH_KEYS, "the global batch")):
            names = ", ".join(f"train.{key}" for key in keys[:-1]) + f" and train.{keys[-1]}"
            choices = [f"train.{key}={getattr(self, key)}" for key in keys if getattr(self, key) is not None]
            if not choices:
                raise ValueError(f"one of {names} must set {what}; add one.")
            if len(choices) > 1:
                raise ValueError(
                    f"{' and '.join(choices)} are both given, but only one of {names} can set {what}; keep one."
                )


def _check_warmup(value: Any) -> Any:
    """Write steps as a number, tokens as `N tokens`, and a share of the run as `N%` or `N% of tokens`."""
    number, unit = read_amount(value)
    if 0 < number < 1 and isinstance(value, float):
        number, unit = 100 * number, "%"
    if 0 <= number < 100 and unit in ("%", "% of steps", "% of tokens"):
        return f"{show_number(number)}{unit.removesuffix(' of steps')}"
    if number < 0 or number % 1 or unit not in ("steps", "tokens"):
        raise PydanticCustomError("warmup", "a number of steps or tokens, or a share of the run")
    return int(number) if unit == "steps" else f"{int(number)} tokens"


class OptimConfig(Section):
    """The optimizer and the schedule of its learning rate."""

    around = "optim."

    name: OptimizerName = Field(
        "adamw",
        description="The optimizer. `muon` updates the matrices of the layers, AdamW the rest. `adamw_8bit` keeps "
        "moments in 8 bits. The learning rate of `adafactor` is relative to the magnitude of each parameter.",
    )
    options: Annotated[Options, OnlyWith("optim.name", (OWN,))] = Field(
        None, description="Arguments of an optimizer of your own, by their names."
    )
    learning_rate: Positive = Field(description="Peak learning rate of the schedule.")
    learning_rate_multipliers: dict[str, PositiveOrZero] = Field(
        default_factory=dict,
        description="Learning-rate factors by a glob over parameter names, for example "
        "`{'*embed_tokens*': 0.1}`; the first match is used, and each glob must match a parameter.",
    )
    weight_decay: PositiveOrZero = Field(0.1, description="Decoupled weight decay, except for the kinds in `no_decay`.")
    no_decay: tuple[Literal["norms", "biases", "embeddings"], ...] = Field(
        ("norms", "biases"), description="Kinds of parameters without weight decay: `norms`, `biases`, `embeddings`."
    )
    betas: tuple[Number, Number] = Field(
        default_factory=lambda optim: (0.9, 0.99) if optim.get("name") == "lion" else (0.9, 0.95),
        description="Decay rates of the first and second moment. Default: [0.9, 0.95]; lion: [0.9, 0.99].",
    )
    momentum: Number = Field(
        default_factory=lambda optim: 0.95 if optim.get("name") == "muon" else 0.9,
        ge=0,
        lt=1,
        description="Momentum of sgd and muon. Default: 0.9; muon: 0.95.",
    )
    eps: Positive = Field(1e-8, description="Added to the square root of the second moment, by all forms of AdamW.")
    max_grad_norm: Positive | None = Field(
        1.0, description="Gradients are clipped to this global norm; `null`: no clipping."
    )
    schedule: Literal["cosine", "linear", "constant", "inverse_sqrt", "polynomial", "wsd"] = Field(
        "cosine",
        description="Decay of the learning rate after the warm-up. `constant`: none. `wsd`: none, then a decay "
        "in the last `decay_fraction` of the run.",
    )
    warmup: Annotated[int | str, BeforeValidator(_check_warmup)] = Field(
        0,
        description="The linear warm-up: a number of steps, or `1B tokens`, `2%` of the run's steps, `2% of tokens`. "
        "In tokens, the whole schedule advances with them; that differs with `train.batch_ramp`.",
    )
    decay_fraction: Annotated[Number, Field(gt=0, le=1), OnlyWith("optim.schedule", ("wsd",))] = Field(
        0.2, description="fraction of the run in which the learning rate decays."
    )
    polynomial_power: Annotated[Positive, OnlyWith("optim.schedule", ("polynomial",))] = Field(
        2.0, description="the exponent."
    )
    min_learning_rate_fraction: Number = Field(
        0.1,
        ge=0,
        le=1,
        description="Final learning rate, as a fraction of `learning_rate`; `inverse_sqrt` never falls below it.",
    )

    @rule
    def _betas_below_one(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={list(self.betas)} must both be at least 0 and below 1; try [0.9, 0.95].")

    @rule
    def _schedule_has_what_it_needs(self) -> None:
        if self.schedule == "inverse_sqrt" and not self.warms_up:
            raise ValueError("optim.schedule=inverse_sqrt needs a warm-up; set optim.warmup, for example to 2%.")

    @property
    def warms_up(self) -> bool:
        """Whether there is a warm-up."""
        return self.warmup_of(100) > 0

    @property
    def warms_up_by_share(self) -> bool:
        """Whether the warm-up is a share of the run."""
        return "%" in str(self.warmup)

    @property
    def schedule_unit(self) -> Literal["steps", "tokens"]:
        """The unit in which the schedule advances."""
        return "tokens" if str(self.warmup).endswith("tokens") else "steps"

    def warmup_of(self, total: int) -> int:
        """The length of the warm-up in a run of `total` steps, or tokens; a share of it is rounded up."""
        number, _ = read_amount(self.warmup)
        return math.ceil(number * total / 100) if self.warms_up_by_share else int(number)


class ParallelConfig(Section):
    """Degrees of parallelism, if a name is not enough. Their product is the number of processes."""

    around = "parallel."

    dp_replicate: Count | Literal["auto"] | None = Field(
        None, description="Replicas of the model; `auto`: all remaining processes, as without any `dp_` key."
    )
    dp_shard: Count | Literal["auto"] | None = Field(
        None,
        description="Processes that shard one replica of the model and optimizer state; `auto`: all remaining "
        "processes.",
    )
    cp: Count = Field(1, description="Context parallelism: processes that share each sequence.")
    tp: Count = Field(1, description="Tensor parallelism: processes that share each matrix.")
    pp: Count = Field(1, description="Pipeline parallelism: stages of layers.")
    ep: Count = Field(1, description="Expert parallelism: processes that share the experts; divides `dp_shard * cp`.")
    reshard_after_forward: Flag | None = Field(
        None, description="Free gathered parameters after the forward pass (FSDP) or keep them (ZeRO-1, ZeRO-2)."
    )
    reduce_gradients: Literal["each", "last"] | None = Field(
        None, description="Reduce gradients after each microbatch, or once after the last."
    )
    cpu_offload: Flag = Field(False, description="Keep parameters and optimizer state in host memory.")
    prefetch: Count | None = Field(
        None, description="Layers gathered ahead of the one that runs, in both directions. Absent: PyTorch's own order."
    )
    sequence_parallel: Annotated[Flag | None, OnlyWith("parallel.tp")] = Field(
        None, description="norms and residuals are divided along the sequence among its processes. Absent: false."
    )
    cp_method: Annotated[CpMethod | None, OnlyWith("parallel.cp")] = Field(
        None,
        description="`allgather` gathers keys and values, `ulysses` exchanges heads for positions, `ring` "
        "sends keys and values around while it attends to them. Absent: `allgather`.",
    )
    schedule: Annotated[PipelineSchedule | None, OnlyWith("parallel.pp")] = Field(
        None, description="the pipeline schedule. Absent: `1f1b`."
    )
    stages: Annotated[tuple[Count, ...] | None, OnlyWith("parallel.pp")] = Field(
        None, description="the decoder layers of each stage. Absent: stages of about equal cost."
    )
    microbatches: Annotated[Count | None, OnlyWith("parallel.pp")] = Field(
        None, description="microbatches of a step, in place of `train.micro_batch_size`."
    )
    order: tuple[AxisName, ...] | None = Field(
        None, description="Order of the axes, outermost first. Absent: `[pp, dp_replicate, dp_shard, cp, tp]`."
    )
