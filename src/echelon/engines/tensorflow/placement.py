"""The distribution strategies of TensorFlow, as the section `tensorflow` names them."""

import json
import socket
from typing import Any, NamedTuple

import torch.distributed as dist

from echelon.distributed.mesh import gather_objects
from echelon.engines.tensorflow.library import Library
from echelon.recipe.tensorflow_config import TensorflowConfig
from echelon.supervise.launch_environment import find_rendezvous, set_variables
from echelon.supervise.listening import is_loopback


class Placement(NamedTuple):
    """A strategy, and the number of copies of the model that this process runs under it."""

    strategy: Any
    num_copies: int


def build_placement(library: Library, config: TensorflowConfig, everyone: dist.ProcessGroup) -> Placement:
    """Build the strategy; once in a process, before any other operation of TensorFlow. Collective over `everyone`."""
    tf = library.tf
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
    """An address and a free port of this process for TensorFlow's server."""
    meeting = find_rendezvous()
    host = "127.0.0.1"
    if meeting is not None and not meeting.is_local:
        host = meeting.own_address or socket.gethostbyname(socket.gethostname())
    with socket.create_server((host if is_loopback(host) else "", 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"
