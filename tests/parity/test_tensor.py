"""Tensor and sequence parallelism against one process: training, gradients, checkpoints, memory and traffic."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from echelon.ground.errors import ConfigError
from echelon.learn.distributed.traffic import count_traffic
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.seeds import derive_seed
from echelon.learn.model.sharding import local_part, whole, write_part
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.parallel.tensor import find_divided
from echelon.planner.axes.table import divide_shape
from echelon.planner.axes.tensor import count_repeated
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from tests.cases import slow
from tests.families import microbatch_of, random_batch, small_config
from tests.parity.test_parity import check
from tests.parity.training import (
    LOSS,
    NORM,
    Row,
    assert_same_curve,
    bounds,
    build_engine,
    check_exact_resume,
    difference,
    train,
    write_recipe,
)
from traffic import Sent, TrafficCounter, expect_tensor_traffic

pytestmark = pytest.mark.dist

HEADS = (("num_key_value_heads", 4),)
TP2, SP2 = {"tp": 2}, {"tp": 2, "sequence_parallel": True}
OTHER_FAMILIES = ["glm4", "olmoe", "granitemoe"]
FAMILIES = ["mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "cohere"]

DAILY = [
    Row({"dp_shard": 2, **SP2}, ranks=4, micro_batch=2, family="qwen3"),
    Row(TP2, ranks=2, micro_batch=4, tied=True, adapter="lora"),
]
ROWS = [
    Row(TP2, ranks=2),
    Row(SP2, ranks=2, micro_batch=4),
    Row({"tp": 4}, ranks=4, micro_batch=4, fields=HEADS),
    Row({**SP2, "tp": 4}, ranks=4, micro_batch=4, fields=HEADS),
    Row({**TP2, "dp_replicate": 2}, ranks=4, micro_batch=2, family="gemma2", tied=True),
    Row({**TP2, "dp_shard": 2}, ranks=4, micro_batch=2, tied=True, checkpointing="full"),
    Row({**SP2, "dp_shard": 2}, ranks=4, micro_batch=2, checkpointing="selective", precision="bf16"),
    Row(SP2, ranks=2, micro_batch=4, adapter="lora"),
    Row(TP2, ranks=2, micro_batch=4, adapter="dora"),
    Row({**SP2, "dp_shard": 2}, ranks=4, micro_batch=2, adapter="dora"),
    Row(TP2, ranks=2, micro_batch=4, optimizer="muon"),
    Row({**SP2, "dp_shard": 2}, ranks=4, micro_batch=4, compile=True),
    Row({**TP2, "pp": 2}, ranks=4, micro_batch=2),
    Row({**SP2, "pp": 2}, ranks=4, micro_batch=2, family="qwen3", tied=True),
    Row({**SP2, "cp": 2}, ranks=4, micro_batch=4),
    Row({**TP2, "dp_shard": 2}, ranks=4, micro_batch=4, optimizer="lion"),
    Row(TP2, ranks=2, micro_batch=4, optimizer="adafactor", tied=True),
    Row({**SP2, "dp_shard": 2}, ranks=4, micro_batch=2, optimizer="adafactor", family="qwen3"),
    Row({**TP2, "dp_replicate": 2}, ranks=4, micro_batch=2, optimizer="adafactor", family="qwen2"),
    *[Row(TP2, ranks=2, micro_batch=4, family=family, tied=True) for family in FAMILIES],
    *[Row(SP2, ranks=2, micro_batch=4, family=family) for family in FAMILIES],
    *[Row(TP2, ranks=2, micro_batch=4, family=family) for family in ("olmo2", "phi3", *OTHER_FAMILIES)],
    Row({**SP2, "tp": 4}, ranks=4, micro_batch=4, family="olmo2", fields=HEADS),
    Row({**SP2, "tp": 4}, ranks=4, micro_batch=4, family="phi3", fields=HEADS),
    Row({**SP2, "dp_shard": 2}, ranks=4, micro_batch=2, family="phi3", tied=True, checkpointing="full"),
    Row({**SP2, "dp_shard": 2}, ranks=4, micro_batch=2, family="olmo2", checkpointing="selective"),
    Row({**SP2, "cp": 2}, ranks=4, micro_batch=4, family="phi3"),
    Row({**TP2, "pp": 2}, ranks=4, micro_batch=2, family="glm4"),
    Row(SP2, ranks=2, micro_batch=4, family="phi3", adapter="lora"),
    Row(TP2, ranks=2, micro_batch=4, family="phi3", adapter="dora"),
    Row(SP2, ranks=2, micro_batch=4, family="olmo2", adapter="lora"),
    Row(SP2, ranks=2, micro_batch=4, family="phi3", compile=True),
    Row(SP2, ranks=2, micro_batch=4, family="olmo2", compile=True),
    Row(TP2, ranks=2, micro_batch=4, family="olmo2", compile=True),
    Row(TP2, ranks=2, micro_batch=4, compile=True),
    Row(TP2, ranks=2, micro_batch=4, adapter="lora", compile=True),
    Row(TP2, ranks=2, micro_batch=4, family="gemma2", tied=True, checkpointing="selective", compile=True),
    Row({**TP2, "cp": 2}, ranks=4, micro_batch=4, compile=True),
    Row({**SP2, "cp": 2, "cp_method": "ring"}, ranks=4, micro_batch=4, compile=True),
    Row({**TP2, "pp": 2}, ranks=4, micro_batch=2, compile=True),
    Row(TP2, ranks=2, micro_batch=4, family="phi3", precision="bf16"),
]


@pytest.mark.parametrize("row", [*DAILY, *(slow(row) for row in ROWS)], ids=str)
def test_equals_one_process(workers, references, text, tmp_path, publish, row):
    check(workers, references, text, tmp_path, row, publish)


HSDP = Row({"dp_replicate": 2, "dp_shard": 2, **TP2}, ranks=8, micro_batch=1, tied=True)
HSDP_SP = Row({"dp_replicate": 2, "dp_shard": 2, **SP2}, ranks=8, micro_batch=2, family="qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("row", [HSDP, HSDP_SP], ids=str)
def test_hybrid_sharding_equals_one_process(eight_workers, references, text, tmp_path, publish, row):
    check(eight_workers, references, text, tmp_path, row, publish)


@pytest.mark.slow
def test_norms_of_heads_whose_gradients_are_not_added_up_turn_a_row_red(workers, text, tmp_path):
    """At a high learning rate, because the ranks' norms drift apart slowly, and without an error."""
    row = Row(TP2, ranks=2, family="qwen3", changes={"optim": {"learning_rate": 2e-2, "warmup": 0}})
    expected = train(workers, replace(row, parallel="ddp", ranks=1), tmp_path / "one", text)
    found = [
        difference(train(workers, row, tmp_path / (mutation or "right"), text, mutation=mutation), expected)
        for mutation in ("", "plain norms of heads")
    ]
    assert [losses > LOSS or norms > NORM for losses, norms in found] == [False, True], found


FIRST_AND_SECOND = [
    (Row(SP2, ranks=2, tied=True), Row(tied=True)),
    (Row({**TP2, "dp_shard": 2}, ranks=4, micro_batch=2, tied=True), Row("fsdp", ranks=4, micro_batch=2, tied=True)),
    (Row("fsdp", ranks=4, micro_batch=2, tied=True), Row({**SP2, "dp_shard": 2}, ranks=4, micro_batch=2, tied=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), FIRST_AND_SECOND, ids=str)
def test_a_checkpoint_loads_with_and_without_it(workers, references, text, tmp_path, first, second):
    check_second_half(workers, references, text, tmp_path, first, second)


def check_second_half(workers, references, text, folder, first, second):
    """Two steps of one plan and two of another are those of one process."""
    train(workers, first, folder, text, stop_at=2)
    assert_same_curve(train(workers, second, folder, text), references(second.reference()), bounds(second))


@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_for_bit(workers, text, tmp_path):
    row = Row({**SP2, "dp_shard": 2}, ranks=4, micro_batch=2, family="qwen3", tied=True)
    check_exact_resume(partial(train, workers, row), tmp_path, text, steps=4)


def read_gradients(rank, world_size, path, config, plan):
    """The whole gradients of an adapter whose weights are drawn by name: at the start B is zero, and A has none."""
    engine, _ = build_engine(path, config, plan)
    trained = engine.trained
    for name, parameter in trained.items():
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(derive_seed(1, name)))
        write_part(parameter.detach(), 0.1 * drawn)
    tokens, labels = random_batch()
    engine.forward_backward(0, [microbatch_of(tokens, labels)], (labels >= 0).sum().float(), CausalLM())
    return {name: whole(parameter.grad) for name, parameter in trained.items()}


def compare_gradients(workers, row, folder, text):
    """Check the gradients of two ranks against those of one; returns the names of what is trained."""
    config, path = row.config(), str(write_recipe(row, folder, text, steps=4))
    [expected] = workers.run(read_gradients, 1, path, config, ParallelPlan("ddp"))
    for options in ({}, {"sequence_parallel": True}):
        for found in workers.run(read_gradients, 2, path, config, ParallelPlan("tp", tp=2, **options)):
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=f"{name} {options}")
    return expected.keys()


@pytest.mark.parametrize("family", ["olmo2", "phi3", *(slow(family) for family in OTHER_FAMILIES)])
def test_every_gradient_equals_that_of_one_process(workers, text, tmp_path, family):
    """Of matrices that are several in one, and of norms over all heads, with all weights drawn at random."""
    compare_gradients(workers, Row(family=family), tmp_path, text)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_gradients_of_an_adapter_equal_those_of_one_process(workers, text, tmp_path, adapter):
    names = compare_gradients(workers, Row(adapter=adapter), tmp_path, text)
    assert {name.split(".")[-3] for name in names} >= {"lora_A", "lora_B"}


def count_tensor_traffic(rank, world_size, path, config, plan):
    """What a microbatch sends over each axis, and the parameter elements of this rank."""
    engine, meshes = build_engine(path, config, plan)
    tokens, labels = random_batch()
    microbatch = microbatch_of(tokens, labels)
    engine.rehearse(microbatch, 1, CausalLM())
    axes = {meshes.tp.get_group().group_name: "tp", meshes.shard.get_group("shard").group_name: "shard"}
    meter = count_traffic()
    meter.take()
    with TrafficCounter(axes) as counter:
        engine.forward_backward(0, [microbatch], torch.tensor(1.0), CausalLM())
    sent = meter.take()
    elements = sum(local_part(parameter).numel() for parameter in engine.decoder.parameters())
    return counter.by_axis, elements, tokens.numel(), sent


TRAFFIC = [("llama", 2, 1), ("qwen3", 2, 1), ("gemma2", 2, 1), ("llama", 4, 1), ("llama", 2, 2), ("mixtral", 2, 1)]
TRAFFIC += [("qwen3_moe", 2, 2), ("qwen3_moe", 4, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp", "dp_shard"), TRAFFIC)
def test_parameters_and_traffic_are_those_of_the_table(workers, text, tmp_path, family, tp, dp_shard):
    config = small_config(family, **dict(HEADS))
    path, shape = str(write_recipe(Row(), tmp_path, text, steps=4)), build_shape(config)
    for sequence_parallel in (False, True):
        shards = {"dp_shard": dp_shard, "reduce_gradients": "each", "reshard_after_forward": True}
        plan = ParallelPlan("tp", tp=tp, sequence_parallel=sequence_parallel, **shards)
        part = divide_shape(shape, plan)
        for found in workers.run(count_tensor_traffic, tp * dp_shard, path, config, plan):
            by_axis, elements, num_tokens, counted = found
            assert elements == part.num_parameters / dp_shard
            over_tp = {kind: sent for (axis, kind), sent in by_axis.items() if axis == "tp"}
            assert over_tp == expect_tensor_traffic(plan, shape, num_tokens)
            over_shards = {kind: sent.bytes for (axis, kind), sent in by_axis.items() if axis == "shard"}
            layers = shape.num_layers * part.num_layer_parameters
            sharded = {"all_gather": 4 * (part.num_parameters + layers), "all_to_all": 4 * part.num_parameters}
            assert over_shards == ({} if dp_shard == 1 else sharded)
            sizes = {"tp": tp, "shard": dp_shard}
            rings = (
                (1 + (kind == "all_reduce")) * (1 - 1 / sizes[axis]) * sent.bytes
                for (axis, kind), sent in by_axis.items()
            )
            assert counted == pytest.approx(sum(rings))


@pytest.mark.parametrize(("policy", "repeated"), [("selective", (0, 0)), slow("full", (2, 3))])
def test_recomputed_layers_repeat_what_the_plan_counts(workers, text, tmp_path, policy, repeated):
    """An all-reduce is an all-gather and a reduce-scatter. The last sum of a layer is not repeated."""
    config = small_config("llama", **dict(HEADS))
    path, shape = str(write_recipe(Row(), tmp_path, text, steps=4)), build_shape(config)
    for sequence_parallel, number in zip((False, True), repeated, strict=True):
        plan = ParallelPlan("tp", tp=2, sequence_parallel=sequence_parallel, activation_checkpointing=policy)
        once = {kind: sent.calls for kind, sent in expect_tensor_traffic(plan, shape, 1).items()}
        for by_axis, *_ in workers.run(count_tensor_traffic, 2, path, config, plan):
            again = {kind: by_axis["tp", kind].calls - calls for kind, calls in once.items()}
            halves = sum((1 + (kind == "all_reduce")) * calls for kind, calls in again.items())
            assert halves == shape.num_layers * number == shape.num_layers * count_repeated(plan)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "gpt2"}, "declares no tensor-parallel plan for gpt2"),
        ({"family": "cohere", "use_qk_norm": True}, "leaves out layers.0.self_attn.q_norm.weight"),
        ({"family": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise of mixtral would be other noise"),
        ({"family": "deepseek_v3"}, r"has layers\.1\.mlp\.(gate|shared_experts\.down_proj) beside its experts"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        find_divided(build_on_meta(load_config(small_config(**fields))))


def test_every_style_of_a_plan_is_in_the_table():
    for family in ("llama", *FAMILIES):
        model = build_on_meta(load_config(small_config(family)))
        names = [f"layers.{layer}.{block}" for layer, block in itertools.product(range(2), ("self_attn", "mlp"))]
        assert {name.rpartition(".")[0] for name in find_divided(model)} == set(names)


def test_what_is_counted_for_a_layer_of_two_ranks():
    """By hand: 8 tokens of 64 numbers in fp32 are 2,048 bytes; 2 layers, whose norms have 64 weights each."""
    shape = build_shape(small_config("llama"))
    assert expect_tensor_traffic(ParallelPlan("tp", tp=2), shape, 8) == {"all_reduce": Sent(12, 10 * 2048 + 96)}
    assert expect_tensor_traffic(ParallelPlan("tp", tp=2, sequence_parallel=True), shape, 8) == {
        "all_gather": Sent(10, 10 * 2048),
        "reduce_scatter": Sent(9, 9 * 2048),
        "all_reduce": Sent(8, 2048 + 96 + 5 * 256),
    }
