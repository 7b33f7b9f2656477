"""What a rank records of a hang on a real GPU: NCCL's collectives, and a wait for the GPU."""

import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from echelon.learn.distributed.stamp import Stamp
from echelon.run.supervise.hangs import read_records
from echelon.run.training.flight_record import write_record

pytestmark = [pytest.mark.gpu, pytest.mark.device]


def read_record(folder, frame=None):
    write_record(folder, 0, frame)
    [record] = read_records(folder)
    return record


def test_collectives_of_nccl_are_recorded(gpu, tmp_path):
    group = dist.new_group([0], backend="nccl")
    for size in range(1, 4):
        dist.all_reduce(torch.ones(size, 2, device=gpu.device), group=group)
    torch.cuda.synchronize()
    key = f"{dist.distributed_c10d._world.pg_names[group]}: [0]"
    deadline = time.monotonic() + 20  # the watchdog looks for ends every 100 ms
    while True:
        own = [each for each in read_record(tmp_path).collectives if each.group == key]
        if [each.is_over for each in own] == [True] * 3 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert [(each.name, each.sizes, each.is_over) for each in own] == [
        ("all_reduce", [[size, 2]], True) for size in range(1, 4)
    ]


def test_a_wait_for_the_gpu_is_a_wait(gpu, tmp_path):
    torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
    thread = threading.Thread(target=Stamp(gpu.device).wait)
    thread.start()
    time.sleep(0.3)
    frame = sys._current_frames()[thread.ident]
    assert thread.is_alive()
    assert read_record(tmp_path, frame).waits_in == "synchronize"
    thread.join()
    assert read_record(tmp_path, sys._getframe()).waits_in is None
