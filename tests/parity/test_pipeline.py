"""Pipelines against one process: the same losses, norms and batches, what each rank holds, and what it sends."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from echelon.learn.model.sharding import local_part
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.memory import estimate_parts
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from tests.cases import slow
from tests.families import microbatch_of, small_config
from tests.parity.training import (
    Row,
    assert_same_curve,
    bounds,
    build_engine,
    check_exact_resume,
    difference,
    train,
    write_recipe,
)
from traffic import TrafficCounter

pytestmark = pytest.mark.dist

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
STEPS = 4


def pipeline_row(family="llama", ranks=2, micro_batch=2, layers=4, **options):
    """A row with a pipeline: keys of `parallel` in `pp`, `schedule` ..., the others of Row."""
    keys = (
        "pp", "schedule", "stages", "dp_shard", "dp_replicate", "tp", "sequence_parallel", "cp", "cp_method", "ep",
        "order",
    )  # fmt: skip
    parallel = {"pp": 2} | {key: options.pop(key) for key in keys if key in options}
    fields = (("n_layer" if family == "gpt2" else "num_hidden_layers", layers),)
    return Row(parallel, ranks, micro_batch, family, fields=fields, **options)


DAILY = [pipeline_row(schedule="interleaved", tied=True), pipeline_row("qwen3", ranks=4, micro_batch=1, dp_shard=2)]
PRODUCTS = [
    pipeline_row(ranks=4, tp=2, tied=True),
    pipeline_row("qwen3", ranks=4, tp=2, schedule="interleaved", sequence_parallel=True),
    pipeline_row("gemma2", ranks=4, tp=2, schedule="zero_bubble", tied=True),
    pipeline_row("granite", ranks=4, tp=2, schedule="gpipe", adapter="lora"),
    pipeline_row(ranks=4, tp=2, order=["tp", "pp"], sequence_parallel=True, tied=True),
    pipeline_row(ranks=4, cp=2, tied=True),
    pipeline_row("qwen3", ranks=4, cp=2, schedule="interleaved", tied=True),
    pipeline_row("gemma2", ranks=4, cp=2, cp_method="ulysses", schedule="zero_bubble", stages=[1, 1, 1, 1]),
    pipeline_row("mixtral", ranks=4, micro_batch=1, dp_shard=2, ep=2),
    pipeline_row("qwen3_moe", ranks=4, micro_batch=1, dp_shard=2, ep=2, schedule="zero_bubble"),
]
ON_EIGHT = [
    pipeline_row(ranks=8, tp=2, dp_replicate=2, micro_batch=1, tied=True),
    pipeline_row("qwen3", ranks=8, tp=2, dp_shard=2, micro_batch=1, sequence_parallel=True, schedule="zero_bubble"),
]
SLOW = [
    *PRODUCTS,
    *(pipeline_row(schedule=each, tied=tied) for each in SCHEDULES for tied in (False, True)),
    *(
        pipeline_row(family, ranks=4, pp=4, schedule=each, tied=True, layers=8)
        for each, family in zip(SCHEDULES, ("gpt2", "gemma2", "qwen3", "llama"), strict=True)
    ),
    *(pipeline_row("mixtral", schedule=each) for each in SCHEDULES),
    *(pipeline_row(adapter="lora", schedule=each) for each in SCHEDULES),
    pipeline_row(adapter="dora", ranks=4, micro_batch=1, dp_shard=2),
    pipeline_row(adapter="qlora"),
    pipeline_row(adapter="whole", tied=True),
    pipeline_row("granite", ranks=4, micro_batch=1, dp_shard=2, tied=True),
    pipeline_row("gpt2", ranks=4, micro_batch=1, dp_replicate=2, tied=True),
    pipeline_row("cohere", ranks=4, micro_batch=1, dp_shard=2, order=["dp_shard", "pp"], tied=True),
    pipeline_row("gemma3_text", stages=[1, 3], schedule="gpipe", checkpointing="full"),
    pipeline_row(schedule="interleaved", checkpointing="full", tied=True),
    pipeline_row(schedule="1f1b", checkpointing="selective"),
    pipeline_row(schedule="zero_bubble", stages=[1, 1, 1, 1]),
    pipeline_row(schedule="interleaved", checkpointing="selective", compile=True),
    pipeline_row("qwen3_moe", ranks=4, micro_batch=1, dp_shard=2),
    replace(pipeline_row(layers=8), changes={"train": {"activation_checkpointing": {"every": 2}}}),
    pipeline_row(precision="bf16", tied=True),
    pipeline_row(precision="bf16", ranks=4, micro_batch=1, dp_replicate=2),
    pipeline_row(precision="fp16", schedule="gpipe"),
    pipeline_row(optimizer="muon", ranks=4, micro_batch=1, dp_shard=2),
    pipeline_row(optimizer="adafactor", tied=True),
    pipeline_row(optimizer="lion", schedule="gpipe", micro_batch=4),
]


@pytest.mark.parametrize("row", [*DAILY, *map(slow, SLOW)], ids=str)
def test_a_pipeline_equals_one_process(workers, references, text, tmp_path, publish, row):
    from tests.parity.test_parity import check

    check(workers, references, text, tmp_path, row, publish)


@pytest.mark.slow
@pytest.mark.parametrize("row", ON_EIGHT, ids=str)
def test_three_axes_equal_one_process(eight_workers, references, text, tmp_path, publish, row):
    from tests.parity.test_parity import check

    check(eight_workers, references, text, tmp_path, row, publish)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["tied gradient not summed", "tied gradient counted twice"])
def test_a_planted_mistake_with_tied_embeddings_turns_rows_red(workers, references, text, tmp_path, mutation):
    row = pipeline_row(tied=True)
    rows = train(workers, row, tmp_path, text, mutation=mutation)
    losses, norms = difference(rows, references(row.reference()))
    assert losses > bounds(row)[0] or norms > bounds(row)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pipeline_row(tied=True),
        pipeline_row(ranks=4, micro_batch=1, dp_shard=2, schedule="interleaved"),
        pipeline_row("gpt2", tied=True, dropout=0.1),
    ],
    ids=str,
)
def test_five_and_five_steps_are_ten_bit_for_bit(workers, text, tmp_path, row):
    check_exact_resume(partial(train, workers, row), tmp_path, text, steps=10)


ALONE = replace(pipeline_row(tied=True), parallel="ddp", ranks=1)
SECOND_HALVES = [
    (pipeline_row(tied=True, ranks=4, tp=2), replace(ALONE, parallel="fsdp", ranks=4)),
    (ALONE, pipeline_row(tied=True, ranks=4, tp=2, schedule="interleaved")),
    (pipeline_row(tied=True, ranks=4, tp=2), ALONE),
    (replace(ALONE, parallel="fsdp", ranks=4), pipeline_row(tied=True, ranks=4, tp=2)),
    (pipeline_row(tied=True), ALONE),
    (ALONE, pipeline_row(tied=True, schedule="interleaved")),
    (pipeline_row(tied=True, ranks=4, micro_batch=1, dp_shard=2), replace(ALONE, parallel="fsdp", ranks=4)),
    (replace(ALONE, parallel="fsdp", ranks=2), pipeline_row(tied=True, ranks=4, pp=4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), SECOND_HALVES, ids=str)
def test_another_plan_goes_on_with_the_same_curve(workers, text, tmp_path, first, second):
    uninterrupted = train(workers, ALONE, tmp_path / "one", text, steps=10)
    train(workers, first, tmp_path / "two", text, steps=10, stop_at=5)
    rows = train(workers, second, tmp_path / "two", text, steps=10)
    assert_same_curve(rows, uninterrupted)


class Sends(TrafficCounter):
    """Counts the calls as well."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.calls[function.__name__.split(".")[0]] += 1
        return super().__torch_dispatch__(function, types, args, kwargs)


def observe_stage(rank, world_size, path, config, plan):
    """(weights by name, elements of live parameters, calls and bytes of sends of a step, those of all-reduces)."""
    engine, _ = build_engine(path, config, plan)
    parts = [local_part(each.detach()) for each in engine.decoder.parameters()]
    weights = {name: local_part(each.detach()).clone() for name, each in engine.decoder.named_parameters()}
    microbatches = [microbatch_of(torch.arange(16).view(2, 8))] * plan.num_microbatches
    engine.rehearse(microbatches[0], plan.num_microbatches, CausalLM())
    # PyTorch's schedules exchange more in their first step.
    engine.forward_backward(0, microbatches, torch.tensor(1.0), CausalLM())
    with Sends() as counter:
        engine.forward_backward(1, microbatches, torch.tensor(1.0), CausalLM())
    return weights, sum(each.numel() for each in parts), counter.calls["send"], counter.bytes["send"]


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "schedule", [pytest.param(each, marks=() if each == "interleaved" else pytest.mark.slow) for each in SCHEDULES]
)
def test_each_rank_holds_and_sends_what_the_docs_say(workers, text, tmp_path, schedule, tied):
    config = small_config("llama", tied, num_hidden_layers=4)
    recipe, shape = write_recipe(Row(), tmp_path, text, steps=4), build_shape(config)
    per_rank, microbatches = (2 if schedule == "interleaved" else 1), 4
    stages = (4 // (2 * per_rank),) * (2 * per_rank)
    plan = ParallelPlan("pp", pp=2, schedule=schedule, stages=stages, num_microbatches=microbatches, micro_batch_size=2)
    found = workers.run(observe_stage, 2, str(recipe), config, plan)
    [(whole, elements, *_)] = workers.run(observe_stage, 1, str(recipe), config, ParallelPlan("ddp"))

    layer, table = shape.num_layer_parameters, shape.num_embedding_parameters
    assert [each[1] for each in found] == [2 * layer + table, 2 * layer + table + shape.hidden_size]
    assert sum(each[1] for each in found) == elements + tied * table
    hidden = 2 * 8 * shape.hidden_size * 4  # sequences, tokens, numbers, bytes
    borders = 2 * per_rank - 1
    # Over each border a rank sends hidden states or gradients, one of the two, for every microbatch.
    for _, _, calls, sent in found:
        assert calls == microbatches * borders + tied
        assert sent == microbatches * borders * hidden + tied * 4 * table
    for weights, *_ in found:
        assert not [name for name, each in weights.items() if not torch.equal(each, whole[name])]
    assert set(itertools.chain(*(each[0] for each in found))) == set(whole)


def measure_memory(rank, world_size, path, config, plan):
    """The memory of a rehearsed step by part, each the largest of all ranks."""
    engine, _ = build_engine(path, config, plan)
    microbatch = microbatch_of(torch.arange(4 * 64).view(4, 64) % 256)
    return engine.rehearse(microbatch, plan.num_microbatches, CausalLM()).memory


@pytest.mark.slow
def test_a_stage_needs_the_memory_of_its_layers_and_of_the_microbatches_it_keeps(workers, text, tmp_path):
    config = small_config("llama", num_hidden_layers=4)
    recipe, shape = str(write_recipe(Row(), tmp_path, text, steps=4)), build_shape(config)
    plan = ParallelPlan(
        "pp", pp=2, schedule="1f1b", stages=(2, 2), num_microbatches=4, micro_batch_size=4, reduce_gradients="last"
    )
    gpipe = replace(plan, schedule="gpipe")
    (first, second), (most, _) = (workers.run(measure_memory, 2, recipe, config, each) for each in (plan, gpipe))
    [alone] = workers.run(measure_memory, 1, recipe, config, ParallelPlan("ddp", num_microbatches=4))
    assert first == second
    last = 2 * shape.num_layer_parameters + shape.num_embedding_parameters + shape.hidden_size
    tables = 2 * 8 * 4  # the frequencies of rotary positions, twice
    assert (first.weights, first.gradients) == (4 * last + tables, 4 * last)
    assert alone.weights == 4 * (2 * last - shape.hidden_size) + tables
    # The first stage keeps two microbatches of half the layers, under GPipe four.
    assert first.activations == pytest.approx(alone.activations, rel=0.05)
    # Beside four times its activations, the last stage keeps the gradients of four losses.
    gradients = 3 * 4 * (4 * 64 * shape.hidden_size + shape.num_embedding_parameters)
    assert most.activations == pytest.approx(2 * alone.activations + gradients, rel=0.05)
    assert first.loss == pytest.approx(alone.loss, rel=0.05)
    planned = estimate_parts(shape, replace(plan, sequence_len=64), "cpu")
    assert (planned.weights, planned.gradients) == (4 * last, 4 * last)
    assert planned.activations == pytest.approx(first.activations, rel=0.15)


def find_poisoned(rank, world_size, path, config, plan, poisoned):
    """Where a pass finds the first value that is not finite, after these weights were made NaN."""
    engine, _ = build_engine(path, config, plan)
    for name, each in engine.decoder.named_parameters():
        if name in poisoned:
            local_part(each.detach()).fill_(torch.nan)
    microbatch = microbatch_of(torch.arange(16).view(2, 8))
    engine.rehearse(microbatch, 4, CausalLM())
    return engine.find_nonfinite(0, microbatch, torch.tensor(1.0), CausalLM())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize(
    ("poisoned", "name"),
    [
        (["model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"], "model.layers.1.mlp.up_proj"),
        (["model.layers.3.self_attn.q_proj.weight"], "model.layers.3.self_attn.q_proj"),
    ],
)
def test_the_first_value_that_is_not_finite_is_found_over_all_stages(workers, text, tmp_path, schedule, poisoned, name):
    recipe = write_recipe(Row(), tmp_path, text, steps=4)
    stages = (1, 1, 1, 1) if schedule == "interleaved" else (2, 2)
    plan = ParallelPlan("pp", pp=2, schedule=schedule, stages=stages, num_microbatches=4, micro_batch_size=2)
    config = small_config("llama", num_hidden_layers=4)
    found = workers.run(find_poisoned, 2, str(recipe), config, plan, poisoned)
    assert min(each for each in found if each is not None).name == name
