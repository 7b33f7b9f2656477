"""Evaluation, generation and the comparison of a merge, with a model that several processes hold together."""

import json
from dataclasses import asdict
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from echelon.learn.answers.sampling import Sampling
from echelon.learn.checkpoint.export import export_run
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.model.adapters import merged_weight
from echelon.learn.model.sharding import local_part
from echelon.learn.opened import OpenedModel, open_model
from echelon.planner.plan import ParallelPlan
from echelon.tools.inference.evaluate import evaluate_model, evaluate_task
from echelon.tools.inference.generate import generate_samples
from echelon.tools.inference.merge import compare_merged, merge_run
from tests.cases import slow
from tests.families import load_run_model
from tests.parity.test_evaluation import PROMPTS, train
from tests.parity.training import Row

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
TASK = [
    {"context": "def add(", "choices": ["a, b", "x"], "answer": 0},
    {"context": "x", "choices": ["y", "z"], "answer": 1},
]


def measure(rank, world_size, target, data, task):
    """Everything that `eval` and `generate` compute, on one of several ranks."""
    torch.manual_seed(rank)  # nothing may depend on the state of a rank
    team = Runtime(rank, world_size, rank, world_size, CPU, "gloo")
    result = evaluate_model(target, data, team=team)
    sampling = Sampling(max_tokens=10, num_samples=2, seed=3, stop=("\n",))
    samples = [asdict(each) for each in generate_samples(target, PROMPTS, sampling, batch_size=3, team=team)]
    return result, samples, evaluate_task(target, task, team=team) if find_spec("lm_eval") else None


def ask(rank, world_size, target):
    """What a script computes with an opened model: answers, their loss, and the sum of their log-probabilities."""
    opened = open_model(target)
    rollouts = opened.generate([[5, 6, 7], [8]], Sampling(max_tokens=6, num_samples=2, seed=3))
    result, scores = opened.evaluate([rollouts.batch()]), opened.log_probabilities(rollouts.batch())
    drawn = sum(float(each.sum()) for each in rollouts.log_probabilities)
    return rollouts.answers, result.loss, result.num_targets, sum(float(each.sum()) for each in scores), drawn


def numbers(result):
    """The numbers among some metrics, by name."""
    return {key: each for key, each in result.items() if isinstance(each, int | float)}


def count_held(rank, world_size, run):
    """The numbers that this rank holds of a run's model, and those of the whole model."""
    model = OpenedModel(run, None, Runtime(rank, world_size, rank, world_size, CPU, "gloo")).model
    return sum(local_part(each).numel() for each in model.parameters()), sum(
        each.numel() for each in model.parameters()
    )


def compare(rank, world_size, run, out):
    """The comparison of a merge on one of several ranks."""
    return compare_merged(run, out, None, Runtime(rank, world_size, rank, world_size, CPU, "gloo"))


def trained(workers, row, folder, text):
    """Train a run for a few steps in one process, with the files that adapters need."""
    run = train(workers, row, folder, text, optim={"learning_rate": 3e-2})
    (run / "plan.json").write_text(json.dumps(ParallelPlan("ddp").to_dict()))
    return run


@pytest.mark.parametrize("kind", ["full", *(slow(name) for name in ("qlora", "dora", "bf16 folder"))])
def test_several_processes_measure_what_one_does(workers, text, tmp_path, kind):
    run = trained(workers, Row(adapter="full" if "folder" in kind else kind), tmp_path, text)
    target, data = run, None
    if "folder" in kind:
        target, data = export_run(run, tmp_path / "out", "bf16"), tmp_path / "long.txt"
    task = tmp_path / "task.jsonl"
    task.write_text("".join(json.dumps(each) + "\n" for each in TASK))
    [(loss, samples, accuracy)] = workers.run(measure, 1, target, data, task)
    assert loss["loss"] > 0 and loss["tokens"] > 1000 and len({each["text"] for each in samples}) > 2
    for world_size in (2, 3):
        for found in workers.run(measure, world_size, target, data, task):
            for ours, theirs in zip(
                (found[0], *found[0]["sets"].values()), (loss, *loss["sets"].values()), strict=True
            ):
                assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-12), world_size
            assert found[1] == samples and found[2] == accuracy


def test_an_opened_model_answers_as_on_one_process(workers, text, tmp_path):
    run = trained(workers, Row(), tmp_path, text)
    [(answers, loss, count, scored, drawn)] = workers.run(ask, 1, run)
    assert len(set(answers)) > 1 and count == sum(map(len, answers))
    assert (scored, -loss * count) == pytest.approx((drawn, drawn), abs=1e-3)
    for found in workers.run(ask, 2, run):
        assert found[0] == answers and found[2] == 2 * count
        assert (found[1], found[3]) == pytest.approx((loss, scored), rel=1e-6)


def test_each_process_holds_its_share(workers, text, tmp_path):
    run = trained(workers, Row(adapter="qlora"), tmp_path, text)
    for held, whole in workers.run(count_held, 3, run):
        assert held < 0.4 * whole


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "pissa"])
def test_a_merge_is_compared_by_several_processes(workers, text, tmp_path, method):
    run = trained(workers, Row(adapter=method), tmp_path, text)
    merge_run(run, tmp_path / "merged", "bf16", None)
    live = load_run_model(run, CPU)
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").named_parameters())
    assert all(torch.equal(merged_weight(live, name).bfloat16(), each) for name, each in merged.items())
    [alone] = workers.run(compare, 1, run, tmp_path / "merged")
    assert alone.tokens > 200 and 0 < alone.kl < 1e-2
    assert json.loads((tmp_path / "merged" / "merge.json").read_text()) == asdict(alone)
    for world_size in (2, 3):
        for found in workers.run(compare, world_size, run, tmp_path / "merged"):
            assert numbers(asdict(found)) == pytest.approx(numbers(asdict(alone)), rel=1e-6)
