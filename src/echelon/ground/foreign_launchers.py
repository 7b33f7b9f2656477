"""What other launchers tell a rank, where that takes more than a variable: where ranks meet, and Slurm's machines.

`horovodrun` sets ranks, but no address of rank 0. It runs a key-value store, over HTTP, at HOROVOD_GLOO_RENDEZVOUS_ADDR
and HOROVOD_GLOO_RENDEZVOUS_PORT. Rank 0 writes its address there, and the others wait for it.

`mpirun` sets ranks, and where it runs itself: Open MPI 4 in the addresses of its first daemon
(`OMPI_MCA_orte_hnp_uri=4711.0;tcp://10.0.0.1,192.168.0.1:44775`), Open MPI 5 in the job's name
(`PMIX_NAMESPACE=prterun-node-1-2114@1`). Rank 0 is on that machine unless the user maps ranks otherwise.
"""

import re
import socket
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product

from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.hosts import THIS_MACHINE, HostGroup, find_interface, find_own_address, join_endpoint

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_KEY = "echelon/address-of-rank-0"
_WAIT_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_REQUEST_SECONDS = 10.0
_MAX_BYTES = 256
_CONNECT_SECONDS = 3.0
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def read_horovodrun_rendezvous(env: Mapping[str, str]) -> dict[str, str]:
    """The rendezvous and network variables for one rank of a horovodrun job.

    Raises ConfigError if the store's address is not set, and LaunchError if rank 0's address is not there in time.
    """
    size, local_size = int(env["HOROVOD_SIZE"]), int(env["HOROVOD_LOCAL_SIZE"])
    host, store_port = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), env.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if not host or not store_port:
        raise ConfigError(
            f"HOROVOD_RANK is set, but HOROVOD_GLOO_RENDEZVOUS_ADDR is not, so {size} processes cannot meet; start "
            "them with horovodrun --gloo, or with mpirun."
        )
    endpoint = join_endpoint(host, int(store_port))
    own_ip = THIS_MACHINE.host if size == local_size else find_own_address(HostGroup(1, size, host, int(store_port)))
    address = env.get("MASTER_ADDR") or (
        own_ip if size == local_size else _exchange(endpoint, env["HOROVOD_RANK"], own_ip)
    )
    # Every rank derives the same port, below the range of ephemeral ports.
    port = env.get("MASTER_PORT") or str(_FIRST_PORT + zlib.crc32(endpoint.encode()) % _NUM_PORTS)
    variables = {"MASTER_ADDR": address, "MASTER_PORT": port}
    interface = find_interface(own_ip)
    return variables if interface is None else {**variables, "GLOO_SOCKET_IFNAME": interface}


def _exchange(endpoint: str, rank: str, own: str) -> str:
    """Write rank 0's address to the store of horovodrun, or wait for it there."""
    url = f"http://{endpoint}/{_KEY}"
    try:
        if rank == "0":
            request = urllib.request.Request(url, data=own.encode(), method="PUT")
            urllib.request.urlopen(request, timeout=_REQUEST_SECONDS).close()
            return own
        return _await(url)
    except OSError as error:
        raise LaunchError(
            f"rank {rank} cannot reach the store of horovodrun at {endpoint} ({error}); check that no firewall is "
            "between the machines, or export MASTER_ADDR with the address of rank 0's machine."
        ) from error


def _await(url: str) -> str:
    until = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=_REQUEST_SECONDS) as answer:
                return str(answer.read(_MAX_BYTES).decode())
        except urllib.error.HTTPError as error:
            if error.code != 404:  # not there yet
                raise
        time.sleep(_LOOK_SECONDS)
    raise LaunchError(
        f"rank 0 did not write its address to the store of horovodrun within {_WAIT_SECONDS:.0f} seconds."
    )


def read_mpirun_rendezvous(env: Mapping[str, str]) -> dict[str, str]:
    """The rendezvous and network variables for one rank of an mpirun job.

    Raises ConfigError if rank 0's machine is unknown, and LaunchError if it cannot be reached.
    """
    size, local_size = (int(env[f"OMPI_COMM_WORLD_{key}"]) for key in ("SIZE", "LOCAL_SIZE"))
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    # Every rank derives the same port, below the range of ephemeral ports.
    port = int(env.get("MASTER_PORT") or _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS)
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if size == local_size else _find_address(env))
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    own_ip = find_own_address(HostGroup(1, size, address, port))
    interface = find_interface(own_ip)
    if interface is not None and (size == local_size or not own_ip.startswith("127.")):
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return variables


def _find_address(env: Mapping[str, str]) -> str:
    """The address of mpirun's machine."""
    # Daemons are numbered; the one on mpirun's machine is 0.
    daemon = re.search(r"\.(\d+);", env.get("PMIX_SERVER_URI2", ""))
    if env["OMPI_COMM_WORLD_RANK"] == "0" and daemon is not None and daemon[1] != "0":
        raise ConfigError(
            "MASTER_ADDR is not set, and rank 0 runs on another machine than mpirun, so its address is unknown; "
            "add -x MASTER_ADDR=ADDRESS to mpirun, with the address of rank 0's machine."
        )
    if match := re.search(r";tcp://([^:;]+):(\d+)", env.get("OMPI_MCA_orte_hnp_uri", "")):
        return _find_reachable(match[1].split(","), int(match[2]))
    if match := re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", env.get("PMIX_NAMESPACE", "")):
        return match[1]
    raise ConfigError(
        "MASTER_ADDR is not set, and mpirun does not give its own address; add -x MASTER_ADDR=ADDRESS to it, with "
        "the address of rank 0's machine."
    )


def _find_reachable(addresses: list[str], port: int) -> str:
    """The first of mpirun's addresses that this machine can reach; mpirun listens there."""
    if len(addresses) == 1:
        return addresses[0]
    for address in addresses:
        with suppress(OSError):
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
            return address
    raise LaunchError(
        f"cannot reach any address of mpirun's machine ({', '.join(addresses)}); add -x MASTER_ADDR=ADDRESS "
        "to mpirun, with a reachable address."
    )


def expand_nodelist(text: str) -> list[str]:
    """The host names in order, as `scontrol show hostnames` prints them; empty for an empty text.

    A range keeps the leading zeros of its first number: `n[08-10]` is n08, n09, n10. Of several brackets in a name, the
    last one varies fastest. Raises ConfigError with the invalid part.
    """
    return [name for part in _split(text) for name in _expand(part)]


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^\[\]]*\])", text) if part.strip()]


def _expand(part: str) -> Iterator[str]:
    # re.split gives plain text and the insides of brackets in turn.
    pieces = _BRACKETS.split(part)
    choices = [_numbers(piece, part) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if any(character in "[] \t" for piece in pieces for character in piece):
        raise ConfigError(f"{part!r} is not a Slurm node list; expected one such as n[1-3,07],gpu-a.")
    return map("".join, product(*choices))


def _numbers(inside: str, part: str) -> list[str]:
    numbers: list[str] = []
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"[{inside}] in {part!r} is not a node range; expected one such as [1-3,07].")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def in_number_order(name: str) -> list[tuple[int, str]]:
    """A sort key for natural order: algo-2 before algo-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
