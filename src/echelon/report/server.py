"""Serves the page of a run that updates itself, to browsers on this machine only."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from echelon.errors import ConfigError
from echelon.report.live import REFRESH_SECONDS, read_live
from echelon.report.page import render_page

LOOPBACK = "127.0.0.1"
_NAMES = (LOOPBACK, "localhost")


class LiveServer(ThreadingHTTPServer):
    """Answers GET / with the page of a run. It listens on loopback only."""

    daemon_threads = True

    def __init__(self, path: Path, port: int = 0) -> None:
        """`port`: 0 takes a free one. Raises ConfigError if it is in use."""
        self._path = path
        self._lock = threading.Lock()
        self._page, self._made_at = "", 0.0
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


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        """Answer with the page."""
        # Another site's name can be made to point here; its scripts could then read the page.
        if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in _NAMES:
            self._answer(403, "This page has the address that echelon watch printed.")
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
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a browser asks every few seconds."""
