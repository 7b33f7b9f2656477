"""Each process of a run reads the tokenizer, the config and the prepared data once."""

import json
import os
from collections import Counter

import pytest

from echelon.learn.data.tokenizer import train_tokenizer
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import TEXT, assert_no_orphan, finish, read_lines, start
from tests.families import small_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# Notes the functions of echelon during which a file is opened for reading. transformers opens a file several times for
# one call, so calls are told apart by their frames. The modules that read files for others are passed over.
NOTE_OPENED = """
import json, os, sys

PASSED_OVER = ("echelon.ground.stored", "echelon.ground.checksums")
last, number = None, 0


def find_caller(frame):
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("echelon.") and name not in PASSED_OVER:
            return frame
        frame = frame.f_back
    return None


def note(event, arguments):
    global last, number
    if event != "open" or not isinstance(arguments[0], str) or "w" in (arguments[1] or "r"):
        return
    for place in PLACES:
        if arguments[0].startswith(place):
            caller = find_caller(sys._getframe())
            if caller is None:
                return
            if caller is not last:
                last, number = caller, number + 1
            row = {"pid": os.getpid(), "path": arguments[0], "function": caller.f_code.co_name, "call": number}
            descriptor = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, (json.dumps(row) + "\\n").encode())
            os.close(descriptor)


sys.addaudithook(note)
"""


@pytest.fixture
def folder(echelon, tmp_path):
    small_model("llama", vocab_size=300).save_pretrained("base")
    train_tokenizer([TEXT], 300).save_pretrained("base")
    (tmp_path / "text.txt").write_text(TEXT)
    recipe = {
        "run": {"name": "small"},
        "model": {"checkpoint": str(tmp_path / "base")},
        "data": {
            "train": "text.txt", "sequence_len": 32, "validation_fraction": 0.05,
            "prepared_dir": str(tmp_path / "prepared"),
        },
        "train": {"steps": 4, "global_batch_size": 4, "eval_every": 2, "precision": "fp32"},
        "optim": {"learning_rate": 1e-3},
        "evaluate": {"batches": 1, "prompts": ["7 plus"], "prompt_tokens": 4},
        "checkpoint": {"every": 2},
    }  # fmt: skip
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    places = [f"{tmp_path / name}{os.sep}" for name in ("base", "prepared")]
    header = f"PLACES = {places!r}\nLOG = {str(tmp_path / 'opened.jsonl')!r}\n"
    (tmp_path / "sitecustomize.py").write_text(header + NOTE_OPENED)
    return tmp_path


def test_each_process_reads_a_file_once(echelon, folder):
    assert echelon("data", "--prepare", "recipe.json").code == 0
    job = start("train", "recipe.json", "--nproc", "2", PYTHONPATH=str(folder))
    finish(job, 300).succeeded()
    assert_no_orphan()
    opened = read_lines(folder / "opened.jsonl")
    events = read_lines(RunFolder(folder / "runs" / "small").events_path)
    [begun] = [row for row in events if row["event"] == "start"]
    ranks = set(begun["pids"].values())
    assert {row["pid"] for row in opened} == {job.pid, *ranks}, "another process reads files too"

    def count(pid, function, name):
        rows = [row for row in opened if row["pid"] == pid and row["function"] == function]
        return len({row["call"] for row in rows if row["path"].endswith(name)})

    for pid in (job.pid, *ranks):
        is_command = pid == job.pid
        assert count(pid, "load_tokenizer", "tokenizer_config.json") == 1
        assert count(pid, "open_prepared", "tokenizer.json") == is_command, "only the command computes the fingerprint"
        assert count(pid, "_read_config", "config.json") == (not is_command), "the command builds no plain model"
        assert count(pid, "_read_checkpoint_fields", "config.json") == is_command
        assert count(pid, "load_manifest", "manifest.json") == 1
        shards = Counter(row["path"] for row in opened if row["pid"] == pid and row["path"].endswith(".bin"))
        assert set(shards.values()) == (set() if is_command else {1}), shards
