"""Training in a SageMaker container: read its configuration in `/opt/ml`, train, and write the model there.

`enter.py` is process 1 and imports this module in its child. The base folder is a parameter, for tests.
"""

import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.ground.checksums import MANIFEST, list_files
from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.foreign_launchers import in_number_order
from echelon.ground.launch_environment import find_log_level, restart_with_libraries
from echelon.ground.logs import log_to_console
from echelon.ground.sizes import render_bytes
from echelon.ground.stop_request import STOP_SIGNALS
from echelon.ground.variables import HUB_PLACES, asked_environment, read_environment, set_default_variables
from echelon.launch.sagemaker.checkpoint_folder import CheckpointRemover, find_large_disk, open_kept
from echelon.launch.sagemaker.install import WARM_CACHE
from echelon.launch.sagemaker.request import find_checkpoint_uri
from echelon.launch.sagemaker.secrets_manager import hide_values, read_secrets
from echelon.planner.hardware.efa import has_efa
from echelon.planner.hardware.gpu_check import check_gpus, find_compat, find_needed
from echelon.planner.hardware.job_machines import count_asked_gpus
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import RunConfig
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.outcome import DONE, FAILED, STOPPED, Outcome

logger = logging.getLogger(__name__)

_EFA_VARIABLES = {"FI_PROVIDER": "efa", "RDMAV_FORK_SAFE": "1"}
_RESOLVE_SECONDS = 600.0
_LOOK_SECONDS = 1.0
_TENSORBOARD_SECONDS = 15.0
# The number of last stderr lines that are searched for the reason why training ended.
_ERROR_LINES = 40
_NAME = "echelon: "
# What SageMaker calls the group of a job without instance groups.
_ONLY_GROUP = "homogeneousCluster"


@dataclass(frozen=True)
class Container:
    """The container's configuration, as given by the platform.

    `hosts` are in numerical order, the same on each host. `group` is this host's instance group. `channels` are the
    names of folders in input/data.
    `hyperparameters` are the names of the job's hyperparameters, which echelon does not use.
    """

    base: Path
    host: str
    hosts: tuple[str, ...]
    interface: str | None = None
    instance_type: str | None = None
    group: str | None = None
    channels: tuple[str, ...] = ()
    hyperparameters: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this is the host with the lowest number, which has rank 0, the run's files and the checkpoints."""
        return self.host == self.hosts[0]

    @property
    def recipe_path(self) -> Path:
        """The path of the job's recipe."""
        return self.base / "input" / "data" / "echelon" / "recipe.yaml"

    def describe(self) -> list[str]:
        """Lines for the log."""
        kind = self.instance_type or "unknown instance type"
        group = "" if self.group in (None, _ONLY_GROUP) else f", group {self.group}"
        host = f"{self.host} of {len(self.hosts)} ({kind}{group})"
        lines = [f"container: {host}; channels {', '.join(self.channels) or 'none'}"]
        if self.hyperparameters:
            lines.append(
                f"container: hyperparameters {', '.join(self.hyperparameters)} are ignored; the recipe has all settings"
            )
        return lines


def read_container(base: Path, env: Mapping[str, str]) -> Container:
    """Read the container from its config files, else from a toolkit's SM_ variables, else assume one host.

    Shapes: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    Raises ConfigError for a file that does not have this shape.
    """
    config = base / "input" / "config"
    resources = _read_json(config / "resourceconfig.json")
    listed = env.get("SM_HOSTS")
    hosts = resources.get("hosts") or (_parse(listed, "SM_HOSTS") if listed else None) or ["algo-1"]
    if not isinstance(hosts, list) or not all(isinstance(name, str) for name in hosts):
        raise ConfigError(f"the hosts of this container are {hosts!r}, which is not a list of names.")
    host = resources.get("current_host") or env.get("SM_CURRENT_HOST") or hosts[0]
    if host not in hosts:
        raise ConfigError(f"this container is host {host!r}, which is not among {', '.join(hosts)}.")
    data = base / "input" / "data"
    channels = _read_json(config / "inputdataconfig.json") or [
        folder.name for folder in data.glob("*") if folder.is_dir()
    ]
    return Container(
        base,
        host,
        tuple(sorted(hosts, key=in_number_order)),
        resources.get("network_interface_name") or env.get("SM_NETWORK_INTERFACE_NAME"),
        resources.get("current_instance_type") or env.get("SM_CURRENT_INSTANCE_TYPE"),
        resources.get("current_group_name"),
        tuple(sorted(channels)),
        tuple(sorted(_read_json(config / "hyperparameters.json"))),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file. Raises ConfigError."""
    if not path.exists():
        return {}
    value = _parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(value, dict):
        raise ConfigError(f"{path} contains {value!r}, which is not a JSON object.")
    return value


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}.") from error


def run(base: Path, env: Mapping[str, str]) -> Outcome:
    """Train the job's recipe in this container; returns the container's exit code, 0 also if a budget ended the run.

    Raises ConfigError and LaunchError for faults found before training. Once training starts, this process handles
    STOP_SIGNALS and forwards them.
    """
    log_to_console(find_log_level())
    container = read_container(base, env)
    for line in container.describe():
        logger.info(line)
    recipe, _ = load_recipe(container.recipe_path)
    _check_place(recipe.run, base)
    _check_channels(recipe, container)
    secrets = read_secrets(recipe.launch.sagemaker.secrets, _find_region(recipe, env))
    variables = {**find_asked(recipe, container), **env, **find_variables(container, env), **secrets}
    await_names(container.hosts)
    # The recipe names a folder if the job brings its prepared data.
    keeper = open_kept(recipe, base) if recipe.data.prepared_dir is None else None
    folder = RunFolder(recipe.run.dir)
    remover = _open_remover(recipe, folder, _find_region(recipe, env)) if container.is_first else None
    started = time.time()

    def show(at_end: bool = False) -> None:
        if not container.is_first:
            return
        # A full disk is reported when the run's own files cannot be written.
        with suppress(OSError):
            mirror(folder.path / "tensorboard", base / "output" / "tensorboard")
        if remover is not None:
            remover.look()
        if keeper is not None:
            keeper.keep(wait=at_end)

    hide = partial(hide_values, values=secrets.values())
    argv = train_command(recipe, container.recipe_path)
    if keeper is not None:
        argv.append(f"data.prepared_dir={keeper.place}")
    outcome = translate(run_training(argv, variables, show, hide))
    if outcome.code == DONE and container.is_first:
        outcome = _export(folder, base / "model", outcome, variables, hide)
    show(at_end=True)
    try:
        keep_records(folder, base / "output" / "data", started, container.is_first)
    except OSError as error:  # the run folder has them too, so the job does not fail
        logger.warning(f"container: some reports of the run are missing in {base / 'output'}: {error}")
    return outcome


def _open_remover(recipe: Recipe, folder: RunFolder, region: str | None) -> CheckpointRemover | None:
    """What removes checkpoints in S3; None where the job does not reach S3, or the recipe does not name the place."""
    settings = recipe.launch.sagemaker
    if settings.network_isolation or (settings.checkpoint_uri is None and settings.bucket is None):
        return None
    address = f"{find_checkpoint_uri(recipe)}/{folder.path.name}/{folder.checkpoints_dir.name}"
    return CheckpointRemover(folder.checkpoints_dir, address, region)


def find_asked(recipe: Recipe, container: Container) -> dict[str, str]:
    """The variables about the GPUs of this container's instance, of which `echelon train` must see all."""
    group = None if container.group == _ONLY_GROUP else container.group
    return asked_environment(*count_asked_gpus(recipe.launch, container.instance_type, group))


def refuse_missing_gpus(base: Path) -> int:
    """Exit code 2, with a message on stderr, if this container sees fewer GPUs than its instance has; else 0.

    Needs no package that echelon would install first; the process ends with it, as torch is in its memory.
    """
    if (compat := find_compat(read_environment())) is not None:
        restart_with_libraries(compat.folder)
    container = read_container(base, read_environment())
    recipe, _ = load_recipe(container.recipe_path)
    set_default_variables(find_asked(recipe, container))
    count = recipe.launch.nproc_per_node
    try:
        check_gpus(find_needed(None if count == "auto" else count), recipe.train.allow_cpu)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return ConfigError.exit_code
    return 0


def _check_place(run: RunConfig, base: Path) -> None:
    """Refuse a run folder that would be lost with the container."""
    checkpoints = base / "checkpoints"
    if not run.dir.is_relative_to(checkpoints):
        raise ConfigError(
            f"run.dir={run.dir} is lost when the container ends; only {checkpoints} is copied to S3 during training; "
            f"set run.dir={checkpoints / run.name}."
        )


def _check_channels(recipe: Recipe, container: Container) -> None:
    """Refuse data whose channel is missing on this host."""
    data = container.base / "input" / "data"
    if (prepared := recipe.data.prepared_dir) is not None:
        if not (prepared / MANIFEST).is_file():
            raise ConfigError(
                f"data.prepared_dir={prepared}: there is no prepared data in the container of {container.host}; give "
                "the folder that `echelon data --prepare` prints, or its address in S3."
            )
        return
    for kind, sources in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        for number, source in enumerate(sources):
            path = Path(source.path)
            if not path.is_relative_to(data) or path == data:
                continue
            channel = data / path.relative_to(data).parts[0]
            if not channel.is_dir():
                raise ConfigError(
                    f"data.{kind}.{number}.path={path}: there is no {channel} in the container of {container.host}; "
                    f"check that launch.sagemaker.channels has {channel.name}, and that its address has files."
                )


def find_variables(container: Container, env: Mapping[str, str], system: Path = Path("/sys")) -> dict[str, str]:
    """The variables to add to training's environment: hosts, EFA and HF_HOME. The job's own variables win."""
    # /etc/nccl.conf of AWS's images sets INFO, hundreds of lines of each rank.
    variables = {} if "NCCL_DEBUG" in env else {"NCCL_DEBUG": "WARN"}
    variables |= {"SM_HOSTS": json.dumps(container.hosts), "SM_CURRENT_HOST": container.host}
    if container.interface is not None:
        variables["SM_NETWORK_INTERFACE_NAME"] = container.interface
    if container.instance_type is not None:
        variables["SM_CURRENT_INSTANCE_TYPE"] = container.instance_type
    if has_efa(system):
        # The launcher's list of instance types may be outdated, so look for the device itself.
        added = {name: value for name, value in _EFA_VARIABLES.items() if name not in env}
        described = " ".join(f"{name}={value}" for name, value in added.items())
        logger.info(f"container: EFA, {described or 'as the job set it'}")
        variables |= added
    if not HUB_PLACES & env.keys():
        warm = container.base / WARM_CACHE.relative_to("/opt/ml")
        disk, free = (warm, shutil.disk_usage(warm).free) if warm.is_dir() else find_large_disk(container.base)
        logger.info(f"container: HF_HOME={disk / 'huggingface'}, {render_bytes(free)} free")
        variables["HF_HOME"] = str(disk / "huggingface")
    return variables


def await_names(hosts: Iterable[str], patience_seconds: float = _RESOLVE_SECONDS) -> None:
    """Wait until every host name resolves; the containers of a job start at different times."""
    deadline = time.monotonic() + patience_seconds
    for host in hosts:
        logged = False
        while not _resolves(host):
            if not logged:
                logger.info(f"container: waiting for the address of {host}")
                logged = True
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{host} has no address after {patience_seconds:.0f} s; its container did not start; see the job's "
                    "other logs."
                )
            time.sleep(_LOOK_SECONDS)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def train_command(recipe: Recipe, recipe_path: Path) -> list[str]:
    """The training command: the agent of this host, configured by its environment. `launch.setup` has already run."""
    argv = [sys.executable, "-m", "echelon", "train", str(recipe_path)]
    processes = recipe.launch.nproc_per_node
    return argv if processes == "auto" else [*argv, "--nproc", str(processes)]


def run_training(
    argv: Sequence[str], env: Mapping[str, str], look: Callable[[], None], hide: Callable[[str], str] = str
) -> Outcome:
    """Run the command to its end, forward stop signals to it, and read from its stderr why it ended.

    `look` is called every few seconds. `hide` replaces secrets in what was read.
    """
    asked: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for process in running:
            process.send_signal(number)

    for signum in STOP_SIGNALS:
        signal.signal(signum, stop)
    # Its stderr is not closed: an orphan may still have the other end open.
    process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE)
    running.append(process)
    if asked:
        process.send_signal(asked[0])
    said: deque[str] = deque(maxlen=_ERROR_LINES)
    listener = threading.Thread(target=_listen, args=(process, said, hide), name="stderr", daemon=True)
    listener.start()
    while True:
        try:
            code = process.wait(_TENSORBOARD_SECONDS)
            break
        except subprocess.TimeoutExpired:
            look()
    running.clear()
    listener.join(_LOOK_SECONDS)
    if code >= 0:
        return Outcome(code, find_message(said))
    name = signal.Signals(-code).name
    if any(line.startswith(_NAME) for line in said):  # killed while exiting, after it printed the reason
        return Outcome(FAILED, find_message(said))
    early = f"stopped by {name} before training began; start the same job again"
    return Outcome(FAILED, early if asked else f"echelon train was killed by {name}")


def _listen(process: "subprocess.Popen[bytes]", said: deque[str], hide: Callable[[str], str]) -> None:
    """Forward stderr and keep its last lines."""
    assert process.stderr is not None
    for line in process.stderr:
        text = hide(line.decode("utf-8", "surrogateescape"))
        sys.stderr.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stderr.flush()
        said.append(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").rstrip())


def find_message(said: Sequence[str]) -> str:
    """The final message in a command's output: from the last line that starts with `echelon: `, else the last line."""
    lines = [line for line in said if line]
    for number in reversed(range(len(lines))):
        if lines[number].startswith(_NAME):
            return "\n".join(lines[number:]).removeprefix(_NAME)
    return lines[-1] if lines else ""


def translate(outcome: Outcome) -> Outcome:
    """The outcome as reported to SageMaker: a run ended by its budget counts as a success."""
    if outcome.code == STOPPED and outcome.message.startswith("stopped by budget"):
        return Outcome(DONE, outcome.message)
    if outcome.code != DONE and not outcome.message:
        return Outcome(outcome.code, f"echelon train ended with code {outcome.code}; see the log of this host")
    return outcome


def mirror(source: Path, target: Path) -> None:
    """Copy the files of a folder that are new or changed."""
    for path in filter(Path.is_file, list_files(source, "**/*")):
        copy, now = target / path.relative_to(source), path.stat()
        if copy.exists() and (copy.stat().st_size, copy.stat().st_mtime) == (now.st_size, now.st_mtime):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


def keep_records(folder: RunFolder, target: Path, since: float, leads: bool) -> None:
    """Copy a run's records, without weights, to the folder that SageMaker stores as the job's output.

    Copies the ranks' logs written since `since` (UTC seconds), as older ones were restored from S3. If this host
    `leads` (has rank 0), also copies the run's own files.
    """
    target.mkdir(parents=True, exist_ok=True)
    files = [path for path in list_files(folder.path) if not path.name.startswith(".")] if leads else []
    logs = [path for path in list_files(folder.logs_dir) if path.stat().st_mtime >= since]
    for path in filter(Path.is_file, [*files, *logs]):
        copy = target / path.relative_to(folder.path)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(path, copy)


def _find_region(recipe: Recipe, env: Mapping[str, str]) -> str | None:
    """The region of the job. SageMaker sets AWS_REGION."""
    return recipe.launch.sagemaker.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")


def _export(
    folder: RunFolder, model: Path, outcome: Outcome, env: Mapping[str, str], hide: Callable[[str], str]
) -> Outcome:
    """Export the model to the folder that SageMaker collects, as `echelon export` does; an adapter stays an adapter."""
    if folder.newest_step() is None:
        return outcome
    model.mkdir(parents=True, exist_ok=True)
    # The folder may be a mount point, so it is filled, not replaced.
    written = model / "export"
    argv = [sys.executable, "-m", "echelon", "export", str(folder.path), str(written)]
    done = subprocess.run(argv, env=env, capture_output=True, encoding="utf-8", errors="replace", check=False)
    sys.stderr.write(hide(done.stderr))
    if done.returncode != 0:
        message = find_message(hide(done.stderr).splitlines())
        return Outcome(done.returncode, f"training has ended, but the model was not exported: {message}")
    for path in written.iterdir():
        path.replace(model / path.name)
    written.rmdir()
    logger.info(f"container: the model is in {model}")
    return outcome


if __name__ == "__main__":
    sys.exit(refuse_missing_gpus(Path(sys.argv[1])))
