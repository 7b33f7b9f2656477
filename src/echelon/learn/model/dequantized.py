"""Reads weights that a checkpoint stores quantized as plain numbers, a piece of a weight at a time."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from echelon.ground.errors import CheckpointError
from echelon.learn.model.safetensors_folder import FLOATING, SafetensorsFolder, StoredWeight
from echelon.learn.model.stored_format import StoredFormat
from echelon.learn.model.stored_layouts import LAYOUTS, Packed, Shape, StoredLayout

PIECE = 2**20
"""The numbers of a weight that are computed at a time, which bounds the memory beside the result."""

# What layers do to their inputs and outputs: of no use to weights that are plain numbers.
_OF_ACTIVATIONS = re.compile(r"\.((input|output|activation|[qkv])_(global_)?scale|(input|output)_zero_point)$")


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
