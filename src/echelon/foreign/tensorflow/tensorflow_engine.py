"""The Engine of TensorFlow. torch remains what holds the job together: its process group, data and checkpoints."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from echelon.foreign.tensorflow.llama import Array, Decoder, find_arguments
from echelon.foreign.tensorflow.placement import Library, Placement, build_placement, import_tensorflow
from echelon.foreign.tensorflow.steps import GRADIENTS, MOMENTS, WEIGHTS, Steps, TensorflowEvaluation
from echelon.ground.errors import ConfigError
from echelon.learn.checkpoint.adapter_folder import AdapterContent
from echelon.learn.checkpoint.first_weights import open_weights
from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.engines.engine import Engine, EngineSpec, NonFinite, Rehearsal
from echelon.learn.model.build import build_on_meta, materialize
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective, StepSums
from echelon.learn.optimizer import Served
from echelon.learn.optimizer.stepper import find_members
from echelon.learn.sync.synchronizer import StateFill
from echelon.recipe.document import Recipe
from echelon.recipe.operation import TensorflowConfig

_EPSILON = 1e-6  # as in clip_gradients


class TensorflowEngine(Engine):
    """A backbone of keras-hub under a distribution strategy."""

    loss_scale: Tensor | None = None
    served: Served | None = None

    def __init__(self, steps: Steps, evaluation: TensorflowEvaluation, lines: Sequence[str]) -> None:
        """`lines`: the result of `describe`."""
        self.steps = steps
        """What computes the steps."""
        self._evaluation, self._lines = evaluation, lines
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
    ) -> NonFinite | None:
        return self._evaluation.find_nonfinite(microbatch.input_ids, microbatch.labels)

    @contextmanager
    @override
    def evaluation(self, objective: Objective) -> Iterator[TensorflowEvaluation]:
        _refuse_other_losses(objective)
        yield self._evaluation

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
    def load(self, fill: StateFill) -> None:
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

    Raises ConfigError for a model that keras-hub's Llama cannot be, and on a GPU.
    """
    recipe, config = spec.recipe, spec.config
    if spec.device.type != "cpu":
        raise ConfigError(
            "engine=tensorflow trains on CPUs only, and this process has a GPU; use engine=native, or hide the GPUs "
            "with CUDA_VISIBLE_DEVICES=''."
        )
    find_arguments(config)  # refuses a config before TensorFlow starts, which takes long
    library, placement = _start(recipe.tensorflow, spec.meshes.everyone)
    skeleton = build_on_meta(config, recipe.model.attn_implementation, recipe.model.trust_remote_code)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    strategy = placement.strategy
    with strategy.scope():
        decoder = Decoder(library, config, shapes)
        steps = Steps(library, placement, decoder, find_members(skeleton, recipe.optim), recipe.optim)
    steps.write(WEIGHTS, _first_weights(skeleton, recipe))
    name, copies = type(strategy).__name__.removesuffix("V1").removesuffix("V2"), strategy.num_replicas_in_sync
    line = f"tensorflow {library.tf.__version__}: {name}, {copies} cop{'y' if copies == 1 else 'ies'} of the model"
    return TensorflowEngine(steps, TensorflowEvaluation(library, decoder), [line])


_started: dict[str, tuple[Library, Placement]] = {}


def _start(config: TensorflowConfig, everyone: dist.ProcessGroup) -> tuple[Library, Placement]:
    """What a strategy has in this process: TensorFlow starts its servers and devices once. Collective."""
    if config.strategy not in _started:
        library = import_tensorflow()
        _started[config.strategy] = library, build_placement(library, config, everyone)
    return _started[config.strategy]


def _first_weights(skeleton: PreTrainedModel, recipe: Recipe) -> dict[str, Array]:
    """The initial weights of the run, by name."""
    model = build_on_meta(skeleton.config, recipe.model.attn_implementation, recipe.model.trust_remote_code)
    materialize(model, "cpu")
    open_weights(skeleton, recipe)(model)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
