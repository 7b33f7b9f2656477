"""The model of a run that trained an adapter: the frozen weights as they were, the adapter from a checkpoint."""

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
    """A live model with its adapter, whole, in evaluation mode; `principal` is what a PiSSA adapter began with."""

    model: PreTrainedModel
    principal: PrincipalParts
    step: int

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What was trained, by name."""
        return {name: each.detach() for name, each in self.model.named_parameters() if each.requires_grad}

    def describe(self) -> AdapterContent:
        """The adapter as PEFT would write it."""
        return describe_adapter(self.model, self.tensors, self.principal)

    def merged(self, names: list[str]) -> dict[str, Tensor]:
        """Weights of the plain model with the adapter in them, fp32."""
        return {name: merged_weight(self.model, name) for name in names}


def read_run_recipe(run: Path) -> Recipe:
    """The recipe a run was started with. Raises ConfigError for a folder that is none."""
    if not is_run(run) and not is_model_folder(run):
        raise ConfigError(f"{run} is neither a run folder (recipe.yaml) nor an HF model folder (config.json).")
    require_run(run)
    return load_recipe(RunFolder(run).recipe_path)[0]


def run_skeleton(run: Path) -> PreTrainedModel:
    """The plain model of a run, on meta, from the config that its training wrote; it stops where that learned to."""
    folder = run_model_dir(run)
    model = build_on_meta(load_config(str(folder)))
    if (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def fetch_base(run: Path) -> None:
    """Have on this machine what a run took from the hub, where its model needs that beside a checkpoint.

    For a command, before anything else. Raises as `hub.fetch`.
    """
    recipe = read_run_recipe(run) if is_run(run) else None
    if recipe is not None and (recipe.adapter.is_adapter or recipe.objective.name == "dpo"):
        fetch_models(recipe, find_commits(recipe, read_commits(RunFolder(run))))


def fill_first_weights(model: PreTrainedModel, skeleton: PreTrainedModel, run: Path) -> None:
    """Give a materialised model what the run began with. Names of the hub were fetched before, by `fetch_base`."""
    recipe = read_run_recipe(run)
    commits = find_commits(recipe, read_commits(RunFolder(run)))
    fill_weights(model, skeleton, with_copies(recipe, commits))


def load_adapted(run: Path, device: torch.device, which: str | None = None) -> Adapted:
    """The model of a run's checkpoint (see `checkpoint_of`): fp32, or 4 bits where it was trained so.

    Raises:
        ConfigError: there is no such checkpoint, or the frozen weights are no longer where the recipe says.
        CheckpointError: something is damaged.
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
