"""Table of the engines that a recipe can name: where each is built, what it can run, and the settings of its own.

To add one, write a builder and add a row here. Nothing of an engine is imported before it is used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echelon.ground.extensions import EXTENSION
from echelon.recipe.section import Section
from echelon.recipe.yaml_text import show_value

NATIVE = "native"
OWN = "package.module:Name"
"""Stands for every name of an extension among the values of a Limit."""


@dataclass(frozen=True)
class Limit:
    """The values of a recipe key that an engine can run; every other value is refused.

    Attributes:
        key: dotted. A key inside `parallel` is not checked where the recipe gives a name instead of a mapping.
        values: those that the engine can run, with `auto` where `auto` resolves to one of them, and OWN for code from
            outside echelon.
        why: completes the sentence "engine=NAME ...", as the reason.
    """

    key: str
    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class EngineRow:
    """One engine.

    Attributes:
        place: of the builder, `package.module:function`; it is called with an EngineSpec.
        section: the recipe's section that only this engine reads.
        package: the package that it imports; the extra that installs it has the engine's name.
        strategies: the strategies of a plan that it can run, which `parallel: auto` chooses from; None: all.
        compiles: whether it can compile layers; `train.compile: auto` is off where it cannot.
        limits: the other keys of a recipe that it restricts.
        purpose: what it is for, for the user who chooses an engine.
        instead: what the native engine has in place of it.
        check: `package.module:function` without torch, called with a recipe and its plan; raises ConfigError or
            PlanError for what the limits cannot say.
    """

    place: str
    section: str | None = None
    package: str | None = None
    strategies: tuple[str, ...] | None = None
    compiles: bool = True
    limits: tuple[Limit, ...] = ()
    purpose: str = ""
    instead: str = ""
    check: str | None = None


_WHOLE_COPIES = (
    Limit("sync.name", ("every_step",), "sums the gradients of all processes in every step"),
    Limit("sync.compress.method", ("none",), "sends gradients by its own library"),
    Limit("fault.on_lost_process", ("restart",), "cannot leave its process groups"),
)

_ONE_MODEL = "runs the whole model on every process"
_DEEPSPEED = EngineRow(
    "echelon.foreign.deepspeed.zero_engine:build_deepspeed_engine",
    section="deepspeed",
    package="deepspeed",
    strategies=("ddp", "zero1", "zero2", "fsdp"),
    compiles=False,
    limits=(
        Limit("optim.name", ("adamw", "sgd", "lion"), "flattens parameters, and other optimizers need their shape"),
        *(Limit(f"parallel.{axis}", (1,), _ONE_MODEL) for axis in ("tp", "pp", "cp", "ep")),
        Limit("parallel.cpu_offload", (False,), "offloads by deepspeed.offload_optimizer and offload_parameters"),
        Limit("parallel.prefetch", (None,), "prefetches by zero_optimization.stage3_prefetch_bucket_size"),
        Limit("sync.name", ("every_step",), "reduces gradients in every step"),
        Limit("sync.compress.method", ("none",), "sends gradients as they are"),
        Limit("objective.name", ("causal_lm", OWN), "has no pass for a reference or for means over the batch"),
        Limit("adapter.method", ("full", "lora"), "casts all weights, so packed and rescaled ones do not work"),
        Limit("adapter.init", ("default",), "casts all weights, and this start changes the frozen ones"),
        Limit("train.precision", ("auto", "fp32", "bf16", "fp16"), "has no float8"),
        Limit("train.master_weights", ("fp32",), "keeps master weights in fp32"),
        Limit("train.compile", ("auto", False), "does not compile layers"),
        Limit("train.activation_offloading", (False,), "keeps activations on the device"),
        Limit("train.activation_checkpointing.mlp_tiles", (None,), "gathers and reduces weights by modules"),
        Limit("fault.on_lost_process", ("restart",), "cannot leave its process groups"),
        Limit("fault.verify_replicas_every", (None,), "has partitions, which have no copies to compare"),
        Limit("fault.verify_passes_every", (None,), "was not tested with it"),
    ),
    purpose="ZeRO by DeepSpeed: its config, its tuning, and offloading of the optimizer alone",
    instead="parallel: zero1, zero2 or fsdp on fully_shard, and parallel.cpu_offload for all states",
    check="echelon.planner.deepspeed_settings:check_settings",
)
ENGINES: dict[str, EngineRow] = {
    NATIVE: EngineRow(
        "echelon.learn.engines.native_build:build_native_engine", purpose="PyTorch's DDP and fully_shard"
    ),
    "deepspeed": _DEEPSPEED,
    "horovod": EngineRow(
        "echelon.foreign.horovod:build_horovod_engine",
        section="horovod",
        package="horovod",
        strategies=("ddp",),
        limits=_WHOLE_COPIES,
        purpose="clusters that have Horovod: its ring all-reduce, fusion and fp16 compression",
        instead="parallel: ddp, and sync.compress.method=fp16",
    ),
    "tensorflow": EngineRow(
        "echelon.foreign.tensorflow.tensorflow_engine:build_tensorflow_engine",
        section="tensorflow",
        package="keras_hub",
        strategies=("ddp",),
        compiles=False,
        limits=(
            *_WHOLE_COPIES,
            Limit("adapter.method", ("full",), "trains all weights: keras-hub's backbones take no adapter of PEFT"),
            Limit("objective.name", ("causal_lm",), "computes the loss of next tokens only"),
            Limit("data.document_mask", ("auto", False), "cannot keep the documents of a sequence apart"),
            Limit("optim.name", ("adamw",), "has no kernel of it"),
            Limit("train.precision", ("auto", "fp32"), "computes in fp32"),
            Limit("train.master_weights", ("fp32",), "computes in fp32"),
            Limit("train.compile", ("auto", False), "does not use PyTorch's compiler"),
            Limit("train.activation_checkpointing", ("auto", "none"), "keeps all activations"),
            Limit("train.activation_offloading", (False,), "keeps all activations on the device"),
            Limit("train.deterministic", (False,), "does not check TensorFlow's kernels for it"),
            Limit("profile.steps", (None,), "is not seen by PyTorch's profiler"),
            Limit("evaluate.tasks", ((),), "computes the logits of one position of a text alone"),
            Limit("fault.verify_passes_every", (None,), "computes the logits of one position of a text alone"),
        ),
        purpose="people with a TensorFlow stack: its mirrored strategies, of a Llama on CPUs",
        instead="parallel: ddp",
        check="echelon.planner.tensorflow_limits:check_tensorflow",
    ),
}
"""The engines by the recipe's `engine`."""


def find_refused(recipe: Section, engine: str) -> Iterator[str]:
    """Yield a message for each key of a recipe that its engine cannot run, and for settings of another engine."""
    for name, row in ENGINES.items():
        if row.section is not None and name != engine:
            section = getattr(recipe, row.section)
            if section != type(section)():
                yield (
                    f"{row.section} has settings of engine={name}, and the recipe has engine={engine}; set "
                    f"engine: {name}, or remove {row.section}."
                )
    for limit in ENGINES[engine].limits if engine in ENGINES else ():
        found, value = _find_value(recipe, limit.key)
        if found and (OWN if isinstance(value, str) and EXTENSION.fullmatch(value) else value) not in limit.values:
            possible = " or ".join(show_value(one) for one in limit.values)
            yield (
                f"{limit.key}={show_value(value)}: engine={engine} {limit.why}; use {limit.key}={possible}, or "
                f"engine={NATIVE}."
            )


def _find_value(recipe: Section, key: str) -> tuple[bool, Any]:
    """Whether the recipe has a key, and its value."""
    value: Any = recipe
    for part in key.split("."):
        if not isinstance(value, Section):
            return False, None
        value = getattr(value, part)
    return True, value
