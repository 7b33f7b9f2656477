"""Loads the model of a run that trained an adapter: its original frozen weights, and the adapter of a checkpoint."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from echelon.checkpoint.adapter_folder import AdapterContent, describe_adapter
from echelon.checkpoint.filling import load_alone
from echelon.checkpoint.first_weights import fill_weights
from echelon.checkpoint.folder import checkpoint_of, require_run
from echelon.errors import ConfigError
from echelon.model.adapters import apply_adapter, find_new_tokens, initialize_adapter, merged_weight
from echelon.model.build import build_on_meta, is_model_folder, load_config, materialize
from echelon.model.hub import fetch_models, find_commits, read_commits, with_copies
from echelon.model.model_folder import run_model_dir
from echelon.model.pissa import PrincipalParts
from echelon.planner.plan import load_plan
from echelon.recipe import Recipe, load_recipe
from echelon.runs.run_folder import RunFolder, is_run


@dataclass(frozen=True)
class Adapted:
    """A loaded model with its adapter, unsharded, in evaluation mode; `principal`: a PiSSA adapter's initial values."""

    model: PreTrainedModel
    principal: PrincipalParts
    step: int

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The trained tensors, by name."""
        return {name: each.detach() for name, each in self.model.named_parameters() if each.requires_grad}

    def describe(self) -> AdapterContent:
        """Return the adapter in PEFT's format."""
        return describe_adapter(self.model, self.tensors, self.principal)

    def merged(self, names: list[str]) -> dict[str, Tensor]:
        """Return weights of the plain model with the adapter merged, fp32."""
        return {name: merged_weight(self.model, name) for name in names}


def read_run_recipe(run: Path) -> Recipe:
    """Read the recipe of a run. Raises ConfigError if the folder is not a run."""
    if not is_run(run) and not is_model_folder(run):
        raise ConfigError(f"{run} is neither a run folder (recipe.yaml) nor an HF model folder (config.json).")
    require_run(run)
    return load_recipe(RunFolder(run).recipe_path)[0]


def run_skeleton(run: Path) -> PreTrainedModel:
    """Build the plain model of a run, on meta, from the run's config and generation config."""
    folder = run_model_dir(run)
    model = build_on_meta(load_config(str(folder)))
    if (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def fetch_base(run: Path) -> None:
    """Download what a run uses from the hub, if its model needs that in addition to a checkpoint.

    A command calls this first. Raises the errors of `hub.fetch`.
    """
    recipe = read_run_recipe(run) if is_run(run) else None
    if recipe is not None and (recipe.adapter.is_adapter or recipe.objective.name == "dpo"):
        fetch_models(recipe, find_commits(recipe, read_commits(RunFolder(run))))


def fill_first_weights(model: PreTrainedModel, skeleton: PreTrainedModel, run: Path) -> None:
    """Fill a materialised model with the run's initial weights. Hub models must be downloaded (`fetch_base`)."""
    recipe = read_run_recipe(run)
    commits = find_commits(recipe, read_commits(RunFolder(run)))
    fill_weights(model, skeleton, with_copies(recipe, commits))


def load_adapted(run: Path, device: torch.device, which: str | None = None) -> Adapted:
    """Load the model of a run's checkpoint (see `checkpoint_of`): fp32, or 4 bits if it was trained in 4 bits.

    Raises:
        ConfigError: there is no such checkpoint, or the frozen weights are not where the recipe says.
        CheckpointError: a file is damaged.
    """
    recipe, checkpoint = read_run_recipe(run), checkpoint_of(run, which)
    skeleton = run_skeleton(run)
    tokenizer = AutoTokenizer.from_pretrained(run_model_dir(run), local_files_only=True, trust_remote_code=False)
    model = copy.deepcopy(skeleton)
    apply_adapter(model, recipe.adapter, find_new_tokens(recipe, tokenizer))
    materialize(model, device)
    fill_first_weights(model, skeleton, run)
    frozen_dtype = getattr(torch, load_plan(RunFolder(run).plan_path).precision.compute)
    principal = initialize_adapter(model, recipe.adapter, recipe.run.seed, frozen_dtype)
    adapted = Adapted(model.eval(), principal, checkpoint.step)
    load_alone(checkpoint.path, {f"model.{name}": tensor for name, tensor in adapted.tensors.items()})
    return adapted
