"""Whether NCCL can use EFA, the network of AWS's large machines: without a plugin it uses TCP and says nothing.

The plugin: https://github.com/aws/aws-ofi-nccl. NCCL loads `libnccl-net*.so` as the dynamic linker finds it.
"""

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path

from echelon.ground.cores import read_system_file
from echelon.ground.variables import find_system_root
from echelon.planner.hardware.gpu_check import count_installed

_NAME = "libnccl-net*.so*"
# Where the dynamic linker looks by itself, and where AWS's installer and its images have the plugin.
_STANDARD = ("lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib", "lib/*-linux-gnu", "usr/lib/*-linux-gnu")
_INSTALLED = ("opt/amazon/ofi-nccl/lib*", "opt/amazon/ofi-nccl/lib/*-linux-gnu", "opt/aws-ofi-nccl/**/lib*")
_TCP = "NCCL sends over TCP between machines, which is many times slower"


def has_efa(system: Path) -> bool:
    """Whether this machine has an EFA device. `system`: the folder `/sys`."""
    cards = (system / "class" / "infiniband").glob("*/device/driver")
    return any(card.resolve().name == "efa" for card in cards)


def is_efa_wanted(env: Mapping[str, str]) -> bool:
    """Whether GPUs of this machine would use EFA: the environment asks for it, or the machine has both.

    NCCL_NET and NCCL_NET_PLUGIN may say that they shall not.
    """
    if env.get("NCCL_NET", "").lower() == "socket" or env.get("NCCL_NET_PLUGIN") == "none":
        return False
    root = find_system_root()
    return env.get("FI_PROVIDER") == "efa" or (has_efa(root / "sys") and count_installed() > 0)


def explain_no_efa(env: Mapping[str, str]) -> str | None:
    """Why NCCL would use TCP between machines although EFA is wanted, and the fix; None if it would use EFA."""
    root = find_system_root()
    if not is_efa_wanted(env):
        return None
    if not has_efa(root / "sys"):
        return f"FI_PROVIDER=efa asks for EFA, but this machine has no EFA device, so {_TCP}; use machines with EFA"
    if not any((root / "dev/infiniband").glob("uverbs*")):
        return (
            f"this machine has EFA, but this container does not have its devices (/dev/infiniband), so {_TCP}; request "
            "them (Kubernetes: launch.kubernetes.resources={vpc.amazonaws.com/efa: NUMBER})"
        )
    if find_plugin(env) is not None:
        return None
    words = f"NCCL finds no plugin for EFA (libnccl-net.so, of aws-ofi-nccl), so {_TCP}"
    if (hidden := next(_find_files(root, _INSTALLED), None)) is not None:
        return f"{words}; {hidden} is there: add {hidden.parent} to LD_LIBRARY_PATH"
    return f"{words}; use an image that has it, such as AWS's deep learning container for EC2 (docs/kubernetes.md)"


def find_plugin(env: Mapping[str, str]) -> Path | None:
    """The plugin that NCCL loads for its network; None if the dynamic linker would not find one."""
    root = find_system_root()
    plugin = env.get("NCCL_NET_PLUGIN", "")
    if "/" in plugin and (root / plugin.lstrip("/")).is_file():
        return root / plugin.lstrip("/")
    paths = [entry for entry in env.get("LD_LIBRARY_PATH", "").split(":") if entry]
    for file in [*(root / "etc/ld.so.conf.d").glob("*.conf"), root / "etc/ld.so.conf"]:
        paths += [line for line in read_system_file(str(file)).splitlines() if line.startswith("/")]
    folders = [glob.escape(path.lstrip("/")) for path in paths]
    return next(_find_files(root, (*folders, *_STANDARD)), None)


def _find_files(root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(root.glob(f"{folder}/{_NAME}"))
