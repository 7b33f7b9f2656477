"""How the weight, the moments and the gradient of one parameter are stored: in fp32, rounded to bf16, packed in 8 bits.

Random bits of stochastic rounding are a function of (seed, step, parameter, place in the whole tensor): the same on
every rank that holds a number, under every plan, and after a resume.

Moments in 8 bits have a code for each number, and a scale for each block of a row: the dynamic tree code of Dettmers et
al. 2022 ("8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861). Blocks lie within rows, and rows are never
cut by sharding, so codes and scales are the same under every plan, and a checkpoint of them goes on under another bit
for bit.
"""

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.ground.errors import ConfigError
from echelon.learn.model.seeds import derive_seed, mix_bits
from echelon.learn.model.sharding import Places, local_part, local_places
from echelon.learn.optimizer.rules import Gradient, Item, Rule, assign
from echelon.learn.optimizer.sharded_parameter import ParameterPlacement

# The moments that `adamw_8bit` packs, and whether they have a sign. Vectors are small, and stay as they are.
PACKED_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}

Lines = tuple[Tensor, Tensor]
"""Random numbers, int32, of the leading places of a tensor, [..., 1], and of those along its last dim, [..., width]."""

BLOCK = 256
SMALLEST = 1e-12
_NUM_EXPONENTS = 7
_LOW_BITS = 0xFFFF
_ALL_BITS = -1


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


@functools.cache
def code_values(signed: bool) -> tuple[float, ...]:
    """The 256 values of a code, ascending: ever finer towards zero, 0 and 1 among them."""
    values: list[float] = [0.0, 1.0]
    for exponent in range(_NUM_EXPONENTS):
        num_fractions = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1.0, num_fractions + 1)
        fractions = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - _NUM_EXPONENTS + 1)).tolist()
        values += fractions
        if signed:
            values += [-value for value in fractions]
    return tuple(sorted(values))


@functools.cache
def code_table(signed: bool, device: torch.device) -> Tensor:
    """The values on a device, sent there once."""
    return torch.tensor(code_values(signed), device=device)


def num_blocks(width: int) -> int:
    """Blocks of a row of this width; the last may be short."""
    return -(-width // BLOCK)


def pack(values: Tensor, signed: bool, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes (uint8, the shape of `values` [..., width]) and scales (fp32 [..., blocks]) of a tensor.

    `table`: the result of `code_table`, given by code that is compiled, which cannot look it up.

    An unsigned value above 0 is never rounded to 0. AdamW divides by the root of the second moment: with one rounded to
    0, a weight whose next gradient is 0, such as the embedding of a token that the batch lacks, would move by thousands
    of learning rates. The paper keeps the moments of embeddings in 32 bits for this reason.
    """
    table = code_table(signed, values.device) if table is None else table
    count = num_blocks(values.shape[-1])
    padded = F.pad(values, (0, count * BLOCK - values.shape[-1]))
    blocks = padded.reshape(*values.shape[:-1], count, BLOCK)
    scales = blocks.abs().amax(-1).clamp(min=SMALLEST)
    nearest = _count_below(blocks / scales.unsqueeze(-1), (table[:-1] + table[1:]) / 2)
    if not signed:
        nearest = torch.where(blocks > 0, nearest.clamp(min=1), nearest)
    return nearest.to(torch.uint8).flatten(-2)[..., : values.shape[-1]], scales


def unpack(codes: Tensor, scales: Tensor, signed: bool, table: Tensor | None = None) -> Tensor:
    """The fp32 values that codes and scales stand for. `table`: see `pack`."""
    table = code_table(signed, codes.device) if table is None else table
    spread = scales.unsqueeze(-1).expand(*scales.shape, BLOCK).flatten(-2)[..., : codes.shape[-1]]
    return table[codes.int()] * spread


def _count_below(values: Tensor, borders: Tensor) -> Tensor:
    """How many of 255 ascending borders are at most each value.

    A compiler for CPUs cannot put `bucketize` into one pass with what is around it, but a binary search of 8 look-ups.
    """
    if not torch.compiler.is_compiling():
        return torch.bucketize(values, borders, out_int32=True, right=True)
    count = torch.zeros_like(values, dtype=torch.int64)
    for step in (128, 64, 32, 16, 8, 4, 2, 1):
        count = torch.where(borders[count + (step - 1)] <= values, count + step, count)
    return count


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up or down with chances in proportion to the nearness; `bits`: int32 in [0, 2^16), of that shape.

    A bf16 number is the upper half of an fp32 one, so adding a random lower half and cutting it off rounds away from
    zero exactly as often as the lower half says.
    """
    return ((values.view(torch.int32) + bits) & ~_LOW_BITS).view(torch.float32).bfloat16()


def round_to_nearest(values: Tensor) -> Tensor:
    """fp32 values rounded to bf16 numbers, still fp32.

    A compiler may leave out a cast to bf16 and back, and with it the rounding. So compiled code rounds the words, ties
    to the even one.
    """
    if not torch.compiler.is_compiling():
        return values.bfloat16().float()
    words = values.view(torch.int32)
    return ((words + (_LOW_BITS >> 1) + ((words >> 16) & 1)) & ~_LOW_BITS).view(torch.float32)


def random_bits(part: Places, device: torch.device, name: str, seed: int, step: int) -> Tensor:
    """16 random bits, as int32, for each number of the parameter `name` that lies at the places of `part`."""
    return spread_bits(random_lines(part, device, name, seed, step))


def random_lines(part: Places, device: torch.device, name: str, seed: int, step: int) -> Lines:
    """What `spread_bits` makes the random bits of: far fewer numbers."""
    key = derive_seed(seed, "rounding", step, name)
    words = (key & 0x7FFFFFFF, (key >> 31) & 0x7FFFFFFF)
    bits, line = torch.zeros((), dtype=torch.int32, device=device), torch.zeros((), dtype=torch.int32, device=device)
    for dim, piece in enumerate(part):
        # On the device: a copy from the host would wait for it.
        numbers = torch.arange(piece.start, piece.stop, device=device) if isinstance(piece, slice) else piece
        places = numbers.to(device, torch.int32)
        shape = [-1 if other == dim else 1 for other in range(len(part))]
        bits = spread_bits((bits, line), _ALL_BITS) if dim else bits
        line = (mix_bits(places ^ words[dim % 2]) + dim).view(shape)
    return bits, line


def spread_bits(lines: Lines, mask: int = _LOW_BITS) -> Tensor:
    """The random bits of each number, in the shape that `lines` broadcast to."""
    bits, line = lines
    return mix_bits(bits + line) & mask
