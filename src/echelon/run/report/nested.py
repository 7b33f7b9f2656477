"""Values of nested mappings from a file, which may be missing or of another type."""

from typing import Any

_LARGEST = 1e300


def read_number(mapping: object, *path: str) -> float | None:
    """Return the finite number at nested keys; None if there is none."""
    value = read_value(mapping, *path)
    if isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST:
        return float(value)
    return None  # also NaN, which compares False


def read_value(mapping: object, *path: str) -> Any:
    """Return the value at nested keys; None if there is none."""
    for key in path:
        mapping = mapping.get(key) if isinstance(mapping, dict) else None
    return mapping


def read_mapping(mapping: object, *path: str) -> dict[str, Any]:
    """Return the mapping at nested keys; an empty one if there is none."""
    value = read_value(mapping, *path)
    return value if isinstance(value, dict) else {}
