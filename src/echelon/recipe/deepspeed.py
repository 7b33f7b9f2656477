"""The section `deepspeed` of the recipe: settings of the engine of that name."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_json
from echelon.recipe.draft import Draft
from echelon.recipe.limits import Case, Limit
from echelon.recipe.section import Section

DsConfig = Annotated[
    dict[str, Any], WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}], "type": "object"})
]


class DeepspeedConfig(Section):
    """With `engine: deepspeed`: what DeepSpeed keeps in host memory, and a DeepSpeed config of your own."""

    around = "deepspeed."
    limits = (
        Case(
            "deepspeed.offload_optimizer",
            (False,),
            (Limit("deepspeed.offload_parameters", (False,), "lets the device step what the host would keep"),),
            "use deepspeed.offload_optimizer=true",
        ),
    )

    offload_optimizer: bool = Field(
        False,
        description="Keep the master weights and the optimizer state in host memory, where the host steps them.",
    )
    offload_parameters: bool = Field(
        False,
        description="Also keep the parameters in host memory. Needs `offload_optimizer` and `parallel: fsdp`.",
    )
    config: DsConfig = Field(
        default_factory=dict,
        description="A DeepSpeed config: the path of its JSON file, whose content replaces the path when the recipe is "
        "read, or the content. Keys that the recipe sets must agree with it or be `auto`; see docs/engines.md.",
    )


def read_deepspeed(draft: Draft) -> None:
    """Replace the path in `deepspeed.config` by the content of that file. Raises ConfigError if it is not JSON."""
    if isinstance(given := draft.get(("deepspeed",)), str):
        raise ConfigError(
            f"{draft.origin(('deepspeed',))}: deepspeed={given} must be a mapping of keys; to train with DeepSpeed set "
            f"engine: deepspeed and deepspeed: {{config: {given}}}; for ZeRO without it set parallel: zero1, zero2 or "
            "fsdp (ZeRO-3)."
        )
    key = ("deepspeed", "config")
    path = draft.get(key)
    if not isinstance(path, str):
        return
    try:
        content = read_json(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{draft.origin(key)}: deepspeed.config={path} cannot be read ({error}); give the path of a JSON file with "
            "a DeepSpeed config."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{draft.origin(key)}: deepspeed.config={path} is not a JSON object of DeepSpeed's settings.")
    draft.set(key, content, path)
