"""TensorFlow's packages and its distribution strategies, as the section `tensorflow` names them."""

import importlib
import json
import socket
from typing import Any, NamedTuple

import torch.distributed as dist

from echelon.ground.errors import ConfigError, first_line
from echelon.ground.launch_environment import find_rendezvous
from echelon.ground.sockets import find_free_port, is_loopback
from echelon.ground.variables import set_default_variables, set_variables
from echelon.learn.distributed.objects import gather_objects
from echelon.recipe.operation import TensorflowConfig


class Library(NamedTuple):
    """The modules: they have no types."""

    tf: Any
    keras_hub: Any


def import_tensorflow() -> Library:
    """Import the packages. Raises ConfigError if one is missing."""
    set_variables({"KERAS_BACKEND": "tensorflow"})  # Keras reads it once
    set_default_variables({"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"})
    try:
        return Library(*map(importlib.import_module, ("tensorflow", "keras_hub")))
    except ImportError as error:
        raise ConfigError(
            f"engine=tensorflow needs tensorflow 2.21 and keras-hub ({error}); install them as in docs/tensorflow.md, "
            "or use engine=native."
        ) from error


class Placement(NamedTuple):
    """A strategy, and the number of copies of the model that this process runs under it.

    `varies`: whether its functions may take batches of any shape without being compiled again.
    """

    strategy: Any
    num_copies: int
    varies: bool = True


def build_placement(library: Library, config: TensorflowConfig, everyone: dist.ProcessGroup) -> Placement:
    """Build a strategy that copies the model; once in a process, before any other operation of TensorFlow. Collective.

    Raises ConfigError for `tpu` where there is none.
    """
    tf = library.tf
    if config.strategy == "tpu":
        strategy = find_tpu_strategy(library, config.tpu)
        return Placement(strategy, strategy.num_replicas_in_sync, varies=False)
    if config.strategy == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        devices = [tf.config.LogicalDeviceConfiguration()] * config.replicas
        tf.config.set_logical_device_configuration(cpu, devices)
        names = [f"CPU:{number}" for number in range(config.replicas)]
        return Placement(tf.distribute.MirroredStrategy(names), config.replicas)
    if dist.get_world_size(everyone) == 1:
        return Placement(tf.distribute.get_strategy(), 1)
    rank, workers = dist.get_rank(everyone), gather_objects(_find_address(), everyone)
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    set_variables({"TF_CONFIG": json.dumps(cluster)})
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return Placement(tf.distribute.MultiWorkerMirroredStrategy(communication_options=options), 1)


def _find_address() -> str:
    """An address and a free port of this process for a server of TensorFlow."""
    rendezvous = find_rendezvous()
    host = "127.0.0.1"
    if rendezvous is not None and not rendezvous.is_local:
        host = rendezvous.own_address or socket.gethostbyname(socket.gethostname())
    return f"{host}:{find_free_port(host if is_loopback(host) else '')}"


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
