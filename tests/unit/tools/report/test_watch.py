"""`echelon report --live` of runs whose files are written by hand."""

import http.client
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from echelon.ground.errors import ConfigError
from echelon.run.folder.run_folder import RunFolder
from echelon.run.report.plain import render_text
from echelon.run.report.server import LiveServer, follow, shorten
from tests.unit.tools.report.test_report import write_lines, write_run


@contextmanager
def served(path):
    """The server of a run's page, and a function that sends it a request."""
    with LiveServer(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def ask(target="/", method="GET", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
            connection.request(method, target, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers

        yield server, ask
        server.shutdown()
        thread.join()


def test_the_terminal_follows_a_run_to_its_end(tmp_path):
    path = write_run(tmp_path / "a", ending=None)
    waits = []

    def go_on(seconds):
        waits.append(seconds)
        folder.unlock()

    folder = RunFolder(path)
    folder.lock()
    reports = list(follow(path, go_on))
    assert [each.status for each in reports] == ["running", "interrupted"] and waits >= [2.0]
    text = render_text(shorten(reports[0]), 80)
    assert "a: running" in text and "tokens per second" in text and "Loss" in text
    assert "loss: training" in text and "gradient norm" not in text, "only the first picture of a section"


def test_the_page_is_served_to_this_machine_only(tmp_path):
    path = write_run(tmp_path / "a")
    with served(path) as (server, ask):
        assert server.server_address[0] == "127.0.0.1"
        status, page, headers = ask()
        assert status == 200 and headers["Cache-Control"] == "no-store" and "<h1>a <small" in page
        assert "script-src 'sha256-" in page and "http" not in page.replace("http-equiv", "")
        assert ask("/../../etc/passwd")[0] == 404 and ask("/", "POST")[0] == 501
        assert ask(Host="evil.example:80")[0] == 403 and ask(Host=f"localhost:{server.server_port}")[0] == 200
        with pytest.raises(ConfigError, match=rf"--port {server.server_port} cannot be opened \(Address already"):
            LiveServer(path, server.server_port)


def connect(server, content=b""):
    """A connection to the server that has sent something."""
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
    connection.sendall(content)
    return connection


def read_all(connection):
    """What the server sends until it ends the connection."""
    with connection:
        parts = []
        try:
            while part := connection.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


def test_a_bad_request_has_an_answer_and_all_answers_have_the_headers(tmp_path, capfd):
    with served(write_run(tmp_path / "a")) as (server, ask):
        answers = [ask(), ask(Host="evil.example"), ask("/other"), ask(method="POST"), ask(Host="[")]
        for host in ("[::1", "a]b", "127.0.0.1:x["):
            answers.append(ask(Host=host))
        raw = read_all(connect(server, b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 200 + b"\r\n"))
    assert [status for status, *_ in answers] == [200, 403, 404, 501, 400, 400, 400, 400]
    for _, _, headers in answers:
        assert headers["X-Frame-Options"] == "DENY" and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'" and headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer" and "Python" not in headers["Server"]
    assert b" 431 " in raw and b"X-Frame-Options: DENY" in raw
    assert capfd.readouterr().err == ""


def test_a_browser_that_leaves_is_no_error(tmp_path, monkeypatch, capfd):
    """It also frees its connection: of one, none would be left."""
    monkeypatch.setattr("echelon.run.report.server.MAX_CONNECTIONS", 1)
    with served(write_run(tmp_path / "a")) as (server, ask):
        for content in (b"", b"GET / HTTP/1.0\r\n", b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n") * 7:
            connection = connect(server, content)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()  # a reset
        await_answer(ask)
    assert capfd.readouterr().err == ""


def await_answer(ask):
    """Ask until a connection is free."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(OSError, http.client.HTTPException):
            if ask()[0] == 200:
                return
        time.sleep(0.01)
    pytest.fail("no connection is free")


def test_connections_without_a_request_are_closed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("echelon.run.report.server.PATIENCE_SECONDS", 1.0)
    with served(write_run(tmp_path / "a")) as (server, ask):
        half = [connect(server, content) for content in (b"", b"GET / HT", b"GET / HTTP/1.0\r\nHost: localhost\r\n")]
        slow = connect(server, b"GET /")
        ended = threading.Event()

        def trickle():
            while not ended.wait(0.1):
                try:
                    slow.sendall(b"a")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert [read_all(connection) for connection in half] == [b"", b"", b""]
        assert read_all(slow) == b""
        ended.set()
        thread.join()
        assert ask()[0] == 200
    assert capfd.readouterr().err == ""


def test_the_number_of_connections_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("echelon.run.report.server.MAX_CONNECTIONS", 3)
    with served(write_run(tmp_path / "a")) as (server, ask):
        idle = [connect(server) for _ in range(3)]
        assert read_all(connect(server, b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")).startswith(b"HTTP/1.0 503 ")
        for connection in idle:
            connection.close()
        await_answer(ask)


def test_a_page_is_made_anew_and_survives_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("echelon.run.report.server.REFRESH_SECONDS", 0.0)
    path = write_run(tmp_path / "a", num_steps=5)
    with served(path) as (_, ask):
        assert "5/" in ask()[1] or ">5<" in ask()[1]
        write_lines(path / "metrics.jsonl", [{"kind": "train", "step": 77, "loss": 1.0}])
        assert "77" in ask()[1]
        path.rename(tmp_path / "gone")
        status, text, _ = ask()
        assert status == 503 and "is not a run folder" in text


def test_a_run_that_is_not_there_is_refused(echelon):
    code, _, err = echelon("report", "nothing", "--web")
    assert code == 2 and "nothing is not a run" in err
