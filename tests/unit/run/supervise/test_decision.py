"""What all machines do after an attempt: which failures are restarted, how often, and the message if one is not."""

import logging
import socket
from dataclasses import replace

import pytest

from echelon.ground import hosts
from echelon.ground.errors import CheckpointError, ConfigError, LaunchError, TrainingError
from echelon.ground.hosts import (
    THIS_MACHINE,
    HostGroup,
    await_name,
    find_interface,
    find_own_address,
    is_coordinator,
    limit_silence_of,
    parse_group,
)
from echelon.ground.launch_environment import find_host_group, launch_role
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.decision import HostReport, Restarts, Vacancies, decide, note_bad_machines
from echelon.run.supervise.outcome import DONE, FAILED, REFUSED, STOPPED, Likelihood, Outcome, is_final

BAD = [
    ("0", "a:1"),
    ("4:2", "a:1"),
    ("1:2+1", "a:1"),
    ("2+0", "a:1"),
    ("two", "a:1"),
    ("2", "a"),
    ("2", "a:99999"),
    ("2", "a b:1"),
]
FIXED, ELASTIC = HostGroup(2, 2, "a", 29400), HostGroup(1, 2, "a", 29400)


def told(host, code, message="", weight=Likelihood.CAUSE, time=0.0, step=None, final=False):
    return HostReport(host, code, message, final, int(weight), time, step)


def decided(*reports, asked=(), group=FIXED, restarts=3, meets_again=False):
    by_host = {
        each if isinstance(each, str) else each.host: None if isinstance(each, str) else each for each in reports
    }
    return decide(by_host, frozenset(asked), group, Restarts(restarts), meets_again=meets_again)


def test_all_done_is_done():
    ending = decided(told("a", DONE, weight=Likelihood.NOTHING), told("b", DONE, weight=Likelihood.NOTHING))
    assert (ending.goes_on, ending.code) == (False, DONE)


def test_a_quorum_is_done_without_lost_machines():
    """A quorum; any other job has failed when a machine is lost."""
    done = told("a", DONE, weight=Likelihood.NOTHING)
    ending = decided(done, "b", group=replace(FIXED, lives_on=True))
    assert (ending.goes_on, ending.code) == (False, DONE)
    assert decided(done, "b").code == FAILED


def test_a_spare_takes_the_place_of_a_lost_machine():
    """Without one, two machines cannot go on as one."""
    left = told("a", FAILED, "connection reset", Likelihood.ECHO, step=40)
    ending = decide({"a": left, "b": None}, frozenset(), FIXED, Restarts(3), num_spares=1)
    assert (ending.goes_on, ending.message, ending.step) == (True, "1 of 2 machines stopped responding: b", 40)
    ended = decide({"a": left, "b": None}, frozenset(), FIXED, Restarts(3))
    assert (ended.goes_on, ended.bad, ending.bad) == (False, ("b",), ("b",))


def test_whoever_starts_the_machines_reads_which_are_bad(tmp_path, monkeypatch):
    note_bad_machines(["n1 (1f0c22)"], ends=False)  # nobody asked
    monkeypatch.setenv("ECHELON_BAD_MACHINES", str(tmp_path / "bad"))
    note_bad_machines(["n2 (1f0c22)", "n1 (2f0c22)"], ends=False)
    note_bad_machines(["n3"], ends=True)
    assert (tmp_path / "bad").read_text() == "n1 left\nn2 left\nn3 ends\n"


def test_a_machine_may_leave_if_a_spare_waits():
    """All have saved. The first machine cannot leave alone: the test of decide gives no spares then."""
    reports = {host: told(host, STOPPED, "stopped by SIGTERM at step 50", step=50) for host in "ab"}
    group = replace(FIXED, num_spares=1)
    ending = decide(reports, frozenset("b"), group, Restarts(3), num_spares=1)
    assert (ending.goes_on, ending.leaving, ending.restarts, ending.step) == (True, ("b",), 0, 50)
    ending = decide(reports, frozenset("b"), group, Restarts(3))
    assert (ending.goes_on, ending.code, ending.message) == (False, STOPPED, "stopped by SIGTERM at step 50")


def test_a_failure_restarts_all_from_the_newest_checkpoint_of_any_machine():
    echo = told("a", FAILED, "connection reset", Likelihood.ECHO, time=1.0, step=None)
    cause = told("b", FAILED, "rank 1 was killed", Likelihood.CAUSE, time=2.0, step=40)
    ending = decided(echo, cause)
    assert (ending.goes_on, ending.message, ending.restarts, ending.step) == (True, "rank 1 was killed", 1, 40)


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (told("b", REFUSED, "data.train: no such file"), REFUSED),
        (told("b", FAILED, "the loss is not finite", final=True), FAILED),
        (told("b", STOPPED, "stopped by budget.max_hours=2 at step 5"), STOPPED),
    ],
)
def test_a_recurring_failure_ends_all(cause, code):
    ending = decided(told("a", FAILED, "connection reset", Likelihood.ECHO), cause)
    assert (ending.goes_on, ending.code, ending.message) == (False, code, cause.message)


def test_a_hang_with_a_lost_machine_names_the_machine():
    ending = decided(told("a", FAILED, "step 61 did not end within 5 s"), "b (1f)", restarts=0)
    assert ending.message == "step 61 did not end within 5 s; 1 of 2 machines stopped responding: b (1f)"


def test_connections_to_the_coordinator_break_when_it_is_silent():
    """Other open sockets, such as a socket pair without a port, are unaffected."""
    pair = socket.socketpair()
    with (
        pair[0],
        pair[1],
        socket.create_server(("127.0.0.1", 0)) as coordinator,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        lines = [socket.create_connection(each.getsockname()) for each in (coordinator, other)]
        limit_silence_of(coordinator.getsockname()[1], 15)
        limits = [line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for line in lines]
        alive = [line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for line in lines]
        for line in lines:
            line.send(b"still usable")
            line.close()
    assert limits == [15_000, 0] and alive == [1, 0]


def test_restarts_end():
    failure = told("b", FAILED, "rank 1 was killed")
    ending = decided(told("a", FAILED, "", Likelihood.ECHO), failure, restarts=0)
    assert (ending.goes_on, ending.code, ending.message) == (False, FAILED, "rank 1 was killed")


def test_stopping_one_machine_stops_a_fixed_job_but_not_an_elastic_one():
    saved = [told(host, STOPPED, "stopped by SIGTERM at step 5") for host in "ab"]
    ending = decided(*saved, asked="b")
    assert (ending.goes_on, ending.code) == (False, STOPPED)
    ending = decided(*saved, asked="b", group=ELASTIC)
    assert (ending.goes_on, ending.leaving, ending.restarts) == (True, ("b",), 0)
    ending = decided(*saved, asked="ab", group=ELASTIC)
    assert (ending.goes_on, ending.code) == (False, STOPPED)


def test_a_save_because_a_machine_joins_is_no_end():
    saved = [told(host, STOPPED, "stopped by SIGTERM at step 5", step=5) for host in "ab"]
    ending = decided(*saved, group=ELASTIC, meets_again=True)
    assert (ending.goes_on, ending.restarts, ending.message, ending.step) == (True, 0, "", 5)
    early = told("a", FAILED, "stopped by SIGTERM before training began", final=True)
    assert decided(early, group=ELASTIC, meets_again=True).goes_on and not decided(early, group=ELASTIC).goes_on


def test_a_rank_that_somebody_stopped_ends_all():
    saved = [told(host, STOPPED, "stopped by SIGTERM at step 5") for host in "ab"]
    ending = decided(*saved, group=ELASTIC)
    assert (ending.goes_on, ending.code) == (False, STOPPED)
    ending = decided(told("a", STOPPED, "stopped by budget.max_hours=1 at step 5"), group=ELASTIC, meets_again=True)
    assert (ending.goes_on, ending.code) == (False, STOPPED)


def test_a_single_machine_ends_when_a_rank_was_stopped():
    """No machine can join, so a user has sent the rank a signal."""
    stopped = told("a", STOPPED, "stopped by SIGTERM at step 5", step=5)
    ending = decided(stopped, group=THIS_MACHINE)
    assert (ending.goes_on, ending.code, ending.message) == (False, STOPPED, stopped.message)
    assert decided(told("a", FAILED, "rank 0 was killed"), group=THIS_MACHINE).goes_on


def test_a_lost_machine_shrinks_an_elastic_job_and_ends_a_fixed_one():
    echo = told("a", FAILED, "connection reset", Likelihood.ECHO, step=40)
    ending = decided(echo, "b", group=ELASTIC)
    assert (ending.goes_on, ending.step) == (True, 40)
    assert ending.message == "1 of 2 machines stopped responding: b"
    ending = decided(echo, "b")
    assert (ending.goes_on, ending.code, ending.message) == (False, FAILED, "1 of 2 machines stopped responding: b")
    assert ending.find_ending("a", echo.outcome).message == (
        "1 of 2 machines stopped responding: b; the same command resumes from step 40; with 1:2 machines (--nodes), or "
        "2+1, the others would have gone on"
    )
    many = HostGroup(2, 4, "a", 29400)
    assert decided(echo, "b", "c", group=many).advice == "; the same command resumes from step 40"
    assert decided(told("a", FAILED, "rank 0 failed", final=True), told("b", FAILED, "x")).advice == ""


def test_a_job_is_short_of_machines_only_if_some_have_left():
    saved = [told(host, STOPPED, "stopped by SIGTERM at step 5") for host in "ab"]
    echo = told("a", FAILED, "connection reset", Likelihood.ECHO, step=40)
    assert decided(*saved, asked="b").is_short and decided(echo, "b").is_short
    others = [
        decided(*(told(host, STOPPED, "stopped by budget.max_hours at step 5") for host in "ab")),
        decided(*saved, asked="b", group=ELASTIC),
        decided(*(told(host, FAILED, "bad", final=True) for host in "ab")),
        decided(told("a", REFUSED, "bad"), "b"),
        decided(told("a", DONE), told("b", DONE), asked="b"),
    ]
    assert not any(each.is_short for each in others)


def test_the_rendezvous_address():
    assert parse_group("2", "node-1:29400") == HostGroup(2, 2, "node-1", 29400)
    assert parse_group("1:4", "[::1]:29400", "eth0") == HostGroup(1, 4, "::1", 29400, interface="eth0")
    assert parse_group("2+1", "a:29400") == HostGroup(2, 2, "a", 29400, num_spares=1)
    assert not parse_group("1+1", "a:29400").is_alone
    assert parse_group("1", "[::1]:29400").endpoint == "[::1]:29400"
    for nodes, rendezvous in BAD:
        with pytest.raises(ConfigError, match=r"^--(nodes|rendezvous) "):
            parse_group(nodes, rendezvous)


def test_addresses_of_this_machine_and_listeners():
    with socket.create_server(("127.0.0.1", 0)) as server:
        group = parse_group("2", f"127.0.0.1:{server.getsockname()[1]}")
        assert not is_coordinator(group)
    assert is_coordinator(group)
    assert not is_coordinator(parse_group("2", "192.0.2.1:29400"))  # from a network reserved for documentation
    assert find_own_address(group) == "127.0.0.1"
    assert find_interface("127.0.0.1") in ("lo", None)
    with pytest.raises(ConfigError, match="--interface nothere0 has no address"):
        find_own_address(parse_group("2", "127.0.0.1:29400", "nothere0"))


def test_the_group_from_slurm():
    env = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_JOB_ID": "123456"}
    env |= {"SLURM_STEP_NODELIST": "gpu[07-08],login", "SLURM_PROCID": "1"}
    assert launch_role(env) == "agent"
    assert find_host_group(env) == HostGroup(3, 3, "gpu07", 23456, coordinates=False)
    assert find_host_group(env | {"SLURM_PROCID": "0", "ECHELON_RENDEZVOUS": "10.0.0.1:5000"}) == HostGroup(
        3, 3, "10.0.0.1", 5000, coordinates=True
    )


def test_the_group_from_sagemaker():
    """algo-10 is sorted after algo-2."""
    env = {"SM_HOSTS": '["algo-10", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NETWORK_INTERFACE_NAME": "eth0"}
    assert launch_role(env) == "agent"
    group = find_host_group(env)
    assert group == HostGroup(
        2, 2, "algo-2", 7777, coordinates=True, interface="eth0", shares_files=False, name="algo-2"
    )
    assert find_host_group({"SM_CURRENT_HOST": "algo-1"}).shares_files


@pytest.mark.parametrize(
    ("addresses", "rank"), [("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"), ("DSTACK_NODES_IPS", "DSTACK_NODE_RANK")]
)
def test_the_group_from_skypilot_and_dstack(addresses, rank):
    """The first machine of the list is the coordinator, which gets rank 0."""
    env = {addresses: "10.0.0.9\n10.0.0.10", rank: "0"}
    assert launch_role(env) == "agent"
    group = HostGroup(2, 2, "10.0.0.9", 29400, coordinates=True, shares_files=False, name="10.0.0.9")
    assert find_host_group(env) == group
    other = find_host_group(env | {rank: "1", "ECHELON_SHARES_FILES": "1"})
    assert not other.coordinates and other.shares_files and other.name == "10.0.0.10"
    assert launch_role({addresses: "10.0.0.9"}) == "local"


def test_a_name_that_resolves_later_is_waited_for(monkeypatch, caplog):
    """A pod's name resolves when the pod has its address."""
    caplog.set_level(logging.INFO, "echelon")
    known, asked = socket.getaddrinfo, []

    def resolve(host, *rest, **options):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return known("127.0.0.1", *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(hosts, "_LOOK_SECONDS", 0.0)
    await_name(parse_group("2", "small-worker-0:29400"))
    assert asked == ["small-worker-0"] * 3
    assert caplog.messages == [
        "the name small-worker-0 does not resolve on this machine (Name or service not known); waiting up to 10 minutes"
    ]
    asked.clear()
    monkeypatch.setattr(hosts, "_NAME_SECONDS", -1.0)
    with pytest.raises(LaunchError, match="does not resolve"):
        await_name(parse_group("2", "small-worker-0:29400"))


def killed(rank, pid=100):
    return Outcome(FAILED, f"rank {rank} (pid {pid}) was killed by SIGKILL; see runs/x/logs/rank-{rank:05d}.log")


def test_up_to_the_limit():
    restarts = Restarts(2)
    assert restarts.refuse(killed(0), None) is None
    assert restarts.refuse(killed(1), 10) is None
    assert restarts.done == 2
    ending = restarts.refuse(Outcome(FAILED, "rank 0 failed: ValueError: x; see log"), 20)
    assert ending == Outcome(
        FAILED,
        "rank 0 failed: ValueError: x; see log; not restarted: fault.max_restarts=2 is reached; the same command "
        "resumes from step 20",
    )


def test_a_machine_waits_for_others_while_there_is_progress():
    vacancies = Vacancies(2)
    steps = [None, None, None, 10, 10, 20, 30, 30, 30]
    assert [vacancies.wait("lost", step, [], 0.0) for step in steps] == [
        True, True, False, True, True, True, True, True, False,
    ]  # fmt: skip
    assert not Vacancies(2).wait("lost", 1, ["SIGTERM"], 60.0)
    assert not Vacancies(0).wait("lost", 1, [], 60.0)


def test_a_recurring_failure_ends_the_job():
    """On any rank; a checkpoint in between counts as progress."""
    restarts = Restarts(100)
    steps = [None, None, 10, 10, 20, 20, 20]
    endings = [restarts.refuse(killed(number % 2, number), step) for number, step in enumerate(steps)]
    assert endings[:-1] == [None] * 6
    assert endings[-1].message.endswith(
        "; not restarted: the same failure occurred again without a new checkpoint, 3 times in a row; the same command "
        "resumes from step 20"
    )


def test_the_message_when_a_recurring_failure_reaches_the_limit():
    restarts = Restarts(1)
    restarts.refuse(killed(0), None)
    ending = restarts.refuse(killed(1), None)
    assert ending.message.endswith("=1 is reached; the same failure occurred again without a new checkpoint")


def test_failures_that_would_recur_are_not_restarted():
    ending = Outcome(FAILED, "step 2: loss=nan", final=True)
    assert Restarts(3).refuse(ending, 1) == ending
    assert Restarts(0).refuse(killed(0), 1) == killed(0)
    assert is_final(TrainingError("loss=nan")) and is_final(CheckpointError("third failure"))
    assert not is_final(LaunchError("did not meet")) and not is_final(ValueError("x"))
    try:
        raise CheckpointError("the save failed") from RuntimeError("Connection closed by peer")
    except CheckpointError as error:
        assert not is_final(error)
    assert is_final(ConfigError("x"))


def test_a_restart_clears_reports_and_notices_a_stop(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create()
    for path in (folder.stop_path, folder.death_path, folder.outcomes_dir / "rank-0.json"):
        path.write_text("SIGTERM")
    folder.clear_outcomes(restart=True)
    assert list(folder.outcomes_dir.iterdir()) == [folder.stop_path]
    folder.clear_outcomes()
    assert not list(folder.outcomes_dir.iterdir())


def test_the_last_step_with_a_row(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.rows.last_step() == 0
    folder.metrics_path.write_text('{"kind": "train", "step": 7}\n{"kind": "train", "step": 8}\n{"kind": "tr')
    assert folder.rows.last_step() == 8
