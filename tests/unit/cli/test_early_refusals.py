"""What a command can refuse without torch and transformers, whose imports take seconds, it refuses before them."""

import json
import subprocess
import sys

import pytest

from tests.unit.recipe_samples import SMALL

# Runs each command, and prints its exit code, its last line, and which of the libraries it has imported.
PROGRAM = """
import contextlib, io, json, sys
from echelon.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["echelon", *words]
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps([code, told.getvalue().strip(), heavy]), flush=True)
"""
NO_FOLDER = "is not a folder; give a run folder (runs/NAME) or an HF model folder."
NEITHER = "is neither a run folder (recipe.yaml) nor an HF model folder (config.json)."
REFUSED = [
    ("generate nosuch --prompt x", f"nosuch {NO_FOLDER}"),
    ("generate empty --prompt x", f"empty {NEITHER}"),
    ("generate adapter --prompt x", "adapter contains an adapter without its base model; give the run"),
    ("generate runs/a --prompts nosuch.txt", "--prompts nosuch.txt cannot be read: "),
    ("generate runs/a", "generate needs one of --prompt TEXT and --prompts FILE; give one."),
    ("generate runs/a --prompt x --checkpoint 9", "--checkpoint 9: use newest, best or a step; runs/a has steps 2."),
    ("eval nosuch", f"nosuch {NO_FOLDER}"),
    ("eval empty", f"empty {NEITHER}"),
    ("eval runs/a --data nosuch.txt", "--data nosuch.txt: no such file or folder"),
    ("eval runs/a --tasks nosuch.jsonl", "--tasks nosuch.jsonl cannot be read: it is not a file"),
    ("eval runs/a --checkpoint 9", "--checkpoint 9: use newest, best or a step; runs/a has steps 2."),
    ("eval runs/b", "runs/b has no checkpoint yet; run `echelon train` until one is saved."),
    ("export nosuch out", f"nosuch {NO_FOLDER}"),
    ("export runs/a empty/..", "empty/.. exists and is not an empty folder; choose a new folder."),
    ("export model out", "model is not a run folder (it has no recipe.yaml); give one"),
    ("export runs/a", "export needs a folder to write; give OUT, or upload with --push ID."),
    ("report nosuch", "nosuch is not a run: neither it nor runs/nosuch has an events.jsonl"),
    ("checkpoint verify nosuch", f"nosuch {NO_FOLDER}"),
    ("checkpoint list nosuch", f"nosuch {NO_FOLDER}"),
    ("checkpoint prune nosuch --keep 1", f"nosuch {NO_FOLDER}"),
    ("train recipe.yaml model.config.hidden_size=65", "does not divide model.config.hidden_size=65"),
    ("train recipe.yaml run.dir=/proc/nope/x", "run.dir=/proc/nope/x cannot be created: "),
    ("train recipe.yaml run.dir=text.txt", "run.dir=text.txt is a file; give a folder."),
    ("train recipe.yaml data.train=nosuch.txt", "data.train.0.path=nosuch.txt: no such file or folder"),
    ("train recipe.yaml run.name=a optim.learning_rate=0.5", "run.dir=runs/a contains a run with another recipe:"),
    ("train recipe.yaml run.name=a train.stepss=5", "train.stepss is not a recipe key; did you mean train.steps?"),
    ("report runs/a --web --port -1", "value for '--port': Input should be greater than or equal to 0"),
    ("report runs/a --web --port 70000", "value for '--port': Input should be less than or equal to 65535"),
    ("plan recipe.yaml --mtbf-hours nan", "value for '--mtbf-hours': Input should be less than or equal to 1000000000"),
    ("plan recipe.yaml --mtbf-hours inf", "value for '--mtbf-hours': Input should be less than or equal to 1000000000"),
    ("plan recipe.yaml --step-spread inf", "value for '--step-spread': Input should be less than or equal to 1000"),
]  # fmt: skip


def test_commands_refuse_without_importing_torch(tmp_path):
    (tmp_path / "recipe.yaml").write_text(SMALL)
    (tmp_path / "text.txt").write_text("some text to train on. " * 200)
    for name in ("empty", "adapter", "model", "runs/a/checkpoints/step-00000002", "runs/b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("a", "b"):
        (tmp_path / "runs" / name / "recipe.yaml").write_text(SMALL)
    before = sorted(tmp_path.rglob("*"))
    commands = json.dumps([command.split() for command, _ in REFUSED])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, commands], capture_output=True, text=True, timeout=300, cwd=tmp_path, check=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (command, words), (code, told, heavy) in zip(REFUSED, answers, strict=True):
        assert (code, heavy) == (2, []), (command, told)
        assert words in told and told.startswith(("echelon: ", "Usage: echelon ")), (command, told)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "command", ["import echelon.run.lifecycle.model_checks", "import echelon.cli.commands.trained_models"]
)
def test_their_modules_import_no_torch(command):
    code = f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; {command}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
