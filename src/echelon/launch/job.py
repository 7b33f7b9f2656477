"""Jobs: a recipe to train at some target, and the interface of the launchers that start it there."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol, runtime_checkable

from echelon.ground.errors import ConfigError
from echelon.learn.benchmarks.task_files import is_question_file, is_task_file
from echelon.recipe.document import Recipe
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.names import LAUNCHERS
from echelon.recipe.section import Section

JobState = Literal["queued", "running", "done", "failed", "stopped", "unknown"]
"""`stopped`: by a signal or a budget, after a save; the job resumes when it is launched again."""

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


def count_gpus(job: JobSpec) -> int:
    """The number of GPUs that a job requests on each machine of a target with `gpus_per_node`; 0: it requests none."""
    launch = job.recipe.launch
    gpus: int | None = getattr(launch, launch.to or "").gpus_per_node
    return gpus if gpus is not None else 0 if launch.nproc_per_node == "auto" else launch.nproc_per_node


def describe_gpu_request(job: JobSpec) -> str:
    """The key of `count_gpus`, with its value."""
    launch = job.recipe.launch
    is_own = getattr(launch, launch.to or "").gpus_per_node is not None
    return f"launch.{f'{launch.to}.gpus_per_node' if is_own else 'nproc_per_node'}={count_gpus(job)}"


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


class Launcher(Protocol):
    """Starts jobs at one target. A target is an entry point of the group `echelon.launchers`, a class derived from it.

    Attributes:
        section: the settings `launch.NAME` of a launcher of another package; None: a mapping, which `check` checks.
        sees_files: its jobs see the files of this machine, so that the data is checked before a launch.
        keeps_others: the other machines may go on when one is lost.
        has_spares: machines may wait to take the place of a lost one.
        keeps_runs: the run folder outlives the job's machines, as a sweep needs.
        look_seconds: the time between two looks of a sweep at its jobs.
        way_of_secrets: how a job gets a secret that is not submitted; completes "remove it, and ...".
    """

    record_form: ClassVar[RecordForm]
    section: ClassVar[type[Section] | None] = None
    sees_files: ClassVar[bool] = False
    keeps_others: ClassVar[bool] = False
    has_spares: ClassVar[bool] = False
    keeps_runs: ClassVar[bool] = True
    look_seconds: ClassVar[float] = 15.0
    way_of_secrets: ClassVar[str] = "read it on the machines, from a file or a store of secrets"

    def find_packages(self, launch: LaunchConfig) -> tuple[str, str]:
        """Where the packages of a job come from, and the place in words that has or installs them.

        `self`: it is a child of this process; `shared`: its machines start this interpreter from a shared folder;
        `there`: the place has them; `wheel`: it installs the job's wheel of echelon; `index`: it asks a package index.
        """
        return "there", f"launch.python={launch.python} on the machines"

    def starts_this_python(self, launch: LaunchConfig, python: str | None) -> bool:
        """Whether a path is that of this interpreter; `launch.setup` or another PATH may choose another."""
        is_free = python is None or launch.setup or "PATH" in launch.env
        return not is_free and Path(python or "").parent == Path(sys.executable).parent

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


def find_launcher(target: str) -> Launcher:
    """The launcher of this target. Raises ConfigError if no package registers it, or it is of another kind."""
    plugin = LAUNCHERS[target]
    if Launcher not in getattr(plugin, "__mro__", ()):
        raise ConfigError(f"launch.to={target}: {plugin} is not a class derived from echelon.launch.job.Launcher.")
    launcher: Launcher = plugin()
    return launcher
