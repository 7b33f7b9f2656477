"""Agents of several machines, run on one: a lost rank, a refusal, a stop, machines that share no folder."""

import json
import shutil
import signal
import socket
import time

import pytest
from torch.distributed import TCPStore

from echelon.ground.sockets import find_free_port
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.meeting import TorchStore
from tests.dist.command import (
    assert_no_orphan,
    await_line,
    find_listeners,
    finish,
    marked_processes,
    read_lines,
    start,
    train_rows,
    write_recipe,
)
from tests.parity.training import LOSS

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _no_process_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_TEST_MARK", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    assert_no_orphan(10)


@pytest.fixture
def agents(tmp_path):
    """Starts the agents of machines that share a folder; the first one runs the store, at `place`."""

    def start_all(nodes=2, begun=None):
        command = ("train", "recipe.json", "--nproc", "1", "--nodes", str(nodes), "--rendezvous", start_all.place)
        coordinator = start(*command, cwd=tmp_path)
        await_listener(start_all.place, coordinator)
        return coordinator, *(start(*command, cwd=tmp_path) for _ in range(1, begun or nodes))

    start_all.place = f"127.0.0.1:{find_free_port('127.0.0.1')}"
    return start_all


def await_listener(place, process):
    host, port = place.split(":")
    while True:
        assert process.poll() is None, process.communicate()
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((host, int(port))) == 0:
                return


def await_beats(place, count=2):
    """Wait until `count` machines have said to the coordinator that they are there."""
    host, port = place.split(":")
    store = TorchStore(TCPStore(host, int(port), is_master=False, wait_for_workers=False))
    seen, number = set(), 0
    while len(seen) < count:
        number += 1
        message = json.loads(store.read("inbox", number))
        seen |= {message["host"]} if message["kind"] == "present" else set()


def find_rank(rank):
    """The process of a rank in this test."""
    [found] = [each for each in marked_processes() if each.environ().get("RANK") == str(rank)]
    return found


def train_alone(folder, steps):
    """The same recipe in one process, for comparison."""
    finish(start("train", "recipe.json", "run.dir=runs/alone", "--nproc", "1", cwd=folder), 200).succeeded()
    rows = train_rows(RunFolder(folder / "runs" / "alone"))
    assert len(rows) == steps
    return rows


def assert_same_curve(ours, theirs):
    assert [row["batch_hash"] for row in ours] == [row["batch_hash"] for row in theirs]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)) <= LOSS


def test_a_killed_rank_is_restarted_and_the_curve_equals_one_process(agents, tmp_path):
    write_recipe(tmp_path, train={"steps": 300}, checkpoint={"every": 20})
    run = RunFolder(tmp_path / "runs" / "tiny")
    coordinator, guest = agents()
    await_line(run.metrics_path, '"step": 30,', coordinator, 120)
    find_rank(1).kill()
    endings = [finish(each, 200) for each in (coordinator, guest)]
    assert [each.code for each in endings] == [0, 0], endings
    for ending in endings:
        assert "was killed by SIGKILL" in ending.out and "restart 1 of 3, on all machines" in ending.out
    assert sum(each.out.count("step 300/300") for each in endings) == 1
    [failure] = [row for row in read_lines(run.events_path) if row["event"] == "failure"]
    assert failure["message"].startswith("rank 1 (pid ")
    assert_same_curve(train_rows(run), train_alone(tmp_path, 300))


def test_a_signal_to_one_machine_stops_all_of_them_after_a_save(agents, tmp_path):
    write_recipe(tmp_path, train={"steps": 5000}, checkpoint={"every": 1000})
    run = RunFolder(tmp_path / "runs" / "tiny")
    coordinator, guest = agents()
    await_line(run.metrics_path, '"step": 30,', coordinator, 120)
    assert {address for _, address, _ in find_listeners()} == {"127.0.0.1"}, "the interface that they talk over"
    guest.send_signal(signal.SIGUSR1)
    endings = [finish(each, 60) for each in (coordinator, guest)]
    assert [each.code for each in endings] == [3, 3], endings
    assert "stopped by SIGUSR1 at step" in endings[0].err and endings[1].err == ""
    assert run.newest_step() == train_rows(run)[-1]["step"]


@pytest.mark.parametrize(
    ("leaves", "how"),
    [(1, signal.SIGTERM), (1, signal.SIGKILL), (0, signal.SIGKILL)],
    ids=["evicted", "lost", "coordinator lost"],
)
def test_a_machine_whose_others_are_replaced_waits_for_them_in_place(agents, tmp_path, monkeypatch, leaves, how):
    """As in the pods of an operator that counts each container that ends."""
    monkeypatch.setenv("ECHELON_AWAITS_MACHINES", "1")
    write_recipe(tmp_path, train={"steps": 300}, checkpoint={"every": 20})
    run = RunFolder(tmp_path / "runs" / "tiny")
    pods = list(agents())
    command = pods[0].args[pods[0].args.index("train") :]
    await_line(run.metrics_path, '"step": 30,', pods[0], 120)
    pods[leaves].send_signal(how)
    code = finish(pods[leaves], 60).code
    assert code == (3 if how is signal.SIGTERM else -signal.SIGKILL)
    time.sleep(20)  # until its silence is noticed
    pods[leaves] = start(*command, cwd=tmp_path)
    endings = [finish(each, 300) for each in pods]
    assert [each.code for each in endings] == [0, 0], endings
    assert (
        "this machine waits for others in the place of those that left, and goes on from step"
        in endings[1 - leaves].out
    )
    assert_same_curve(train_rows(run), train_alone(tmp_path, 300))


def test_no_machine_waits_if_all_are_told_to_stop(agents, tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_AWAITS_MACHINES", "1")
    write_recipe(tmp_path, train={"steps": 5000}, checkpoint={"every": 1000})
    pods = agents()
    await_line(RunFolder(tmp_path / "runs" / "tiny").metrics_path, '"step": 30,', pods[0], 120)
    pods[1].send_signal(signal.SIGTERM)
    time.sleep(3)
    pods[0].send_signal(signal.SIGTERM)
    assert [finish(each, 60).code for each in pods] == [3, 3]


def test_each_machine_tells_the_loss_of_another_one(agents, tmp_path):
    write_recipe(tmp_path, train={"steps": 5000, "global_batch_size": 6}, checkpoint={"every": 10})
    coordinator, guest, lost = agents(nodes=3)
    await_line(RunFolder(tmp_path / "runs" / "tiny").metrics_path, '"step": 30,', coordinator, 120)
    lost.kill()
    finish(lost, 60)
    endings = [finish(each, 90) for each in (coordinator, guest)]
    assert [each.code for each in endings] == [1, 1], endings
    for each in endings:
        assert "1 of 3 machines stopped responding: " in each.err and "the same command resumes from step" in each.err
        assert "with 2:3 machines (--nodes), or 3+1, the others would have gone on" in each.err


def test_a_refusal_is_printed_once_and_ends_all(agents, tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "text.txt").write_text("")
    endings = [finish(each, 120) for each in agents()]
    assert [each.code for each in endings] == [2, 2], endings
    assert endings[0].err.startswith("echelon: data.train.0.path=text.txt") and endings[1].err == ""


def test_a_stop_during_the_rendezvous_ends_all_immediately(agents, tmp_path):
    """No rank can save yet, so the agents do not wait for the notice time of 60 s."""
    write_recipe(tmp_path)
    coordinator, guest = agents(nodes=3, begun=2)
    await_beats(agents.place)
    guest.send_signal(signal.SIGTERM)
    endings = [finish(each, 20) for each in (coordinator, guest)]
    assert [each.code for each in endings] == [1, 1], endings
    assert "echelon: stopped by SIGTERM" in endings[0].err


def test_machines_without_a_shared_folder_resume_from_one_checkpoint(tmp_path):
    """Two folders stand for two SageMaker hosts with two ranks each; sharded, so that every rank's file is needed."""
    machines = [tmp_path / "one", tmp_path / "two"]
    for folder in machines:
        folder.mkdir()
        write_recipe(folder, train={"steps": 120}, checkpoint={"every": 20}, parallel="fsdp")
    names = ["127.0.0.1", "127.0.0.2"]

    def start_both():
        return [
            start("train", "recipe.json", "--nproc", "2", cwd=folder, SM_HOSTS=json.dumps(names), SM_CURRENT_HOST=name)
            for folder, name in zip(machines, names, strict=True)
        ]  # fmt: skip

    first, second = (RunFolder(folder / "runs" / "tiny") for folder in machines)
    started = start_both()
    await_line(first.metrics_path, '"step": 30,', started[0], 150)
    started[1].send_signal(signal.SIGTERM)
    assert [finish(each, 60).code for each in started] == [3, 3]
    stopped_at = first.newest_step()
    assert stopped_at is not None and second.newest_step() is None
    endings = [finish(each, 200) for each in start_both()]
    assert [each.code for each in endings] == [0, 0], endings
    assert f"Resuming from step-{stopped_at:08d}." in endings[0].out
    files = {path.name for path in (first.checkpoints_dir / "step-00000120").iterdir()}
    assert {f"__{rank}_0.distcp" for rank in range(4)} < files
    shutil.rmtree(machines[1])
    assert_same_curve(train_rows(first), train_alone(machines[0], 120))


def test_a_background_job_is_watched_and_cancelled(tmp_path):
    """`--to local`: launch, status, cancel, launch again until the end."""
    write_recipe(tmp_path, train={"steps": 3000}, checkpoint={"every": 1000})
    run = RunFolder(tmp_path / "runs" / "tiny")
    launched = finish(start("launch", "recipe.json", "--to", "local", cwd=tmp_path), 60).succeeded()
    name = next(path.name for path in (tmp_path / "jobs").iterdir())
    assert f"launched {name}" in launched.out
    sleeper = start("logs", name, "--follow", cwd=tmp_path)
    await_line(run.metrics_path, '"step": 30,', sleeper, 120)
    assert f"{name}  local  running" in finish(start("status", cwd=tmp_path), 60).out
    assert finish(start("cancel", name, cwd=tmp_path), 60).code == 0
    followed = finish(sleeper, 60)
    assert followed.code == 0 and "stopped by SIGTERM at step" in followed.out
    assert f"{name}  local  stopped  exit code 3" in finish(start("status", name, cwd=tmp_path), 60).out
    again = finish(start("cancel", name, cwd=tmp_path), 60)
    assert (again.code, again.err) == (1, f"echelon: {name} has ended already.\n")
    short = ("train.steps=1", "run.name=short", "--to", "local", "--follow")
    ending = finish(start("launch", "recipe.json", *short, cwd=tmp_path), 120)
    assert ending.code == 0 and "step 1/1" in ending.out
