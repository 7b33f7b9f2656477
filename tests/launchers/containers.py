"""Emulates SageMaker for a training job: hosts with names and addresses, each with its own /opt/ml.

A host is a network, mount and process namespace in which the request's entrypoint is process 1, as in a container
without an init process. The copying of checkpoints to S3 is emulated by copying folders.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.namespaces import Machine

NOTICE_SECONDS = 120
"""From SIGTERM to SIGKILL."""

# $0 is the host's folder, $1 its name, the rest the command. Other content of /opt is kept.
_ENTER = r"""
set -e
hostname "$1"
if [ -d /opt ]; then mount --bind /opt "$0/old"; else mkdir /opt; fi
mount -t tmpfs tmpfs /opt
for each in "$0"/old/*; do
    if [ -d "$each" ]; then mkdir "/opt/${each##*/}"; mount --bind "$each" "/opt/${each##*/}"; fi
done
mkdir -p /opt/ml
mount --bind "$0/ml" /opt/ml
mount --bind "$0/hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
cd /
shift
exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """One host of a job: its files are below `ml`, its output is in `log`."""

    name: str
    folder: Path
    process: subprocess.Popen

    @property
    def ml(self) -> Path:
        """The folder that the container sees as /opt/ml."""
        return self.folder / "ml"

    @property
    def log(self) -> str:
        """The output so far."""
        return (self.folder / "output.log").read_text(errors="replace")

    @property
    def failure(self) -> str | None:
        """The text that SageMaker would show as FailureReason."""
        path = self.ml / "output" / "failure"
        return path.read_text()[:1024] if path.exists() else None

    @property
    def checkpoints(self) -> list[str]:
        """Names of the published checkpoints of all runs."""
        return sorted(path.name for path in self.ml.glob("checkpoints/*/checkpoints/step-*"))

    def terminate(self) -> None:
        """SIGTERM to process 1 only, as `docker stop` and the platform send it; it may have ended already."""
        pid = self.process.pid
        with suppress(FileNotFoundError, ProcessLookupError):
            for first in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(first), signal.SIGTERM)


def make_image(folder: Path) -> Path:
    """Create a Python with all packages of this one except echelon, like an image; return the folder of `python3`."""
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next((folder / "lib").glob("python*/site-packages"))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"echelon|__editable__.*echelon|__pycache__", path.name):
            (packages / path.name).symlink_to(path)
    return folder / "bin"


def start_hosts(
    machines: Sequence[Machine],
    request: Mapping[str, Any],
    channels: Sequence[Mapping[str, Path]],
    image: Path,
    folder: Path,
    checkpoints: Path | None = None,
) -> list[Host]:
    """Start the hosts of a CreateTrainingJob `request`, with exactly its entrypoint and arguments.

    `channels`: for each host, the folder that each channel is copied from. `checkpoints`: the content of S3.
    """
    names = [f"algo-{number}" for number in range(1, len(machines) + 1)]
    known = "".join(f"{machine.address} {name}\n" for machine, name in zip(machines, names, strict=True))
    hosts = []
    for machine, name, given in zip(machines, names, channels, strict=True):
        place = folder / name
        _fill(place / "ml", name, names, request, given)
        (place / "old").mkdir()
        (place / "tmp").mkdir()
        (place / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        if checkpoints is not None:
            shutil.copytree(checkpoints, place / "ml" / "checkpoints", dirs_exist_ok=True)
        env = {
            "PATH": f"{image}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "TMPDIR": str(place / "tmp"),
            "TRAINING_JOB_NAME": request["TrainingJobName"],
            "AWS_REGION": "us-east-1",
            "OMP_NUM_THREADS": "1",
            "PIP_CONFIG_FILE": "/dev/null",  # the settings of this machine are not those of an image
            **request.get("Environment", {}),
        }
        specification = request["AlgorithmSpecification"]
        command = [*specification["ContainerEntrypoint"], *specification.get("ContainerArguments", [])]
        unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        with (place / "output.log").open("wb") as log:
            inside = [*unshare, "sh", "-c", _ENTER, str(place), name, *command]
            process = machine.start(inside, env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        hosts.append(Host(name, place, process))
    return hosts


def _fill(ml: Path, name: str, names: list[str], request: Mapping[str, Any], channels: Mapping[str, Path]) -> None:
    """Write the files that a container finds, in the form that real jobs log."""
    groups = _list_groups(request["ResourceConfig"], names)
    own = next(group for group in groups if name in group["hosts"])
    resources = {
        "current_host": name, "current_instance_type": own["instance_type"],
        "current_group_name": own["instance_group_name"], "hosts": names, "network_interface_name": "eth0",
        "instance_groups": groups,
    }  # fmt: skip
    shapes = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    files = {
        "resourceconfig": resources,
        "inputdataconfig": {channel["ChannelName"]: shapes for channel in request["InputDataConfig"]},
        "hyperparameters": request.get("HyperParameters", {}),
    }
    for file, content in files.items():
        path = ml / "input" / "config" / f"{file}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    for made in ("model", "output/data", "checkpoints"):
        (ml / made).mkdir(parents=True)
    for channel, source in channels.items():
        shutil.copytree(source, ml / "input" / "data" / channel)


def _list_groups(machines: Mapping[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The instance groups with their hosts; a job without groups has one of this name."""
    only = {"InstanceGroupName": "homogeneousCluster", "InstanceType": machines.get("InstanceType")}
    left, groups = list(names), []
    for group in machines.get("InstanceGroups") or [only | {"InstanceCount": len(names)}]:
        hosts = [left.pop(0) for _ in range(group["InstanceCount"])]
        kind = {"instance_group_name": group["InstanceGroupName"], "instance_type": group["InstanceType"]}
        groups.append({**kind, "hosts": hosts})
    return groups


def await_end(hosts: Sequence[Host], seconds: float) -> list[int]:
    """Return the exit codes. When a host fails, the platform stops the others: SIGTERM, and SIGKILL after 120 s."""
    started, stopped_at = time.monotonic(), None
    while None in (codes := [host.process.poll() for host in hosts]):
        now = time.monotonic()
        assert now < started + seconds, "\n".join(f"== {host.name}\n{host.log}" for host in hosts)
        if stopped_at is None and any(codes):
            stopped_at = now
            for host in hosts:
                if host.process.poll() is None:
                    host.terminate()
        elif stopped_at is not None and now > stopped_at + NOTICE_SECONDS:
            for host in hosts:
                host.process.kill()
        time.sleep(0.1)
    return codes


def sync_to_s3(hosts: Sequence[Host], bucket: Path) -> Path:
    """The content of S3 after every host's /opt/ml/checkpoints was copied to one prefix.

    If two hosts have a file of the same name, the newer one is kept.
    """
    newest: dict[Path, Path] = {}
    for host in hosts:
        root = host.ml / "checkpoints"
        for path in root.rglob("*"):
            name = path.relative_to(root)
            if path.is_file() and (name not in newest or path.stat().st_mtime >= newest[name].stat().st_mtime):
                newest[name] = path
    for name, path in newest.items():
        (bucket / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, bucket / name)
    return bucket
