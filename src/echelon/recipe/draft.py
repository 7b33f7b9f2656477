"""A recipe before it is checked: plain values and the origin of each."""

from typing import Any

from echelon.ground.errors import ConfigError
from echelon.recipe.keys import dotted
from echelon.recipe.yaml_text import KeyPath


class Draft:
    """The nested mapping of a recipe file, which aliases and overrides change in place before it is validated."""

    def __init__(self, data: dict[Any, Any], origins: dict[KeyPath, str], source: str) -> None:
        self.data = data
        self.source = source
        self._origins = origins

    def origin(self, path: KeyPath) -> str:
        """Return the origin of `path` or of the nearest mapping around it: `recipe.yaml, line 3` or `command line`."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return self.source

    def get(self, path: KeyPath) -> Any:
        """Return the value at `path`, or None."""
        value: Any = self.data
        for part in path:
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return None
        return value

    def holds(self, path: KeyPath) -> bool:
        """Return whether a value other than null is given at `path`, or in place of a mapping around it."""
        around = (self.get(path[:length]) for length in range(1, len(path)))
        return self.get(path) is not None or any(value is not None and not isinstance(value, dict) for value in around)

    def remove(self, path: KeyPath) -> None:
        """Remove the key at `path` if it exists."""
        container = self.get(path[:-1])
        if isinstance(container, dict):
            container.pop(path[-1], None)
            self._forget_origins(path)

    def set(self, path: KeyPath, value: Any, origin: str) -> None:
        """Set the value at `path`. Missing mappings are created; a plain value in place of a mapping is replaced."""
        container: Any = self.data
        for depth, part in enumerate(path[:-1]):
            child = container[part] if self._has_entry(container, path[: depth + 1], origin) else None
            if not isinstance(child, dict | list):
                child = container[part] = {}
                self._forget_origins(path[: depth + 1])
                self._origins[path[: depth + 1]] = origin
            container = child
        self._has_entry(container, path, origin)
        container[path[-1]] = value
        self._forget_origins(path)
        self._origins[path] = origin

    def _has_entry(self, container: Any, path: KeyPath, origin: str) -> bool:
        if isinstance(container, dict):
            return path[-1] in container
        if not isinstance(path[-1], int) or path[-1] >= len(container):
            raise ConfigError(
                f"{origin}: {dotted(path)} does not exist; {dotted(path[:-1])} is a list of {len(container)}, "
                "counted from 0."
            )
        return True

    def _forget_origins(self, path: KeyPath) -> None:
        for known in [known for known in self._origins if known[: len(path)] == path]:
            del self._origins[known]
