"""A local S3 server: moto behind real HTTP, which a test can stop, make fail, and inspect."""

import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"


class _Silent(WSGIRequestHandler):
    def log(self, *arguments):
        pass


class ObjectServer:
    """An S3 server that keeps its objects and its port when it is stopped and started again.

    After `fail_after` more requests that write, each such request is answered with 503; None: never.
    """

    def __init__(self):
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = None
        self.port = 0
        self.fail_after = None
        self.requests = []
        self.start()

    @property
    def environment(self):
        """The environment variables of a client."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "the-secret-of-this-test",
            "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def start(self):
        """Start the server, unless it runs already."""
        if self._server is not None:
            return
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True, request_handler=_Silent)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self):
        """Stop the server; connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, environ, respond):
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        if self.fail_after is not None and environ["REQUEST_METHOD"] in ("PUT", "POST"):
            self.fail_after -= 1
            if self.fail_after < 0:
                respond("503 Service Unavailable", [("Content-Length", "0")])
                return [b""]
        return self._app(environ, respond)
