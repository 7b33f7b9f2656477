"""Checks before any data is read or file written: one list for all commands that take a recipe.

`train`, `plan`, `launch`, `drill` and `sweep` all call `check_model`. Nothing here needs torch to be installed, so that
a recipe can be planned and launched from a machine without it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import ConfigError, HubUnreachableError
from echelon.ground.run_files import is_run
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import read_json
from echelon.learn.data.mixture import divide_slots
from echelon.learn.data.prepare_spec import prepare_spec
from echelon.learn.data.shared_folders import is_given
from echelon.learn.data.source import find_absent
from echelon.learn.model.model_folder import find_config_folder, find_model_dir
from echelon.learn.model.stored_format import StoredFormat, find_stored_format, without_settings
from echelon.planner.adapter_plan import check_adapter_shape, check_packages
from echelon.planner.families import FAMILIES
from echelon.planner.model_shape import ModelShape, count_scores, with_scores
from echelon.planner.plan_fields import list_uncounted
from echelon.planner.shape import build_shape, resolve_vocab_size
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import AdapterConfig, TrainedTokenizerConfig
from echelon.recipe.load import load_recipe
from echelon.recipe.names import ENGINES, NATIVE
from echelon.run.folder.open_run import check_folder
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers import check_trackers
from echelon.run.lifecycle.extension_checks import describe_extensions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Targets whose machines see the folders of this machine, or get copies. Elsewhere a path may exist that is not here.
_WITH_FOLDERS = (None, "local", "torchrun", "slurm", "ray", "skypilot")

COUNTED = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "attention_dropout",
}  # fmt: skip
"""The fields of a dense family that its formula checks. A new model with no other ones is not built to be checked."""
STORED = {
    "_name_or_path", "architectures", "attention_bias", "bos_token_id", "dtype", "eos_token_id", "head_dim",
    "hidden_act", "initializer_range", "mlp_bias", "pretraining_tp", "rms_norm_eps", "rope_theta", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Fields that published checkpoints have beside these, and which the formula counts or which change nothing."""


@dataclass(frozen=True)
class CheckedModel:
    """The model of a recipe that passed all checks that are possible on this machine.

    Attributes:
        fields: the HF config fields of the model, as the recipe or its checkpoint gives them.
        shape: of the model with its vocabulary size.
        vocabulary: a message about the vocabulary size.
        tokenizer: the recipe's, without its new tokens; None if its size is known without loading it, or not known
            here.
        obstacle: why the model cannot keep the documents of a sequence apart, as a clause; None if it can, or if that
            is not known here.
        masks: a message about that obstacle, if the recipe would pack documents.
        stored: a message about weights that the checkpoint stores quantized; None if it does not.
        left: the checks that are not possible on this machine, each with the reason; `train` runs them.
    """

    fields: dict[str, Any]
    shape: ModelShape
    vocabulary: str
    tokenizer: "PreTrainedTokenizerFast | None" = None
    obstacle: str | None = None
    masks: str | None = None
    stored: str | None = None
    left: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """The messages about the model."""
        return [f"model: {self.vocabulary}", *(line for line in (self.stored, self.masks) if line is not None)]


def check_model(recipe: Recipe, elsewhere: bool = False, weights: bool = True) -> CheckedModel:
    """Refuse a recipe whose own keys, tokenizer or model are invalid on any cluster. Writes nothing.

    Args:
        elsewhere: another machine will train, which may have packages and files that this one lacks. Checks that need
            them are then listed in `left`; without `elsewhere` they are errors.
        weights: whether the weights of a local `model.checkpoint` are checked; the copy of a hub model has none yet.

    Raises:
        ConfigError, PlanError or DataError: naming the key.
    """
    if recipe.data.is_mixture:
        divide_slots(recipe.data.weights)
    _check_deterministic(recipe)
    from echelon.learn.model.hub import fetch_other_configs  # planning a recipe without models of the hub needs none

    left = describe_extensions(recipe)
    fetch_other_configs(recipe)
    left += list_uncounted(recipe)
    _check_engine_package(recipe, elsewhere, left)
    if not elsewhere:
        check_trackers(recipe)
    elif recipe.track:
        left.append(f"track: the packages and keys of {', '.join(recipe.track)}")
    size, tokenizer = _measure_vocabulary(recipe, elsewhere, left)
    model_fields, stored = _read_given_fields(recipe)
    model_fields = _with_head(recipe, model_fields)
    fields, line = size_vocabulary(recipe, model_fields, size)
    shape = build_shape(fields, recipe.adapter.is_adapter)
    _check_positions(recipe, shape)
    if weights and (stored is None or _find_missing("torch") is None):  # quantized weights are computed to be checked
        check_weights(recipe.model.checkpoint)
    obstacle = _check_built(recipe, fields, shape, elsewhere, left)
    masks = None
    if obstacle is not None and recipe.data.packing == "auto" and recipe.data.document_mask is not False:
        masks = f"data.packing=auto: samples are not packed, because {obstacle}"
    shape = replace(shape, obeys_masks=obstacle is None)
    message = None if stored is None else _describe_stored(recipe, stored)
    return CheckedModel(model_fields, shape, line, tokenizer, obstacle, masks, message, tuple(left))


def check_counted(recipe: Recipe) -> None:
    """Make the checks of a new model whose parameters are counted by formula, which needs neither torch nor a file.

    Raises ConfigError or PlanError, naming the key.
    """
    if recipe.model.config is None or not is_counted(recipe, recipe.model.config):
        return
    fields, _ = size_vocabulary(recipe, dict(recipe.model.config), _find_vocab_size(recipe))
    _check_positions(recipe, build_shape(fields))


def is_counted(recipe: Recipe, fields: Mapping[str, Any]) -> bool:
    """Whether the formula of its family suffices to check a model, so that none is built and torch is not imported.

    It does for a dense family with no field beside `COUNTED`, and in a checkpoint `STORED` and nulls, if the recipe
    asks nothing of its parts that only a built one shows. tests/dist/test_checks.py builds what is taken for granted.
    """
    model, adapter = recipe.model, recipe.adapter
    asks_more = bool(model.attn_implementation or recipe.optim.learning_rate_multipliers or model.rope is not None)
    asks_more |= bool(adapter.modules_to_save or adapter.target_parameters or adapter.quantize_experts)
    asks_more |= "lm_head" in adapter.target_modules or "fp8" in recipe.train.precision
    if asks_more or fields["model_type"] not in FAMILIES:
        return False
    if model.config is not None:
        return all(name in COUNTED and value is not None for name, value in fields.items())
    return _is_plain(fields)


def _is_plain(fields: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config has sizes and `STORED` alone: no window, no scaled positions, no scores."""
    rotary = fields.get("rope_parameters")
    names = {name for name, value in fields.items() if value is not None}
    if isinstance(rotary, dict) and rotary == {"rope_type": "default", "rope_theta": rotary.get("rope_theta")}:
        names -= {"rope_parameters"}
    is_known = names - STORED <= COUNTED and fields.get("hidden_act", "silu") == "silu"
    return is_known and count_scores(fields) is None


def _check_engine_package(recipe: Recipe, elsewhere: bool, left: list[str]) -> None:
    """Refuse an engine whose package is not installed here; add it to `left` if another machine trains."""
    package = ENGINES[recipe.engine].package
    if package is None or find_spec(package) is not None:
        return
    if not elsewhere:
        raise ConfigError(
            f"engine={recipe.engine} requires the package {package}, which is not installed; see docs/engines.md for "
            f"how to install it, or use engine={NATIVE}."
        )
    left.append(f"engine: the package {package} (it is not installed here)")


def find_checkpoint_out_of_reach(recipe: Recipe) -> str | None:
    """Why `model.checkpoint` cannot be read here although the training machines may; None if it can be read.

    Does not check hub models: reading them raises HubUnreachableError.
    """
    checkpoint = recipe.model.checkpoint
    why = None if checkpoint is None else _find_out_of_reach(recipe, checkpoint)
    return None if why is None else f"model.checkpoint={checkpoint} {why}"


def _find_out_of_reach(recipe: Recipe, source: str) -> str | None:
    """Like `find_checkpoint_out_of_reach`, for any folder."""
    is_elsewhere = recipe.launch.to not in _WITH_FOLDERS and source.startswith(("s3://", "/"))
    return "is not on this machine" if is_elsewhere and not Path(source).exists() else None


def _measure_vocabulary(
    recipe: Recipe, elsewhere: bool, left: list[str]
) -> "tuple[int | None, PreTrainedTokenizerFast | None]":
    """The size of the recipe's tokenizer without its new tokens; and the tokenizer, if it was loaded to find out.

    The size is None, with a line in `left`, if the tokenizer cannot be loaded on this machine.
    """
    if (size := _find_vocab_size(recipe)) is not None:
        return size, None
    assert not isinstance(recipe.tokenizer, TrainedTokenizerConfig)
    source = recipe.tokenizer or recipe.model.checkpoint
    why = None
    if elsewhere and source is not None:
        why = _find_missing("transformers")
        if why is None and (obstacle := _find_out_of_reach(recipe, source)) is not None:
            why = f"{source} {obstacle}"
    if why is None:
        from echelon.learn.data.tokenizer import count_ids, find_folder, find_source, load_tokenizer, vocabulary_size

        checkpoint = recipe.model.checkpoint and find_model_dir(recipe.model.checkpoint)
        try:
            name, key = find_source(recipe.tokenizer, checkpoint)
            if (size := count_ids(find_folder(name, recipe.model.trust_remote_code, key))) is not None:
                return size, None
            tokenizer = load_tokenizer(name, recipe.model.trust_remote_code, key)
            return vocabulary_size(tokenizer.backend_tokenizer), tokenizer
        except HubUnreachableError as error:
            if not elsewhere:
                raise
            why = error.reason
    left.append(f"tokenizer: whether the model's vocabulary contains its ids ({why})")
    return None, None


def _check_built(
    recipe: Recipe, fields: dict[str, Any], shape: ModelShape, elsewhere: bool, left: list[str]
) -> str | None:
    """Run the checks that need the model, built on the meta device; adds those that are not possible here to `left`.

    Returns why the model cannot keep the documents of a sequence apart; None if it can, or if that is not known here.

    All checks of a built model belong here. Importing torch takes seconds, so it is done only when needed.
    """
    if is_counted(recipe, fields):
        if recipe.adapter.is_adapter:
            check_adapter_shape(recipe.adapter, shape)
            _has_adapter(recipe.adapter, elsewhere, left)
        return None
    if why := _find_missing("transformers", "torch"):
        if recipe.model.checkpoint is None and find_spec("transformers") is not None:
            from echelon.learn.model.config import build_config, scale_positions

            scale_positions(build_config(fields), recipe)
        left += [f"{check} ({why})" for check in _list_built_checks(recipe)]
        return None
    from echelon.learn.model.config import check_scaled
    from echelon.learn.model.copy_checks import check_is_causal
    from echelon.learn.model.traits import describe_obstacle, find_traits
    from echelon.learn.optimizer import check_groups

    model, config = _build_on_meta(recipe, fields, elsewhere, left)
    check_scaled(model, recipe)
    check_is_causal(config, recipe.model.trust_remote_code)
    traits = find_traits(model, recipe.data.sequence_len)
    obstacle = describe_obstacle(traits, config)
    _check_divided(model, traits, recipe)
    if "fp8" in recipe.train.precision:
        from echelon.learn.model.quantization import check_float8_package, find_float8_layers

        find_float8_layers(model)
        _has(check_float8_package, elsewhere, left, "train.precision: the package torchao (it is not installed here)")
    if not recipe.adapter.is_adapter or _try_adapter(model, recipe.adapter, elsewhere, left):
        check_groups((name for name, parameter in model.named_parameters() if parameter.requires_grad), recipe.optim)
    return obstacle


def _build_on_meta(recipe: Recipe, fields: dict[str, Any], elsewhere: bool, left: list[str]) -> tuple[Any, Any]:
    """Build the recipe's model on meta; return it and its config."""
    from echelon.learn.model.build import apply_head, build_on_meta, load_config
    from echelon.learn.model.config import scale_positions

    attention, trusted = recipe.model.attn_implementation, recipe.model.trust_remote_code
    config = load_config(recipe.model.checkpoint or fields, trusted)
    scale_positions(config, recipe)
    apply_head(config, recipe)
    try:
        return build_on_meta(config, attention, trusted), config
    except ConfigError as error:
        if not elsewhere or not isinstance(error.__cause__, ImportError):
            raise
        left.append(f"model.attn_implementation: the package of {attention} (it is not installed here)")
        config = load_config(recipe.model.checkpoint or fields, trusted)  # the first one was given that attention
        scale_positions(config, recipe)
        apply_head(config, recipe)
        return build_on_meta(config, None, trusted), config


def _check_divided(model: Any, traits: Any, recipe: Recipe) -> None:
    """Refuse a division of sequences, matrices or MLPs that the model does not support."""
    if not isinstance(recipe.parallel, str) and recipe.parallel.cp > 1:
        from echelon.learn.model.copy_checks import check_divides

        check_divides(model, recipe.parallel.cp_method or "allgather", traits, recipe.data.sequence_len)
    kept = recipe.train.activation_checkpointing
    if not isinstance(kept, str) and kept.mlp_tiles is not None:
        from echelon.learn.model.mlp_tiles import find_mlps

        find_mlps(model)
    if tensor_degree(recipe) > 1:
        from echelon.learn.parallel.tensor import find_divided

        find_divided(model)


def _try_adapter(model: Any, adapter: AdapterConfig, elsewhere: bool, left: list[str]) -> bool:
    """Apply the adapter to the model. False: its packages are not installed here, but may be where it trains."""
    from echelon.learn.model.adapters import apply_adapter, check_adapter

    check_adapter(model, adapter)
    if not _has_adapter(adapter, elsewhere, left):
        return False
    apply_adapter(model, adapter)
    return True


def _has_adapter(adapter: AdapterConfig, elsewhere: bool, left: list[str]) -> bool:
    line = f"adapter: the packages of {adapter.method}, and optim with it (they are not all here)"
    return _has(lambda: check_packages(adapter), elsewhere, left, line)


def _has(check: Callable[[], None], elsewhere: bool, left: list[str], line: str) -> bool:
    """Whether a package is installed here. With `elsewhere` it may be only where the training runs."""
    try:
        check()
    except ConfigError:
        if not elsewhere:
            raise
        left.append(line)
        return False
    return True


def tensor_degree(recipe: Recipe) -> int:
    """The ranks among which a recipe divides matrices; 1 for a named strategy."""
    return 1 if isinstance(recipe.parallel, str) else recipe.parallel.tp


def _list_built_checks(recipe: Recipe) -> Iterator[str]:
    """Descriptions of the checks in `_check_built` that apply to the recipe."""
    if recipe.model.checkpoint is not None:
        yield "model.checkpoint: whether its weights can be read"
    elif find_spec("transformers") is None:
        yield "model.config: whether transformers knows these fields"
    yield "model: whether transformers can build it, and its attention is causal"
    if recipe.model.rope is not None:
        yield "model.rope: whether the model has positions that can be scaled so"
    if recipe.model.attn_implementation is not None:
        yield f"model.attn_implementation: whether {recipe.model.attn_implementation} can run it"
    if recipe.adapter.is_adapter:
        yield f"adapter: whether the model has layers for {recipe.adapter.method}, and its packages"
    if "fp8" in recipe.train.precision:
        yield "train.precision: whether the model has layers for fp8, and its package"
    if tensor_degree(recipe) > 1:
        yield "parallel.tp: whether the model can be divided"
    if recipe.optim.learning_rate_multipliers:
        yield "optim.learning_rate_multipliers: whether each matches a parameter"


def _find_missing(*packages: str) -> str | None:
    """`torch is not installed here` for the first of these packages that is not."""
    return next((f"{package} is not installed here" for package in packages if find_spec(package) is None), None)


def _check_deterministic(recipe: Recipe) -> None:
    """Refuse flash attention, whose backward pass sums the gradients of a query in a varying order."""
    attention = recipe.model.attn_implementation or ""
    if recipe.train.deterministic and "flash" in attention:
        raise ConfigError(
            f"train.deterministic=true: the backward pass of model.attn_implementation={attention} does not repeat bit "
            "for bit; use sdpa or eager, or set train.deterministic=false."
        )


def _check_positions(recipe: Recipe, shape: ModelShape) -> None:
    """Refuse sequences longer than the config of a new model allows, even if rotary positions have no limit.

    Scaled positions are checked with the config that they are scaled in.
    """
    length, positions = recipe.data.sequence_len, shape.max_positions
    if recipe.model.config is not None and recipe.model.rope is None and positions is not None and length > positions:
        raise ConfigError(
            f"data.sequence_len={length} is longer than model.config.max_position_embeddings={positions}, the limit of "
            f"the exported model; set model.config.max_position_embeddings={length}, or use a "
            f"data.sequence_len of {positions} or less."
        )


def check_weights(checkpoint: str | None) -> None:
    """Raise unless a local `model.checkpoint` has readable weights; a hub id is checked when it is fetched."""
    if checkpoint is None:
        return
    from echelon.learn.checkpoint.folder import newest_of
    from echelon.learn.model.model_folder import open_folder

    path = Path(checkpoint)
    if is_run(path):
        if load_recipe(RunFolder(path).recipe_path)[0].adapter.is_adapter:
            raise ConfigError(
                f"model.checkpoint={checkpoint}: this run trained an adapter; write the whole model with `echelon "
                f"export {checkpoint} OUT --merge` and give model.checkpoint=OUT."
            )
        newest_of(path, checksums=True)
    elif path.is_dir():
        open_folder(path)


def find_model_fields(recipe: Recipe, tokenizer_vocab_size: int | None) -> tuple[dict[str, Any], str]:
    """The HF config fields of the recipe's model with its vocabulary size, and a line about that size.

    None as the tokenizer's size means that it is not known yet: the config's own stands, or its family's default.
    Raises ConfigError when the model's vocabulary is smaller than the tokenizer's.
    """
    return size_vocabulary(recipe, read_model_fields(recipe), tokenizer_vocab_size)


def read_model_fields(recipe: Recipe) -> dict[str, Any]:
    """The HF config fields of the recipe's model, as it or its checkpoint gives them.

    Raises ConfigError for a checkpoint without a readable config, or whose quantized weights cannot be read.
    """
    return _with_head(recipe, _read_given_fields(recipe)[0])


def _with_head(recipe: Recipe, fields: dict[str, Any]) -> dict[str, Any]:
    num_scores = recipe.objective.num_scores
    return fields if num_scores is None else with_scores(fields, num_scores)


def _read_given_fields(recipe: Recipe) -> tuple[dict[str, Any], StoredFormat | None]:
    """The config fields of the model in memory, and the format of the weights if its checkpoint has quantized ones."""
    if recipe.model.config is not None:
        return dict(recipe.model.config), None
    assert recipe.model.checkpoint is not None
    fields = _read_checkpoint_fields(recipe.model.checkpoint, recipe.model.trust_remote_code)
    return without_settings(fields), find_stored_format(recipe.model.checkpoint, fields)


def _describe_stored(recipe: Recipe, stored: StoredFormat) -> str:
    """The message about quantized weights: what is read, and what is held."""
    checkpoint = Path(str(recipe.model.checkpoint))
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    read = f", {render_bytes(size)}" if size else ""
    again = f", then quantized to {recipe.adapter.quant_type}" if recipe.adapter.method == "qlora" else ""
    return (
        f"model.checkpoint: its weights are stored as {stored}{read}; they are read as plain numbers of {stored.dtype}"
        f"{again}; memory is that of the model, not of the files"
    )


def size_vocabulary(
    recipe: Recipe, fields: dict[str, Any], tokenizer_vocab_size: int | None
) -> tuple[dict[str, Any], str]:
    """Like `find_model_fields`, for fields that `read_model_fields` has read."""
    if tokenizer_vocab_size is None:
        return fields, "vocab_size: as configured; the tokenizer is unknown until the data is prepared"
    checkpoint = recipe.model.checkpoint
    source = "model.config" if recipe.model.config is not None else f"model.checkpoint={checkpoint}"
    may_grow = bool(recipe.model.new_tokens) and checkpoint is not None
    size, line = resolve_vocab_size(fields, tokenizer_vocab_size, source, may_grow)
    return {**fields, "vocab_size": size}, line


def _find_vocab_size(recipe: Recipe) -> int | None:
    """The size of the tokenizer if the recipe alone determines it; None if not."""
    if recipe.tokenizer == "bytes":
        return 256
    if recipe.tokenizer is None or isinstance(recipe.tokenizer, str):
        return None
    return recipe.tokenizer.train.vocab_size


def _read_floats(value: Any) -> Any:
    """Return what a config.json states, with `{"__float__": "Infinity"}` and the like as numbers."""
    if isinstance(value, list):
        return [_read_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("NaN", "Infinity", "-Infinity"):
        return float(value["__float__"])
    return {name: _read_floats(item) for name, item in value.items()}


def _read_checkpoint_fields(checkpoint: str, trust_remote_code: bool) -> dict[str, Any]:
    """The config.json of a checkpoint, unchanged; of a hub id only this file is fetched."""
    path = find_config_folder(checkpoint, trust_remote_code) / "config.json"
    try:
        fields = _read_floats(read_json(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.checkpoint={checkpoint}: {path} cannot be read ({error}); give a whole model folder."
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"model.checkpoint={checkpoint}: {path} is not the config of a model.")
    return fields


def check_early(recipe: Recipe, fresh: bool) -> None:
    """Check the run folder, the paths of the text and the shape of a new model, before torch is imported.

    `prepare_run` checks all of this again, with what takes longer, once it holds the lock. Raises ConfigError,
    DataError or PlanError, naming the key.
    """
    check_folder(recipe, fresh)
    folder = RunFolder(Path(recipe.run.dir))
    if folder.is_finished() and not fresh:
        return
    spec = prepare_spec(recipe)
    if not is_given(spec):
        for error in find_absent((*spec.train, *spec.validation)):
            raise error
    if fresh or not folder.recipe_path.exists():
        check_counted(recipe)
