"""Complete runs whose text is prepared while they train, from a bucket that stalls, truncates and changes objects."""

import datetime
import hashlib
import json
import os
import shutil
import signal
import ssl
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import assert_no_orphan, await_line, exact_rows, finish, start, write_recipe
from tests.object_server import BUCKET, bucket_served

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NUM_OBJECTS = 40
STEPS = 100
CONFIG = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2}  # fmt: skip


@pytest.fixture
def server():
    with bucket_served() as server:
        yield server


def write_objects(folder):
    """Write the text: a little more than 1 MiB in each file."""
    folder.mkdir()
    for number in range(NUM_OBJECTS):
        draws = np.random.default_rng(number).integers(10**8, 10**9, 52_000)
        (folder / f"{number:02d}.txt").write_text("".join(f"{number:02d} drew {draw}\n" for draw in draws))


def is_of_text(method, path):
    return method == "GET" and path.endswith(".txt")


def test_a_run_from_a_bucket_equals_one_from_prepared_text(echelon, server, tmp_path):
    write_objects(tmp_path / "text")
    address = f"s3://{BUCKET}/{tmp_path.name}-{time.time_ns()}/text"
    store = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    store.put(f"{tmp_path}/text/", f"{address}/", recursive=True)
    sections = {
        "model": {"config": CONFIG},
        "train": {"steps": STEPS, "global_batch_size": 32, "eval_every": None, "precision": "fp32"},
        "checkpoint": {"every": 20},
    }
    data = {"sequence_len": 1024, "validation_fraction": 0}
    write_recipe(tmp_path, data={**data, "train": "text"}, **sections)
    assert echelon("data", "--prepare", "recipe.json", "data.prepared_dir=whole", "data.prepare_workers=1").code == 0
    [whole] = [path for path in Path("whole").iterdir() if path.is_dir()]

    data["stream"] = {"window": 256}
    write_recipe(tmp_path, data={**data, "train": address}, **sections)
    given = (f"data.prepared_dir={whole}", "run.name=whole")
    echelon("train", "recipe.json", "--nproc", "2", *given).succeeded()
    straight = RunFolder(tmp_path / "runs" / "whole")
    assert len(exact_rows(straight)) == STEPS

    # The first step comes before a twentieth of the text is read.
    run = RunFolder(tmp_path / "runs" / "tiny")
    early, slow = [], []

    def watch(method, path):
        if is_of_text(method, path):
            if not (run.metrics_path.exists() and '"step": 1,' in run.metrics_path.read_text()):
                early.append(path)
            if path.endswith("02.txt") and not slow:
                slow.append(path)
                time.sleep(10)

    server.before = watch
    job = start("train", "recipe.json", "--nproc", "2")
    await_line(run.metrics_path, '"step": 45,', job, seconds=200)
    os.killpg(job.pid, signal.SIGKILL)
    killed = finish(job)
    assert_no_orphan(60.0)
    assert 1 <= len(set(early)) <= NUM_OBJECTS / 20, early
    assert "order: shuffled only within windows of 256 sequences in reading order (data.stream.window)" in killed.out

    # It goes on, although what was prepared is lost, and objects arrive by halves.
    [chunks] = Path("runs/prepared").glob("*.chunks")
    shutil.rmtree(chunks)
    server.num_cut = 2
    ending = echelon("train", "recipe.json", "--nproc", "2")
    assert ending.code == 0 and "Resuming from step-" in ending.out, ending
    assert slow and exact_rows(run) == exact_rows(straight)
    assert len(list(chunks.glob("*.json"))) < NUM_OBJECTS / 2, "it read no more than it needed"

    # Another number of ranks feeds the same batches.
    ending = echelon("train", "recipe.json", "--nproc", "1", "run.name=one")
    keys = ("step", "tokens", "batch_hash")
    assert ending.code == 0 and exact_rows(RunFolder(tmp_path / "runs" / "one"), keys) == exact_rows(straight, keys)


def test_packed_conversations_are_streamed_exactly(echelon, server, tmp_path):
    (tmp_path / "talks").mkdir()
    for number in range(4):
        draw = np.random.default_rng(number)
        turns = [("user", "What is {0}?"), ("assistant", "It is {1}.")]
        talks = (
            {
                "messages": [
                    {"role": role, "content": said.format(n, "7" * draw.integers(1, 90))} for role, said in turns
                ]
            }
            for n in range(8000)
        )
        (tmp_path / "talks" / f"{number}.jsonl").write_text("\n".join(map(json.dumps, talks)))
    address = f"s3://{BUCKET}/{tmp_path.name}-{time.time_ns()}/talks"
    store = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    store.put(f"{tmp_path}/talks/", f"{address}/", recursive=True)
    tokens = ["<|im_start|>", "<|im_end|>"]
    write_recipe(
        tmp_path,
        model={"config": CONFIG, "new_tokens": tokens},
        data={"train": address, "sequence_len": 512, "stream": {"window": 64}, "chat_template": "chatml",
              "validation_fraction": 0},
        train={"steps": 30, "global_batch_size": 32, "eval_every": None, "precision": "fp32"},
        checkpoint={"every": 10},
        optim={"learning_rate": 1e-3, "schedule": "constant"},
    )  # fmt: skip
    straight = echelon("train", "recipe.json", "--nproc", "2", "run.name=straight")
    assert straight.code == 0 and "samples are packed within each chunk" in straight.out, straight
    assert echelon("train", "recipe.json", "--nproc", "2", "train.steps=15").code == 0
    [chunks] = Path("runs/prepared").glob("*.chunks")
    shutil.rmtree(chunks)
    ending = echelon("train", "recipe.json", "--nproc", "1")
    assert ending.code == 0 and "Resuming from step-" in ending.out, ending
    run, whole = (RunFolder(tmp_path / "runs" / name) for name in ("tiny", "straight"))
    keys = ("step", "tokens", "batch_hash")
    assert len(exact_rows(whole)) == 30 and exact_rows(run, keys) == exact_rows(whole, keys)
    losses = [np.array([row[0] for row in exact_rows(part, ("loss",))]) for part in (run, whole)]
    assert np.allclose(*losses, rtol=1e-5)


def test_an_object_that_changes_under_a_run_stops_it(echelon, server, tmp_path):
    write_objects(tmp_path / "text")
    address = f"s3://{BUCKET}/{tmp_path.name}-{time.time_ns()}/text"
    store = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    store.put(f"{tmp_path}/text/", f"{address}/", recursive=True)
    write_recipe(
        tmp_path,
        model={"config": CONFIG},
        data={"train": address, "sequence_len": 1024, "stream": {"window": 256}, "validation_fraction": 0},
        train={"steps": STEPS, "global_batch_size": 32, "eval_every": None, "precision": "fp32"},
        checkpoint={"every": 10},
    )
    changed = []

    def change(method, path):
        if is_of_text(method, path) and path.endswith("01.txt") and not changed:
            changed.append(path)
            text = (tmp_path / "text" / "02.txt").read_text()
            store.pipe_file(f"{address}/02.txt", text.replace("drew", "DREW").encode())

    server.before = change
    ending = echelon("train", "recipe.json", "--nproc", "2")
    assert changed and ending.code == 2, ending
    assert f"{address}/02.txt changed since the data was listed: its version is " in ending.err
    run = RunFolder(tmp_path / "runs" / "tiny")
    assert exact_rows(run)[-1][0] < STEPS
    again = echelon("train", "recipe.json", "--nproc", "2")
    assert again.code == 2 and "the data differs from that of the run" in again.err, again
    store.put_file(str(tmp_path / "text" / "02.txt"), f"{address}/02.txt")
    server.before = lambda method, path: None
    restored = echelon("train", "recipe.json", "--nproc", "2")
    assert restored.code == 0 and exact_rows(run)[-1][0] == STEPS, restored


def certify(folder):
    """Write a certificate of localhost that signs itself, and its key; return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(*form))
    return paths


class Files(SimpleHTTPRequestHandler):
    """The files of a folder, with their SHA-256 as version."""

    def end_headers(self):
        if (path := Path(self.translate_path(self.path))).is_file():
            self.send_header("ETag", f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"')
        super().end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def served_by_https(folder, certificate, key):
    """The address of a server of the folder's files, which clients reach that trust the certificate."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=folder))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"https://localhost:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_files_of_an_https_server_give_the_batches_of_the_same_files_here(tmp_path):
    (tmp_path / "text").mkdir()
    draws = np.random.default_rng(0).integers(10**8, 10**9, 20_000)
    for name, part in (("a.txt", draws[:12_000]), ("b.txt", draws[12_000:])):
        (tmp_path / "text" / name).write_text("".join(f"drew {draw}\n" for draw in part))
    certificate, key = certify(tmp_path)
    with served_by_https(tmp_path / "text", certificate, key) as address:
        found = []
        for place in (str(tmp_path / "text"), address):
            write_recipe(
                tmp_path,
                run={"name": "far" if place == address else "near"},
                model={"config": CONFIG},
                data={"train": [f"{place}/{name}" for name in ("a.txt", "b.txt")], "sequence_len": 1024,
                      "stream": {"window": 64}, "validation_fraction": 0},
                train={"steps": 10, "global_batch_size": 32, "eval_every": None, "precision": "fp32"},
            )  # fmt: skip
            arguments = ("train", "recipe.json", "--nproc", "2")
            finish(start(*arguments, cwd=tmp_path, SSL_CERT_FILE=str(certificate)), 300).succeeded()
            found.append(exact_rows(RunFolder(tmp_path / "runs" / ("far" if place == address else "near"))))
        assert found[0] == found[1] and len(found[0]) == 10
        # The file changes: a resume says so.
        (tmp_path / "text" / "a.txt").write_text("other text\n" * 20_000)
        again = finish(start(*arguments, "train.steps=12", cwd=tmp_path, SSL_CERT_FILE=str(certificate)), 300)
        assert again.code == 2 and "the data differs from that of the run" in again.err, again
