"""The keys of SageMaker's model-parallel library as keys of a recipe, and which of them are refused."""

import re

import pytest

from echelon.foreign.smp import PARALLEL_KEYS, map_smp
from echelon.ground.errors import ConfigError, PlanError
from echelon.learn.distributed.mesh import Grid
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.shape import build_shape
from tests.unit.recipe_samples import SMALL, load_text

LAYERS = {"intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256}
SHARDED = {"dp_replicate": "auto", "dp_shard": 4}
OFFLOADED = {"train.activation_offloading": True}
FIRST, SECOND = {"partitions": 2}, {"tensor_parallel_degree": 2}


@pytest.mark.parametrize(
    ("version", "parameters", "expected"),
    [
        (2, {}, {}),
        (2, {"hybrid_shard_degree": 0}, {"parallel": {"dp_shard": "auto"}}),
        (2, {"hybrid_shard_degree": 1}, {"parallel": {"dp_replicate": "auto"}}),
        (2, {"hybrid_shard_degree": 4}, {"parallel": SHARDED}),
        (2, SECOND, {"parallel": {"dp_shard": "auto", "tp": 2}}),
        (2, {"hybrid_shard_degree": 4, **SECOND}, {"parallel": {**SHARDED, "tp": 2}}),
        # the processes that share a sequence are among those that shard
        (2, {"hybrid_shard_degree": 8, "context_parallel_degree": 2}, {"parallel": {**SHARDED, "cp": 2}}),
        (2, {"context_parallel_degree": 2}, {"parallel": {"dp_shard": "auto", "cp": 2}}),
        (2, {"hybrid_shard_degree": 4, "expert_parallel_degree": 2}, {"parallel": {**SHARDED, "ep": 2}}),
        (2, {"random_seed": 7}, {"run.seed": 7}),
        (2, {"sm_activation_offloading": True}, OFFLOADED),
        # version 2 counts the layer that runs
        (2, {"sm_activation_offloading": True, "activation_loading_horizon": 3},
         {"train.activation_offloading": 2}),
        (2, {"activation_loading_horizon": 3, "fsdp_cache_flush_warnings": False, "allow_empty_shards": True}, {}),
        (1, {"offload_activations": True, "activation_loading_horizon": 4},
         {"train.activation_offloading": 4}),
        (1, {"partitions": 1, "microbatches": 1, "optimize": "speed", "pipeline": "simple", "active_microbatches": 2,
             "placement_strategy": "PTD"}, {"parallel": {"dp_replicate": "auto"}}),
        (1, {"microbatches": 4, "placement_strategy": "spread"}, {"parallel": {"dp_replicate": "auto"}}),
        (1, {"sharded_data_parallel_degree": 4}, {"parallel": SHARDED}),
        (1, {"shard_optimizer_state": True, **FIRST},
         {"parallel": {"dp_shard": "auto", "reshard_after_forward": False, "reduce_gradients": "last", "pp": 2}}),
        (1, {"shard_optimizer_state": False}, {"parallel": {"dp_replicate": "auto"}}),
        (1, {"pipeline_parallel_degree": 4, "partitions": 4, "microbatches": 8, "active_microbatches": 6},
         {"parallel": {"dp_replicate": "auto", "pp": 4, "microbatches": 8}}),
        (1, {**FIRST, "pipeline": "interleaved", "placement_strategy": "cluster"},
         {"parallel": {"dp_replicate": "auto", "pp": 2, "schedule": "1f1b",
                       "order": ["dp_replicate", "dp_shard", "cp", "pp", "tp"]}}),
        (1, {**FIRST, "pipeline": "simple", "microbatches": 4, "active_microbatches": 4},
         {"parallel": {"dp_replicate": "auto", "pp": 2, "schedule": "gpipe", "microbatches": 4}}),
        (1, {**SECOND, "optimize": "memory", "placement_strategy": "TPD"},
         {"parallel": {"dp_replicate": "auto", "tp": 2, "sequence_parallel": True,
                       "order": ["tp", "pp", "dp_replicate", "dp_shard", "cp"]}}),
        (1, {**SECOND, "optimize": "speed", "placement_strategy": "TDP", "prescaled_batch": True},
         {"parallel": {"dp_replicate": "auto", "tp": 2, "sequence_parallel": False,
                       "order": ["tp", "dp_replicate", "dp_shard", "cp", "pp"]}}),
        (1, {"fp16": True, "sdp_gradient_clipping": 0.5}, {"train.precision": "fp16", "optim.max_grad_norm": 0.5}),
        (1, {"bf16": True, "fp16": False}, {"train.precision": "bf16"}),
        (1, {"auto_partition": True, "default_partition": 0, "load_partition": False, "skip_tracing": True, "ddp": True,
             "ddp_dist_backend": "auto", "sdp_reduce_bucket_size": 5e8, "sdp_param_persistence_threshold": 1e6,
             "sdp_max_live_parameters": 1e9, "sdp_hierarchical_allgather": True, "fp16_params": False,
             "deterministic_server": True, "contiguous": True, "horovod": False}, {}),
    ],
)  # fmt: skip
def test_what_parameters_become(version, parameters, expected):
    """And there is one line about each, with its name and value."""
    mapped = map_smp(parameters, "smp", version)
    assert mapped.values == expected
    assert [re.match(r"smp\.(\w+)=", line)[1] for line in mapped.lines] == sorted(
        parameters, key=lambda name: [line.startswith(f"smp.{name}=") for line in mapped.lines].index(True)
    )
    assert map_smp(parameters, "smp").values == expected or "activation_loading_horizon" in parameters


REFUSED = [
    (None, {"degree": 2}, "smp.degree is not a known parameter"),
    (None, {"partitions": 2, "hybrid_shard_degree": 2},
     "smp.hybrid_shard_degree belongs to version 2 of the library, and smp.partitions to version 1"),
    (2, {"microbatches": 4}, "smp.microbatches belongs to version 1 of the library, which runs under mpi"),
    (1, {"hybrid_shard_degree": 4}, "smp.hybrid_shard_degree belongs to version 2"),
    (2, {"hybrid_shard_degree": True}, "hybrid_shard_degree=True must be a whole number of at least 0"),
    (2, {"hybrid_shard_degree": 1, "context_parallel_degree": 2}, "does not divide hybrid_shard_degree=1"),
    (2, {"hybrid_shard_degree": 4, "expert_parallel_degree": 8},
     "smp.expert_parallel_degree=8 does not divide hybrid_shard_degree=4, whose processes share the experts"),
    (2, {"activation_loading_horizon": 0}, "activation_loading_horizon=0 must be a whole number of at least 1"),
    (2, {"sm_activation_offloading": 1}, "sm_activation_offloading=1 is neither true nor false"),
    (2, {"random_seed": "7"}, "random_seed=7 must be a number"),
    (1, {"fp16": True, "bf16": True}, "smp.bf16 sets train.precision=bf16, but smp.fp16 sets train.precision=fp16"),
    (1, {"partitions": 2, "pipeline_parallel_degree": 4}, "are two names of one degree"),
    (1, {**FIRST, "pipeline": "_only_forward"}, "smp.pipeline=_only_forward has no counterpart: use interleaved or"),
    (1, {**FIRST, "active_microbatches": 1}, "schedule 1f1b has up to 2 microbatches in flight; use 2 or more"),
    (1, {**FIRST, "active_microbatches": 1, "pipeline": "simple"}, "gpipe has up to all microbatches in flight; set"),
    (1, {**FIRST, "placement_strategy": "DDT"}, "must be cluster, spread, or the letters D, P and T"),
    (1, {**SECOND, "optimize": "time"}, "smp.optimize=time has no counterpart: use memory or speed"),
    (1, {"auto_partition": False}, "smp.auto_partition=false: code does not assign modules to stages"),
    (1, {"default_partition": 1}, "parallel.stages sets the layers of each one by hand"),
    (1, {"memory_weight": 0.8}, "smp.memory_weight=0.8: memory has no weight"),
    (1, {"load_partition": True}, "stages are not read from a file"),
    (1, {"partition_file": "x"}, "stages are not read from a file"),
    (1, {"horovod": True}, "smp.horovod=true: it is for TensorFlow"),
    (1, {"ddp_port": 1}, "echelon's rendezvous has its own port"),
    (1, {"ddp_dist_backend": "mpi"}, "echelon uses NCCL on GPUs"),
    (1, {"contiguous": False}, "it is for TensorFlow"),
    (1, {"ddp": False}, "leave it true, or remove it"),
    (1, {"fp16_params": True}, "set train.precision=fp16 instead"),
    (1, {"deterministic_server": 1}, "it must be true or false"),
    (1, {"sdp_reduce_bucket_size": 1}, "fully_shard reduces layer by layer"),
    (1, {"sdp_param_persistence_threshold": 1}, "every parameter is sharded"),
    (1, {"sdp_max_live_parameters": 1}, "set parallel.prefetch instead"),
    (1, {"sdp_hierarchical_allgather": 1}, "it must be true or false"),
    (1, {"shard_optimizer_state": True, "sharded_data_parallel_degree": 4}, "exclude each other"),
    (1, {"shard_optimizer_state": 1}, "shard_optimizer_state=1 is neither true nor false"),
    (2, [], "smp=[] must be a mapping"),
]  # fmt: skip


@pytest.mark.parametrize(("version", "parameters", "words"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_what_has_no_counterpart_is_refused_by_name(version, parameters, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        map_smp(parameters, "smp", version)


def test_the_recipe_is_that_of_echelons_own_keys(tmp_path):
    """So it trains the same, and a run of one can be resumed with the other."""
    ours, _ = load_text(
        tmp_path, SMALL, "parallel={dp_replicate: auto, pp: 2, microbatches: 4, schedule: 1f1b}", "train.precision=bf16"
    )
    smp = "smp={pipeline_parallel_degree: 2, microbatches: 4, pipeline: interleaved, bf16: true}"
    theirs, lines = load_text(tmp_path, SMALL, "engine=smp", smp)
    assert theirs == ours and theirs.engine == "native" and not theirs.smp
    assert lines[1:] == [
        "smp.bf16=true -> train.precision=bf16",
        "smp.pipeline_parallel_degree=2 -> parallel.pp=2",
        "smp.microbatches=4 -> parallel.microbatches=4",
        "smp.pipeline=interleaved -> parallel.schedule=1f1b",
    ]
    alone, lines = load_text(tmp_path, SMALL, "engine=smp")
    assert alone == load_text(tmp_path, SMALL)[0] and len(lines) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["smp.bf16=true"], "smp has parameters of SageMaker's model-parallel library, but engine is native"),
        (["engine=smp", "smp.bf16=true", "train.precision=fp16"],
         "smp.bf16 sets train.precision=bf16, but the recipe has train.precision=fp16; remove one"),
        (["engine=smp", "smp.partitions=2", "parallel=ddp"], "smp.partitions sets parallel={dp_replicate: auto, pp"),
        (["engine=smp", "smp.degree=2"], "smp.degree is not a known parameter"),
    ],
)  # fmt: skip
def test_the_recipe_says_each_thing_once(tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_text(tmp_path, SMALL, *overrides)


def plan_of(tmp_path, text, devices="8xH100"):
    recipe, _ = load_text(tmp_path, SMALL, "engine=smp", f"smp={text}")
    return resolve_plan(recipe, build_shape({**recipe.model.config, **LAYERS}), parse_devices(devices))


@pytest.mark.parametrize(
    ("placement", "stages"),
    [("cluster", [[0, 1], [2, 3], [4, 5], [6, 7]]), ("spread", [[0, 4], [1, 5], [2, 6], [3, 7]])],
)
def test_neighbours_are_those_of_the_librarys_documentation(tmp_path, placement, stages):
    """Its example of 8 processes and 2 partitions."""
    plan = plan_of(tmp_path, f"{{partitions: 2, placement_strategy: {placement}}}")
    assert sorted(Grid(plan).peers(("pp",))) == stages


def test_replicas_take_what_the_shards_leave(tmp_path):
    plan = plan_of(tmp_path, "{hybrid_shard_degree: 4}")
    assert (plan.strategy, plan.dp_replicate, plan.dp_shard) == ("hsdp", 2, 4)
    assert plan_of(tmp_path, "{hybrid_shard_degree: 8}").strategy == "fsdp"
    assert plan_of(tmp_path, "{hybrid_shard_degree: 0}").strategy == "fsdp"
    assert plan_of(tmp_path, "{hybrid_shard_degree: 1}").strategy == "ddp"
    assert plan_of(tmp_path, "{shard_optimizer_state: true}").strategy == "zero1"
    with pytest.raises(
        PlanError, match=re.escape("parallel.dp_shard=3 does not divide the 8 processes; use 1, 2, 4 or")
    ):
        plan_of(tmp_path, "{hybrid_shard_degree: 3}")
    with pytest.raises(
        PlanError, match=r"dp_shard=3 does not divide the 4 processes that pp 2 leaves of 8; use 1, 2 or"
    ):
        plan_of(tmp_path, "{partitions: 2, sharded_data_parallel_degree: 3}")


def test_the_tables_have_no_parameter_twice():
    from echelon.foreign.smp import FIXED, SETTINGS

    names = [*FIXED, *SETTINGS, *PARALLEL_KEYS]
    assert len(names) == len(set(names))
