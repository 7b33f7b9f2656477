"""The functions of `import echelon` that start no processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import echelon
from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from tests.unit.recipe_samples import RECIPE

# Needs torch.
LIBRARY = {"Learner", "LoopRun", "Microbatch", "Objective", "Sampling", "StepBatch", "build_step_batch", "open_model"}


def test_importing_needs_no_torch_and_provides_every_name():
    program = (
        "import sys, echelon\n"
        "assert not [name for name in sys.modules if name.startswith('echelon.')], 'nothing before it is asked for'\n"
        f"for name in {{*echelon.__all__}} - {LIBRARY}: assert callable(getattr(echelon, name)), name\n"
        f"report = echelon.plan({RECIPE!r}, '2xH100')\n"
        "assert report.plan.world_size == 2\n"
        "assert not {'torch', 'transformers', 'pandas'} & set(sys.modules)\n"
        f"for name in {LIBRARY}: assert callable(getattr(echelon, name)), 'which needs torch'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_no_module_of_the_package_has_the_name_of_a_function():
    """Importing such a module would replace the function."""
    assert not {path.stem for path in Path(echelon.__file__).parent.iterdir()} & set(echelon.__all__)
    assert set(echelon.__all__) <= set(dir(echelon))
    with pytest.raises(AttributeError, match="'echelon' has no attribute 'trainer'"):
        _ = echelon.trainer


def test_recipes_load_from_a_file_a_mapping_and_another_recipe(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(RECIPE))
    before = json.dumps(RECIPE)
    of_mapping = echelon.load_recipe(RECIPE, {"train.tokens": "1M", "run.dir": tmp_path / "here"})
    of_file = echelon.load_recipe(str(path), ["train.tokens=1M", f"run.dir={tmp_path / 'here'}"])
    assert isinstance(of_file, Recipe) and of_mapping == of_file == echelon.load_recipe(of_file)
    assert of_file.train.steps is None and of_file.train.tokens == 10**6 and json.dumps(RECIPE) == before
    again = echelon.load_recipe(of_file, {"train.steps": 3})
    assert again.train.steps == 3 and again.train.tokens is None


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (RECIPE, {"train.stepz": 1}, r"^overrides: train.stepz is not a recipe key; did you mean train.steps\?"),
        (RECIPE, ["train.steps"], r"^overrides: 'train.steps' is not KEY=VALUE"),
        (RECIPE, "train.steps=3", r"^overrides: 'train.steps=3' is a string; give a list"),
        ({**RECIPE, "train": {"steps": 10}}, (), r"^recipe: one of train.global_batch_tokens and train.global_batch"),
        ([], (), r"a recipe is a path or a mapping, and this is a list"),
        ("missing.yaml", (), r"missing.yaml does not exist"),
    ],
)
def test_an_invalid_recipe_is_one_error_that_names_the_key(recipe, overrides, message):
    with pytest.raises(ConfigError, match=message):
        echelon.load_recipe(recipe, overrides)


def test_another_tools_spelling_is_a_warning():
    with pytest.warns(UserWarning, match=r"lr: 0.002 is read as optim.learning_rate: 0.002"):
        assert echelon.load_recipe(RECIPE, {"lr": 0.002}).optim.learning_rate == 0.002


def test_a_plan_equals_the_output_of_the_command(tmp_path, capsys, monkeypatch):
    from echelon.cli.main import app

    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(RECIPE))
    report = echelon.plan(RECIPE, "4xH100", devices_per_node=2)
    assert (report.plan.world_size, report.cluster.num_nodes) == (4, 2)
    assert report.memory.total > report.memory.parameters > 0
    app(["plan", str(path), "--devices", "4xH100", "--devices-per-node", "2"], standalone_mode=False)
    assert capsys.readouterr().out == f"{report}\n"
    with pytest.raises(ConfigError, match="are different clusters"):
        echelon.plan(RECIPE, "8xH100", instance="auto")


def write_run(path, *, finished=False, events=()):
    folder = RunFolder(path)
    folder.create()
    recipe = echelon.load_recipe(RECIPE, {"run.dir": path})
    from echelon.recipe.render import render_recipe

    folder.recipe_path.write_text(render_recipe(recipe))
    rows = [{"kind": "train", "step": step, "loss": 3.0 - step} for step in (1, 2)]
    rows.append({"kind": "eval", "step": 2, "loss": 1.5})
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for event in events:
        folder.rows.append_event(event, step=1)
    if finished:
        folder.mark_finished(2)
    return folder


def test_a_run_reads_its_folder(tmp_path):
    write_run(tmp_path / "runs" / "small", events=("start", "checkpoint"))
    run = echelon.Run(tmp_path / "runs" / "small")
    assert [row["loss"] for row in run.metrics()] == [2.0, 1.0] and run.step == 2
    assert [row["kind"] for row in run.metrics(None)] == ["train", "train", "eval"]
    assert [row["loss"] for row in run.metrics("eval")] == [1.5]
    assert [row["event"] for row in run.events()] == ["start", "checkpoint"] and len(run.events("checkpoint")) == 1
    assert run.checkpoints() == [] and run.recipe.train.steps == 10
    assert Path(run) == run.path == Path(echelon.Run(run)) and (run / "metrics.jsonl").is_file()
    assert repr(run) == f"Run('{run.path}'): interrupted at step 2"
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no recipe\.yaml"):
        echelon.Run(tmp_path)


def test_metrics_frame_with_and_without_pandas(tmp_path, monkeypatch):
    write_run(tmp_path)
    run = echelon.Run(tmp_path)
    pandas = pytest.importorskip("pandas")
    assert isinstance(run.metrics_frame(), pandas.DataFrame) and run.metrics_frame().loc[2, "loss"] == 1.0
    assert len(run.metrics_frame("none")) == 0
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"needs pandas, which is not installed; run `pip install pandas`"):
        run.metrics_frame()


@pytest.mark.parametrize(
    ("events", "finished", "status"),
    [
        (("start",), True, "done"),
        (("start", "signal"), False, "stopped"),
        (("start", "budget"), False, "stopped"),
        (("start", "failure", "goodput"), False, "failed"),
        (("start", "failure", "restart", "checkpoint"), False, "interrupted"),
        ((), False, "interrupted"),
    ],
)
def test_the_status_of_a_run(tmp_path, events, finished, status):
    folder = write_run(tmp_path, events=events, finished=finished)
    run = echelon.Run(tmp_path)
    assert run.status == status
    folder.lock()
    try:
        assert run.status == "running"
    finally:
        folder.unlock()
    assert run.status == status


def test_train_refuses_before_it_starts_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"nproc=0 is neither a number of processes nor 'auto'"):
        echelon.train(RECIPE, nproc=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"starts its own processes, .* \(worker\)"):
        echelon.train(RECIPE, nproc=2)
    assert not list(tmp_path.iterdir())
