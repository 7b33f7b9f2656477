"""Context parallelism: sequences divided between ranks compute what one process computes, and send what docs say."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.learn.distributed.traffic import count_traffic, stop_counting
from echelon.learn.model.parts import find_layers
from echelon.learn.model.sharding import local_part
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from tests.cases import slow
from tests.families import microbatch_of, small_config
from tests.parity.packed import PackedPool
from tests.parity.test_parity import check
from tests.parity.training import (
    Row,
    assert_same_curve,
    bounds,
    build_engine,
    check_exact_resume,
    difference,
    train,
    with_ranks,
    write_recipe,
)

pytestmark = pytest.mark.dist


def divided(cp, method="allgather", ranks=None, **options):
    """A row with sequences divided between `cp` of the ranks."""
    degrees = {name: options.pop(name) for name in ("dp_shard", "dp_replicate", "pp") if name in options}
    row = Row(parallel={"cp": cp, "cp_method": method, **degrees}, **options)
    ranks = ranks or cp
    return with_ranks(row, ranks, micro_batch=options.get("micro_batch", 8 * cp // ranks))


ROWS = [
    divided(2),
    divided(2, "ulysses", family="gemma2", tied=True),
    slow(divided(2, "ulysses")),
    slow(divided(4)),
    slow(divided(4, "ulysses")),  # more ranks than heads of keys and values
    slow(divided(2, family="qwen3")),
    slow(divided(2, "ulysses", family="qwen3")),
    slow(divided(2, family="gemma2", tied=True)),
    slow(divided(2, family="gemma3_text", tied=True)),
    slow(divided(2, family="gpt2", tied=True)),
    slow(divided(2, family="mixtral")),
    slow(divided(2, "ulysses", ranks=4, dp_shard=2)),
    slow(divided(2, ranks=4, dp_shard=2, family="qwen3", micro_batch=2)),
    slow(divided(2, ranks=4, dp_replicate=2)),
    slow(divided(2, ranks=4, pp=2, micro_batch=2)),
    slow(divided(2, "ulysses", ranks=4, pp=2, micro_batch=2, family="gemma2", tied=True)),
    slow(divided(2, adapter="lora")),
    slow(divided(2, "ulysses", ranks=4, dp_shard=2, adapter="dora")),
    slow(divided(2, checkpointing="full")),
    slow(divided(2, checkpointing="selective")),
    slow(divided(2, compile=True)),
    slow(divided(2, compile=True, checkpointing="full")),
    slow(divided(2, "ulysses", compile=True, checkpointing="selective")),
    slow(divided(2, precision="bf16")),
    slow(divided(2, optimizer="muon")),
    divided(2, "ring"),
    slow(divided(4, "ring")),
    slow(divided(2, "ring", family="qwen3")),
    slow(divided(2, "ring", family="gemma3_text", tied=True)),  # windows
    slow(divided(2, "ring", family="mixtral")),
    slow(divided(2, "ring", family="gpt_oss")),  # sinks, and windows
    slow(divided(2, "ring", ranks=4, dp_shard=2, family="qwen3", micro_batch=2)),
    slow(divided(2, "ring", ranks=4, pp=2, micro_batch=2)),
    slow(divided(2, "ring", adapter="lora")),
    slow(divided(2, "ring", checkpointing="full")),
    slow(divided(2, "ring", checkpointing="selective")),
    slow(divided(2, "ring", checkpointing={"mlp_tiles": 3})),
    slow(divided(2, "ring", compile=True)),
    slow(divided(2, "ring", precision="bf16")),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row} {row.parallel['cp_method']}")
def test_divided_sequences_equal_one_process(workers, references, text, tmp_path, publish, row):
    rows, expected = check(workers, references, text, tmp_path, row, publish)
    for key in ("tokens", "target_tokens"):
        assert [each.get(key) for each in rows] == [each.get(key) for each in expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        divided(2),
        divided(2, "ulysses", ranks=4, dp_shard=2),
        divided(2, family="gemma3_text", tied=True),
        divided(4, "ulysses", family="gemma2", tied=True),
        divided(4, "ring"),
        divided(2, "ring", family="gemma3_text", tied=True),
    ],
    ids=lambda row: f"{row} {row.parallel['cp_method']}",
)
def test_packed_documents_equal_one_process(workers, text, tmp_path, row):
    """A document may begin on one rank and end on another."""
    pool = PackedPool(workers, "packed")
    rows = train(pool, row, tmp_path / "divided", text)
    expected = train(pool, row.reference(), tmp_path / "one", text)
    assert_same_curve(rows, expected, bounds(row))


def test_positions_of_a_part_turn_rows_red(workers, references, text, tmp_path):
    row = divided(2)
    rows = train(workers, row, tmp_path, text, mutation="local positions")
    assert difference(rows, references(row.reference()))[0] > bounds(row)[0]


@pytest.mark.slow
def test_the_router_loss_is_that_of_whole_sequences(workers, references, text, tmp_path):
    row = divided(2, family="mixtral")
    losses = [
        [each["router_loss"] for each in rows if each["kind"] == "train"]
        for rows in (train(workers, row, tmp_path, text), references(row.reference()))
    ]
    assert all(losses[1]) and losses[0] == pytest.approx(losses[1], abs=bounds(row)[0])


@pytest.mark.slow
@pytest.mark.parametrize("row", [divided(2), divided(2, "ulysses", ranks=4, dp_shard=2), divided(2, "ring")], ids=str)
def test_five_and_five_steps_are_ten_bit_for_bit(workers, text, tmp_path, row):
    check_exact_resume(partial(train, workers, row), tmp_path, text, steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("other", [Row(), with_ranks(Row("fsdp"), 4)], ids=str)
def test_another_plan_goes_on_with_the_same_curve(workers, text, tmp_path, other):
    whole = train(workers, Row(), tmp_path / "one", text, steps=6)
    for first, second in ((divided(2), other), (other, divided(2, "ulysses"))):
        folder = tmp_path / str(first.ranks)
        train(workers, first, folder, text, steps=6, stop_at=3)
        rows = train(workers, second, folder, text, steps=6)
        assert_same_curve(rows, whole)


class CallCounter(TorchDispatchMode):
    """Counts the calls of each collective inside its block, and the bytes of the tensor that one rank gives or gets."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if function.namespace in ("c10d", "echelon"):
            self.calls[name] += 1
            tensors = [each for each in args[:2] if isinstance(each, torch.Tensor)]
            self.bytes[name] += max(each.numel() * each.element_size() for each in tensors)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["allgather", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_selective_checkpointing_does_not_send_again(workers, text, tmp_path, method):
    plan = ParallelPlan(
        "fsdp+cp", dp_shard=1, cp=2, cp_method=method, reshard_after_forward=True, reduce_gradients="each",
        num_microbatches=1, micro_batch_size=SEQUENCES,
    )  # fmt: skip
    recipe = str(write_recipe(Row(), tmp_path, text, steps=4))
    calls = {}
    for policy in ("none", "selective", "full"):
        found = workers.run(count_context, 2, recipe, replace(plan, activation_checkpointing=policy))[0][0]
        calls[policy] = sum(found.get(name, 0) for name in ("gather", "swap"))
    assert calls["none"] == calls["selective"] < calls["full"]


def count_sent(rank, world_size, path, plan):
    """The bytes that this rank sends in messages to one other rank."""
    meter = count_traffic()
    before = meter.by_route()
    count_context(rank, world_size, path, plan)
    sent = sum(number - before.get(route, 0) for route, number in meter.by_route().items() if route.kind == "send")
    stop_counting()
    return sent


@pytest.mark.parametrize("policy", ["none", pytest.param("full", marks=pytest.mark.slow), "selective"])
def test_a_ring_sends_what_the_page_says(workers, text, tmp_path, policy):
    """Keys and values forward and backward, and their gradients: the formula of docs/context-parallelism.md."""
    plan = ParallelPlan(
        "fsdp+cp", dp_shard=1, cp=2, cp_method="ring", reshard_after_forward=True, reduce_gradients="each",
        num_microbatches=1, micro_batch_size=SEQUENCES, activation_checkpointing=policy,
    )  # fmt: skip
    shape, recipe = build_shape(small_config("llama")), write_recipe(Row(), tmp_path, text, steps=4)
    part = 4 * SEQUENCES * WIDTH // 2 * 2 * shape.num_kv_heads * shape.head_dim
    passes = 4 if policy == "full" else 3
    assert workers.run(count_sent, 2, str(recipe), plan) == [shape.num_layers * passes * part] * 2


WIDTH, SEQUENCES = 16, 2


def count_context(rank, world_size, path, plan):
    """The collectives of a step on this rank, the shapes of its hidden states, and its parameter elements."""
    engine, meshes = build_engine(path, small_config("llama"), plan)
    microbatch = microbatch_of(torch.zeros(SEQUENCES, WIDTH, dtype=torch.int64)).cut(meshes.sequence_part)
    engine.rehearse(microbatch, 1, CausalLM())
    shapes = set()
    for layer in find_layers(engine.decoder):
        layer.register_forward_hook(lambda module, inputs, output: shapes.add(tuple(output.shape)))
    with CallCounter() as counter:
        engine.forward_backward(0, [microbatch] * plan.num_microbatches, torch.tensor(1.0), CausalLM())
    numbers = sum(local_part(each).numel() for each in engine.decoder.parameters())
    return dict(counter.calls), dict(counter.bytes), shapes, numbers


@pytest.mark.parametrize(
    ("cp", "shards", "method"),
    [
        (2, 1, "allgather"),
        pytest.param(2, 1, "ulysses", marks=pytest.mark.slow),
        pytest.param(4, 1, "ulysses", marks=pytest.mark.slow),  # heads of keys and values are sent twice
        pytest.param(2, 2, "allgather", marks=pytest.mark.slow),
    ],
)
def test_a_step_sends_and_holds_what_the_page_says(workers, text, tmp_path, cp, shards, method):
    """The formulas of docs/context-parallelism.md; the rest is what fsdp over all ranks sends."""
    plan = ParallelPlan(
        "fsdp+cp", dp_shard=shards, cp=cp, cp_method=method, reshard_after_forward=True, reduce_gradients="each",
        num_microbatches=3, micro_batch_size=SEQUENCES,
    )  # fmt: skip
    shape, passes = build_shape(small_config("llama")), 2 * 3  # two layers, three microbatches
    tokens, heads, kv = SEQUENCES * WIDTH, shape.num_heads, shape.num_kv_heads
    whole, layers = shape.num_parameters, shape.num_layers * shape.num_layer_parameters
    units = 3 * (shape.num_layers + 2)
    calls = {"_allgather_base_": units + 3 * shape.num_layers, "alltoall_base_": units}
    sent = {"_allgather_base_": 4 * 3 * (whole + layers), "alltoall_base_": 4 * 3 * whole}
    if method == "allgather":
        calls |= {"gather": passes, "swap": passes}
        part = 4 * tokens // cp * 2 * kv * shape.head_dim
        sent |= {"gather": passes * part, "swap": passes * cp * part}
    else:
        repeated = max(kv, cp)  # both are powers of two
        calls["swap"] = 4 * passes
        sent["swap"] = passes * 2 * 4 * tokens // cp * (2 * heads + 2 * repeated) * shape.head_dim
    recipe = write_recipe(Row(), tmp_path, text, steps=4)
    for found in workers.run(count_context, cp * shards, str(recipe), plan):
        assert found[0] == calls
        assert found[1] == sent
        assert found[2] == {(SEQUENCES, WIDTH // cp, shape.hidden_size)}
        assert found[3] == whole // (cp * shards)
