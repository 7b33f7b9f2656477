"""`echelon report --live` and `--web`: the state of a run in progress, as a short report that is made again and again,
and its page, served on this machine."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.run.report.blocks import Block, Curves, Listing, Report, Table
from echelon.run.report.page import render_page
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report

REFRESH_SECONDS = 2.0
_SECTIONS = ("Messages", "Loss", "Metrics of the loop", "Throughput", "Where the time went", "Network", "Events")
# A reading of the files of a long run takes so long; it may take at most this share of the time.
_READING_SHARE = 0.2
LOOPBACK = "127.0.0.1"
_NAMES = (LOOPBACK, "localhost")

# A browser needs one or two connections, and sends its request at once.
MAX_CONNECTIONS = 64
PATIENCE_SECONDS = 10.0
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

_HEADERS = (
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),  # beside the page's own, which cannot say this
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)


def read_live(path: Path) -> Report:
    """Return the report of a run's present state, without traces. Raises ConfigError if there is no such run."""
    whole = build_report(read_record(path, with_traces=False))
    return replace(whole, sections=[section for section in whole.sections if section.title in _SECTIONS])


def shorten(report: Report) -> Report:
    """Return the report for a terminal: of each section, its first picture and its sentences."""
    sections = [replace(section, blocks=list(_keep(section.blocks))) for section in report.sections]
    return replace(report, sections=[section for section in sections if section.blocks])


def _keep(blocks: Sequence[Block]) -> Iterator[Block]:
    has_curves = False
    for block in blocks:
        if isinstance(block, Table | Listing) or (has_curves and isinstance(block, Curves)):
            continue
        has_curves |= isinstance(block, Curves)
        yield block


def follow(path: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[Report]:
    """Yield the state of a run until it no longer runs, that state included. Raises ConfigError as `read_live`."""
    while True:
        began = time.monotonic()
        report = read_live(path)
        yield report
        if report.status != "running":
            return
        took = time.monotonic() - began
        sleep(max(REFRESH_SECONDS, took / _READING_SHARE))


class LiveServer(ThreadingHTTPServer):
    """Answers GET / with the page of a run. It listens on loopback only.

    It has a limited number of connections, each of which must send its request within PATIENCE_SECONDS.
    """

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, path: Path, port: int = 0) -> None:
        """`port`: 0 takes a free one. Raises ConfigError if it is in use."""
        self._path = path
        self._lock = threading.Lock()
        self._page, self._made_at = "", 0.0
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._unread: dict[socket.socket, float] = {}
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port} cannot be opened ({error.strerror}); choose another one.") from error

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def render(self) -> str:
        """Return the page, at most as old as the time between updates, however many browsers ask for it."""
        with self._lock:
            if not self._page or time.monotonic() - self._made_at > REFRESH_SECONDS / 2:
                self._page, self._made_at = render_page(read_live(self._path), REFRESH_SECONDS), time.monotonic()
            return self._page

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or refuse at once if too many connections are open."""
        if not self._free.acquire(blocking=False):
            with suppress(OSError):
                request.setblocking(False)
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        self._unread[request] = time.monotonic()
        super().process_request(request, client_address)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_read(request)
            self._free.release()

    def has_read(self, request: Any) -> None:
        """Note that a connection has sent its request."""
        self._unread.pop(request, None)

    @override
    def service_actions(self) -> None:
        """Close connections without a request; called twice a second. One that sends a byte now and then counts too."""
        for request, began in list(self._unread.items()):
            if time.monotonic() - began > PATIENCE_SECONDS:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about connections that the other side has closed or left."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = PATIENCE_SECONDS  # of reading, and of writing an answer
    server_version, sys_version = "echelon", ""

    def do_GET(self) -> None:
        """Answer with the page."""
        self.server.has_read(self.connection)
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            self._answer(400, "The Host header is not valid.")
            return
        # Another site's name can be made to point here; its scripts could then read the page.
        if host not in _NAMES:
            self._answer(403, "This page has the address that echelon report --web printed.")
        elif self.path != "/":
            self._answer(404, "There is only /.")
        else:
            try:
                self._answer(200, self.server.render(), "text/html")
            except ConfigError as error:
                self._answer(503, str(error))

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    @override
    def end_headers(self) -> None:
        """End the headers of any answer, of an error in `http.server` too, with those that all of them have."""
        for name, value in _HEADERS:
            self.send_header(name, value)
        super().end_headers()

    @override
    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a browser asks every few seconds."""
