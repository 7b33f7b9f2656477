"""A local hub server that answers the HTTP requests of `huggingface_hub` with generated models.

The answers have the shapes of https://huggingface.co/docs/hub/api. Every file's ETag is its SHA-256, as that of a large
file there.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_INFO = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+?)/(tree|paths-info)/([^/]+)(?:/(.*))?")
_WRITE = re.compile(r"/api/models/([^/]+/[^/]+?)/(auth-check/write|preupload|commit|branch)(?:/(.+))?")
_LARGE = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Commits by their hash, the newest last: each the bytes of its files by name. `branches`: commits, except main."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)

    @property
    def head(self):
        """The commit of the branch `main`."""
        return next(reversed(self.commits))


class HubServer:
    """Serves repositories until `stop`.

    `requests` holds (method, path, client) of everything asked; `slow` are seconds that a megabyte of a file takes.
    A valid token may write to repositories of `writable`. `failing`: the number of files whose upload is refused.
    `on_info` is called once somebody was told the newest commit of a repository.
    """

    def __init__(self, host="127.0.0.1", port=0):
        self.repositories = {}
        self.requests = []
        self.tokens = {"let-me-in"}
        self.writable = {"team"}
        self.failing = 0
        self.blobs = {}
        self.slow = 0.0
        self.on_info = lambda: None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                server._answer(self, "HEAD")

            def do_GET(self):
                server._answer(self, "GET")

            def do_POST(self):
                self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server._answer(self, "POST")

            def do_PUT(self):
                self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server._keep_blob(self)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer((host, port), Handler)
        self._http.daemon_threads = True
        self.url = f"http://{host}:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self):
        """Stop the server; further connections are refused."""
        self._http.shutdown()
        self._http.server_close()

    def push(self, name, folder, **settings):
        """Commit a folder to a repository, `ORG/NAME` or `datasets/ORG/NAME`; return the hash of the commit."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes()
                 for path in sorted(Path(folder).rglob("*")) if path.is_file()}  # fmt: skip
        repository = self.repositories.setdefault(name, Repository())
        digest = hashlib.sha1(f"{name} {len(repository.commits)}".encode()).hexdigest()
        repository.commits[digest] = files
        for key, value in settings.items():
            setattr(repository, key, value)
        return digest

    def downloads(self, client=None):
        """The number of downloads of each file, by file name: of all clients, or of one address."""
        found = [
            match[4] for method, path, address in self.requests
            if method == "GET" and client in (None, address) and (match := _FILE.fullmatch(path))
        ]  # fmt: skip
        return Counter(found)

    def _answer(self, request, method):
        url = urlsplit(request.path)
        path = unquote(url.path)
        self.requests.append((method, path, request.client_address[0]))
        if method == "POST" and path == "/api/validate-yaml":
            self._validate_card(request)
        elif method == "POST" and path == "/api/repos/create":
            self._create(request)
        elif match := _WRITE.fullmatch(path):
            self._write(request, match[1], match[2], match[3])
        elif match := _LARGE.fullmatch(path):
            self._offer_uploads(request)
        elif match := _TREE.fullmatch(path):
            if match[3] == "tree":
                wanted, is_deep = match[5] or "", "true" in parse_qs(url.query).get("recursive", ())
            else:
                wanted, is_deep = parse_qs(request.body.decode())["paths"], False
            self._answer_listing(
                request, match[1], match[2], match[4], lambda *args: self._tree(*args, wanted, is_deep)
            )
        elif match := _INFO.fullmatch(path):
            sizes = "blobs" in parse_qs(url.query)
            self._answer_listing(request, match[1], match[2], match[3], lambda *args: self._info(*args, sizes=sizes))
            if match[3] is None:
                self.on_info()
        elif match := _FILE.fullmatch(path):
            self._answer_file(request, method, f"{match[1] or ''}{match[2]}", match[3], match[4], path)
        else:
            self._send(request, 404, b"")

    def _find(self, request, name, revision):
        """The repository's commit and its hash; None after an error in the hub's format has been sent."""
        repository = self.repositories.get(name)
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            said = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return self._send(request, 401, b"", said)
        if repository is None:
            return self._send(request, 404 if token else 401, b"", {"X-Error-Code": "RepoNotFound"})
        if repository.private and not token:
            return self._send(request, 401, b"", {"X-Error-Code": "RepoNotFound"})
        digest = repository.head if revision in (None, "main") else repository.branches.get(revision, revision)
        if digest not in repository.commits:
            return self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        return repository, digest

    def _answer_listing(self, request, kind, name, revision, render):
        name = name if kind == "models" else f"datasets/{name}"
        if (found := self._find(request, name, revision)) is not None:
            repository, digest = found
            if (content := render(name, digest, repository.commits[digest])) is None:
                self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                self._send_json(request, content)

    def _send_json(self, request, content, code=200):
        self._send(request, code, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _may_write(self, request, name):
        """Whether the request has a token that may write to a repository; otherwise an error has been sent."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token in self.tokens and name.split("/")[0] in self.writable:
            return True
        self._send_json(request, {"error": "Forbidden"}, 403 if token in self.tokens else 401)
        return False

    def _validate_card(self, request):
        """Refuse a `base_model` that cannot be an id of the hub, as the hub does."""
        found = re.search(r"^base_model: (.+)$", json.loads(request.body)["content"], re.MULTILINE)
        if found and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", found[1]):
            said = f'"base_model" with value "{found[1]}" is not valid.'
            self._send_json(request, {"errors": [{"message": said}], "warnings": []}, 400)
        else:
            self._send_json(request, {"errors": [], "warnings": []})

    def _create(self, request):
        wanted = json.loads(request.body)
        name = f"{wanted.get('organization') or 'team'}/{wanted['name']}"
        if not self._may_write(request, name):
            return
        if name in self.repositories:
            self._send_json(request, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}, 409)
            return
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.repositories[name] = Repository({_sha(name.encode())[:40]: {}}, private=private)
        self._send_json(request, {"url": f"{self.url}/{name}"})

    def _write(self, request, name, what, revision):
        if not self._may_write(request, name):
            return
        repository = self.repositories[name]
        if what == "branch":
            repository.branches.setdefault(revision, repository.head)
            self._send_json(request, {})
        elif what == "preupload":
            kinds = [{"path": each["path"], "shouldIgnore": False,
                      "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular"}
                     for each in json.loads(request.body)["files"]]  # fmt: skip
            self._send_json(request, {"files": kinds})
        elif what == "commit":
            self._commit(request, name, repository, revision)
        else:
            self._send_json(request, {})

    def _commit(self, request, name, repository, revision):
        start = repository.head if revision == "main" else repository.branches[revision]
        files = dict(repository.commits[start])
        for line in request.body.splitlines():
            part = json.loads(line)
            value = part["value"]
            if part["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif part["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
        digest = hashlib.sha1(f"{name} {len(repository.commits)}".encode()).hexdigest()
        if revision == "main":
            repository.commits[digest] = files
        else:
            repository.commits = {digest: files, **repository.commits}
            repository.branches[revision] = digest
        self._send_json(
            request, {"success": True, "commitOid": digest, "commitUrl": f"{self.url}/{name}/commit/{digest}"}
        )

    def _offer_uploads(self, request):
        """Answer git-lfs's batch request: where to put each object that is not there yet."""
        objects = []
        for each in json.loads(request.body)["objects"]:
            there = (
                {} if each["oid"] in self.blobs else {"actions": {"upload": {"href": f"{self.url}/put/{each['oid']}"}}}
            )
            objects.append(each | there)
        self._send_json(request, {"objects": objects, "transfer": "basic"})

    def _keep_blob(self, request):
        if self.failing > 0:
            self.failing -= 1
            self._send_json(request, {"error": "no space"}, 400)
            return
        name = request.path.rpartition("/")[2]
        if _sha(request.body) == name:
            self.blobs[name] = request.body
        self._send(request, 200 if name in self.blobs else 400, b"")

    def _info(self, name, digest, files, sizes=False):
        siblings = [{"rfilename": file, **({"size": len(content), "blobId": _sha(content)} if sizes else {})}
                    for file, content in files.items()]  # fmt: skip
        return {"id": name.removeprefix("datasets/"), "sha": digest, "siblings": siblings, "tags": [],
                "private": self.repositories[name].private, "gated": False}  # fmt: skip

    @staticmethod
    def _tree(name, digest, files, wanted, is_deep):
        """The entries in a folder, or of a list of paths; None for a folder that does not exist."""
        found = {file: {"type": "file", "path": file, "size": len(content), "oid": _sha(content)}
                 for file, content in files.items()}  # fmt: skip
        for folder in {str(parent) for file in files for parent in Path(file).parents} - {"."}:
            found[folder] = {"type": "directory", "path": folder, "oid": _sha(folder.encode()), "size": 0}
        if isinstance(wanted, list):
            return [found[path] for path in wanted if path in found]
        start = f"{wanted}/" if wanted else ""
        inside = [entry for path, entry in sorted(found.items()) if path.startswith(start)]
        if wanted and not inside:
            return None
        return [entry for entry in inside if is_deep or "/" not in entry["path"][len(start) :]]

    def _answer_file(self, request, method, name, revision, file, path):
        if (found := self._find(request, name, revision)) is None:
            return
        repository, digest = found
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        headers = {"X-Repo-Commit": digest, "Accept-Ranges": "bytes"}
        if repository.gated and token not in self.tokens:
            self._send(request, 403 if token else 401, b"", headers | {"X-Error-Code": "GatedRepo"})
        elif file not in repository.commits[digest]:
            self._send(request, 404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        else:
            content, code = repository.commits[digest][file], 200
            headers["ETag"] = f'"{_sha(content)}"'
            if match := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
                total, first = len(content), int(match[1])
                content, code = content[first : int(match[2]) + 1 if match[2] else None], 206
                headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{total}"
            self._send(request, code, content, headers)

    def _send(self, request, code, content, headers=None):
        try:
            request.send_response(code)
            for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                request.send_header(key, value)
            request.end_headers()
            if request.command != "HEAD":
                for start in range(0, len(content), 2**16):
                    time.sleep(self.slow / 16)
                    request.wfile.write(content[start : start + 2**16])
        except (BrokenPipeError, ConnectionResetError):
            request.close_connection = True


def _sha(content):
    return hashlib.sha256(content).hexdigest()


def push_model(hub, name, folder, seed=9, num_files=3, **settings):
    """Push a small Llama with a byte-level tokenizer, its weights in several files, and things nobody asked for; see
    `HubServer.push`."""
    from echelon.learn.data.tokenizer import train_tokenizer
    from tests.families import small_model

    model = small_model("llama", seed=seed, vocab_size=300)
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // num_files)
    train_tokenizer(["some text, some more text, and some text again"] * 9, 300).save_pretrained(folder)
    (folder / "original").mkdir(exist_ok=True)
    for extra in ("pytorch_model.bin", "consolidated.safetensors", "original/params.json", "modeling.py", "README.md"):
        (folder / extra).write_bytes(b"not to be fetched")
    return hub.push(name, folder, **settings)


def serve(host, port, name, first, second, log):
    """Serve `first` as a repository, then, once somebody was told its newest commit, `second`; requests go to `log`."""
    hub = HubServer(host, int(port))
    hub.on_info = lambda: len(hub.repositories[name].commits) > 1 or hub.push(name, second)
    hub.push(name, first)
    print(hub.url, flush=True)
    while True:
        Path(log).write_text(json.dumps(hub.requests))
        time.sleep(0.2)


if __name__ == "__main__":
    serve(*sys.argv[1:])
