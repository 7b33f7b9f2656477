"""Jobs: a recipe to train at some target, and the interface of the launchers that start it there."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol, runtime_checkable

from echelon.learn.task_files import is_question_file, is_task_file
from echelon.recipe import Recipe
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.section import Section

JobState = Literal["queued", "running", "done", "failed", "stopped", "unknown"]
"""`stopped`: by a signal or a budget, after a save; the job resumes when it is launched again."""

GpuTarget = Literal["slurm", "kubernetes", "ray"]
"""The targets whose section of the recipe has `gpus_per_node`."""

_STDLIB = "python-stdlib"

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""The pattern of a job's name, and of what targets call it."""

FINAL_STATES: frozenset[JobState] = frozenset({"done", "failed", "stopped"})


@dataclass(frozen=True)
class JobSpec:
    """The input of every launcher: a recipe, whose `launch` section names the target and the resources.

    `name` is unique, starts with a letter and has at most 63 letters, digits and dashes. `folder` is the job's folder
    on this machine, `jobs/NAME`; it may not exist yet. Relative paths in the recipe start from `workdir`.
    """

    name: str
    recipe: Recipe
    folder: Path
    workdir: Path

    @property
    def recipe_path(self) -> Path:
        """The absolute path of the resolved recipe, as launched."""
        return self.workdir / self.folder / "recipe.yaml"

    @property
    def nodes(self) -> tuple[int, int]:
        """The minimum and maximum number of machines."""
        return self.recipe.launch.node_range

    def train_command(self, recipe_path: str, python: str | None = None) -> tuple[str, ...]:
        """The command of each machine: `echelon train`, which finds its peers through the environment."""
        launch = self.recipe.launch
        argv = (python or launch.python, "-m", "echelon", "train", recipe_path)
        return argv if launch.nproc_per_node == "auto" else (*argv, "--nproc", str(launch.nproc_per_node))


def count_gpus(job: JobSpec, target: GpuTarget) -> int:
    """The number of GPUs that a job requests on each machine of a target; 0 if it requests none."""
    launch = job.recipe.launch
    own: int | None = getattr(launch, target).gpus_per_node
    if own is not None:
        return own
    return 0 if launch.nproc_per_node == "auto" else launch.nproc_per_node


def describe_gpu_request(job: JobSpec, target: GpuTarget) -> str:
    """The key of `count_gpus`, with its value."""
    is_own = getattr(job.recipe.launch, target).gpus_per_node is not None
    return f"launch.{f'{target}.gpus_per_node' if is_own else 'nproc_per_node'}={count_gpus(job, target)}"


def list_inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Key and path of each input of a job. A relative model or tokenizer may be a hub id, so it is left out."""
    for key, sources in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation or ())):
        for index, source in enumerate(sources):
            if source.path != _STDLIB and source.format != "hub":
                yield f"{key}.{index}.path", source.path
    for index, task in enumerate(recipe.evaluate.tasks):
        if is_task_file(task) or is_question_file(task):
            yield f"evaluate.tasks.{index}", task
    for key, value in (("model.checkpoint", recipe.model.checkpoint), ("tokenizer", recipe.tokenizer)):
        if isinstance(value, str) and value.startswith("/"):
            yield key, value


@dataclass(frozen=True)
class JobRecord:
    """A submitted job, as stored in `jobs/NAME/job.json`.

    `id` identifies the job at its target: a process id, a Slurm job id, an ARN. `place` has whatever else the target
    needs to find the job again, such as a region.
    """

    name: str
    target: str
    id: str
    run_dir: str
    submitted_at: float
    folder: Path = Path()
    place: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordForm:
    """What the records of a target's jobs may say, since a record may come with a stranger's folder.

    Attributes:
        id: the pattern of the id. Values become arguments of commands and requests, so no pattern admits an option.
        place: the pattern of each key of `place`; a key that may be missing ends in `?`.
        needs_own: whether `place` has addresses. Then a launcher gets only records that a launch of this account wrote.
    """

    id: str
    place: Mapping[str, str] = field(default_factory=dict)
    needs_own: bool = False

    def find_fault(self, record: JobRecord) -> str | None:
        """Which value of a record has another form; None if it has this one."""
        rows = [("id", self.id, record.id)]
        for key, pattern in self.place.items():
            name, is_optional = key.rstrip("?"), key.endswith("?")
            if name in record.place or not is_optional:
                rows.append((f"place.{name}", pattern, record.place.get(name, "")))
        unknown = set(record.place) - {key.rstrip("?") for key in self.place}
        if unknown:
            return f"place.{min(unknown)} is unknown"
        return next((f"{key} is {value!r:.60}" for key, form, value in rows if not re.fullmatch(form, value)), None)


@dataclass(frozen=True)
class JobStatus:
    """The status of a job: a state that all targets share, and details in the target's own terms.

    `exit_code`, `billed_usd` and `billed_hours` are None if the target does not report them.
    """

    state: JobState
    detail: str = ""
    exit_code: int | None = None
    billed_hours: float | None = None
    billed_usd: float | None = None


@dataclass(frozen=True)
class Submitted:
    """A target's answer to a submission: the job's id there, and what is needed to find it again."""

    id: str
    place: Mapping[str, str] = field(default_factory=dict)


def show_extras(needed: Mapping[str, str]) -> str:
    """Extras of echelon with the keys that need them, for a message."""
    return ", ".join(f"{extra} ({key})" for extra, key in needed.items())


def leave_packages_to(place: str, needed: Mapping[str, str]) -> str:
    """The line for packages that a place must have; empty if none is needed."""
    return f"{place} must have echelon with its extras {show_extras(needed)}; this cannot be checked here" * bool(
        needed
    )


def bring_wheel(place: str, needed: Mapping[str, str]) -> str:
    """The line for packages that come with the job's wheel of echelon."""
    extras = f", with {show_extras(needed)}" if needed else ""
    return f"{place} installs the wheel of echelon that the job brings{extras}"


def is_this_python(launch: LaunchConfig, python: str | None) -> bool:
    """Whether a path is that of this process's interpreter; `launch.setup` or another PATH may choose another."""
    if python is None or launch.setup or "PATH" in launch.env:
        return False
    return Path(python).parent == Path(sys.executable).parent


class Launcher(Protocol):
    """Starts jobs at one target. A target is an entry point of the group `echelon.launchers`, a class derived from it.

    The attributes say what jobs at this target can and need.
    """

    record_form: ClassVar[RecordForm]

    section: ClassVar[type[Section] | None] = None
    """The settings `launch.NAME` of a launcher of another package; None: a mapping that `check` reads by itself."""

    sees_files: ClassVar[bool] = False
    """Whether its jobs see the files of this machine, so that the data is checked before a launch."""

    keeps_others: ClassVar[bool] = False
    """Whether the other machines may go on when one is lost."""

    has_spares: ClassVar[bool] = False
    """Whether machines may wait to take the place of a lost one."""

    keeps_runs: ClassVar[bool] = True
    """Whether the run folder outlives the job's machines, as a sweep needs."""

    look_seconds: ClassVar[float] = 15.0
    """The time between two looks of a sweep at its jobs."""

    way_of_secrets: ClassVar[str] = "read it on the machines, from a file or a store of secrets"
    """How to pass a secret to the job without submitting it: completes "remove it, and ..."."""

    def describe_packages(self, recipe: Recipe, needed: Mapping[str, str]) -> str:
        """A line about who provides the packages that the job needs beyond echelon's own; empty: there is none.

        `needed`: the extras of echelon, each with the key that needs it.
        """
        return leave_packages_to(f"launch.python={recipe.launch.python} on the machines", needed)

    def uses_this_python(self, launch: LaunchConfig) -> bool:
        """Whether the machines start the interpreter of this process, which they share by their file system."""
        return False

    def check(self, job: JobSpec) -> list[str]:
        """Validate the job without contacting the target; return lines that tell the user what will be done.

        Raises ConfigError or PlanError for every fault of names, limits or compatibility that can be found on this
        machine.
        """

    def render(self, job: JobSpec) -> dict[str, str]:
        """Return exactly what `submit` sends or runs, as {file name: text}, main file first; has no side effects."""

    def submit(self, job: JobSpec) -> Submitted:
        """Submit the files of `render`, already written to `job.folder`. Raises LaunchError with a one-line reason."""

    def status(self, record: JobRecord) -> JobStatus:
        """Ask the target. Raises LaunchError when it cannot be reached."""

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """Yield the lines the job has printed; with `follow`, also new lines until it ends."""

    def cancel(self, record: JobRecord) -> None:
        """Ask the job to save and end."""


@runtime_checkable
class RemoteLauncher(Launcher, Protocol):
    """A launcher whose jobs have their run folder at the target, which knows each job by its name."""

    def fetch_records(self, record: JobRecord) -> None:
        """Copy the files of the job's run folder, without its subfolders, to `record.run_dir` on this machine.

        Raises LaunchError when the target cannot be reached.
        """

    def find_submitted(self, job: JobSpec) -> Submitted | None:
        """What `submit` returned for this job; None if the target knows no job of its name. Raises LaunchError."""


@runtime_checkable
class ArrayLauncher(Launcher, Protocol):
    """A launcher whose target accepts many jobs at once and limits how many of them run at a time."""

    def render_array(self, jobs: Sequence[JobSpec], parallel: int) -> dict[str, str]:
        """Like `render`, for several jobs with `parallel` at a time: the files of the first job's folder.

        Raises ConfigError if the jobs request different resources.
        """

    def launch_array(self, jobs: Sequence[JobSpec], parallel: int) -> list[JobRecord]:
        """Submit all jobs or none, and record each as a separate job.

        Raises ConfigError like `check` and `render_array`, and LaunchError if the target refuses the jobs.
        """
