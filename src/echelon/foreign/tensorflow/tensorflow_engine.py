"""The Engine of TensorFlow. torch remains what holds the job together: its process group, data and checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from echelon.foreign.tensorflow.backbones import find_arguments
from echelon.foreign.tensorflow.decoder import Decoder
from echelon.foreign.tensorflow.library import Library, import_tensorflow
from echelon.foreign.tensorflow.passes import Array, Passes
from echelon.foreign.tensorflow.placement import build_placement, start_cluster
from echelon.foreign.tensorflow.served_steps import ServedModel, ServedSteps
from echelon.foreign.tensorflow.steps import GRADIENTS, WEIGHTS, CopiedSteps, Steps
from echelon.foreign.tensorflow.update import MOMENTS, AdamW, Member
from echelon.ground.errors import ConfigError
from echelon.learn.checkpoint.adapter_folder import AdapterContent
from echelon.learn.checkpoint.first_weights import open_weights
from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.engines.engine import Engine, EngineSpec, Evaluation, Finding, Rehearsal
from echelon.learn.model.build import build_on_meta, materialize
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective
from echelon.learn.objectives.outputs import OutputsFn
from echelon.learn.optimizer import Served
from echelon.learn.optimizer.groups import find_members
from echelon.learn.parallel.step import StepSums
from echelon.learn.sync.synchronizer import Fill
from echelon.recipe import Recipe
from echelon.recipe.tensorflow_config import TensorflowConfig

_EPSILON = 1e-6  # as in clip_gradients

Started = TypeVar("Started")


class TensorflowEngine(Engine):
    """A backbone of keras-hub under a distribution strategy."""

    loss_scale: Tensor | None = None
    served: Served | None = None

    def __init__(self, steps: Steps, lines: Sequence[str]) -> None:
        """`lines`: the result of `describe`."""
        self.steps = steps
        """What computes the steps, on this rank or directed by it."""
        self._lines = lines
        self._num_updates = 0

    @override
    def describe(self, has_documents: bool) -> Sequence[str]:
        return self._lines

    @override
    def rehearse(self, microbatch: Microbatch, num_microbatches: int, objective: Objective) -> Rehearsal:
        """It also traces the functions of a step. Memory is not measured.

        Raises ConfigError for sequences whose documents must not attend to each other.
        """
        if microbatch.documents is not None:
            raise ConfigError(
                "engine=tensorflow: the backbones of keras-hub cannot keep the documents of a sequence apart, and this "
                "data has several in one; set data.packing=false for instructions, or data.document_mask=false, or use "
                "engine=native."
            )
        masked = replace(microbatch, labels=torch.full_like(microbatch.labels, IGNORE))
        self.steps.accumulate([masked], 1.0)
        self.steps.norm()
        self.steps.clear()
        return Rehearsal()

    @override
    def forward_backward(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> StepSums:
        """Raises ConfigError for another objective than the cross-entropy of tokens."""
        _refuse_other_losses(objective)
        return StepSums(torch.tensor(self.steps.accumulate(microbatches, float(num_targets))).double())

    @override
    def clip(self, max_norm: float | None) -> Tensor:
        norm = self.steps.norm()
        if max_norm is not None and norm + _EPSILON > max_norm:
            self.steps.scale(max_norm / (norm + _EPSILON))
        return torch.tensor(norm)

    @override
    def step(self, learning_rate: float, commit: Tensor) -> None:
        if bool(commit):
            self._num_updates += 1
            self.steps.update(learning_rate, self._num_updates)
        self.steps.clear()

    @override
    def regroup(self, meshes: Meshes) -> None:
        """Nothing to do: a quorum with this engine is refused."""

    @override
    def discard(self) -> None:
        self.steps.clear()

    @override
    def find_nonfinite(
        self, step: int, microbatch: Microbatch, num_targets: Tensor, objective: Objective
    ) -> Finding | None:
        return self.steps.passes().find_nonfinite(microbatch.input_ids, microbatch.labels)

    @contextmanager
    @override
    def evaluation(self, objective: Objective) -> Iterator["TensorflowEvaluation"]:
        _refuse_other_losses(objective)
        yield TensorflowEvaluation(self.steps.passes())

    @override
    def describe_end(self) -> Sequence[str]:
        return ()

    @override
    def describe_adapter(self) -> AdapterContent:
        """There is none: adapters are refused."""
        raise AssertionError("engine=tensorflow trains all weights")

    @override
    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights: see Replica."""
        return _as_torch(self.steps.read(WEIGHTS))

    @override
    def gradients(self) -> dict[str, Tensor]:
        """Return copies of the gradients: see Replica."""
        return _as_torch(self.steps.read(GRADIENTS))

    @override
    def state_dict(self) -> dict[str, Tensor]:
        """The names and shapes are those of the native engine with AdamW."""
        weights = self.weights()
        state = {f"model.{name}": weight for name, weight in weights.items()}
        state |= {f"optimizer.{name}.step": torch.tensor(float(self._num_updates)) for name in weights}
        for key in MOMENTS:
            state |= {f"optimizer.{name}.{key}": value for name, value in _as_torch(self.steps.read(key)).items()}
        return state

    @override
    def load(self, fill: Fill) -> None:
        """Raises ConfigError for weights that were updated a different number of times, which no run of echelon has."""
        state = self.state_dict()
        fill(state)
        names = [key.removeprefix("model.") for key in state if key.startswith("model.")]
        counts = {int(state[f"optimizer.{name}.step"]) for name in names}
        if len(counts) > 1:
            raise ConfigError(
                f"engine=tensorflow: the checkpoint has weights with {sorted(counts)} updates, and this engine counts "
                "them together; use engine=native."
            )
        [self._num_updates] = counts
        self.steps.write(WEIGHTS, {name: state[f"model.{name}"].numpy() for name in names})
        for key in MOMENTS:
            self.steps.write(key, {name: state[f"optimizer.{name}.{key}"].numpy() for name in names})


class TensorflowEvaluation(Evaluation):
    """Every process computes with its own copy."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    @override
    def sums(self, microbatch: Microbatch) -> Tensor:
        return torch.tensor([self._passes.loss_sum(microbatch.input_ids, microbatch.labels)])

    @override
    def run(self, microbatch: Microbatch, compute: OutputsFn) -> Tensor:
        """Raises ConfigError: TensorFlow's passes end in a loss of their own."""
        raise ConfigError("engine=tensorflow runs no function in PyTorch on its model; use engine=native.")

    @override
    def log_probabilities(self, microbatch: Microbatch, temperature: float = 1.0) -> Tensor:
        if temperature != 1.0:
            raise ConfigError("engine=tensorflow has log-probabilities at temperature 1 alone; use engine=native.")
        return self._passes.log_probabilities(microbatch.input_ids, microbatch.labels)

    @override
    def logits(self, input_ids: Tensor) -> Tensor:
        """Raises ConfigError: TensorFlow's passes return the logits of one position."""
        raise ConfigError("engine=tensorflow computes the logits of one position of a text alone; use engine=native.")

    @override
    def next_token_logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        return self._passes.logits_at(input_ids, places)

    @override
    def start_cached(self) -> None:
        pass


def _refuse_other_losses(objective: Objective) -> None:
    if type(objective) is not CausalLM:  # a subclass may have another loss
        raise ConfigError(
            f"engine=tensorflow computes the cross-entropy of tokens itself and cannot run a loss in PyTorch, and the "
            f"loss is {objective}; use engine=native."
        )


def _as_torch(values: dict[str, Array]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def build_tensorflow_engine(spec: EngineSpec) -> TensorflowEngine:
    """Start TensorFlow's strategy, and build the model in its scope with the initial weights of native. Collective.

    Raises ConfigError for a model that no backbone of keras-hub can be, and on a GPU.
    """
    recipe, config = spec.recipe, spec.config
    if spec.device.type != "cpu":
        raise ConfigError(
            "engine=tensorflow trains on CPUs only, and this process has a GPU; use engine=native, or hide the GPUs "
            "with CUDA_VISIBLE_DEVICES=''."
        )
    find_arguments(config)  # refuses a config before TensorFlow starts, which takes long
    library = import_tensorflow()
    skeleton = build_on_meta(config, recipe.model.attn_implementation, recipe.model.trust_remote_code)
    members = {
        member.name: Member(member.weight_decay, member.rate_factor) for member in find_members(skeleton, recipe.optim)
    }
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    make_decoder = partial(Decoder, library, config, shapes)

    def make_optimizer(decoder: Decoder) -> AdamW:
        return AdamW(library, decoder.variables, members, recipe.optim.betas, recipe.optim.eps)

    builder = _Builder(library, recipe.tensorflow, spec.meshes.everyone, make_decoder, make_optimizer)
    steps, line = builder.served() if recipe.tensorflow.strategy == "parameter_server" else builder.copied()
    steps.write(WEIGHTS, _first_weights(skeleton, recipe))
    return TensorflowEngine(steps, [f"tensorflow {library.tf.__version__}: {line}"])


_started: dict[str, Any] = {}


@dataclass(frozen=True)
class _Builder:
    """Builds the steps of a strategy, and a description of it. Both methods are collective over `everyone`."""

    library: Library
    config: TensorflowConfig
    everyone: dist.ProcessGroup
    make_decoder: Callable[[], Decoder]
    make_optimizer: Callable[[Decoder], AdamW]

    def copied(self) -> tuple[Steps, str]:
        """For a strategy that copies the model."""
        placement = self._start_once(build_placement)
        with placement.strategy.scope():
            decoder = self.make_decoder()
            steps = CopiedSteps(self.library, placement, decoder, self.make_optimizer(decoder))
        name = type(placement.strategy).__name__.removesuffix("V1").removesuffix("V2")
        copies = placement.strategy.num_replicas_in_sync
        return steps, f"{name}, {copies} cop{'y' if copies == 1 else 'ies'} of the model"

    def served(self) -> tuple[Steps, str]:
        """For ParameterServerStrategy."""
        coordinator = self._start_once(start_cluster).coordinator
        workers, servers = dist.get_world_size(self.everyone), self.config.servers
        model = None
        if coordinator is not None:
            with coordinator.strategy.scope():
                decoder = self.make_decoder()
                model = ServedModel(self.library, coordinator, decoder, self.make_optimizer(decoder), workers)
        steps = ServedSteps(self.library, model, self.make_decoder, self.everyone)
        counts = f"{servers} server{'s' * (servers > 1)}, {workers} worker{'s' * (workers > 1)}"
        return steps, f"ParameterServerStrategy, {counts}, synchronous steps"

    def _start_once(self, start: Callable[[Library, TensorflowConfig, dist.ProcessGroup], Started]) -> Started:
        """What the strategy has in this process: TensorFlow starts its servers and devices once."""
        strategy = self.config.strategy
        started: Started = _started.get(strategy) or start(self.library, self.config, self.everyone)
        _started[strategy] = started
        return started


def _first_weights(skeleton: PreTrainedModel, recipe: Recipe) -> dict[str, Array]:
    """The initial weights of the run, by name."""
    model = build_on_meta(skeleton.config, recipe.model.attn_implementation, recipe.model.trust_remote_code)
    materialize(model, "cpu")
    open_weights(skeleton, recipe)(model)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
