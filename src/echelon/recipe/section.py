"""The base class of a recipe's sections: frozen, no unknown keys, exact types, hashable by content."""

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    Strict,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import override

from echelon.ground.plugins import Plugins
from echelon.recipe.key_limits import Case, OnlyWith

PathOrText = TypeVar("PathOrText", Path, str)


class Section(BaseModel):
    """A mapping in the recipe. Values cannot be reassigned; equal sections have equal hashes."""

    around: ClassVar[str] = ""
    """What its keys begin with in a recipe, such as `sync.`; only a section with rules on its keys has it."""

    limits: ClassVar[tuple[Case, ...]] = ()
    """What its keys, and those of sections in it, allow each other."""

    plugins: ClassVar[tuple[Plugins[Any], ...]] = ()
    """Those that have a section of their name in this one; their attribute `section` is its class, or None: a mapping
    that the plugin checks itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    @override
    def __hash__(self) -> int:
        # Pydantic's hash of a frozen model fails for free mappings (model.config, launch, smp).
        return hash((type(self), _hashable(self.__dict__)))

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        from echelon.recipe.refusals import find_limited, find_useless

        inner = [part for part in self.__dict__.values() if isinstance(part, Section)]
        useless = (find_useless(self, self.around), *(find_useless(part, part.around, self) for part in inner))
        for message in chain(*useless, find_limited(self, self.limits, self.around)):
            raise ValueError(message)
        return self

    @classmethod
    @override
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        keys = handler.resolve_ref_schema(schema)["properties"]
        for name, field in cls.model_fields.items():
            needs = [only.describe(cls.around) for only in field.metadata if isinstance(only, OnlyWith)]
            if any(needs):
                keys[name]["description"] = f"With {' and '.join(needs)}: {field.description}"
        return schema


class OpenSection(Section):
    """A section that has the sections of plugins too. Its schema does not: it is the same on every machine."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})

    @model_validator(mode="after")
    def _read_sections_of_plugins(self) -> Self:
        extra = self.model_extra or {}
        for name, value in extra.items():
            kind = next((kind for kind in self.plugins if name in kind), self.plugins[0])
            form = getattr(kind[name], "section", None) or dict[str, Any]
            extra[name] = TypeAdapter(dict[str, form]).validate_python({name: value})[name]  # type: ignore[valid-type]
        return self


def rule(check: Callable[[Any], None]) -> Any:
    """A method of a section that raises ValueError for values that do not go together; the checks run in order."""

    @wraps(check)
    def obey(section: Section) -> Section:
        check(section)
        return section

    return model_validator(mode="after")(obey)


def expand_list(value: Any, key: str) -> Any:
    """Expand the shorthands for a list of sections: one section alone, and the value of `key` instead of a section."""
    entries = [value] if isinstance(value, str | dict | Section) else value
    return [expand_name(entry, key) for entry in entries] if isinstance(entries, list | tuple) else entries


def expand_name(value: Any, key: str) -> Any:
    """Expand the shorthand for a section: the value of `key` instead of a mapping."""
    return {key: value} if isinstance(value, str) else value


def distinct(key: str) -> AfterValidator:
    """The check of a list of names that none is empty and none occurs twice. A word instead of a list has a meaning."""

    def check(words: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for index, word in enumerate(words if isinstance(words, tuple) else ()):
            if not word.strip():
                raise ValueError(f"{key} has an empty name; remove it.")
            if word in words[:index]:
                raise ValueError(f"{key} has {word!r} twice; remove one.")
        return words

    return AfterValidator(check)


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value


def name_or_mapping(value: Any) -> str:
    """Return the tag of a value that is either a name or a section: pydantic reports errors for that form alone."""
    return "mapping" if isinstance(value, dict | Section) else "name"


MAX_NAME = 200
"""The longest name of a run or a sweep: file systems allow 255 bytes, and echelon appends a time or a number."""

SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d+(?:_\d+)*(?:\.\d*)?(?:e\+?\d{1,2})?) ?([kmbt]?)", re.IGNORECASE)


def read_count(text: str) -> Fraction | None:
    """Return the exact number in a text such as `2B`, `1.3b`, `350m` or `2e9`; None if it is not a number.

    The suffixes are decimal: K, M, B and T are a thousand, a million, a billion and a trillion.
    """
    match = _COUNT.fullmatch(text.strip())
    return None if match is None else Fraction(match[1]) * SUFFIXES[match[2].lower()]


def read_amount(value: Any) -> tuple[Fraction, str]:
    """The exact number and the unit in `1B tokens`, `1/3 epochs`, `2% of tokens`; a number is steps, all else -1."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return Fraction(str(value)), "steps"
    head, _, unit = str(value).strip().lower().replace("%", " %").partition(" ")
    number, *rest = [read_count(part) for part in head.split("/", 1)]
    divisor = rest[0] if rest else Fraction(1)
    return (Fraction(-1), "") if number is None or not divisor else (number / divisor, unit.strip())


def show_number(number: Fraction) -> str:
    """The exact number as a decimal, or as a ratio if it has none: `0.5`, `1/3`."""
    decimal = Decimal(number.numerator) / number.denominator
    return f"{decimal.normalize():f}" if Fraction(decimal) == number else str(number)


def read_epochs(every: int | str | None) -> Fraction | None:
    """The passes over the data in a rhythm; None if it is in steps."""
    number, unit = read_amount(every)
    return number if unit == "epochs" else None


def _check_rhythm(value: Any) -> Any:
    """Write steps as a number, and passes over the data as `N epochs`."""
    number, unit = read_amount(value)
    if number > 0 and unit in ("epoch", "epochs"):
        return f"{show_number(number)} epochs"
    if number < 1 or number % 1 or unit not in ("step", "steps"):
        raise PydanticCustomError("rhythm", "a number of steps or epochs")
    return int(number)


def _count_of_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    count = read_count(value)
    # Digits without a suffix must be written as a number, without quotes.
    if count is None or count.denominator != 1 or value[-1:].isdigit():
        raise PydanticCustomError("token_count", "a count of tokens")
    return int(count)


# By default pydantic converts "5" to 5 and true to 1. Here, the only conversion is of a whole float such as 2e9.
_FromWholeFloat = BeforeValidator(
    lambda value: int(value) if isinstance(value, float) and value.is_integer() else value
)


def _is_a_path(value: PathOrText) -> PathOrText:
    if any(len(name.encode()) > 255 for name in str(value).split("/")) or len(str(value)) > 4000:
        raise PydanticCustomError("path_length", "a path of at most 4000 characters, each name of at most 255 bytes")
    return value


def _check_folder_name(key: str, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f"{key}={name!r} must be a plain folder name; use letters, digits, '.', '_' and '-', and a letter or digit "
            "first."
        )
    if len(name) > MAX_NAME:
        raise ValueError(f"{key}={name[:40]}... has {len(name)} characters, and may have {MAX_NAME}; shorten it.")
    return name


def folder_name(key: str) -> AfterValidator:
    """The check of a name that it is a valid folder name on every system."""
    return AfterValidator(partial(_check_folder_name, key))


def _check_address(key: str, example: str, address: str) -> str:
    if re.search(r"[@?]", address):  # not shown: it may be what must stay secret
        raise ValueError(
            f"{key} must be an address without a user name, password or query, because the recipe is stored as plain "
            "text; set credentials in the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...) or in "
            "fsspec's own configuration."
        )
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^:]*[^:/][^:]*", address):
        raise ValueError(
            f"{key}={address} must be one address with its protocol and a path; for example s3://bucket/{example}, "
            f"gs://bucket/{example} or file:///mnt/{example}."
        )
    return address.rstrip("/")


def address(key: str, example: str) -> AfterValidator:
    """The check of an address in an object store; it may hold no secret. `example`: a path, for messages."""
    return AfterValidator(partial(_check_address, key, example))


AnyPath = Annotated[Path, AfterValidator(_is_a_path)]
PathOrName = Annotated[str, AfterValidator(_is_a_path)]
Whole = Annotated[int, Strict(), _FromWholeFloat]
Count = Annotated[int, Strict(), Field(ge=1), _FromWholeFloat]
CountOrZero = Annotated[int, Strict(), Field(ge=0), _FromWholeFloat]
_FromText = BeforeValidator(_count_of_text)


_PATTERN = r"^[0-9]+(_[0-9]+)*(\.[0-9]*)?([eE]\+?[0-9]{1,2})? ?[kKmMbBtT]$"
_TEXT = {"type": "string", "pattern": _PATTERN, "examples": ["2B"]}
Tokens = Annotated[Count, _FromText, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _TEXT]})]
"""A number of tokens, which may be written with a suffix: `2B`."""
Every = Annotated[int | str, BeforeValidator(_check_rhythm)]
"""How often something is done: a number of steps, or of passes over the training data, such as `0.5 epochs`."""
Number = Annotated[float, Strict()]
Positive = Annotated[Number, Field(gt=0)]
PositiveOrZero = Annotated[Number, Field(ge=0)]
Flag = Annotated[bool, Strict()]
