"""TPUStrategy, where TensorFlow's resolver finds a TPU."""

from typing import Any

from echelon.foreign.tensorflow.library import Library
from echelon.ground.errors import ConfigError, first_line


def find_tpu_strategy(library: Library, name: str | None) -> Any:
    """Resolve a TPU, connect to it, initialize it, and return a TPUStrategy on all of its cores.

    `name`: as TPUClusterResolver takes it; None: the one that TPU_NAME names. Raises ConfigError if none is found.
    """
    tf = library.tf
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, RuntimeError, tf.errors.OpError) as error:
        reason = first_line(error).rstrip(".")
        asked = "TPU_NAME is not set" if name is None else f"tensorflow.tpu={name}"
        raise ConfigError(
            f"tensorflow.strategy=tpu: TensorFlow found no TPU ({asked}): {reason}. Set tensorflow.tpu to "
            "the name or the grpc:// address of a TPU, or to `local` on its own machine; or use "
            "tensorflow.strategy=multi_worker, which trains on CPUs."
        ) from error
    return tf.distribute.TPUStrategy(resolver)
