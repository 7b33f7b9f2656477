"""Loads the target of `eval` and `generate`: a checkpoint of a run, or an HF folder; whole, or a shard of it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from echelon.ground.errors import ConfigError, EchelonError
from echelon.ground.run_files import is_model_folder, require_model
from echelon.ground.stored import check_readable, read_json
from echelon.learn.checkpoint.adapted import (
    AdaptedRun,
    load_run_tokenizer,
    open_first_weights,
    read_generation_config,
    read_run_recipe,
    run_skeleton,
    with_generation_config,
)
from echelon.learn.checkpoint.export import load_run_model
from echelon.learn.checkpoint.folder import checkpoint_of
from echelon.learn.data.tokenizer import try_tokenizer
from echelon.learn.model.attention import choose_attention
from echelon.learn.model.build import build_on_meta, drop_quantization, load_config, materialize, model_kind
from echelon.learn.model.causality import check_is_causal
from echelon.learn.model.model_folder import run_model_dir
from echelon.learn.model.parts import check_has_vocabulary
from echelon.learn.model.pretrained import PretrainedWeights
from echelon.learn.model.stored_folder import open_folder
from echelon.learn.model.stored_format import StoredFormat, find_settings, find_stored_format
from echelon.planner.shape import check_depth
from echelon.tools.inference.team import Host

# Only local files are read: no request to the hub, and no code of the folder is run.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def find_device(num_bytes: int = 0) -> torch.device:
    """Return the first GPU if it has this much free memory, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > num_bytes:
        return torch.device("cuda")
    return torch.device("cpu")


def load_target(
    target: Path, host: Host, checkpoint: str | None = None, may_score: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, in evaluation mode, and its tokenizer. Collective.

    Args:
        may_score: whether it may be a model that scores texts; else such a one is refused.
        host: shards the model over its team, and runs work on it.
        checkpoint: newest, best or a step of a run; None for the newest.

    Raises:
        ConfigError: the path is neither a run nor an HF folder, or the run has no such checkpoint.
    """
    tokenizer = load_target_tokenizer(target, checkpoint)
    device = host.team.device
    if not is_model_folder(target):
        _check_head(load_config(str(run_model_dir(target))), target, may_score)
        return load_run_model(target, device, checkpoint, host.adopt), tokenizer
    logging.disable_progress_bar()
    with _explained(target):
        check_readable(target)
        check_depth(read_json(target / "config.json"))
        read_generation_config(target)
        config = AutoConfig.from_pretrained(target, **_LOCAL)
        _check_head(config, target, may_score)
        check_is_causal(config)
        if host.team.size > 1 or _read_format(target) is not None:
            return _load_shard(target, config, host), tokenizer
        model, report = model_kind(config).from_pretrained(
            target, config=config, dtype="auto", use_safetensors=True, output_loading_info=True,
            attn_implementation=choose_attention(config, None), **_LOCAL,
        )  # fmt: skip
        if report["missing_keys"]:  # transformers would initialise them randomly
            raise ValueError(f"its files lack the weight {min(report['missing_keys'])}")
    return model.to(device).eval(), tokenizer


def _check_head(config: PretrainedConfig, target: Path, may_score: bool) -> None:
    if not may_score:
        fix = (
            "evaluate it with echelon eval MODEL --data FILE, load it with AutoModelForSequenceClassification of "
            "transformers to get scores, or use a language model"
        )
        check_has_vocabulary(config, str(target), fix)


def _load_shard(target: Path, config: PretrainedConfig, host: Host) -> PreTrainedModel:
    """Load this process's shard of an HF folder, in the dtypes that `from_pretrained` chooses with dtype="auto"."""
    if find_settings(read_json(target / "config.json"))[1] is not None and _read_format(target) is None:
        raise ConfigError(
            f"{target} has quantized weights in a format that echelon does not read and cannot shard; use --nproc 1."
        )
    drop_quantization(config)
    dtype = config.dtype or open_folder(target).find_dtype()
    skeleton = with_generation_config(build_on_meta(config, dtype=dtype), target)
    in_fp32 = skeleton._get_dtype_plan(dtype)
    for name, parameter in skeleton.named_parameters():
        if not in_fp32.keys().isdisjoint(name.split(".")):
            parameter.data = parameter.data.float()
    model = copy.deepcopy(skeleton)
    host.adopt(model)
    materialize(model, host.team.device)
    PretrainedWeights(skeleton, target).fill(model)
    return model.eval()


def _read_format(target: Path) -> StoredFormat | None:
    """Return the format of quantized weights that echelon reads; transformers may load those of other formats."""
    try:
        return find_stored_format(str(target), read_json(target / "config.json"))
    except ConfigError:
        return None


def load_target_tokenizer(target: Path, checkpoint: str | None = None) -> PreTrainedTokenizerBase:
    """Load only the tokenizer, which is fast. Raises ConfigError like `load_target`."""
    if is_model_folder(target):
        if checkpoint is not None:
            raise ConfigError(
                f"--checkpoint {checkpoint}: {target} is an HF folder and has no checkpoints; remove --checkpoint."
            )
        with _explained(target):
            check_readable(target)
            tokenizer = AutoTokenizer.from_pretrained(target, **_LOCAL)
            try_tokenizer(tokenizer)
        return tokenizer
    require_model(target)
    checkpoint_of(target, checkpoint)
    return load_run_tokenizer(target)


def load_first_weights(run: Path, host: Host) -> PreTrainedModel:
    """Load a run's initial model, in evaluation mode: initialised from the seed, or from `model.checkpoint`."""
    skeleton = run_skeleton(run)
    model = copy.deepcopy(skeleton)
    host.adopt(model)
    materialize(model, host.team.device)
    open_first_weights(skeleton, run)(model)
    return model.eval()


def count_bytes(target: Path) -> int:
    """Return the bytes of a target's weights in memory, without loading them. Raises the errors of `load_target`."""
    if is_model_folder(target):
        stored = _read_format(target)
        if stored is not None:
            model = build_on_meta(load_config(str(target)), dtype=getattr(torch, stored.dtype))
            return sum(parameter.nbytes for parameter in model.parameters())
        return sum(path.stat().st_size for path in target.glob("*.safetensors"))
    load_target_tokenizer(target)
    is_adapter = read_run_recipe(target).adapter.is_adapter
    model = AdaptedRun(target, None, torch.device("meta")).model if is_adapter else run_skeleton(target)
    return sum(parameter.nbytes for parameter in model.parameters())


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn errors of `transformers` about an incomplete folder into one line."""
    try:
        yield
    except EchelonError:
        raise
    except Exception as error:  # transformers raises many types of exception on a damaged file
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{target} cannot be loaded: {reason}; give a complete HF model folder with config.json, *.safetensors and "
            "the tokenizer's files, as written by `echelon export`."
        ) from error
