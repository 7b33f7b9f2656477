"""Ranks that join a process group as a library does: an existing one, that of torchrun's variables, or one alone."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from echelon.learn.distributed.runtime import Runtime, join_group
from tests.workers import run_in_new_processes

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_existing(rank, world_size):
    return join_group()


def join_anew(rank, world_size, port):
    """Leave the group of the test's workers, and join one as a worker of torchrun, or alone if there is no port."""
    dist.destroy_process_group()
    if port is not None:
        values = (rank, world_size, rank // 2, 2, "127.0.0.1", port)
        os.environ.update({name: str(value) for name, value in zip(NAMES, values, strict=True)})
    runtime = join_group()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return runtime, total.item()


def test_ranks_of_an_existing_group_find_their_place_by_their_machines(workers):
    assert workers.run(join_existing, 2) == [Runtime(rank, 2, rank, 2, CPU, "gloo") for rank in (0, 1)]


def test_ranks_join_by_the_variables_of_torchrun():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = run_in_new_processes(join_anew, 3, port)
    assert found == [(Runtime(rank, 3, rank // 2, 2, CPU, "gloo"), 6) for rank in range(3)]
    assert not found[0][0].is_one_machine


def test_a_process_without_variables_trains_alone():
    [(runtime, total)] = run_in_new_processes(join_anew, 1, None)
    assert (runtime, total) == (Runtime(0, 1, 0, 1, CPU, "gloo"), 1) and runtime.is_one_machine
