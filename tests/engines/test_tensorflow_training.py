"""engine=tensorflow trains what native trains, under each distribution strategy."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import await_line, finish, process_of, read_lines, start, write_recipe
from echelon.planner.plan import ParallelPlan
from echelon.runs.run_folder import RunFolder
from training import Row, hashes, masked_trainer, prepare, read_rows, train_rank, with_ranks
from workers import WorkerPool

pytest.importorskip("keras_hub")
pytestmark = pytest.mark.dist

STEPS = 10
TOLERANCE = 1e-4


def train_placed(rank: int, world_size: int, *arguments: Any) -> None:
    """One rank with the variables that a launcher sets."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    train_rank(rank, world_size, *arguments)


def train(row: Row, folder: Path, text: Path, stop_at: int | None = None) -> list[dict[str, Any]]:
    """Train a row in new processes, because TensorFlow's devices are fixed once in each; return its training rows."""
    path, plan = prepare(row, folder, text, STEPS)
    (folder / "run" / "plan.json").write_text(json.dumps(plan.to_dict()))
    pool = WorkerPool(size=row.ranks, seconds=900)
    try:
        pool.run(train_placed, row.ranks, str(path), plan, stop_at, "")
    finally:
        pool.close()
    return [each for each in read_rows(folder / "run") if each["kind"] == "train"]


def find_operations(rank: int, world_size: int, path: str, plan: ParallelPlan) -> set[str]:
    """The operations in the graph that adds up gradients."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with masked_trainer(rank, world_size, path, plan) as trainer:
        graph = trainer.train_step.engine._steps._add_up.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return {node.op for node in nodes}


def by_tensorflow(row: Row, **section: Any) -> Row:
    """The row with the engine, and settings of its section."""
    return replace(row, changes={"engine": "tensorflow", **({"tensorflow": section} if section else {})})


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == STEPS
    assert hashes(found) == hashes(expected)
    for key in ("loss", "grad_norm"):
        differences = [abs(one[key] - other[key]) for one, other in zip(found, expected, strict=True)]
        assert max(differences) < TOLERANCE, (key, differences)


@pytest.fixture(scope="module")
def native(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The whole batch at once in one process, by PyTorch."""
    return train(Row(), tmp_path_factory.mktemp("native"), text)


def test_one_process(text: Path, tmp_path: Path, native: list[dict[str, Any]]) -> None:
    """Uneven targets, several microbatches."""
    assert_equal(train(by_tensorflow(Row(micro_batch=2)), tmp_path, text), native)


@pytest.mark.slow
def test_two_mirrored_copies(text: Path, tmp_path: Path, native: list[dict[str, Any]]) -> None:
    row = by_tensorflow(Row(micro_batch=4), strategy="mirrored", replicas=2)
    assert_equal(train(row, tmp_path, text), native)


@pytest.mark.slow
def test_copies_that_do_not_divide_a_microbatch(text: Path, tmp_path: Path, native: list[dict[str, Any]]) -> None:
    row = by_tensorflow(Row(micro_batch=4), strategy="mirrored", replicas=3)
    assert_equal(train(row, tmp_path, text), native)


@pytest.mark.slow
def test_two_workers(text: Path, tmp_path: Path, native: list[dict[str, Any]]) -> None:
    row = by_tensorflow(with_ranks(Row(), 2, micro_batch=2))
    assert_equal(train(row, tmp_path, text), native)


@pytest.mark.slow
def test_workers_sum_by_a_collective_of_tensorflow(text: Path, tmp_path: Path) -> None:
    path, plan = prepare(by_tensorflow(with_ranks(Row(), 2)), tmp_path, text, STEPS)
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan.to_dict()))
    pool = WorkerPool(size=2, seconds=900)
    try:
        found = pool.run(find_operations, 2, str(path), plan)
    finally:
        pool.close()
    assert all(any(name.startswith("CollectiveReduce") for name in names) for names in found), found


@pytest.mark.slow
def test_a_killed_worker_is_restarted(tmp_path: Path) -> None:
    """The losses are those of a run without a fault, and of native."""
    write_recipe(tmp_path, train={"steps": 30, "log_every": 1})
    arguments = ("train", "recipe.json", "--nproc", "2")
    native = finish(start(*arguments, "run.name=native", "parallel=ddp", cwd=tmp_path), 300)
    assert native.code == 0, native
    job = start(*arguments, "run.name=killed", "engine=tensorflow", cwd=tmp_path)
    run = RunFolder(tmp_path / "runs" / "killed")
    await_line(run.metrics_path, '"step": 7,', job, 300)
    process_of(run, 1).kill()
    ending = finish(job, 400)
    assert ending.code == 0, ending
    assert "restart 1 of" in ending.out + ending.err
    found, expected = (
        [each for each in read_lines(tmp_path / "runs" / name / "metrics.jsonl") if each["kind"] == "train"]
        for name in ("killed", "native")
    )
    assert [each["step"] for each in found] == list(range(1, 31))
    assert hashes(found) == hashes(expected)
    assert max(abs(one["loss"] - other["loss"]) for one, other in zip(found, expected, strict=True)) < TOLERANCE


@pytest.mark.slow
def test_a_run_changes_engines_in_the_middle(text: Path, tmp_path: Path, native: list[dict[str, Any]]) -> None:
    row = Row(micro_batch=4)
    for engine, stop_at in ((row, 3), (by_tensorflow(row), 7), (row, STEPS)):
        found = train(engine, tmp_path, text, stop_at)
    assert_equal(found, native)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma", "qwen3"])
def test_other_families(text: Path, tmp_path: Path, family: str) -> None:
    row = Row(family=family, tied=family != "qwen3", micro_batch=4)
    assert_equal(train(by_tensorflow(row), tmp_path / "tensorflow", text), train(row, tmp_path / "native", text))
