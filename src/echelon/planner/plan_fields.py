"""The fields of a plan that do not depend on its layout, each with the numbers that it is based on.

They are the precision, whether layers are compiled, whether the documents of a sequence are kept apart, the loss, and
the sizes of the other models that processes keep: the teacher of a distillation, and reward models.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.run_files import RunFiles, is_run
from echelon.ground.sizes import render_duration
from echelon.ground.stored import read_json
from echelon.planner.activations import KeptActivations
from echelon.planner.hardware.accelerators import CPU_BF16_MARGIN, Cluster
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import LossKind, Precision, Rounding
from echelon.planner.shape import build_shape
from echelon.recipe.data_formats import RECORD_FORMATS, masks_documents
from echelon.recipe.names import ENGINES, OBJECTIVES
from echelon.recipe.training import Float8Scaling

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe
    from echelon.recipe.objective import ObjectiveConfig
    from echelon.recipe.training import TrainConfig

# On CPUs: what compiling takes at most (about 25 s were measured for one kind of layer), and the MFU without it, which
# is only assumed.
_COMPILE_SECONDS, _EAGER_MFU = 60, 0.35
# On CPUs: the part of a step that compiling saves, from benchmarks/results/cpu-steps.md: in bf16 with attention in
# blocks, else with torch's attention.
COMPILE_GAIN = {"bfloat16": 0.19, "float32": 0.06, "float16": 0.06}


def choose_precision(recipe: "Recipe", cluster: Cluster) -> tuple[Precision, list[str]]:
    """The dtypes of a plan, with the reason for `auto`. Raises PlanError or ConfigError for what cannot be computed."""
    train = recipe.train
    setting, name = train.precision, cluster.accelerator.name
    scaling: Float8Scaling = "rowwise" if setting == "fp8_rowwise" else "tensorwise"
    if "fp8" in train.precision:
        _check_float8(recipe, cluster)
    if setting == "bf16" and cluster.kind == "cuda" and not cluster.has_bf16:
        raise PlanError(f"train.precision=bf16: {name} does not support bf16; use fp16 or fp32.")
    compute_bf16 = setting == "bf16" or "fp8" in train.precision or (setting == "auto" and cluster.has_bf16)
    if train.master_weights != "fp32":
        chosen = _choose_master_weights(train, compute_bf16)
        return replace(chosen, float8="fp8" in train.precision, float8_scaling=scaling), []
    if "fp8" in train.precision:
        return Precision(compute="bfloat16", float8=True, float8_scaling=scaling), []
    precision = Precision(compute="bfloat16" if compute_bf16 else "float16" if setting == "fp16" else "float32")
    if setting != "auto":
        return precision, []
    return precision, [f"precision auto: compute in {precision.compute}, {_explain_bf16(cluster)}"]


def _check_float8(recipe: "Recipe", cluster: Cluster) -> None:
    """Raise PlanError if the devices have no float8, ConfigError if the recipe cannot use it."""
    if not cluster.has_float8:
        raise PlanError(
            f"train.precision=fp8: {cluster.accelerator.name} does not multiply matrices in float8, which needs a GPU "
            "of compute capability 8.9 or later, such as an H100; use train.precision=bf16."
        )
    if recipe.adapter.is_adapter:
        raise ConfigError(
            f"train.precision=fp8 does not work with adapter.method={recipe.adapter.method}: frozen weights would be "
            "cast again at every step; use train.precision=bf16, or adapter.method=full."
        )
    if recipe.train.compile is False:
        raise ConfigError(
            "train.precision=fp8 with train.compile=false is slower than bf16: every cast would be a pass over memory; "
            "use train.compile=true, or train.precision=bf16."
        )


def _explain_bf16(cluster: Cluster) -> str:
    """The reason for or against bf16: from the table of accelerators, or from a measurement."""
    part = cluster.accelerator
    if cluster.kind != "cpu":
        return f"{part.name} has {'fast' if cluster.has_bf16 else 'no fast'} bf16"
    if part.bf16_flops is None or part.fp32_flops is None:
        return f"the bf16 speed of a {part.name} is measured on the training machine"
    words = "" if cluster.has_bf16 else f"; bf16 is used if it is {CPU_BF16_MARGIN:g} times as fast"
    return (
        f"a process of this {part.name} multiplies matrices at {part.bf16_flops / 1e9:.0f} GFLOP/s in bf16 and "
        f"{part.fp32_flops / 1e9:.0f} in fp32{words}"
    )


def _choose_master_weights(train: "TrainConfig", compute_bf16: bool) -> Precision:
    """The precision with parameters stored only in bf16."""
    if not compute_bf16:
        raise ConfigError(
            f"train.master_weights={train.master_weights} stores parameters only in bf16, but "
            f"train.precision={train.precision} does not compute in bf16 on this device; set train.precision=bf16 or "
            "train.master_weights=fp32."
        )
    rounding: Rounding = "kahan" if train.master_weights == "bf16_kahan" else "stochastic"
    return Precision(param="bfloat16", compute="bfloat16", master="bfloat16", rounding=rounding)


def estimate_seconds(
    recipe: "Recipe", shape: ModelShape, cluster: Cluster, precision: Precision, num_samples: int | None
) -> float | None:
    """Return about how long training takes without compilation; None if the rate or the number of steps is unknown."""
    peak = cluster.accelerator.peak_flops(precision.compute)
    if peak is None or (num_samples is None and recipe.train.epochs is not None):
        return None
    tokens = recipe.batches.first_token(recipe.num_steps(num_samples or 0))
    flops = tokens * shape.flops_per_token(recipe.data.sequence_len)
    return flops / (cluster.num_devices * peak * _EAGER_MFU)


# tests/codegen shows it: the compiler takes the weights of the forward pass instead of dequantising them again.
_KEEPS_WEIGHTS = (
    "compiled layers keep their 4-bit weights in 16 bits for the backward pass, except with "
    "train.activation_checkpointing=full or {memory_budget: 0.5}"
)


def choose_compile(
    recipe: "Recipe", cluster: Cluster, kept: KeptActivations, seconds: float | None, gain: float
) -> tuple[bool, list[str]]:
    """Decide whether to compile a model that trains for `seconds`, if known. `gain`: the part that compiling saves.

    Raises ConfigError for an adapter whose layers replace weights in each forward pass; PEFT advises against it.
    """
    setting, adapter = recipe.train.compile, recipe.adapter
    key = "target_parameters" if adapter.target_parameters else "quantize_experts" if adapter.quantize_experts else None
    if key is not None and setting is True:
        raise ConfigError(
            f"train.compile=true: with adapter.{key} the weights of experts are replaced in each forward pass, which "
            "cannot be compiled; set train.compile=false."
        )
    keeps = _keeps_weights(recipe, kept)
    if isinstance(setting, bool):
        return setting, [f"compile: on, {_KEEPS_WEIGHTS}; this plan does not count them"] if setting and keeps else []
    if (obstacle := _find_compile_obstacle(recipe, kept)) is not None:
        return False, [f"compile auto: off, {obstacle}"]
    if kept.memory_budget is not None:
        return True, ["compile auto: on, the compiler keeps activations within the memory budget"]
    if key is not None:
        return False, [f"compile auto: off, with adapter.{key} the weights of experts change in each forward pass"]
    if keeps:
        return False, [f"compile auto: off, {_KEEPS_WEIGHTS}"]
    if recipe.train.activation_offloading and not kept.is_input_alone:
        return False, ["compile auto: off, the activations of compiled layers cannot be offloaded"]
    if cluster.kind == "cuda":
        return True, ["compile auto: on, fused kernels are faster on a GPU"]
    return _choose_on_cpu(cluster, seconds, gain)


def _keeps_weights(recipe: "Recipe", kept: KeptActivations) -> bool:
    """Whether compiled layers would keep dequantised weights for the backward pass."""
    return recipe.adapter.method == "qlora" and not kept.is_input_alone and kept.memory_budget is None


def _choose_on_cpu(cluster: Cluster, seconds: float | None, gain: float) -> tuple[bool, list[str]]:
    """Decide as `choose_compile`, on CPUs: compiling must save more time than it takes."""
    if seconds is None:
        return False, ["compile auto: off, the length of the training on this CPU is unknown"]
    about = "less than 1 s" if seconds < 1 else f"about {render_duration(seconds)}"
    length = f"training takes {about} here, and compiling up to {render_duration(_COMPILE_SECONDS)}"
    if not cluster.can_compile:
        return False, [f"compile auto: off, {cluster.accelerator.name} has no C++ compiler or no Python headers"]
    if gain * seconds < _COMPILE_SECONDS:
        return False, [f"compile auto: off, {length}"]
    return True, [f"compile auto: on, {length}, which saves about {gain:.0%} of each step"]


def _find_compile_obstacle(recipe: "Recipe", kept: KeptActivations) -> str | None:
    if not ENGINES[recipe.engine].compiles:
        return f"engine={recipe.engine} does not compile layers"
    if getattr(recipe.parallel, "schedule", None) == "zero_bubble":
        return "PyTorch cannot split the backward pass of compiled layers (zero_bubble)"
    if kept.mlp_tiles > 1:
        return "the tiles of an MLP are not compiled"
    return None


def keeps_documents_apart(recipe: "Recipe", shape: ModelShape) -> bool:
    """Whether the documents of a sequence do not attend to each other, as far as a recipe tells without its data."""
    data, answers = recipe.data, recipe.objective.row.answers
    if answers == "pairs":  # the two answers share a sequence
        return shape.obeys_masks
    has_samples = answers is not None or any(source.format in RECORD_FORMATS for source in data.train)
    are_packed = data.packing is not False and answers != "prompts"
    return masks_documents(data.document_mask, has_samples) and are_packed and shape.obeys_masks


def find_loss_kind(objective: "ObjectiveConfig") -> LossKind:
    """The loss as far as its memory depends on it."""
    if objective.name not in OBJECTIVES:
        return "function"
    if objective.name != "distill":
        return "cross_entropy"
    if not objective.teacher_in_memory:
        return "likeliest"
    if objective.loss_name == "jsd":
        return "mixture"
    return "divergence_and_labels" if objective.sft_weight else "divergence"


def count_teacher(recipe: "Recipe") -> tuple[int, int]:
    """Return the parameters and the hidden size of the teacher that processes keep in memory.

    Zeros without one, and for one not found here. Raises ConfigError if its config describes no model.
    """
    source = recipe.objective.teacher
    shape = None if source is None or not recipe.objective.teacher_in_memory else _find_shape(source)
    return (0, 0) if shape is None else (shape.num_parameters, shape.hidden_size)


def count_reward_models(recipe: "Recipe") -> int:
    """Return the parameters of the recipe's reward models. Those that are not here count zero.

    Raises ConfigError if a config describes no model.
    """
    shapes = [_find_shape(reward.model_path) for reward in recipe.reward if reward.model_path is not None]
    return sum(shape.num_parameters for shape in shapes if shape is not None)


def list_uncounted(recipe: "Recipe") -> list[str]:
    """Return a line for each teacher and reward model whose config is not on this machine, and which counts zero."""
    kept = {"objective.teacher": recipe.objective.teacher if recipe.objective.teacher_in_memory else None}
    kept |= {f"reward.{index}.options.path": reward.model_path for index, reward in enumerate(recipe.reward)}
    return [
        f"memory: {key}={source} is not counted, because its config.json is not on this machine"
        for key, source in kept.items()
        if source is not None and _find_config(source) is None
    ]


def _find_shape(source: str) -> ModelShape | None:
    path = _find_config(source)
    return None if path is None else _read_shape(path)


@cache
def _read_shape(path: Path) -> ModelShape | None:
    try:
        return build_shape(read_json(path), has_adapter=False)
    except (OSError, ValueError):
        return None


def _find_config(source: str) -> Path | None:
    """Return the config.json of a folder, a run, or the newest copy that the hub's cache has of a model."""
    folder = Path(source)
    if folder.is_dir():
        path = (RunFiles(folder).model_dir if is_run(folder) else folder) / "config.json"
        return path if path.is_file() else None
    try:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name
    except ImportError:
        return None
    snapshots = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=source, repo_type="model"), "snapshots")
    return max(snapshots.glob("*/config.json"), key=lambda path: path.lstat().st_mtime, default=None)
