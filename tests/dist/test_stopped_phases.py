"""SIGTERM and Ctrl-C end every phase outside of training: one message, exit code 1, no process and no partial file."""

import json
import random
import signal
from pathlib import Path

import psutil
import pytest

from tests.dist.command import assert_no_orphan, finish, marked_processes, start, write_recipe
from tests.hub_server import HubServer, push_model
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("echelon")]


def has_computed(job, seconds):
    """Whether the command, which prints nothing yet, has used this much processor time."""
    return lambda: sum(psutil.Process(job.pid).cpu_times()[:2]) > seconds


def assert_stopped(job, number, message="stopped by {}; start the same command again"):
    job.send_signal(number)
    ending = finish(job, 60)
    assert ending.code == 1, ending
    assert ending.err.splitlines()[-1] == f"echelon: {message.format(number.name)}", ending.err
    assert ending.err.count("echelon: ") == 1 and "Traceback" not in ending.err, ending.err
    assert_no_orphan()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_training_of_a_tokenizer(tmp_path, number):
    """A text without white space is one word, whose pairs are counted by native code for minutes."""
    write_recipe(tmp_path, tokenizer={"train": {"vocab_size": 4096}})
    (tmp_path / "text.txt").write_text(random.Random(1).randbytes(8_000_000).hex())
    job = start("data", "recipe.json", cwd=tmp_path)
    assert job.stdout.readline().startswith("tokenizer: training byte-level BPE")
    wait_until(
        lambda: any(sum(each.cpu_times()[:2]) > 1 for each in marked_processes() if each.pid != job.pid), 120, job
    )
    assert_stopped(job, number)
    assert [path.suffix for path in (tmp_path / "runs" / "prepared").iterdir()] == [".lock"]


@pytest.mark.slow
def test_tokenizing_in_the_process_of_the_command(tmp_path):
    write_recipe(tmp_path, data={"prepare_workers": 1})
    (tmp_path / "text.txt").write_text("".join(f"{n:x} and {n * n:x}\n" for n in range(4_000_000)))
    job = start("data", "--prepare", "recipe.json", cwd=tmp_path)
    prepared = tmp_path / "runs" / "prepared"
    wait_until(lambda: list(prepared.glob("*.partial/*.bin")), 120, job)
    assert_stopped(job, signal.SIGINT)
    assert [path.suffix for path in prepared.iterdir()] == [".lock"]


@pytest.mark.slow
def test_downloads(tmp_path, monkeypatch):
    hub = HubServer()
    push_model(hub, "team/base", tmp_path / "base")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    write_recipe(tmp_path, model={"config": None, "checkpoint": "team/base"}, tokenizer=None)
    job = start("train", "recipe.json", "--nproc", "1", cwd=tmp_path)
    wait_until(hub.downloads, 120, job)
    hub.slow = 10_000.0
    wait_until(lambda: sum(hub.downloads().values()) > 2, 120, job)
    assert_stopped(job, signal.SIGTERM, "stopped by {} before training began; start the same command again")
    assert not (tmp_path / "runs" / "tiny" / "recipe.yaml").exists()
    hub.stop()


@pytest.mark.slow
def test_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = start("plan", "--calibrate", cwd=tmp_path)
    wait_until(lambda: len(marked_processes()) > 2, 120, job)
    assert_stopped(job, signal.SIGTERM)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_search_for_plans(tmp_path):
    large = ["train.global_batch_tokens=1073741824", "train.tokens=null", "train.steps=1000"]
    recipe = str(ROOT / "recipes" / "pretrain-1.3b.yaml")
    job = start("plan", recipe, *large, "--devices", "16384xH100", "--by", "time", cwd=tmp_path)
    wait_until(has_computed(job, 0.8), 120, job)
    assert_stopped(job, signal.SIGINT)


@pytest.fixture
def big_run(echelon, tmp_path):
    """A run of a step, with 100 MB of weights."""
    config = {"vocab_size": 200_000, "hidden_size": 64, "tie_word_embeddings": False}
    path = write_recipe(tmp_path, train={"steps": 1, "global_batch_size": 1}, checkpoint={"every": 1})
    recipe = json.loads(path.read_text())
    recipe["model"]["config"].update(config)
    path.write_text(json.dumps(recipe))
    assert echelon("train", "recipe.json", "--nproc", "1").code == 0
    return tmp_path / "runs" / "tiny"


@pytest.mark.slow
def test_export_and_evaluation(big_run, tmp_path):
    job = start("export", str(big_run), "out", cwd=tmp_path)
    wait_until((tmp_path / ".writing-out").exists, 120, job)
    assert_stopped(job, signal.SIGTERM)
    assert not list(tmp_path.glob("*out"))

    (tmp_path / "more.txt").write_text("some more text. " * 200_000)
    job = start("eval", str(big_run), "--data", "more.txt", "--nproc", "1", cwd=tmp_path)
    wait_until(has_computed(job, 8), 120, job)
    assert_stopped(job, signal.SIGTERM)
