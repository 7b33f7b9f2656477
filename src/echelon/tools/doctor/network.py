"""The network checks that one machine runs against the others: `python -m echelon.tools.doctor.network`.

`echelon doctor` starts it on every machine.

It reads JSON requests from stdin, one per line, and writes one JSON answer per line, after `MARK`, to stdout. The
requests come from `tools/doctor/link_probe.py` over ssh, so they do not need the network under test.
"""

import json
import os
import platform
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from echelon.ground.errors import EchelonError
from echelon.ground.hosts import HostGroup, find_interface, find_own_address
from echelon.ground.launch_environment import exported
from echelon.ground.sockets import host_store_at
from echelon.run.folder.environment import describe_source, find_version
from echelon.tools.doctor.link_probe import MARK

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_LATENCY_REPEATS = 20
_FIRST_BYTES, _LARGEST_BYTES, _GROWTH = 2**16, 2**25, 8
# A payload that takes this long measures the rate well enough.
_ENOUGH_SECONDS = 0.25


class CheckedMachine:
    """This machine during the checks. It listens on the port that training will use."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._variables: dict[str, str] = {}

    def describe(self, hosts: list[str], port: int, interface: str | None, seen: str | None) -> dict[str, Any]:
        """Versions, devices, the addresses of all hosts as resolved here, and the ports where this machine listens.

        `interface`: the network interface to use; None: the one that reaches the first host. `seen`: a file in the
        """
        import torch

        group = HostGroup(1, len(hosts), hosts[0], port, interface=interface)
        address = find_own_address(group)
        chosen = interface or find_interface(address)
        if chosen is not None:
            self._variables = {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": chosen}
        self._store = host_store_at(address)
        has_gpu = torch.cuda.is_available()
        return {
            "versions": {
                "python": platform.python_version(),
                **{name: find_version(name) for name in ("torch", "transformers")},
                "echelon": describe_source(),
            },
            "has_gpu": has_gpu,
            "devices": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if has_gpu else "CPU",
            "address": address,
            "interface": chosen,
            "addresses": {host: _resolve(host) for host in hosts},
            "listens": _listen(port),
            "store_port": self._store.port,
            "sees": seen is None or Path(seen).exists(),
            "free_bytes": shutil.disk_usage(".").free,
        }

    def clock(self) -> dict[str, float]:
        """The time in UTC seconds."""
        return {"time": time.time()}

    def connect(self, targets: dict[str, list[Any]], limit: float) -> dict[str, str | None]:
        """Connect to each `[address, port]`; returns by name why it cannot be reached, None if it can."""
        answers: dict[str, str | None] = dict.fromkeys(targets, f"no answer in {limit:.0f} s")

        def attempt(name: str, address: str, port: int) -> None:
            try:
                socket.create_connection((address, port), limit).close()
                answers[name] = None
            except TimeoutError:
                pass
            except OSError as error:
                answers[name] = (error.strerror or str(error)).lower()

        threads = [threading.Thread(target=attempt, args=(name, *to), daemon=True) for name, to in targets.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit + 2)  # the resolver itself has no timeout
        return dict(answers)

    def measure(
        self, backend: str, rank: int, size: int, address: str, port: int, tag: str, limit: float
    ) -> dict[str, float]:
        """Run all-reduces with other machines, over gloo or nccl; the rendezvous is the store at `address:port`.

        Returns the latency in seconds, and bytes per second on each machine's network link.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=limit)
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        with exported(self._variables):
            dist.init_process_group(
                backend,
                store=PrefixStore(tag, store),
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
        try:
            reduce = _reducer(device)
            reduce(4)  # the first one opens the connections
            latency = min(reduce(4) for _ in range(_LATENCY_REPEATS))
            num_bytes = _FIRST_BYTES
            while True:
                taken = _agree(max(reduce(num_bytes), 1e-9), device)
                if taken > _ENOUGH_SECONDS or num_bytes >= _LARGEST_BYTES:
                    break
                num_bytes *= _GROWTH
            if taken < _ENOUGH_SECONDS:
                taken = _agree(min(reduce(num_bytes) for _ in range(3)), device)
        finally:
            dist.destroy_process_group()
        return {"latency_seconds": latency, "bytes_per_second": 2 * (size - 1) / size * num_bytes / taken}


def _reducer(device: "torch.device") -> Callable[[int], float]:
    """A function that all-reduces a number of bytes over all machines and returns the seconds it took."""
    import torch
    import torch.distributed as dist

    def reduce(num_bytes: int) -> float:
        payload = torch.ones(num_bytes // 4, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(payload)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    return reduce


def _agree(seconds: float, device: "torch.device") -> float:
    """The longest time on any machine, so that all stop at the same payload size."""
    import torch
    import torch.distributed as dist

    longest = torch.tensor([seconds], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest.item())


def _resolve(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _listen(port: int) -> str | None:
    """Listen on a port until this process ends. Returns the reason if that fails, or None."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
    except OSError as error:
        return (error.strerror or str(error)).lower()
    server.listen(64)

    def accept() -> None:
        while True:
            with suppress(OSError):
                server.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()
    return None


@contextmanager
def _answers_alone() -> Iterator[TextIO]:
    """The stream for answers; any other output of this process goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        yield answers
    finally:
        answers.close()


def main() -> None:
    """Answer requests until stdin is closed."""
    machine = CheckedMachine()
    with _answers_alone() as answers:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = getattr(machine, request.pop("do"))(**request)
            except (EchelonError, RuntimeError, OSError) as error:  # torch's own errors are RuntimeErrors
                answer = {"error": str(error).splitlines()[0] if str(error) else type(error).__name__}
            print(f"{MARK}{json.dumps(answer)}", file=answers, flush=True)
    # A collective whose peer is gone may hang in its teardown.
    os._exit(0)


if __name__ == "__main__":
    main()
