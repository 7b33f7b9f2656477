"""With `--json`, every command ends an error with one line of JSON on stderr, and logs nothing to stdout."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.version import Version
from typer.main import get_command

from echelon.cli.commands.terminal import render_failure
from echelon.cli.main import COMMANDS, app
from echelon.ground.errors import LaunchError
from tests.unit.recipe_samples import SMALL

PARTS = ["place", "key", "value", "rule", "fix"]
GROUPS = {name: group.commands for name, group in get_command(app).commands.items() if hasattr(group, "commands")}
EVERY = [[name] for name in COMMANDS] + [[name, inner] for name, group in GROUPS.items() for inner in group]

# A command, and of its error the key, the value, a part of the rule, and the beginning of the fix.
REFUSED = [
    # The command line.
    ("--json", None, None, "Missing command", "see `echelon --help`"),
    ("trian recipe.yaml", "trian", None, "No such command", "did you mean train?"),
    ("train", "RECIPE", None, "Missing argument", "see `echelon train --help`"),
    ("train recipe.yaml --fresch", "--fresch", None, "No such option", "did you mean --fresh?"),
    ("plan recipe.yaml --count 0", "--count", "0", "Input should be greater than or equal to 1", "see `echelon plan"),
    ("plan recipe.yaml --by=speed", "--by", "speed", "'speed' is not one of 'time', 'cost'", "see `echelon plan"),
    ("train recipe.yaml --nproc 0", "--nproc", "0", "is neither a number of processes nor auto", "use --nproc 2"),
    ("train recipe.yaml --nproc=x", "--nproc", "x", "is neither a number of processes nor auto", "use --nproc 2"),
    ("plan recipe.yaml --scaling 8,a", "--scaling", "8,a", "is not a list of numbers", "write it like --scaling"),
    ("plan recipe.yaml --devices 0xH100", "devices", "'0xH100'", "at least one device is needed", ""),
    ("eval nosuch", None, None, "nosuch is not a folder", "give a run folder (runs/NAME) or an HF model folder"),
    ("generate runs/a", None, None, "generate needs one of --prompt TEXT and --prompts FILE", "give one"),
    ("logs nosuch", None, None, "nosuch is neither a run nor a job", ""),
    ("verbose recipe.yaml", "verbose", None, "No such command", ""),
    ("train recipe.yaml -v -q", "--verbose", None, "and --quiet contradict each other", "give one"),
    # The recipe.
    ("train nosuch.yaml", None, None, "nosuch.yaml does not exist", "name a recipe file, or make one with"),
    ("train recipe.yaml train.stepss=5", "train.stepss", None, "is not a recipe key", "did you mean train.steps?"),
    ("data recipe.yaml --prepare train.steps=0", "train.steps", "0", "must be at least 1", "use 1 or more"),
    ("plan recipe.yaml optim.schedule=cosin", "optim.schedule", "cosin", "must be cosine,", "did you mean cosine?"),
    ("data recipe.yaml data.sequence_len=x", "data.sequence_len", "x", "must be a whole number", "use a number such"),
    ("plan recipe.yaml adapter.r=8", "adapter.r", "8", "has no effect with adapter.method=full", "set adapter.method"),
    ("plan recipe.yaml train=[", None, None, "this is not valid YAML", "correct it"),
    # What is refused later, by checks with torch and without.
    ("train recipe.yaml run.dir=text.txt", "run.dir", "text.txt", "is a file", "give a folder"),
    ("train recipe.yaml data.train=nosuch.txt", "data.train.0.path", "nosuch.txt", "no such file or folder", ""),
    ("plan recipe.yaml parallel.tp=3 --devices 3xH100", "parallel.tp", "3", "does not divide", "use tp = "),
    ("plan recipe.yaml model.config.hidden_size=65", "model.config.num_attention_heads", "32",
     "does not divide model.config.hidden_size=65", "use num_attention_heads"),
    ("launch recipe.yaml", "launch.to", None, "is not set", "add --to with one of"),
    ("launch recipe.yaml --to slurm --hosts a", "--hosts", "a", "requires --to torchrun", "remove one of them"),
    ("launch recipe.yaml --to sagemaker --dry-run", "launch.sagemaker.instance_type", None, "is not set", "set it"),
]  # fmt: skip


@pytest.fixture
def fail(echelon, tmp_path, monkeypatch):
    """Runs a command that fails; returns its exit code, its error as JSON, and what else it has printed."""
    (tmp_path / "recipe.yaml").write_text(SMALL)
    (tmp_path / "text.txt").write_text("some text to train on. " * 200)
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # else the program is named `python -m pytest`

    def run(words):
        code, out, err = echelon(*words)
        *others, last = err.splitlines()
        answer = json.loads(last)
        assert list(answer) == ["error"] and list(answer["error"]) == ["code", "message", *PARTS, "more"]
        assert all(part in answer["error"]["message"] for name in PARTS if (part := answer["error"][name]))
        assert answer["error"]["code"] == code
        return answer["error"], out, others

    return run


def test_all_commands_are_here():
    assert len(EVERY) == len(COMMANDS) + 3 and ["checkpoint", "prune"] in EVERY


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_takes_it(fail, words):
    error, out, others = fail([*words, "--json", "--no-such-option"])
    assert (error["code"], error["key"], error["rule"]) == (2, "--no-such-option", "No such option: --no-such-option")
    assert error["fix"] == f"see `echelon {' '.join(words)} --help`"
    assert (out, others) == ("", [])


@pytest.mark.parametrize(("command", "key", "value", "rule", "fix"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_refusal_has_its_parts(fail, command, key, value, rule, fix):
    if command.endswith(("--fresch", "--count 0")) and Version(metadata.version("typer")) < Version("0.29"):
        pytest.skip("an older typer words it otherwise")
    error, out, _ = fail([*command.split(), *([] if "--json" in command else ["--json"])])
    assert (error["code"], error["key"], error["value"]) == (2, key, value)
    assert rule in error["rule"]
    assert fix in (error["fix"] or "") and (error["fix"] or not fix)
    assert out == "" or "--dry-run" in command


def test_it_may_stand_before_the_command(echelon, fail):
    assert fail(["--json", "train", "nosuch.yaml"])[0]["rule"] == "nosuch.yaml does not exist"
    code, out, _ = echelon("--json", "status")
    assert not code and json.loads(out) == {"jobs": [], "runs": []}


def test_a_closed_pipe_ends_the_command_without_a_word():
    command = f"{sys.executable} -m echelon init --schema --json; echo $? >&2"
    done = subprocess.run(["sh", "-c", f"({command}) | true"], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "1\n")


def test_devices_of_unknown_speed_have_a_plan_with_its_memory(echelon, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(SMALL)
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))  # without a calibration
    code, out, _ = echelon("plan", "recipe.yaml", "--devices", "2xcpu", "--json")
    answer = json.loads(out)
    [candidate] = answer["candidates"]
    assert not code and candidate["memory_bytes"] > 2**20 and candidate["fits"]
    assert {candidate[name] for name in ("step_seconds", "hours", "usd", "tokens_per_second")} == {None}
    assert "the speed of cpu is unknown" in answer["untimed"] and "echelon plan --calibrate" in answer["untimed"]


def test_all_wrong_keys_are_told_at_once(fail):
    words = ["train", "recipe.yaml", "train.steps=0", "optim.learning_rat=1", "run.name=7", "--json"]
    error, _, _ = fail(words)
    assert error["key"] == "optim.learning_rat" and error["more"] == [], "unknown keys come first"
    error, _, _ = fail([word for word in words if "rat=" not in word])
    assert [error["key"], *(fault["key"] for fault in error["more"])] == ["run.name", "train.steps"]
    assert error["place"] == "command line" and list(error["more"][0]) == PARTS


def test_a_place_is_the_line_of_the_file(fail, tmp_path):
    (tmp_path / "recipe.yaml").write_text(SMALL.replace("steps: 100", "steps: 0"))
    assert fail(["plan", "recipe.yaml", "--json"])[0]["place"] == "recipe.yaml, line 9"


@pytest.mark.parametrize("command", ["train recipe.yaml", "plan recipe.yaml", "launch recipe.yaml --to slurm"])
@pytest.mark.parametrize(
    "secret",
    ["launch.env.HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUvWx123456", "train.steps=hf_AbCdEfGhIjKlMnOpQrStUvWx123456",
     "data.train=s3://user:AbCdEf@bucket/x", "mlflow.tracking_uri=https://user:AbCdEf@host/",
     "launch.hf_AbCdEfGhIjKlMnOpQrStUvWx123456=1"],
)  # fmt: skip
def test_no_secret_is_told(fail, command, secret):
    """A recipe with the secret is refused, or another key of it is."""
    error, out, others = fail([*command.split(), secret, "--json", "train.stepss=1"])
    assert "AbCdEf" not in f"{json.dumps(error)} {out} {others}"
    if not secret.startswith(("launch.", "train.")):
        return
    error, out, others = fail([*command.split(), secret, "parallel=zero9", "--json"])
    assert "AbCdEf" not in f"{json.dumps(error)} {out} {others}"


def test_a_bug_is_told_last(fail, monkeypatch):
    monkeypatch.setattr("echelon.recipe.render.recipe_json_schema", lambda: {}["absent"])
    error, _, others = fail(["init", "--schema", "--json"])
    assert (error["code"], error["message"]) == (1, "KeyError: 'absent'; this is a bug in echelon")
    assert others[0] == "Traceback (most recent call last):"


def test_ctrl_c_is_told(fail, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("echelon.recipe.render.recipe_json_schema", interrupt)
    assert fail(["init", "--schema", "--json"])[0] | {"rule": None} == {
        "code": 130, "message": "stopped by SIGINT", **dict.fromkeys(PARTS), "more": [],
    }  # fmt: skip


def test_the_words_of_a_job_are_read_too():
    """The ranks of a job report a message alone."""
    shown = json.loads(render_failure("rank 1: parallel.tp=3 does not fit; use tp=1", 2))["error"]
    assert (shown["key"], shown["value"], shown["fix"]) == ("parallel.tp", "3", "use tp=1")
    assert json.loads(render_failure(str(LaunchError("token=hf_AbCdEfGhIjKlMnOpQrStUvWx123456")), 1))["error"][
        "message"
    ].endswith("***")
