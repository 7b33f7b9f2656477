"""What a user installs: the wheel, and one extra at a time, each in an environment with nothing else.

The environment of the other tests has all packages, and so hides that one is asked for where it is not needed. In each
of these, what the documentation says that the extra is for works; and without it, the message says how to install it.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.dist.command import TEXT
from tests.object_server import bucket_served
from tests.release import ROOT, read_version, run

pytestmark = [pytest.mark.dist, pytest.mark.slow]

FOR_DEVELOPERS = {"test", "slow", "site", "lint", "release"}
EXTRAS = {
    name: lines
    for name, lines in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].items()
    if name not in FOR_DEVELOPERS
}
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
RECIPE = {
    "run": {"name": "tiny"},
    "model": {"config": CONFIG},
    "tokenizer": "bytes",
    "data": {"train": "text.txt", "sequence_len": 32},
    "train": {"steps": 2, "global_batch_size": 2, "precision": "fp32", "eval_every": None},
    "optim": {"learning_rate": 1e-3},
    "launch": {
        "kubernetes": {
            "image": "registry.example/echelon", "gpus_per_node": 0, "volumes": [{"mount": "/data", "claim": "c"}],
        },
        "sagemaker": {
            "role": "arn:aws:iam::111122223333:role/train", "region": "us-east-1", "bucket": "s3://bucket/echelon",
            "instance_type": "ml.m5.xlarge",
        },
    },
}  # fmt: skip
SWEEP = {"sweep": {"name": "lr", "trials": 2}, "recipe": "recipe.json", "search": {"optim.learning_rate": [1e-3, 1e-2]}}
TRAIN = ("train", "recipe.json", "--nproc", "1")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and commands of its echelon in a folder."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def install(self, requirement: str) -> None:
        """Install a package, in the versions that the tests run with."""
        versions = ("-c", ROOT / "constraints.txt")
        run(self.python, "-m", "pip", "install", "--quiet", *versions, requirement)

    def echelon(self, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env = {**kept, "ECHELON_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", **variables}
        argv = [self.python, "-P", "-m", "echelon", *words]
        return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """An environment with the wheel of this source, and no extra; and the wheel."""
    folder = tmp_path_factory.mktemp("extras")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder)
    wheel = folder / f"echelon-{read_version()}-py3-none-any.whl"
    venv.create(folder / "base", with_pip=True)
    environment = Environment(folder / "base")
    environment.install(str(wheel))
    return environment, wheel


@pytest.fixture
def here(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    return tmp_path


def nothing_needed(folder: Path) -> None:
    """No file besides the recipe and its text."""


def write_table(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [TEXT] * 3}), folder / "text.parquet")


def write_task(folder: Path) -> None:
    rows = [{"question": "You may reproduce", "choices": ["copies", "hats"], "answer": "copies"}] * 2
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sums(folder: Path) -> None:
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(20)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sweep(folder: Path) -> None:
    (folder / "sweep.json").write_text(json.dumps(SWEEP))


def write_cluster(folder: Path) -> None:
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "clusters": [cluster],
        "contexts": [context],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }
    (folder / "kubeconfig").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **config}))


@dataclass(frozen=True)
class Trial:
    """What an extra is for.

    Attributes:
        words: the command of the documentation.
        module: what its message says to be missing without the extra.
        says: what it prints with the extra.
        code: its exit code then; 1 if it cannot reach a server that is not there.
        makes: a pattern of a file that it leaves.
        prepare: writes the files that it needs.
        variables: of its environment.
        serves: whether it needs a server of S3 and SageMaker.
    """

    words: tuple[str, ...]
    module: str
    says: str = ""
    code: int = 0
    makes: str = "runs/tiny/outcome.json"
    prepare: Callable[[Path], None] = nothing_needed
    variables: dict[str, str] = field(default_factory=dict)
    serves: bool = False


REWARDS = (
    "objective={name: grpo}", "data.train=[{path: sums.jsonl, format: prompt}]", "train.global_batch_size=8",
    "rollout={group_size: 4, max_new_tokens: 4}", "reward=math", "data.validation_fraction=0",
)  # fmt: skip
LAUNCH = ("launch", "recipe.json", "--to")
TRIALS = {
    "peft": Trial((*TRAIN, "adapter.method=lora", "adapter.r=4"), "peft"),
    "qlora": Trial((*TRAIN, "adapter.method=qlora", "adapter.r=4"), "peft"),
    "tensorboard": Trial((*TRAIN, "track=[tensorboard]"), "tensorboard", makes="runs/tiny/tensorboard/events*"),
    "mlflow": Trial((*TRAIN, "track=[mlflow]"), "mlflow", makes="runs/mlflow.db"),
    "wandb": Trial(
        (*TRAIN, "track=[wandb]", "launch.env={WANDB_MODE: offline}"), "wandb", makes="runs/tiny/wandb/offline-run*"
    ),
    "prometheus": Trial((*TRAIN, "track=[prometheus]"), "prometheus_client"),
    "opentelemetry": Trial((*TRAIN, "track=[opentelemetry]"), "opentelemetry.exporter.otlp.proto.http"),
    "data": Trial((*TRAIN, "data.train=text.parquet"), "pyarrow", prepare=write_table),
    "s3": Trial((*TRAIN, "checkpoint.remote=s3://bucket/run"), "s3fs", serves=True),
    "gcs": Trial(
        (*TRAIN, "checkpoint.remote=gs://bucket/run"), "gcsfs", "gs://bucket/run", 1, "recipe.json",
        variables={"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"},
    ),
    "kubernetes": Trial(
        (*LAUNCH, "kubernetes", "run.dir=/data/tiny", "data.train=/data/text.txt"), "kubernetes", "127.0.0.1", 1,
        "jobs/*/manifest.yaml", write_cluster, {"KUBECONFIG": "kubeconfig"},
    ),
    "ray": Trial(
        (*LAUNCH, "ray", "launch.ray.address=http://127.0.0.1:9"), "ray", "nothing answers there", 1,
        "jobs/*/request.json",
    ),
    "sagemaker": Trial((*LAUNCH, "sagemaker"), "boto3", "launched tiny-", makes="jobs/*/job.json", serves=True),
    "sweep": Trial(
        ("sweep", "sweep.json"), "optuna", "best: trial", makes="sweeps/lr/results.csv", prepare=write_sweep
    ),
    "float8": Trial((*TRAIN, "train.precision=fp8"), "torchao", "needs a GPU of compute capability", 2, "recipe.json"),
    "math": Trial((*TRAIN, *REWARDS), "math-verify", prepare=write_sums),
    "lm-eval": Trial((*TRAIN, "evaluate.tasks=[task.jsonl]"), "lm_eval", "task", prepare=write_task),
    "etcd": Trial(
        (*TRAIN, "--nodes", "2", "--rendezvous", "etcd://127.0.0.1:9/job"), "etcd3gw", "etcd does not answer", 1,
        "recipe.json",
    ),
    "deepspeed": Trial((*TRAIN, "engine=deepspeed"), "deepspeed"),
    "tensorflow": Trial((*TRAIN, "engine=tensorflow"), "keras_hub"),
}  # fmt: skip


def test_every_extra_has_a_trial():
    assert set(TRIALS) == set(EXTRAS) - {"liger"}, "liger's kernels run on GPUs only"


def test_without_an_extra_everything_else_works(base, here):
    """The path of README.md: plan, train, evaluate, sample, export."""
    environment, _ = base
    for line in (
        "data recipe.json", "plan recipe.json", "train recipe.json --nproc 2", "eval runs/tiny", "report runs/tiny",
        "generate runs/tiny --prompt one --max-tokens 4", "export runs/tiny out",
        "launch recipe.json --to slurm --dry-run", "launch recipe.json --to local --follow run.name=another",
    ):  # fmt: skip
        words = line.split()
        done = environment.echelon(here, *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


@pytest.mark.parametrize("extra", TRIALS)
def test_an_extra_is_enough_for_what_it_is_for(base, here, extra, tmp_path_factory):
    environment, wheel = base
    trial = TRIALS[extra]
    trial.prepare(here)
    with bucket_served() as server:
        variables = {**trial.variables, **(server.environment if trial.serves else {})}
        absent = environment.echelon(here, *trial.words, **variables)
        assert absent.returncode == 2, (absent.stdout, absent.stderr)
        assert f"requires the package {trial.module}, which is not installed" in absent.stderr, absent.stderr
        assert "Traceback" not in absent.stderr and "echelon[" not in absent.stderr
        for name in ("jobs", "runs", "sweeps"):
            shutil.rmtree(here / name, ignore_errors=True)
        other = tmp_path_factory.mktemp(extra) / "environment"
        subprocess.run(["cp", "--archive", "--link", environment.path, other], check=True)
        chosen = Environment(other)
        chosen.install(f"{wheel}[{extra}]")
        done = chosen.echelon(here, *trial.words, **variables)
    assert done.returncode == trial.code, (done.stdout, done.stderr)
    assert trial.says in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert list(here.glob(trial.makes)), sorted(str(path) for path in here.rglob("*") if "cache" not in str(path))
