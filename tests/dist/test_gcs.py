"""A run from gs://, over gcsfs, against a server that speaks Google's JSON API.

It needs `pip install gcsfs gcp-storage-emulator`, and has run with 2026.10.1 and 2026.7.19 of these.
"""

import threading
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer

import numpy as np
import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import finish, read_lines, start, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]

GCSFileSystem = pytest.importorskip("gcsfs.core", reason="no gcsfs here; pip install gcsfs").GCSFileSystem
emulator = pytest.importorskip("gcp_storage_emulator.server", reason="pip install gcp-storage-emulator")
Storage = pytest.importorskip("gcp_storage_emulator.storage").Storage
create_bucket = pytest.importorskip("gcp_storage_emulator.handlers.buckets").create_bucket

CONFIG = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2}  # fmt: skip
EXACT = ("step", "tokens", "loss", "grad_norm", "batch_hash")


@contextmanager
def served():
    """The environment of clients of a server with the bucket `bucket`."""
    storage = Storage(use_memory_fs=True)
    create_bucket("bucket", storage)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(emulator.RequestHandler, storage))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_port}", "FSSPEC_GS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks a gRPC server for the kind of the bucket, for 60 s
        }  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()


def test_a_run_from_a_bucket_of_google_equals_one_from_here(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(4):
        draws = np.random.default_rng(number).integers(10**8, 10**9, 60_000)
        (tmp_path / "text" / f"{number}.txt").write_text("".join(f"drew {draw}\n" for draw in draws))
    with served() as environment:
        store = GCSFileSystem(token="anon", endpoint_url=environment["STORAGE_EMULATOR_HOST"])
        for path in (tmp_path / "text").iterdir():
            store.put_file(str(path), f"bucket/text/{path.name}")

        def train(name, place, *overrides):
            write_recipe(
                tmp_path,
                run={"name": name},
                model={"config": CONFIG},
                data={"train": place, "sequence_len": 1024, "stream": {"window": 128}, "validation_fraction": 0},
                train={"steps": 20, "global_batch_size": 32, "eval_every": None, "precision": "fp32"},
            )
            return finish(start("train", "recipe.json", "--nproc", "2", *overrides, cwd=tmp_path, **environment), 300)

        def rows(name):
            lines = read_lines(RunFolder(tmp_path / "runs" / name).metrics_path)
            return [tuple(row[key] for key in EXACT) for row in lines if row["kind"] == "train"]

        shared = "data.prepared_remote=gs://bucket/prepared"
        for name, place, *overrides in (
            ("near", "text"),
            ("far", "gs://bucket/text", shared),
            # Another machine downloads what the first has prepared.
            ("other", "gs://bucket/text/*.txt", shared, "data.prepared_dir=other"),
        ):
            train(name, place, *overrides).succeeded()
        assert rows("far") == rows("near") and rows("other") == rows("near") and len(rows("near")) == 20
        assert [name for name in store.find("bucket/prepared") if name.endswith("00000000.bin")]

        # An object whose content changed, but not its size, has another generation.
        store.pipe_file("bucket/text/0.txt", (tmp_path / "text" / "0.txt").read_bytes()[:-2] + b"?\n")
        again = train("far", "gs://bucket/text", shared, "train.steps=25")
        assert again.code == 2 and "the data differs from that of the run" in again.err, again
