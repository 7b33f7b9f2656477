"""The run folder: locking, resuming, and files that survive a crash."""

import json
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from echelon.ground.checksums import MANIFEST
from echelon.ground.errors import ConfigError, DataError
from echelon.ground.stored import write_bytes, write_json, write_text
from echelon.launch.job import JobSpec
from echelon.launch.records import write_job
from echelon.recipe.document import Recipe
from echelon.recipe.render import render_recipe
from echelon.recipe.training import OptimConfig
from echelon.run.folder.environment import describe_environment
from echelon.run.folder.open_run import OpenedRun, open_run
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.setup import describe_longer_run
from echelon.tools.sweep.sweep_folder import SweepFolder
from tests.unit.recipe_samples import RECIPE


def build_recipe(directory, steps=10, learning_rate=1e-3, log_every=1):
    train = {"steps": steps, "global_batch_size": 2, "log_every": log_every}
    run, optim = {"name": "tiny", "dir": str(directory)}, {"learning_rate": learning_rate}
    return Recipe.model_validate(RECIPE | {"run": run, "train": train, "optim": optim})


def leave_run(directory, finished=False, **changes):
    """Write the run folder of an ended run; its lock is free."""
    folder = RunFolder(directory)
    folder.create()
    write_text(folder.recipe_path, render_recipe(build_recipe(directory, **changes)))
    if finished:
        folder.mark_finished(10)
    return folder


def test_new_run(tmp_path):
    opened = open_run(build_recipe(tmp_path / "run"), fresh=False)
    assert opened.state == "new"
    assert opened.folder.logs_dir.is_dir()
    assert opened.folder.log_path(3).name == "rank-00003.log"


def test_same_recipe_resumes(tmp_path):
    leave_run(tmp_path / "run")
    opened = open_run(build_recipe(tmp_path / "run"), fresh=False)
    assert (opened.state, opened.differences) == ("resumed", ())


def test_allowed_change_resumes_and_is_shown(tmp_path, caplog):
    leave_run(tmp_path / "run")
    opened = open_run(build_recipe(tmp_path / "run", steps=20, log_every=5), fresh=False)
    assert opened.state == "resumed"
    assert [str(each) for each in opened.differences] == ["train.steps: 10 -> 20", "train.log_every: 1 -> 5"]
    assert caplog.messages == []  # nothing has changed yet: the new recipe may still be refused


def test_other_change_is_refused_and_leaves_the_run_free(tmp_path):
    leave_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optim\.learning_rate: 0\.001 -> 0\.5") as caught:
        open_run(build_recipe(tmp_path / "run", learning_rate=0.5), fresh=False)
    assert "--fresh" in str(caught.value)
    assert open_run(build_recipe(tmp_path / "run"), fresh=False).state == "resumed"


def test_fresh_moves_the_old_run_aside(tmp_path):
    for _ in range(2):
        leave_run(tmp_path / "run")
        opened = open_run(build_recipe(tmp_path / "run", learning_rate=0.5), fresh=True)
        assert opened.state == "new"
        assert not opened.folder.recipe_path.exists()
        opened.folder.unlock()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1", "run.old-2"]
    assert (tmp_path / "run.old-1" / "recipe.yaml").exists()


def test_finished_run_is_reported_unless_steps_are_raised(tmp_path, caplog):
    leave_run(tmp_path / "run", finished=True)
    assert open_run(build_recipe(tmp_path / "run"), fresh=False).state == "finished"
    assert "has finished" in caplog.messages[0]
    opened = open_run(build_recipe(tmp_path / "run", steps=20), fresh=False)
    assert opened.state == "resumed"
    opened.folder.clear_outcomes()
    assert not opened.folder.is_finished()


def test_a_shorter_run_is_refused_with_what_to_do(tmp_path):
    leave_run(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"train\.steps: 10 -> 5\n  A run can become longer, never .*--checkpoint STEP"
    ):
        open_run(build_recipe(tmp_path / "run", steps=5), fresh=False)
    with pytest.raises(ConfigError) as caught:
        open_run(build_recipe(tmp_path / "run", learning_rate=0.5), fresh=False)
    assert "never shorter" not in str(caught.value)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_longer_run_is_told_what_happens_to_its_learning_rate(tmp_path, schedule):
    optim = {"schedule": schedule, "warmup": "50%", "min_learning_rate_fraction": 0.0, "learning_rate": 1e-2}
    before, now = (
        build_recipe(tmp_path / "run", steps).model_copy(update={"optim": OptimConfig(**optim)}) for steps in (10, 20)
    )
    folder = RunFolder(tmp_path / "run")
    (folder.checkpoints_dir / "step-00000008").mkdir(parents=True)
    first, second = describe_longer_run(now, OpenedRun(folder, "resumed", (), before), 100)
    # Cosine over 5 steps after a warm-up of 5: cos(pi * 2 / 4) at step 8, the third; the other warm-up reaches 9/10.
    last = {"cosine": "5.00e-03", "constant": "1.00e-02"}[schedule]
    assert first.endswith(f" of the longer run: {last} at step 8, 9.00e-03 at step 9")
    assert first.startswith("schedule: the run is 20 steps long now, not 10, ")
    assert second.endswith("the warm-up was 5 steps, and is now 10")
    assert not list(describe_longer_run(before, OpenedRun(folder, "resumed", (), before), 100))


def test_unreadable_recipe_of_a_run_is_refused(tmp_path):
    leave_run(tmp_path / "run").recipe_path.write_text("run: [")
    with pytest.raises(ConfigError, match="--fresh"):
        open_run(build_recipe(tmp_path / "run"), fresh=False)


def test_a_folder_that_is_not_a_run_is_never_used(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match=r"thesis\.tex"):
            open_run(build_recipe(tmp_path), fresh=fresh)
    with pytest.raises(ConfigError, match="is a file"):
        open_run(build_recipe(tmp_path / "thesis.tex"), fresh=False)


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
            open_run(build_recipe(tmp_path / "run"), fresh=fresh)
    holder.kill()
    holder.join()
    assert open_run(build_recipe(tmp_path / "run"), fresh=False).state == "new"


def test_metrics_are_cut_at_the_checkpoint(tmp_path):
    folder = leave_run(tmp_path / "run")
    rows = [{"kind": "train", "step": step} for step in (1, 2, 3, 4)]
    rows.insert(2, {"kind": "eval", "step": 2})
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tra')
    assert folder.rows.cut_metrics(2) == 3
    kept = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert kept == [{"kind": "train", "step": 1}, {"kind": "train", "step": 2}, {"kind": "eval", "step": 2}]
    assert folder.rows.cut_metrics(2) == 0
    folder.samples_path.write_text('{"step": 1}\n{"step": 2}\n')
    assert folder.rows.cut_metrics(2, owes_evaluation=True) == 2  # the evaluation is repeated, and so are its samples
    assert json.loads(folder.metrics_path.read_text().splitlines()[-1]) == {"kind": "train", "step": 2}
    assert folder.samples_path.read_text() == '{"step": 1}\n'
    assert RunFolder(tmp_path / "none").rows.cut_metrics(2) == 0


def test_events_are_lines_with_a_time(tmp_path):
    folder = leave_run(tmp_path / "run")
    folder.rows.append_event("checkpoint", step=5)
    folder.rows.append_event("failure", message="x")
    first, second = [json.loads(line) for line in folder.events_path.read_text().splitlines()]
    assert (first["event"], first["step"], second["step"], second["message"]) == ("checkpoint", 5, None, "x")
    assert abs(first["time"] - time.time()) < 60


def test_newest_step_ignores_unpublished_checkpoints(tmp_path):
    folder = leave_run(tmp_path / "run")
    assert folder.newest_step() is None
    for name in ("step-00000010", "step-00000200", ".step-00000300.tmp", "step-old"):
        (folder.checkpoints_dir / name).mkdir()
    assert folder.newest_step() == 200


def test_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "plan.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_bytes(path, 3)
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["plan.json"]


def test_two_threads_write_the_same_file(tmp_path, monkeypatch):
    """One starts and ends its write in the middle of the other's."""
    path, flush = tmp_path / "ledger.json", os.fsync

    def write_between(file):
        flush(file)
        monkeypatch.setattr(os, "fsync", flush)
        other = threading.Thread(target=write_text, args=(path, "between"))
        other.start()
        other.join()
        assert path.read_text() == "between"

    monkeypatch.setattr(os, "fsync", write_between)
    write_text(path, "first to begin")
    assert path.read_text() == "first to begin"
    assert list(tmp_path.iterdir()) == [path]


def test_prepared_path_is_remembered(tmp_path):
    folder = leave_run(tmp_path / "run")
    with pytest.raises(DataError, match="echelon train"):
        folder.text.read_prepared_path()
    folder.text.write_prepared_path(tmp_path / "prepared")
    assert folder.text.read_prepared_path() == (tmp_path / "prepared").resolve()


def test_invalid_lines_are_skipped_and_reported(tmp_path):
    """The fuzz tests check that no reader of these files raises a traceback."""
    folder = leave_run(tmp_path / "run")
    assert folder.rows.describe_bad_lines() == [] and folder.rows.read_events() == ()
    good = {"time": 1.0, "event": "start", "step": 0}
    bad = [
        b"null",
        b"[]",
        b"{}",
        b"5",
        b"\xff",
        b'{"time": "x", "event": "start"}',
        b'{"event": "start"}',
        b"[" * 10**5,
    ]
    bad += [b'{"time": 1.0, "event": "rollback", "step": 1}', b'{"time": NaN, "event": "start"}']
    bad += [b'{"time": 1, "event": "start", "step": -1}', b'{"time": 1' + b"0" * 400 + b', "event": "start"}', b""]
    lines = [json.dumps(good).encode(), *bad, json.dumps(good).encode()]
    folder.events_path.write_bytes(b"\n".join(lines) + b'\n{"time": 1.0, "eve')  # the last line is still being written
    assert folder.rows.read_events() == (good, good)
    [line] = folder.rows.describe_bad_lines()
    assert line == f"{folder.events_path}: skipping line 2 and 12 more, which cannot be read"
    folder.metrics_path.write_bytes(b'{"kind": "train", "step": 1, "loss": "x"}\n{"kind": "train", "step": 1}\n')
    assert folder.rows.describe_bad_lines()[1] == f"{folder.metrics_path}: skipping line 1, which cannot be read"
    assert folder.rows.last_step() == 1 and folder.rows.cut_metrics(1) == 1


@pytest.mark.parametrize("content", ["null", "[]", "5", '"x"', "{}", "", "{", '{"prepared": 5}', '{"prepared": null}'])
def test_documents_of_another_type_count_as_damaged(tmp_path, content):
    folder = leave_run(tmp_path / "run")
    folder.data_path.write_text(content)
    with pytest.raises(DataError, match=r"data\.json: cannot read which text the run uses"):
        folder.text.read_prepared_path()
    folder.rows.append_event("start", step=0, prepared=str(tmp_path), digest="d")
    assert (folder.text.read_prepared_path(), folder.text.read_data_digest()) == (tmp_path, "d")
    folder.outcome_path.write_text(content)
    assert folder.is_finished() and folder.remedy() == "; raise train.steps to continue"
    folder.outcome_path.write_text('{"outcome": "early_stop"}')
    assert folder.remedy().startswith(" early; raise evaluate.early_stopping")


@pytest.mark.parametrize("other", ["", ".", "/", "x" * 300, "x" * 20000], ids=len)
def test_a_damaged_path_of_the_text_is_replaced_by_that_of_the_events(tmp_path, other):
    folder = leave_run(tmp_path / "run")
    text = tmp_path / "text"
    text.mkdir()
    (text / MANIFEST).write_text("{}")
    folder.rows.append_event("start", step=0, prepared=str(text), digest="d")
    folder.data_path.write_text(json.dumps({"prepared": other, "digest": "d"}))
    assert folder.text.read_prepared_path() == text


def test_a_path_that_no_file_can_have_is_damage_in_a_short_message(tmp_path):
    folder = leave_run(tmp_path / "run")
    folder.data_path.write_text(json.dumps({"prepared": "x" * 20000, "digest": "d"}))
    with pytest.raises(DataError, match=r"data\.json: .*\(its path has 20000 characters\)") as caught:
        folder.text.read_prepared_path()
    assert len(str(caught.value)) < 500


def test_packing_counts_only_if_data_json_and_the_events_agree(tmp_path):
    """For plain text it is null; a damaged `true` would make samples of it."""
    folder = RunFolder(tmp_path)
    for stored, started, expected in ((None, None, None), (True, True, True), (True, None, None), (None, False, None)):
        folder.text.write_prepared_path(tmp_path, "d", stored)
        folder.rows.append_event("start", prepared=str(tmp_path), digest="d", packing=started)
        assert folder.text.read_packing() is expected
    folder.events_path.unlink()
    folder.text.write_prepared_path(tmp_path, "d", False)
    assert folder.text.read_packing() is False


def test_a_pid_that_is_removed_while_it_is_read_does_not_count(tmp_path):
    folder = leave_run(tmp_path / "run")
    folder.write_pid(0)
    (folder.outcomes_dir / "pid-1").symlink_to(folder.outcomes_dir / "removed")  # listed, and not there
    assert folder.read_pids() == {0: os.getpid()}


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


def git(*words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with one file, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    git("init", "-q")
    (tmp_path / "a.txt").write_text("one")
    git("add", "a.txt")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_the_commit_and_modified_files_are_recorded(repository):
    commit = git("rev-parse", "HEAD")
    assert describe_environment(os.environ)["git_revision"] == commit
    (repository / "new.txt").write_text("untracked")
    assert describe_environment(os.environ)["git_revision"] == commit
    (repository / "a.txt").write_text("two")
    assert describe_environment(os.environ)["git_revision"] == f"{commit}-dirty"
    (repository / ".git").rename(repository / "elsewhere")
    assert describe_environment(os.environ)["git_revision"] is None


@pytest.mark.parametrize("trap", ["core.fsmonitor", "hook", "filter.x.clean", "filter.x.process", "included", "fetch"])
def test_an_untrusted_repository_executes_nothing(repository, trap):
    """Its configuration names a program that would create a file if git ran it."""
    sprung = repository / "sprung"
    program = repository / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {sprung}\nexit 1\n")
    program.chmod(0o755)
    commit = git("rev-parse", "HEAD")
    if trap == "hook":
        shutil.copy(program, repository / ".git" / "hooks" / "post-index-change")
    elif trap == "fetch":  # a missing object would be fetched from the configured remote
        git("config", "remote.origin.url", f"ext::{program}")
        git("config", "remote.origin.promisor", "true")
        git("config", "protocol.ext.allow", "always")
        git("config", "extensions.partialClone", "origin")
        tree = git("rev-parse", "HEAD^{tree}")
        (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    else:
        (repository / ".gitattributes").write_text("*.txt filter=x\n")
        git("config", "filter.x.clean" if trap == "included" else trap, str(program))
        if trap == "included":
            (repository / ".git" / "config").rename(repository / "theirs")
            (repository / ".git" / "config").write_text(f"[include]\npath = {repository / 'theirs'}\n")
    os.utime(repository / "a.txt", (1, 1))  # so that git must compare it
    assert describe_environment(os.environ)["git_revision"] in (commit, f"{commit}-dirty")
    assert not sprung.exists()
    subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, timeout=60, check=False)
    assert sprung.exists()  # plain git runs the program


NOBODY = 65534
# A place where the test's own folders, which only root can enter, are not in the path.
READ = "import os, sys; os.setgid({id}); os.setuid({id}); print(*(os.access(p, os.R_OK) for p in sys.argv[1:]))"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_run_job_and_sweep_folders_are_private_to_their_owner(tmp_path, umask):
    recipe = build_recipe(tmp_path / "runs" / "tiny")
    run, sweep = RunFolder(recipe.run.dir), SweepFolder(tmp_path / "sweeps" / "s")
    job = JobSpec("tiny-1", recipe, tmp_path / "jobs" / "tiny-1", tmp_path)
    before = os.umask(umask)
    try:
        run.create()
        write_job(job, {"run.sh": "true"})
        sweep.lock()
    finally:
        os.umask(before)
        sweep.unlock()
    for folder in (run.path, job.folder, sweep.path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o777 & ~umask  # contains only names


def test_a_folder_that_exists_keeps_its_mode(tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o750)
    RunFolder(path).create()
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_other_users_cannot_read_them():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        place = Path(folder)
        place.chmod(0o755)
        (place / "control").write_text("for all")
        recipe = build_recipe(place / "run")
        run = RunFolder(recipe.run.dir)
        run.create()
        run.recipe_path.write_text(render_recipe(recipe))
        run.log_path(0).write_text("a log")
        job = JobSpec("tiny-1", recipe, place / "jobs" / "tiny-1", place)
        write_job(job, {"run.sh": "true"})
        paths = (place / "control", run.recipe_path, run.log_path(0), job.recipe_path, job.folder / "run.sh")
        program = READ.format(id=NOBODY)
        told = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, check=True)
        assert told.stdout.split() == ["True", "False", "False", "False", "False"]


def test_an_unwritable_location_is_one_message():
    with pytest.raises(ConfigError, match=r"run\.dir=/dev/null/run"):
        open_run(build_recipe(Path("/dev/null/run")), fresh=False)


def test_a_lock_that_is_about_to_be_released_is_waited_for(tmp_path):
    holder, newcomer = RunFolder(tmp_path), RunFolder(tmp_path)
    holder.lock()
    with pytest.raises(ConfigError, match="in use by a live run"):
        newcomer.lock(0.1)
    threading.Timer(0.3, holder.unlock).start()
    newcomer.lock(30)
    newcomer.unlock()
