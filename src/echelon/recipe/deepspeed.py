"""The section `deepspeed` of the recipe: settings of the engine of that name."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from echelon.errors import ConfigError
from echelon.recipe.draft import Draft
from echelon.recipe.section import Section

DsConfig = Annotated[
    dict[str, Any], WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}], "type": "object"})
]


class DeepspeedConfig(Section):
    """With `engine: deepspeed`: what DeepSpeed keeps in host memory, and a DeepSpeed config of your own."""

    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="What is kept in host memory: with `optimizer` the master weights and the optimizer state, which "
        "the host steps; with `all`, which needs `parallel: fsdp`, also the parameters.",
    )
    config: DsConfig = Field(
        default_factory=dict,
        description="A DeepSpeed config: the path of its JSON file, whose content replaces the path when the recipe is "
        "read, or the content. Keys that the recipe sets must agree with it or be `auto`; see docs/engines.md.",
    )


def read_deepspeed(draft: Draft) -> None:
    """Replace the path in `deepspeed.config` by the content of that file. Raises ConfigError if it is not JSON."""
    key = ("deepspeed", "config")
    path = draft.get(key)
    if not isinstance(path, str):
        return
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{draft.origin(key)}: deepspeed.config={path} cannot be read ({error}); give the path of a JSON file with "
            "a DeepSpeed config."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{draft.origin(key)}: deepspeed.config={path} is not a JSON object of DeepSpeed's settings.")
    draft.set(key, content, path)
