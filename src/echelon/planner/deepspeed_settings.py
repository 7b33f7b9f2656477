"""DeepSpeed's config of a recipe and its plan, and the check of a config that the user wrote."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.plan import ParallelPlan
from echelon.recipe.yaml_text import read_table, show_value

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

KEY = "deepspeed.config"
_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}

_ZERO = "zero_optimization."
_TABLE = read_table(Path(__file__).with_name("deepspeed.yaml"))
_FREE: frozenset[str] = frozenset(_TABLE["free"].split())
_FIXED: Mapping[str, tuple[Any, str]] = _TABLE["fixed"]
_INSTEAD: Mapping[str, str] = _TABLE["instead"]


@dataclass(frozen=True)
class _Owned:
    """A value that the recipe determines, and the key of the recipe that does."""

    value: Any
    by: str


def build_settings(recipe: "Recipe", plan: ParallelPlan) -> dict[str, Any]:
    """DeepSpeed's config of a plan: what the recipe determines, and the free keys of the user's config.

    The numbers of a batch are those of its full size. `gradient_accumulation_steps` is 2 whatever the plan says: the
    engine tells DeepSpeed itself which microbatch is the last one, and with 1 DeepSpeed would drop the others when it
    offloads the optimizer. `gradient_clipping` is 0, where DeepSpeed's default is 1: the engine sets it in each step.

    Raises:
        ConfigError: a key of `deepspeed.config` contradicts the recipe, or is not one that can be passed on.
        PlanError: DeepSpeed cannot run the plan.
    """
    _check_plan(recipe, plan)
    owned = _find_owned(recipe, plan)
    config = dict(_flatten(recipe.deepspeed.config))
    passed: dict[str, Any] = {}
    for key, value in config.items():
        if "nvme" in key or value == "nvme" or key.startswith("aio."):
            raise ConfigError(
                f"{KEY}.{key}={show_value(value)}: with NVMe offload DeepSpeed moves gradients and moments to files "
                "before the step, and engine=deepspeed reads them from memory, for the norm and for checkpoints; "
                "remove the key and use deepspeed.offload_optimizer and offload_parameters, which keep them in host "
                "memory."
            )
        if key in owned:
            _check_owned(key, value, owned[key])
        elif key in _FIXED:
            fixed, why = _FIXED[key]
            _check_owned(key, value, _Owned(fixed, why), is_key=False)
        elif key not in _FREE:
            instead = _INSTEAD.get(key.partition(".")[0], "remove it")
            raise ConfigError(
                f"{KEY}.{key}={show_value(value)} is not a key of DeepSpeed that engine=deepspeed passes on; "
                f"{instead}. docs/engines.md lists the keys."
            )
        elif value != "auto":
            passed[key] = value
    steps = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**31,
        f"{_ZERO}reduce_bucket_size": 2**25,
    }
    made = {key: setting.value for key, setting in owned.items() if not key.startswith(("optimizer.", "train_batch"))}
    return _nest({**made, **steps, **passed})


def check_settings(recipe: "Recipe", plan: ParallelPlan) -> None:
    """Raise ConfigError or PlanError unless DeepSpeed can run a plan, with the user's config. See build_settings."""
    build_settings(recipe, plan)


def find_stage(plan: ParallelPlan) -> int:
    """The ZeRO stage of a plan's strategy."""
    return _STAGES[plan.strategy]


def _check_plan(recipe: "Recipe", plan: ParallelPlan) -> None:
    stage, offloads = find_stage(plan), recipe.deepspeed.offload_optimizer
    if plan.precision.compute != "float32" and stage < 2 and not (stage == 1 and offloads):
        raise PlanError(
            f"parallel={plan.strategy} with compute in {plan.precision.compute}: DeepSpeed runs this with an optimizer "
            "of another kind, which echelon does not drive; use parallel=zero2 or fsdp, or train.precision=fp32."
        )
    if offloads and stage == 0:
        raise PlanError(
            f"deepspeed.offload_optimizer=true with parallel={plan.strategy}: DeepSpeed offloads what it partitions; "
            "use parallel=zero1, zero2 or fsdp, or deepspeed.offload_optimizer=false."
        )
    if recipe.deepspeed.offload_parameters and stage < 3:
        raise PlanError(
            f"deepspeed.offload_parameters=true with parallel={plan.strategy}: only parallel=fsdp (ZeRO-3) partitions "
            "parameters; use it, or deepspeed.offload_parameters=false."
        )


def _find_owned(recipe: "Recipe", plan: ParallelPlan) -> dict[str, _Owned]:
    """The keys of DeepSpeed's config that the recipe determines."""
    optim, offloaded = recipe.optim, recipe.deepspeed
    batch = "train.global_batch_size and the number of processes"
    owned = {
        "train_batch_size": _Owned(plan.global_batch_size, f"train.{recipe.train.batch_key}"),
        "train_micro_batch_size_per_gpu": _Owned(plan.micro_batch_size, "train.micro_batch_size"),
        "gradient_accumulation_steps": _Owned(plan.num_microbatches, batch),
        "gradient_clipping": _Owned(optim.max_grad_norm or 0.0, "optim.max_grad_norm"),
        "bf16.enabled": _Owned(plan.precision.compute == "bfloat16", "train.precision"),
        "fp16.enabled": _Owned(plan.precision.compute == "float16", "train.precision"),
        "fp16.loss_scale": _Owned(1.0, "echelon's own loss scale"),
        f"{_ZERO}stage": _Owned(find_stage(plan), "parallel"),
        f"{_ZERO}offload_optimizer.device": _place(offloaded.offload_optimizer, "deepspeed.offload_optimizer"),
        f"{_ZERO}offload_param.device": _place(offloaded.offload_parameters, "deepspeed.offload_parameters"),
        "communication_data_type": _Owned("fp32", "echelon's reduction in fp32"),
        "optimizer.type": _Owned({"adamw": "AdamW", "sgd": "SGD", "lion": "Lion"}[optim.name], "optim.name"),
        "optimizer.params.lr": _Owned(optim.learning_rate, "optim.learning_rate"),
        "optimizer.params.weight_decay": _Owned(optim.weight_decay, "optim.weight_decay"),
    }
    if optim.name != "sgd":
        owned["optimizer.params.betas"] = _Owned(list(optim.betas), "optim.betas")
    if optim.name == "adamw":
        owned["optimizer.params.eps"] = _Owned(optim.eps, "optim.eps")
    return owned


def _place(offloads: bool, by: str) -> _Owned:
    return _Owned("cpu" if offloads else "none", by)


def _check_owned(key: str, value: Any, owned: _Owned, is_key: bool = True) -> None:
    if value in ("auto", owned.value):
        return
    by = f"{owned.by} makes it" if is_key else f"{owned.by}, so it is"
    raise ConfigError(
        f"{KEY}.{key}={show_value(value)}: {by} {show_value(owned.value)}; change one of them, or write auto."
    )


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return nested
