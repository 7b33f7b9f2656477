"""The distribution strategies of TensorFlow, as the section `tensorflow` names them, and where a TPU is found."""

import json
import socket
from typing import Any, NamedTuple

import torch.distributed as dist

from echelon.foreign.tensorflow.library import Library
from echelon.ground.errors import ConfigError, first_line
from echelon.ground.launch_environment import find_rendezvous
from echelon.ground.sockets import find_free_port, is_loopback
from echelon.ground.variables import set_variables
from echelon.learn.distributed.objects import gather_objects
from echelon.recipe.tensorflow_config import TensorflowConfig


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


class Cluster(NamedTuple):
    """The servers of ParameterServerStrategy in this process, and on rank 0 what directs all of them.

    `servers`: kept, because a server ends with its object. `coordinator` is a ClusterCoordinator; None on other ranks.
    """

    servers: list[Any]
    coordinator: Any | None


def start_cluster(library: Library, config: TensorflowConfig, everyone: dist.ProcessGroup) -> Cluster:
    """Start a worker in every process and a parameter server in the first ones; rank 0 connects to all. Collective."""
    tf = library.tf
    rank = dist.get_rank(everyone)
    addresses = gather_objects([_find_address() for _ in range(3)], everyone)
    chief, workers, served = (list(column) for column in zip(*addresses, strict=True))
    spec = tf.train.ClusterSpec({"chief": chief[:1], "worker": workers, "ps": served[: config.servers]})
    jobs = ["worker", "ps"] if rank < config.servers else ["worker"]
    servers = [tf.distribute.Server(spec, job_name=job, task_index=rank, protocol="grpc") for job in jobs]
    dist.barrier(everyone)
    if rank > 0:
        return Cluster(servers, None)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return Cluster(servers, tf.distribute.coordinator.ClusterCoordinator(strategy))


def _find_address() -> str:
    """An address and a free port of this process for a server of TensorFlow."""
    meeting = find_rendezvous()
    host = "127.0.0.1"
    if meeting is not None and not meeting.is_local:
        host = meeting.own_address or socket.gethostbyname(socket.gethostname())
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
