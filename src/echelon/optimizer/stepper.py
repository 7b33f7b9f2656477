"""The optimizer: rules over groups of parameters, and how weights and moments are stored between steps."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.errors import ConfigError
from echelon.extensions import build_named
from echelon.model.sharding import local_part, local_places
from echelon.optimizer.eight_bit import num_blocks, pack, unpack
from echelon.optimizer.groups import find_members
from echelon.optimizer.rounding import random_bits, round_stochastically
from echelon.optimizer.rules import Gradient, Item, PreconditioningRule, Rule, assign
from echelon.optimizer.sharded_parameter import Layout
from echelon.recipe import OptimConfig
from echelon.recipe.names import OPTIMIZER_FROM_OUTSIDE, OPTIMIZERS

# The moments that `adamw_8bit` packs, and whether they have a sign. Vectors are small, and stay as they are.
PACKED_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}


class Slot:
    """One parameter and its state as they are stored: moments in fp32 or packed, the weight in fp32 or in bf16.

    A bf16 weight is rounded stochastically, or has what rounding left over beside it in `remainder` (Kahan summation:
    Zamirai et al. 2021, "Revisiting BFloat16 Training", section 4).
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        rule: Rule,
        packs: bool,
        keeps_remainder: bool,
        copies: dist.ProcessGroup | None = None,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.layout = Layout(parameter, copies)
        self._places = local_places(parameter)
        self.state = rule.build_state(parameter, self.layout)
        self._packed = PACKED_MOMENTS if packs and parameter.ndim >= 2 else {}
        for key in self._packed:
            del self.state[key]
            self.state[f"{key}.codes"] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
            self.state[f"{key}.scales"] = self._build_scales()
        if keeps_remainder:
            self.state["remainder"] = torch.zeros_like(parameter, requires_grad=False)

    @property
    def is_direct(self) -> bool:
        """Whether a rule works on what is stored; else on fp32 copies, which are stored again afterwards."""
        return self.parameter.dtype == torch.float32 and not self._packed

    def gradient(self) -> Gradient:
        """What a rule may replace before the update."""
        assert self.parameter.grad is not None
        state = {key: local_part(value) for key, value in self.state.items()}
        return Gradient(local_part(self.parameter.grad), state, self.layout)

    def open(self) -> Item:
        """What a rule works on."""
        assert self.parameter.grad is not None
        state = {key: local_part(value) for key, value in self.state.items()}
        weight = local_part(self.parameter.detach()).float()
        if "remainder" in state:
            weight = weight + state.pop("remainder").float()
        for key, signed in self._packed.items():
            state[key] = unpack(state.pop(f"{key}.codes"), state.pop(f"{key}.scales"), signed)
        return Item(weight, local_part(self.parameter.grad).float(), state, self.layout)

    def store(self, item: Item, commit: Tensor, seed: int, step: int) -> None:
        """Put back what was copied, where the step commits."""
        for key, signed in self._packed.items():
            codes, scales = pack(item.state[key], signed)
            assign(local_part(self.state[f"{key}.codes"]), codes, commit)
            assign(local_part(self.state[f"{key}.scales"]), scales, commit)
        weight = local_part(self.parameter.detach())
        if weight.dtype == torch.float32:
            return
        if "remainder" in self.state:
            rounded = item.weight.to(weight.dtype)
            assign(local_part(self.state["remainder"]), (item.weight - rounded.float()).to(weight.dtype), commit)
        else:
            rounded = round_stochastically(item.weight, random_bits(self._places, weight.device, self.name, seed, step))
        assign(weight, rounded, commit)

    def _build_scales(self) -> Tensor:
        if self.layout.splits(-1):
            raise ConfigError(
                f"optim.name=adamw_8bit packs blocks of rows, and this plan cuts the rows of {self.name}; use "
                "optim.name=adamw."
            )
        return self.layout.zeros(-1, num_blocks(self.parameter.shape[-1]))


@dataclass(frozen=True)
class Group:
    """Parameters with one rule, one weight decay and one factor on the learning rate."""

    rule: Rule
    weight_decay: float
    rate_factor: float
    slots: list[Slot]


class Optimizer:
    """Steps every parameter that has a gradient. Its state is there from the start, under names no plan changes."""

    def __init__(self, groups: list[Group], seed: int) -> None:
        self.groups = groups
        self._seed = seed

    @torch.no_grad()
    def step(self, step: int, learning_rate: float, commit: Tensor) -> None:
        """Apply the gradients where `commit` (a boolean scalar) is true. The host waits for nothing.

        Gradients may hold something else afterwards.

        Args:
            step: counted from 0; random rounding depends on it.
        """
        for group in self.groups:
            rate = learning_rate * group.rate_factor
            slots = [slot for slot in group.slots if slot.parameter.grad is not None]
            if isinstance(group.rule, PreconditioningRule):
                group.rule.precondition([slot.gradient() for slot in slots], commit)
            direct = [slot.open() for slot in slots if slot.is_direct]
            group.rule.update(direct, rate, group.weight_decay, commit)
            for slot in slots:  # one at a time, so that the copies of one parameter are there at once
                if not slot.is_direct:
                    item = slot.open()
                    group.rule.update([item], rate, group.weight_decay, commit)
                    slot.store(item, commit, self._seed, step)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """`NAME.KEY` and the live tensor, for everything kept for a parameter."""
        for group in self.groups:
            for slot in group.slots:
                for key, tensor in slot.state.items():
                    yield f"{slot.name}.{key}", tensor


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    master_weights: str,
    seed: int,
    copies: dist.ProcessGroup | None = None,
) -> Optimizer:
    """The optimizer of a materialised, sharded model. Collective where it is sharded.

    Args:
        master_weights: `train.master_weights`; the parameters' dtype says whether they are bf16.
        copies: the ranks with a copy of the model, if it is not sharded and they may divide the work of a step.
    """
    groups: dict[tuple[Rule, float, float], list[Slot]] = {}
    packed = OPTIMIZERS.get(config.name, OPTIMIZER_FROM_OUTSIDE).packed
    rules = {is_layer_matrix: choose_rule(config, is_layer_matrix) for is_layer_matrix in (True, False)}
    for member in find_members(model, config):
        rule = rules[member.is_layer_matrix]
        slot = Slot(member.name, member.parameter, rule, packed, master_weights == "bf16_kahan", copies)
        groups.setdefault((rule, member.weight_decay, member.rate_factor), []).append(slot)
    return Optimizer([Group(*key, slots) for key, slots in groups.items()], seed)


def choose_rule(config: OptimConfig, is_layer_matrix: bool) -> Rule:
    """The rule of the recipe for the matrices of the layers, or for the other parameters."""
    places = {name: row.place for name, row in OPTIMIZERS.items()}
    rule: Rule = build_named("optim.name", config.name, places, Rule, config, is_layer_matrix, options=config.options)
    return rule
