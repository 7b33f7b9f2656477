"""Opens the model of a run or of an HF folder to evaluate it and sample from it: whole, or a shard on each rank."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from typing_extensions import override

from echelon.ground.errors import ConfigError, EchelonError
from echelon.ground.run_files import is_model_folder, is_run, require_model
from echelon.ground.stored import check_readable, read_json
from echelon.learn.checkpoint.adapted import (
    fetch_base,
    load_run_tokenizer,
    open_checkpoint,
    open_first_weights,
    read_generation_config,
    read_run_recipe,
    run_skeleton,
    with_generation_config,
)
from echelon.learn.checkpoint.export import TRAINING
from echelon.learn.checkpoint.first_weights import Fill
from echelon.learn.checkpoint.folder import checkpoint_of
from echelon.learn.data.loader import BatchPlace, Microbatch
from echelon.learn.data.tokenizer import try_tokenizer
from echelon.learn.distributed.mesh import build_mesh, lone_mesh
from echelon.learn.distributed.runtime import Runtime, join_group
from echelon.learn.engines.module_evaluation import ModuleEvaluation
from echelon.learn.evaluation import ModelPasses
from echelon.learn.model.attention import choose_attention
from echelon.learn.model.build import build_on_meta, drop_quantization, load_config, materialize, model_kind
from echelon.learn.model.copy_checks import check_is_causal
from echelon.learn.model.hub import HubModel, Part, fetch, is_hub_name
from echelon.learn.model.model_folder import open_folder, run_model_dir
from echelon.learn.model.parts import check_has_vocabulary, find_layers, scores_texts
from echelon.learn.model.quantization import QuantizedLinear
from echelon.learn.model.stored_format import StoredFormat, find_settings, find_stored_format
from echelon.learn.model.traits import Traits, find_traits
from echelon.learn.model.weights import PretrainedWeights
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.objective import Objective, build_objective
from echelon.learn.objectives.outputs import ObjectiveModule, OutputsFn
from echelon.learn.parallel.data_parallel import apply_fully_shard
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import check_depth
from echelon.recipe.objective import ObjectiveConfig

Result = TypeVar("Result")

TOKENS_AT_ONCE = {"cuda": 8192, "cpu": 2048}
"""Tokens per forward pass of an evaluation."""

# Only local files are read: no request to the hub, and no code of the folder is run.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def open_model(
    source: Path | str, checkpoint: str | int | None = None, device: torch.device | str | None = None
) -> "OpenedModel":
    """Open a model to evaluate it and to sample from it, without an optimizer. Collective.

    Each rank of the process group, which is joined as by `Learner.build`, holds a shard of it, as with `parallel:
    fsdp`; a process alone holds all of it. Weights keep the dtype in which they are stored: those of a run are fp32.

    Args:
        source: a run folder, an HF model folder or a hub id.
        checkpoint: newest, best or a step of a run; None for the newest.
        device: that of a process alone; None for its GPU if it has one.

    Raises:
        ConfigError, CheckpointError: there is no such model, or a file of it is damaged.
    """
    if is_hub_name(str(source)):
        source = fetch(HubModel(str(source), "source", Part.WEIGHTS))
    path = Path(source)
    require_model(path)
    fetch_base(path)
    ranks = join_group()
    if device is not None and ranks.world_size == 1:
        ranks = one_process(device)
    return OpenedModel(path, None if checkpoint is None else str(checkpoint), ranks)


def one_process(device: torch.device | str | None = None, num_bytes: int = 0) -> Runtime:
    """This process alone; without a device on the first GPU if it has this much free memory, else on the CPU."""
    if device is None:
        has_room = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > num_bytes
        device = "cuda" if has_room else "cpu"
    return Runtime(0, 1, 0, 1, torch.device(device), "")


class OpenedModel(ModelPasses):
    """A model in evaluation mode. It has the methods of a `Learner` that do not train."""

    def __init__(self, source: Path, checkpoint: str | None, ranks: Runtime, may_score: bool = True) -> None:
        """Load a model whose hub files are downloaded. Collective over `ranks`, each of which gets a shard.

        Args:
            source: a run or an HF folder.
            checkpoint: newest, best or a step of a run; None for the newest.
            may_score: whether it may be a model that scores texts; else such a one is refused.

        Raises:
            ConfigError: the path is neither a run nor an HF folder, or the run has no such checkpoint.
        """
        self.source, self.device = source, ranks.device
        self.rank, self.size = ranks.rank, ranks.world_size
        self.tokenizer = load_tokenizer_of(source, checkpoint)
        self.plan = ParallelPlan("fsdp", dp_shard=self.size, reshard_after_forward=True)
        kind = self.device.type
        self.meshes = lone_mesh(kind) if self.size == 1 else build_mesh(self.plan, kind, ranks.is_one_machine)
        self._roots: list[_Root] = []
        self.model = self._load(checkpoint, may_score)
        """The model of `transformers`, or this rank's shard of it."""
        window = _find_window(source, self.model.config)
        size = max(1, TOKENS_AT_ONCE[kind] // window)
        self.plan = replace(self.plan, sequence_len=window, micro_batch_size=size)

    def _load(self, checkpoint: str | None, may_score: bool) -> PreTrainedModel:
        source = self.source
        if not is_model_folder(source):
            _check_head(load_config(str(run_model_dir(source))), source, may_score)
            return self._hold(*open_checkpoint(source, checkpoint, self.device))
        logging.disable_progress_bar()
        with _explained(source):
            check_readable(source)
            check_depth(read_json(source / "config.json"))
            read_generation_config(source)
            config = AutoConfig.from_pretrained(source, **_LOCAL)
            _check_head(config, source, may_score)
            check_is_causal(config)
            if self.size > 1 or _read_format(source) is not None:
                return self._hold(*_open_folder(source, config))
            model, report = model_kind(config).from_pretrained(
                source, config=config, dtype="auto", use_safetensors=True, output_loading_info=True,
                attn_implementation=choose_attention(config, None), **_LOCAL,
            )  # fmt: skip
            if report["missing_keys"]:  # transformers would initialise them randomly
                raise ValueError(f"its files lack the weight {min(report['missing_keys'])}")
        loaded: PreTrainedModel = model.to(self.device).eval()
        return loaded

    def _hold(self, model: PreTrainedModel, fill: Fill) -> PreTrainedModel:
        """Shard a model on meta over the ranks, each decoder layer and the rest, and fill this rank's shard."""
        if self.size > 1:
            for module in model.modules():
                if isinstance(module, QuantizedLinear):
                    module.store_as(torch.float32)
            self._roots.append(_Root(model.requires_grad_(False)))
            apply_fully_shard(self._roots[-1], find_layers(model), self.plan, self.meshes)
        materialize(model, self.device)
        fill(model)
        return model.eval()

    @torch.no_grad()
    def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of work that calls the model any number of times.

        Embedding and head are whole during the work; each layer is gathered as it runs. Collective: every rank calls it
        with the same work, and calls the model equally often.
        """
        for root in reversed(self._roots):
            work = partial(root, work)
        return work()

    @cached_property
    def traits(self) -> Traits:
        """What the model can do with sequences as long as those of its training."""
        return find_traits(self.model, self.plan.sequence_len)

    @cached_property
    def _module(self) -> ObjectiveModule:
        return ObjectiveModule(self.model, traits=self.traits).eval()

    @contextmanager
    @override
    def passes(self, objective: Objective) -> Iterator[ModuleEvaluation]:
        """The reference of an objective that needs one has the initial weights of the run, or no adapter."""
        module = self._module
        needs_reference = objective.needs_reference and module.reference is None
        if needs_reference and not read_run_recipe(self.source).adapter.is_adapter:
            skeleton = run_skeleton(self.source)
            initial = self._hold(copy.deepcopy(skeleton), open_first_weights(skeleton, self.source))
            module.refer_to(ObjectiveModule(initial, traits=self.traits).eval())

        def run(microbatch: Microbatch, compute: OutputsFn) -> Tensor:
            return self.run(lambda: cast(Tensor, module(microbatch, compute)))

        yield ModuleEvaluation(run, objective, decoder=self.model)

    @cached_property
    def trained_for(self) -> ObjectiveConfig:
        """What the model was trained for: as its run says, or for an HF folder by the model's head.

        Raises ConfigError for a folder whose model gives a text several labels at once, or numbers.
        """
        if is_run(self.source):
            return read_run_recipe(self.source).objective
        config = self.model.config
        if not scores_texts(config):
            return ObjectiveConfig()
        labels = tuple(str(config.id2label[number]) for number in sorted(config.id2label))
        if len(labels) == 1:
            return ObjectiveConfig(name="reward")
        if config.problem_type not in (None, "single_label_classification"):
            raise ConfigError(
                f"{self.source} has problem_type={config.problem_type} in config.json; only models that give a text "
                "one of their labels, or one score, can be evaluated."
            )
        return ObjectiveConfig(name="classification", labels=labels)

    @cached_property
    @override
    def objective(self) -> Objective:
        # What a model says of text can be told without its teacher.
        return CausalLM() if self.trained_for.teacher is not None else build_objective(self.trained_for)

    @cached_property
    @override
    def stops(self) -> list[int]:
        """Those of generation_config.json, else the tokenizer's. Raises ConfigError."""
        model, generation = self.model, self.model.generation_config
        ends = generation.eos_token_id if generation is not None else None
        if ends is None:
            return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = ends if isinstance(ends, list) else [ends]
        size = model.config.get_text_config(decoder=True).vocab_size
        if not all(type(token) is int and 0 <= token < size for token in ids):
            path = Path(model.config.name_or_path) / "generation_config.json"
            raise ConfigError(
                f"{path}: eos_token_id={str(ends)[:100]} must be one id of the model's vocabulary (0 to {size - 1}), "
                "or a list of them; correct it, or remove the file."
            )
        return ids

    @property
    @override
    def place(self) -> BatchPlace:
        return BatchPlace(self.plan.micro_batch_size, self.rank, self.size)


class _Root(nn.Module):
    """The outermost module that `fully_shard` hooks: work on the model runs inside its forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, work: Callable[[], Any]) -> Any:
        """Run the work."""
        return work()


def _check_head(config: PretrainedConfig, source: Path, may_score: bool) -> None:
    if not may_score:
        fix = (
            "evaluate it with echelon eval MODEL --data FILE, load it with AutoModelForSequenceClassification of "
            "transformers to get scores, or use a language model"
        )
        check_has_vocabulary(config, str(source), fix)


def _open_folder(source: Path, config: PretrainedConfig) -> tuple[PreTrainedModel, Fill]:
    """Return the model of an HF folder on meta, and what fills a shard of it.

    In the dtypes that `from_pretrained` chooses with dtype="auto".
    """
    if find_settings(read_json(source / "config.json"))[1] is not None and _read_format(source) is None:
        raise ConfigError(
            f"{source} has quantized weights in a format that echelon does not read and cannot shard; use --nproc 1."
        )
    drop_quantization(config)
    dtype = config.dtype or open_folder(source).find_dtype()
    skeleton = with_generation_config(build_on_meta(config, dtype=dtype), source)
    in_fp32 = skeleton._get_dtype_plan(dtype)
    for name, parameter in skeleton.named_parameters():
        if not in_fp32.keys().isdisjoint(name.split(".")):
            parameter.data = parameter.data.float()
    return copy.deepcopy(skeleton), PretrainedWeights(skeleton, source).fill


def _find_window(source: Path, config: PretrainedConfig) -> int:
    """Return the tokens per sequence: as in training, if the run or exported folder records it."""
    if not is_model_folder(source):
        return read_run_recipe(source).data.sequence_len
    try:
        length = read_json(source / TRAINING)["sequence_len"]
    except (OSError, ValueError, KeyError, TypeError):
        length = None  # another tool wrote this folder
    if isinstance(length, int) and length > 0:
        return length
    return min(1024, getattr(config, "max_position_embeddings", 1024))


def _read_format(target: Path) -> StoredFormat | None:
    """Return the format of quantized weights that echelon reads; transformers may load those of other formats."""
    try:
        return find_stored_format(str(target), read_json(target / "config.json"))
    except ConfigError:
        return None


def load_tokenizer_of(target: Path, checkpoint: str | None = None) -> PreTrainedTokenizerBase:
    """Load only the tokenizer, which is fast. Raises ConfigError like `OpenedModel`."""
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


def count_bytes(target: Path) -> int:
    """Return the bytes of a target's weights in memory, without loading them. Raises the errors of `OpenedModel`."""
    if is_model_folder(target):
        stored = _read_format(target)
        if stored is not None:
            model = build_on_meta(load_config(str(target)), dtype=getattr(torch, stored.dtype))
            return sum(parameter.nbytes for parameter in model.parameters())
        return sum(path.stat().st_size for path in target.glob("*.safetensors"))
    load_tokenizer_of(target)
    model, _ = open_checkpoint(target, None, torch.device("meta"))
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
