"""engine=tensorflow trains what native trains, under each distribution strategy."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from echelon.cli.api.models import export
from echelon.foreign.tensorflow.steps import WEIGHTS
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.plan import ParallelPlan
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import await_line, finish, process_of, read_lines, start, write_recipe
from tests.parity.training import Row, hashes, masked_trainer, prepare, read_rows, train_rank, with_ranks
from tests.workers import run_in_new_processes

pytest.importorskip("keras_hub")
pytestmark = pytest.mark.dist

STEPS = 10
TOLERANCE = 1e-4


def place_rank(rank: int, world_size: int) -> None:
    """Set the variables that a launcher sets."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def train_placed(rank: int, world_size: int, *arguments: Any) -> None:
    """One rank of a run."""
    place_rank(rank, world_size)
    train_rank(rank, world_size, *arguments)


def run_ranks(
    function: Callable[..., Any], row: Row, folder: Path, text: Path, *arguments: Any, steps: int = STEPS
) -> list[Any]:
    """Call `function(rank, world_size, path, plan, *arguments)` on the ranks of a row, with the path of its recipe.

    In new processes, because TensorFlow's devices are fixed once in each.
    """
    path, plan = prepare(row, folder, text, steps)
    (folder / "run" / "plan.json").write_text(json.dumps(plan.to_dict()))
    return run_in_new_processes(function, row.ranks, str(path), plan, *arguments, seconds=900)


def train(row: Row, folder: Path, text: Path, stop_at: int | None = None) -> list[dict[str, Any]]:
    """Train a row in new processes; return its training rows."""
    run_ranks(train_placed, row, folder, text, stop_at, "")
    return [each for each in read_rows(folder / "run") if each["kind"] == "train"]


def find_operations(rank: int, world_size: int, path: str, plan: ParallelPlan) -> set[str]:
    """The operations in the graph that adds up gradients."""
    place_rank(rank, world_size)
    with masked_trainer(rank, world_size, path, plan) as trainer:
        graph = trainer.train_step.learner.engine.steps.add_up.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return {node.op for node in nodes}


def logits_of(rank: int, world_size: int, path: str, plan: ParallelPlan, ids: list[int]) -> list[list[float]]:
    """Train a rank; return the logits of its live model after the last of some ids."""
    place_rank(rank, world_size)
    with masked_trainer(rank, world_size, path, plan) as trainer:
        trainer.fit()
        with trainer.train_step.learner.engine.evaluation(CausalLM()) as evaluation:
            return evaluation.next_token_logits(torch.tensor([ids]), torch.tensor([len(ids) - 1])).tolist()


def find_nan(rank: int, world_size: int, path: str, plan: ParallelPlan) -> tuple[float, float, str, bool]:
    """The loss, the norm and the finding of a step with a weight that is not a number, which changes no other one."""
    place_rank(rank, world_size)
    with masked_trainer(rank, world_size, path, plan) as trainer:
        engine, microbatches = trainer.train_step.learner.engine, trainer.train_step.loader.batch(0).microbatches
        weights = {name: each.numpy() for name, each in engine.weights().items()}
        weights["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
        engine.steps.write(WEIGHTS, weights)
        sums, norm = engine.forward_backward(0, microbatches, torch.ones(()), CausalLM()), engine.clip(1.0)
        engine.step(1e-3, torch.zeros((), dtype=torch.bool))
        finding = engine.find_nonfinite(0, microbatches[0], torch.ones(()), CausalLM())
        kept = all(torch.equal(each.nan_to_num(), torch.from_numpy(weights[name]).nan_to_num())
                   for name, each in engine.weights().items())  # fmt: skip
        return float(sums.loss), float(norm), finding.describe(), kept


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


@pytest.mark.parametrize(
    ("row", "section"),
    [
        pytest.param(Row(micro_batch=2), {}, id="one process"),
        pytest.param(Row(micro_batch=4), {"replicas": 2}, id="two copies", marks=pytest.mark.slow),
        pytest.param(Row(micro_batch=4), {"replicas": 3}, id="not dividing a microbatch", marks=pytest.mark.slow),
        pytest.param(with_ranks(Row(), 2, micro_batch=2), {}, id="two workers", marks=pytest.mark.slow),
    ],
)
def test_native_losses(text: Path, tmp_path: Path, native: list[dict[str, Any]], row: Row, section: Any) -> None:
    """Uneven targets, several microbatches; mirrored copies, and processes."""
    strategy = {"strategy": "mirrored"} if section else {}
    assert_equal(train(by_tensorflow(row, **strategy, **section), tmp_path, text), native)


@pytest.mark.slow
def test_workers_sum_by_a_collective_of_tensorflow(text: Path, tmp_path: Path) -> None:
    found = run_ranks(find_operations, by_tensorflow(with_ranks(Row(), 2)), tmp_path, text)
    assert all(any(name.startswith("CollectiveReduce") for name in names) for names in found), found


@pytest.mark.slow
def test_a_killed_process_is_restarted(tmp_path: Path) -> None:
    """The losses are those of a run without a fault, and of native."""
    write_recipe(tmp_path, train={"steps": 30, "log_every": 1})
    arguments = ("train", "recipe.json", "--nproc", "2")
    finish(start(*arguments, "run.name=native", "parallel=ddp", cwd=tmp_path), 300).succeeded()
    job = start(*arguments, "run.name=killed", "engine=tensorflow", cwd=tmp_path)
    run = RunFolder(tmp_path / "runs" / "killed")
    await_line(run.metrics_path, '"step": 7,', job, 300)
    process_of(run, 1).kill()
    ending = finish(job, 400).succeeded()
    assert "restart 1 of" in ending.out + ending.err
    assert_same_run(tmp_path, "killed")


def assert_same_run(folder: Path, name: str) -> None:
    """A run of 30 steps has the batches and the losses of the run `native` beside it."""
    found, expected = (
        [each for each in read_lines(folder / "runs" / each / "metrics.jsonl") if each["kind"] == "train"]
        for each in (name, "native")
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
def test_an_export_has_the_logits_of_the_live_model_in_transformers(text: Path, tmp_path: Path) -> None:
    ids = list(b"def read(")
    live = run_ranks(logits_of, by_tensorflow(with_ranks(Row(), 2)), tmp_path, text, ids, steps=3)
    assert live[0] == live[1]
    export(tmp_path / "run", tmp_path / "exported")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(torch.tensor([ids])).logits[0, -1]
    assert (logits - torch.tensor(live[0][0])).abs().max() < TOLERANCE


@pytest.mark.slow
def test_a_value_that_is_not_a_number_is_found_and_not_applied(text: Path, tmp_path: Path) -> None:
    found = run_ranks(find_nan, by_tensorflow(with_ranks(Row(), 2)), tmp_path, text, steps=3)
    for loss, norm, finding, kept in found:
        assert math.isnan(loss) and math.isnan(norm) and kept
        assert finding == "the output of model.layers.1"
