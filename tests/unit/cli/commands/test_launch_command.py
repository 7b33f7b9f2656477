"""The options of `echelon launch`, and its behaviour in folders that it cannot write to."""

import errno
import json
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from echelon.cli.commands.jobs import launch, logs, status
from echelon.cli.commands.sweep import stops_noted
from echelon.ground.errors import ConfigError, DataError, HubUnreachableError, LaunchError, PlanError
from echelon.ground.logs import log_to_console
from echelon.launch.job import Launcher, Submitted
from echelon.launch.job_checks import describe_packages
from echelon.launch.records import list_jobs
from echelon.recipe.load import load_recipe
from echelon.tools.sweep.conduct import StopWord
from tests.unit.recipe_samples import DEMO

ROOT = Path(__file__).parents[4]
KUBERNETES = "{image: registry.example/echelon, gpus_per_node: 2, volumes: [{mount: /data, claim: team}]}"
RECIPE = DEMO + f"launch: {{kubernetes: {KUBERNETES}}}\n"
OURS = "111122223333.dkr.ecr.us-west-2.amazonaws.com/ours:1"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text " * 1000)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(autouse=True)
def console(capsys):
    """Show messages on the console, as the command line does."""
    log_to_console()


@pytest.fixture
def silent_hub(monkeypatch, tmp_path):
    """A hub address where nothing listens, and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "local", "hosts": "a,b"}, "--hosts a,b requires --to torchrun, not local; remove one of them."),
        (
            {"to": "slurm", "instance": "ml.p5.48xlarge"},
            "--instance ml.p5.48xlarge requires --to sagemaker, not slurm; remove one of them.",
        ),
        (
            {"to": "sagemaker-endpoint"},
            "--to sagemaker-endpoint: echelon serves no models any more; export the run with `echelon export`, and "
            "deploy it by AWS's own tools, as in docs/sagemaker.md#serving-a-model.",
        ),
        ({"to": "torchrun", "hosts": ",,"}, "--hosts ',,' has no host; write it like --hosts a,b."),
        *(
            (
                {"to": "slurm", "nodes": nodes},
                f"command line: launch.nodes={nodes} is neither a number of machines, nor MIN:MAX, nor N+SPARES; "
                "use 2, 1:4 or 4+1.",
            )
            for nodes in ("0", "x y", "4:2", "-1", "", "1:2+1", "2+0")
        ),
        (
            {"to": "kubernetes", "nodes": "2+1"},
            "launch.nodes=2+1: no machine waits as a spare with launch.to=kubernetes, only with torchrun and slurm; "
            "use launch.nodes=2.",
        ),
    ],
)
def test_options_without_effect_are_refused(recipe, options, message):
    with pytest.raises(ConfigError) as refused:
        launch(recipe, [], dry_run=True, **options)
    assert str(refused.value) == message


def test_hosts_that_look_like_numbers_are_names(recipe, capsys):
    launch(recipe, [], dry_run=True, to="torchrun", hosts="1, 2")
    assert "2 hosts, which must share" in capsys.readouterr().out


def test_the_plan_is_checked_against_the_requested_gpus(recipe, capsys):
    launch(recipe, ["launch.accelerator=H100"], dry_run=True, to="kubernetes", nodes="2")
    assert "zero1 on 4 x H100 needs" in capsys.readouterr().out
    launch(recipe, ["launch.accelerator=H100", "launch.slurm.gpus_per_node=1"], dry_run=True, to="slurm")
    assert "zero1 on 1 x H100 needs" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"^launch\.accelerator=H100: the number per machine .* set launch\.nproc_per_node, or"
    ):
        launch(recipe, ["launch.accelerator=H100"], dry_run=True, to="slurm")


MISSING = {
    "slurm": (["data.train.0.path=corpus: no such file or folder"], "srun"),
    "torchrun": (
        ["data.train.0.path=corpus: no such file or folder", "launch.torchrun.hosts is empty"],
        "-- SET-host-1 'bash ",
    ),
    "kubernetes": (
        ["launch.kubernetes.image is not set", "launch.kubernetes.gpus_per_node is not set",
         "launch.kubernetes.volumes is empty"],
        "image: SET-launch.kubernetes.image",
    ),
    "sagemaker": (
        ["launch.sagemaker.instance_type is not set", "launch.sagemaker.region is not set",
         "launch.sagemaker.role is not set", "launch.sagemaker.bucket is not set",
         "data.train.0.path=corpus: not found from"],
        '"RoleArn": "arn:aws:iam::000000000000:role/SET-launch.sagemaker.role"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("to", MISSING)
def test_a_dry_run_shows_the_job_and_all_missing_settings(tmp_path, monkeypatch, capsys, to):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    keys, shown = MISSING[to]
    with pytest.raises(ConfigError) as refused:
        launch(ROOT / "recipes" / "pretrain-1.3b.yaml", [], dry_run=True, to=to)
    said = str(refused.value)
    lines = said.splitlines()
    assert re.match(r"nothing can be submitted yet; (one setting is|\d settings are) not right:$", lines[0])
    assert [line[4:].startswith(key) for line, key in zip(lines[1:], keys, strict=True)] == [True] * len(keys), said
    text = capsys.readouterr().out
    assert ", with placeholders for what is missing" in text and shown in text
    # A submission is refused with the same list, and writes nothing.
    with pytest.raises((ConfigError, DataError)) as refused:
        launch(ROOT / "recipes" / "pretrain-1.3b.yaml", [], to=to)
    assert all(key in str(refused.value) for key in keys)
    assert "Shown here" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_wrong_setting_is_listed_with_the_missing_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = ["launch.kubernetes.resources={nvidia.com/gpu: 8}", "launch.kubernetes.gpus_per_node=8"]
    with pytest.raises(
        ConfigError, match=r"(?s)2 settings are not right:.* - .*image is not set.* - .*nvidia.com/gpu="
    ):
        launch(ROOT / "recipes" / "pretrain-1.3b.yaml", wrong, dry_run=True, to="kubernetes")


@pytest.mark.parametrize("engine", ["native", "deepspeed", "horovod", "tensorflow"])
@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("torchrun", "2 hosts, which must share"),
        ("slurm", "srun"),
        ("kubernetes", "apiVersion"),
        ("sagemaker", f" on demand, image {OURS}"),
    ],
)
def test_every_engine_goes_through_every_launcher(recipe, capsys, engine, to, words):
    """Its package is that of the machines, which need not be this one."""
    account = "role: 'arn:aws:iam::111122223333:role/r', region: us-west-2, bucket: 's3://bucket'"
    machine = "ml.m5.4xlarge" if engine == "tensorflow" else "ml.g5.12xlarge"
    settings = [
        f"engine={engine}", "parallel=ddp", "train.precision=fp32", "launch.nproc_per_node=2",
        "launch.python=/opt/other/bin/python",
        f"launch.sagemaker={{instance_type: {machine}, image: '{OURS}', {account}}}",
    ]  # fmt: skip
    launch(recipe, settings, dry_run=True, to=to, hosts="a,b" if to == "torchrun" else None)
    shown = capsys.readouterr()
    assert words in shown.out + shown.err
    assert engine == "native" or f"{engine} (engine={engine})" in shown.out or f"must contain {engine}" in shown.out


@pytest.mark.parametrize("to", ["torchrun", "slurm"])
def test_a_package_that_the_jobs_python_lacks_is_refused(recipe, to, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)  # as in an environment without torchao
    settings = ["train.precision=fp8", f"launch.python={sys.executable}"]
    hosts = "a,b" if to == "torchrun" else None
    with pytest.raises(ConfigError) as refused:
        launch(recipe, settings, dry_run=True, to=to, hosts=hosts)
    assert str(refused.value) == (
        f"train.precision=fp8 requires the package torchao, which {sys.executable}, the Python of the job, does not "
        f"have; run {sys.executable} -m pip install 'torchao>=0.16'."
    )
    # Another interpreter, and one that launch.setup may choose, cannot be asked.
    launch(recipe, [*settings, "launch.setup=[module load python]"], dry_run=True, to=to, hosts=hosts)


def test_the_packages_of_an_image_are_named(recipe, capsys):
    launch(recipe, ["train.precision=fp8"], dry_run=True, to="kubernetes")
    assert (
        "packages: the image registry.example/echelon must have echelon with its extras float8 (train.precision=fp8); "
        "this cannot be checked here"
    ) in capsys.readouterr().out


HUB_MODEL = ["model.config=null", "model.checkpoint=team/tiny", "launch.accelerator=H100", "launch.nproc_per_node=2"]


@pytest.mark.parametrize("to", ["torchrun", "slurm", "kubernetes"])
def test_an_unreachable_hub_is_a_note_for_remote_jobs(recipe, to, capsys, silent_hub):
    launch(recipe, HUB_MODEL, dry_run=True, to=to, hosts="a,b" if to == "torchrun" else None)
    said = capsys.readouterr().out
    assert "hub: not checked, left to the machines of the job: model.checkpoint=team/tiny: " in said
    assert "cannot be reached" in said and "Give a folder" not in said


def test_a_precision_that_needs_gpus_is_refused_without_the_model(recipe, silent_hub):
    settings = [*HUB_MODEL, "train.precision=fp8", "launch.accelerator=A100-80", f"launch.sagemaker.image={OURS}"]
    with pytest.raises(PlanError, match=r"train\.precision=fp8: A100-80 does not multiply matrices in float8"):
        launch(recipe, settings, dry_run=True, to="kubernetes")
    job = ["launch.sagemaker.region=us-west-2", "launch.sagemaker.bucket=s3://b-1", "launch.accelerator=null"]
    job += ["launch.sagemaker.role=arn:aws:iam::111122223333:role/train"]
    with pytest.raises(PlanError, match=r"train\.precision=fp8: cpu does not multiply matrices in float8"):
        launch(recipe, [*settings, *job], dry_run=True, to="sagemaker", instance="ml.m5.4xlarge")


def test_an_unreachable_hub_refuses_a_local_job(recipe, silent_hub):
    with pytest.raises(HubUnreachableError, match=r"^model\.checkpoint=team/tiny: .* cannot be reached from .* Give a"):
        launch(recipe, HUB_MODEL, dry_run=True, to="local")
    with pytest.raises(ConfigError, match=r"^launch\.sagemaker\.instance_type=auto: .* cannot be reached .* set a"):
        launch(recipe, [*HUB_MODEL[:2], "tokenizer=null"], dry_run=True, to="sagemaker", instance="auto")


def test_a_file_in_place_of_the_jobs_folder_is_named(recipe):
    (recipe.parent / "jobs").write_text("")
    with pytest.raises(ConfigError, match=r"^jobs is a file, but echelon stores .* or launch from another folder\.$"):
        launch(recipe, [], to="local")


def test_a_partially_written_job_folder_is_removed(recipe, monkeypatch):
    def fail(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("echelon.launch.records.write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        launch(recipe, [], to="local")
    assert list((recipe.parent / "jobs").iterdir()) == []


def test_a_variable_that_differs_between_ranks_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"launch\.env: RANK differs between processes and is set by echelon"):
        launch(recipe, ["launch.env={RANK: '0'}"], to="local")


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        (["launch.setup=[\"pip install 'echelon[s3]'\"]"], True),
        (["launch.setup=['python3 -m pip install -q torch echelon==0.1.0 && true']"], True),
        (["launch.setup=['uv pip install echelon']"], True),
        (["launch.ray.runtime_env={pip: ['echelon[peft]']}"], True),
        (["launch.ray.runtime_env={uv: {packages: [numpy, echelon]}}"], True),
        (["launch.setup=['pip install ./echelon', 'pip install numpy; cd echelon']"], False),
        (["launch.setup=['pip install -r echelon/wanted.txt', 'pip install git+https://host/echelon']"], False),
        (["launch.setup=['pip install \"echelon @ git+https://host/x\"']"], False),
        (["launch.ray.runtime_env={pip: [echelon-extra, 'echelon @ https://host/x.whl']}"], False),
    ],
)
def test_the_other_project_of_this_name_is_not_installed(recipe, overrides, is_refused):
    here, _ = load_recipe(recipe, ["launch.to=ray", *overrides])
    if not is_refused:
        brought = ["packages: each machine installs the wheel of echelon that the job brings"]
        assert describe_packages(here) == (brought if "runtime_env" in overrides[0] else [])
        return
    with pytest.raises(ConfigError, match=r"^launch\.(setup\.0|ray\.runtime_env\.\w+): .* installs another project"):
        describe_packages(here)


class Slow(Launcher):
    """A target that receives Ctrl-C while a job is submitted, and again while it is followed."""

    def check(self, job):
        return []

    def render(self, job):
        return {"run.sh": ""}

    def submit(self, job):
        signal.raise_signal(signal.SIGINT)
        return Submitted("17")

    def logs(self, record, follow):
        yield "a line"
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_during_submission_does_not_lose_the_job(recipe, monkeypatch, capsys):
    monkeypatch.setattr("echelon.launch.job_checks.find_launcher", lambda target: Slow())
    with pytest.raises(
        LaunchError, match=r"^stopped by SIGINT, but (.*) was already launched; `echelon cancel \1` ends"
    ):
        launch(recipe, [], to="local")
    assert [record.id for record in list_jobs()[0]] == ["17"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_only_the_following(recipe, monkeypatch, capsys):
    monkeypatch.setattr(Slow, "submit", lambda self, job: Submitted("17"))
    monkeypatch.setattr("echelon.launch.job_checks.find_launcher", lambda target: Slow())
    with pytest.raises(LaunchError, match=r"^no longer followed; (.*) continues, `echelon cancel \1` stops it\.$"):
        launch(recipe, [], to="local", follow=True)


def test_the_second_signal_ends_a_sweep_immediately(monkeypatch, capsys):
    monkeypatch.setattr("echelon.ground.stop_request.ECHO_SECONDS", -1.0)
    stop = StopWord()
    with pytest.raises(typer.Exit), stops_noted(stop), suppress(LaunchError):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert stop.name == "SIGINT"
    assert capsys.readouterr().err.startswith("echelon: ended immediately by SIGINT; trials may still run")


def test_a_target_that_does_not_answer_hides_no_other_jobs(recipe, monkeypatch, capsys):
    for name, target in (("here", "local"), ("there", "slurm")):
        folder = recipe.parent / "jobs" / name
        folder.mkdir(parents=True)
        record = {"name": name, "target": target, "id": "17", "run_dir": "/r", "submitted_at": -len(name), "place": {}}
        (folder / "job.json").write_text(json.dumps(record))
        (folder / "exit_code").write_text("0")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(typer.Exit):
        status(None)
    out, err = capsys.readouterr()
    assert out == "here  local  done  exit code 0\n"
    assert err.startswith("echelon: there: launch.to=slurm: `scontrol` is not installed on this machine")
    (recipe.parent / "jobs" / "there" / "output.log").write_text("a line\n+ export HF_TOKEN=word\n")
    logs("there", follow=False)  # read from a file, without asking the target
    assert capsys.readouterr().out == "a line\n+ export HF_TOKEN=***\n"
