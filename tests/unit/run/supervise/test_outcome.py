"""One exit code and one message from the endings of all ranks."""

import signal
from pathlib import Path

from echelon.ground.errors import CheckpointError, ConfigError, LaunchError
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


def test_errors_caused_by_a_lost_peer():
    gloo = RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242")
    assert is_secondary(gloo)
    assert is_secondary(ConnectionResetError(104, "Connection reset by peer"))
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
