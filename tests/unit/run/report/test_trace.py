"""Traces written by hand: every part of a step is exact. And what the recorder writes is read again."""

import gzip
import json
import os
import random
import subprocess
import sys

import pytest
import torch

from echelon.run.report.blocks import Table
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report
from echelon.run.report.trace import PARTS, analyse, partition, read_traces
from echelon.run.training.profiler import Recorder
from tests.fuzz.judge import run_in_little_memory

# Of NCCL's: what is sent during 250 to 550 is exposed from 400 on. In microseconds, as start and end.
ON_GPU = [
    ("echelon step 7", "user_annotation", 0, 1000, {}),
    ("echelon step 7", "gpu_user_annotation", 90, 660, {}),
    ("echelon data", "user_annotation", 700, 800, {}),
    ("aten::mm", "cpu_op", 10, 20, {}),
    ("sm90_xmma_gemm_bf16bf16_bf16f32", "kernel", 100, 300, {}),
    ("void flash_fwd_kernel<float>", "kernel", 300, 350, {}),
    ("vectorized_elementwise_kernel", "kernel", 350, 400, {}),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 250, 550,
     {"Collective name": "allreduce", "In msg nelems": 1_000_000, "dtype": "BFloat16", "Group size": 4,
      "Process Group Ranks": "[0, 1, 2, 3]"}),
    ("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 600, 650, {}),
]  # fmt: skip
# Of gloo's: the operators of two threads, one inside another, and the sends of a third.
ON_CPU = [
    ("echelon step 7", "user_annotation", 0, 1000, {}),
    ("echelon data", "user_annotation", 0, 100, {}),
    ("aten::linear", "cpu_op", 100, 320, {}),
    ("aten::addmm", "cpu_op", 110, 310, {}),
    ("aten::copy_", "cpu_op", 120, 130, {}),
    ("aten::scaled_dot_product_attention", "cpu_op", 320, 370, {}),
    ("aten::bmm", "cpu_op", 330, 360, {}),
    ("gloo:all_reduce", "user_annotation", 300, 700, {"Input Dims": [[1000, 250]], "Input type": ["float"]}),
    ("gloo:all_reduce", "user_annotation", 2000, 2100, {"Input Dims": [[5]], "Input type": ["float"]}),
]


def build(events, **more):
    rows = [
        {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": end - start, "pid": 1, "tid": kind, "args": args}
        for name, kind, start, end, args in events
    ]
    return {"traceEvents": [*rows, {"ph": "M", "name": "process_name"}, {"ph": "X", "ts": "?"}, 5]} | more


def microseconds(parts):
    return {name: round(1e6 * seconds, 6) for name, seconds in parts.items()}


def test_a_trace_of_nccl_is_divided_exactly():
    trace = analyse(build(ON_GPU), rank=3)
    [step] = trace.steps
    assert (trace.rank, step.step, round(step.seconds, 9)) == (3, 7, 0.001)
    assert microseconds(step.parts) == {
        "attention": 50, "matrix products": 200, "copies": 50, "other kernels": 50,
        "exposed communication": 150, "waiting for data": 100, "host": 400,
    }  # fmt: skip
    assert round(1e6 * step.hidden, 6) == 150
    [sent] = trace.collectives
    assert (sent.name, sent.count, sent.bytes, round(1e6 * sent.seconds, 6)) == ("all_reduce", 1, 2_000_000, 300)
    assert sent.bus_rate == pytest.approx(2_000_000 * 2 * 3 / 4 / 300e-6) and sent.ends == (0, 3)
    assert trace.kernels[0][0] == "sm90_xmma_gemm_bf16bf16_bf16f32"


def test_a_trace_of_gloo_is_divided_exactly():
    groups = {"pg_config": [{"pg_size": 2}, {"pg_size": 2}]}
    trace = analyse(build(ON_CPU, distributedInfo=groups), rank=0)
    [step] = trace.steps
    # The product is 110 to 310, with the copy in it; what is around it, 100 to 110 and 310 to 320, is other work.
    assert microseconds(step.parts) == {
        "attention": 50, "matrix products": 200, "copies": 0, "other kernels": 20,
        "exposed communication": 330, "waiting for data": 100, "host": 300,
    }  # fmt: skip
    assert round(1e6 * step.hidden, 6) == 70
    [sent] = trace.collectives
    assert (sent.count, sent.bytes) == (1, 1_000_000)  # without the one outside of the steps
    assert sent.bus_rate == pytest.approx(1_000_000 / 400e-6)
    # Of its own, without the operators that it calls.
    own = {name: round(1e6 * seconds, 6) for name, _, seconds in trace.kernels}
    assert own == {
        "aten::addmm": 190, "aten::bmm": 30, "aten::scaled_dot_product_attention": 20, "aten::linear": 20,
        "aten::copy_": 10,
    }  # fmt: skip
    unequal = {"pg_config": [{"pg_size": 2}, {"pg_size": 4}]}
    assert analyse(build(ON_CPU, distributedInfo=unequal), rank=0).collectives[0].bus_rate is None


@pytest.mark.parametrize(
    ("ranks", "ends"), [("[8, 9, ..., 63]", (8, 63)), ("[8, 9, ...]", None), ("[]", None), ("[5]", (5, 5))]
)
def test_the_ranks_of_a_large_group_may_be_abridged(ranks, ends):
    events = [
        (name, kind, start, end, details | {"Process Group Ranks": ranks} if name.startswith("nccl") else details)
        for name, kind, start, end, details in ON_GPU
    ]
    [sent] = analyse(build(events), rank=0).collectives
    assert sent.ends == ends


def test_each_moment_has_one_part():
    spans, layers = [(0, 10), (4, 9.5), (30, 31)], [[(-5, 2), (1, 3)], [(2, 5)], [(9, 20)]]
    assert list(partition(spans, layers)) == [[3, 2, 1, 4], [0, 1, 0.5, 4], [0, 0, 0, 1]]
    assert list(partition([(0, 10)], [[], []])) == [[0, 0, 10]]


def test_parts_are_those_of_each_moment_looked_at_alone():
    """In a trace of whole microseconds each of them is looked up: which layers cover it, and the first one counts."""
    drawn = random.Random(3)
    for _ in range(200):
        layers = [
            [(start, start + drawn.randrange(6)) for start in drawn.choices(range(60), k=drawn.randrange(8))]
            for _ in range(3)
        ]
        spans = [(start, start + drawn.randrange(20)) for start in drawn.choices(range(60), k=4)]
        for span, lengths in zip(spans, partition(spans, layers), strict=True):
            firsts = [
                next((n for n, layer in enumerate(layers) if any(a <= moment < b for a, b in layer)), 3)
                for moment in range(*span)
            ]
            assert lengths == [firsts.count(n) for n in range(4)]


def test_many_steps_and_events_take_no_square_of_time():
    """20,000 steps, all of which last as long as the trace, and 40,000 events in 20 s; it took many minutes."""
    program = """
import resource
from tests.unit.run.report.test_trace import analyse, build
steps = [(f"echelon step {n}", "user_annotation", n, 400_000, {}) for n in range(20_000)]
work = [("aten::mm", "cpu_op", 10 * n, 10 * n + 5, {}) for n in range(40_000)]
content = build([*steps, *work])
used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
resource.setrlimit(resource.RLIMIT_CPU, (used + 20, used + 20))
assert round(analyse(content, 0).steps[0].parts["matrix products"], 9) == 0.2
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_recorder_writes_the_steps_that_were_asked_for(tmp_path):
    path = tmp_path / "profile" / "step-00000003-rank-00001.json.gz"
    recorder = Recorder(torch.device("cpu"), lambda step: path if step == 3 else tmp_path / "wrong", (3, 2))
    for step in range(8):
        with recorder.around_step(step):
            torch.ones(64, 64) @ torch.ones(64, 64)
        assert path.exists() == (step >= 3)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    [trace], faults = read_traces(tmp_path)
    assert not faults
    assert (trace.rank, [step.step for step in trace.steps]) == (1, [3, 4])
    for step in trace.steps:
        assert sum(step.parts.values()) == pytest.approx(step.seconds) and step.parts["matrix products"] > 0
    with Recorder(torch.device("cpu"), lambda step: tmp_path / "wrong").around_step(0):
        pass
    assert not (tmp_path / "wrong").exists()


def test_a_report_shows_the_profile_and_leaves_its_steps_out_of_the_speed(tmp_path):
    rows = [
        {"kind": "train", "step": step, "step_seconds": 9.0 if 5 < step < 9 else 1.0, "tokens_per_second": 1.0}
        for step in range(1, 20)
    ] + [
        {"kind": "train", "step": step, "step_seconds": 3.0, "tokens_per_second": 1.0}  # the machine is slower later
        for step in range(40, 90)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "events.jsonl").write_text('{"event": "start", "time": 1.0, "step": 0}\n')
    (tmp_path / "profile").mkdir()
    for rank, content in enumerate((build(ON_GPU), build(ON_CPU), {"traceEvents": 5})):
        path = tmp_path / "profile" / f"step-00000007-rank-{rank:05d}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
    (tmp_path / "profile" / "step-00000007-rank-00009.json.gz").write_bytes(b"torn")
    record = read_record(tmp_path)
    assert record.values("step_seconds") == [1.0] * 15 + [3.0] * 50
    [section] = [each for each in build_report(record).sections if each.title == "Profiled steps"]
    bars, table, lines, heat, *_ = section.blocks
    assert [label for label, _ in bars.rows] == ["rank 0, mean step", "rank 1, mean step"]
    assert table.rows[1] == ("matrix products", "0.20 ms (20.0 %)", "0.20 ms (20.0 %)")
    assert len(table.rows) == len(PARTS)
    assert "took 9.00 s while it was recorded, and 1.00 s before and after: recording costs 800.0 %" in lines.lines[1]
    sent = find_collectives(section)
    assert sent[0] == ("all_reduce, ranks 0 to 3", "1.0", "1.91 MiB", "0.30 ms", "10 GB/s", "unknown")
    assert heat.values == [[pytest.approx(0.001)], [pytest.approx(0.001)]]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            gzip.compress(b"[" + b" " * 2000),
            "its SIZE unpack to more than 1.00 KiB; record fewer steps with profile.steps.",
        ),
        (b"torn", "Not a gzipped file (b'to')."),
        (gzip.compress(b"{}")[:-9], "Compressed file ended before the end-of-stream marker was reached."),
        (gzip.compress(b"{}")[:10] + b"\xff" * 20, "Error -3 while decompressing data: invalid block type."),
        (gzip.compress(b"[" * 900), "Expecting value: line 1 column 901 (char 900)."),
        (None, "not a regular file."),
    ],
    ids=["bomb", "other", "short", "damaged", "not json", "fifo"],
)
def test_a_trace_that_cannot_be_read_is_named(tmp_path, monkeypatch, content, reason):
    monkeypatch.setattr("echelon.run.report.trace.MAX_TRACE_BYTES", 1024)
    (tmp_path / "profile").mkdir()
    (tmp_path / "events.jsonl").write_text('{"event": "start", "time": 1.0, "step": 0}\n')
    path = tmp_path / "profile" / "step-00000007-rank-00000.json.gz"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    reason = reason.replace("SIZE", f"{len(content or b'')} B")
    assert read_record(tmp_path).faults == [f"{path} is left out: {reason}"]


def test_a_bomb_takes_no_more_memory_than_the_limit(tmp_path):
    """A trace of 4 GiB in a process that may have 1 GiB more than it starts with."""
    (tmp_path / "profile").mkdir()
    path = tmp_path / "profile" / "step-00000007-rank-00000.json.gz"
    member = gzip.compress(b" " * 2**26, 1)  # a gzip file may have any number of members
    path.write_bytes(member * 64)
    assert "unpack to more than 256 MiB; record fewer steps" in read_in_little_memory(tmp_path, 2**30)


def test_a_trace_too_large_for_the_memory_is_left_out(tmp_path):
    (tmp_path / "profile").mkdir()
    path = tmp_path / "profile" / "step-00000007-rank-00000.json.gz"
    path.write_bytes(gzip.compress(b"[" + b"[]," * 2**21 + b"0]", 1))
    told = f"{path} is left out: there is not enough memory to read it; record fewer steps with profile.steps."
    assert told in read_in_little_memory(tmp_path, 2**26)


def read_in_little_memory(run, more_bytes):
    """What reading the traces of a run prints in a process that may have only this much more memory."""
    code = """
from echelon.run.report.trace import read_traces
from pathlib import Path
def work(arguments):
    print(*read_traces(Path(arguments[0])))
"""
    done = run_in_little_memory(code, run, more_bytes=more_bytes)
    assert done.returncode == 0, done.stderr
    return done.stdout


def find_collectives(section):
    [table] = [each for each in section.blocks if isinstance(each, Table) and each.head[0].startswith("collectives")]
    return table.rows


@pytest.mark.parametrize(
    ("per_machine", "more", "expected"),
    [
        (4, {}, "2.7 % of nvlink4 (370 GB/s)"),  # 10 of 370 GB/s
        (2, {}, "20.8 % of ib400 (48 GB/s)"),  # ranks 0 to 3 are on two machines
        (
            2,
            {"links": {"between": {"name": "EFA of 400 Gbit/s", "bandwidth": 4e10}}},
            "25.0 % of EFA of 400 Gbit/s (40 GB/s)",
        ),
        (4, {"kind": "cpu"}, "unknown"),
    ],
)
def test_a_collective_is_compared_with_the_link_between_its_ranks(tmp_path, per_machine, more, expected):
    cluster = {"kind": "cuda", "num_devices": 4, "devices_per_node": per_machine, "accelerator": {"name": "H100"}}
    (tmp_path / "environment.json").write_text(json.dumps({"cluster": cluster | more}))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 7, "step_seconds": 1.0}\n')
    (tmp_path / "events.jsonl").write_text('{"event": "start", "time": 1.0, "step": 0}\n')
    (tmp_path / "profile").mkdir()
    path = tmp_path / "profile" / "step-00000007-rank-00000.json.gz"
    path.write_bytes(gzip.compress(json.dumps(build(ON_GPU)).encode()))
    [section] = [each for each in build_report(read_record(tmp_path)).sections if each.title == "Profiled steps"]
    assert find_collectives(section)[0][-1] == expected
