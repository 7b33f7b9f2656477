"""`echelon train` with DeepSpeed as users run it: a start to an end, a killed worker, a signal, a full disk."""

import json
import signal
import subprocess

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import await_line, finish, mount, process_of, read_lines, start, write_recipe

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist

SECONDS = 400  # of a command on a busy machine
MORE = {
    "engine": "deepspeed", "parallel": "zero2",
    "deepspeed": {"config": {"zero_optimization": {"overlap_comm": False}}},
}  # fmt: skip


def losses(folder):
    rows = read_lines(folder / "runs" / "tiny" / "metrics.jsonl")
    return {row["step"]: (row["loss"], row["batch_hash"]) for row in rows if row["kind"] == "train"}


def test_a_run_is_the_native_one(tmp_path):
    """The smoke test of `make test`, where DeepSpeed is installed: two processes, and the native run beside it."""
    for name, sections in (("native", {"parallel": "zero2"}), ("deepspeed", MORE)):
        folder = tmp_path / name
        folder.mkdir()
        ended = finish(
            start("train", str(write_recipe(folder, **sections)), "--nproc", "2", cwd=folder), SECONDS
        ).succeeded()
        assert ("zero2 by deepspeed on 2 processes" in ended.err + ended.out) == (name == "deepspeed")
    ours, theirs = losses(tmp_path / "deepspeed"), losses(tmp_path / "native")
    assert ours.keys() == theirs.keys()
    for step, (loss, batch) in theirs.items():
        assert abs(ours[step][0] - loss) < 1e-5 and ours[step][1] == batch


@pytest.mark.slow
def test_a_killed_worker_is_restarted_from_the_newest_checkpoint(tmp_path):
    recipe = write_recipe(tmp_path, **MORE, train={"steps": 40}, checkpoint={"every": 2}, fault={"max_restarts": 1})
    process = start("train", str(recipe), "--nproc", "2", cwd=tmp_path)
    run = RunFolder(tmp_path / "runs" / "tiny")
    await_line(run.path / "events.jsonl", '"checkpoint"', process, SECONDS)
    process_of(run, 1).kill()
    ended = finish(process, SECONDS).succeeded()
    assert "Resuming from step-" in ended.out + ended.err
    assert sorted(losses(tmp_path)) == list(range(1, 41))


@pytest.mark.slow
def test_a_signal_saves_and_the_native_engine_goes_on(tmp_path):
    recipe = write_recipe(tmp_path, **MORE, train={"steps": 60})
    process = start("train", str(recipe), "--nproc", "2", cwd=tmp_path)
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    await_line(metrics, '"step": 2', process, SECONDS)
    process.send_signal(signal.SIGTERM)
    ended = finish(process, SECONDS)
    assert ended.code != 0 and "stopped by SIGTERM at step" in ended.out + ended.err
    steps = max(losses(tmp_path)) + 2
    plain = json.loads(recipe.read_text())
    del plain["engine"], plain["deepspeed"]
    recipe.write_text(json.dumps(plain))
    more = (f"train.steps={max(60, steps)}", "parallel=fsdp")
    finish(start("train", str(recipe), *more, "--nproc", "1", cwd=tmp_path), SECONDS).succeeded()
    assert sorted(losses(tmp_path)) == list(range(1, max(60, steps) + 1))


@pytest.mark.slow
def test_a_full_disk_ends_as_under_native(tmp_path):
    disk = tmp_path / "disk"
    mount(disk, "600k")
    try:
        codes = {}
        for name, sections in (("native", {"parallel": "zero2"}), ("deepspeed", MORE)):
            folder = tmp_path / name
            folder.mkdir()
            recipe = write_recipe(folder, **sections, run={"name": "tiny", "dir": str(disk / name)})
            ended = finish(start("train", str(recipe), "--nproc", "2", cwd=folder), SECONDS)
            codes[name] = ended.code
            assert "No space left" in ended.err + ended.out or "free" in ended.err + ended.out
        assert codes["deepspeed"] == codes["native"] != 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)
