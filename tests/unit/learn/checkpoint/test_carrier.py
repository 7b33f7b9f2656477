"""Checkpoints of machines that share no folder: real processes, each with a disk of its own, and an emulated bucket."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from echelon.ground import checksums
from echelon.ground.checksums import ELSEWHERE, find_faults
from echelon.ground.errors import CheckpointError
from echelon.ground.object_store import ObjectStore, ObjectStoreError
from echelon.learn.checkpoint.carrier import Carrier
from echelon.learn.checkpoint.fill import load_alone
from echelon.learn.checkpoint.folder import checkpoint_of
from echelon.learn.checkpoint.store import CheckpointStore
from echelon.run.folder.remote import RemoteRuns, write_run_name
from echelon.run.folder.run_folder import RunFolder
from echelon.run.folder.upload import Uploader
from tests.object_server import BUCKET, bucket_served
from tests.workers import run_in_new_processes

ROWS, WIDTH, BIAS = 1024, 64, 40


class Traffic:
    """Counts the bytes of this process: sent to the bucket, fetched from it, sent to other ranks, hashed."""

    def __init__(self, patch, fails):
        self.uploaded = self.fetched = self.sent = 0
        self.hashed = []
        upload, download, send, digest = ObjectStore.upload, ObjectStore.download, dist.send, checksums.file_digest

        def counted_upload(store, path, name):
            if fails and path.name.startswith("__"):
                raise ObjectStoreError("503", "refused")
            self.uploaded += path.stat().st_size
            upload(store, path, name)

        def counted_download(store, name, path, num_bytes):
            self.fetched += num_bytes
            download(store, name, path, num_bytes)

        def counted_send(tensor, *arguments, **keywords):
            self.sent += tensor.numel() * tensor.element_size()
            send(tensor, *arguments, **keywords)

        def noted_digest(path):
            self.hashed.append(path.name)
            return digest(path)

        patch.setattr(ObjectStore, "upload", counted_upload)
        patch.setattr(ObjectStore, "download", counted_download)
        patch.setattr(dist, "send", counted_send)
        patch.setattr(checksums, "file_digest", noted_digest)


class Process:
    """One rank of a run on its machine; `num_machines` of them share the ranks. `bucket`: a folder, or a server's."""

    def __init__(self, rank, size, root, num_machines, bucket=True):
        self.machine = root / f"machine-{rank * num_machines // size}"
        os.environ.update(bucket if isinstance(bucket, dict) else {})
        url = f"s3://{BUCKET}/eight" if isinstance(bucket, dict) else f"file://{root}/bucket"
        self.run = RunFolder(self.machine / "run")
        self.run.checkpoints_dir.mkdir(parents=True, exist_ok=True)
        self.run.recipe_path.write_text("{}")
        write_run_name(self.run, "some")
        uploads = Uploader(url, self.run, 2, self.run.rows.append_event) if rank == 0 and bucket else None
        store = ObjectStore(url) if bucket else None

        def carry(group):
            return Carrier(self.machine.name, self.machine / "carried", group, store)

        self.store = CheckpointStore(self.run.checkpoints_dir, 2, True, uploads=uploads, carry=carry)
        self.mesh = init_device_mesh("cpu", (size,))

    def tensors(self, factor):
        weight = factor * torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)
        bias = factor * torch.arange(BIAS, dtype=torch.float32)
        return {
            "weight": distribute_tensor(weight, self.mesh, [Shard(0)]),
            "bias": distribute_tensor(bias, self.mesh, [Shard(0)]),
        }

    def is_restored(self, step):
        tensors = self.tensors(0)
        self.store.rehearse(tensors)
        checkpoint = self.store.newest()
        assert checkpoint is not None and checkpoint.step == step, checkpoint
        assert checkpoint.read_state()["train"]["step"] == step
        self.store.load(checkpoint, tensors)
        return all(torch.equal(tensors[name].to_local(), each.to_local()) for name, each in self.tensors(step).items())


def save(rank, size, root, num_machines, steps=(1,), bucket=True, fails=()):
    with pytest.MonkeyPatch.context() as patch:
        process, traffic = Process(rank, size, root, num_machines, bucket), Traffic(patch, rank in fails)
        process.store.rehearse(process.tensors(0))
        for step in steps:
            process.store.save(step, process.tensors(step), {"train": {"step": step}})
            assert process.store.wait()
        process.store.close()
        return traffic.uploaded + traffic.sent


def restore(rank, size, root, num_machines, step, bucket=True):
    with pytest.MonkeyPatch.context() as patch:
        process, traffic = Process(rank, size, root, num_machines, bucket), Traffic(patch, False)
        assert process.is_restored(step)
        process.store.close()
        return traffic.fetched, [name for name in traffic.hashed if name.startswith("__")]


def find_shards(machine):
    return sorted(path.name for path in machine.rglob("__*_*"))


def test_eight_machines_send_only_their_own_files_to_the_bucket(tmp_path):
    names = [f"__{rank}_0.distcp" for rank in range(8)]
    with bucket_served() as server:
        sent = run_in_new_processes(save, 8, tmp_path, 8, (1,), server.environment)
        marker = json.loads(ObjectStore(f"s3://{BUCKET}/eight").read("some/step-00000001.json"))
        shards = [marker["files"][name]["bytes"] for name in names]
        print("sent by each machine / its own files:", [f"{a} / {b}" for a, b in zip(sent, shards, strict=True)])
        assert max(a / b for a, b in zip(sent, shards, strict=True)) <= 1.3 and min(sent) >= min(shards)
        assert [find_shards(tmp_path / f"machine-{rank}") for rank in range(8)] == [["__0_0.distcp"], *[[]] * 7]
        fetched = [each for each, _ in run_in_new_processes(restore, 8, tmp_path, 8, 1, server.environment)]
        print("fetched by each machine:", fetched)
        assert fetched == [0, *shards[1:]]  # rank 0's machine has its own file

        # Another number of ranks and machines reads what it needs, and hashes each file once per machine.
        (_, first), (_, second) = run_in_new_processes(restore, 2, tmp_path, 1, 1, server.environment)
        assert sorted(first + second) == names


def test_a_command_fetches_what_its_machine_lacks(tmp_path):
    run_in_new_processes(save, 2, tmp_path, 2, (1, 2, 3))
    run = RunFolder(tmp_path / "machine-0/run")
    assert [each.step for each in RemoteRuns(ObjectStore(f"file://{tmp_path}/bucket")).find("some")] == [2, 3]
    names = [path.name for path in sorted(run.checkpoints_dir.iterdir())]
    assert names == ["step-00000002", "step-00000003"]
    for name in names:
        folder = run.checkpoints_dir / name
        assert not find_faults(folder, checksums=True) and find_faults(folder, whole=True)
    weight = torch.empty(ROWS, WIDTH)
    load_alone(checkpoint_of(run.path).path, {"weight": weight})
    assert torch.equal(weight, 3 * torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH))
    assert not (run.checkpoints_dir / names[1] / ELSEWHERE).exists()
    [damaged] = (tmp_path / "bucket/some").glob("step-00000002-*/__1_0.distcp")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(CheckpointError, match="__1_0"):
        checkpoint_of(run.path, "2")


def test_a_damaged_copy_in_the_bucket_is_skipped(tmp_path):
    run_in_new_processes(save, 2, tmp_path, 2, (1, 2))
    [damaged] = (tmp_path / "bucket/some").glob("step-00000002-*/__1_0.distcp")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    run_in_new_processes(restore, 2, tmp_path, 2, 1)


def test_rank_zero_collects_what_the_bucket_refuses(tmp_path):
    run_in_new_processes(save, 2, tmp_path, 2, (1,), True, (1,))
    checkpoint = tmp_path / "machine-0/run/checkpoints/step-00000001"
    assert not (checkpoint / ELSEWHERE).exists() and not find_faults(checkpoint, checksums=True)
    marker = json.loads((tmp_path / "bucket/some/step-00000001.json").read_text())
    assert {"__0_0.distcp", "__1_0.distcp"} <= marker["files"].keys()  # uploaded by rank 0's machine
    assert [path.name for path in (tmp_path / "bucket/some").glob("step-*-*")] == [marker["folder"]]
    run_in_new_processes(restore, 2, tmp_path, 2, 1)


def test_without_a_bucket_each_file_is_hashed_once_per_machine(tmp_path):
    run_in_new_processes(save, 4, tmp_path, 2, (1,), False)
    assert find_shards(tmp_path / "machine-0") == [f"__{rank}_0.distcp" for rank in range(4)]
    copy = tmp_path / "machine-1/run/checkpoints/step-00000001"
    copy.mkdir()
    for path in (tmp_path / "machine-0/run/checkpoints/step-00000001").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    hashed = [names for _, names in run_in_new_processes(restore, 4, tmp_path, 2, 1, False)]
    for first, second in (hashed[:2], hashed[2:]):
        assert sorted(first + second) == [f"__{rank}_0.distcp" for rank in range(4)]
        assert first and second
