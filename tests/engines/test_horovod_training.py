"""engine=horovod trains what native trains: the same losses, batches, faults and checkpoints, under every launcher."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.planner.plan import ParallelPlan
from tests.dist.command import LAUNCHER_KEYS, read_lines, write_recipe
from tests.parity.training import Row, hashes, prepare, read_rows, train_rank, with_ranks
from tests.workers import run_in_new_processes

pytest.importorskip("horovod")
pytestmark = pytest.mark.dist

STEPS = 10
TOLERANCE = 1e-5


def train_placed(rank: int, world_size: int, port: int, *arguments: Any) -> None:
    """One rank with the variables that a launcher sets."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train_rank(rank, world_size, *arguments)


def train(row: Row, folder: Path, text: Path, stop_at: int | None = None) -> list[dict[str, Any]]:
    """Train a row in new processes, because Horovod starts once in each; return its training rows."""
    path, plan = prepare(row, folder, text, STEPS)
    write_plan(folder, plan)
    run_in_new_processes(train_placed, row.ranks, 1, str(path), plan, stop_at, "", seconds=600)
    return [each for each in read_rows(folder / "run") if each["kind"] == "train"]


def write_plan(folder: Path, plan: ParallelPlan) -> None:
    (folder / "run" / "plan.json").write_text(json.dumps(plan.to_dict()))


def by(engine: str, row: Row, **section: Any) -> Row:
    """The row with an engine."""
    return replace(row, changes={"engine": engine, **({engine: section} if section else {})})


def largest(first: list[dict[str, Any]], second: list[dict[str, Any]], key: str) -> float:
    return max(abs(one[key] - other[key]) for one, other in zip(first, second, strict=True))


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = TOLERANCE) -> None:
    assert len(found) == STEPS
    assert hashes(found) == hashes(expected)
    assert largest(found, expected, "loss") < tolerance
    assert largest(found, expected, "grad_norm") < tolerance


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_and_norms_are_those_of_native(text: Path, tmp_path: Path, ranks: int) -> None:
    """Uneven targets and several microbatches; against DDP, and a single process that takes the whole batch."""
    row = with_ranks(Row(), ranks, micro_batch=1)
    found = train(by("horovod", row), tmp_path / "horovod", text)
    native = train(row, tmp_path / "native", text)
    assert_equal(found, native)
    assert_equal(found, train(row.reference(), tmp_path / "single", text))
    for one, other in zip(found[2:], native[2:], strict=True):  # a run sends more before its first steps
        assert one["sent_bytes"] == pytest.approx(other["sent_bytes"])


@pytest.mark.slow
def test_small_groups_and_tied_weights_change_nothing(text: Path, tmp_path: Path) -> None:
    row = with_ranks(Row(family="gpt2", tied=True, checkpointing="full"), 2, micro_batch=2)
    grouped = by("horovod", row)
    variables = {"HOROVOD_FUSION_THRESHOLD": str(2**20), "HOROVOD_CYCLE_TIME": "5"}
    grouped = replace(grouped, changes={**grouped.changes, "launch": {"env": variables}})
    assert_equal(train(grouped, tmp_path / "horovod", text), train(row, tmp_path / "native", text))


@pytest.mark.slow
def test_fp16_rounds_what_is_sent(text: Path, tmp_path: Path) -> None:
    row = with_ranks(Row(), 2, micro_batch=2)
    found = train(by("horovod", row, compression="fp16"), tmp_path / "horovod", text)
    expected = train(row, tmp_path / "native", text)
    assert_equal(found, expected, 2e-3)
    assert largest(found, expected, "grad_norm") > TOLERANCE
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(row.config() | {"vocab_size": 256})))
    saved = 2 * sum(each.numel() for each in model.parameters())  # of a ring of two, in which a rank sends all once
    assert expected[-1]["sent_bytes"] - found[-1]["sent_bytes"] == pytest.approx(saved)


@pytest.mark.slow
def test_a_run_changes_engines_in_the_middle(text: Path, tmp_path: Path) -> None:
    row = with_ranks(Row(), 2, micro_batch=2)
    expected = train(row, tmp_path / "native", text)
    for engine, stop_at in (("native", 3), ("horovod", 7), ("native", STEPS)):
        found = train(by(engine, row), tmp_path / "mixed", text, stop_at)
    assert_equal(found, expected)


LAUNCHERS = {
    "echelon": ("-m", "echelon", "train", "recipe.json", "--nproc", "2"),
    "horovodrun": ("horovodrun", "--gloo", "-np", "2", sys.executable, "-m", "echelon", "train", "recipe.json"),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "echelon", "train",
               "recipe.json"),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29617", "-m", "echelon",
                 "train", "recipe.json"),
}  # fmt: skip


def run(launcher: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train the recipe of a folder under a launcher."""
    command = list(LAUNCHERS[launcher])
    if command[0] == "-m":
        command = [sys.executable, *command]
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_KEYS}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [*command, *overrides], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_one_job(tmp_path: Path, launcher: str) -> None:
    """Under all but horovodrun, Horovod would start one job in each process."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    write_recipe(tmp_path)
    for name, engine, by_launcher in (("native", "native", "echelon"), ("horovod", "horovod", launcher)):
        ending = run(by_launcher, tmp_path, f"run.name={name}", f"engine={engine}", "parallel=ddp")
        assert ending.returncode == 0, ending
    rows = [read_lines(tmp_path / "runs" / name / "metrics.jsonl") for name in ("horovod", "native")]
    found, expected = ([each for each in lines if each["kind"] == "train"] for lines in rows)
    assert [each["step"] for each in found] == [1, 2, 3, 4, 5, 6]
    assert hashes(found) == hashes(expected)
    assert largest(found, expected, "loss") < TOLERANCE
