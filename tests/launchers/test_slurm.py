"""Jobs under a real Slurm, virtual nodes on this machine: preempted, out of time, cancelled, elastic, in arrays.

The nodes share one address, and their names do not resolve, so the recipe sets the rendezvous address.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from echelon.ground.sockets import find_free_port
from echelon.launch.records import make_job
from echelon.launch.slurm import SlurmLauncher
from echelon.recipe.load import load_recipe
from tests.dist.command import EXACT, RECIPE, TEXT, finish, read_lines, start
from tests.launchers.slurm_cluster import SlurmCluster, find_obstacle, slurm_cluster
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.skipif(find_obstacle() is not None, reason=f"no Slurm here: {find_obstacle()}"),
]

FOREVER = "train.steps=100000"
GOLDEN = Path(__file__).parents[1] / "unit" / "launch" / "golden"


@pytest.fixture(scope="module")
def slurm():
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_job_left(slurm):
    yield
    slurm.call("scancel", "--user=root", "--signal=KILL", "--full", "--quiet")
    slurm.call("scancel", "--user=root", "--quiet")
    wait_until(lambda: not slurm.call("squeue", "--noheader").strip(), say=lambda: slurm.call("squeue"))


@dataclass(frozen=True)
class Desk:
    """A folder with a recipe on the login node, and the commands that a user runs there."""

    slurm: SlurmCluster
    folder: Path
    port: int
    """Where the machines of its jobs meet."""

    def echelon(self, *arguments: object, code: int = 0) -> str:
        words = [sys.executable, "-m", "echelon", *map(str, arguments)]
        answer = subprocess.run(
            words, cwd=self.folder, env=self.slurm.env, capture_output=True, text=True, timeout=120, check=False
        )
        assert answer.returncode == code, answer.stdout + answer.stderr
        return answer.stdout + answer.stderr

    def launch(self, *overrides: object) -> tuple[str, str]:
        """Launch a job; return its name and its Slurm job id."""
        said = self.echelon("launch", "recipe.yaml", "--to", "slurm", *overrides)
        match = re.search(r"launched (\S+) as (\d+);", said)
        assert match, said
        return match[1], match[2]

    def output(self, name: str) -> str:
        path = self.folder / "jobs" / name / "output.log"
        return path.read_text() if path.exists() else ""

    def rows(self, run: str = "tiny") -> list[dict[str, object]]:
        lines = read_lines(self.folder / "runs" / run / "metrics.jsonl")
        return [{key: row[key] for key in EXACT} for row in lines if row["kind"] == "train"]

    def await_step(self, step: int, run: str = "tiny", seconds: float = 90) -> None:
        path = self.folder / "runs" / run / "metrics.jsonl"
        deadline = time.monotonic() + seconds
        while not path.exists() or path.read_text().count('"kind": "train"') < step:
            logs = "\n".join(log.read_text()[-3000:] for log in self.folder.glob("jobs/*/output.log"))
            assert time.monotonic() < deadline, f"step {step} was not reached:\n{logs}"
            time.sleep(0.2)


@pytest.fixture
def desk(slurm, tmp_path):
    folder = tmp_path / "it's $HOME #1"
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    port = find_free_port("127.0.0.1")
    source = str(Path(sys.modules["echelon"].__file__).parents[1])
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": source, "ECHELON_RENDEZVOUS": f"127.0.0.1:{port}"}
    launch = {"python": sys.executable, "nproc_per_node": 1, "env": env, "slurm": {"gpus_per_node": 0}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "launch": launch}))
    return Desk(slurm, folder, port)


@pytest.mark.parametrize("script", sorted(GOLDEN.glob("slurm-*.sbatch")), ids=lambda path: path.stem)
def test_slurm_reads_the_options_of_the_golden_scripts(slurm, script):
    """It refuses one that it does not know or cannot read before it looks for the partition, which is not here."""
    words = ["sbatch", "--test-only", str(script)]
    answer = subprocess.run(words, env=slurm.env, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0 or answer.stderr.startswith("sbatch: error: invalid partition specified: gpu\n")


def test_two_machines_equal_one_machine_with_two_processes(desk):
    name, number = desk.launch("launch.nodes=2", "launch.slurm.options.partition=low", "launch.max_hours=1")
    assert desk.slurm.await_state(number, "COMPLETED", "FAILED") == "COMPLETED", desk.output(name)
    assert "done" in desk.echelon("status", name) and "step 6" in desk.echelon("status", name)
    assert desk.echelon("logs", number) == desk.output(name)
    there = desk.rows()
    desk.echelon("train", "recipe.yaml", "run.name=here", "--nproc", 2)
    here = desk.rows("here")
    assert [row["batch_hash"] for row in there] == [row["batch_hash"] for row in here]
    assert [row["loss"] for row in there] == pytest.approx([row["loss"] for row in here], rel=1e-6)


@pytest.mark.parametrize(
    "sync",
    [
        {"name": "local_sgd", "every": 2},
        {"name": "diloco", "every": 2, "compress": {"method": "int8"}},
        {"name": "parameter_server", "servers": 2},
        {"name": "parameter_server", "max_staleness": 2},
    ],
    ids=["local SGD", "DiLoCo", "servers", "asynchronous servers"],
)
def test_replicas_agree_between_the_machines_of_a_job(desk, sync):
    """As between two processes of one machine; with asynchronous servers losses depend on time."""
    words = (f"sync={json.dumps(sync)}", "parallel=ddp")
    name, number = desk.launch("launch.nodes=2", "launch.slurm.options.partition=low", *words)
    assert desk.slurm.await_state(number, "COMPLETED", "FAILED") == "COMPLETED", desk.output(name)
    assert f"sync: {sync['name']}, 2 " in desk.output(name)
    desk.echelon("train", "recipe.yaml", "run.name=here", "--nproc", 2, *words)
    there, here = desk.rows(), desk.rows("here")
    assert [row["batch_hash"] for row in there] == [row["batch_hash"] for row in here]
    if not sync.get("max_staleness"):
        assert [row["loss"] for row in there] == pytest.approx([row["loss"] for row in here], rel=1e-6)


LONG = ("train.steps=800", "train.log_every=400", "checkpoint.every=400")


def preempt(slurm):
    """Submit a job of a higher-priority partition on all cores of both nodes."""
    slurm.call("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")


def assert_resumed(desk, name, number, word):
    """Check that the job was stopped once by `word`, has saved, and ended with every step once."""
    assert desk.slurm.await_state(number, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", desk.output(name)
    assert desk.slurm.field(number, "Restarts") == "1"
    output = desk.output(name)
    assert output.count(f"echelon: stopped by {word} at step ") == 1
    stopped_at = int(re.search(rf"stopped by {word} at step (\d+)", output)[1])
    assert f"Resuming from step-{stopped_at:08d}." in output
    assert [row["step"] for row in desk.rows()] == list(range(1, 801))
    assert "restarted 1 time(s)" in desk.echelon("status", name)


def test_preempted_job_saves_is_requeued_and_finishes(desk):
    name, number = desk.launch("launch.nodes=2", "launch.slurm.options.partition=low", *LONG)
    desk.await_step(20)
    preempt(desk.slurm)
    desk.slurm.await_state(number, "PENDING")
    assert "queued" in desk.echelon("status", name)
    assert_resumed(desk, name, number, "SIGTERM")


def test_job_preempted_with_grace_time_requeues_itself(desk):
    name, number = desk.launch("launch.slurm.options.partition=grace", *LONG)
    desk.await_step(20)
    preempt(desk.slurm)
    desk.slurm.await_state(number, "PENDING")
    assert f"echelon: job {number} is requeued and will resume from " in desk.output(name)
    assert_resumed(desk, name, number, "SIGTERM")


def test_job_that_runs_out_of_time_saves_and_is_requeued(desk):
    name, number = desk.launch("launch.nodes=2", "fault.notice_seconds=5", "launch.max_hours=1", FOREVER, *LONG[1:])
    desk.await_step(20)
    started = time.monotonic()
    # A limit of two minutes; Slurm signals 65 seconds before it, or up to a minute earlier.
    desk.slurm.call("scontrol", "update", f"JobId={number}", "TimeLimit=2")
    desk.slurm.await_state(number, "PENDING", "FAILED")
    print(f"notice came after {time.monotonic() - started:.0f} s")
    assert f"echelon: job {number} is requeued and will resume from " in desk.output(name)
    assert desk.output(name).count("echelon: stopped by SIGUSR1 at step ") == 1
    desk.slurm.call("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    desk.slurm.await_state(number, "RUNNING")
    steps = len(desk.rows())
    desk.await_step(steps + 20)
    desk.slurm.call("scancel", number)  # Slurm itself signals, waits, and requeues nothing
    desk.slurm.await_state(number, "CANCELLED")
    assert "stopped" in desk.echelon("status", name)
    assert desk.output(name).count("echelon: stopped by SIGTERM at step ") == 1
    assert [row["step"] for row in desk.rows()] == list(range(1, len(desk.rows()) + 1))


def test_cancelled_job_saves_ends_and_is_launched_again(desk):
    longer = ("train.steps=4000", *LONG[1:])  # the commands below take seconds on a busy machine
    name, number = desk.launch(*longer)
    desk.await_step(20)
    assert "running" in desk.echelon("status", name)
    assert f"asked {name} to stop" in desk.echelon("cancel", name)
    desk.slurm.await_state(number, "FAILED")  # Slurm reports this state for every exit code other than 0
    assert "stopped" in desk.echelon("status", name)
    assert "requeued" not in desk.output(name)
    assert "has ended already" in desk.echelon("cancel", name, code=1)
    assert len(desk.rows()) < 4000
    ending = desk.echelon("launch", "recipe.yaml", "--to", "slurm", *longer, "--follow").splitlines()[-1]
    assert "step 4000" in ending and "done" in ending
    assert [row["step"] for row in desk.rows()] == list(range(1, 4001))


def test_waiting_job_is_cancelled_at_once(desk):
    name, number = desk.launch("launch.slurm.options.hold=true")
    assert "queued" in desk.echelon("status", name)
    desk.echelon("cancel", name)
    desk.slurm.await_state(number, "CANCELLED")
    assert "stopped" in desk.echelon("status", name)


def test_failure_is_printed_once_and_a_refusal_quotes_slurm(desk):
    name, number = desk.launch("launch.nodes=2", "launch.setup=['rm -f text.txt', echo ready]")
    desk.slurm.await_state(number, "FAILED")
    assert {"n1 | ready", "n2 | ready"} <= set(desk.output(name).splitlines())
    lines = [line for line in desk.output(name).splitlines() if " | echelon: " in line]
    assert len(lines) == 1 and "text.txt" in lines[0], desk.output(name)
    assert "failed" in desk.echelon("status", name)
    (desk.folder / "text.txt").write_text(TEXT)
    refused = desk.echelon("launch", "recipe.yaml", "--to", "slurm", "launch.slurm.options.partition=no such", code=1)
    assert "Invalid partition name specified" in refused


def test_each_machine_names_a_file_that_it_does_not_see(desk):
    name, number = desk.launch("launch.nodes=2", "launch.slurm.options.hold=true")
    (desk.folder / "text.txt").unlink()
    desk.slurm.call("scontrol", "release", number)
    desk.slurm.await_state(number, "FAILED")
    lines = [line for line in desk.output(name).splitlines() if line.startswith("echelon: ")]
    nodes = [re.match(r"echelon: (\S+) does not see .*/text\.txt, which all machines need", line) for line in lines]
    assert len({match[1] for match in nodes if match}) == len(lines) == 2, desk.output(name)
    assert (desk.folder / "jobs" / name / "exit_code").read_text() == "2\n"


def test_elastic_job_continues_when_a_machine_is_lost(desk):
    name, number = desk.launch("launch.nodes='1:2'", "launch.slurm.options.cpus-per-task=1", *LONG)
    # One machine may have begun alone.
    wait_until(lambda: "plan: ddp on 2 processes" in desk.output(name), 90, say=lambda: desk.output(name))
    desk.await_step(20)
    assert desk.slurm.field(number, "NumNodes") == "2"
    # Both nodes have the same address, so the store may be in either task.
    [lost] = [agent for agent in find_agents(desk.slurm) if not listens(agent, desk.port)]
    for process in (*lost.children(recursive=True), lost):
        process.kill()
    desk.slurm.await_state(number, "COMPLETED", "FAILED")
    assert "done" in desk.echelon("status", name), desk.output(name)
    assert [row["step"] for row in desk.rows()] == list(range(1, 801))


def test_a_job_that_loses_a_machine_is_requeued_without_it(desk):
    """The same node is free, but another one takes its place."""
    name, number = desk.launch("launch.nodes=2", "launch.slurm.options={partition: wide, cpus-per-task: 1}", *LONG)
    desk.await_step(20)
    [lost] = [agent for agent in find_agents(desk.slurm) if not listens(agent, desk.port)]
    node = lost.environ()["SLURMD_NODENAME"]
    for process in (lost, *lost.children(recursive=True)):
        process.kill()
    desk.slurm.await_state(number, "PENDING", "FAILED")
    assert f"echelon: job {number} is requeued without {node} and will resume from " in desk.output(name)
    assert desk.slurm.field(number, "ExcNodeList") == node
    time.sleep(2)  # in the second of its requeue slurmd refuses to start a job again
    desk.slurm.await_state(number, "RUNNING", "COMPLETED")
    assert {"n1": "n[2-3]", "n2": "n[1,3]"}[node] == desk.slurm.field(number, "NodeList")
    assert desk.slurm.await_state(number, "COMPLETED", "FAILED") == "COMPLETED", desk.output(name)
    assert [row["step"] for row in desk.rows()] == list(range(1, 801))


LIVING = {"fault.on_lost_process=continue": "replica_lost", "fault.on_lost_process=replace": "process_lost"}


@pytest.mark.parametrize("key", LIVING)
def test_the_others_live_on_when_a_process_is_lost(desk, key):
    """A process of the machine that does not keep them."""
    name, number = desk.launch("launch.nodes=2", "launch.slurm.options.cpus-per-task=1", key, *LONG)
    desk.await_step(20)
    [agent] = [agent for agent in find_agents(desk.slurm) if not listens(agent, desk.port)]
    logs = {child: os.readlink(f"/proc/{child.pid}/fd/1") for child in agent.children()}
    [worker] = [child for child, log in logs.items() if log.endswith("rank-00001.log")]
    worker.kill()
    assert desk.slurm.await_state(number, "COMPLETED", "FAILED") == "COMPLETED", desk.output(name)
    names = [event["event"] for event in read_lines(desk.folder / "runs" / "tiny" / "events.jsonl")]
    assert names.count(LIVING[key]) == 1 and not {"restart", "failure"} & set(names), names
    assert [row["step"] for row in desk.rows()] == list(range(1, 801))


def test_a_quorum_goes_on_without_a_machine(desk):
    quorum = "fault.on_lost_process=continue"
    name, number = desk.launch("launch.nodes=2", "launch.slurm.options.cpus-per-task=1", quorum, *LONG)
    desk.await_step(20)
    [lost] = [agent for agent in find_agents(desk.slurm) if not listens(agent, desk.port)]
    for process in (lost, *lost.children(recursive=True)):
        process.kill()
    desk.slurm.await_state(number, "COMPLETED", "FAILED")
    assert "done" in desk.echelon("status", name), desk.output(name)
    names = [event["event"] for event in read_lines(desk.folder / "runs" / "tiny" / "events.jsonl")]
    assert names.count("replica_lost") == 1 and not {"restart", "failure"} & set(names), names
    assert [row["step"] for row in desk.rows()] == list(range(1, 801))


def test_a_spare_machine_waits_until_the_job_ends(desk):
    name, number = desk.launch("launch.nodes=1+1", "launch.slurm.options.cpus-per-task=1")
    assert desk.slurm.await_state(number, "COMPLETED", "FAILED") == "COMPLETED", desk.output(name)
    assert [row["step"] for row in desk.rows()] == list(range(1, 7))
    assert "plan: ddp on 1 process;" in desk.output(name) and "this machine is a spare" in desk.output(name)


def listens(process, port):
    """Whether this process accepts connections on the port."""
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in process.net_connections())


def find_agents(slurm):
    """The processes of the Slurm tasks."""
    agents = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found = process.environ().get("SLURM_CONF") == slurm.env["SLURM_CONF"]
            if found and process.parent().name() == "slurmstepd" and "SLURM_PROCID" in process.environ():
                agents.append(process)
    return [agent for agent in agents if "echelon" in agent.cmdline()]


@pytest.mark.parametrize(("nodes", "tasks"), [(2, 1), (1, 2)])
def test_plain_srun_with_a_task_per_machine_or_per_process(desk, nodes, tasks):
    recipe = yaml.safe_load((desk.folder / "recipe.yaml").read_text())
    env = {**desk.slurm.env, **recipe["launch"]["env"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(desk.port)}
    ended = subprocess.run(
        ["srun", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--ntasks={nodes * tasks}",
         sys.executable, "-m", "echelon", "train", "recipe.yaml", *(["--nproc", "1"] if tasks == 1 else [])],
        cwd=desk.folder, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("plan: ddp on 2 processes") == 1
    assert [row["step"] for row in desk.rows()] == list(range(1, 7))


def test_array_of_three_jobs_two_at_a_time(desk, monkeypatch):
    monkeypatch.chdir(desk.folder)
    for key in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(key, desk.slurm.env[key])
    jobs = []
    for rate in ("1e-3", "2e-3", "3e-3"):
        overrides = [f"optim.learning_rate={rate}", f"run.name=rate-{rate}", "launch.to=slurm"]
        recipe, _ = load_recipe(Path("recipe.yaml"), overrides)
        jobs.append(make_job(recipe, Path.cwd()))
    launcher = SlurmLauncher()
    records = launcher.launch_array(jobs, 2)
    number = records[0].id.partition("_")[0]
    assert [record.id for record in records] == [f"{number}_{index}" for index in range(3)]
    most = 0
    deadline = time.monotonic() + 120
    while (states := [launcher.status(record).state for record in records]) != ["done"] * 3:
        assert time.monotonic() < deadline and "failed" not in states, states
        most = max(most, states.count("running"))
        time.sleep(0.3)
    assert most == 2
    for record in records:
        assert any("step 6/6" in line.replace(" ", " ") for line in launcher.logs(record, False))
    assert len({str(desk.rows(job.recipe.run.name)) for job in jobs}) == 3


def write_sweep(desk, **sections):
    """Write a sweep of short trials of the recipe."""
    fixed = {"launch.to": "slurm", "train.eval_every": 3, "fault.max_restarts": 0, **sections.pop("set", {})}
    text = yaml.safe_dump({"recipe": "recipe.yaml", "set": fixed, **sections})
    (desk.folder / "sweep.yaml").write_text(text)


def sweep(desk):
    """Run a sweep to its end; return its output."""
    ending = finish(start("sweep", "sweep.yaml", cwd=desk.folder, **desk.slurm.env), 240).succeeded()
    return ending.out


def job_ids(desk):
    """The Slurm job ids of each trial."""
    return {
        path.parent.name: json.loads(path.read_text())["id"] for path in desk.folder.glob("sweeps/lr/jobs/*/job.json")
    }


def most_at_once(desk):
    """The largest number of simultaneous trials, from the start and end events of each."""
    moments = []
    for path in desk.folder.glob("sweeps/lr/trials/*/events.jsonl"):
        times = [row["time"] for row in read_lines(path)]
        moments += [(times[0], 1), (times[-1], -1)]
    counts = [0]
    for _, change in sorted(moments):
        counts.append(counts[-1] + change)
    return max(counts)


def test_killed_sweep_of_a_grid_is_one_array_and_a_failing_trial_one_of_four(desk):
    rates = [1e-5, 1e-3, 1e-2, 1e30]  # the last one makes the weights NaN
    write_sweep(
        desk,
        sweep={"name": "lr", "sampler": "grid", "parallel": 2},
        set={"optim.warmup": 1},
        search={"optim.learning_rate": rates},
    )
    process = start("sweep", "sweep.yaml", cwd=desk.folder, **desk.slurm.env)
    wait_until(lambda: list(desk.folder.glob("sweeps/lr/trials/*/metrics.jsonl")), 90, process)
    process.kill()
    assert "jobs: an array of up to 4" in process.communicate()[0]
    said = sweep(desk)
    assert "0 trials have ended, 4 were running" in said and "is submitted as" not in said
    ids = job_ids(desk)
    number = ids["000-1"].partition("_")[0]
    assert ids == {f"{index:03d}-1": f"{number}_{index}" for index in range(4)}
    assert most_at_once(desk) == 2
    results = json.loads((desk.folder / "sweeps/lr/results.json").read_text())
    done, [failed] = results["trials"][:3], results["trials"][3:]
    assert [each["state"] for each in done] == ["done"] * 3 and failed["state"] == "failed"
    assert failed["parameters"] == {"optim.learning_rate": 1e30} and "finite" in failed["message"]
    losses = {}
    for each in done:
        rows = read_lines(desk.folder / each["run"] / "metrics.jsonl")
        losses[each["trial"]] = [row["loss"] for row in rows if row["kind"] == "eval"][-1]
    assert {each["trial"]: each["value"] for each in done} == losses
    assert results["best"] == min(losses, key=losses.__getitem__)


def test_stopped_sweep_cancels_its_array_and_resumes_with_another(desk):
    write_sweep(
        desk,
        sweep={"name": "lr", "sampler": "random", "trials": 3},
        set={"train.steps": 300, "train.eval_every": 100, "checkpoint.every": 100},
        search={"optim.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}},
    )
    process = start("sweep", "sweep.yaml", cwd=desk.folder, **desk.slurm.env)
    first = desk.folder / "sweeps/lr/trials/000/metrics.jsonl"
    wait_until(lambda: first.exists() and first.read_text().count('"kind": "train"') >= 20, 90, process)
    process.send_signal(signal.SIGTERM)
    ending = finish(process, 90)
    assert ending.code == 3 and "its trials have saved" in ending.err, ending
    assert not desk.slurm.call("squeue", "--noheader").strip()
    assert [path.name for path in desk.folder.glob("sweeps/lr/trials/*")] == ["000"]
    saved = len(read_lines(first))

    sweep(desk)
    before, after = (job_ids(desk)[name].partition("_")[0] for name in ("000-1", "000-2"))
    assert job_ids(desk) == {
        f"{trial:03d}-{start}": f"{number}_{trial}" for start, number in ((1, before), (2, after)) for trial in range(3)
    }
    assert most_at_once(desk) == 1
    results = json.loads((desk.folder / "sweeps/lr/results.json").read_text())
    assert [each["state"] for each in results["trials"]] == ["done"] * 3
    steps = [row["step"] for row in read_lines(first) if row["kind"] == "train"]
    assert steps == list(range(1, 301)) and saved < 300


def test_sweep_that_learns_from_results_submits_one_by_one(desk):
    write_sweep(
        desk,
        sweep={"name": "lr", "sampler": "tpe", "trials": 3},
        search={"optim.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}},
    )
    said = sweep(desk)
    assert "jobs: one by one, without an array, because the values of sweep.sampler=tpe depend on" in said
    ids = [job_ids(desk)[f"{index:03d}-1"] for index in range(3)]
    assert [int(number) for number in ids] == sorted({int(number) for number in ids})
    assert most_at_once(desk) == 1
    results = json.loads((desk.folder / "sweeps/lr/results.json").read_text())
    assert [each["state"] for each in results["trials"]] == ["done"] * 3
