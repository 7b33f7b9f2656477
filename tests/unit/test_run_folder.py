"""The run folder: locking, resuming, and files that survive a crash."""

import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from echelon.environment import describe_environment
from echelon.errors import ConfigError, DataError
from echelon.recipe import Recipe, render_recipe
from echelon.run_folder import RunFolder
from echelon.run_opening import open_run
from echelon.stored import write_json, write_text


def build_recipe(directory, steps=10, learning_rate=1e-3, log_every=1):
    return Recipe.model_validate(
        {
            "run": {"name": "tiny", "dir": str(directory)},
            "model": {"config": {"model_type": "llama", "hidden_size": 8}},
            "tokenizer": "bytes",
            "data": {"train": "text.txt", "sequence_len": 8},
            "train": {"steps": steps, "global_batch_size": 2, "log_every": log_every},
            "optim": {"learning_rate": learning_rate},
        }
    )


def leave_run(directory, finished=False, **changes):
    """A run folder as a run leaves it; its lock is free."""
    folder = RunFolder(directory)
    folder.create()
    write_text(folder.recipe_path, render_recipe(build_recipe(directory, **changes)))
    if finished:
        folder.mark_finished(10)
    return folder


def test_new_run(tmp_path):
    opened = open_run(build_recipe(tmp_path / "run"), fresh=False, say=print)
    assert opened.state == "new"
    assert opened.folder.logs_dir.is_dir()
    assert opened.folder.log_path(3).name == "rank-00003.log"


def test_same_recipe_resumes(tmp_path):
    leave_run(tmp_path / "run")
    opened = open_run(build_recipe(tmp_path / "run"), fresh=False, say=print)
    assert (opened.state, opened.differences) == ("resumed", ())


def test_harmless_change_resumes_and_is_shown(tmp_path):
    leave_run(tmp_path / "run")
    lines = []
    opened = open_run(build_recipe(tmp_path / "run", steps=20, log_every=5), fresh=False, say=lines.append)
    assert opened.state == "resumed"
    assert lines == ["run: changed train.steps: 10 -> 20", "run: changed train.log_every: 1 -> 5"]


def test_other_change_is_refused_and_leaves_the_run_free(tmp_path):
    leave_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optim\.learning_rate: 0\.001 -> 0\.5") as caught:
        open_run(build_recipe(tmp_path / "run", learning_rate=0.5), fresh=False, say=print)
    assert "--fresh" in str(caught.value)
    assert open_run(build_recipe(tmp_path / "run"), fresh=False, say=print).state == "resumed"


def test_fresh_moves_the_old_run_aside(tmp_path):
    for _ in range(2):
        leave_run(tmp_path / "run")
        opened = open_run(build_recipe(tmp_path / "run", learning_rate=0.5), fresh=True, say=print)
        assert opened.state == "new"
        assert not opened.folder.recipe_path.exists()
        opened.folder.unlock()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1", "run.old-2"]
    assert (tmp_path / "run.old-1" / "recipe.yaml").exists()


def test_finished_run_says_so_unless_steps_are_raised(tmp_path):
    leave_run(tmp_path / "run", finished=True)
    lines = []
    assert open_run(build_recipe(tmp_path / "run"), fresh=False, say=lines.append).state == "finished"
    assert "has finished" in lines[0]
    opened = open_run(build_recipe(tmp_path / "run", steps=20), fresh=False, say=lines.append)
    assert opened.state == "resumed"
    opened.folder.clear_outcomes()
    assert not opened.folder.is_finished()


def test_unreadable_recipe_of_a_run_is_refused(tmp_path):
    leave_run(tmp_path / "run").recipe_path.write_text("run: [")
    with pytest.raises(ConfigError, match="--fresh"):
        open_run(build_recipe(tmp_path / "run"), fresh=False, say=print)


def test_foreign_folder_is_never_taken(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match=r"thesis\.tex"):
            open_run(build_recipe(tmp_path), fresh=fresh, say=print)
    with pytest.raises(ConfigError, match="is a file"):
        open_run(build_recipe(tmp_path / "thesis.tex"), fresh=False, say=print)


def hold_lock(path, ready, done):
    RunFolder(path).lock()
    ready.set()
    done.wait(20)


def test_live_run_is_named_by_pid(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=hold_lock, args=(tmp_path / "run", ready, done))
    holder.start()
    assert ready.wait(20)
    for fresh in (False, True):
        with pytest.raises(ConfigError, match=f"pid {holder.pid}"):
            open_run(build_recipe(tmp_path / "run"), fresh=fresh, say=print)
    holder.kill()
    holder.join()
    assert open_run(build_recipe(tmp_path / "run"), fresh=False, say=print).state == "new"


def test_metrics_are_cut_at_the_checkpoint(tmp_path):
    folder = leave_run(tmp_path / "run")
    rows = [{"kind": "train", "step": step} for step in (1, 2, 3, 4)]
    rows.insert(2, {"kind": "eval", "step": 2})
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tra')
    assert folder.cut_metrics(2) == 3
    kept = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert kept == [{"kind": "train", "step": 1}, {"kind": "train", "step": 2}, {"kind": "eval", "step": 2}]
    assert folder.cut_metrics(2) == 0
    folder.samples_path.write_text('{"step": 1}\n{"step": 2}\n')
    assert folder.cut_metrics(2, owes_evaluation=True) == 2  # it is made again, and so are its samples
    assert json.loads(folder.metrics_path.read_text().splitlines()[-1]) == {"kind": "train", "step": 2}
    assert folder.samples_path.read_text() == '{"step": 1}\n'
    assert RunFolder(tmp_path / "none").cut_metrics(2) == 0


def test_events_are_lines_with_a_time(tmp_path):
    folder = leave_run(tmp_path / "run")
    folder.append_event("checkpoint", step=5)
    folder.append_event("failure", message="x")
    first, second = [json.loads(line) for line in folder.events_path.read_text().splitlines()]
    assert (first["event"], first["step"], second["step"], second["message"]) == ("checkpoint", 5, None, "x")
    assert abs(first["time"] - time.time()) < 60


def test_newest_step_ignores_what_is_not_published(tmp_path):
    folder = leave_run(tmp_path / "run")
    assert folder.newest_step() is None
    for name in ("step-00000010", "step-00000200", ".step-00000300.tmp", "step-old"):
        (folder.checkpoints_dir / name).mkdir()
    assert folder.newest_step() == 200


def test_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "plan.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_text(path, 3)
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["plan.json"]


def test_prepared_path_is_remembered(tmp_path):
    folder = leave_run(tmp_path / "run")
    with pytest.raises(DataError, match="echelon train"):
        folder.read_prepared_path()
    folder.write_prepared_path(tmp_path / "prepared")
    assert folder.read_prepared_path() == (tmp_path / "prepared").resolve()


def test_environment_holds_no_secret():
    variables = {
        "RANK": "0",
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "secret",
        "HF_TOKEN": "secret",
        "WANDB_API_KEY": "secret",
        "MY_RANK": "secret",
    }
    environment = describe_environment(variables)
    assert environment["variables"] == {"NCCL_DEBUG": "INFO", "RANK": "0", "SLURM_JOB_ID": "7"}
    assert "secret" not in json.dumps(environment)
    assert environment["packages"]["torch"]


def test_unwritable_place_is_one_message():
    with pytest.raises(ConfigError, match=r"run\.dir=/dev/null/run"):
        open_run(build_recipe(Path("/dev/null/run")), fresh=False, say=print)


def test_a_lock_that_is_about_to_be_released_is_waited_for(tmp_path):
    holder, newcomer = RunFolder(tmp_path), RunFolder(tmp_path)
    holder.lock()
    with pytest.raises(ConfigError, match="in use by a live run"):
        newcomer.lock(0.1)
    threading.Timer(0.3, holder.unlock).start()
    newcomer.lock(30)
    newcomer.unlock()
