"""Reads weights that a checkpoint stores quantized as plain numbers, a piece of a weight at a time.

In every format a weight is `(code - zero) * scale`, where a block of codes shares a scale and a zero. A layout says how
they lie in tensors.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from echelon.ground.errors import CheckpointError
from echelon.learn.model.safetensors_folder import FLOATING, SafetensorsFolder, StoredWeight
from echelon.learn.model.stored_format import Block, Scheme, StoredFormat

PIECE = 2**20
"""The numbers of a weight that are computed at a time, which bounds the memory beside the result."""

# What layers do to their inputs and outputs: of no use to weights that are plain numbers.
_OF_ACTIVATIONS = re.compile(r"\.((input|output|activation|[qkv])_(global_)?scale|(input|output)_zero_point)$")
Shape = tuple[int, ...]

Read = Callable[..., Tensor]
"""Reads one tensor of a stored weight, by the ending of its name: whole, or the block that slices after it give."""

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
# The values of the codes of E2M1: OCP Microscaling Formats 1.0, table 5.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The place of each of 8 neighbouring columns in a word of AWQ's gemm format.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Packed:
    """A weight that several tensors store.

    Attributes:
        names: of its tensors, by their endings.
        shape: of the weight.
    """

    layout: "StoredLayout"
    names: Mapping[str, str]
    shape: Shape
    scheme: Scheme
    dtype: torch.dtype


class StoredLayout:
    """One way of storing a weight in tensors, whose names start alike.

    Attributes:
        codes: the ending of the name of the codes.
        weight: the ending of the name of the weight.
        scales: the ending of the name of the scales.
        needed, optional: the endings of the other tensors.
        dtypes, scale_dtypes: that codes and scales may have.
        shape: the ending of the tensor with the shape of the weight, if the format has one.
    """

    codes: str
    weight: ClassVar[str] = ""
    scales: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("I32",)
    scale_dtypes: ClassVar[tuple[str, ...]] = _SCALES
    shape: ClassVar[str | None] = None

    def fit(self, parts: Mapping[str, StoredWeight], scheme: Scheme, shape: Shape | None) -> Shape | None:
        """Return the shape of a weight from those of its tensors; None if they do not fit the scheme.

        `shape`: that in the files, if the format stores it.
        """
        raise NotImplementedError

    def compute(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        """Return rows of a weight in fp32. Raises CheckpointError if the tensors have impossible values."""
        raise NotImplementedError


class DequantizedFolder(SafetensorsFolder):
    """A folder whose quantized weights have the names, shapes and values of plain ones.

    Rows of a weight are read and computed alone, so that a rank needs memory for what it asked for and for one piece.
    """

    is_quantized = True

    def __init__(self, path: Path, stored: StoredFormat) -> None:
        """Read the headers of the files. Raises the errors of `open_folder`."""
        super().__init__(path)
        self.stored = stored
        headers = super().read_headers()
        self._packed: dict[str, Packed] = {}
        self._headers = {name: header for name, header in headers.items() if not _OF_ACTIVATIONS.search(name)}
        for layout in LAYOUTS[stored.method]:
            self._collect(layout, headers)

    @override
    def __str__(self) -> str:
        return f"its weights are stored as {self.stored} and read as plain numbers of {self.stored.dtype}"

    @override
    def read_headers(self) -> dict[str, StoredWeight]:
        return self._headers

    @override
    def read(self, name: str, block: tuple[slice, ...]) -> Tensor:
        packed = self._packed.get(name)
        return super().read(name, block) if packed is None else self._compute(packed, block)

    @override
    def read_whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = list(names)
        plain = super().read_whole(name for name in names if name not in self._packed)
        return {name: plain[name] if name in plain else self.read(name, ()) for name in names}

    def _compute(self, packed: Packed, block: tuple[slice, ...]) -> Tensor:
        rows = range(packed.shape[0])[block[0] if block else slice(None)]
        step = max(1, PIECE // math.prod(packed.shape[1:]))
        with self.taking() as take:

            def read(ending: str, *part: slice) -> Tensor:
                return take(packed.names[ending], *part)

            made: Tensor | None = None
            for done in range(0, len(rows), step):
                piece = rows[done : done + step]
                values = packed.layout.compute(read, packed, piece.start, piece.stop)
                values = values.to(packed.dtype)[(slice(None), *block[1:])]
                made = values.new_empty(len(rows), *values.shape[1:]) if made is None else made
                made[done : done + step] = values
        return torch.empty(0, *packed.shape[1:], dtype=packed.dtype) if made is None else made

    def _collect(self, layout: StoredLayout, headers: Mapping[str, StoredWeight]) -> None:
        """Replace the tensors of this layout with the weights that they store."""
        groups: dict[str, dict[str, str]] = {}
        for name, header in headers.items():
            is_codes = name.endswith(layout.codes) and not name.endswith((*layout.needed, *layout.optional))
            base = name.removesuffix(layout.codes)
            has_part = header.dtype in layout.dtypes or f"{base}{layout.scales}" in headers
            if is_codes and has_part and name in self._headers:
                endings = (layout.codes, *layout.needed, *layout.optional)
                groups[base] = {ending: f"{base}{ending}" for ending in endings if f"{base}{ending}" in headers}
        shapes = self._read_shapes(layout, groups)
        for base, names in groups.items():
            parts = {ending: headers[name] for ending, name in names.items()}
            try:
                packed = self._describe(layout, names, parts, shapes.get(base))
            except _UnfitError as error:
                first = parts[layout.codes]
                raise CheckpointError(
                    f"{first.file}: {names[layout.codes]} is stored as {first.dtype} of shape {first.shape}, and "
                    f"{error} (quantization_config.quant_method={self.stored.method} in config.json); the files do not "
                    "belong together: download the folder again."
                ) from error
            for name in names.values():
                self._headers.pop(name, None)
            name, dtype = f"{base}{layout.weight}", _name(packed.dtype)
            self._packed[name] = packed
            self._headers[name] = StoredWeight(parts[layout.codes].file, packed.shape, dtype)

    def _read_shapes(self, layout: StoredLayout, found: Mapping[str, Mapping[str, str]]) -> dict[str, Shape]:
        """Read the shapes of weights whose format stores them as tensors, by the start of their names."""
        if layout.shape is None:
            return {}
        stored = {base: names[layout.shape] for base, names in found.items() if layout.shape in names}
        read = super().read_whole(stored.values())
        return {base: tuple(read[name].flatten().tolist()) for base, name in stored.items()}

    def _describe(
        self, layout: StoredLayout, names: Mapping[str, str], parts: Mapping[str, StoredWeight], shape: Shape | None
    ) -> Packed:
        if parts[layout.codes].dtype not in layout.dtypes:
            raise _UnfitError(f"{names[layout.scales]} is a scale of codes in {' or '.join(layout.dtypes)}")
        missing = [ending for ending in layout.needed if ending not in parts]
        if missing:
            raise _UnfitError(f"{names[layout.codes].removesuffix(layout.codes)}{missing[0]} is missing")
        scales = parts[layout.scales]
        if scales.dtype not in layout.scale_dtypes:
            raise _UnfitError(f"its scales are stored as {scales.dtype}, not {' or '.join(layout.scale_dtypes)}")
        tried = [layout.fit(parts, scheme, shape) for scheme in self.stored.schemes]
        fitting = [(fitted, scheme) for fitted, scheme in zip(tried, self.stored.schemes, strict=True) if fitted]
        if not fitting:
            shapes = ", ".join(f"{ending or 'codes'} {header.shape}" for ending, header in parts.items())
            schemes = " or ".join(map(str, self.stored.schemes))
            raise _UnfitError(f"its tensors do not fit {schemes}: {shapes}")
        is_half = scales.dtype in ("F16", "BF16")
        dtype = getattr(torch, FLOATING[scales.dtype] if is_half else self.stored.dtype)
        return Packed(layout, names, fitting[0][0], fitting[0][1], dtype)


class _UnfitError(Exception):
    """The tensors of a weight do not fit together; the message says why."""


def _name(dtype: torch.dtype) -> str:
    return next(name for name, torch_name in FLOATING.items() if getattr(torch, torch_name) is dtype)


class ScaledCodes(StoredLayout):
    """Codes of 8 bits that are numbers themselves, with scales per block, and zero points if it has them.

    Block-wise fp8 (DeepSeek-V3, arXiv:2412.19437, section 3.3), and the unpacked formats of compressed-tensors.
    """

    def __init__(self, scales: str, dtypes: tuple[str, ...], zeros: str | None = None) -> None:
        self.codes, self.scales, self.dtypes = "", scales, dtypes
        self.needed, self.optional = (scales,), () if zeros is None else (zeros,)

    @override
    def fit(self, parts: Mapping[str, StoredWeight], scheme: Scheme, shape: Shape | None) -> Shape | None:
        codes = parts[self.codes].shape
        grids = [_grid_shape(parts[ending].shape) for ending in (self.scales, *self.optional) if ending in parts]
        fits = len(codes) >= 2 and scheme.bits == 8 and all(grid == _grid(codes, scheme.block) for grid in grids)
        return codes if fits and len(grids) >= 1 + bool(scheme.has_zeros) else None

    @override
    def compute(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        values = read(self.codes, slice(start, stop)).float()
        for ending in self.optional:
            if ending in packed.names:
                values -= _spread(read(ending), packed, start, stop)
        return values.mul_(_spread(read(self.scales), packed, start, stop))


class PackedRows(StoredLayout):
    """Codes of 1 to 8 bits, the columns of a row one after another in words of 32 bits.

    The format `pack-quantized` of compressed-tensors. Without zero points, codes are half their range too large.
    """

    codes, weight, scales, shape = "_packed", "", "_scale", "_shape"
    needed, optional = ("_scale", "_shape"), ("_zero_point",)

    @override
    def fit(self, parts: Mapping[str, StoredWeight], scheme: Scheme, shape: Shape | None) -> Shape | None:
        if shape is None or len(shape) != 2 or min(shape) < 1:
            return None
        grid = _grid(shape, scheme.block)
        fits = parts["_packed"].shape == (shape[0], _num_words(shape[1], scheme.bits))
        fits &= _grid_shape(parts["_scale"].shape) == grid
        fits &= ("_zero_point" in parts) == bool(scheme.has_zeros)
        if fits and scheme.has_zeros:
            zeros = parts["_zero_point"]
            fits = zeros.dtype == "I32" and zeros.shape == (_num_words(grid[0], scheme.bits), grid[1])
        return shape if fits else None

    @override
    def compute(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        bits = packed.scheme.bits
        values = unpack(read("_packed", slice(start, stop)), bits, packed.shape[1]).float()
        if "_zero_point" in packed.names:
            num_rows = _grid(packed.shape, packed.scheme.block)[0]
            values -= _spread(unpack(read("_zero_point").T, bits, num_rows).T, packed, start, stop)
        else:
            values -= 2 ** (bits - 1)
        return values.mul_(_spread(read("_scale"), packed, start, stop))


class PackedColumns(StoredLayout):
    """Codes of 2 to 8 bits of a transposed weight, with a scale and a zero point per output and group of inputs."""

    codes, weight, scales = ".qweight", ".weight", ".scales"
    needed: tuple[str, ...] = (".qzeros", ".scales")

    @override
    def fit(self, parts: Mapping[str, StoredWeight], scheme: Scheme, shape: Shape | None) -> Shape | None:
        codes, scales, zeros = (parts[ending].shape for ending in (".qweight", ".scales", ".qzeros"))
        if len(codes) != 2 or len(scales) != 2 or min(codes) < 1:
            return None
        rows, columns = scales[1], self._num_inputs(codes, scheme.bits)
        groups = _grid((rows, columns), scheme.block)[1]
        fits = codes == self._codes_shape(rows, columns, scheme.bits) and scales == (groups, rows)
        fits &= zeros == (groups, _num_words(rows, scheme.bits)) and parts[".qzeros"].dtype == "I32"
        order = parts.get(".g_idx")
        return (rows, columns) if fits and (order is None or order.shape == (columns,)) else None

    @override
    def compute(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        columns, group = packed.shape[1], packed.scheme.block[1]
        if ".g_idx" in packed.names:
            of_group = read(".g_idx").long()
        else:
            of_group = torch.arange(columns) // (group or columns)
        scales = read(".scales", slice(None), slice(start, stop)).T.float()
        if int(of_group.min()) < 0 or int(of_group.max()) >= scales.shape[1]:
            raise CheckpointError(
                f"{packed.names['.g_idx']} names the group {int(of_group.max())} of {scales.shape[1]}; the checkpoint "
                "is damaged: download it again."
            )
        zeros = self._zeros(read, packed, start, stop).float()
        return (self._values(read, packed, start, stop).float() - zeros[:, of_group]).mul_(scales[:, of_group])

    def _num_inputs(self, codes: Shape, bits: int) -> int:
        raise NotImplementedError

    def _codes_shape(self, rows: int, columns: int, bits: int) -> Shape:
        raise NotImplementedError

    def _values(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        """Return the codes of these outputs, `[outputs, inputs]`."""
        raise NotImplementedError

    def _zeros(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        """Return the zero points of these outputs, `[outputs, groups]`."""
        raise NotImplementedError


class Gptq(PackedColumns):
    """GPTQ (arXiv:2210.17323) in the format of AutoGPTQ, whose first version stores zero points less 1.

    The inputs of an output are one after another in words. `g_idx` names the group of each input, in any order.
    """

    optional = (".g_idx",)

    @override
    def _num_inputs(self, codes: Shape, bits: int) -> int:
        return codes[0] * 32 // bits

    @override
    def _codes_shape(self, rows: int, columns: int, bits: int) -> Shape:
        return _num_words(columns, bits), rows

    @override
    def _values(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        words = read(".qweight", slice(None), slice(start, stop)).T
        return unpack(words, packed.scheme.bits, packed.shape[1])

    @override
    def _zeros(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        bits = packed.scheme.bits
        zeros = unpack(read(".qzeros"), bits, packed.shape[0])[:, start:stop].T
        return (zeros.int() + packed.scheme.zero_offset).bitwise_and_(2**bits - 1)


class Awq(PackedColumns):
    """AWQ (arXiv:2306.00978) in the gemm format of AutoAWQ: 8 outputs of an input in each word, interleaved."""

    @override
    def _num_inputs(self, codes: Shape, bits: int) -> int:
        return codes[0]

    @override
    def _codes_shape(self, rows: int, columns: int, bits: int) -> Shape:
        return columns, rows * bits // 32 if rows % 8 == 0 else -1

    @override
    def _values(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        return self._outputs(read(".qweight", slice(None), slice(start // 8, -(-stop // 8))), start, stop)

    @override
    def _zeros(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        return self._outputs(read(".qzeros", slice(None), slice(start // 8, -(-stop // 8))), start, stop)

    def _outputs(self, words: Tensor, start: int, stop: int) -> Tensor:
        stored = unpack(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
        codes: Tensor = stored[..., list(_AWQ_ORDER)].flatten(1)
        return codes[:, start % 8 : start % 8 + stop - start].T


class Mxfp4(StoredLayout):
    """MXFP4 experts of gpt-oss: E2M1 codes of transposed weights, two in a byte, with a power of 2 per 32 inputs.

    OCP Microscaling Formats 1.0, sections 5.3 and 5.4.
    """

    codes, scales, needed, dtypes = "_blocks", "_scales", ("_scales",), ("U8",)
    scale_dtypes = ("U8",)

    @override
    def fit(self, parts: Mapping[str, StoredWeight], scheme: Scheme, shape: Shape | None) -> Shape | None:
        blocks = parts["_blocks"].shape
        fits = len(blocks) == 4 and blocks[3] == 16 and parts["_scales"].shape == blocks[:3]
        return (blocks[0], 32 * blocks[2], blocks[1]) if fits else None

    @override
    def compute(self, read: Read, packed: Packed, start: int, stop: int) -> Tensor:
        codes = unpack(read("_blocks", slice(start, stop)), 4, 32).long()
        scales = (read("_scales", slice(start, stop)).float() - 127).exp2()
        return (torch.tensor(_E2M1)[codes] * scales.unsqueeze(-1)).flatten(2).transpose(1, 2)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes of each row, as bytes.

    Args:
        words: `[..., words]`, integers of 8 or 32 bits; the first code of a row is in the lowest bits of its first
            word, and a code may continue in the next word.
        bits: of one code, 1 to 8.
    """
    data = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes: Tensor = ((data.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
        return codes[..., :count]
    first = torch.arange(count) * bits
    data = torch.nn.functional.pad(data, (0, 1)).int()
    pair: Tensor = data[..., first // 8] | data[..., first // 8 + 1] << 8
    return (pair >> first % 8).bitwise_and_(2**bits - 1).to(torch.uint8)


def _num_words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _grid(shape: Shape, block: Block) -> Shape:
    """Return the shape of the scales of a weight, one per block."""
    counts = [1 if size is None else -(-length // size) for length, size in zip(shape[-2:], block, strict=True)]
    return *shape[:-2], *counts


def _grid_shape(shape: Shape) -> Shape:
    """Return the shape of stored scales; that of one scale for all as that of a grid."""
    return (1, 1) if math.prod(shape) == 1 and len(shape) < 2 else shape


def _spread(grid: Tensor, packed: Packed, start: int, stop: int) -> Tensor:
    """Return the scale, or the zero point, of each number in these rows of a weight: fp32, to be broadcast.

    Rows are those of the first dim: where it counts matrices, whole ones.
    """
    (rows, columns), (height, width) = packed.shape[-2:], packed.scheme.block
    grid = grid.float()
    if grid.ndim < 2:
        grid = grid.reshape(1, 1)
    if len(packed.shape) > 2:
        grid, start, stop = grid[start:stop], 0, rows
    if height is not None:
        first = start // height
        grid = grid[..., first : -(-stop // height), :].repeat_interleave(height, dim=-2)
        grid = grid[..., start - first * height : stop - first * height, :]
    return grid if width is None else grid.repeat_interleave(width, dim=-1)[..., :columns]


LAYOUTS: dict[str, tuple[StoredLayout, ...]] = {
    "fp8": (ScaledCodes("_scale_inv", ("F8_E4M3",)),),
    "mxfp4": (Mxfp4(),),
    "compressed-tensors": (ScaledCodes("_scale", ("F8_E4M3", "I8"), zeros="_zero_point"), PackedRows()),
    "gptq": (Gptq(),),
    "awq": (Awq(),),
}
"""How each method of `stored_format.METHODS` stores a weight."""
