"""A local S3 server: moto behind real HTTP, which a test can stop, make fail, and inspect."""

import threading
from contextlib import contextmanager

import fsspec
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"


class _Silent(WSGIRequestHandler):
    def log(self, *arguments):
        pass


class ObjectServer:
    """An S3 server that keeps its objects and its port when it is stopped and started again.

    After `fail_after` more requests that write, each such request is answered with 503; None: never. Of the next
    `num_cut` objects that are read, only one half arrives. `before` is called with method and path of each request.
    """

    def __init__(self):
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = None
        self.port = 0
        self.fail_after = None
        self.num_cut = 0
        self.before = lambda method, path: None
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
        self.before(*self.requests[-1])
        if self.fail_after is not None and environ["REQUEST_METHOD"] in ("PUT", "POST"):
            self.fail_after -= 1
            if self.fail_after < 0:
                respond("503 Service Unavailable", [("Content-Length", "0")])
                return [b""]
        answer = self._app(environ, respond)
        if self.num_cut and environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].count("/") > 1:
            self.num_cut -= 1
            content = b"".join(answer)
            return [content[: len(content) // 2]]
        return answer


@contextmanager
def bucket_served():
    """A server with BUCKET, which this process's clients use inside of the block."""
    server = ObjectServer()
    S3FileSystem.clear_instance_cache()  # a client keeps the address of the server that it was made for
    try:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in server.environment.items():
                patch.setenv(key, value)
            patch.setattr("s3fs.core.S3FileSystem.retries", 1)
            system = fsspec.filesystem("s3")
            if not system.exists(BUCKET):  # moto's buckets belong to the process
                system.mkdir(BUCKET)
            yield server
    finally:
        server.stop()
        S3FileSystem.clear_instance_cache()
