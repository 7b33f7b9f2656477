"""A pool of worker processes for tests that need real ranks. torch is imported once, not in every test.

Each task gets a fresh gloo group over a fresh file store. A task that fails or hangs costs the pool, which is started
anew for the next one: no state of a broken test reaches another. Workers are forked from a process that has imported
torch and echelon and nothing else has run in, so that neither the four of them nor a new pool import anything again.
"""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from echelon.ground.launch_environment import exported

TIMEOUT_SECONDS = 120.0

WARM: Any = multiprocessing.get_context("forkserver")
"""Forks processes that have imported what training, and the commands in tests/docs, import."""
WARM.set_forkserver_preload(
    [
        "echelon.cli.main", "echelon.run.lifecycle.rank_run", "echelon.tools.inference.evaluate",
        "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
        "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    ]
)  # fmt: skip


class WorkerFailure(AssertionError):
    """A rank raised an error, died or hung; the message contains its traceback."""


def serve(connection: Connection) -> None:
    """Run a worker: import torch, then run tasks until the pool closes the connection."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.uname().sysname == "Linux" else "lo0")
    import torch
    import torch.distributed as dist

    from echelon.learn.distributed.runtime import leave_groups

    torch.set_num_threads(1)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        function, rank, world_size, store_path, arguments = task
        try:
            store = dist.FileStore(store_path, world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            dist.barrier()  # a task may leave the group at once, while another rank still connects to its peers
            result = function(rank, world_size, *arguments)
            dist.barrier()
            leave_groups()
            gc.freeze()  # the next time looks only through what a task has left
            connection.send(("ok", result))
        except BaseException:
            connection.send(("error", traceback.format_exc()))
            return


class WorkerPool:
    """Up to `size` worker processes; `run` calls a function on the first `world_size` of them, as ranks.

    A call may take `seconds`.
    """

    def __init__(self, size: int, seconds: float = TIMEOUT_SECONDS) -> None:
        # In the environment and folder of the session, not of the first test; a fork cannot use the GPU of its parent.
        with exported({"CUDA_VISIBLE_DEVICES": ""}):
            forkserver.ensure_running()
        self._size, self._seconds = size, seconds
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Call `function(rank, world_size, *arguments)` on every rank; return the results by rank.

        `function` must be importable by name. Raises WorkerFailure with the first traceback.
        """
        self._start(world_size)
        with tempfile.TemporaryDirectory() as folder:
            connections = [connection for _, connection in self._workers[:world_size]]
            for rank, connection in enumerate(connections):
                connection.send((function, rank, world_size, os.path.join(folder, "store"), arguments))
            return self._collect(connections)

    def close(self) -> None:
        """End every worker."""
        for process, connection in self._workers:
            connection.close()
            process.terminate()
            process.join()
        self._workers = []

    def _start(self, world_size: int) -> None:
        assert world_size <= self._size
        while len(self._workers) < world_size:
            ours, theirs = WARM.Pipe()
            process = WARM.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, connections: list[Connection]) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self._seconds
        while len(results) < len(connections):
            waiting = [connection for rank, connection in enumerate(connections) if rank not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise WorkerFailure(f"no answer within {self._seconds:.0f} s from {len(waiting)} ranks")
            for connection in ready:
                rank = connections.index(connection)
                try:
                    kind, value = connection.recv()
                except EOFError:
                    kind, value = "error", "the process died"
                if kind == "error":
                    self.close()
                    raise WorkerFailure(f"rank {rank} of {len(connections)}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(connections))]


def run_in_new_processes(
    function: Callable[..., Any], world_size: int, *arguments: Any, seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    """Call `function(rank, world_size, *arguments)` as WorkerPool does, in processes that end after it.

    For libraries that can be set up once in a process.
    """
    with closing(WorkerPool(world_size, seconds)) as pool:
        return pool.run(function, world_size, *arguments)
