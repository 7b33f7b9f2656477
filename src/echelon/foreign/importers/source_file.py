"""Read another tool's file as a flat mapping of its keys, and detect the tool; why some keys are not imported."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.plugins import Plugins
from echelon.ground.stored import read_bytes
from echelon.recipe.yaml_text import parse_yaml, read_table, show_value

IMPORTERS = Plugins[Callable[..., None]]("importers", "--from")
"""The importers by tool: functions of (ledger, path, amounts, trainer), which carry keys over to a recipe."""

TABLE: Mapping[str, Any] = read_table(Path(__file__).with_name("tools.yaml"))
"""What is known of each tool."""
_GROUPS: tuple[str, ...] = tuple(TABLE["groups"].split())
_OURS = ("run", "model", "data", "train")
_ENDED = (
    "{path} is {what}, which import does not read any more, because {why} has ended; write a recipe, beginning with "
    "`echelon init`; docs/import.md#formats-that-have-ended lists its keys."
)
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle")

_KEYS = read_table(Path(__file__).with_name("keys.yaml"))


def _by_name(fate: str) -> Mapping[str, str]:
    return {name: row["why"] for row in _KEYS[fate] for name in row["keys"].split()}


NEEDLESS = _by_name("needless")
LOST = _by_name("lost")
REFUSED = _by_name("refused")
SETTINGS: tuple[str, ...] = tuple(_KEYS["settings"].split())
"""Prefixes of settings of features that another key enables, and that are refused by that key if unsupported."""

DEFAULTS: Mapping[str, object] = _KEYS["defaults"]
"""Values that have no effect."""

PLUGINS: frozenset[str] = frozenset(_KEYS["plugins"].split())
"""Axolotl plugins that do not change the result."""


def read_foreign(path: Path) -> dict[str, Any]:
    """Read the keys of a YAML or JSON file and flatten its groups: `lora_config: {r: 8}` becomes `lora_config.r`.

    Raises ConfigError for a file that cannot be read, is a pickle, is not a mapping, is a recipe, does not train, or
    has a format that has ended.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give the YAML or JSON file of another tool."
        ) from None
    if path.suffix in _PICKLES or content[:1] == b"\x80" or content[:4] == b"PK\x03\x04":
        raise ConfigError(
            f"{path} is a Python pickle, which runs code when it is loaded; in the program that wrote it, save the "
            "arguments as text, open('training_args.json', 'w').write(training_args.to_json_string()), and import "
            "that file."
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; import reads YAML and JSON.") from None
    if path.suffix == ".toml":
        raise ConfigError(_ENDED.format(path=path, what="TOML", why="that format of torchtitan"))
    parsed = _parse(text, path)
    if not isinstance(parsed, dict) or not parsed:
        raise ConfigError(f"{path} is not a mapping of keys; give the configuration file of a training tool.")
    if all(isinstance(parsed.get(key), dict) for key in _OURS):
        raise ConfigError(f"{path} is already an echelon recipe; train it with: echelon train {path}")
    if any(isinstance(section, dict) and "_component_" in section for section in parsed.values()):
        raise ConfigError(_ENDED.format(path=path, what="a file of torchtune", why="that tool"))
    flat = _flatten(parsed)
    _check_training(flat, path)
    return flat


def _check_training(given: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for a file that does not train."""
    trains = given.get("do_train") or (given.get("stage") and not given.get("do_predict"))
    for key, reason in TABLE["without_training"].items():
        if given.get(key) and not trains:
            raise ConfigError(f"{path}: {key}: {show_value(given[key])}: {reason}.")


def _parse(text: str, path: Path) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}.") from None
    return parse_yaml(text, str(path))[0]


def _read_words(key: str, value: Any) -> Any:
    """Convert yes, no, on and off to booleans, as in YAML 1.1, which these tools use. `eval_strategy: no` stays."""
    if isinstance(value, dict):
        return {inner: _read_words(str(inner), item) for inner, item in value.items()}
    if isinstance(value, list):
        return [_read_words(key, item) for item in value]
    is_word = not isinstance(value, str) or key.endswith("strategy") or key == "include_num_input_tokens_seen"
    return value if is_word else {"yes": True, "on": True, "no": False, "off": False}.get(value.lower(), value)


def _flatten(given: Mapping[Any, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in _read_words("", given).items():
        if str(key) in _GROUPS and isinstance(value, dict):
            flat.update({f"{key}.{inner}": item for inner, item in value.items()})
        else:
            flat[str(key)] = value
    return flat


def find_beside(folder: Path, name: str) -> Path | None:
    """Find a relative path in the working directory, in `folder` or in the parents of `folder`; None if not found."""
    return next((base / name for base in (Path(), folder, *folder.resolve().parents) if (base / name).exists()), None)


def detect_tool(given: Mapping[str, Any], path: Path) -> str:
    """Detect the tool from the keys of a file. Raises ConfigError if the keys match no tool."""
    names = {name.rpartition(".")[2] for name in given}
    decisive, score = (
        {tool: len(names & set(row[kind].split())) for tool, row in TABLE["tools"].items()}
        for kind in ("decisive", "signs")
    )
    # The files of these tools also have keys of others.
    for tool in ("llamafactory-v1", "ms-swift"):
        if decisive[tool]:
            return tool
    # The other tools also have keys of TrainingArguments, so hf is tried last.
    for tool in sorted(("axolotl", "llamafactory"), key=lambda candidate: -score[candidate]):
        if decisive[tool]:
            return tool
    if score["hf"] or decisive["hf"] or {"r", "peft_type", "target_modules"} <= names:
        return "hf"
    raise ConfigError(
        f"{path}: the keys do not match any of {', '.join(IMPORTERS)}; name the tool, for example --from axolotl."
    )
