"""Imports TensorFlow and keras-hub, with Keras on TensorFlow."""

import importlib
from typing import Any, NamedTuple

from echelon.ground.errors import ConfigError
from echelon.ground.variables import set_default_variables, set_variables

_TESTED = "2.21"


class Library(NamedTuple):
    """The modules: they have no types."""

    tf: Any
    keras: Any
    keras_hub: Any


def import_tensorflow() -> Library:
    """Import the packages. Raises ConfigError if one is missing."""
    set_variables({"KERAS_BACKEND": "tensorflow"})  # Keras reads it once
    set_default_variables({"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"})
    try:
        return Library(*map(importlib.import_module, ("tensorflow", "keras", "keras_hub")))
    except ImportError as error:
        raise ConfigError(
            f"engine=tensorflow needs tensorflow {_TESTED} and keras-hub ({error}); install them as in "
            "docs/tensorflow.md, or use engine=native."
        ) from error
