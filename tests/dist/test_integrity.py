"""Damaged checkpoints and full disks are detected early, without the loss of good checkpoints."""

import errno
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from echelon.ground.errors import CheckpointError
from echelon.learn.checkpoint.folder import find_checkpoints
from echelon.learn.checkpoint.store import CheckpointStore
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import await_line, exact_rows, finish, mount, read_events, read_lines, start, write_recipe
from tests.log_lines import LogLines
from tests.parity.training import equal_tensors, tensors_of
from tests.waiting import wait_until

pytestmark = pytest.mark.dist


def flip_a_byte(path):
    """Change one byte, so that the file size stays the same."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def fill(disk):
    """Fill the free space of a disk."""
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**12))
    return filler


def failures(run):
    """The failed saves, from the events that fit on the full disk."""
    return read_events(run, "save_failed")


def await_failures(run, count, job, seconds=90):
    wait_until(lambda: len(failures(run)) >= count, seconds, job)


def steps_of(run):
    return [checkpoint.step for checkpoint in find_checkpoints(run.checkpoints_dir)]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_reported_and_removed(echelon, tmp_path):
    write_recipe(tmp_path, checkpoint={"every": 2})
    run = RunFolder(tmp_path / "runs" / "tiny")
    train = ("train", "recipe.json", "--nproc", "2")
    assert echelon(*train).code == 0
    straight, rows = tensors_of(run.path, 6), exact_rows(run)
    ending = echelon("checkpoint", "verify", run.path)
    assert ending.code == 0 and ending.out.splitlines() == ["step 2  whole", "step 4  whole", "step 6  whole"]

    # As after a kill just before the end, with a disk error.
    run.outcome_path.unlink()
    flip_a_byte(run.checkpoints_dir / "step-00000006" / "__1_0.distcp")
    (run.checkpoints_dir / "step-00000004" / "state.json").unlink()
    ending = echelon("checkpoint", "verify", run.path)
    assert ending.code == 1
    assert ending.out.splitlines() == [
        "step 2  whole",
        "step 4  damaged: state.json is missing",
        "step 6  damaged: the contents of __1_0.distcp changed after it was written",
    ]
    ending = echelon("export", run.path, "out")
    assert ending.code == 1 and "changed after it was written" in ending.err and not Path("out").exists()
    ending = echelon(*train).succeeded()
    assert ending.out.count("Skipping a damaged checkpoint") == 2 and "Resuming from step-00000002" in ending.out
    assert equal_tensors(tensors_of(run.path, 6), straight) and exact_rows(run) == rows
    # The skipped checkpoint was written again.
    assert echelon("checkpoint", "verify", run.path).out.count("whole") == 3

    check_pruning(echelon, run)


def check_pruning(echelon, run):
    prune = ("checkpoint", "prune", run.path, "--keep")
    run.lock()
    ending = echelon(*prune, "1")
    assert ending.code == 2 and "in use by a live run" in ending.err and steps_of(run) == [2, 4, 6]
    run.unlock()
    assert echelon(*prune, "0").code == 2
    flip_a_byte(run.checkpoints_dir / "step-00000006" / "__0_0.distcp")
    (run.checkpoints_dir / ".writing-00000007").mkdir()
    ending = echelon(*prune, "1").succeeded()
    assert ending.out.splitlines() == [
        "removed .writing-00000007: a killed process left it incomplete",
        "removed step-00000002",
        "removed step-00000006: damaged: the contents of __0_0.distcp changed after it was written",
        "kept step-00000004",
    ]
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-00000004"]
    flip_a_byte(run.checkpoints_dir / "step-00000004" / "__0_0.distcp")
    ending = echelon(*prune, "1")
    assert ending.code == 1 and "All checkpoints in" in ending.err and steps_of(run) == [4]
    for command in (["verify"], ["prune", "--keep", "1"]):
        ending = echelon("checkpoint", *command, run.path.parent)
        assert ending.code == 2 and "is not a run folder" in ending.err


@pytest.mark.slow
def test_saving_is_tested_before_the_first_step(echelon, tmp_path):
    """Without write permission: exit code 1 and one message before training. (Full disk: test_bad_input.py.)"""
    write_recipe(tmp_path)
    run = RunFolder(tmp_path / "runs" / "tiny")
    run.create()
    mount(run.checkpoints_dir, "2m")
    try:
        subprocess.run(["mount", "-o", "remount,ro", str(run.checkpoints_dir)], check=True)
        ending = echelon("train", "recipe.json", "--nproc", "2")
        assert ending.code == 1 and ending.err.count("echelon: ") == 1, ending
        assert "A checkpoint could not be saved to runs/tiny/checkpoints: rank 0: Read-only file system" in ending.err
        assert not list(run.checkpoints_dir.iterdir()) and not run.metrics_path.exists()
    finally:
        subprocess.run(["umount", "--lazy", str(run.checkpoints_dir)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_during_training(echelon, tmp_path):
    """Three consecutive failures end the run; if space is freed before, it continues exactly."""
    write_recipe(tmp_path, train={"steps": 300, "log_every": 100}, checkpoint={"every": 100, "keep_last": 2})
    disk = tmp_path / "disk"
    mount(disk, "4m")
    run = RunFolder(disk / "run")
    command = ("train", "recipe.json", "run.dir=disk/run", "data.prepared_dir=prepared", "--nproc", "2")
    try:
        job = start(*command)
        await_line(run.events_path, '"checkpoint"', job, seconds=90)
        filler = fill(disk)
        ending = finish(job, seconds=120)
        assert ending.code == 1 and ending.err.count("echelon: ") == 1, ending
        assert "The checkpoint step-" in ending.err and "it was the third consecutive failure" in ending.err
        assert "the last good one is step-00000" in ending.err and "free space" in ending.err
        assert ending.out.count("it will be retried") == 2 and "(failure 3 of 3)" in ending.out
        good = steps_of(run)[-1]
        assert not list(run.checkpoints_dir.glob(".*"))
        filler.unlink()
        assert echelon("checkpoint", "verify", run.path).code == 0

        job = start(*command)
        await_line(run.events_path, '"resume"', job, seconds=90)
        filler = fill(disk)
        await_failures(run, 1 + len(failures(run)), job)
        filler.unlink()
        ending = finish(job, seconds=120)
        assert ending.code == 0 and f"Resuming from step-{good:08d}" in ending.out, ending
        assert "could not be written" in ending.out and "(failure 1 of 3; it will be retried)" in ending.out
        events = read_lines(run.events_path)
        failed = failures(run)[-1]
        assert "full" in failed["reason"] and failed["step"] > good
        assert events[-1]["event"] == "done" and steps_of(run)[-1] == 300
        assert echelon("checkpoint", "verify", run.path).code == 0
        assert [row[0] for row in exact_rows(run)] == list(range(1, 301))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def failing(times, at):
    """Make `os.fsync` fail as on an exhausted quota, the first `times` calls from a function in the file `at`."""
    left, fsync = [times], os.fsync

    def flush(descriptor):
        if left[0] and at in os.readlink(f"/proc/self/fd/{descriptor}"):
            left[0] -= 1
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        fsync(descriptor)

    return mock.patch("os.fsync", flush)


def save_with_one_rank_failing(rank, world_size, folder, asynchronous):
    """Rank 1 fails to write its file of the first save; rank 0 fails to publish the second."""
    lines, events = LogLines().lines, []
    store = CheckpointStore(
        Path(folder), 3, asynchronous, lambda event, **fields: events.append((event, fields["step"]))
    )
    tensors, seen = {"a": torch.arange(8.0)}, []
    with failing(1, "__1_0.distcp" if rank else "manifest"):
        for step in range(1, 400):
            time.sleep(0.002)  # a step of training
            if step == 1 or store.agree_on_retry(step):
                store.save(step, tensors | {f"b{rank}": torch.ones(3)}, {"train": {}})
                seen.append(step)
    assert store.wait()
    store.close()
    return seen, lines, [each for each in events if each[0] not in ("save", "publish")]


@pytest.mark.parametrize("asynchronous", [pytest.param(True, marks=pytest.mark.slow), False])
def test_ranks_agree_on_a_save_that_failed_on_one_of_them(workers, tmp_path, asynchronous):
    ranks = workers.run(save_with_one_rank_failing, 3, str(tmp_path), asynchronous)
    attempts = [seen for seen, _, _ in ranks]
    assert attempts[0] == attempts[1] == attempts[2] and len(attempts[0]) == 3, attempts
    first, second, third = attempts[0]
    assert second >= first + 10 and third >= second + 100
    assert ranks[0][2] == [("save_failed", first), ("save_failed", second), ("checkpoint", third)]
    assert len(ranks[0][1]) == 2 and all("full" in line for line in ranks[0][1])
    assert ranks[1][1:] == ranks[2][1:] == ([], [])
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{third:08d}"]


def rehearse_on(rank, world_size, folder, culprit):
    store = CheckpointStore(Path(folder), 3, True)
    with failing(1 if rank == culprit else 0, ".writing-probe"), pytest.raises(CheckpointError) as raised:
        store.rehearse({"a": torch.zeros(8)})
    store.rehearse({"a": torch.zeros(8)})
    with pytest.raises(CheckpointError, match="are free on this disk"):
        store.rehearse({"a": torch.zeros(1, device="meta").expand(2**50)})
    store.close()
    return str(raised.value)


@pytest.mark.parametrize("culprit", [0, 2])
def test_ranks_agree_on_a_test_save(workers, tmp_path, culprit):
    messages = workers.run(rehearse_on, 3, str(tmp_path), culprit)
    assert len(set(messages)) == 1
    assert f"rank {culprit}: {os.strerror(errno.EDQUOT)}" in messages[0] and "free space" in messages[0]
    assert not list(tmp_path.iterdir())


def newest_on(rank, world_size, folder):
    lines = LogLines().lines
    store = CheckpointStore(Path(folder), 3, True)
    found = store.newest()
    store.close()
    return found.step if found else None, lines


def test_any_rank_can_find_the_damage(workers, tmp_path):
    """Each rank reads a share of the files: a changed byte in any file is found, and reported once."""
    workers.run(write_two, 3, str(tmp_path / "good"))
    for name in json.loads((tmp_path / "good" / "step-00000002" / "manifest.json").read_text())["files"]:
        folder = shutil.copytree(tmp_path / "good", tmp_path / f"bad{name}")
        flip_a_byte(folder / "step-00000002" / name)
        ranks = workers.run(newest_on, 3, str(folder))
        assert [step for step, _ in ranks] == [1, 1, 1]
        [line] = [line for _, lines in ranks for line in lines]
        assert "Skipping" in line and f"the contents of {name} changed" in line
    assert [step for step, _ in workers.run(newest_on, 3, str(tmp_path / "good"))] == [2, 2, 2]


def write_two(rank, world_size, folder):
    store = CheckpointStore(Path(folder), 3, True)
    for step in (1, 2):
        store.save(step, {f"a{each}": torch.full((100,), float(each)) for each in range(9)}, {"train": {}})
    store.close()
