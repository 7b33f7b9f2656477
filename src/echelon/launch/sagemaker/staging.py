"""Stage the inputs of a job: the files to upload, the channels that bring them, the container's recipe and packages.

The container sees a channel as `/opt/ml/input/data/CHANNEL`. Local files are uploaded below `BUCKET/jobs/JOB`.
"""

import glob
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from echelon.ground.checksums import MANIFEST
from echelon.ground.errors import ConfigError, MissingSettingError
from echelon.ground.extras import EXTRAS
from echelon.launch.job import JobSpec
from echelon.launch.sagemaker.install import (
    DOWNLOAD,
    NO_INDEX,
    OPTIONAL,
    WHEELS_ARCHIVE,
    WHEELS_CHANNEL,
    WHEELS_KEY,
    collect_wheels,
    find_python,
)
from echelon.launch.shell import guard_setup, join_words, needs_shell
from echelon.launch.source_bundle import CORE, HELPFUL, build_wheel, list_extras
from echelon.planner.hardware.job_machines import find_machines
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import SourceConfig, is_template
from echelon.recipe.render import plain_value, recipe_mapping, render_recipe
from echelon.recipe.sagemaker_sections import FileSystemConfig

DATA_DIR = PurePosixPath("/opt/ml/input/data")
CHECKPOINT_DIR = PurePosixPath("/opt/ml/checkpoints")
CODE_CHANNEL = "echelon"
ENTRY = f"{DATA_DIR}/{CODE_CHANNEL}/enter.py"
START = f"{DATA_DIR}/{CODE_CHANNEL}/start.sh"
FAILURE = "/opt/ml/output/failure"
# AWS's plugin, with which MLflow accepts the ARN of a SageMaker server as tracking URI.
_MLFLOW_OF_SAGEMAKER = "sagemaker-mlflow>=0.1"
_TEMPLATE = "chat_template.jinja"
_MAX_ADDRESS = 1024
# Excludes versions, as in `web-v1.2`, which are part of a folder's name.
_FILE_SUFFIX = re.compile(r"\.[A-Za-z]\w*")

InputMode = Literal["File", "FastFile"]


_PAIR = (".idx", ".bin")  # the two files of a Megatron dataset


@dataclass(frozen=True)
class Upload:
    """One object in S3. `source` is a local file, or a function that returns the bytes; `shown` is for display."""

    address: str
    source: Path | Callable[[], bytes]
    shown: str


@dataclass(frozen=True)
class Channel:
    """A folder of the container: a prefix in S3, copied before training (File) or streamed (FastFile); or a mounted
    file system.
    """

    name: str
    source: str | FileSystemConfig
    mode: InputMode


@dataclass(frozen=True)
class Staging:
    """The container's recipe, its channels and the uploads."""

    recipe: Recipe
    channels: tuple[Channel, ...]
    uploads: tuple[Upload, ...]

    def render_uploads(self) -> str:
        """A line for each object: its source and its address."""
        return "".join(f"{upload.shown} -> {upload.address}\n" for upload in self.uploads)


def _job_prefix(job: JobSpec) -> str:
    """The S3 prefix of a job's files. Raises ConfigError if the recipe sets no bucket."""
    if (bucket := job.recipe.launch.sagemaker.bucket) is None:
        raise MissingSettingError(
            "launch.sagemaker.bucket is not set; it receives the job's files; write it like s3://bucket/prefix.",
            {"launch.sagemaker.bucket": "s3://set-launch.sagemaker.bucket"},
        )
    return f"{bucket}/jobs/{job.name}"


def run_dir(recipe: Recipe) -> PurePosixPath:
    """The run folder in the container."""
    return CHECKPOINT_DIR / recipe.run.name


def stage_job(job: JobSpec, recipe: Recipe) -> Staging:
    """Stage a job. `recipe` is the launched recipe with the changes of `distribution`.

    Raises ConfigError with the key of a missing file or an invalid channel.
    """
    stage = _Stage(job)
    plain = recipe_mapping(recipe)
    plain["run"]["dir"] = str(run_dir(recipe))
    # The container chooses a folder on its largest disk, unless the job brings prepared data.
    plain["data"].pop("prepared_dir", None)
    if (prepared := stage.place_prepared(recipe.data.prepared_dir)) is not None:
        plain["data"]["prepared_dir"] = prepared
    for part, sources in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        if sources and prepared is not None:
            plain["data"][part] = [{**plain_value(source), "name": source.label} for source in sources]
        elif sources:
            plain["data"][part] = [
                stage.place_source(f"data.{part}.{index}", source, part if len(sources) == 1 else f"{part}-{index}")
                for index, source in enumerate(sources)
            ]
    if recipe.model.checkpoint is not None:
        plain["model"]["checkpoint"] = stage.place_model("model.checkpoint", recipe.model.checkpoint, "model")
    if (teacher := recipe.objective.teacher) is not None:
        plain["objective"]["teacher"] = stage.place_model("objective.teacher", teacher, "teacher")
    if isinstance(recipe.tokenizer, str) and recipe.tokenizer != "bytes":
        plain["tokenizer"] = stage.place_model("tokenizer", recipe.tokenizer, "tokenizer")
    if (template := recipe.data.chat_template) is not None:
        plain["data"]["chat_template"] = stage.place_template(template)
    if (arn := recipe.launch.sagemaker.mlflow_arn) is not None:
        plain.setdefault("mlflow", {})["tracking_uri"] = arn
    there = Recipe.model_validate(plain)
    requirements = list_requirements(there)
    stage.add_code(render_recipe(there), requirements)
    stage.add_wheels(requirements)
    return Staging(there, tuple(stage.channels.values()), tuple(stage.uploads))


def list_requirements(recipe: Recipe) -> str:
    """The recipe's requirements in the container, without torch, as the text of a requirements.txt."""
    needed = [*CORE, *(name for extra in list_extras(recipe) for name in EXTRAS.get(extra, ()))]
    if recipe.launch.sagemaker.mlflow_arn is not None:
        needed.append(_MLFLOW_OF_SAGEMAKER)
    # Without GPUs each start would ask the index for a package that has nothing to read.
    readers = HELPFUL if find_machines(recipe.launch).weakest.gpus else ()
    helpful = [*readers, *(name for extra in _list_helpful_extras(recipe) for name in EXTRAS[extra])]
    options = [] if recipe.launch.sagemaker.wheels is None else [NO_INDEX]
    return "".join(f"{line}\n" for line in dict.fromkeys([*options, *needed, OPTIONAL, *helpful]))


def _list_helpful_extras(recipe: Recipe) -> Iterator[str]:
    # A folder may contain compressed or columnar files, so every own source gets the readers.
    if any(source.path != "python-stdlib" for source in (*recipe.data.train, *recipe.data.validation)):
        yield "data"
    # Its kernels are for layers that are not compiled, on GPUs.
    if recipe.train.compile is False and find_machines(recipe.launch).weakest.gpus:
        yield "liger"


def render_start(setup: tuple[str, ...], python: str) -> str:
    """A script that runs launch.setup and then `exec`s the entry point, since only process 1 gets signals.

    A failing line becomes the job's FailureReason.
    """
    return "\n".join(["#!/bin/bash", *guard_setup(setup, FAILURE), f"exec {join_words([python, ENTRY])}"]) + "\n"


@dataclass
class _Stage:
    """Collects channels and uploads."""

    job: JobSpec
    channels: dict[str, Channel] = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prefix = _job_prefix(self.job)
        self._settings = self.job.recipe.launch.sagemaker
        self.channels[CODE_CHANNEL] = Channel(CODE_CHANNEL, f"{self._prefix}/{CODE_CHANNEL}/", "File")
        for name, address in self._settings.channels.items():
            self._place_remote(f"launch.sagemaker.channels.{name}", address, name, self._settings.input_mode)
        for index, file_system in enumerate(self._settings.file_systems):
            self._add_channel(f"launch.sagemaker.file_systems.{index}", file_system.channel, file_system, "File")

    def add_code(self, recipe: str, requirements: str) -> None:
        """Add the files of the container's entry point, in their own channel."""
        settings = self.job.recipe.launch
        made: list[tuple[str, str, Callable[[], bytes]]] = [
            ("recipe.yaml", "the recipe", recipe.encode),
            ("requirements.txt", "echelon's requirements without torch", requirements.encode),
            ("enter.py", "the container's entry point", Path(__file__).with_name("enter.py").read_bytes),
            ("echelon.zip", "echelon's source", lambda: build_wheel()[1]),
        ]
        if needs_shell(settings):
            made.append(("start.sh", "launch.setup", render_start(settings.setup, settings.python).encode))
        self.uploads[:0] = [
            Upload(f"{self._prefix}/{CODE_CHANNEL}/{name}", make, f"({shown})") for name, shown, make in made
        ]

    def add_wheels(self, requirements: str) -> None:
        """Add the channel with the container's packages, if the recipe asks for one."""
        if (path := self._settings.wheels) is None:
            return
        if path == DOWNLOAD:
            python = find_python(self._settings.image)
            shown = f"(wheels for Python {python[0]}.{python[1]}, collected by pip)"
            address = f"{self._prefix}/{WHEELS_CHANNEL}/"
            collect = partial(collect_wheels, requirements, python)
            self.uploads.append(Upload(f"{address}{WHEELS_ARCHIVE}", collect, shown))
            self._add_channel(WHEELS_KEY, WHEELS_CHANNEL, address, "File")
            return
        if path.startswith("/opt/ml/") or (self.job.workdir / Path(path).expanduser()).is_file():
            raise ConfigError(
                f"{WHEELS_KEY}={path}: give a folder on this machine, the s3:// address of a folder, or {DOWNLOAD}."
            )
        before = len(self.uploads)
        self._place(WHEELS_KEY, path, WHEELS_CHANNEL, "File")
        if not path.startswith("s3://") and not any(
            upload.address.endswith(".whl") for upload in self.uploads[before:]
        ):
            raise ConfigError(f"{WHEELS_KEY}={path} has no wheel; fill it with `pip wheel`, or use {DOWNLOAD}.")

    def place_source(self, key: str, source: SourceConfig, channel: str) -> dict[str, Any]:
        """A data source with its path in the container, and the same name in metrics."""
        plain: dict[str, Any] = plain_value(source)
        if source.format != "hub" and source.path != "python-stdlib":
            plain["path"] = self._place(f"{key}.path", source.path, channel, self._settings.input_mode)
            if Path(plain["path"]).name != source.label:
                plain["name"] = source.label
        elif source.format == "hub":
            self._refuse_hub(f"{key}.path={source.path}")
        return plain

    def place_prepared(self, folder: Path | None) -> str | None:
        """The container's path of data that `echelon data --prepare` has made; None if it is to be prepared there."""
        if folder is None:
            return None
        address = re.sub("^s3:/+", "s3://", str(folder))  # a path has no double slash
        is_here = (self.job.workdir / folder.expanduser() / MANIFEST).is_file()
        if is_here or address.startswith(("s3://", "/opt/ml/")):
            return self._place("data.prepared_dir", address, "prepared", "File")
        return None

    def place_model(self, key: str, name: str, channel: str) -> str:
        """The container's path of a model or tokenizer folder; a hub id is unchanged."""
        local = self.job.workdir / Path(name).expanduser()
        if not local.exists() and not name.startswith(("s3://", "/", ".", "~")):
            self._refuse_hub(f"{key}={name}")
            return name
        if (local / "checkpoints").is_dir() and not (local / "config.json").is_file():
            raise ConfigError(
                f"{key}={name} is a run folder with all its checkpoints; write its model with `echelon export {name} "
                f"OUT`, and set {key}=OUT."
            )
        return self._place(key, name, channel, "File")

    def place_template(self, template: str) -> str:
        """The container's path of a template file, uploaded with the code; other templates are unchanged."""
        local = self.job.workdir / Path(template).expanduser()
        if is_template(template) or not local.is_file():
            return template
        self.uploads.append(Upload(f"{self._prefix}/{CODE_CHANNEL}/{_TEMPLATE}", local, template))
        return str(DATA_DIR / CODE_CHANNEL / _TEMPLATE)

    def _place(self, key: str, path: str, channel: str, mode: InputMode) -> str:
        if path.startswith("s3://"):
            return self._place_remote(key, path, channel, mode)
        if path.startswith("/opt/ml/"):
            inside = PurePosixPath(path)
            names = [*self._settings.channels, *(system.channel for system in self._settings.file_systems)]
            folders = [str(DATA_DIR / name) for name in names]
            if not any(str(folder) in folders for folder in (inside, *inside.parents)):
                raise ConfigError(
                    f"{key}={path} is not in a channel of the container; add its channel to launch.sagemaker.channels, "
                    "or its file system to launch.sagemaker.file_systems; the recipe has "
                    f"{', '.join(names) or 'none'}."
                )
            return path
        files, rest = _list_local(key, path, self.job.workdir)
        for file, name in files:
            self.uploads.append(Upload(f"{self._prefix}/{channel}/{name}", file, _show(file, self.job.workdir)))
        self._add_channel(key, channel, f"{self._prefix}/{channel}/", mode)
        return str(DATA_DIR / channel / rest)

    def _place_remote(self, key: str, address: str, channel: str, mode: InputMode) -> str:
        """Add a channel for a file, a folder or a glob in S3; returns its path in the container.

        SageMaker copies every object that starts with a channel's address, so a folder's address ends in a slash:
        otherwise `books` would include `books-old`.
        """
        plain = address.rstrip("/")
        if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", plain) or len(address) >= _MAX_ADDRESS:
            raise ConfigError(
                f"{key}={address} is not an S3 address of less than {_MAX_ADDRESS} characters; write it like "
                "s3://bucket/prefix."
            )
        if glob.has_magic(plain):
            folder, rest = _split_glob(plain)
            self._add_channel(key, channel, f"{folder}/", mode)
            return str(DATA_DIR / channel / rest)
        folder, _, name = plain.rpartition("/")
        suffix = PurePosixPath(name).suffix
        if folder != "s3:/" and _FILE_SUFFIX.fullmatch(suffix) and not address.endswith("/"):
            # A Megatron dataset is a pair of files in one folder, of which the recipe names one.
            self._add_channel(key, channel, f"{folder}/" if suffix in (".idx", ".bin") else plain, mode)
            return str(DATA_DIR / channel / name)
        self._add_channel(key, channel, f"{plain}/", mode)
        return str(DATA_DIR / channel)

    def _add_channel(self, key: str, name: str, source: str | FileSystemConfig, mode: InputMode) -> None:
        if not re.fullmatch(r"[A-Za-z0-9.\-_]{1,64}", name):
            raise ConfigError(f"{key}: use 1 to 64 letters, digits, '.', '_' and '-' in a channel's name.")
        if name in self.channels:
            raise ConfigError(
                f"{key}: the job already has a channel {name}, from launch.sagemaker.channels, "
                "launch.sagemaker.file_systems or echelon itself; rename that channel."
            )
        self.channels[name] = Channel(name, source, mode)

    def _refuse_hub(self, what: str) -> None:
        if self._settings.network_isolation:
            raise ConfigError(
                f"{what} is on the hub, which launch.sagemaker.network_isolation=true blocks; download it and set its "
                "folder or an s3:// address."
            )


def _list_local(key: str, path: str, workdir: Path) -> tuple[list[tuple[Path, str]], str]:
    """The local files of a path, each with its name in the channel, and the path's name in the channel.

    The last part of the path is kept, so that a source has the same name in the container.
    """
    local = workdir / Path(path).expanduser()
    if local.is_dir():
        files, name = [(file, f"{local.name}/{below}") for file, below in _walk(local)], local.name
    elif local.is_file():
        pair = [local.with_suffix(suffix) for suffix in _PAIR] if local.suffix in _PAIR else []
        files, name = [(file, file.name) for file in dict.fromkeys([local, *filter(Path.is_file, pair)])], local.name
    elif glob.has_magic(path):
        files, name = _list_matches(str(Path(path).expanduser()), workdir)
    else:  # Megatron's tools name a dataset without its suffixes
        pair = [local.with_name(local.name + suffix) for suffix in _PAIR]
        files, name = [(file, file.name) for file in pair] if all(map(Path.is_file, pair)) else [], local.name
    if not files:
        raise MissingSettingError(
            f"{key}={path}: not found from {workdir}; give a file or folder on this machine, an s3:// address, or "
            "/opt/ml/input/data/CHANNEL with launch.sagemaker.channels.",
            {key: f"s3://set-{key.replace('_', '-')}/"},
        )
    return files, name


def _list_matches(pattern: str, workdir: Path) -> tuple[list[tuple[Path, str]], str]:
    """The files that match a glob, each with its path below the glob's fixed folder, and the rest of the glob."""
    folder, rest = _split_glob(pattern)
    names = sorted(glob.glob(pattern, root_dir=workdir, recursive=True))
    files = [(workdir / name, Path(name).relative_to(folder).as_posix()) for name in names]
    return [(file, name) for file, name in files if file.is_file()], rest


def _walk(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file below a folder except hidden ones, sorted, with its relative path."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in name.parts):
            yield path, name.as_posix()


def _split_glob(pattern: str) -> tuple[str, str]:
    """Split a glob into its fixed folder and the rest."""
    parts = pattern.split("/")
    first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    folder = "/".join(parts[:first]) or ("/" if pattern.startswith("/") else ".")
    return folder, "/".join(parts[first:])


def _show(file: Path, workdir: Path) -> str:
    return str(file.relative_to(workdir)) if file.is_relative_to(workdir) else str(file)
