"""engine=tensorflow trains what native trains, under each distribution strategy."""

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.cli.api.models import export
from echelon.foreign.tensorflow.steps import GRADIENTS, WEIGHTS
from echelon.foreign.tensorflow.update import MOMENTS
from echelon.learn.distributed.objects import gather_objects
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


def find_devices(rank: int, world_size: int, path: str, plan: ParallelPlan) -> dict[str, int] | None:
    """How many bytes of weights, gradients and moments each TensorFlow device has, as the coordinator sees it."""
    place_rank(rank, world_size)
    with masked_trainer(rank, world_size, path, plan) as trainer:
        model = trainer.train_step.learner.engine.steps.model
        if model is None:
            return None
        found: dict[str, int] = {}
        for key in (WEIGHTS, GRADIENTS, *MOMENTS):
            for each in (each for group in model.find(key).values() for each in group):
                place = each.device.removesuffix("/replica:0/task:0/device:CPU:0")
                found[place] = found.get(place, 0) + 4 * each.shape.num_elements()
        return found


def stop_a_worker(rank: int, world_size: int, path: str, plan: ParallelPlan, call: str) -> float:
    """The seconds that 2 s of sleep take on rank 0 while it directs rank 1, which is stopped for 8 s."""
    place_rank(rank, world_size)
    with masked_trainer(rank, world_size, path, plan) as trainer:
        model = trainer.train_step.learner.engine.steps.model
        pids = gather_objects(os.getpid(), dist.group.WORLD)
        if model is None:
            return 2.0
        rows = np.ones((1, 2, trainer.train_step.loader.batch(0).microbatches[0].input_ids.shape[1]), np.int32)
        calls: dict[str, Callable[[], object]] = {
            "accumulate": lambda: model.accumulate([(rows, rows)] * world_size, 1.0),
            "norm": model.norm,
            "update": lambda: model.update(1e-3, 1),
            "read": lambda: model.decoder.read(model.find(WEIGHTS)),
        }
        for each in calls.values():
            each()
        continued = subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {pids[1]}"])
        os.kill(pids[1], signal.SIGSTOP)
        directing = threading.Thread(target=calls[call])
        directing.start()
        began = time.monotonic()
        for _ in range(20):
            time.sleep(0.1)
        taken = time.monotonic() - began
        directing.join()
        continued.wait()
        return taken


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
@pytest.mark.parametrize(("ranks", "servers"), [(1, 1), (2, 1), (3, 2)])
def test_parameter_servers(text: Path, tmp_path: Path, native: list[dict[str, Any]], ranks: int, servers: int) -> None:
    row = by_tensorflow(with_ranks(Row(), ranks, micro_batch=2), strategy="parameter_server", servers=servers)
    assert_equal(train(row, tmp_path, text), native)


@pytest.mark.slow
def test_weights_gradients_and_moments_are_on_the_server(text: Path, tmp_path: Path) -> None:
    row = by_tensorflow(with_ranks(Row(), 2), strategy="parameter_server")
    found, elsewhere = run_ranks(find_devices, row, tmp_path, text)
    assert elsewhere is None and set(found) == {"/job:ps"}
    config = Row().config() | {"vocab_size": 256}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert found["/job:ps"] == 4 * 4 * sum(each.numel() for each in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("call", ["accumulate", "norm", "update", "read"])
def test_threads_of_the_coordinator_run_while_a_worker_is_stopped(text: Path, tmp_path: Path, call: str) -> None:
    """One of them finds that the run hangs. The worker is also one of two servers."""
    row = by_tensorflow(with_ranks(Row(), 2), strategy="parameter_server", servers=2)
    taken, _ = run_ranks(stop_a_worker, row, tmp_path, text, call)
    assert taken < 5, "the interpreter was locked until the worker went on"


@pytest.mark.slow
def test_workers_sum_by_a_collective_of_tensorflow(text: Path, tmp_path: Path) -> None:
    found = run_ranks(find_operations, by_tensorflow(with_ranks(Row(), 2)), tmp_path, text)
    assert all(any(name.startswith("CollectiveReduce") for name in names) for names in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "victim"), [("multi_worker", 1), ("parameter_server", 1), ("parameter_server", 0)]
)
def test_a_killed_process_is_restarted(tmp_path: Path, strategy: str, victim: int) -> None:
    """A worker, and the coordinator with the server. The losses are those of a run without a fault, and of native."""
    write_recipe(tmp_path, train={"steps": 30, "log_every": 1})
    arguments = ("train", "recipe.json", "--nproc", "2")
    native = finish(start(*arguments, "run.name=native", "parallel=ddp", cwd=tmp_path), 300)
    assert native.code == 0, native
    settings = ("engine=tensorflow", f"tensorflow.strategy={strategy}")
    job = start(*arguments, "run.name=killed", *settings, cwd=tmp_path)
    run = RunFolder(tmp_path / "runs" / "killed")
    await_line(run.metrics_path, '"step": 7,', job, 300)
    process_of(run, victim).kill()
    ending = finish(job, 400)
    assert ending.code == 0, ending
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
def test_a_signal_stops_parameter_servers_and_the_command_resumes(tmp_path: Path) -> None:
    write_recipe(tmp_path, train={"steps": 30, "log_every": 1})
    arguments = ("train", "recipe.json", "--nproc", "2")
    assert finish(start(*arguments, "run.name=native", "parallel=ddp", cwd=tmp_path), 300).code == 0
    settings = ("run.name=stopped", "engine=tensorflow", "tensorflow.strategy=parameter_server")
    job = start(*arguments, *settings, cwd=tmp_path)
    await_line(tmp_path / "runs" / "stopped" / "metrics.jsonl", '"step": 7,', job, 300)
    job.send_signal(signal.SIGTERM)
    assert finish(job, 300).code == 3
    ending = finish(start(*arguments, *settings, cwd=tmp_path), 400)
    assert ending.code == 0, ending
    assert_same_run(tmp_path, "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_a_run_changes_engines_in_the_middle(
    text: Path, tmp_path: Path, native: list[dict[str, Any]], strategy: str
) -> None:
    row = Row(micro_batch=4)
    for engine, stop_at in ((row, 3), (by_tensorflow(row, strategy=strategy), 7), (row, STEPS)):
        found = train(engine, tmp_path, text, stop_at)
    assert_equal(found, native)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_an_export_has_the_logits_of_the_live_model_in_transformers(text: Path, tmp_path: Path, strategy: str) -> None:
    ids = list(b"def read(")
    live = run_ranks(logits_of, by_tensorflow(with_ranks(Row(), 2), strategy=strategy), tmp_path, text, ids, steps=3)
    assert live[0] == live[1]
    export(tmp_path / "run", tmp_path / "exported")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(torch.tensor([ids])).logits[0, -1]
    assert (logits - torch.tensor(live[0][0])).abs().max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_a_value_that_is_not_a_number_is_found_and_not_applied(text: Path, tmp_path: Path, strategy: str) -> None:
    found = run_ranks(find_nan, by_tensorflow(with_ranks(Row(), 2), strategy=strategy), tmp_path, text, steps=3)
    for loss, norm, finding, kept in found:
        assert math.isnan(loss) and math.isnan(norm) and kept
        assert finding == "the output of model.layers.1"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma", "qwen3"])
def test_other_families(text: Path, tmp_path: Path, family: str) -> None:
    row = Row(family=family, tied=family != "qwen3", micro_batch=4)
    assert_equal(train(by_tensorflow(row), tmp_path / "tensorflow", text), train(row, tmp_path / "native", text))
