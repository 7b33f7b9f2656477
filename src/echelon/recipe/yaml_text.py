"""YAML for recipes: 2e9 is a number, `no` is a string, keys are unique, and each key has a line number."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import read_text

KeyPath = tuple[str | int, ...]
"""Where a value is in a recipe: the keys around it, and positions in lists."""

LONGEST_SHOWN = 80
MAX_TEXT_BYTES = 2**20
MAX_PLACES = 50_000
MAX_DEPTH = 100
MAX_DIGITS = 40

_TAG = "tag:yaml.org,2002:"
# (type, pattern, possible first characters): the scalars of YAML 1.2, and `<<` to merge an anchored mapping.
_SCALARS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
)


class _TooManyError(Exception):
    """A text has more than MAX_PLACES entries."""


class _RecipeLoader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2. In PyYAML's YAML 1.1, 2e9 and 3e-4 are strings, `no` is a boolean, 1:30 a number.

    Stops after MAX_PLACES entries, before it has read the rest of a text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = 0

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_nodes += 1
        if self._num_nodes > 2 * MAX_PLACES:  # an entry of a mapping is two nodes
            raise _TooManyError
        return super().compose_node(parent, index)

    @override
    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level > 2 * MAX_DEPTH:  # PyYAML reads ahead, for a time that grows with the square of the depth
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        digits = node.value.replace("_", "")
        return int(digits, 0 if digits.startswith(("0x", "0o")) else 10)

    def construct_decimal(self, node: yaml.ScalarNode) -> float:
        digits = node.value.replace("_", "").lower()
        return math.nan if digits == ".nan" else float(digits.replace(".inf", "inf"))


class _RecipeDumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as another type."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


class _DocumentDumper(_RecipeDumper):
    """Writes strings of several lines as a block after `|`."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar(_TAG + "str", text, style="|" if "\n" in text else None)


_DocumentDumper.add_representer(str, _DocumentDumper.represent_text)

_UNTEXTUAL = re.compile("[\0\ud800-\udfff]")
_CONTAINERS = {_TAG + name for name in ("map", "seq")}
_TEXTS = {_TAG + "str": [re.compile(r".*", re.DOTALL)]}
for _type, _pattern, _ in _SCALARS:
    _TEXTS.setdefault(_TAG + _type, []).append(re.compile(rf"(?:{_pattern})"))

_RecipeLoader.yaml_implicit_resolvers = {}
for _type, _pattern, _first_characters in _SCALARS:
    for _side in (_RecipeLoader, _RecipeDumper):
        _side.add_implicit_resolver(_TAG + _type, re.compile(rf"^(?:{_pattern})$"), _first_characters)
_RecipeLoader.add_constructor(_TAG + "int", _RecipeLoader.construct_whole)
_RecipeLoader.add_constructor(_TAG + "float", _RecipeLoader.construct_decimal)


def parse_yaml(text: str, source: str) -> tuple[Any, dict[KeyPath, str]]:
    """Return the value of a YAML document, and the position of each key: `recipe.yaml, line 3`.

    Raises ConfigError, with `source` and the line, for invalid YAML, a key given twice, a tag that would construct an
    object, nesting deeper than MAX_DEPTH, more than MAX_PLACES entries after anchors are expanded, and a text of more
    than MAX_TEXT_BYTES.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise ConfigError(f"{source}: this YAML is larger than {render_bytes(MAX_TEXT_BYTES)}; write less.")
    try:
        loader = _RecipeLoader(text)
        if (node := loader.get_single_node()) is None:
            return None, {}
        origins = _find_origins(loader, node, source)
        return _unshared(loader.construct_document(node)), origins
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = shorten(str(error.problem))
        raise ConfigError(f"{source}{line}: this is not valid YAML: {problem}; correct it.") from None
    except _TooManyError:
        raise ConfigError(f"{source}: this YAML has more than {MAX_PLACES:,} entries; write fewer.") from None
    except RecursionError:
        raise ConfigError(f"{source}: lists and mappings are nested more than {MAX_DEPTH} deep; nest less.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: this is not valid YAML: {shorten(str(error))}; correct it.") from None


def read_table(path: Path) -> Any:
    """Return the content of a YAML file of echelon's own that stands beside the code which uses it."""
    return _RecipeLoader(read_text(path)).get_single_data()


def render_yaml(value: Any) -> str:
    """Return plain values as YAML text, with keys in their order. `parse_yaml` returns the same values."""
    return _dump(value, default_flow_style=None, width=100)


def render_documents(values: Sequence[Any]) -> str:
    """Return several plain values as the documents of one YAML text in block style, for other tools."""
    text: str = yaml.dump_all(
        values, Dumper=_DocumentDumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1_000_000
    )
    return text


def render_inline(value: Any) -> str:
    """Return a value as YAML on one line."""
    return _dump(value, default_flow_style=True, width=1_000_000).removesuffix("...\n").strip()


def show_value(value: Any) -> str:
    """Return a value as the user would write it, shortened to a line, for messages."""
    return shorten(render_inline(value))


def shorten(text: str, most: int = LONGEST_SHOWN) -> str:
    """Shorten a text to this many characters, by default those of a line."""
    return text if len(text) <= most else text[: most - 3] + "..."


def _dump(value: Any, default_flow_style: bool | None, width: int) -> str:
    text: str = yaml.dump(
        value, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True,
        default_flow_style=default_flow_style, width=width,
    )  # fmt: skip
    return text


def _unshared(value: Any) -> Any:
    """Return a copy without shared objects. YAML anchors share them, so a change of one would change the others."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _find_origins(loader: _RecipeLoader, root: yaml.Node, source: str) -> dict[KeyPath, str]:
    origins: dict[KeyPath, str] = {}

    def check(node: yaml.Node, around: tuple[yaml.Node, ...]) -> None:
        if fault := _find_fault(node, around, len(origins)):
            raise ConfigError(f"{source}, line {node.start_mark.line + 1}: {fault}.")

    def visit(node: yaml.Node, path: KeyPath, around: tuple[yaml.Node, ...] = ()) -> None:
        check(node, around)
        around = (*around, node)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                origins[(*path, index)] = f"{source}, line {item.start_mark.line + 1}"
                visit(item, (*path, index), around)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[Any, str] = {}
            for key_node, value_node in node.value:
                line = f"{source}, line {key_node.start_mark.line + 1}"
                if not isinstance(key_node, yaml.ScalarNode):
                    raise ConfigError(f"{line}: a key must be a word, not a list or a mapping; put it in quotes.")
                check(key_node, around)
                key = "<<" if key_node.tag == _TAG + "merge" else loader.construct_object(key_node, deep=True)
                if key in lines:
                    raise ConfigError(f"{line}: {key} is given twice (first at {lines[key]}); keep one.")
                lines[key] = origins[(*path, key)] = line
                visit(value_node, (*path, key), around)

    visit(root, ())
    return origins


def _find_fault(node: yaml.Node, around: tuple[yaml.Node, ...], num_places: int) -> str | None:
    """Return why a node is not a plain value of an acceptable size, or None."""
    if node in around:
        return "this anchor contains itself; write it out"
    if len(around) > MAX_DEPTH:
        return f"lists and mappings are nested more than {MAX_DEPTH} deep; nest less"
    if num_places > MAX_PLACES:
        return f"with its anchors written out this has more than {MAX_PLACES:,} entries; write fewer"
    if not isinstance(node, yaml.ScalarNode):
        plain = node.tag in _CONTAINERS
    else:
        plain = any(pattern.fullmatch(node.value) for pattern in _TEXTS.get(node.tag, ()))
        if _UNTEXTUAL.search(node.value):
            return "a string has a character that cannot be stored in a file; remove it"
        if plain and node.tag == _TAG + "int" and len(node.value) > MAX_DIGITS:
            return f"{show_value(node.value)} has more than {MAX_DIGITS} digits; write fewer"
    return None if plain else f"this is not valid YAML: {shorten(node.tag)} does not match its value; remove the tag"
