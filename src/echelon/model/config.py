"""The HF config that `model.config` means. No torch: `transformers` describes models without it."""

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from echelon.errors import ConfigError
from echelon.planner.shape import check_depth

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Fields that `transformers` still takes under a name its config classes no longer list.
_OLDER_FIELDS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "attn_implementation")


def build_config(fields: Mapping[str, Any]) -> "PretrainedConfig":
    """The HF config of `model.config`, with the defaults of `transformers` for what it leaves out.

    Raises:
        ConfigError: the model type is unknown, has no field of that name, or takes no such value.
    """
    from transformers import AutoConfig

    given = dict(fields)
    check_depth(given)
    model_type = given.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type, **given)
        _refuse_unknown_fields(model_type, given, AutoConfig.for_model(model_type))
    except ConfigError:
        raise
    except Exception as error:  # transformers raises whatever it trips over
        reason = " ".join(str(error).split())[:500]
        raise ConfigError(f"model.config is no {model_type} config: {reason}") from error
    return config


def _refuse_unknown_fields(model_type: str, fields: Mapping[str, Any], default: "PretrainedConfig") -> None:
    """`transformers` keeps any field and reads those it knows, so a misspelt one would silently be the default."""
    import transformers

    known = {*vars(default), *dir(type(default)), *default.attribute_map, *_OLDER_FIELDS}
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], n=1)
            hint = f"did you mean {close[0]}?" if close else "leave it out."
            raise ConfigError(
                f"model.config.{name}={fields[name]!r} is not a field of a {model_type} config in transformers "
                f"{transformers.__version__}; {hint}"
            )
