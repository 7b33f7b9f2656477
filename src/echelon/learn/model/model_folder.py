"""The config and tokenizer of a run's model, as files that `transformers` reads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground.checksums import check_files, write_manifest
from echelon.ground.errors import CheckpointError, ConfigError
from echelon.ground.run_files import RunFiles, is_run

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def write_model_folder(
    folder: Path, config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase", stops: Sequence[int]
) -> None:
    """Write config.json and the tokenizer's files into a run's `model/`, with a manifest. Weights are added at export.

    `stops`: the token ids that end a trained response. They go to generation_config.json as `eos_token_id`, so that
    `generate` of transformers stops there.
    """
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else getattr(config, "pad_token_id", None)
    bos, eos = getattr(config, "bos_token_id", None), find_stops(config, stops) or None
    GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad).save_pretrained(folder)
    write_manifest(folder)


def find_stops(config: "PretrainedConfig", learned: Sequence[int]) -> list[int]:
    """Return the ids that stop generation: those that the model was trained to end with, else the config's own."""
    own = getattr(config, "eos_token_id", None)
    return list(learned) or ([] if own is None else own if isinstance(own, list) else [own])


# The classes of transformers that load the weights of a method as plain numbers.
_DEQUANTIZING = {
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
}


def check_unquantized(source: str, fields: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose weights are stored quantized: echelon reads weights in fp32, fp16 and bf16.

    Args:
        source: `model.checkpoint`.
        fields: of its config.json.

    Raises:
        ConfigError: naming the folder, the method and a fix.
    """
    settings = fields.get("quantization_config") or fields.get("compression_config")
    if not settings:
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method is None and any(str(key).startswith("load_in_") for key in settings):
        method = "bitsandbytes"
    fix = "give the folder of the model before quantization"
    if method == "bitsandbytes":
        fix += "; with adapter.method=qlora, echelon itself quantizes it to 4 bits as it loads"
    elif method in _DEQUANTIZING:
        fix += (
            f", or write one: AutoModelForCausalLM.from_pretrained({source!r}, quantization_config="
            f"{_DEQUANTIZING[method]}).save_pretrained(OUT, save_original_format=False)"
        )
    raise ConfigError(
        f"model.checkpoint={source}: its weights are stored quantized (quantization_config of config.json has the "
        f"method {method or 'unknown'}), and echelon reads weights in fp32, fp16 and bf16; {fix}."
    )


def find_model_dir(source: str) -> str:
    """Return the source of config and tokenizer of `model.checkpoint`: a run's `model/`, else the source itself.

    Raises:
        CheckpointError: the files of the run do not match their checksums.
    """
    return str(run_model_dir(Path(source))) if is_run(Path(source)) else source


def run_model_dir(run: Path) -> Path:
    """Return a run's `model/` after verifying its checksums. Raises CheckpointError."""
    folder = RunFiles(run).model_dir
    try:
        check_files(folder, checksums=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"The config or the tokenizer of the run is damaged: {error} Resume the training, which rewrites them, or "
            "restore the folder from a backup."
        ) from error
    return folder
