"""What a Ray job consists of: the request to Ray Jobs, the driver's order, the script of each machine; their checks."""

import difflib
import json
import math
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.variables import asked_environment
from echelon.launch.job import JobSpec, count_gpus, describe_gpu_request
from echelon.launch.ray.driver import AGENT, ORDER, Order
from echelon.launch.shell import join_words, limit_command, prepare_lines
from echelon.launch.source_bundle import name_requirement
from echelon.recipe.document import Recipe

REQUEST, DRIVER = "request.json", "driver.py"
"""Files in the job's folder: the request, and the copy of `driver.py` that is sent with it."""

ADDRESS = r"auto|https?://[^/\s@]+(/\S*)?"
"""The pattern of a cluster's address. Ray would import the module that another scheme names."""

INSTALLERS = ("pip", "uv")
"""The fields of a runtime environment with packages that Ray installs."""

_KEY = "launch.ray"
# Between a stop and the end of the job, in addition to the time to save.
_LEAVING_SECONDS = 60
_STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
_RUNTIME_FIELDS = (
    "pip", "uv", "conda", "py_modules", "py_executable", "image_uri", "env_vars", "excludes", "config",
    "worker_process_setup_hook", "nsight",
)  # fmt: skip
# The worker holds the other end of the script's stdin: when it ends, so does the agent, and then what is left of it.
_GUARD = """\
(
    trap '' TERM
    cat
    kill -TERM -- -$$
    for _ in {{1..{seconds}}}; do kill -0 $$ || break; sleep 1; done
    kill -KILL -- -$$
) > /dev/null 2>&1 <&3 3<&- &
exec 3<&-
"""


def find_workdir(job: JobSpec) -> Path:
    """The working directory on the machines of the cluster."""
    workdir = job.recipe.launch.ray.workdir
    return job.workdir if workdir is None else Path(workdir)


def check_request(job: JobSpec) -> None:
    """Raise ConfigError for what Ray would refuse or ignore."""
    settings = job.recipe.launch.ray
    if not re.fullmatch(ADDRESS, settings.address):
        shown = re.sub(r"(?<=://)[^/@]+(?=@)", "***", settings.address)
        raise ConfigError(
            f"{_KEY}.address={shown} is not the address of Ray Jobs; give the dashboard's, like "
            "http://HEAD_MACHINE:8265, or on a machine of the cluster auto."
        )
    workdir = find_workdir(job)
    if not workdir.is_absolute():
        raise ConfigError(f"{_KEY}.workdir={workdir} is not an absolute path; start it with a slash.")
    if "GPU" in settings.resources:
        raise ConfigError(f"{_KEY}.resources.GPU: set {_KEY}.gpus_per_node instead.")
    if not _find_bundle(job):
        raise ConfigError(
            f"{_KEY}.resources.CPU=0: nothing is requested of a machine, and Ray reserves no machine for nothing; "
            f"request CPU cores, GPUs or {_KEY}.resources."
        )
    _check_runtime(settings.runtime_env)


def _check_runtime(given: dict[str, Any]) -> None:
    key = f"{_KEY}.runtime_env"
    for name in given:
        if name == "working_dir":
            raise ConfigError(
                f"{key}.working_dir: echelon sends the job's folder there; send your modules as {key}.py_modules, and "
                f"name a folder that the machines share in {_KEY}.workdir."
            )
        if name not in _RUNTIME_FIELDS:
            near = difflib.get_close_matches(name, _RUNTIME_FIELDS, n=1)
            raise ConfigError(
                f"{key}: {name} is not a field of a runtime environment; "
                + (f"did you mean {near[0]}?" if near else f"the fields are {', '.join(_RUNTIME_FIELDS)}.")
            )
    for tool in INSTALLERS:
        packages = read_packages(given.get(tool, []))
        if not (isinstance(packages, list) and all(isinstance(package, str) for package in packages)):
            raise ConfigError(f"{key}.{tool}: give a list of packages, like [numpy, 'scipy>=1.11'], or packages: LIST.")
    if not isinstance(given.get("env_vars", {}), dict):
        raise ConfigError(f"{key}.env_vars={given['env_vars']} is not a mapping; write it like {{NAME: value}}.")


def render_request(job: JobSpec) -> dict[str, Any]:
    """The arguments of `JobSubmissionClient.submit_job`. The job's folder is sent as the working directory.

    Ray shows the request to everybody who sees the cluster; it has no value of `launch.env`.
    """
    recipe = job.recipe
    environment = _with_echelon(recipe)
    wait = math.ceil(recipe.fault.notice_seconds) + _LEAVING_SECONDS
    return {
        "submission_id": job.name,
        "entrypoint": f"exec python3 {DRIVER}",
        "metadata": {"job_submission_id": job.name, "run": recipe.run.name},
        "runtime_env": {
            **environment,
            "working_dir": str(job.workdir / job.folder),
            "env_vars": {**environment.get("env_vars", {}), _STOP_WAIT_VARIABLE: str(wait)},
        },
    }


def read_packages(given: Any) -> Any:
    """The packages of a field of INSTALLERS, which is their list or a mapping that has it."""
    return given.get("packages") if isinstance(given, dict) else given


def installs_packages(runtime_env: dict[str, Any]) -> bool:
    """Whether Ray makes an environment for the job on each machine, in which it installs packages."""
    return any(tool in runtime_env for tool in INSTALLERS)


def _with_echelon(recipe: Recipe) -> dict[str, Any]:
    """The runtime environment of the recipe; one that installs packages also installs the wheel of the job."""
    environment = dict(recipe.launch.ray.runtime_env)
    for tool in filter(environment.__contains__, INSTALLERS):
        wheel, packages = name_requirement(recipe, "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"), environment[tool]
        is_list = isinstance(packages, list)
        environment[tool] = [*packages, wheel] if is_list else {**packages, "packages": [*packages["packages"], wheel]}
    return environment


def render_files(job: JobSpec) -> dict[str, str]:
    """The request, the driver's order and the script of each machine."""
    settings = job.recipe.launch.ray
    fewest, most = job.nodes
    restarts = job.recipe.fault.max_restarts
    order = Order(fewest, most, _find_bundle(job), settings.labels, settings.wait_seconds, restarts)
    return {
        REQUEST: json.dumps(render_request(job), indent=2) + "\n",
        ORDER: json.dumps(asdict(order), indent=2) + "\n",
        AGENT: _render_agent(job),
    }


def _find_bundle(job: JobSpec) -> dict[str, float]:
    """What is reserved on each machine."""
    settings = job.recipe.launch.ray
    amounts = {"CPU": 1.0, "GPU": float(count_gpus(job)), **settings.resources}
    return {name: amount for name, amount in amounts.items() if amount}


def _refuse_workdir(workdir: Path) -> str:
    """The line that ends a machine without the shared folder."""
    shown = shlex.quote(str(workdir))
    message = (
        "is no folder on $(hostname), but the machines of a job must share it; set launch.ray.workdir to a folder that "
        "all of them see."
    )
    return f'[ -d {shown} ] || {{ echo "echelon: "{shown}" {message}"; exit 2; }}'


def _render_agent(job: JobSpec) -> str:
    """The script of each machine."""
    launch, workdir = job.recipe.launch, find_workdir(job)
    asked = asked_environment(count_gpus(job), describe_gpu_request(job))
    interface = () if launch.ray.interface is None else ("--interface", launch.ray.interface)
    train = join_words(limit_command(launch, (*job.train_command("@RECIPE@"), *interface)))
    train = train.replace("@RECIPE@", '"$here/recipe.yaml"')
    lines = (
        "#!/bin/bash",
        "# agent.sh NODES HOST:PORT PROGRAMS trains on this machine, as a child of a Ray worker.",
        'here=$(cd "$(dirname "$0")" && pwd)',
        "exec 3<&0 < /dev/null",
        _GUARD.format(seconds=math.ceil(job.recipe.fault.notice_seconds)).rstrip(),
        "unset OMP_NUM_THREADS  # Ray sets it to the cores of this machine's reservation",
        # The interpreter of an environment that Ray has made is started by its path.
        *(['PATH="$3:$PATH"'] if installs_packages(launch.ray.runtime_env) else []),
        _refuse_workdir(workdir),
        *prepare_lines(launch, workdir, asked),
        f'exec {train} --nodes "$1" --rendezvous "$2"',
    )
    return "\n".join(lines) + "\n"
