"""The diffs in docs/first-change.md and docs/new-parts.md apply to the current source, and do what the pages say."""

import doctest
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs import BLOCK, ELLIPSIS, read_commands

ROOT = Path(__file__).parents[2]
ADDED = {
    "src/echelon/learn/optimizer/sign.py",
    "src/echelon/learn/data/readers/mail.py",
    "src/echelon/learn/objectives/focal.py",
    "src/echelon/run/training/machine_load.py",
}
MAIL = "From a@example.com Mon Jan  1 00:00:00 2024\nSubject: {0}\n\nThe number of this message is {0}.\n\n"
RECIPE = {
    "run": {"name": "added"},
    "model": {"config": {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}},
    "tokenizer": "bytes",
    "data": {"train": [{"path": "box.mbox", "format": "mail"}], "sequence_len": 32, "validation_fraction": 0.1},
    "train": {"steps": 8, "global_batch_size": 4, "precision": "fp32"},
    "optim": {"name": "sign_sgd", "learning_rate": 3e-3, "schedule": "constant"},
    "objective": {"name": "focal"},
}
PROGRAM = """
import json, sys
from pathlib import Path
from echelon.learn.data.readers import count_documents
from echelon.learn.data.readers.record import Reading
from echelon.learn.data.source import Source, list_files
from echelon.learn.objectives.objective import build_objective
from echelon.learn.optimizer.stepper import choose_rule
from echelon.recipe.load import load_recipe

recipe, _ = load_recipe(Path("recipe.json"))
assert sys.argv[1] in sys.modules["echelon"].__file__
assert type(choose_rule(recipe.optim, True)).__name__ == "SignSGD"
assert str(build_objective(recipe.objective)) == "echelon.learn.objectives.focal:focal_loss"
files = list_files(Source("data.train.0", "box.mbox"))
assert files[0].format == "mail" and count_documents(files, 1000, Reading()) == 300
"""


def apply(diff, folder):
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, check=True)


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A copy of the source with the diffs applied, and a recipe that uses the added classes."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    before = {path.relative_to(folder).as_posix(): path.read_text() for path in (folder / "src").rglob("*.py")}
    shutil.copy(ROOT / "pyproject.toml", folder)
    for block in BLOCK.finditer((ROOT / "docs" / "new-parts.md").read_text("utf-8")):
        if block["language"] == "diff":
            apply(block["text"], folder)
    after = {path.relative_to(folder).as_posix(): path.read_text() for path in (folder / "src").rglob("*.py")}
    assert after.keys() - before.keys() == ADDED
    changed = [name for name in before if after[name] != before[name]]
    assert sorted(changed) == ["src/echelon/recipe/names.py", "src/echelon/run/lifecycle/accounts.py"]
    lines = [{line for name in changed for line in text[name].splitlines()} for text in (before, after)]
    assert len(lines[1] - lines[0]) == len(ADDED) + 1 and lines[0] <= lines[1], "one line each, and an import"
    (folder / "box.mbox").write_text("".join(map(MAIL.format, range(300))))
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    return folder


def run(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_added_classes_are_found_by_name(changed):
    run(changed, "-c", PROGRAM, str(changed))


@pytest.mark.slow
def test_added_classes_train(changed):
    run(changed, "-m", "echelon", "train", "recipe.json", "--nproc", "2")
    rows = [json.loads(line) for line in (changed / "runs" / "added" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train" and row["load_average"] >= 0]
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.slow
def test_the_first_change_does_in_each_step_what_the_page_shows(tmp_path):
    for name in ("src", "tests", "docs", "recipes", "pyproject.toml", "CHANGELOG.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        options = {"symlinks": True, "ignore": shutil.ignore_patterns("__pycache__", "*.egg-info")}
        copy(ROOT / name, tmp_path / name, **(options if copy is shutil.copytree else {}))
    (tmp_path / "echelon").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m echelon "$@"\n')
    (tmp_path / "echelon").chmod(0o755)
    programs = os.pathsep.join([str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": str(tmp_path / "src")}
    page = (ROOT / "docs" / "first-change.md").read_text("utf-8")
    _, *blocks = BLOCK.finditer(page)  # the first one sets the environment up
    num_commands = 0
    for block in blocks:
        if block["language"] == "diff":
            apply(block["text"], tmp_path)
            continue
        for command, shown in read_commands(block["text"]):
            done = subprocess.run(
                ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
                timeout=300,
            )  # fmt: skip
            assert (done.returncode != 0) == ("failed" in shown), done.stdout + done.stderr
            assert not shown or doctest.OutputChecker().check_output(shown, done.stdout, ELLIPSIS), done.stdout
            num_commands += 1
    assert num_commands == 5
    rewritten = (tmp_path / "docs" / "recipe.md").read_text().splitlines()
    before = (ROOT / "docs" / "recipe.md").read_text().splitlines()
    assert [line for line in rewritten if line not in before] == [
        line for line in rewritten if line.startswith("| `optim.schedule` | `cosine`, `linear`, `exponential`, ")
    ]
