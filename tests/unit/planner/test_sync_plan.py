"""The section `sync`: what it refuses, and the plan of several replicas."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import render_bytes
from echelon.learn.model.build import build_on_meta
from echelon.learn.optimizer import divide_names
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.memory import estimate_checkpoint, estimate_memory
from echelon.planner.more_devices import count_step_bytes
from echelon.planner.plan import AdapterPlan, ParallelPlan, SyncPlan
from echelon.planner.plan_lines import describe_plan, summarize_plan
from echelon.planner.replica_costs import agreement_bytes, count_sent_bytes
from echelon.planner.replica_limits import refuse_living_on, resize
from echelon.recipe.document import Recipe
from echelon.recipe.operation import CheckpointConfig, FaultConfig
from echelon.recipe.synchronization import SyncConfig
from tests.unit.planner.test_plan import TINY, TINY_CONFIG, build_recipe, cpus

DILOCO = {"name": "diloco", "replicas": 2}


def test_defaults_depend_on_the_name():
    numbers = {
        name: (config.replicas, config.every, config.outer_learning_rate, config.outer_momentum)
        for name in ("every_step", "local_sgd", "diloco")
        for config in [SyncConfig(name=name)]
    }
    assert numbers == {"every_step": (1, 1, 1.0, 0.0), "local_sgd": (2, 30, 1.0, 0.0), "diloco": (2, 30, 0.7, 0.9)}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"name": "local_sgd", "outer_momentum": 0.5},
            "sync.outer_momentum=0.5 has no effect with sync.name=local_sgd",
        ),
        ({"servers": 2}, "sync.servers=2 has no effect with sync.name=every_step; set sync.name: parameter_server, "),
        (
            {"name": "parameter_server", "max_staleness": 2, "aggregate": "sum"},
            "sync.aggregate=sum: sync.max_staleness=2 applies the gradient of each process alone; use sync.aggregate=w",
        ),
        (
            {"name": "parameter_server", "staleness_compensation": 0.5},
            "sync.staleness_compensation=0.5 has no effect with sync.max_staleness=0, where no gradient is of older",
        ),
        ({"max_staleness": None}, "sync.max_staleness=null has no effect with sync.name=every_step"),
        (
            {"name": "parameter_server", "compress": {"method": "sign"}},
            "method=sign: sync.name=parameter_server does not send in this form; use sync.compress.method=none, bf16, ",
        ),
        ({"overlap": True}, "sync.overlap=true has no effect with sync.name=every_step"),
        ({"name": "diloco", "replicas": 1}, "sync.replicas=1: sync.name=diloco synchronizes at least two"),
        ({"compress": {"method": "int8"}}, "method=int8: sync.name=every_step does not send in this form; use s"),
        ({"name": "diloco", "compress": {"method": "topk"}}, "method=topk: sync.name=diloco does not send"),
        ({"compress": {"rank": 8}}, "sync.compress.rank=8 has no effect with sync.compress.method=none"),
        ({"compress": {"method": "powersgd", "fraction": 0.5}}, "sync.compress.fraction=0.5 has no effect"),
    ],
)
def test_keys_without_effect_are_refused(section, message):
    with pytest.raises(ValueError, match="sync") as caught:
        SyncConfig.model_validate(section)
    assert message in str(caught.value)


CONTINUE = {"fault": {"on_lost_process": "continue"}}


@pytest.mark.parametrize(
    ("more", "sync", "message"),
    [
        ({}, {"replicas": 2}, "sync.replicas=2 has no effect with sync.name=every_step; set sync.name: local_sgd or "
         "diloco, or fault.on_lost_process=continue, or remove replicas."),
        ({}, {"name": "parameter_server", "replicas": 2}, "sync.replicas=2 has no effect with sync.name=parameter_s"),
        ({}, {"min_replicas": 2}, "sync.min_replicas=2 has no effect with fault.on_lost_process=restart; set "
         "fault.on_lost_process: continue, or remove min_replicas."),
        (CONTINUE, {"min_replicas": 3}, "sync.min_replicas=3 is more than sync.replicas=2, so after a loss"),
        (CONTINUE, {"name": "diloco"}, "sync.name=diloco: fault.on_lost_process=continue is for replicas that agree"),
        (CONTINUE, {"name": "parameter_server"}, "parameter servers go on anyway"),
        (CONTINUE, {"compress": {"method": "bf16"}}, "method=bf16: fault.on_lost_process=continue sends whole gradien"),
        ({"precision": "fp16"}, {"name": "parameter_server"}, "train.precision=fp16: sync.name=parameter_server would"),
        ({"parallel": {"dp_shard": 2, "cpu_offload": True}}, DILOCO, "sync.name=diloco keeps the agreed weights"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(more, sync, message):
    recipe = {"run": {"name": "x"}, "model": {"config": TINY_CONFIG}, "tokenizer": "bytes", "sync": sync}
    recipe |= {"data": {"train": "text.txt", "sequence_len": 64}, "optim": {"learning_rate": 1e-3}}
    recipe |= {"train": {"steps": 1, "global_batch_size": 2, **{k: v for k, v in more.items() if k == "precision"}}}
    recipe |= {key: value for key, value in more.items() if key in ("fault", "parallel")}
    with pytest.raises(ValueError, match="sync") as caught:
        Recipe.model_validate(recipe)
    assert message in str(caught.value)


def test_replicas_divide_processes_and_batches():
    plan = resolve_plan(build_recipe("ddp", batch=24, sync={"name": "diloco", "replicas": 3}), TINY, cpus(6))
    assert (plan.num_replicas, plan.dp_replicate, plan.world_size, plan.global_batch_size) == (3, 2, 6, 24)
    assert plan.num_microbatches * plan.micro_batch_size == 4
    plan = resolve_plan(build_recipe("hsdp", sync=DILOCO), TINY, parse_devices("32xH100"))
    assert (plan.num_replicas, plan.dp_replicate, plan.dp_shard) == (2, 2, 8), "each replica has two machines"
    plan = resolve_plan(build_recipe({"tp": 2, "dp_shard": 2}, sync=DILOCO), TINY, cpus(8))
    assert (plan.num_replicas, plan.dp_shard, plan.tp) == (2, 2, 2)
    with pytest.raises(PlanError, match=r"sync.replicas=2 does not divide 5 processes; run 4 or 6 processes"):
        resolve_plan(build_recipe("ddp", sync=DILOCO), TINY, cpus(5))
    with pytest.raises(PlanError, match=r"sync.replicas=2 does not divide 1 process; run 2 processes\.$"):
        resolve_plan(build_recipe("ddp", sync=DILOCO), TINY, cpus(1))
    with pytest.raises(PlanError, match="global_batch_size=9 does not divide by the 6 ranks"):
        resolve_plan(build_recipe("ddp", batch=9, sync=DILOCO), TINY, cpus(6))


def test_a_quorum_computes_what_ddp_does_and_changes_with_its_replicas():
    quorum = {"lost": "continue", "sync": {"replicas": 4}}
    plan = resolve_plan(build_recipe("ddp", batch=24, **quorum), TINY, cpus(4))
    ddp = resolve_plan(build_recipe("ddp", batch=24), TINY, cpus(4))
    assert replace(plan, sync=SyncPlan(), why=(), num_replicas=1, dp_replicate=4) == replace(ddp, why=())
    line = "sync: quorum, 4 replicas of 1 process, the loss of a replica costs one repeated step"
    assert plan.sync.is_exact and line in describe_plan(plan)
    assert resolve_plan(build_recipe("auto", batch=24, **quorum), TINY, cpus(4)).num_replicas == 4
    assumed = {
        each.sync.name: estimate_memory(TINY, replace(each, sequence_len=64), "cpu").assumptions for each in (plan, ddp)
    }
    assert not [line for line in assumed["quorum"] if "DDP" in line or "bucket" in line]
    assert "a quorum sends copies of gradients, which count as optimizer" in assumed["quorum"]
    assert "DDP's gradients are views into its buckets" in assumed["every_step"]
    left = {count: resize(plan, count) for count in (1, 3, 5)}
    assert {count: each.num_fill for count, each in left.items()} == {1: 0, 3: 12, 5: 6}
    assert all(each.global_batch_size == 24 and each.world_size == count for count, each in left.items())


def test_servers_divide_the_batch_between_the_workers_that_are_left():
    plan = resolve_plan(build_recipe("ddp", batch=24, sync={"name": "parameter_server"}), TINY, cpus(4))
    left = {count: resize(plan, count) for count in (1, 3, 5)}
    assert {count: (each.num_replicas, each.num_fill) for count, each in left.items()} == {
        1: (1, 0),
        3: (3, 12),
        5: (5, 6),
    }
    assert all(each.global_batch_size == 24 and each.world_size == count for count, each in left.items())
    assert replace(resize(left[3], 4), num_fill=0) == plan


def test_a_quorum_that_does_not_divide_the_processes_is_refused():
    with pytest.raises((ConfigError, PlanError), match=r"sync.replicas=2 does not divide"):
        resolve_plan(build_recipe("ddp", lost="continue"), TINY, cpus(3))


@pytest.mark.parametrize("parallel", ["fsdp", "zero1", {"tp": 2}, {"pp": 2}, {"cp": 2}, "ddp"])
def test_a_replica_of_a_quorum_has_any_plan(parallel):
    quorum = build_recipe(parallel, batch=24, lost="continue", sync={"replicas": 3})
    plan, alone = resolve_plan(quorum, TINY, cpus(6)), resolve_plan(build_recipe(parallel, batch=8), TINY, cpus(2))
    assert (plan.num_replicas, plan.replica_size, plan.global_batch_size) == (3, 2, 24)
    degrees = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert [getattr(plan, name) for name in degrees] == [getattr(alone, name) for name in degrees]
    assert "3 replicas of 2 processes, the loss of a replica costs one repeated step" in "".join(describe_plan(plan))
    for count in (1, 2, 5):
        left = resize(plan, count)
        assert (left.world_size, left.global_batch_size) == (2 * count, 24)


def replacing(parallel):
    """A recipe under which a lost process is replaced, and the ranks hold snapshots."""
    recipe = build_recipe(parallel)
    recipe.fault = FaultConfig(on_lost_process="replace")
    recipe.checkpoint = CheckpointConfig(snapshot_every_steps=5)
    return recipe


@pytest.mark.parametrize(("parallel", "shards"), [("ddp", 1), ("fsdp", 2), ({"tp": 2}, 2)])
def test_held_snapshots_are_planned(parallel, shards):
    """Two of a rank's own part and two of another's: weights and two moments of AdamW, in fp32."""
    plan, plain = (resolve_plan(recipe, TINY, cpus(2)) for recipe in (replacing(parallel), build_recipe(parallel)))
    held = estimate_memory(TINY, plan, "cpu").total - estimate_memory(TINY, plain, "cpu").total
    assert held == pytest.approx(4 * 3 * 4 * TINY.num_parameters / shards, rel=5e-3)  # tp copies norms
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    # On a GPU they are in host memory, as the copy of the state that both ranks together write a checkpoint from.
    gpu, bare = (estimate_memory(TINY, each) for each in (plan, plain))
    assert gpu.total == bare.total and gpu.saves - bare.saves == pytest.approx(held, rel=1e-3)
    assert bare.saves == pytest.approx(3 * 4 * TINY.num_parameters / 2, rel=1e-3)
    states = estimate_memory(TINY, plain, "cpu").states
    with pytest.raises(PlanError, match="parameters, gradients and optimizer need"):
        resolve_plan(replacing(parallel), TINY, cpus(2, gigabytes=(states + held / 2) / 1e9))


def test_a_stage_holds_snapshots_of_its_own_part_of_an_adapter():
    lora = AdapterPlan("lora", 4, 0.0, ("q_proj",), 2 * 4 * (64 + 64), TINY.num_parameters)
    plan = replace(resolve_plan(replacing({"pp": 2}), TINY, cpus(2)), adapter=lora)
    held, bare = (estimate_memory(TINY, each, "cpu").total for each in (plan, replace(plan, holds_snapshots=False)))
    assert held - bare == 4 * 3 * 4 * 4 * (64 + 64)  # four times weights and moments in fp32, of one of two layers


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: replacing("fsdp"), "fault.on_lost_process=replace"),
        (lambda: build_recipe("ddp", lost="continue"), "fault.on_lost_process=continue"),
    ],
)
def test_living_on_after_a_loss_is_said_to_be_untested_on_gpus(build, key):
    warning = f"{key} has not been tested on a machine with several GPUs"
    for cluster, count in ((parse_devices("2xH100"), 1), (cpus(2), 0)):
        lines = summarize_plan(resolve_plan(build(), TINY, cluster))
        assert sum(warning in line for line in lines) == count


def test_launchers_that_end_all_processes_refuse_a_quorum():
    refuse_living_on(build_recipe("ddp"))
    with pytest.raises(ConfigError, match=r"fault.on_lost_process=continue works only if echelon train starts all"):
        refuse_living_on(build_recipe("ddp", lost="continue"))


def test_the_plan_says_what_is_lossy():
    plain = resolve_plan(build_recipe("ddp"), TINY, cpus(2))
    assert plain.sync == SyncPlan() and plain.sync.is_exact
    assert not [line for line in describe_plan(plain) if line.startswith("sync")]
    plan = resolve_plan(build_recipe("ddp", sync={**DILOCO, "compress": {"method": "int8"}}), TINY, cpus(4))
    assert not plan.sync.is_exact and ParallelPlan.from_dict(plan.to_dict()) == plan
    assert describe_plan(plan)[3] == (
        "sync: diloco, 2 replicas of 2 processes, every 30 steps, outer learning rate 0.7, momentum 0.9, gradients "
        "sent as int8; lossy: the losses are not those of sync.name: every_step"
    )


def compressing(method, parallel="ddp", precision="fp32"):
    recipe = build_recipe(parallel, precision=precision, sync={"compress": {"method": method}})
    return resolve_plan(recipe, TINY, cpus(4))


def test_compression_needs_whole_gradients():
    assert not compressing("powersgd").sync.is_exact
    assert compressing("bf16", "fsdp").precision.reduce == "bfloat16"
    assert compressing("bf16").precision.reduce == "float32", "DDP rounds in its own sum"
    with pytest.raises(
        PlanError, match=r"method=topk needs whole gradients on every process, and parallel=fsdp shards"
    ):
        compressing("topk", "fsdp")
    with pytest.raises(PlanError, match=r"use parallel: ddp, or sync.compress.method=bf16"):
        compressing("sign", {"tp": 2})
    with pytest.raises(ConfigError, match=r"sync.compress.method=sign does not work with train.precision=fp16"):
        compressing("sign", precision="fp16")
    plan = resolve_plan(build_recipe(sync={"compress": {"method": "topk"}}), TINY, parse_devices("8xH100"))
    assert plan.strategy == "ddp", "auto takes the only strategy that can"


def test_bytes_and_memory_of_replicas():
    """TINY has 164,160 parameters: 2 layers of 4 x 64 x 64 + 3 x 64 x 128 + 2 x 64, two tables of 256 x 64, a norm."""
    trained = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 256 * 64 + 64
    assert TINY.num_parameters == trained
    sync = {"name": "diloco", "replicas": 4, "every": 10, "overlap": True, "compress": {"method": "int8"}}
    plan = resolve_plan(build_recipe("fsdp", sync=sync), TINY, cpus(8))
    plain = replace(plan, sync=SyncPlan())
    held = trained // 2
    extra = estimate_memory(TINY, plan, "cpu").total - estimate_memory(TINY, plain, "cpu").total
    assert extra == held * (4 + 4 + 4 + 4), "agreed weights, momentum, late sums, outer gradients"
    assert estimate_checkpoint(TINY, plan) == trained * 4 + 2 * trained * 4 + 4 * (trained * 4 + 2 * trained * 4)
    sent, whole = 1.5 * held * (1 + 4 / 256) / 10, 1.5 * 4 * held
    [line] = [line for line in plan.why if line.startswith("sync diloco")]
    assert f"sends {render_bytes(round(sent))} per step, and {render_bytes(round(whole))} with every_step" in line
    assert f"{8 * sent / 1e8:.3g} s instead of {8 * whole / 1e8:.3g} s at 100 Mbit/s" in line


def test_bytes_and_memory_of_compressed_gradients():
    plan = resolve_plan(build_recipe("ddp", sync={"compress": {"method": "topk"}}), TINY, cpus(4))
    plain, trained = replace(plan, sync=SyncPlan()), TINY.num_parameters
    extra = estimate_memory(TINY, plan, "cpu").total - estimate_memory(TINY, plain, "cpu").total
    assert extra == 2 * 4 * trained
    assert estimate_checkpoint(TINY, plan) - estimate_checkpoint(TINY, plain) == 4 * 4 * trained
    [line] = [line for line in plan.why if line.startswith("sync every_step")]
    assert f"sends {render_bytes(round(3 * 8 * 0.01 * trained))} per step" in line


@pytest.mark.parametrize("method", ["powersgd", "sign"])
def test_bytes_that_depend_on_shapes(method):
    """The plan's bytes beside those of the tensors that transformers builds."""
    plan = resolve_plan(build_recipe("ddp", sync={"compress": {"method": method}}), TINY, cpus(4))
    model = build_on_meta(AutoConfig.for_model(**TINY_CONFIG))
    sent = count_sent_bytes(plan.sync, [each.shape for each in model.parameters()], 4)
    [line] = [line for line in plan.why if line.startswith("sync every_step")]
    assert f"sends {render_bytes(round(sent))} per step" in line
    assert count_step_bytes(TINY, plan)["dp"] == pytest.approx(sent)


def test_bytes_of_signs():
    """One bit for each number, and 4 bytes for each row of a matrix and each vector, to every other rank."""
    assert count_sent_bytes(SyncPlan(method="sign"), [(4096, 256), (256,)], 4) == 3 * (
        4096 * 256 / 8 + 256 / 8 + 4 * (4096 + 1)
    )


SERVERS = {"name": "parameter_server", "servers": 2}


def test_every_process_is_a_worker_of_parameter_servers():
    plan = resolve_plan(build_recipe("ddp", batch=24, sync=SERVERS), TINY, cpus(4))
    assert (plan.num_replicas, plan.dp_replicate, plan.world_size, plan.global_batch_size) == (4, 1, 4, 24)
    assert plan.num_microbatches * plan.micro_batch_size == 6 and plan.sync.is_exact
    assert describe_plan(plan)[3] == "sync: parameter_server, 4 workers, 2 servers, aggregate weighted"
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    assert resolve_plan(build_recipe("auto", batch=24, sync=SERVERS), TINY, cpus(4)).num_replicas == 4
    assert not resolve_plan(build_recipe("ddp", sync={**SERVERS, "aggregate": "mean"}), TINY, cpus(4)).sync.is_exact
    free, bounded = (
        resolve_plan(build_recipe("ddp", sync={**SERVERS, "max_staleness": staleness}), TINY, cpus(4))
        for staleness in (None, 1)
    )
    assert (
        not free.sync.is_exact
        and "aggregate weighted, staleness of any number of steps; lossy" in describe_plan(free)[3]
    )
    assert not bounded.sync.is_exact and ParallelPlan.from_dict(bounded.to_dict()) == bounded
    sync = {**SERVERS, "max_staleness": 1, "staleness_compensation": 0.04}
    compensated = resolve_plan(build_recipe("ddp", sync=sync), TINY, cpus(4))
    assert "staleness of at most 1 step, compensated with 0.04; lossy" in describe_plan(compensated)[3]
    assert agreement_bytes(compensated, 1000) - agreement_bytes(bounded, 1000) == 500 * 4 * 4, "what 4 workers pulled"


@pytest.mark.parametrize(
    ("parallel", "sync", "cluster", "options", "message"),
    [
        ("fsdp", SERVERS, cpus(4), {}, r"parallel=fsdp divides .* whole model; use parallel: ddp\.$"),
        ({"tp": 2}, SERVERS, cpus(4), {}, r"parallel=ddp\+tp divides the model"),
        ("ddp", {**SERVERS, "servers": 5}, cpus(4), {}, r"sync.servers=5 is more than the 4 proc.*; use at most 4"),
        ("ddp", SERVERS, parse_devices("4xH100"), {}, r"sync.name=parameter_server is built for .* CPUs only"),
    ],
)
def test_what_parameter_servers_cannot_do_is_refused(parallel, sync, cluster, options, message):
    with pytest.raises((ConfigError, PlanError), match=message):
        resolve_plan(build_recipe(parallel, sync=sync, **options), TINY, cluster)


def test_bytes_and_memory_of_parameter_servers():
    plan = resolve_plan(build_recipe("ddp", sync=SERVERS), TINY, cpus(4))
    plain, trained = resolve_plan(build_recipe("ddp"), TINY, cpus(1)), TINY.num_parameters
    plain = replace(plain, micro_batch_size=plan.micro_batch_size)
    ours, theirs = (estimate_memory(TINY, each, "cpu") for each in (plan, plain))
    owned = trained // 2
    assert ours.parameters == theirs.parameters and ours.gradients == theirs.gradients
    pushed, copies, waiting = 4 * trained, (4 + 4 + 4) * owned, 3 * 4 * owned
    assert ours.optimizer == 2 * 4 * owned + pushed + copies + waiting
    assert estimate_checkpoint(TINY, plan) == estimate_checkpoint(TINY, plain)
    [line] = [line for line in plan.why if line.startswith("sync parameter_server")]
    assert f"each server gets {render_bytes(round(3 * 4 * owned))} of gradients" in line
    compress = {"method": "topk", "fraction": 0.1}
    compressed = resolve_plan(build_recipe("ddp", sync={**SERVERS, "compress": compress}), TINY, cpus(4))
    [line] = [line for line in compressed.why if line.startswith("sync parameter_server")]
    assert f"gets {render_bytes(round(3 * 0.8 * owned))} of gradients" in line
    assert f"sends {render_bytes(round(3 * 4 * owned))} of weights" in line
    assert estimate_checkpoint(TINY, compressed) - estimate_checkpoint(TINY, plan) == 4 * 4 * trained
    extra = estimate_memory(TINY, compressed, "cpu").optimizer - ours.optimizer
    assert extra == 2 * 4 * trained, "what was not sent, and a new one during a step"


def test_servers_own_disjoint_parts_of_about_the_same_size():
    sizes = {"a": 5, "b": 40, "c": 30, "d": 9, "e": 1}
    assert divide_names(sizes, 1) == [list(sizes)]
    assert divide_names(sizes, 2) == [["b", "e"], ["a", "c", "d"]]
    assert divide_names({"a": 1}, 2) == [["a"], []]
