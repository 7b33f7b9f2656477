"""How the weight, the moments and the gradient of one parameter are stored between steps."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.ground.errors import ConfigError
from echelon.learn.model.sharding import local_part, local_places
from echelon.learn.optimizer.eight_bit import num_blocks, pack, unpack
from echelon.learn.optimizer.rounding import Lines, random_lines, round_stochastically, round_to_nearest, spread_bits
from echelon.learn.optimizer.rules import Gradient, Item, Rule, assign
from echelon.learn.optimizer.sharded_parameter import ParameterPlacement

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
        self.layout = ParameterPlacement(parameter, copies)
        self._places = local_places(parameter)
        self.state = rule.build_state(parameter, self.layout)
        self.packed = PACKED_MOMENTS if packs and parameter.ndim >= 2 else {}
        for key in self.packed:
            del self.state[key]
            self.state[f"{key}.codes"] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
            self.state[f"{key}.scales"] = self._build_scales()
        if keeps_remainder:
            self.state["remainder"] = torch.zeros_like(parameter, requires_grad=False)
        with torch.no_grad():  # the parts themselves, not views of them
            self._local_state = {key: local_part(value) for key, value in self.state.items()}
        self.is_direct = parameter.dtype == torch.float32 and not self.packed
        """Whether a rule works on what is stored; else on fp32 copies, which are stored again afterwards."""

    @property
    def is_contiguous(self) -> bool:
        """Whether all tensors of this rank lie in memory without gaps, in the same order."""
        gradient = self.gradient()
        tensors = (local_part(self.parameter), gradient.values, *gradient.state.values())
        return all(tensor.is_contiguous() for tensor in tensors)

    def gradient(self) -> Gradient:
        """What a rule may replace before the update."""
        assert self.parameter.grad is not None
        return Gradient(local_part(self.parameter.grad), self._local_state, self.layout)

    def open(self) -> Item:
        """What a rule works on."""
        gradient = self.gradient()
        if self.is_direct:
            return Item(local_part(self.parameter.detach()), gradient.values, gradient.state, self.layout)
        weight = read_weight(local_part(self.parameter.detach()), gradient.state)
        return Item(weight, gradient.values.float(), read_moments(gradient.state, self.packed), self.layout)

    def store(self, item: Item, commit: Tensor, seed: int, step: int) -> None:
        """Put back what was copied, where the step commits."""
        state = self._local_state
        store_moments(state, self.packed, item.state, commit)
        weight = local_part(self.parameter.detach())
        if weight.dtype != torch.float32:
            lines = None if "remainder" in state else self.random_lines(weight.device, seed, step)
            store_weight(weight, state, item.weight, commit, lines)

    def random_lines(self, device: torch.device, seed: int, step: int) -> Lines:
        """What the random bits are made of that round the weight in a step."""
        return random_lines(self._places, device, self.name, seed, step)

    def _build_scales(self) -> Tensor:
        if self.layout.splits(-1):
            raise ConfigError(
                f"optim.name=adamw_8bit packs blocks of rows, and this plan cuts the rows of {self.name}; use "
                "optim.name=adamw."
            )
        return self.layout.zeros(-1, num_blocks(self.parameter.shape[-1]))


def read_weight(weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The fp32 value of a weight as it is stored: the tensor itself if that is fp32."""
    return weight.float() + state["remainder"].float() if "remainder" in state else weight.float()


def store_weight(
    weight: Tensor, state: Mapping[str, Tensor], value: Tensor, commit: Tensor, lines: Lines | None
) -> None:
    """Store the fp32 value of a weight where `commit` is true. `lines`: of a weight that is rounded at random."""
    if "remainder" in state:
        rounded = round_to_nearest(value)
        assign(state["remainder"], (value - rounded).to(weight.dtype), commit)
        value = rounded
    elif lines is not None:
        value = round_stochastically(value, spread_bits(lines))
    assign(weight, value.to(weight.dtype), commit)


def read_moments(
    state: Mapping[str, Tensor], packed: Mapping[str, bool], tables: Mapping[bool, Tensor] | None = None
) -> dict[str, Tensor]:
    """A rule's state from what is stored, fp32. `tables`: the codes with a sign and without, as `unpack` takes them."""
    moments = {
        key: value for key, value in state.items() if key != "remainder" and key.rpartition(".")[0] not in packed
    }
    for key, signed in packed.items():
        table = None if tables is None else tables[signed]
        moments[key] = unpack(state[f"{key}.codes"], state[f"{key}.scales"], signed, table)
    return moments


def store_moments(
    state: Mapping[str, Tensor],
    packed: Mapping[str, bool],
    moments: Mapping[str, Tensor],
    commit: Tensor,
    tables: Mapping[bool, Tensor] | None = None,
) -> None:
    """Store the packed ones of a rule's moments where `commit` is true. `tables`: see `read_moments`."""
    for key, signed in packed.items():
        codes, scales = pack(moments[key], signed, None if tables is None else tables[signed])
        assign(state[f"{key}.codes"], codes, commit)
        assign(state[f"{key}.scales"], scales, commit)
