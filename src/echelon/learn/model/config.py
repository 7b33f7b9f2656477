"""Builds the HF config from `model.config`. Does not import torch: configs of `transformers` do not need it."""

import difflib
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import ConfigError
from echelon.planner.shape import check_depth

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Legacy field names that `transformers` still accepts although its config classes no longer declare them.
_OLDER_FIELDS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "attn_implementation")


def build_config(fields: Mapping[str, Any]) -> "PretrainedConfig":
    """Build the HF config of `model.config`; omitted fields take the defaults of `transformers`.

    Raises:
        ConfigError: the model type is unknown, it has no such field, or it rejects the value.
    """
    from transformers import AutoConfig

    options = dict(fields)
    check_depth(options)
    model_type = options.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type, **options)
        _refuse_unknown_fields(model_type, options, AutoConfig.for_model(model_type))
    except ConfigError:
        raise
    except Exception as error:  # transformers raises many types of exception
        reason = " ".join(str(error).split())[:500]
        raise ConfigError(f"model.config is not a valid {model_type} config: {reason}") from error
    return config


def _refuse_unknown_fields(model_type: str, fields: Mapping[str, Any], default: "PretrainedConfig") -> None:
    """Refuse misspelt fields: `transformers` accepts any field, so the intended one would silently keep its default."""
    import transformers

    names = {*vars(default), *dir(type(default)), *default.attribute_map, *_OLDER_FIELDS, *_find_read_fields(default)}
    for name in fields:
        if name not in names:
            close = difflib.get_close_matches(name, [key for key in names if not key.startswith("_")], n=1)
            hint = f"did you mean {close[0]}?" if close else "remove it."
            raise ConfigError(
                f"model.config.{name}={fields[name]!r:.80} is not a field of a {model_type} config in transformers "
                f"{transformers.__version__}; {hint}"
            )


def _find_read_fields(default: "PretrainedConfig") -> set[str]:
    """Return the fields that a model reads where a config has them, although its config class does not declare them.

    For example `head_dim` of Qwen3-MoE. They are looked up in the text of the model's code: importing it would import
    torch.
    """
    spec = find_spec(type(default).__module__.replace(".configuration_", ".modeling_"))
    if spec is None or spec.origin is None:
        return set()
    return set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', Path(spec.origin).read_text()))
