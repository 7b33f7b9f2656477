"""The scripts of a Slurm job: the batch script, the script of each machine, and the options of the job step that
starts them with srun."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_text
from echelon.ground.variables import asked_environment
from echelon.launch.job import JobSpec, count_gpus, describe_gpu_request, list_inputs
from echelon.launch.shell import join_words, prepare_lines
from echelon.planner.replica_limits import name_living_on
from echelon.recipe.launch_sections import Options, SlurmContainerConfig
from echelon.recipe.yaml_text import read_table

BATCH, ARRAY, MACHINE, NEEDED = "job.sbatch", "array.sbatch", "machine.sh", "needed.txt"
LOG, CODE, CANCELLED = "output.log", "exit_code", "cancelled"
"""Files in the job's folder: its output, its exit code, and a marker that `echelon cancel` was called."""

# Between signal and time limit, in addition to the time to save: processes exit, the script requeues the job.
_LEAVING_SECONDS = 60
# Limit of sbatch's --signal.
_MOST_NOTICE_SECONDS = 65535

# The whole batch script. @NAMES@ are replaced, and the lines from `@IF case` to `@END` are for one case only.
_SCRIPT = read_text(Path(__file__).with_name("slurm_job.sh"))
_LONG_OPTION = re.compile(r"[a-z][a-z0-9-]+")

_KEY = "launch.slurm"
_OPTIONS: Mapping[str, Any] = read_table(Path(__file__).with_name("slurm_options.yaml"))
_REASON = "echelon starts one step with one task per machine, whose output is the job's"
_MOUNT = re.compile(r"(?P<source>(?:/|~/)[^:,]*)(?::(?P<target>/[^:,]*)(?::(?P<flags>[a-z+]+))?)?")


def render_batch(job: JobSpec) -> str:
    """The script for sbatch. Raises ConfigError for a value that cannot be written into a directive."""
    names = (f"job={_quote(job, job.folder)}", f"run={_quote(job, job.recipe.run.dir)}", "id=$SLURM_JOB_ID")
    output = _directive("output", _literal(job) + f"/{LOG}")
    return _fill(job, [*_directives(job, job.name), output], names)


def render_array(jobs: Sequence[JobSpec], parallel: int) -> str:
    """One script for several jobs, `parallel` of them at a time; each has its own folder, recipe and output.

    Raises ConfigError if the jobs request different resources, or `parallel` is not between 1 and their number.
    """
    first = jobs[0]
    if not 1 <= parallel <= len(jobs):
        raise ConfigError(f"cannot run {parallel} of {len(jobs)} jobs at a time; use 1 to {len(jobs)}.")
    for job in jobs:
        if _fill(job, _directives(job, "array")) != _fill(first, _directives(first, "array")):
            raise ConfigError(
                f"the jobs of an array must request the same resources and time; {job.name} differs from {first.name} "
                "in launch, fault.notice_seconds or fault.max_restarts; launch it separately."
            )
    directives = (
        *_directives(first, first.name),
        f"#SBATCH --array=0-{len(jobs) - 1}%{parallel}",
        _directive("output", _literal(first) + "/array-%a.log"),
    )
    names = (
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
    return _fill(first, directives, names)


def render_machine(job: JobSpec) -> str:
    """The script of each machine's task: the setup, then `exec echelon train`, which gets every signal directly."""
    train = join_words(job.train_command(str(job.recipe_path)))
    fewest, most = job.nodes
    if _outlives_machines(job):
        launch = job.recipe.launch
        nodes = str(launch.nodes) if launch.num_spares or fewest == most else f"{fewest}:$SLURM_STEP_NUM_NODES"
        train += f' --nodes "{nodes}" --rendezvous "$ECHELON_RENDEZVOUS"'
    lines = (
        "#!/bin/bash",
        *prepare_lines(
            job.recipe.launch,
            job.workdir,
            asked_environment(count_gpus(job), describe_gpu_request(job)),
        ),
        f"exec {train}",
    )
    return "\n".join(lines) + "\n"


def check_request(job: JobSpec) -> None:
    """Raise ConfigError for what sbatch would refuse, or what would conflict with echelon's part of the script."""
    launch = job.recipe.launch
    slurm = launch.slurm
    memory = slurm.options.get("mem")
    if memory is not None and not re.fullmatch(r"\d+[KMGT]?", str(memory)):
        raise ConfigError(
            f"launch.slurm.options.mem={memory} is not a valid Slurm memory size; use a whole number of megabytes, a "
            "number with K, M, G or T, such as 200G, or 0 for all memory."
        )
    notice = _notice_seconds(job)
    if notice > _MOST_NOTICE_SECONDS:
        raise ConfigError(
            f"fault.notice_seconds={job.recipe.fault.notice_seconds:g}: Slurm sends its signal at most "
            f"{_MOST_NOTICE_SECONDS} s before the end; use {_MOST_NOTICE_SECONDS - _LEAVING_SECONDS} or less."
        )
    # Slurm may send the signal up to a minute earlier than asked for.
    if launch.max_hours is not None and launch.max_hours * 3600 < notice + 60:
        raise ConfigError(
            f"launch.max_hours={launch.max_hours:g} leaves no time to train: the run gets the signal to save {notice} "
            "s before the end (fault.notice_seconds plus a minute to exit), or up to a minute earlier; use more than "
            f"{math.ceil((notice + 60) / 36) / 100:g}."
        )
    for name, value in slurm.options.items():
        _check_option(job, name, value)
    check_step(job)


def format_time(hours: float) -> str:
    """Format a time limit for sbatch, rounded up to its resolution of a minute: `36:00:00`."""
    minutes = math.ceil(round(hours * 60, 6))
    return f"{minutes // 60}:{minutes % 60:02d}:00"


def _check_option(job: JobSpec, name: str, value: str | int | bool) -> None:
    slurm = job.recipe.launch.slurm
    key = f"launch.slurm.options.{name}"
    if re.match(r"(no-)?container(-|$)", name):
        raise ConfigError(
            f"{key}={value}: the batch script calls srun, so it cannot run in a container; set launch.slurm.container, "
            "which runs each machine's task in one."
        )
    reason = "echelon submits one job with one task per machine and writes its output to the job's folder"
    check_option("launch.slurm.options", name, value, "batch", reason)
    asks_gpus = name in ("gpus", "gpus-per-task", "gpus-per-socket") or (name == "gres" and "gpu" in str(value))
    if asks_gpus and count_gpus(job):
        raise ConfigError(
            f"{key}={value}: launch.slurm.gpus_per_node or launch.nproc_per_node already requests "
            f"{count_gpus(job)} GPUs per machine; remove the option, or set launch.slurm.gpus_per_node: 0."
        )
    if name in ("mem-per-cpu", "mem-per-gpu") and "mem" in slurm.options:
        raise ConfigError(f"{key}={value} and mem={slurm.options['mem']} exclude each other; remove one.")


def _notice_seconds(job: JobSpec) -> int:
    return math.ceil(job.recipe.fault.notice_seconds) + _LEAVING_SECONDS


def _directives(job: JobSpec, name: str) -> list[str]:
    """The `#SBATCH` lines, except output and array."""
    launch = job.recipe.launch
    slurm = launch.slurm
    fewest, most = job.nodes
    options: dict[str, str | int | bool | None] = {
        "job-name": name,
        "nodes": fewest if fewest == most else f"{fewest}-{most}",
        # With a range of machines Slurm would read it as the total number of tasks, and allocate one machine.
        "ntasks-per-node": 1 if fewest == most else None,
        "gpus-per-node": count_gpus(job) or None,
        "time": None if launch.max_hours is None else format_time(launch.max_hours),
        # Sent to the steps, not to the batch shell.
        "signal": f"USR1@{_notice_seconds(job)}",
        "requeue" if slurm.requeue else "no-requeue": True,
        "no-kill": _outlives_machines(job),  # the others continue when a machine fails
        "open-mode": "append",
        "chdir": str(job.workdir),
        **slurm.options,
    }
    return [_directive(option, value) for option, value in options.items() if value is not None and value is not False]


def _fill(job: JobSpec, directives: Sequence[str], names: Sequence[str] = ()) -> str:
    """The batch script with these directives, and these lines that name the job's folders."""
    slurm = job.recipe.launch.slurm
    elastic, binds = _outlives_machines(job), "cpu-bind" not in slurm.srun_options
    many = job.nodes[1] > 1 and slurm.srun_options.get("label") is not False
    # srun does not inherit the cores from sbatch. Tasks agree on their exit code: a task's non-zero code does not end
    # the others, but when a task is killed silently, the others are ended after a minute.
    options: dict[str, str | int | bool] = {
        **{name: value for name, value in slurm.options.items() if name == "cpus-per-task"},
        "kill-on-bad-exit": 0,
        "wait": 0 if elastic else _LEAVING_SECONDS,
        "no-kill": elastic,
    }
    # With a fixed number of machines `echelon train` finds the rendezvous itself. A container has no scontrol.
    cases = {"unbound": binds, "elastic": elastic, "fixed": not elastic, "requeue": slurm.requeue, "many": many}
    text = re.sub(r"@IF (\w+)\n(.*?)@END\n", lambda part: part[2] if cases[part[1]] else "", _SCRIPT, flags=re.DOTALL)
    words = {
        "DIRECTIVES": "\n".join(directives),
        "NAMES": "\n".join(names),
        "BIND": ' "${bind[@]}"' if binds else "",
        "LOOK": " ".join(render_options({**options, **slurm.srun_options, "chdir": "/"})),
        "TASK": render_task(job, {**options, "label": many}, f'bash "$job/{MACHINE}"'),
        "NAMED": " 2>&1 | name_lines" if many else "",
        "ROUNDS": str(job.recipe.fault.max_restarts),
    }
    return re.sub(r"@([A-Z]+)@", lambda name: words[name[1]], text)


def _outlives_machines(job: JobSpec) -> bool:
    """Whether the others go on when a machine is lost: with a range of machines or spares, or if processes live on."""
    fewest, most = job.nodes
    return fewest != most or (most > 1 and name_living_on(job.recipe) is not None)


def _quote(job: JobSpec, path: object) -> str:
    return shlex.quote(str(job.workdir / str(path)))


def _literal(job: JobSpec) -> str:
    """The job's folder with `%` escaped, which starts a pattern in Slurm's file names."""
    return str(job.folder).replace("%", "%%")


def _directive(option: str, value: str | int | bool) -> str:
    """A `#SBATCH` line. Within quotes a backslash escapes, and nothing is expanded."""
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


def check_step(job: JobSpec) -> None:
    """Raise ConfigError for an option that srun or the container's runtime cannot take, and for a hidden folder."""
    slurm = job.recipe.launch.slurm
    for name, value in slurm.srun_options.items():
        check_option(f"{_KEY}.srun_options", name, value, "step", _REASON)
        if re.match(r"(no-)?container-", name):
            raise ConfigError(
                f"{_KEY}.srun_options.{name}={value} is an option of pyxis; set {_KEY}.container, with "
                f"{name} under {_KEY}.container.options."
            )
    if slurm.container is None:
        return
    for name, value in slurm.container.options.items():
        check_option(f"{_KEY}.container.options", name, value, "step", _REASON)
    if not slurm.container.image.isprintable():
        raise ConfigError(f"{_KEY}.container.image={slurm.container.image!r} must be one line of printable characters.")
    for mount in slurm.container.mounts:
        if not _MOUNT.fullmatch(mount) or not mount.isprintable():
            raise ConfigError(
                f"{_KEY}.container.mounts: {mount!r} is not SOURCE[:TARGET[:FLAGS]] with absolute paths that have no "
                "comma; write it like /scratch, or /scratch/data:/data:ro."
            )
    if re.search("[:,]", str(job.workdir)):
        raise ConfigError(
            f"{_KEY}.container: the working directory {job.workdir} cannot be mounted, because its name has a colon or "
            "a comma; launch from another folder."
        )
    for key, path in (("run.dir", job.recipe.run.dir), ("the job's folder", job.folder)):
        if not _is_visible(job, slurm.container, path):
            raise ConfigError(
                f"{key}={path} is {job.workdir / path}, which the container does not see; add its folder to "
                f"{_KEY}.container.mounts, under the same path."
            )


def list_hidden_inputs(job: JobSpec) -> list[str]:
    """A line for each input outside of the mounts; the cluster may mount it in every container."""
    if (container := job.recipe.launch.slurm.container) is None:
        return []
    return [
        f"{key}={path} is not below a folder of {_KEY}.container.mounts; add it, unless the cluster mounts it"
        for key, path in list_inputs(job.recipe)
        if not _is_visible(job, container, Path(path).expanduser())
    ]


def render_task(job: JobSpec, own: Options, command: str) -> str:
    """The rest of the srun line: echelon's options and the recipe's, then the command, in its container if it has one.

    `command` is quoted for the shell already.
    """
    slurm = job.recipe.launch.slurm
    words = render_options({**own, **slurm.srun_options})
    if slurm.container is None:
        return " ".join([*words, command])
    image = str(Path(slurm.container.image).expanduser()) if slurm.container.image[:1] == "~" else slurm.container.image
    mounts = _list_mounts(job, slurm.container)
    if slurm.container.runtime == "pyxis":
        flags = {"container-image": image, "container-mounts": ",".join(mounts), **slurm.container.options}
        return " ".join([*words, *render_options(flags), command])
    # --nv: the GPUs and their driver; without GPUs it only warns.
    options = render_options({"nv": "rocm" not in slurm.container.options, **slurm.container.options})
    options += [shlex.quote(f"--bind={mount}") for mount in mounts]
    return " ".join([*words, "apptainer", "exec", *options, shlex.quote(image), command])


def check_option(
    section: str,
    name: str,
    value: str | int | bool,
    command: Literal["batch", "step"],
    reason: str,
) -> None:
    """Raise ConfigError for an option in this section of the recipe that a command cannot take.

    `reason` is why options are impossible, in `slurm_options.yaml`.
    """
    taken, impossible = _OPTIONS["own"][command], _OPTIONS["impossible"][command].split()
    key = f"{section}.{name}"
    if not _LONG_OPTION.fullmatch(name):
        raise ConfigError(f"{key}: {name!r} is not a long option; write it like mail-type.")
    if name in taken:
        raise ConfigError(f"{key}={value}: echelon sets this option from {taken[name]}; set that key instead.")
    if name in impossible:
        raise ConfigError(f"{key}={value}: {reason}; remove the option.")
    if not str(value).isprintable():
        raise ConfigError(f"{key}={value!r} must be one line of printable characters.")


def render_options(options: Options) -> list[str]:
    """The words of a command for long options, quoted for the shell."""
    return [
        f"--{name}" if value is True else shlex.quote(f"--{name}={value}")
        for name, value in options.items()
        if value is not False
    ]


def _list_mounts(job: JobSpec, container: SlurmContainerConfig) -> list[str]:
    """SOURCE:TARGET[:FLAGS] of each mount, the working directory first."""
    mounts = [f"{job.workdir}:{job.workdir}"]
    for mount in container.mounts:
        source, target, flags = _read_mount(mount)
        mounts.append(":".join([source, target, *([flags] if flags else [])]))
    return mounts


def _read_mount(mount: str) -> tuple[str, str, str]:
    match = _MOUNT.fullmatch(mount)
    assert match is not None, mount
    source = str(Path(match["source"]).expanduser())
    return source, match["target"] or source, match["flags"] or ""


def _is_visible(job: JobSpec, container: SlurmContainerConfig, path: str | Path) -> bool:
    """Whether the container sees a path of this machine under the same name."""
    absolute = job.workdir / path
    return absolute.is_relative_to(job.workdir) or any(
        absolute.is_relative_to(target) for _, target, _ in map(_read_mount, container.mounts)
    )
