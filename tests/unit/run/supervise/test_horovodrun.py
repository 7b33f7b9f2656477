"""The rendezvous of horovodrun's ranks, with a store like that of horovodrun, and the checks of Horovod's ranks."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from echelon.foreign.horovod import check_ranks, divide, find_group_bytes
from echelon.ground import foreign_launchers
from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.foreign_launchers import read_horovodrun_rendezvous


class Store(BaseHTTPRequestHandler):
    """GET and PUT of a key, as in `horovod.runner.http.http_server`."""

    values: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        value = self.values.get(self.path)
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")

    def do_PUT(self) -> None:
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that runs."""
    Store.values.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def variables(rank: int, port: int, local_size: int = 1) -> dict[str, str]:
    """What horovodrun sets for a rank of two."""
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }


def test_ranks_of_several_machines_get_the_address_of_rank_zero_from_the_store(port: int) -> None:
    found = {}
    waiting = threading.Thread(target=lambda: found.update(read_horovodrun_rendezvous(variables(1, port))))
    waiting.start()  # before rank 0 has written anything
    first = read_horovodrun_rendezvous(variables(0, port))
    waiting.join(10)
    assert found["MASTER_ADDR"] == first["MASTER_ADDR"] == "127.0.0.1"
    assert found["MASTER_PORT"] == first["MASTER_PORT"]
    assert 20_000 <= int(first["MASTER_PORT"]) < 30_000
    assert Store.values == {"/echelon/address-of-rank-0": b"127.0.0.1"}


def test_one_machine_uses_loopback_and_no_store() -> None:
    found = read_horovodrun_rendezvous(variables(1, 9, local_size=2))
    assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


def test_a_store_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 cannot reach the store of horovodrun at 127\.0\.0\.1:9"):
        read_horovodrun_rendezvous(variables(1, 9))


def test_a_rank_zero_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(foreign_launchers, "_WAIT_SECONDS", 0.3)
    with pytest.raises(LaunchError, match="rank 0 did not write its address"):
        read_horovodrun_rendezvous(variables(1, port))


def test_a_rank_without_a_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="HOROVOD_GLOO_RENDEZVOUS_ADDR is not"):
        read_horovodrun_rendezvous({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"})


def check_alone(rank: int, world_size: int) -> str:
    """What a Horovod that started alone in a process of this job leads to."""
    check_ranks(rank, world_size)
    with pytest.raises(LaunchError) as caught:
        check_ranks(0, 1)
    return str(caught.value)


@pytest.mark.dist
def test_a_horovod_that_started_alone_ends_the_run(workers) -> None:
    first, second = workers.run(check_alone, 2)
    assert first.startswith("Horovod started as rank 0 of 1, but this process is rank 0 of the 2 of the job;")
    assert second.startswith("Horovod started as rank 0 of 1, but this process is rank 1 of the 2 of the job;")


def test_groups_keep_the_order_and_the_limit() -> None:
    sizes = {"a": 3, "b": 4, "c": 3, "d": 20, "e": 1, "f": 9}
    assert divide(sizes, 10) == [["a", "b", "c"], ["d"], ["e", "f"]]


def test_the_fusion_threshold_is_the_recipe_s_or_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    assert find_group_bytes({}) == 128 * 2**20
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "4096")
    assert find_group_bytes({}) == 4096
    assert find_group_bytes({"HOROVOD_FUSION_THRESHOLD": "2048"}) == 2048
