"""The texts of a Slurm job: the batch script, what each of its machines runs, and what can be wrong with either."""

import math
import re
import shlex
from collections.abc import Sequence

from echelon.errors import ConfigError
from echelon.launch.job import JobSpec
from echelon.launch.shell import join_words, prepare_lines

BATCH, ARRAY, MACHINE = "job.sbatch", "array.sbatch", "machine.sh"
LOG, CODE, CANCELLED = "output.log", "exit_code", "cancelled"
"""What stands in the job's folder: its output, how it ended, and whether `echelon cancel` was called."""

# From the signal to the end, beside the time to save: for the processes to leave, and for the script to requeue.
_LEAVING_SECONDS = 60
# Limit of sbatch's --signal.
_MOST_NOTICE_SECONDS = 65535

# Options of sbatch that echelon gives itself, and the key that says them.
_OWN_OPTIONS = {
    "nodes": "launch.nodes", "time": "launch.max_hours", "signal": "fault.notice_seconds", "job-name": "run.name",
    "partition": "launch.slurm.partition", "account": "launch.slurm.account", "qos": "launch.slurm.qos",
    "constraint": "launch.slurm.constraint", "reservation": "launch.slurm.reservation",
    "gpus-per-node": "launch.slurm.gpus_per_node", "cpus-per-task": "launch.slurm.cpus_per_task",
    "mem": "launch.slurm.memory", "exclusive": "launch.slurm.exclusive",
    "no-kill": "launch.nodes=MIN:MAX",
    "requeue": "launch.slurm.requeue", "no-requeue": "launch.slurm.requeue",
}  # fmt: skip
# Options without which echelon would not find its job again, or that submit none.
_IMPOSSIBLE_OPTIONS = {
    "ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket", "output", "error",
    "open-mode", "chdir", "array", "wrap", "wait", "parsable", "test-only", "help", "usage", "version", "clusters",
}  # fmt: skip

# With a fixed number of machines `echelon train` finds this by itself.
_MEETING = 'first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)'
_RENDEZVOUS = '"${ECHELON_RENDEZVOUS:-$first:$((20000 + SLURM_JOB_ID % 10000))}"'
_START = f"""
# Slurm signals this shell too when it ends the job; it stays, to note how training ended.
trap : TERM INT USR1
finish() {{
    echo "$1" > "$job/{CODE}.new" && mv "$job/{CODE}.new" "$job/{CODE}"
    exit "$1"
}}
rm -f "$job/{CODE}"
if [ -e "$job/{CANCELLED}" ]; then finish 3; fi

# SageMaker HyperPod replaces a machine that broke and runs the step again.
auto_resume=()
if [ -d /opt/sagemaker_cluster ]; then auto_resume=(--auto-resume=1); fi

# One task a machine, which starts the machine's processes.
srun "${{auto_resume[@]}}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\
    --cpu-bind=none @WORDS@
code=$?
"""
_LOST = """
# A machine that was lost leaves a code of its own; the run says whether the others finished it.
if [ $code -gt 3 ] && [ -e "$run/outcome.json" ]; then code=0; fi
"""
_EARLY = """
# 138 and 143: USR1 or TERM came before training had begun, so there was nothing to save.
early=
if [ $code -eq 138 ] || [ $code -eq 143 ]; then code=3 early=yes; fi
"""
_REQUEUE = f"""
# Training was stopped by a signal, not by a budget or by `echelon cancel`, and has saved: back into the queue. Where
# Slurm itself ends the job (scancel, preemption) it is not RUNNING any more, and what follows is Slurm's to decide.
if [ $code -eq 3 ] && [ ! -e "$job/{CANCELLED}" ] &&
    {{ [ "$early" ] || tail -n 1 "$run/events.jsonl" | grep -q 'stopped by SIG\\(TERM\\|USR1\\)'; }} &&
    scontrol --oneliner show job "$id" | grep -q ' JobState=RUNNING '; then
    newest=$(find "$run/checkpoints" -maxdepth 1 -name 'step-*' 2> /dev/null | sort | tail -n 1)
    if [ -e "$job/requeued" ] && [ "$(cat "$job/requeued")" = "$newest" ]; then
        echo "echelon: job $id is not requeued: nothing was saved since it was requeued before; see launch.max_hours"
    else
        echo "$newest" > "$job/requeued"
        echo "echelon: job $id is requeued, to go on from ${{newest:-the beginning}}"
        scontrol requeue "$id" && exit 3
    fi
fi
"""
_END = """
finish $code
"""


def render_batch(job: JobSpec) -> str:
    """The script that sbatch takes. Raises ConfigError for a value that no line of it can hold."""
    names = (f"job={_quote(job, job.folder)}", f"run={_quote(job, job.recipe.run.dir)}", "id=$SLURM_JOB_ID")
    output = _directive("output", _literal(job) + f"/{LOG}")
    return "\n".join(("#!/bin/bash", *_directives(job, job.name), output, "", *names)) + _body(job)


def render_array(jobs: Sequence[JobSpec], parallel: int) -> str:
    """One script for several jobs, `parallel` of them at a time; each has its own folder, recipe and output.

    Raises ConfigError where they ask Slurm for different things, or where `parallel` is not a number of them.
    """
    first = jobs[0]
    if not 1 <= parallel <= len(jobs):
        raise ConfigError(f"{parallel} of {len(jobs)} jobs at a time cannot be; use 1 to {len(jobs)}.")
    for job in jobs:
        if _directives(job, "array") != _directives(first, "array") or _body(job) != _body(first):
            raise ConfigError(
                f"the jobs of an array ask Slurm for the same machines and time; {job.name} differs from {first.name} "
                "in launch or fault.notice_seconds: launch it by itself."
            )
    lines = (
        "#!/bin/bash",
        *_directives(first, first.name),
        f"#SBATCH --array=0-{len(jobs) - 1}%{parallel}",
        _directive("output", _literal(first) + "/array-%a.log"),
        "",
        "jobs=(",
        *(f"    {_quote(job, job.folder)}" for job in jobs),
        ")",
        "runs=(",
        *(f"    {_quote(job, job.recipe.run.dir)}" for job in jobs),
        ")",
        "job=${jobs[SLURM_ARRAY_TASK_ID]}",
        "run=${runs[SLURM_ARRAY_TASK_ID]}",
        "id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        f'exec >> "$job/{LOG}" 2>&1',
    )
    return "\n".join(lines) + _body(first)


def render_machine(job: JobSpec) -> str:
    """The script of each machine's task: the setup, then `echelon train`, to which every signal comes directly."""
    train = join_words(job.train_command(str(job.recipe_path)))
    fewest, most = job.nodes
    if fewest != most:
        train += f' --nodes "{fewest}:$SLURM_STEP_NUM_NODES" --rendezvous {_RENDEZVOUS}'
    lines = (
        "#!/bin/bash",
        *prepare_lines(job.recipe.launch, job.workdir),
        *([_MEETING] if fewest != most else []),
        f"exec {train}",
    )
    return "\n".join(lines) + "\n"


def check_request(job: JobSpec) -> None:
    """Raise ConfigError for what sbatch would refuse, or what would work against echelon's own part of the script."""
    launch = job.recipe.launch
    slurm = launch.slurm
    if slurm.memory is not None and not re.fullmatch(r"\d+[KMGT]?", str(slurm.memory)):
        raise ConfigError(
            f"launch.slurm.memory={slurm.memory} is no size as Slurm reads it; use a whole number of megabytes, or one "
            "with K, M, G or T, such as 200G, or 0 for all there is."
        )
    notice = _notice_seconds(job)
    if notice > _MOST_NOTICE_SECONDS:
        raise ConfigError(
            f"fault.notice_seconds={job.recipe.fault.notice_seconds:g}: Slurm gives notice at most "
            f"{_MOST_NOTICE_SECONDS} s before the end; use {_MOST_NOTICE_SECONDS - _LEAVING_SECONDS} or less."
        )
    # Slurm may send the signal up to a minute earlier than asked for.
    if launch.max_hours is not None and launch.max_hours * 3600 < notice + 60:
        raise ConfigError(
            f"launch.max_hours={launch.max_hours:g} leaves no time to train: the run is asked to save {notice} s "
            "before the end (fault.notice_seconds and a minute to leave), or up to a minute earlier; use more than "
            f"{math.ceil((notice + 60) / 36) / 100:g}."
        )
    for name, value in slurm.options.items():
        _check_option(job, name, value)


def count_gpus(job: JobSpec) -> int:
    """GPUs asked for on each machine; 0: none are asked for."""
    launch = job.recipe.launch
    if launch.slurm.gpus_per_node is not None:
        return launch.slurm.gpus_per_node
    return 0 if launch.nproc_per_node == "auto" else launch.nproc_per_node


def format_time(hours: float) -> str:
    """As sbatch reads it, rounded up to its resolution, a minute: `36:00:00`."""
    minutes = math.ceil(round(hours * 60, 6))
    return f"{minutes // 60}:{minutes % 60:02d}:00"


def _check_option(job: JobSpec, name: str, value: str | int | bool) -> None:
    slurm = job.recipe.launch.slurm
    key = f"launch.slurm.options.{name}"
    if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        raise ConfigError(f"{key}: {name!r} is no long name of sbatch's options; write it like mail-type.")
    if name in _OWN_OPTIONS:
        raise ConfigError(f"{key}={value}: this is what {_OWN_OPTIONS[name]} says; set that, and leave the option out.")
    if name in _IMPOSSIBLE_OPTIONS:
        raise ConfigError(
            f"{key}={value}: echelon submits one job with one task a machine, and its output in the job's folder; "
            "leave the option out."
        )
    asks_gpus = name in ("gpus", "gpus-per-task", "gpus-per-socket") or (name == "gres" and "gpu" in str(value))
    if asks_gpus and count_gpus(job):
        raise ConfigError(
            f"{key}={value}: {count_gpus(job)} GPUs a machine are asked for already, by launch.slurm.gpus_per_node or "
            "launch.nproc_per_node; leave the option out, or set launch.slurm.gpus_per_node: 0."
        )
    if name in ("mem-per-cpu", "mem-per-gpu") and slurm.memory is not None:
        raise ConfigError(f"{key}={value}: launch.slurm.memory={slurm.memory} says it already; leave one of them out.")


def _notice_seconds(job: JobSpec) -> int:
    return math.ceil(job.recipe.fault.notice_seconds) + _LEAVING_SECONDS


def _directives(job: JobSpec, name: str) -> list[str]:
    """The `#SBATCH` lines, but for output and array."""
    launch = job.recipe.launch
    slurm = launch.slurm
    fewest, most = job.nodes
    given: dict[str, str | int | bool | None] = {
        "job-name": name,
        "nodes": fewest if fewest == most else f"{fewest}-{most}",
        # With a range of machines Slurm would take it for all the tasks there are, and give one machine.
        "ntasks-per-node": 1 if fewest == most else None,
        "gpus-per-node": count_gpus(job) or None,
        "cpus-per-task": slurm.cpus_per_task,
        "mem": slurm.memory,
        "exclusive": slurm.exclusive,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "reservation": slurm.reservation,
        "time": None if launch.max_hours is None else format_time(launch.max_hours),
        # To the steps; the batch shell hears nothing.
        "signal": f"USR1@{_notice_seconds(job)}",
        "requeue" if slurm.requeue else "no-requeue": True,
        "no-kill": fewest != most,  # a machine that breaks leaves the others to go on
        "open-mode": "append",
        "chdir": str(job.workdir),
        **slurm.options,
    }
    return [_directive(option, value) for option, value in given.items() if value is not None and value is not False]


def _body(job: JobSpec) -> str:
    slurm = job.recipe.launch.slurm
    fewest, most = job.nodes
    elastic = fewest != most
    # srun does not take the cores over from sbatch. Tasks agree on how they end: none is ended because another one left
    # with a code, but one that was killed without a word has the others ended after a minute.
    words = [] if slurm.cpus_per_task is None else [f"--cpus-per-task={slurm.cpus_per_task}"]
    words += ["--kill-on-bad-exit=0", f"--wait={0 if elastic else _LEAVING_SECONDS}"]
    words += ["--no-kill"] if elastic else []
    words += ["bash", f'"$job/{MACHINE}"']
    parts = [_START.replace("@WORDS@", " ".join(words)), _LOST if elastic else "", _EARLY]
    return "".join([*parts, _REQUEUE if slurm.requeue else "", _END])


def _quote(job: JobSpec, path: object) -> str:
    return shlex.quote(str(job.workdir / str(path)))


def _literal(job: JobSpec) -> str:
    """The job's folder where Slurm reads `%` as the start of a pattern."""
    return str(job.folder).replace("%", "%%")


def _directive(option: str, value: str | int | bool) -> str:
    """A `#SBATCH` line: within quotes a backslash escapes, and nothing is expanded."""
    if value is True:
        return f"#SBATCH --{option}"
    text = str(value)
    if not text or not text.isprintable():
        raise ConfigError(
            f"launch.to=slurm: {text!r} cannot be the value of sbatch's --{option}; use one line of printable "
            "characters."
        )
    if not re.fullmatch(r"[\w@%+=:,./-]+", text):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{option}={text}"
