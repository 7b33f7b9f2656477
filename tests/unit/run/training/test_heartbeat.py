"""A hang is noticed when beats stop, and only then; what a rank records of it: NCCL's collectives beside gloo's."""

import json
import logging
import os
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import CellType, FunctionType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.learn.distributed.stamp import Stamp
from echelon.learn.model.compilation import compilations_told
from echelon.run.supervise import hangs
from echelon.run.supervise.hangs import Collective, WaitingPeers, WatchedGroup, explain_hang, read_records
from echelon.run.training import heartbeat
from echelon.run.training.flight_record import write_record
from echelon.run.training.heartbeat import Heartbeat


@pytest.fixture
def timeouts(monkeypatch):
    monkeypatch.setattr(heartbeat, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat.faulthandler, "dump_traceback", lambda *arguments, **options: None)
    return []


def watch(timeouts, limit=0.2):
    heartbeat = Heartbeat(limit, lambda what, seconds: (timeouts.append((what, seconds)), heartbeat.stop()))
    heartbeat.start()
    return heartbeat


def test_missing_beats_call_on_timeout(timeouts) -> None:
    heartbeat = watch(timeouts)
    heartbeat.beat("step 7")
    time.sleep(0.6)
    assert timeouts == [("step 7", 0.2)]


@pytest.mark.parametrize("way", ["beats", "rests", "nested rests", "ended", "no limit"])
def test_no_timeout_with_beats_or_rests_or_after_the_end(timeouts, way) -> None:
    heartbeat = watch(timeouts, None if way == "no limit" else 0.2)
    if way == "ended":
        heartbeat.stop()
    if way == "rests":
        with heartbeat.resting():
            time.sleep(0.6)
    if way == "nested rests":
        with heartbeat.resting():
            with heartbeat.resting():  # a compilation during a save
                pass
            time.sleep(0.6)
    for _ in range(30 if way == "beats" else 0):
        heartbeat.beat("step")
        time.sleep(0.02)
    if way in ("ended", "no limit"):
        time.sleep(0.6)
    heartbeat.stop()
    assert timeouts == []


def pass_seconds(heartbeat, seconds):
    """Let time pass, half a second at a time, until the limit is exceeded; return the seconds passed and the limit."""
    for tick in range(1, int(2 * seconds) + 1):
        if (limit := heartbeat.find_late()) is not None:
            return tick / 2, limit
    return seconds, None


def test_the_derived_limit(tmp_path, caplog) -> None:
    """600 s for ten steps, then 20 times the longest step, and at least 120 s; a rest is no part of a step."""
    caplog.set_level(logging.INFO)
    heartbeat = Heartbeat("auto", peers=WaitingPeers(tmp_path, 0, range(1)))
    heartbeat.beat("step 1")
    for number in range(2, 11):
        assert pass_seconds(heartbeat, 3) == (3, None)
        heartbeat.step(number)
    assert heartbeat.limit == 600 and not caplog.messages
    with heartbeat.resting():
        assert pass_seconds(heartbeat, 1000) == (1000, None)
    heartbeat.step(11)
    assert heartbeat.limit == 120
    assert [each for each in caplog.messages if "from now on 120 s without progress" in each] == caplog.messages
    assert pass_seconds(heartbeat, 6.5) == (6.5, None)
    heartbeat.step(12)
    assert pass_seconds(heartbeat, 500) == (130.5, 130)
    assert len(caplog.messages) == 1


def test_the_derived_limit_without_shared_files_stays_at_its_first_value() -> None:
    heartbeat = Heartbeat("auto")
    for number in range(12):
        heartbeat.step(number)
    assert pass_seconds(heartbeat, 1000) == (600.5, 600)


def test_a_rank_waits_for_a_peer_that_rests(tmp_path, monkeypatch) -> None:
    """A quarter of the limit passes before a rank looks; then no time counts until its peer goes on."""
    waiting, saving = (Heartbeat(8, peers=WaitingPeers(tmp_path, rank, range(2))) for rank in (0, 1))
    with saving.resting():
        assert saving.find_late() is None
        assert pass_seconds(waiting, 100) == (100, None)
    assert saving.find_late() is None and not list(tmp_path.iterdir())
    assert pass_seconds(waiting, 100) == (6, 8)


def test_a_rank_that_others_wait_for_in_a_save_is_not_excused_by_them(tmp_path) -> None:
    """A rank that has passed through the save waits for a peer still in it; one that never began it is late."""
    saving, late = (Heartbeat(8, peers=WaitingPeers(tmp_path, rank, range(2))) for rank in (0, 1))
    for expected in ((100, None), (8.5, 8)):
        with saving.resting_together():
            assert saving.find_late() is None
            if expected[1] is None:
                with late.resting_together():
                    pass
            assert pass_seconds(late, 100) == expected
            late.beat("step 2")


def test_a_peer_that_is_suspended_at_rest_is_not_waited_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hangs, "_STALE_SECONDS", 0.0)
    WaitingPeers(tmp_path, 1, range(2)).show_rest(0)
    assert pass_seconds(Heartbeat(8, peers=WaitingPeers(tmp_path, 0, range(2))), 100) == (8.5, 8)


def test_a_rank_that_still_rests_renews_its_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hangs, "_RENEWAL_SECONDS", 0.0)
    resting = WaitingPeers(tmp_path, 1, range(2))
    resting.show_rest(0)
    os.utime(tmp_path / "resting-1", (1, 1))
    resting.show_rest(0)
    assert (tmp_path / "resting-1").stat().st_mtime > 1


def test_ranks_with_different_limits_find_a_hang_together(tmp_path) -> None:
    """The second of them takes over the limit of the first, as soon as it has waited for a while itself."""
    first, second = (
        Heartbeat(limit, peers=WaitingPeers(tmp_path, rank, range(2))) for rank, limit in ((0, 8), (1, 400))
    )
    assert pass_seconds(first, 100) == (8.5, 8)
    assert pass_seconds(second, 100) == (31, 8)
    WaitingPeers(tmp_path, 0, range(2)).begin()  # a new process of rank 0 knows nothing of the old hang
    assert pass_seconds(Heartbeat(400, peers=WaitingPeers(tmp_path, 1, range(2))), 100) == (100, None)


def test_unresponsive_ranks_are_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hangs, "_ANSWER_SECONDS", 0.3)
    found = {}
    ranks = [
        threading.Thread(
            target=lambda rank=rank: found.update({rank: WaitingPeers(tmp_path, rank, range(4)).find_unresponsive()})
        )
        for rank in (0, 2)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert found == {0: [1, 3], 2: [1, 3]}


def test_compilations_are_told() -> None:
    told = []

    def build(graph, inputs):
        told.append("compiles")
        return graph.forward

    try:
        with compilations_told(lambda: told.append("begin"), lambda: told.append("end")):
            compiled = torch.compile(lambda x: x + 1, backend=build, dynamic=False)
            compiled(torch.ones(2))
            compiled(torch.ones(2))
            assert told == ["begin", "compiles", "end"]
        compiled(torch.ones(3))
        assert told == ["begin", "compiles", "end", "compiles"]
    finally:
        torch.compiler.reset()


LATER = 4_000_000_000_000_000_000  # after every real entry, in nanoseconds


def entry(name, number, state="completed", group="1", is_p2p=False, created=LATER, sizes=((8,),)):
    """An entry as NCCL's recorder writes it: `retired` only after the watchdog has seen the end."""
    return {
        "collective_seq_id": number, "input_dtypes": ["BFloat16"] * len(sizes), "input_sizes": sizes, "is_p2p": is_p2p,
        "op_id": number, "output_dtypes": ["BFloat16"] * len(sizes), "output_sizes": sizes, "p2p_seq_id": 7, "pg_id": 1,
        "process_group": [group, "mesh_dp_shard"], "profiling_name": f"nccl:{name}", "record_id": number,
        "retired": state == "completed", "state": state, "thread_id": "139715108453248", "thread_name": "python",
        "time_created_ns": created, "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0,
        "timeout_ms": 900000,
    }  # fmt: skip


@pytest.fixture
def one_rank():
    """This process as the only rank of two gloo groups."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield dist.new_group([0])
    dist.destroy_process_group()


@pytest.fixture
def record(one_rank, tmp_path, monkeypatch):
    """A function that writes this rank's record beside entries of NCCL, and returns it.

    Groups of earlier tests in this process had the same names, so their entries are left out.
    """
    begun, dump_all = time.time_ns(), c10d._dump_fr_trace_json

    def dump_own(collectives, active):
        dump = json.loads(dump_all(collectives, active))
        entries = [entry for entry in dump.get("entries", []) if int(entry["time_created_ns"]) >= begun]
        return json.dumps(dump | {"entries": entries}).encode()

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", dump_own)

    def write(*entries):
        dump = {"comm_lib_version": "2.28.9", "entries": entries, "pg_config": {}, "pg_status": {}, "version": "2.10"}
        text = json.dumps(dump).encode()
        monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda collectives, active: text, raising=False)
        write_record(tmp_path, 0)
        [found] = read_records(tmp_path)
        return found

    return write


def test_collectives_of_nccl_are_recorded_beside_those_of_gloo(one_rank, record):
    dist.all_reduce(torch.ones(3, 2), group=one_rank)
    name = dist.distributed_c10d._world.pg_names[one_rank]
    key = f"{name}: [0]"
    found = record(
        entry("_reduce_scatter_base", 11, "started", name, created=LATER + 1),
        entry("_all_gather_base", 10, group=name),
        entry("all_reduce", 3, group="of a destroyed group"),
    )
    gloo, *nccl = found.collectives[-3:]
    assert (gloo.group, gloo.name, gloo.sizes) == (key, "all_reduce", [[3, 2]])
    assert nccl == [
        Collective(key, 10, "_all_gather_base", [[8]], True),
        Collective(key, 11, "_reduce_scatter_base", [[8]], False),
    ]
    assert found.waits_in == "_reduce_scatter_base"


def test_a_batch_of_nccl_is_one_collective_and_its_messages_none(record):
    """Only the entry at the end of a batch says whether it is over; after messages it repeats a number."""
    found = record(
        entry("all_reduce", 20),
        entry("send 0->1", 20, "scheduled", is_p2p=True, created=LATER + 1),
        entry("recv 0<-1", 20, "scheduled", is_p2p=True, created=LATER + 2),
        entry("coalesced", 20, "started", created=LATER + 3, sizes=()),
        entry("_all_gather_base", 21, "scheduled", created=LATER + 4),
        entry("_all_gather_base", 21, "scheduled", created=LATER + 5),
        entry("coalesced", 21, created=LATER + 6, sizes=()),
    )
    assert [(each.number, each.name, each.is_over) for each in found.collectives if each.number >= 20] == [
        (20, "all_reduce", True), (21, "coalesced", True),
    ]  # fmt: skip
    assert found.waits_in is None


class Event:
    """torch.cuda.Event with its own Python code around another driver, which a lock stands for."""

    def __init__(self, lock):
        class Driver:
            synchronize = staticmethod(lock.acquire)

        class Wrapper(Driver):
            pass

        cell = (CellType(Wrapper),)
        Wrapper.synchronize = FunctionType(torch.cuda.streams.Event.synchronize.__code__, {}, closure=cell)
        self.synchronize = Wrapper().synchronize

    def record(self):
        pass


def wait_for_stamp(lock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(lock))
    return Stamp(torch.device("cuda")).wait


def wait_for_gpu(lock, monkeypatch):
    """torch.cuda.synchronize around another driver."""
    driver = SimpleNamespace(_cuda_synchronize=lock.acquire)
    device = SimpleNamespace(device=lambda device: nullcontext())
    names = {"_lazy_init": lambda: None, "torch": SimpleNamespace(cuda=device, _C=driver)}
    return FunctionType(torch.cuda.synchronize.__code__, names, argdefs=(None,))


def wait_in_own_code(lock, monkeypatch):
    def synchronize():
        lock.acquire()

    return synchronize


@pytest.mark.parametrize(
    ("prepare", "waits_in"), [(wait_for_stamp, "synchronize"), (wait_for_gpu, "synchronize"), (wait_in_own_code, None)]
)
def test_a_wait_for_the_gpu_is_no_work(prepare, waits_in, one_rank, tmp_path, monkeypatch):
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=prepare(lock, monkeypatch), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while (frame := sys._current_frames()[thread.ident]).f_code.co_name != "synchronize":
        assert time.monotonic() < deadline, "the thread does not wait"
    write_record(tmp_path, 0, frame)
    lock.release()
    thread.join()
    [record] = read_records(tmp_path)
    assert record.waits_in == waits_in


def test_the_verdict_names_the_rank_that_nccl_waits_for(record):
    """Two ranks read a value of their GPU, which waits for the third: that one is in code of its own."""
    first = record(entry("all_reduce", 4), entry("_all_gather_base", 5, "started", created=LATER + 1))
    [key] = {each.group for each in first.collectives if each.name == "_all_gather_base"}
    groups = {key: WatchedGroup("dp_shard", [0, 1, 2])}
    first = replace(first, groups=groups, collectives=[each for each in first.collectives if each.group == key])
    late = replace(first, rank=2, place="data.py:7 (read)", waits_in=None, collectives=first.collectives[:-1])
    verdict = explain_hang([first, replace(first, rank=1), late])
    assert verdict == (
        "rank 2 never entered _all_gather_base 5 of group dp_shard (ranks 0, 1, 2); it is at data.py:7 (read)"
    )
