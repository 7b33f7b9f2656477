"""Loads the model of a run that trained an adapter: its original frozen weights, and the adapter of a checkpoint.

The whole model, to run it, or one module after another, to export it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from echelon.ground.errors import ConfigError, first_line
from echelon.ground.run_files import RunFiles, is_run, require_model
from echelon.ground.stored import read_json
from echelon.learn.checkpoint.adapter_folder import AdapterContent, describe_adapter
from echelon.learn.checkpoint.fill import load_alone
from echelon.learn.checkpoint.first_weights import Fill, load_from_run, open_weights
from echelon.learn.checkpoint.folder import checkpoint_of, require_run
from echelon.learn.checkpoint.given_models import check_base
from echelon.learn.model.adapters import (
    PrincipalParts,
    apply_adapter,
    find_new_tokens,
    initialize_adapter,
    lora_layers,
    merged_weight,
)
from echelon.learn.model.build import build_on_meta, load_config, materialize
from echelon.learn.model.hub import fetch_models, find_commits, read_commits, with_copies
from echelon.learn.model.model_folder import run_model_dir
from echelon.planner.plan import load_plan
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe


def read_run_recipe(run: Path) -> Recipe:
    """Read the recipe of a run. Raises ConfigError if the folder is not a run."""
    require_model(run)
    require_run(run)
    return load_recipe(RunFiles(run).recipe_path)[0]


def run_skeleton(run: Path) -> PreTrainedModel:
    """Build the plain model of a run, on meta, from the run's config and generation config."""
    folder = run_model_dir(run)
    return with_generation_config(build_on_meta(load_config(str(folder))), folder)


def load_run_tokenizer(run: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run. Code that comes with it is not run. Raises ConfigError, CheckpointError."""
    folder = run_model_dir(run)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types of exception on a damaged file
        raise ConfigError(
            f"{folder}: the tokenizer of the run cannot be loaded ({first_line(error)}); code in a run folder is never "
            "run. Restore the folder from a copy of the run."
        ) from error
    return tokenizer


def with_generation_config(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Set a model's generation config to that of a folder, if it has one. Raises ConfigError."""
    if (config := read_generation_config(folder)) is not None:
        model.generation_config = config
    return model


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Read generation_config.json of a folder, if it has one. Raises ConfigError, naming the key, for a wrong value."""
    path = folder / GENERATION_CONFIG_NAME
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers compares values of any type
        where = _find_wrong_key(path)
        raise ConfigError(
            f"{path}: {where}transformers cannot use it: {first_line(error)}; correct it, or remove the file."
        ) from error


def _find_wrong_key(path: Path) -> str:
    """The first key that transformers refuses alone, with its value, as the start of a message; else nothing."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return ""
    for key, value in content.items() if isinstance(content, dict) else ():
        try:
            GenerationConfig(**{key: value})
        except Exception:
            return f"{key}={str(value)[:100]}: "
    return ""


def fetch_base(run: Path) -> None:
    """Download what a run uses from the hub, if its model needs that in addition to a checkpoint.

    A command calls this first. Raises the errors of `hub.fetch`.
    """
    recipe = read_run_recipe(run) if is_run(run) else None
    if recipe is not None and (recipe.adapter.is_adapter or recipe.objective.needs_reference):
        fetch_models(recipe, find_commits(recipe, read_commits(RunFiles(run).hub_path)))


def open_first_weights(skeleton: PreTrainedModel, run: Path) -> Fill:
    """Return the function that fills a model with a run's initial weights. Hub models must be downloaded.

    Raises ConfigError if they were replaced since the run began.
    """
    recipe = read_run_recipe(run)
    commits = find_commits(recipe, read_commits(RunFiles(run).hub_path))
    local = with_copies(recipe, commits)
    check_base(run, local)
    return open_weights(skeleton, local)


def open_checkpoint(run: Path, which: str | None, device: torch.device) -> tuple[PreTrainedModel, Fill]:
    """Return the model of a run's checkpoint (see `checkpoint_of`) on meta, where it may be sharded, and what fills it.

    Raises ConfigError, CheckpointError.
    """
    if read_run_recipe(run).adapter.is_adapter:
        adapted = AdaptedRun(run, which, device)
        return adapted.model, adapted.fill
    checkpoint, skeleton = checkpoint_of(run, which), run_skeleton(run)
    return copy.deepcopy(skeleton), partial(load_from_run, skeleton=skeleton, checkpoint=checkpoint.path)


class AdaptedRun:
    """A run's checkpoint (see `checkpoint_of`) of an adapter, and the frozen weights that it was trained with.

    Frozen weights are in fp32, or in 4 bits if the adapter was trained on 4 bits.
    """

    def __init__(self, run: Path, which: str | None, device: torch.device) -> None:
        """Read no weight yet.

        Raises:
            ConfigError: there is no such checkpoint, or the frozen weights are not where the recipe says.
            CheckpointError: a file is damaged.
        """
        self._recipe, self._checkpoint = read_run_recipe(run), checkpoint_of(run, which)
        self._device = device
        self.skeleton = run_skeleton(run)
        self.model = copy.deepcopy(self.skeleton)
        """The model with its adapter, on meta."""
        apply_adapter(self.model, self._recipe.adapter, find_new_tokens(self._recipe, load_run_tokenizer(run)))
        self._fill = open_first_weights(self.skeleton, run)
        self._trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        # The dtype from which the training computed the initial values of a PiSSA adapter.
        self._frozen_dtype = getattr(torch, load_plan(RunFiles(run).plan_path).precision.compute)

    def fill(self, model: PreTrainedModel) -> None:
        """Fill `self.model`, materialised, whole or sharded. Raises CheckpointError, as do the other methods."""
        self._fill(model)
        self._load_adapter("", model)

    def merged(self, names: list[str]) -> dict[str, Tensor]:
        """Return weights of the plain model with the adapter merged: fp32, on the CPU.

        Needs memory for them and for one module.
        """
        by_module: dict[str, list[str]] = {}
        for name in names:
            by_module.setdefault(name.rpartition(".")[0], []).append(name)
        weights: dict[str, Tensor] = {}
        for path, some in by_module.items():
            with self._held(path):
                weights |= {name: merged_weight(self.model, name).cpu() for name in some}
        return weights

    def describe(self) -> AdapterContent:
        """Return the adapter in PEFT's format. Needs memory for the adapter, and for one module with PiSSA."""
        tensors = {
            name: torch.empty_like(parameter, device="cpu")
            for name, parameter in self.model.named_parameters()
            if name in self._trained
        }
        load_alone(self._checkpoint.path, {f"model.{name}": tensor for name, tensor in tensors.items()})
        principal: PrincipalParts = {}
        if self._recipe.adapter.init == "pissa":
            for path, _ in lora_layers(self.model):
                with self._held(path) as initial:
                    principal[path] = initial[""]
        return describe_adapter(self.model, tensors, principal)

    @contextmanager
    def _held(self, path: str) -> Iterator[PrincipalParts]:
        """Load one module of the model in this scope; yields its initial values if it has a PiSSA adapter."""
        module = self.model.get_submodule(path)
        materialize(module, self._device)
        try:
            self._fill(self.model)
            yield self._load_adapter(path, module)
        finally:
            module.to_empty(device="meta")

    def _load_adapter(self, path: str, module: nn.Module) -> PrincipalParts:
        """Load the trained tensors of a module; returns the initial values of its PiSSA adapters."""
        principal = initialize_adapter(module, self._recipe.adapter, self._recipe.run.seed, self._frozen_dtype)
        named = {f"{path}.{name}" if path else name: parameter for name, parameter in module.named_parameters()}
        trained = {f"model.{name}": named[name].detach() for name in named.keys() & self._trained}
        load_alone(self._checkpoint.path, trained)
        return principal
