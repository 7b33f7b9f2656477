"""The formats in which weights may be stored quantized, as the `quantization_config` of a config.json names them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from echelon.ground.errors import ConfigError

Block = tuple[int | None, int | None]

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""The keys of a config with its settings: at the top, or, with images, among the fields of its language model."""

_DTYPES = ("float32", "bfloat16", "float16")
_PACKED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Scheme:
    """How some of the weights are stored.

    Attributes:
        bits: of one number.
        block: the rows and columns of a weight that share one scale; None for all of them.
        has_zeros: whether zero points are stored; None where the format does not say.
        zero_offset: what the files subtract from each zero point.
    """

    bits: int
    block: Block
    has_zeros: bool | None = None
    zero_offset: int = 0

    @override
    def __str__(self) -> str:
        height, width = ("all" if size is None else size for size in self.block)
        zeros = " and a zero point" if self.has_zeros else ""
        return f"{self.bits} bits with a scale{zeros} for every {height} x {width}"


@dataclass(frozen=True)
class StoredFormat:
    """The format of a checkpoint's quantized weights.

    Attributes:
        method: its `quant_method`, a key of `METHODS`.
        schemes: of its weights; those of one layer follow from the shapes of its tensors.
        dtype: that the model has in memory by its config.json: `bfloat16` if it does not say.
    """

    method: str
    schemes: tuple[Scheme, ...]
    dtype: str

    @override
    def __str__(self) -> str:
        widths = sorted({scheme.bits for scheme in self.schemes})
        return f"{self.method} ({' and '.join(map(str, widths))} bits)"


class _UnreadableError(Exception):
    """A setting that echelon cannot read: its key, its value, and what is possible."""

    def __init__(self, key: str, value: object, possible: str) -> None:
        super().__init__(key, value, possible)
        self.key, self.value, self.possible = key, value, possible


def find_stored_format(source: str, fields: Mapping[str, Any]) -> StoredFormat | None:
    """Return the format of a checkpoint's quantized weights; None if they are plain numbers.

    Args:
        source: the checkpoint, as messages name it.
        fields: of its config.json.

    Raises:
        ConfigError: echelon does not read the format; naming the key, its value, and what is possible.
    """
    key, settings = find_settings(fields)
    if not settings:
        return None
    try:
        if not isinstance(settings, Mapping):
            raise _UnreadableError("", settings, "a mapping with quant_method")
        method = _find_method(settings)
        if method not in METHODS:
            raise _UnreadableError("quant_method", method, ", ".join(METHODS))
        schemes = METHODS[method](settings)
    except _UnreadableError as error:
        where = f"{key}.{error.key}" if error.key else key
        raise ConfigError(
            f"model.checkpoint={source}: its weights are stored quantized ({where}={str(error.value)[:100]} in "
            f"config.json), and echelon reads {error.possible}; {_find_fix(settings)}."
        ) from error
    text = fields.get("text_config")
    places = (fields, text) if isinstance(text, Mapping) else (fields,)
    named = [str(section.get("dtype") or section.get("torch_dtype")).removeprefix("torch.") for section in places]
    dtype = next((name for name in named if name in _DTYPES), "bfloat16")
    return StoredFormat(method, schemes, dtype)


def find_settings(fields: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key of config.json with the settings of quantized weights, and its value; None if there is none."""
    text = fields.get("text_config")
    places = {"": fields} | ({"text_config.": text} if isinstance(text, Mapping) else {})
    for prefix, section in places.items():
        for key in QUANTIZATION_KEYS:
            if section.get(key):
                return f"{prefix}{key}", section[key]
    return QUANTIZATION_KEYS[0], None


def without_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config without those about quantized weights: of the model in memory."""
    kept = {key: value for key, value in fields.items() if key not in QUANTIZATION_KEYS}
    text = kept.get("text_config")
    return kept | ({"text_config": without_settings(text)} if isinstance(text, Mapping) else {})


def _find_method(settings: Mapping[str, Any]) -> str | None:
    method = settings.get("quant_method")
    if method is None and any(str(key).startswith("load_in_") for key in settings):
        return "bitsandbytes"
    if method is None and "config_groups" in settings:
        return "compressed-tensors"
    return None if method is None else str(method)


def _find_fix(settings: object) -> str:
    fix = "give the folder of the model before quantization"
    if isinstance(settings, Mapping) and _find_method(settings) == "bitsandbytes":
        fix += "; with adapter.method=qlora, echelon itself quantizes it to 4 bits as it loads"
    return fix


def _require(settings: Mapping[str, Any], key: str, allowed: tuple[object, ...], default: object) -> Any:
    """Return a setting, or its default where it is missing or null. Raises if it is not allowed."""
    value = settings.get(key)
    value = default if value is None else value
    if value not in allowed:
        raise _UnreadableError(key, value, " or ".join(map(str, allowed)))
    return value


def _positive(value: object, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _UnreadableError(key, value, "a positive whole number")
    return value


def _read_fp8(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    _require(settings, "fmt", ("e4m3",), "e4m3")
    _require(settings, "expert_dtype", ("fp8",), "fp8")
    return (Scheme(8, _read_block(settings.get("weight_block_size", (128, 128)), "weight_block_size")),)


def _read_block(size: object, key: str) -> Block:
    if size is None:
        return None, None
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise _UnreadableError(key, size, "two positive whole numbers")
    return _positive(size[0], key), _positive(size[1], key)


def _read_gptq(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    bits = _require(settings, "bits", (2, 3, 4, 8), 4)
    key = "checkpoint_format" if settings.get("checkpoint_format") is not None else "format"
    version = _require(settings, key, ("gptq", "gptq_v2"), "gptq")
    return (Scheme(bits, (1, _read_group(settings)), zero_offset=1 if version == "gptq" else 0),)


def _read_awq(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    key = "version" if settings.get("version") is not None else "format"
    layout = settings.get(key)
    if layout is not None and str(layout).lower() != "gemm":
        raise _UnreadableError(key, layout, "gemm")
    _require(settings, "zero_point", (True,), True)
    key = "w_bit" if "w_bit" in settings else "bits"
    return (Scheme(_require(settings, key, (4,), 4), (1, _read_group(settings))),)


def _read_group(settings: Mapping[str, Any]) -> int | None:
    """Return the columns that share a scale: `group_size`, where -1 means all."""
    key = "q_group_size" if "q_group_size" in settings else "group_size"
    size = settings.get(key, 128)
    return None if size == -1 else _positive(size, key)


def _read_compressed(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    if settings.get("transform_config"):
        raise _UnreadableError("transform_config", "{...}", "weights without transforms")
    sparsity = settings.get("sparsity_config")
    kind = sparsity.get("format") if isinstance(sparsity, Mapping) else sparsity
    if kind not in (None, {}, "dense"):
        raise _UnreadableError("sparsity_config.format", kind, "dense")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _UnreadableError("config_groups", groups, "a mapping with at least one group")
    return tuple(_read_config_group(settings, f"config_groups.{name}", group) for name, group in groups.items())


def _read_config_group(settings: Mapping[str, Any], where: str, group: object) -> Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise _UnreadableError(f"{where}.weights", weights, "groups whose weights are quantized")
    layout = group.get("format") or settings.get("format")
    if layout not in _PACKED_FORMATS:
        raise _UnreadableError("format", layout, ", ".join(_PACKED_FORMATS))
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    is_packed = layout == "pack-quantized"
    if (kind, bits) not in (("float", 8), ("int", 8)) and not (is_packed and kind == "int" and bits in range(1, 9)):
        possible = "int of 1 to 8 bits" if is_packed else "int or float of 8 bits"
        raise _UnreadableError(f"{where}.weights", f"{kind} of {bits} bits", possible)
    block = _read_strategy(weights, f"{where}.weights")
    return Scheme(bits, block, has_zeros=not weights.get("symmetric", True))


def _read_strategy(weights: Mapping[str, Any], where: str) -> Block:
    """Return the block of a group of compressed-tensors, which may leave the strategy to the size of groups."""
    size = weights.get("group_size")
    strategy = str(weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group"))
    blocks: dict[str, Callable[[], Block]] = {
        "tensor": lambda: (None, None),
        "channel": lambda: (1, None),
        "group": lambda: (1, _positive(size, f"{where}.group_size")),
        "block": lambda: _read_block(weights.get("block_structure") or (), f"{where}.block_structure"),
    }
    if strategy not in blocks:
        raise _UnreadableError(f"{where}.strategy", strategy, ", ".join(blocks))
    return blocks[strategy]()


METHODS: dict[str, Callable[[Mapping[str, Any]], tuple[Scheme, ...]]] = {
    "fp8": _read_fp8,
    "mxfp4": lambda _: (Scheme(4, (1, 32)),),
    "compressed-tensors": _read_compressed,
    "gptq": _read_gptq,
    "awq": _read_awq,
}
"""What reads the settings of each `quant_method`. `learn/model/dequantized.py` has their tensors."""
