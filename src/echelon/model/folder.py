"""The config and tokenizer of a run's model, as files that `transformers` reads."""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase


def write_model_folder(folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write config.json and the tokenizer's files into a run's `model/`; weights join them at export."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
