"""A fake Kubernetes API server with the paths, verbs, content types and errors of the real one.

It runs no pods.

Posted objects are validated against the published schemas, as with `fieldValidation=Strict`.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.unit.launch.kubernetes.kubernetes_schemas import list_faults

TOKEN = "of-a-test"
OBJECTS = re.compile(r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>[a-z]+)"
                     r"(?:/(?P<name>[^/]+)(?P<log>/log)?)?")  # fmt: skip
KINDS = {"pytorchjobs": "PyTorchJob", "trainjobs": "TrainJob", "jobsets": "JobSet", "configmaps": "ConfigMap"}


class StubCluster:
    """The state of the cluster: objects by (plural, namespace, name), pods as the API lists them, logs by pod."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, str | bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.missing_kinds: set[str] = {"hyperpodpytorchjobs"}
        self.forbidden: set[str] = set()
        self.address = ""


class Handler(BaseHTTPRequestHandler):
    cluster: StubCluster

    def log_message(self, *words: object) -> None:
        pass

    def answer(self, code: int, body: dict[str, Any] | str | bytes) -> None:
        text = json.dumps(body) if isinstance(body, dict) else body
        content = text.encode() if isinstance(text, str) else text
        self.send_response(code)
        self.send_header("Content-Type", "application/json" if isinstance(body, dict) else "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, code: int, message: str, **details: str) -> None:
        self.answer(code, {"kind": "Status", "status": "Failure", "message": message, "code": code, "details": details})

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        self.cluster.requests.append((self.command, self.path))
        match = OBJECTS.fullmatch(url.path)
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.refuse(401, "Unauthorized")
        if match is None or match["plural"] in self.cluster.missing_kinds:
            return self.answer(404, "404 page not found\n")
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        plural, namespace = match["plural"], match["namespace"]
        if plural in self.cluster.forbidden:
            return self.refuse(403, f'{plural} is forbidden: User "ann" cannot {self.command} in {namespace}')
        if plural == "pods":
            return self.answer_pods(match, query)
        key = (plural, namespace, match["name"] or "")
        if self.command == "POST":
            return self.create(plural, namespace, query)
        if key not in self.cluster.objects:
            return self.refuse(404, f'{plural} "{key[2]}" not found', name=key[2], kind=plural)
        if self.command == "DELETE":
            gone = self.cluster.objects.pop(key)
            uid = gone["metadata"]["uid"]
            for other, held in list(self.cluster.objects.items()):
                if any(owner["uid"] == uid for owner in held["metadata"].get("ownerReferences", ())):
                    del self.cluster.objects[other]
            return self.answer(200, {"kind": "Status", "status": "Success"})
        return self.answer(200, self.cluster.objects[key])

    def create(self, plural: str, namespace: str, query: dict[str, str]) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = body["metadata"]["name"]
        if self.headers.get("Content-Type", "application/json") != "application/json":  # no header means JSON
            return self.refuse(415, f"the body is in an unknown format: {self.headers['Content-Type']}")
        if namespace == "nowhere":
            return self.refuse(404, f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")
        if (plural, namespace, name) in self.cluster.objects:
            return self.refuse(409, f'{plural} "{name}" already exists', name=name, kind=plural)
        strict = plural == "configmaps" or query.get("fieldValidation") == "Strict"
        faults = list_faults(body) if body["kind"] == KINDS[plural] and strict else [f"{body['kind']}: not strict"]
        if faults:
            return self.refuse(422, f"{body['kind']} is invalid: {faults}")
        body["metadata"]["uid"] = f"uid-{len(self.cluster.requests)}"
        self.cluster.objects[plural, namespace, name] = body
        return self.answer(201, body)

    def answer_pods(self, match: re.Match[str], query: dict[str, str]) -> None:
        if match["log"]:
            return self.answer(200, self.cluster.logs[match["name"]])
        label, _, value = query["labelSelector"].partition("=")
        found = [pod for pod in self.cluster.pods if pod["metadata"]["labels"].get(label) == value]
        return self.answer(200, {"kind": "PodList", "items": found})

    do_GET = do_POST = do_DELETE = handle_request


def write_kubeconfig(path: Path, server: str, token: str = TOKEN, **cluster: Any) -> None:
    """A kubeconfig with one context, `here`."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "ann", "user": {"token": token}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "ann"}}],
    }
    path.write_text(yaml.safe_dump(config))


@contextmanager
def stub_cluster(kubeconfig: Path) -> Iterator[StubCluster]:
    """Run a fake cluster during the block; yield it with a kubeconfig for it."""
    cluster = StubCluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("ClusterHandler", (Handler,), {"cluster": cluster}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    cluster.address = f"http://127.0.0.1:{server.server_port}"
    write_kubeconfig(kubeconfig, cluster.address)
    try:
        yield cluster
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
