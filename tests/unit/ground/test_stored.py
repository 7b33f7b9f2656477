"""Files of strangers: a pipe, a device, a folder or a huge file in place of each is one message, never a wait."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import pytest

from echelon.ground.errors import CheckpointError, ConfigError, DataError
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import MAX_BYTES, open_to_append, read_bytes, read_json, read_rows, read_text
from echelon.launch.records import Log
from echelon.learn.data.tokenizer import load_tokenizer
from echelon.learn.model.build import load_config
from echelon.recipe.load import load_recipe
from echelon.recipe.render import render_recipe
from echelon.run.folder.open_run import open_run
from echelon.run.folder.remote import unpack_bundle, write_bundle
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import write_recipe
from tests.fuzz.judge import run_in_little_memory
from tests.unit.tools.report.test_report import write_run

KINDS = ("fifo", "zero", "device", "folder", "huge", "socket")


def replace(path, kind):
    """Put something else in a file's place."""
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "device":
            path.symlink_to("/dev/tty")
        case "folder":
            path.mkdir()
        case "huge":
            with path.open("wb") as file:
                file.truncate(2**40)
        case "socket":
            with tempfile.TemporaryDirectory() as short:  # a socket's path has at most 107 bytes
                socket.socket(socket.AF_UNIX).bind(f"{short}/socket")
                shutil.move(f"{short}/socket", path)
    return path


@contextmanager
def no_wait(seconds=60):
    """End the test with an error if the block waits: for a FIFO it would do so for ever."""

    def stop(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_within_limits_are_read(tmp_path, kind):
    path = replace(tmp_path / "f", kind)
    with no_wait():
        for read in (read_bytes, read_text, read_json):
            with pytest.raises(OSError):
                read(path)
        assert read_rows(path, lambda row: True).fault
        if kind != "huge":
            with pytest.raises(OSError):
                open_to_append(path)


def test_a_file_at_its_limit_is_read(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    assert read_bytes(path, 100) == path.read_bytes() and read_text(path, 100) == "x" * 100
    with pytest.raises(OSError, match="larger than 99 B"):
        read_bytes(path, 99)


def test_a_pipe_from_the_shell_is_read(tmp_path):
    """`echelon plan <(command)`: the user has opened that pipe."""
    write_recipe(tmp_path)
    code = (
        "import sys; from pathlib import Path; from echelon.recipe.load import load_recipe; "
        "load_recipe(Path(sys.argv[1]))"
    )
    line = f"{sys.executable} -c '{code}' <(sleep 0.2; cat recipe.json)"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


NAMES = (
    "recipe.yaml", "plan.json", "estimate.json", "environment.json", "metrics.jsonl", "samples.jsonl", "spending.json",
    "outcome.json", "logs/console.log", ".lock",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["fifo", "zero"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_folder_does_not_stop_a_command(echelon, tmp_path, name, kind):
    path = write_run(tmp_path / "a", plan={}, environment={}, estimate={}, spending={})
    (path / "logs").mkdir()
    replace(path / name, kind)
    with no_wait():
        for command in ("report a", "report a --live", "status a", "runs .", "logs a"):
            code, _, err = echelon(*command.split())
            is_log = command == "logs a" and name == "logs/console.log"
            assert code in ((0, 2) if name == "spending.json" or is_log else (0,)), (command, err)
            assert "Traceback" not in err and (code == 0 or name in err)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_and_a_model_folder_are_refused(tmp_path, kind):
    with no_wait():
        with pytest.raises(ConfigError, match=r"r\.yaml cannot be read: "):
            load_recipe(replace(tmp_path / "r.yaml", kind))
        for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"):
            folder = tmp_path / name.partition(".")[0]
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
            replace(folder / name, kind)
            if kind == "folder" or (kind == "huge" and name == "model.safetensors"):
                continue  # transformers says so
            what = f"larger than {render_bytes(MAX_BYTES)}" if kind == "huge" else "not a regular file"
            with pytest.raises(ConfigError, match=f"{name} is {what}"):
                load_config(str(folder))
            with pytest.raises(DataError, match=f"{name} is {what}"):
                load_tokenizer(str(folder))


def test_a_command_without_memory_ends_with_a_message(tmp_path):
    path = write_run(tmp_path / "a")
    (path / "metrics.jsonl").write_bytes(b'{"kind": "train", "step": 1, "x": [' + b"[]," * 2**21 + b"0]}\n")
    code = """
from echelon.cli.main import main
import echelon.run.folder.overview, echelon.launch.records, echelon.launch.job, echelon.recipe
def work(arguments):
    sys.argv = ["echelon", "status", *arguments]
    main()
"""
    done = run_in_little_memory(code, path, more_bytes=2**26)
    assert (
        done.returncode == 1
        and done.stderr == "echelon: not enough memory for this command on this machine (MemoryError).\n"
    )


def test_an_archive_of_a_run_is_unpacked_within_limits(tmp_path, monkeypatch):
    """An object store may hold the archive of a stranger, or a damaged one."""
    folder, archive = RunFolder(write_run(tmp_path / "a")), tmp_path / "run.zip"
    write_bundle(folder, 41, archive)
    whole = archive.read_bytes()
    unpack_bundle(archive, folder)
    place = len(whole) // 3
    archive.write_bytes(whole[:place] + bytes(each ^ 255 for each in whole[place : place + 40]) + whole[place + 40 :])
    with pytest.raises(CheckpointError, match="cannot read the run's files in this archive"):
        unpack_bundle(archive, folder)
    archive.write_bytes(whole)
    monkeypatch.setattr("echelon.run.folder.remote.MAX_ROWS_BYTES", 2000)
    with pytest.raises(CheckpointError, match=r"it unpacks to [\d.]+ KiB, more than 1.95 KiB"):
        unpack_bundle(archive, folder)


def test_a_long_log_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("echelon.launch.records._PART_BYTES", 8)
    path = tmp_path / "log"
    log = Log(path)
    assert list(log.read(True)) == []
    path.write_text("one\ntwo\n" + "3" * 20 + "\nfour")
    assert list(log.read(False)) == ["one", "two", "3" * 8, "3" * 8, "3333"]
    with path.open("a") as file:
        file.write("!\nfive")
    assert list(log.read(False)) == ["four!"] and list(log.read(True)) == ["five"]


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder", "huge"])
def test_a_run_with_something_else_for_a_file_is_not_resumed(tmp_path, kind):
    path = write_run(tmp_path / "a", ending=None)
    (path / "logs").mkdir()
    recipe, _ = load_recipe(write_recipe(tmp_path), [f"run.dir={path}"])
    (path / "recipe.yaml").write_text(render_recipe(recipe))
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl", ".lock", "logs/console.log", "logs/rank-00000.log"):
        before = (path / name).read_bytes() if (path / name).exists() else b""
        if kind == "huge" and name not in ("metrics.jsonl", "samples.jsonl"):
            continue  # is read up to its limit, or only appended to
        replace(path / name, kind)
        what = "a folder" if kind == "folder" else "a pipe or a device"
        said = "larger than 2.00 GiB" if kind == "huge" else f"{what}, but must be a file of the run"
        with no_wait(), pytest.raises(ConfigError, match=f"{name} is {said}"):
            open_run(recipe, fresh=False)
        (path / name).rmdir() if kind == "folder" else (path / name).unlink()
        (path / name).write_bytes(before)
