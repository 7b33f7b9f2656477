"""What `eval` and `generate` are pointed at: a run (its newest checkpoint) or an HF folder."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from echelon.checkpoint.export import load_run_model
from echelon.errors import ConfigError
from echelon.model.attention import choose_attention
from echelon.model.build import is_model_folder
from echelon.run_folder import RunFolder


def find_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_target(target: Path, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode, and its tokenizer.

    Raises:
        ConfigError: the path is neither a run nor an HF folder, or the run has no checkpoint yet.
    """
    if is_model_folder(target):
        attention = choose_attention(AutoConfig.from_pretrained(target), None)
        options = {"dtype": "auto", "use_safetensors": True, "attn_implementation": attention}
        model = AutoModelForCausalLM.from_pretrained(target, **options).to(device)
        return model.eval(), AutoTokenizer.from_pretrained(target)
    folder = RunFolder(target)
    if not folder.recipe_path.is_file():
        raise ConfigError(f"{target} is neither a run folder (recipe.yaml) nor an HF model folder (config.json).")
    return load_run_model(target, device), AutoTokenizer.from_pretrained(folder.model_dir)
