"""What each rank of every plan holds, sends and needs: the formulas of the docs, in real processes.

A plan that computes everything everywhere would pass a test of losses. Adapters, tied weights, packed documents and
sequence parallelism in detail are in the tests of each technique.
"""

from dataclasses import astuple, replace

import pytest
import torch

from echelon.learn.model.sharding import local_part
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.axes.table import divide_shape
from echelon.planner.memory import estimate_parts
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from tests.families import microbatch_of, small_config
from tests.parity.training import Row, build_engine, write_recipe
from traffic import Sent, TrafficCounter, expect_tensor_traffic

pytestmark = pytest.mark.dist

SEQUENCES, LENGTH, MICROBATCHES = 4, 64, 4
RESHARDED = {"reshard_after_forward": True, "reduce_gradients": "each"}


def plan_of(**options):
    """A plan of these degrees, with the switches that the planner gives it."""
    pp, cp = options.get("pp", 1), options.get("cp", 1)
    if pp > 1:
        schedule = options.setdefault("schedule", "1f1b")
        count = pp * (2 if schedule == "interleaved" else 1)
        options |= {"stages": (4 // count,) * count, "reduce_gradients": "last"}
    elif options.get("tp", 1) * options.get("dp_shard", 1) * cp > 1:
        options |= RESHARDED
    if cp > 1:
        options.setdefault("cp_method", "allgather")
    return ParallelPlan("plan", num_microbatches=MICROBATCHES, micro_batch_size=SEQUENCES, **options)


def describe(plan):
    """The degrees above 1, for the name of a test."""
    degrees = [f"{name}{value}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
               if (value := getattr(plan, name)) > 1]  # fmt: skip
    extras = [plan.schedule, plan.cp_method, "sp" if plan.sequence_parallel else None]
    return "-".join([*degrees, *(each for each in extras if each)])


DAILY = plan_of(pp=2, tp=2)
PLANS = [
    plan_of(tp=2),
    plan_of(tp=4),
    plan_of(tp=2, sequence_parallel=True),
    *(plan_of(pp=2, schedule=each) for each in ("gpipe", "1f1b", "interleaved", "zero_bubble")),
    plan_of(pp=4),
    plan_of(tp=2, dp_shard=2),
    plan_of(tp=2, dp_replicate=2),
    plan_of(tp=2, dp_shard=2, sequence_parallel=True),
    plan_of(pp=2, dp_shard=2),
    plan_of(pp=2, dp_replicate=2),
    plan_of(pp=2, tp=2, schedule="interleaved"),
    plan_of(pp=2, tp=2, sequence_parallel=True),
    plan_of(cp=2, dp_shard=2),
    plan_of(cp=2, dp_replicate=2, cp_method="ulysses"),
    plan_of(cp=2, tp=2),
    plan_of(cp=2, pp=2),
    plan_of(cp=2, pp=2, schedule="interleaved"),
]
ON_EIGHT = [
    plan_of(tp=2, pp=2, dp_shard=2),
    plan_of(tp=2, pp=2, dp_replicate=2, sequence_parallel=True),
    plan_of(dp_replicate=2, dp_shard=2, tp=2),
]
EXPERTS = [plan_of(dp_shard=2, ep=2), plan_of(dp_shard=4, ep=2), plan_of(cp=2, dp_shard=2, ep=2)]


def observe(rank, world_size, path, config, plan):
    """This rank's place, its parameter elements, what it sends over each axis in a step, and the largest memory."""
    engine, meshes = build_engine(path, config, plan)
    tokens = torch.randint(0, 256, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(meshes.data_rank))
    microbatch = microbatch_of(tokens).cut(meshes.sequence_part)
    memory = engine.rehearse(microbatch, plan.num_microbatches, CausalLM()).memory
    groups = {"pp": meshes.pp, "cp": meshes.cp, "tp": meshes.tp and meshes.tp.get_group()}
    for mesh in (meshes.shard, meshes.experts):
        groups |= {} if mesh is None else {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
    axes = {group.group_name: name for name, group in groups.items() if group is not None and group.size() > 1}
    microbatches = [microbatch] * plan.num_microbatches
    # PyTorch's schedules exchange more in their first step.
    engine.forward_backward(0, microbatches, torch.tensor(1.0), CausalLM())
    with TrafficCounter(axes) as counter:
        engine.forward_backward(1, microbatches, torch.tensor(1.0), CausalLM())
    elements = sum(local_part(each).numel() for each in engine.decoder.parameters())
    return dict(meshes.place), elements, counter.by_axis, memory


def own_numbers(shape, plan, stage):
    """Layers of a rank, the units outside them, and its numbers in a layer and in all, before it shares them."""
    part = divide_shape(shape, plan)
    layers = sum(plan.stages[stage :: plan.pp]) or shape.num_layers
    ends = [stage == 0, stage == plan.pp - 1]
    table = part.num_embedding_parameters
    outside = ends[0] * table + ends[1] * (table + shape.hidden_size)
    return layers, sum(ends), part.num_layer_parameters, layers * part.num_layer_parameters + outside


def expect_sent(shape, plan, stage):
    """The formulas of docs/*-parallelism.md and docs/memory-and-traffic.md, of a Llama in fp32: collectives by axis."""
    layers, units, in_layer, whole = own_numbers(shape, plan, stage)
    tokens, times = SEQUENCES * LENGTH // plan.cp, MICROBATCHES
    hidden, sent = 4 * tokens * shape.hidden_size, {}
    if plan.pp > 1:
        borders = 2 * len(plan.stages) // plan.pp - (stage == 0) - (stage == plan.pp - 1)
        sent["pp", "send"] = sent["pp", "receive"] = Sent(times * borders, times * borders * hidden)
    if plan.tp > 1 and plan.pp == 1:
        for kind, each in expect_tensor_traffic(plan, shape, tokens).items():
            sent["tp", kind] = Sent(times * each.calls, times * each.bytes)
    elif plan.tp > 1:
        sent |= expect_tensor_stage(shape, plan, stage, layers, tokens)
    if plan.cp > 1:
        sent |= expect_context(shape, plan, layers, tokens)
    shards = plan.dp_shard * plan.cp
    if shards > 1 and plan.pp == 1:
        sent["shard", "all_gather"] = Sent(times * (2 * layers + units), times * 4 * (whole + layers * in_layer))
        sent["shard", "all_to_all"] = Sent(times * (layers + units), times * 4 * whole)
    elif shards > 1:
        sent["shard", "all_gather"] = sent["shard", "all_to_all"] = Sent(layers + units, 4 * whole)
    if plan.dp_replicate > 1:
        sent["dp_replicate", "all_reduce"] = Sent(layers + units, 4 * whole // shards)
    return sent


def expect_tensor_stage(shape, plan, stage, layers, tokens):
    """What the table of docs/tensor-parallelism.md becomes in a stage, which takes and passes on whole sequences."""
    is_first, is_last, times = stage == 0, stage == plan.pp - 1, MICROBATCHES
    hidden, loss = 4 * tokens * shape.hidden_size, is_last * 12 * tokens
    if not plan.sequence_parallel:
        sums = 4 * layers + is_first + is_last
        return {("tp", "all_reduce"): Sent(times * (sums + 2 * is_last), times * (sums * hidden + loss))}
    norms = 2 * layers + is_last  # once in a step, because a pipeline reduces gradients after the last microbatch
    gathers, scatters = 4 * layers + 2, 4 * layers + is_last
    added = times * (is_first * hidden + loss) + norms * 4 * shape.hidden_size
    return {
        ("tp", "all_gather"): Sent(times * gathers, times * gathers * hidden),
        ("tp", "reduce_scatter"): Sent(times * scatters, times * scatters * hidden),
        ("tp", "all_reduce"): Sent(times * (is_first + 2 * is_last) + norms, added),
    }


def expect_context(shape, plan, layers, tokens):
    """Each call with the bytes that the counter sees: those of all ranks together."""
    passes, heads, kv = MICROBATCHES * layers, shape.num_heads // plan.tp, shape.num_kv_heads // plan.tp
    if plan.cp_method == "allgather":
        part = 4 * tokens * 2 * kv * shape.head_dim
        return {
            ("cp", "all_gather"): Sent(passes, passes * plan.cp * part),
            ("cp", "all_to_all"): Sent(passes, passes * plan.cp * part),
        }
    return {("cp", "all_to_all"): Sent(4 * passes, passes * 2 * 4 * tokens * (2 * heads + 2 * kv) * shape.head_dim)}


def expect_router(shape, plan):
    """The counts of experts in each layer, and two of each sequence, that are added up for the router loss."""
    numbers = SEQUENCES * (2 + shape.num_layers * shape.experts[0].num_experts)
    return {("cp", "all_reduce"): Sent(MICROBATCHES * (2 + shape.num_layers), MICROBATCHES * 4 * numbers)}


def merge(sent, inner, outer):
    """The same where two axes have the same ranks, and so one group: all counts under the outer one."""
    result = {}
    for (axis, kind), each in sent.items():
        key = outer if axis == inner else axis, kind
        before = result.get(key, Sent())
        result[key] = Sent(before.calls + each.calls, before.bytes + each.bytes)
    return result


def check_memory(measured, alone, shape, plan):
    """The parts are those of the planner's formulas, and the peak falls from that of one process as they say.

    A pipeline keeps several microbatches at once, so its activations need not fall.
    """
    kept = ParallelPlan("ddp", num_microbatches=MICROBATCHES, micro_batch_size=SEQUENCES)
    planned, whole = (estimate_parts(shape, replace(each, sequence_len=LENGTH), "cpu") for each in (plan, kept))
    assert measured.weights == pytest.approx(planned.weights, abs=1024)  # with buffers
    assert measured.gradients == planned.gradients
    states = [each.weights + each.gradients + each.optimizer for each in (measured, alone)]
    assert states[0] < 0.8 * states[1]
    assert measured.activations == pytest.approx(planned.activations, rel=0.15)
    fallen, expected = (sum(astuple(one)) / sum(astuple(all)) for one, all in ((measured, alone), (planned, whole)))
    assert fallen == pytest.approx(expected, rel=0.15) and (fallen < 0.9 or plan.pp > 1)


@pytest.fixture(scope="module")
def alone(workers, text, tmp_path_factory):
    """A function from a config to the memory of one process with the same microbatches."""
    known = {}

    def measure(config):
        key = str(config)
        if key not in known:
            path = write_recipe(Row(), tmp_path_factory.mktemp("alone"), text, steps=4)
            plan = ParallelPlan("ddp", num_microbatches=MICROBATCHES, micro_batch_size=SEQUENCES)
            [(*_, known[key])] = workers.run(observe, 1, str(path), config, plan)
        return known[key]

    return measure


def check_plan(pool, alone, text, folder, plan):
    config = small_config("llama", num_hidden_layers=4, num_key_value_heads=4)
    path, shape = write_recipe(Row(), folder, text, steps=4), build_shape(config)
    for place, elements, sent, memory in pool.run(observe, plan.world_size, str(path), config, plan):
        assert elements == own_numbers(shape, plan, place["pp"])[-1] / (plan.dp_shard * plan.cp)
        expected = expect_sent(shape, plan, place["pp"])
        assert sent == (merge(expected, "cp", "shard") if plan.dp_shard == 1 else expected)
        check_memory(memory, alone(config), shape, plan)


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in PLANS]


@pytest.mark.parametrize("plan", [DAILY, *SLOW], ids=describe)
def test_a_rank_holds_sends_and_needs_what_the_docs_say(workers, alone, text, tmp_path, plan):
    check_plan(workers, alone, text, tmp_path, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ON_EIGHT, ids=describe)
def test_with_three_axes(eight_workers, alone, text, tmp_path, plan):
    check_plan(eight_workers, alone, text, tmp_path, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", EXPERTS, ids=describe)
def test_with_divided_experts(workers, alone, text, tmp_path, plan):
    """The bytes of tokens depend on their experts: test_expert_traffic.py."""
    config = small_config("mixtral", num_hidden_layers=4)
    path, shape = write_recipe(Row(family="mixtral"), tmp_path, text, steps=4), build_shape(config)
    shards, times, layers = plan.dp_shard * plan.cp, MICROBATCHES, shape.num_layers
    experts = shape.num_layer_experts // plan.ep
    rest = shape.num_layer_parameters - shape.num_layer_experts
    outside = shape.num_parameters - layers * shape.num_layer_parameters
    expected = {
        ("shard", "all_gather"): Sent(times * (2 * layers + 2), times * 4 * (2 * layers * rest + outside)),
        ("shard", "all_to_all"): Sent(times * (layers + 2), times * 4 * (layers * rest + outside)),
    }
    if shards > plan.ep:
        expected["efsdp", "all_gather"] = Sent(2 * times * layers, 2 * times * layers * 4 * experts)
        expected["efsdp", "all_to_all"] = Sent(times * layers, times * layers * 4 * experts)
    if plan.cp > 1:
        expected |= expect_context(shape, plan, layers, SEQUENCES * LENGTH // plan.cp) | expect_router(shape, plan)
    calls = {("ep", "all_to_all"): 5 * times * layers}
    if shards == plan.ep:
        expected = merge(expected, "shard", "ep")
        calls["ep", "all_to_all"] += expected.pop(("ep", "all_to_all")).calls
    for _, elements, sent, memory in workers.run(observe, shards, str(path), config, plan):
        assert elements == shape.num_parameters / shards
        assert {key: sent.pop(key).calls for key in calls} == calls
        assert sent == expected
        check_memory(memory, alone(config), shape, plan)
