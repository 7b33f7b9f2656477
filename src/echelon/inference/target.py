"""What `eval` and `generate` are pointed at: a checkpoint of a run, or an HF folder."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from echelon.checkpoint.adapted import fill_first_weights, run_skeleton
from echelon.checkpoint.export import load_run_model
from echelon.checkpoint.folder import checkpoint_of
from echelon.data.tokenizer import try_tokenizer
from echelon.errors import ConfigError, EchelonError
from echelon.model.attention import choose_attention
from echelon.model.build import is_model_folder, materialize
from echelon.model.causality import check_is_causal
from echelon.model.model_folder import run_model_dir
from echelon.planner.shape import check_depth
from echelon.runs.run_folder import is_run
from echelon.stored import read_json

# A folder is read as it lies: nothing is asked of the hub, no code in it is run.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def find_device(num_bytes: int = 0) -> torch.device:
    """The first GPU, where it has this much memory left, or the CPU."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > num_bytes:
        return torch.device("cuda")
    return torch.device("cpu")


def load_target(
    target: Path, device: torch.device, checkpoint: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode, and its tokenizer.

    Args:
        checkpoint: newest, best or a step of a run; None: the newest.

    Raises:
        ConfigError: the path is neither a run nor an HF folder, or the run has no such checkpoint.
    """
    tokenizer = load_target_tokenizer(target, checkpoint)
    if not is_model_folder(target):
        return load_run_model(target, device, checkpoint), tokenizer
    logging.disable_progress_bar()
    with _explained(target):
        check_depth(read_json(target / "config.json"))
        config = AutoConfig.from_pretrained(target, **_LOCAL)
        check_is_causal(config)
        model, report = AutoModelForCausalLM.from_pretrained(
            target, config=config, dtype="auto", use_safetensors=True, output_loading_info=True,
            attn_implementation=choose_attention(config, None), **_LOCAL,
        )  # fmt: skip
        if report["missing_keys"]:  # transformers would make weights up
            raise ValueError(f"its files lack the weight {min(report['missing_keys'])}")
    return model.to(device).eval(), tokenizer


def load_target_tokenizer(target: Path, checkpoint: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer alone, which is quick to load. Raises ConfigError as `load_target` does."""
    if is_model_folder(target):
        if checkpoint is not None:
            raise ConfigError(
                f"--checkpoint {checkpoint}: {target} is an HF folder and has no checkpoints; leave it out."
            )
        with _explained(target):
            tokenizer = AutoTokenizer.from_pretrained(target, **_LOCAL)
            try_tokenizer(tokenizer)
        return tokenizer
    if not is_run(target) and (target / "adapter_config.json").is_file():
        raise ConfigError(
            f"{target} holds an adapter without the model beside it; give the run that trained it, or the folder that "
            "`echelon export RUN OUT --merge` writes."
        )
    if not is_run(target):
        raise ConfigError(f"{target} is neither a run folder (recipe.yaml) nor an HF model folder (config.json).")
    checkpoint_of(target, checkpoint)
    return AutoTokenizer.from_pretrained(run_model_dir(target), **_LOCAL)


def load_first_weights(run: Path, device: torch.device) -> PreTrainedModel:
    """The model as a run began with it, in evaluation mode: of the seed, or of `model.checkpoint`."""
    skeleton = run_skeleton(run)
    model = copy.deepcopy(skeleton)
    materialize(model, device)
    fill_first_weights(model, skeleton, run)
    return model.eval()


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turns what `transformers` says of an incomplete folder into one line."""
    try:
        yield
    except EchelonError:
        raise
    except Exception as error:  # in a damaged file transformers raises whatever it trips over
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{target} cannot be loaded: {reason}; give a whole HF model folder: config.json, *.safetensors and the "
            "tokenizer's files, as `echelon export` writes it."
        ) from error
