"""Endings of ranks: which exits end the others of a machine, and how; one exit code and one message of all."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from echelon.ground.errors import CheckpointError, ConfigError, LaunchError
from echelon.ground.variables import read_environment
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.outcome import (
    DONE,
    FAILED,
    REFUSED,
    STOPPED,
    Outcome,
    ProcessDeath,
    RankOutcome,
    find_cause,
    is_peer_leaving,
    is_secondary,
    read_outcomes,
    report,
    write_outcome,
)
from echelon.run.supervise.workers import LocalRanks

LOGS = Path("runs/x/logs")
DONE_0, DONE_1 = RankOutcome(0, DONE, "", 9.0), RankOutcome(1, DONE, "", 9.0)


def test_all_done():
    assert find_cause([DONE_0, DONE_1], [], LOGS).outcome == Outcome(DONE)


def test_a_killed_rank_takes_precedence_over_its_peers_failures():
    echo = RankOutcome(0, FAILED, "rank 0 failed: Connection closed by peer", 5.0, secondary=True)
    deaths = [ProcessDeath(0, 122, 1, 5.0), ProcessDeath(1, 123, -signal.SIGKILL, 5.0)]
    outcome = find_cause([echo], deaths, LOGS).outcome
    assert outcome.code == FAILED
    assert outcome.message.startswith("rank 1 (pid 123) was killed by SIGKILL")
    assert outcome.message.endswith("see runs/x/logs/rank-00001.log")


def test_the_earliest_cause_is_reported():
    first = RankOutcome(1, FAILED, "rank 1 failed: ValueError: seven", 5.0)
    later = RankOutcome(0, FAILED, "rank 0 failed: RuntimeError: other", 6.0)
    echo = RankOutcome(2, FAILED, "echo", 4.0, secondary=True)
    deaths = [ProcessDeath(rank, 100 + rank, 1, 6.0) for rank in range(3)]
    assert find_cause([later, first, echo], deaths, LOGS).outcome == Outcome(FAILED, first.message)


def test_kills_by_the_agent_are_not_causes():
    cause = RankOutcome(1, FAILED, "rank 1 failed: ValueError: seven", 5.0)
    deaths = [ProcessDeath(1, 101, 1, 5.0), ProcessDeath(0, 100, -signal.SIGKILL, 36.0)]
    assert find_cause([cause], deaths, LOGS).outcome.message == cause.message
    deaths = [ProcessDeath(1, 101, 1, 5.0), ProcessDeath(0, 100, -signal.SIGTERM, 5.0)]
    assert find_cause([cause], deaths, LOGS).outcome.message == cause.message


def test_an_abort_is_named_only_without_another_cause():
    abort = ProcessDeath(0, 100, -signal.SIGABRT, 5.0)
    cause = RankOutcome(1, FAILED, "rank 1 failed: ValueError: seven", 5.0)
    assert find_cause([cause], [abort], LOGS).outcome.message == cause.message
    assert "killed by SIGABRT" in find_cause([], [abort], LOGS).outcome.message


TIMEOUT = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=900000) ran for 900013 milliseconds before timing out."
)
ILLEGAL = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: an "
    "illegal memory access was encountered"
)


def write_abort(logs, rank, reason):
    """Write the log of a rank that NCCL's watchdog has aborted, as torch 2.11 prints it, with its C++ stack."""
    stack = "".join(f"frame #{number}: c10::Error::Error(c10::SourceLocation) + 0x96\n" for number in range(40))
    (logs / f"rank-{rank:05d}.log").write_text(
        f"step 3\n[rank{rank}]:[E1126 06:24:44.9 ProcessGroupNCCL.cpp:2057] {reason}\nException raised from "
        "checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:692 (most recent call first):\n"
        f"{stack}\nterminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {reason}\n{stack}"
    )


def test_an_abort_by_nccl_is_explained_by_its_log(tmp_path):
    """NCCL's watchdog aborts the process of a rank that has waited too long; Python writes no report."""
    abort = ProcessDeath(0, 100, -signal.SIGABRT, 5.0)
    write_abort(tmp_path, 0, TIMEOUT)
    message = find_cause([], [abort], tmp_path).outcome.message
    assert message.startswith("rank 0 (pid 100) was killed by SIGABRT: [Rank 0] Watchdog caught collective operation")
    assert message.endswith(f"OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=900000) ran for 900013 milliseconds "
                            f"before timing out; see {tmp_path}/rank-00000.log")  # fmt: skip


def test_an_abort_by_gloo_for_lack_of_open_files_is_explained(tmp_path):
    (tmp_path / "rank-00000.log").write_text(
        "step 3\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at "
        "/pytorch/third_party/gloo/gloo/transport/tcp/listener.cc:63] false. accept: Too many open files\n"
    )
    message = find_cause([], [ProcessDeath(0, 100, -signal.SIGABRT, 5.0)], tmp_path).outcome.message
    assert message.startswith("rank 0 (pid 100) was killed by SIGABRT: too many open files: a process here may have")


def test_the_abort_that_is_no_echo_is_the_cause(tmp_path):
    """Rank 3's GPU failed: NCCL aborts it, and the ranks that wait for it."""
    remote = (
        "[Rank 1] Process group watchdog thread terminated with exception: NCCL error: remote process exited or there "
        "was a network error, NCCL version 2.28.9"
    )
    for rank, reason in enumerate([TIMEOUT, remote, TIMEOUT, ILLEGAL]):
        write_abort(tmp_path, rank, reason)
    deaths = [ProcessDeath(rank, 100 + rank, -signal.SIGABRT, 5.0) for rank in range(4)]
    message = find_cause([], deaths, tmp_path).outcome.message
    assert message.startswith("rank 3 (pid 103) was killed by SIGABRT: CUDA error: an illegal memory access")
    # A report of its own, written before the abort, or another death stays the cause.
    cause = RankOutcome(2, FAILED, "rank 2 failed: ValueError: seven", 5.0)
    assert find_cause([cause], deaths, tmp_path).outcome.message == cause.message
    killed = ProcessDeath(2, 102, -signal.SIGKILL, 5.0)
    assert "rank 2 (pid 102) was killed by SIGKILL" in find_cause([], [*deaths[:2], killed], tmp_path).outcome.message


def test_exit_without_a_report():
    outcome = find_cause([DONE_0], [ProcessDeath(1, 101, 7, 5.0)], LOGS).outcome
    assert outcome == Outcome(FAILED, "rank 1 (pid 101) exited with code 7; see runs/x/logs/rank-00001.log")


def test_refused_and_stopped_keep_their_code():
    refused = RankOutcome(0, REFUSED, "run.dir=x: not shared", 5.0)
    echo = RankOutcome(1, FAILED, "Connection closed by peer", 5.5, secondary=True)
    assert find_cause([refused, echo], [], LOGS).outcome == Outcome(REFUSED, refused.message)
    stopped = [RankOutcome(rank, STOPPED, "stopped at step 7", 5.0 + rank) for rank in range(2)]
    assert find_cause(stopped, [], LOGS).outcome == Outcome(STOPPED, "stopped at step 7")


def test_only_a_peers_failure_is_still_a_failure():
    echo = RankOutcome(0, FAILED, "Connection closed by peer", 5.0, secondary=True)
    assert find_cause([echo, DONE_1], [ProcessDeath(0, 1, 1, 5.0)], LOGS).outcome == Outcome(FAILED, echo.message)


def test_reports_round_trip(tmp_path):
    write_outcome(tmp_path, report(1, REFUSED, "no"))
    (tmp_path / "rank-0.json").write_text('{"rank": 0, "co')
    [outcome] = read_outcomes(tmp_path)
    assert (outcome.rank, outcome.code, outcome.message) == (1, REFUSED, "no")
    assert is_peer_leaving(tmp_path)


# As torch 2.11 with NCCL 2.28 raises them, with the details that NCCL adds.
NCCL_LOST = [
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a "
    "network error, NCCL version 2.28.9\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 10.0.0.1<33759> failed",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3763, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 'invalid device context'",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclSystemError: System call (e.g. socket, malloc) or "
    "external library call failed or device error. \nLast error:\n",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3763, internal error - please report "
    "this issue to the NCCL developers, NCCL version 2.28.9\nncclInternalError: Internal check failed.\nLast error:\n",
    "NCCL communicator was aborted on rank 1.  Original reason for failure was: unknown",
    "NCCL communicator encountered error set by ProcessGroupNCCL: a peer",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=900000) ran for 900013 milliseconds before timing out.",
    "[Rank 0] Work WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=900000) timed out in blocking wait.",
    "NCCL timeout in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:148",
]
# The mistake of this rank, which the others wait for.
NCCL_MISUSED = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
)


def test_errors_caused_by_a_lost_peer():
    gloo = RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242")
    assert is_secondary(gloo)
    assert is_secondary(ConnectionResetError(104, "Connection reset by peer"))
    for text in NCCL_LOST:
        assert is_secondary(dist.DistBackendError(text)), text
    assert not is_secondary(dist.DistBackendError(NCCL_MISUSED))
    assert not is_secondary(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_secondary(RuntimeError("shape '[2, 3]' is invalid for input of size 5"))
    assert not is_secondary(ConfigError("Connection reset by peer"))
    assert not is_secondary(LaunchError("MASTER_PORT is in use"))
    try:
        try:
            raise gloo
        except RuntimeError as error:
            raise CheckpointError("the save failed") from error
    except CheckpointError as error:
        assert is_secondary(error)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run", tmp_path / "outcomes")
    folder.create()
    return folder


@pytest.fixture
def ranks(folder):
    """Ranks that are lines of Python; `start(*lines)` starts one of each."""
    ranks = LocalRanks(folder)

    def start(*lines):
        for rank, line in enumerate(lines):
            ranks.start((sys.executable, "-c", line), rank, read_environment())
        return ranks

    yield start
    ranks.kill()
    ranks.end()


def test_a_failure_is_told_to_the_others(ranks, folder):
    waiting = f"import os, time\nwhile not os.path.exists({str(folder.death_path)!r}): time.sleep(0.05)"
    started = ranks(waiting, "raise SystemExit(7)")
    started.wait()
    assert [(death.rank, death.exit_code) for death in started.deaths] == [(1, 7)]


def test_a_suspended_rank_is_killed(ranks, folder, monkeypatch):
    monkeypatch.setattr("echelon.run.supervise.workers.PATIENCE_SECONDS", 1.0)
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    started = ranks(stop, "raise SystemExit(1)")
    started.wait()
    assert [(death.rank, death.exit_code) for death in started.deaths] == [(1, 1), (0, -signal.SIGKILL)]


def test_a_rank_of_another_machine_that_died_ends_these(ranks, folder, monkeypatch):
    monkeypatch.setattr("echelon.run.supervise.workers.PATIENCE_SECONDS", 0.5)
    started = ranks("import time; time.sleep(60)")
    folder.death_path.write_text("another machine has lost a rank\n")
    started.wait()
    assert [death.exit_code for death in started.deaths] == [-signal.SIGKILL]


def test_ranks_that_listen_are_asked_to_stop_once(ranks, folder):
    """Not before all have written that they listen: SIGTERM would kill the others."""
    count = (
        "import os, signal, sys, time, json\nasked = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "time.sleep(float(sys.argv[1]))\n"
        f"open({str(folder.outcomes_dir)!r} + '/pid-' + sys.argv[2], 'w').write(str(os.getpid()))\n"
        "while not asked: time.sleep(0.05)\n"
        f"time.sleep(0.5); open({str(folder.outcomes_dir)!r} + '/asked-' + sys.argv[2], 'w').write(json.dumps(asked))\n"
    )
    started = LocalRanks(folder)
    for rank, seconds in enumerate(("0", "1")):
        started.start((sys.executable, "-c", count, seconds, str(rank)), rank, read_environment())
    started.wait(leaves=lambda: True)
    assert started.deaths == []
    assert [json.loads((folder.outcomes_dir / f"asked-{rank}").read_text()) for rank in range(2)] == [[1], [1]]
