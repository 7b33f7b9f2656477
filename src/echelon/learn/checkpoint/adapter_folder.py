"""Writes an adapter in PEFT's format, adapter_config.json and adapter_model.safetensors, and verifies it."""

import copy
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from echelon.ground.checksums import MANIFEST, list_files
from echelon.learn.model.adapters import ADAPTER, PrincipalParts, plain_name

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterContent:
    """PEFT's config of an adapter, and its tensors on the CPU by their names in PEFT's files."""

    config: Any
    tensors: dict[str, Tensor]


def write_adapter(
    out: Path, content: AdapterContent, base: str | None, sidecars: Path, card: str, replace: bool = True
) -> int:
    """Write an adapter as a folder that PEFT loads, read the weights back and compare them.

    Args:
        out: replaced if it exists; without `replace` refused unless it is empty.
        base: location of the frozen weights, for `base_model_name_or_path`.
        sidecars: a run's model/, for the tokenizer files and generation_config.json.
        card: the text of README.md.

    Returns:
        The size of the weights file in bytes.

    Raises:
        CheckpointError: the adapter cannot be written, or the weights read back differ.
        ConfigError: as `written_folder`.
    """
    from echelon.learn.checkpoint.out_folder import check_weights, writing_explained, written_folder

    config = copy.deepcopy(content.config)
    config.base_model_name_or_path = base
    with written_folder(out, replace) as writing, writing_explained(out):
        save_file(content.tensors, writing / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(writing))
        for path in list_files(sidecars):
            if path.name not in (MANIFEST, "config.json"):
                shutil.copyfile(path, writing / path.name)
        (writing / "README.md").write_text(card)
        (writing / WEIGHTS).chmod(writing.stat().st_mode & 0o666)  # safetensors writes files readable by the owner only
        check_weights(writing / WEIGHTS, content.tensors, "trained")
    return (out / WEIGHTS).stat().st_size


def describe_adapter(model: nn.Module, tensors: Mapping[str, Tensor], principal: PrincipalParts) -> AdapterContent:
    """Return an adapter in PEFT's format.

    Args:
        model: the model with its adapter; only names and settings are used.
        tensors: every trained tensor, unsharded, by its name in the model.
        principal: initial values of a PiSSA adapter, which are subtracted to make the adapter fit the original weights.
    """
    from peft import get_peft_model_state_dict

    tensors = dict(tensors)
    peft_configs: Any = model.peft_config
    config = copy.deepcopy(peft_configs[ADAPTER])
    for layer, (a, b) in principal.items():
        names = [f"{layer}.lora_{side}.{ADAPTER}.weight" for side in "AB"]
        tensors[names[0]] = torch.cat([tensors[names[0]], a.to(tensors[names[0]].dtype)], dim=0)
        tensors[names[1]] = torch.cat([tensors[names[1]], -b.to(tensors[names[1]].dtype)], dim=1)
    if principal:  # double the rank, keep the scale
        config.r, config.lora_alpha = 2 * config.r, config.lora_alpha * (math.sqrt(2) if config.use_rslora else 2)
    config.inference_mode = True
    named = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=ADAPTER, save_embedding_layers=False)
    saved = _find_saved(model, tensors)
    if saved:
        config.modules_to_save = sorted({name.rpartition(".")[0] for name in saved})
        config.ensure_weight_tying = len({id(tensor) for tensor in saved.values()}) < len(saved)
    content = {name: tensor.contiguous().cpu() for name, tensor in named.items()}
    content |= {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in saved.items()}
    return AdapterContent(config, {f"{_PREFIX}{name}": tensor for name, tensor in content.items()})


def join_adapters(parts: Sequence[AdapterContent]) -> AdapterContent:
    """Return the adapter of a model whose pipeline stages have these parts."""
    config = copy.deepcopy(parts[0].config)
    saved = {name for part in parts for name in part.config.modules_to_save or ()}
    config.modules_to_save = sorted(saved) or None
    config.ensure_weight_tying = any(part.config.ensure_weight_tying for part in parts)
    return AdapterContent(config, {name: tensor for part in parts for name, tensor in part.tensors.items()})


def _find_saved(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the plain model that were trained in full; a tied one by each of its names.

    PEFT creates a module for each name, and ties them again (`ensure_weight_tying`).
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {id(parameters[name]): tensor for name, tensor in tensors.items() if plain_name(name) is not None}
    return {name: trained[id(parameter)] for name, parameter in parameters.items() if id(parameter) in trained}
