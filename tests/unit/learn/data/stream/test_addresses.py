"""Objects behind HTTP whose server fails, lies and stalls: found or fetched as they are, or refused with the cause."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from echelon.ground.errors import ConfigError, DataError, EchelonError
from echelon.ground.object_store import ObjectStore, ObjectStoreError
from echelon.ground.scratch import sweep
from echelon.ground.stored import MAX_BYTES
from echelon.learn.data.readers.record import SourceFile
from echelon.learn.data.source import Source, list_files
from echelon.learn.data.stream import addresses
from echelon.learn.data.stream.addresses import fetch, find_objects

TEXT = b"a line of text\n" * 100


class Objects(ThreadingHTTPServer):
    """A server of one text under any name. `statuses`: of the next answers, by method; then 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.statuses: list[int] = []
        self.sent_bytes = len(TEXT)
        self.pause = 0.0
        self.received: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/text.txt"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Objects

    def do_HEAD(self) -> None:
        self.begin(len(TEXT))

    def do_GET(self) -> None:
        """Send `sent_bytes` in pieces without saying how many there are."""
        if not self.begin(None):
            return
        block = TEXT * 1000
        with suppress(OSError):
            for start in range(0, self.server.sent_bytes, len(block)):
                part = block[: self.server.sent_bytes - start]
                time.sleep(self.server.pause)
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

    def begin(self, size: int | None) -> bool:
        self.server.received.append(self.command)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.send_response(status)
        self.send_header("ETag", "1")
        is_given = status != 200 or size is not None
        length = 0 if status != 200 else size
        self.send_header(*(("Content-Length", str(length)) if is_given else ("Transfer-Encoding", "chunked")))
        self.end_headers()
        return status == 200

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(addresses, "RETRY_DELAYS_SECONDS", (0.0, 0.0))
    server = Objects()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def listed(server: Objects) -> SourceFile:
    [(address, info)] = find_objects(server.address, "data.train.0.path").items()
    return SourceFile(None, address, "text", info.size, 0, True, revision=info.version)


@pytest.mark.parametrize("query", ["", "?signature=1"])
def test_a_busy_server_is_asked_again(server, tmp_path, caplog, query):
    server.statuses = [503, 503, 200]  # HEAD, then GET
    [info] = find_objects(server.address + query, "data.train.0.path").values()
    assert info.size == len(TEXT)
    assert [line for line in caplog.messages if "503" in line and "again in 0 s" in line]
    file = listed(server)
    server.statuses = [500, 503]
    assert fetch(file, tmp_path).path.read_bytes() == TEXT
    server.statuses = [503] * 6
    with pytest.raises(EchelonError, match=r"cannot be fetched \(.*503.*resume the run") as caught:
        fetch(file, tmp_path)
    assert not isinstance(caught.value, DataError)
    assert list(tmp_path.iterdir()) == []


def test_what_is_gone_or_refused_is_said_at_once(server, tmp_path):
    file = listed(server)
    server.statuses = [404, 404]
    with pytest.raises(DataError, match="changed since the data was listed: it is gone"):
        fetch(file, tmp_path)
    server.statuses = [403, 403]
    with pytest.raises(EchelonError, match=r"cannot be fetched \(.*403.*with credentials that allow to read it"):
        fetch(file, tmp_path)
    server.statuses = [404, 404]
    with pytest.raises(DataError, match="no such object"):
        find_objects(server.address, "data.train.0.path")
    server.statuses = [403, 403]
    with pytest.raises(ConfigError, match="credentials"):
        find_objects(server.address, "data.train.0.path")
    assert server.statuses == []


def test_an_object_longer_than_stated_is_not_read_to_its_end(server, tmp_path):
    file = listed(server)
    server.sent_bytes = 10**15
    with pytest.raises(EchelonError, match=r"cannot be fetched \(more than its 1,500 bytes arrived\)"):
        fetch(file, tmp_path)
    assert list(tmp_path.iterdir()) == []
    server.sent_bytes = len(TEXT) - 1
    with pytest.raises(EchelonError, match=r"cannot be fetched \(only 1,499 of its 1,500 bytes arrived\)"):
        fetch(file, tmp_path)


def test_stores_without_a_client_of_their_own_end_a_longer_object_too(tmp_path):
    store = ObjectStore("memory://folder")
    store.write("large", b"x" * 2**24)
    store.download("large", tmp_path / "large", 1000)
    assert 1000 < (tmp_path / "large").stat().st_size <= 2**23
    assert store.digest("large", 1000)[0] < 2**24
    store.download("large", tmp_path / "large", 2**24)
    assert (tmp_path / "large").stat().st_size == 2**24
    with pytest.raises(ObjectStoreError, match="huge is larger than 64"):
        store.write("huge", b"x" * (MAX_BYTES + 1))
        store.read("huge")


def test_a_slow_server_is_named(server, caplog, monkeypatch):
    monkeypatch.setattr(addresses, "SLOW_SECONDS", 0.1)
    caplog.set_level("INFO")
    server.pause = 0.5
    with suppress(DataError):  # its text has no lines of JSON
        list_files(Source("data.train.0", server.address.replace(".txt", ".jsonl")))
    assert [line for line in caplog.messages if re.fullmatch(r"data: still reading \S+/text\.jsonl, .*", line)]


LIST = """
import sys
from echelon.ground.stop_request import stops_told
from echelon.learn.data.source import Source, list_files
with stops_told():
    list_files(Source("data.train.0", sys.argv[1]))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_while_it_waits_for_a_server_leaves_nothing(server, tmp_path, signum):
    server.pause = 60.0
    address, environment = server.address.replace(".txt", ".jsonl"), {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", LIST, address], stderr=subprocess.PIPE, text=True, env=environment
    )
    while server.received.count("GET") < 1:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signum)
    said = process.communicate(timeout=60)[1]
    if signum == signal.SIGTERM:
        assert said.splitlines()[-1].startswith("echelon.ground.errors.LaunchError: stopped by SIGTERM")
        assert "Task was destroyed" not in said
    else:
        [folder] = tmp_path.iterdir()
        for path in (folder, *folder.iterdir()):
            os.utime(path, (time.time() - 100, time.time() - 100))
        sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []
