"""Finds keys of a section that do not go together, as `key_limits.py` declares, with a message for each."""

from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from echelon.ground.extensions import EXTENSION
from echelon.ground.redaction import redact
from echelon.ground.sizes import join_words
from echelon.recipe.key_limits import OWN, Case, Limit, OnlyWith
from echelon.recipe.yaml_text import show_value


@cache
def _list_marks(section: type[BaseModel]) -> tuple[tuple[str, OnlyWith], ...]:
    """The marked keys of a section, each with its mark; a key may have several."""
    fields = section.model_fields.items()
    return tuple((name, part) for name, field in fields for part in field.metadata if isinstance(part, OnlyWith))


def find_useless(section: BaseModel, around: str, recipe: BaseModel | None = None) -> Iterator[str]:
    """Yield a message for each key of a section that has no effect. `around`: what its keys begin with, `sync.`.

    Without `recipe`, because of other keys of the section; with it, because of keys of other sections.
    """
    whole, start = (section, around) if recipe is None else (recipe, "")
    for name, only in _list_marks(type(section)):
        is_inner = only.key.startswith(around) and only.also.startswith(around if only.also else "")
        if is_inner == (recipe is None) and _is_set(section, name):
            key = only.key.removeprefix(start)
            also, _, value = only.also.partition("=")
            if not _holds(whole, key, only.values) and not (also and _holds(whole, also, (value,) if value else ())):
                yield _explain_useless(around + name, getattr(section, name), only, _read(whole, key))


def find_limited(section: BaseModel, cases: Sequence[Case], around: str = "") -> Iterator[str]:
    """Yield a message for each key of a section whose value is not possible. `around`: what its keys begin with."""
    for case in (case for case in cases if _holds(section, case.key.removeprefix(around), case.values)):
        named = _show(case.key, _read(section, case.key.removeprefix(around)))
        for limit in case.limits:
            value = _read(section, limit.key.removeprefix(around), absent=limit.values[0])
            if not _is_among(value, limit.values):
                yield f"{_show(limit.key, value)}: {named} {limit.why}; {_describe_fix(limit, case.instead)}."


def _explain_useless(key: str, value: Any, only: OnlyWith, current: Any) -> str:
    names = [_render(name) for name in only.values if name not in (None, OWN)]
    names = [f"{OWN} of your own"] if only.values == (OWN,) else names
    is_there = current not in (None, ())
    ways = [f"set {only.key}: {join_words(names)}" if names else f"set {'another ' * is_there}{only.key}"]
    ways += [only.also] if only.also else []
    rule = f"with {_show(only.key, current)}" if is_there else f"without {only.key}"
    reason = f", {only.why}" if only.why else ""
    last = key.rpartition(".")[2]
    return f"{_show(key, value)} has no effect {rule}{reason}; {', or '.join(ways)}, or remove {last}."


def _describe_fix(limit: Limit, instead: str) -> str:
    names = [_render(value) for value in limit.values if value not in (None, ())]
    if not names:
        return f"remove {limit.key}" + (f", or {instead}" if instead else "")
    return f"use {limit.key}={join_words(names)}" + (f", or {instead.removeprefix('use ')}" if instead else "")


def _is_among(value: Any, values: tuple[Any, ...]) -> bool:
    is_own = OWN in values and isinstance(value, str) and EXTENSION.fullmatch(value) is not None
    return value in values or is_own


def _is_set(section: BaseModel, key: str) -> bool:
    """Whether a key differs from its default."""
    around, _, name = key.rpartition(".")
    inner = attrgetter(around)(section) if around else section
    field = type(inner).model_fields[name]
    value = getattr(inner, name)
    default = field.get_default(call_default_factory=True, validated_data=inner.__dict__)
    return not (value == default or (default is None and (value is False or value == {})))


def _holds(section: BaseModel, key: str, values: tuple[Any, ...]) -> bool:
    """Whether a key has one of these values; without values, whether it is set."""
    return _is_among(_read(section, key), values) if values else _is_set(section, key)


def _read(section: BaseModel, key: str, absent: Any = None) -> Any:
    """The value of a dotted key; `absent` where a name, or nothing, stands in place of a section around it."""
    try:
        return attrgetter(key)(section)
    except AttributeError:
        return absent


def _show(key: str, value: Any) -> str:
    """A key with its value, without secrets; of a section, the key alone."""
    parts = value if isinstance(value, tuple) else (value,)
    if any(isinstance(part, BaseModel) for part in parts):
        return key
    name = key.rpartition(".")[2]
    return f"{key}={_render(redact({name: value})[name])}"


def _render(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else show_value(value)
