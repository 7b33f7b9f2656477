"""A run with damaged small files resumes; a removed run folder ends the run."""

import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.ground.errors import EchelonError
from echelon.learn.data import corpus_writer as writing
from echelon.planner.hardware.detection import detect_cluster
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.setup import prepare_run
from tests.dist.command import await_line, finish, read_lines, start, write_recipe
from tests.fuzz.run_folder_files import COVERED

pytestmark = pytest.mark.dist

COMMAND = ("train", "recipe.json", "--nproc", "1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a finished run."""
    root = tmp_path_factory.mktemp("trained")
    write_recipe(root, track=["tensorboard"], evaluate={"batches": 1, "prompts": ["One"], "prompt_tokens": 4})
    finish(start(*COMMAND, cwd=root), 200).succeeded()
    return root


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that run, for a test to damage."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return RunFolder(tmp_path / "runs" / "tiny")


def write_damages(run):
    """Damage every small file that a run can do without or rebuild, each in a different way."""
    first, *rest = run.events_path.read_bytes().splitlines(keepends=True)
    bad = (
        b"null\n",
        b"{}\n",
        b'{"event": "rollback", "time": 1.0}\n',
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"time": 1' + b"0" * 5000,
    )
    run.events_path.write_bytes(b"".join((first, *bad[:5], *rest, bad[5])))
    first, *rest = run.metrics_path.read_bytes().splitlines(keepends=True)
    run.metrics_path.write_bytes(b"".join((b"5\n", first, b'{"kind": "train", "step": 2, "loss": "x"}\n', *rest)))
    run.samples_path.write_bytes(b'{"step": {}}\n')
    run.data_path.write_text("null")
    run.outcome_path.write_text("[]")
    run.spending_path.write_text('{"seconds": NaN}')
    run.environment_path.write_text('{"cluster": 5}')
    run.estimate_path.write_bytes(b"")
    run.plan_path.write_bytes(b"\x00" * 100)
    run.tracker_path("tensorboard").write_text('{"run_key": 1}')


def test_the_fuzz_test_covers_every_file_of_a_run_folder(run):
    left = [path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if not path.is_dir()]
    assert [name for name in left if not any(fnmatch.fnmatchcase(name, each) for each in COVERED)] == []
    assert {"metrics.jsonl", "trackers/tensorboard.json", ".outcomes/rank-0.json", "outcome.json"} <= set(left)


@pytest.mark.slow
def test_a_run_resumes_with_damaged_files(echelon, run):
    whole = echelon("eval", run.path, "--json")
    write_damages(run)
    for command in (("eval", run.path, "--json"), ("export", run.path, "out"), ("checkpoint", "verify", run.path)):
        ending = echelon(*command).succeeded()
        assert command[0] != "eval" or json.loads(ending.out) == json.loads(whole.out)
    finished = echelon(*COMMAND)
    assert (finished.code, finished.err) == (0, "") and "has finished; raise train.steps" in finished.out
    resumed = echelon(*COMMAND, "train.steps=8")
    assert (resumed.code, resumed.err) == (0, ""), resumed
    for line in (
        "run: runs/tiny/events.jsonl: skipping line 2 and 4 more, which cannot be read",
        "metrics.jsonl: skipping line 1 and 1 more, which",
        "samples.jsonl: skipping line 1, which",
        "spending.json cannot be read (seconds: ",
        "plan: a new one",
        "Resuming from step-00000006",
    ):
        assert line in resumed.out, resumed.out
    assert [row["step"] for row in read_lines(run.metrics_path) if row["kind"] == "train"] == [*range(1, 9)]


def test_events_also_detect_other_text(echelon, run):
    """The digest of the training data is in data.json and, in case that is damaged, in events.jsonl."""
    run.data_path.write_text("{}")
    Path("text.txt").write_text("Another text, of another length. " * 500)
    refused = echelon(*COMMAND, "train.steps=8")
    assert refused.code == 2 and "data differs from that of the run" in refused.err
    run.events_path.write_text("")
    refused = echelon(*COMMAND, "train.steps=8")
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "data.json: cannot read which text the run uses" in refused.err


def test_a_folder_in_place_of_a_file_is_named(echelon, run):
    for path in (run.metrics_path, run.model_dir / "config.json", run.log_path(0)):
        aside = path.rename(path.with_name("aside"))
        path.mkdir()
        refused = echelon(*COMMAND, "train.steps=8")
        assert refused.code == 2 and f"{path.name} is a folder, but must be a file of the run" in refused.err
        path.rmdir()
        aside.rename(path)
    shutil.rmtree(run.logs_dir)
    run.logs_dir.touch()
    refused = echelon(*COMMAND, "train.steps=8")
    assert refused.code == 2 and "logs is a file, but must be a folder of the run" in refused.err


def test_removing_the_run_folder_during_preparation_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, _ = load_recipe(write_recipe(tmp_path))

    def remove_run(record):
        if record.getMessage().startswith("tokenizing"):
            shutil.rmtree(tmp_path / "runs" / "tiny")
        return True

    monkeypatch.setattr(writing.logger, "filters", [remove_run])
    with pytest.raises(EchelonError, match=r"run\.dir=runs/tiny was removed or moved during the run") as told:
        prepare_run(recipe, False, lambda: detect_cluster(1), {})
    assert told.value.exit_code == 1


def remove(run: RunFolder) -> None:
    """Remove the folder at once by a rename: deleting file by file would leave files that the run writes meanwhile."""
    aside = run.path.rename(run.path.with_name("aside"))
    shutil.rmtree(aside, ignore_errors=True)  # an open file may be created again


@pytest.mark.slow
def test_removing_the_run_folder_ends_the_run_immediately(echelon, tmp_path):
    write_recipe(tmp_path, train={"steps": 100_000, "log_every": 1000}, checkpoint={"every": 10})
    run = RunFolder(tmp_path / "runs" / "tiny")
    job = start("train", "recipe.json", "--nproc", "2")
    await_line(run.metrics_path, '"step": 15,', job, seconds=300)
    remove(run)
    ending = finish(job, 60)
    assert ending.code == 1 and ending.err.count("\n") == 1, ending
    assert "run.dir=runs/tiny was removed or moved during the run" in ending.err
    assert "restart 1 of" not in ending.out
    assert list(run.checkpoints_dir.glob("step-*")) == []


@pytest.mark.slow
def test_rank_0_reports_a_removed_run_folder_under_another_launcher(echelon, tmp_path):
    write_recipe(tmp_path, train={"steps": 100_000, "log_every": 1000}, checkpoint={"every": 10})
    run = RunFolder(tmp_path / "runs" / "tiny")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "echelon"]
    with subprocess.Popen([*command, *COMMAND[:2]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        await_line(run.metrics_path, '"step": 15,', job, seconds=300)
        remove(run)
        ending = finish(job, 60)
    assert ending.code == 1
    assert "echelon: run.dir=runs/tiny was removed or moved during the run" in ending.out + ending.err
