import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import ACCELERATORS, Cluster, parse_devices
from echelon.planner.plan import ParallelPlan, Precision
from echelon.planner.plan_fields import COMPILE_GAIN, keeps_documents_apart
from echelon.planner.plan_lines import describe_plan, summarize_plan
from echelon.planner.shape import build_shape
from echelon.recipe.batches import constant_batch, ramp_batch
from echelon.recipe.inputs import AdapterConfig, DataConfig
from echelon.recipe.objective import ObjectiveConfig
from echelon.recipe.operation import CheckpointConfig, FaultConfig
from echelon.recipe.synchronization import CONTINUES, SyncConfig
from echelon.recipe.training import BatchRampConfig, ParallelConfig
from tests.families import small_config

FULL = AdapterConfig()
TINY_CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
TINY = build_shape(TINY_CONFIG)
LLAMA_8B = build_shape(
    {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
)  # fmt: skip
LLAMA_13B = build_shape(
    {"model_type": "llama", "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
     "num_hidden_layers": 40, "num_attention_heads": 40}
)  # fmt: skip


class Parts(SimpleNamespace):
    """The parts of a Recipe that determine a plan."""

    def model_copy(self, update):
        return Parts(**{**vars(self), **update})


def build_recipe(
    parallel="auto", batch=64, sequence_len=128, batch_tokens=None, adapter=FULL, sync=None, optimizer="adamw",
    lost="restart", **train
):  # fmt: skip
    if isinstance(parallel, dict):
        parallel = ParallelConfig.model_validate(parallel)
    batch = batch_tokens // sequence_len if batch_tokens else batch
    defaults = {
        "micro_batch_size": "auto",
        "batch_ramp": None,
        "precision": "auto",
        "float8_scaling": "tensorwise",
        "compile": "auto",
        "activation_checkpointing": "none",
        "activation_offloading": False,
        "activation_loading_horizon": 1,
        "master_weights": "fp32",
    }
    sync = SyncConfig.model_validate(sync or {})
    return Parts(
        parallel=parallel,
        engine="native",
        sync=sync,
        goes_on=CONTINUES if lost == "continue" else None,
        num_replicas=max(2, sync.replicas) if lost == "continue" else sync.replicas,
        global_batch_size=batch,
        batches=constant_batch(batch, sequence_len),
        data=DataConfig.model_validate({"train": "text.txt", "sequence_len": sequence_len}),
        optim=SimpleNamespace(name=optimizer),
        adapter=adapter,
        model=SimpleNamespace(new_tokens=(), trust_remote_code=False, attn_implementation=None),
        objective=ObjectiveConfig(),
        fault=FaultConfig(on_lost_process=lost),
        checkpoint=CheckpointConfig(),
        draws_answers=False,
        samples_answers=False,
        reward=(),
        train=SimpleNamespace(global_batch_tokens=batch_tokens, **{"epochs": None, **defaults, **train}),
        num_steps=lambda num_samples: 1000,
    )


@pytest.mark.parametrize(
    ("data", "objective", "are_apart"),
    [({}, {}, False), ({"document_mask": True}, {}, True),
     ({"train": {"path": "talks.jsonl", "format": "messages"}}, {}, True),
     ({"train": {"path": "talks.jsonl", "format": "messages"}, "document_mask": False}, {}, False),
     ({"train": {"path": "talks.jsonl", "format": "messages"}, "packing": False}, {}, False),
     ({"packing": False}, {"name": "dpo"}, True), ({}, {"name": "kto"}, True), ({}, {"name": "grpo"}, False)],
)  # fmt: skip
def test_a_plan_says_whether_documents_are_kept_apart(data, objective, are_apart):
    """As far as the recipe tells; what is known of the data decides, and a model that obeys no document mask."""
    recipe = build_recipe(parallel="ddp")
    recipe.data = DataConfig.model_validate({"train": "text.txt", "sequence_len": 128, **data})
    recipe.objective = ObjectiveConfig.model_validate(objective)
    assert keeps_documents_apart(recipe, TINY) == are_apart
    assert not keeps_documents_apart(recipe, replace(TINY, obeys_masks=False))


@pytest.mark.parametrize("are_apart", [False, True])
def test_the_data_decides_whether_documents_are_kept_apart(are_apart):
    assert resolve_plan(build_recipe(), TINY, cpus(2), are_apart=are_apart).documents_apart == are_apart


def cpus(count, gigabytes=None, per_node=None):
    memory = None if gigabytes is None else int(gigabytes * 1e9)
    return Cluster(replace(ACCELERATORS["cpu"], memory_bytes=memory), count, per_node or count, "cpu")


def switches(plan):
    return plan.strategy, plan.dp_replicate, plan.dp_shard, plan.reshard_after_forward, plan.reduce_gradients


def refusal(error, *words, cluster=None, shape=TINY, num_samples=None, **recipe):
    with pytest.raises(error) as caught:
        resolve_plan(build_recipe(**recipe), shape, cluster or cpus(2), num_samples)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize(
    ("name", "cluster", "expected"),
    [
        ("ddp", cpus(4), ("ddp", 4, 1, False, "last")),
        ("zero1", cpus(4), ("zero1", 1, 4, False, "last")),
        ("zero2", cpus(4), ("zero2", 1, 4, False, "each")),
        ("fsdp", cpus(4), ("fsdp", 1, 4, True, "each")),
        ("hsdp", cpus(4), ("hsdp", 2, 2, True, "each")),
        ("hsdp", cpus(2), ("hsdp", 2, 1, True, "each")),
        ("hsdp", cpus(8, per_node=2), ("hsdp", 4, 2, True, "each")),
        ("hsdp", parse_devices("64xH100"), ("hsdp", 8, 8, True, "each")),
        *[(name, cpus(1), (name, 1, 1)) for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp")],
    ],
)
def test_names(name, cluster, expected):
    plan = resolve_plan(build_recipe(name), TINY, cluster)
    assert switches(plan)[: len(expected)] == expected
    assert plan.world_size == cluster.num_devices and plan.global_batch_size == 64


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({}, ("ddp", 8, 1, False, "last")),
        ({"dp_shard": 8}, ("fsdp", 1, 8, True, "each")),
        ({"dp_shard": "auto"}, ("fsdp", 1, 8, True, "each")),
        ({"dp_replicate": 8}, ("ddp", 8, 1, False, "last")),
        ({"dp_replicate": 2, "dp_shard": 4}, ("hsdp", 2, 4, True, "each")),
        ({"dp_replicate": 4, "dp_shard": "auto"}, ("hsdp", 4, 2, True, "each")),
        ({"dp_shard": 8, "reshard_after_forward": False}, ("zero2", 1, 8, False, "each")),
        ({"dp_shard": 8, "reshard_after_forward": False, "reduce_gradients": "last"}, ("zero1", 1, 8, False, "last")),
        ({"dp_shard": 8, "reduce_gradients": "last"}, ("custom", 1, 8, True, "last")),
    ],
)
def test_mapping(mapping, expected):
    assert switches(resolve_plan(build_recipe(mapping), TINY, cpus(8))) == expected


def degrees(plan):
    return plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp, plan.ep


@pytest.mark.parametrize(
    ("mapping", "expected", "strategy"),
    [
        ({"tp": 2}, (4, 1, 1, 2, 1, 1), "ddp+tp"),
        ({"tp": 4, "cp": 2}, (1, 1, 2, 4, 1, 1), "cp+tp"),
        ({"tp": 2, "dp_shard": 4}, (1, 4, 1, 2, 1, 1), "fsdp+tp"),
        ({"tp": 2, "dp_shard": "auto"}, (1, 4, 1, 2, 1, 1), "fsdp+tp"),
        ({"pp": 2, "tp": 2, "dp_replicate": 2}, (2, 1, 1, 2, 2, 1), "pp+ddp+tp"),
        ({"cp": 2, "dp_shard": 2, "dp_replicate": 2}, (2, 2, 2, 1, 1, 1), "hsdp+cp"),
        ({"dp_shard": 4, "ep": 2, "dp_replicate": 2}, (2, 4, 1, 1, 1, 2), "hsdp+ep"),
        ({"dp_shard": 2, "cp": 4, "ep": 8}, (1, 2, 4, 1, 1, 8), "fsdp+ep+cp"),
    ],
)
def test_degrees_of_model_parallelism(mapping, expected, strategy):
    shape = build_shape(small_config("mixtral", num_local_experts=8)) if "ep" in mapping else TINY
    plan = resolve_plan(build_recipe(mapping), shape, cpus(8))
    assert degrees(plan) == expected and plan.strategy == strategy
    assert plan.world_size == 8 and plan.global_batch_size == 64
    assert plan.uses_fully_shard and not plan.uses_autocast


def test_options_of_model_parallelism():
    defaults = resolve_plan(build_recipe({"tp": 2, "cp": 2, "pp": 2}), TINY, cpus(8))
    assert not defaults.sequence_parallel and (defaults.cp_method, defaults.schedule) == ("allgather", "1f1b")
    assert (defaults.stages, defaults.order) == ((1, 1), ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    given = {"sequence_parallel": True, "cp_method": "ulysses", "schedule": "gpipe", "stages": [1, 1]}
    plan = resolve_plan(
        build_recipe({"tp": 2, "cp": 2, "pp": 2, **given, "order": ["tp", "pp", "dp_replicate", "dp_shard", "cp"]}),
        TINY,
        cpus(8),
    )
    assert (plan.sequence_parallel, plan.cp_method, plan.schedule, plan.stages) == (True, "ulysses", "gpipe", (1, 1))
    assert plan.order == ("tp", "pp", "dp_replicate", "dp_shard", "cp")
    assert (
        "(dp_replicate 1 x dp_shard 1 x pp 2 (gpipe) x cp 2 (ulysses) x tp 2 (sequence parallel))"
        in (describe_plan(plan)[0])
    )
    assert "64 sequences = 1 data-parallel rank x" in describe_plan(plan)[2]
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    # A pipeline runs each layer once for each microbatch: gathering it every time would cost too much.
    assert (plan.reshard_after_forward, plan.reduce_gradients) == (False, "last")
    own = resolve_plan(build_recipe({"dp_shard": 4, "tp": 2, "order": ["tp", "dp_shard"]}), TINY, cpus(8))
    assert own.order == ("pp", "dp_replicate", "cp", "tp", "dp_shard")
    several = {"pp": 2, "schedule": "interleaved", "stages": [1, 1, 1, 1]}
    deep = build_shape({**TINY_CONFIG, "num_hidden_layers": 4})
    assert resolve_plan(build_recipe(several), deep, cpus(2)).stages == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("error", "mapping", "words"),
    [
        (PlanError, {"tp": 3}, ("tp 3 needs a multiple of 3 processes, but there are 8; run 6 or 9", "1, 2, 4 or 8")),
        (PlanError, {"tp": 16}, ("run 16 processes, or use tp = 4 or 8",)),
        (PlanError, {"tp": 3, "pp": 2}, ("pp 2 x tp 3 needs a multiple of 6", "product is 2, 4 or 8")),
        (PlanError, {"tp": 2, "dp_shard": 8}, ("dp_replicate 1 x dp_shard 8 x tp 2 needs 16", "2 x 2 or 1 x 4")),
        (PlanError, {"tp": 2, "dp_replicate": 3, "dp_shard": "auto"}, ("4 processes that tp 2 leaves of 8; use 1, 2",)),
        (ConfigError, {"ep": 2}, ("parallel.ep=2 needs parallel.dp_shard", "dp_shard: 2")),
        (PlanError, {"dp_shard": 8, "ep": 3}, ("parallel.ep=3 does not divide dp_shard 8 x cp 1 = 8", "1, 2, 4 or 8")),
        (ValueError, {"sequence_parallel": True}, ("sequence_parallel=true has no effect with parallel.tp",)),
        (ValueError, {"cp_method": "ulysses"}, ("cp_method=ulysses has no effect with parallel.cp",)),
        (ValueError, {"schedule": "1f1b"}, ("schedule=1f1b has no effect with parallel.pp", "remove schedule")),
        (ValueError, {"stages": [1, 1]}, ("stages=[1, 1] has no effect with parallel.pp",)),
        (ValueError, {"microbatches": 4}, ("microbatches=4 has no effect with parallel.pp",)),
        (ConfigError, {"pp": 4}, ("parallel.pp=4 is more than the 2 decoder layers",)),
        (ConfigError, {"pp": 2, "stages": [1, 2]}, ("stages=[1, 2] has 3 layers, but the model has 2",)),
        (ConfigError, {"pp": 2, "stages": [2]}, ("has 1 stages for parallel.pp=2; give 2 of them, or a multiple",)),
        (ConfigError, {"order": ["tp", "tp"]}, ("order=[tp, tp] names an axis twice",)),
        (ConfigError, {"tp": 2, "order": ["tp"]}, ("leaves out dp_replicate",)),
    ],
)  # fmt: skip
def test_degrees_and_options_that_contradict_are_refused(error, mapping, words):
    refusal(error, *words, parallel=mapping, cluster=cpus(8))


def test_what_tensor_parallelism_cannot_divide_is_refused():
    wide = {**TINY_CONFIG, "num_attention_heads": 8, "num_key_value_heads": 2}
    refused = [
        ({}, wide, ("parallel.tp=4 does not divide num_key_value_heads=2; use tp = 1 or 2",)),
        ({}, {**TINY_CONFIG, "vocab_size": 258}, ("does not divide vocab_size=258; use tp = 1 or 2 or set",)),
        ({"sequence_parallel": True}, TINY_CONFIG, ("does not divide data.sequence_len=130; use tp = 1 or 2",)),
    ]
    for options, config, words in refused:
        parallel = {"tp": 4, **options}
        refusal(PlanError, *words, parallel=parallel, cluster=cpus(4), shape=build_shape(config), sequence_len=130)
    dropping = build_shape({**TINY_CONFIG, "attention_dropout": 0.1})
    refusal(ConfigError, "parallel.tp=2 does not work with a model with attention", parallel={"tp": 2}, shape=dropping)
    for adapter, word in (
        ({"method": "qlora"}, "adapter.method=qlora"), ({"method": "lora", "dropout": 0.1}, "adapter.dropout=0.1"),
        ({"method": "lora", "init": "pissa"}, "adapter.init=pissa"),
        ({"method": "lora", "modules_to_save": ["lm_head"]}, "adapter.modules_to_save"),
    ):  # fmt: skip
        refusal(
            ConfigError, f"parallel.tp=2 does not work with {word}", "or use tp=1",
            parallel={"tp": 2}, adapter=AdapterConfig.model_validate({"r": 4, **adapter}),
        )  # fmt: skip
    blocks = "parallel.tp=2 does not work with optim.name=adamw_8bit"
    refusal(ConfigError, blocks, "use adamw", parallel={"tp": 2}, optimizer="adamw_8bit")
    assert resolve_plan(build_recipe({"pp": 2}, optimizer="adamw_8bit"), TINY, cpus(2)).optimizer == "adamw_8bit"


def test_processes_that_fit_a_batch_count_those_that_share_a_sequence():
    refusal(
        PlanError, "global_batch_size=10 does not divide by the 4 data-parallel ranks", "or 2, 4, 10 or 20 processes",
        batch=10, parallel={"tp": 2}, cluster=cpus(8),
    )  # fmt: skip
    refusal(PlanError, "3 samples", "at most 6 processes", num_samples=3, parallel={"tp": 2}, cluster=cpus(8))


def test_prefetch_is_in_the_plan_and_said():
    plan = resolve_plan(build_recipe({"dp_shard": 8, "prefetch": 3}), TINY, cpus(8))
    assert plan.prefetch == 3 and "; 3 layers gathered ahead" in describe_plan(plan)[0]
    assert resolve_plan(build_recipe("fsdp"), TINY, cpus(8)).prefetch is None


@pytest.mark.parametrize(
    ("error", "words", "recipe"),
    [
        (PlanError, ("an even number of processes", "2 or 4", "parallel=fsdp"),
         {"parallel": "hsdp", "cluster": cpus(3), "batch": 12}),
        # a recipe for 8 GPUs on a laptop of 2 processes
        (PlanError, ("dp_replicate 2 x dp_shard 4 needs 8 processes, but there are 2", "run 8", "2 x 1 or 1 x 2"),
         {"parallel": {"dp_replicate": 2, "dp_shard": 4}}),
        (PlanError, ("there is 1;", "1 x 1"), {"parallel": {"dp_shard": 8}, "cluster": cpus(1)}),
        (PlanError, ("there is 1;", "1 x 1"), {"parallel": {"dp_replicate": 8}, "cluster": cpus(1)}),
        (PlanError, ("dp_replicate=3 does not divide the 8", "1, 2, 4 or 8"),
         {"parallel": {"dp_replicate": 3, "dp_shard": "auto"}, "cluster": cpus(8)}),
        (PlanError, ("parallel.cpu_offload=true", "omit it"), {"parallel": {"dp_shard": 2, "cpu_offload": True}}),
        (PlanError, ("train.activation_offloading=true", "omit it"), {"activation_offloading": True}),
        *((ConfigError, ("train.activation_offloading=true does not work with", "full"),
           {"activation_offloading": True, "cluster": parse_devices("8xH100"), **way})
          for way in ({"activation_checkpointing": "selective"}, {"compile": True}, {"precision": "fp8"})),
        *((ConfigError, ("parallel.prefetch=2", "no layer is gathered", "dp_shard"),
           {"parallel": mapping, "cluster": cpus(8)})
          for mapping in ({"prefetch": 2}, {"dp_replicate": 8, "prefetch": 2})),
        (ConfigError, ("parallel='zero9'", "fsdp"), {"parallel": "zero9"}),
        (PlanError, ("train.global_batch_size=10 does not divide by the 4 ranks", "8 or 12, or 1, 2, 5 or 10 proces"),
         {"batch": 10, "cluster": cpus(4)}),
        (PlanError, ("global_batch_tokens=1280 (10 sequences)", "1024 (8 sequences) or 1536 (12 sequences)"),
         {"batch_tokens": 1280, "cluster": cpus(4)}),
        (PlanError, ("global_batch_size=2 is less than one sequence", "use 4, or 1 or 2 processes"),
         {"batch": 2, "cluster": cpus(4)}),
        (PlanError, ("3 samples", "4 ranks", "at most 3 processes"), {"num_samples": 3, "cluster": cpus(4)}),
        (PlanError, ("train.micro_batch_size=5 does not divide the 32", "each of the 2 ranks", "4 or 8"),
         {"micro_batch_size": 5}),
        (PlanError, ("micro_batch_size=64", "use 32"), {"micro_batch_size": 64}),
    ],
)  # fmt: skip
def test_layouts_and_batches_that_do_not_fit_the_processes(error, words, recipe):
    refusal(error, *words, **recipe)


def build_ramped(start, size, increment, tokens=False, **train):
    recipe = build_recipe("ddp", batch=size, batch_tokens=size * 128 if tokens else None, **train)
    recipe.batches = ramp_batch(start, size, increment, 10**6, 128)
    recipe.train.batch_ramp = BatchRampConfig.model_validate(
        {"from": start * (128 if tokens else 1), "over_tokens": 10**6, "increment": increment * (128 if tokens else 1)}
    )
    return recipe


def test_every_size_of_a_ramp_divides_or_is_named():
    # shares of 4, 8, 12 and 16 on 2 ranks: the largest size that divides all of them
    plan = resolve_plan(build_ramped(8, 32, 8), TINY, cpus(2))
    assert (plan.micro_batch_size, plan.num_microbatches) == (4, 4)
    assert any("dividing every size of the ramp" in line for line in plan.why)
    for recipe, message in [
        (build_ramped(8, 32, 3), "train.batch_ramp: steps of 11, 14, 17 and 3 more sequences do not divide by the 4 "
         "ranks; use from: 8 with an increment of 4, 8, 12 or 24, or 1 processes."),
        (build_ramped(6, 32, 2), "train.batch_ramp: steps of 6, 10, 14 and 4 more sequences do not divide by the 4 "
         "ranks; use from: 4 with an increment of 4 or 28, or from: 8 with an increment of 4, 8, 12 or 24, or 1 or 2 "
         "processes."),
        (build_ramped(6, 8, 2, tokens=True), "use from: 512 with an increment of 512, or 1 or 2 processes."),
        (build_ramped(8, 32, 8, micro_batch_size=4), "train.micro_batch_size=4 does not divide the 2 and 6 sequences "
         "each of the 4 ranks gets in a step; use 2."),
    ]:  # fmt: skip
        with pytest.raises(PlanError) as caught:
            resolve_plan(recipe, TINY, cpus(4))
        assert message in str(caught.value)


def test_micro_batch_auto_obeys_the_cap_and_the_memory():
    # 64 sequences on 2 ranks: 32 each, of 1024 tokens: 8 is the largest divisor within 8192 tokens
    plan = resolve_plan(build_recipe("ddp", sequence_len=1024), TINY, cpus(2))
    assert (plan.micro_batch_size, plan.num_microbatches) == (8, 4)
    assert any("micro_batch_size auto: 8 of the 32" in line and "8192" in line for line in plan.why)
    # 96 / 2 = 48 sequences of 128 tokens: all 48 fit (6144 tokens); of 144 / 2 = 72, at most 36
    assert resolve_plan(build_recipe("ddp", batch=96), TINY, cpus(2)).micro_batch_size == 48
    assert resolve_plan(build_recipe("ddp", batch=144), TINY, cpus(2)).micro_batch_size == 36
    # a GPU takes up to 32768 tokens where they fit, here 32 of 128 sequences, and fewer where they do not
    large, cluster = build_recipe("ddp", batch=128, sequence_len=1024), parse_devices("1xH200")
    assert resolve_plan(large, TINY, cluster).micro_batch_size == 32
    little = replace(cluster, accelerator=replace(cluster.accelerator, memory_bytes=10**8))
    assert resolve_plan(large, TINY, little).micro_batch_size < 32
    # a sequence longer than the cap is still one sequence
    assert resolve_plan(build_recipe("ddp", sequence_len=10000), TINY, cpus(2)).micro_batch_size == 1
    # less memory: a token of a TINY layer needs about 4 kB, so 4096 tokens exceed 30 MB and 1024 do not
    small = resolve_plan(build_recipe("ddp"), TINY, cpus(2, gigabytes=0.03))
    assert 1 <= small.micro_batch_size < resolve_plan(build_recipe("ddp"), TINY, cpus(2)).micro_batch_size


def auto_strategy(devices, **recipe):
    return resolve_plan(build_recipe(sequence_len=4096, **recipe), LLAMA_8B, parse_devices(devices))


def kept(**given):
    keys = {"every": None, "memory_budget": None, "mlp_tiles": None}
    return {"activation_checkpointing": SimpleNamespace(**{**keys, **given})}


def test_layers_are_recomputed_in_part():
    plan = resolve_plan(build_recipe("ddp", **kept(every=2)), TINY, cpus(2))
    assert (plan.activation_checkpointing, plan.checkpoint_every) == ("full", 2)
    assert "activation checkpointing of 1 in 2 layers;" in describe_plan(plan)[0]
    refusal(ConfigError, "every=3 is more than the 2 layers", "use 2 or less", **kept(every=3))


def test_an_mlp_is_computed_in_tiles():
    plan = resolve_plan(build_recipe({"cp": 2}, **kept(mlp_tiles=4)), TINY, parse_devices("2xH100"))
    assert (plan.activation_checkpointing, plan.checkpoint_every, plan.mlp_tiles) == ("full", 1, 4)
    assert "activation checkpointing full, each MLP in 4 tiles;" in describe_plan(plan)[0]
    assert not plan.compile and any("compile auto: off, the tiles of an MLP" in line for line in plan.why)
    tiled = kept(mlp_tiles=4)
    refusal(ConfigError, "mlp_tiles=4 does not go with train.compile=true", "compile=auto", compile=True, **tiled)
    refusal(ConfigError, "mlp_tiles=4 does not go with train.precision=fp8", "use bf16", precision="fp8", **tiled)
    refusal(ConfigError, "parallel.tp=2 does not work with train.activation_checkpointing.mlp_tiles", "use full",
            parallel={"tp": 2}, **tiled)  # fmt: skip
    refusal(ConfigError, "mlp_tiles=999 does not go with data.sequence_len", "fewer tiles", **kept(mlp_tiles=999))
    gpus = parse_devices("8xH100")
    alone = resolve_plan(build_recipe("fsdp", activation_offloading=True, **kept(every=2)), TINY, gpus)
    assert not alone.compile  # half of the layers keep what a compiled graph would not give away
    refusal(ConfigError, "train.compile=true", cluster=gpus, activation_offloading=True, compile=True, **kept(every=2))


def test_a_memory_budget_needs_the_compiler():
    gpus = parse_devices("8xH100")
    for recipe in ({"compile": "auto"}, {"compile": True}):
        plan = resolve_plan(build_recipe("fsdp", **kept(memory_budget=0.5), **recipe), TINY, gpus)
        assert (plan.activation_checkpointing, plan.activation_memory_budget, plan.compile) == ("none", 0.5, True)
        assert "within a memory budget of 0.5; compile on" in describe_plan(plan)[0]
    budget = "train.activation_checkpointing.memory_budget"
    refusal(ConfigError, f"{budget}=0.5 needs compiled layers", "train.compile=true", compile=False, cluster=gpus,
            **kept(memory_budget=0.5))  # fmt: skip
    refusal(
        PlanError, budget, "no C++ compiler", cluster=replace(cpus(2), can_compile=False), **kept(memory_budget=0.5)
    )
    refusal(ConfigError, f"does not work with {budget}", cluster=gpus, activation_offloading=True,
            **kept(memory_budget=0.5))  # fmt: skip
    experts = AdapterConfig(method="lora", target_parameters=["experts"])
    refusal(ConfigError, budget, "an adapter replaces", adapter=experts, **kept(memory_budget=0.5))


def test_the_loading_horizon_is_in_the_plan_and_said():
    recipe = build_recipe("fsdp", activation_offloading=3)
    plan = resolve_plan(recipe, TINY, parse_devices("8xH100"))
    assert plan.activation_loading_horizon == 3
    assert "; activations in host memory, loaded 3 layers ahead;" in describe_plan(plan)[0]


def test_offloaded_layers_are_compiled_only_if_they_are_checkpointed():
    plan = auto_strategy("8xH200", batch=8, micro_batch_size=1, activation_offloading=True)
    assert plan.activation_offloading and not plan.compile
    assert any("compile auto: off, the activations" in line for line in plan.why)
    assert "activations in host memory" in describe_plan(plan)[0]
    assert auto_strategy("8xH200", activation_offloading=True, activation_checkpointing="full").compile


def test_auto_takes_the_simplest_that_fits_and_is_about_as_fast():
    # B200 has 162 GB usable, and DDP would fit: fp32 states of 8.03 B parameters take 128 GB, bf16 copies 15 GB.
    assert auto_strategy("8xB200", activation_checkpointing="full").strategy == "zero1"
    # H200, 127 GB usable: 16 + 16 + 96/8 = 44 GB; with one microbatch ZeRO-1 keeps no full gradients
    assert auto_strategy("8xH200", batch=8, micro_batch_size=1).strategy == "zero1"
    # H100, 72 GB usable, 4 microbatches: ZeRO-1 adds 32 GB of full gradients, ZeRO-2 does not
    plan = auto_strategy("8xH100", micro_batch_size=2, activation_checkpointing="full")
    assert plan.strategy == "zero2"
    for line, words in zip(plan.why, ("zero1 needs", "zero2, the fastest"), strict=False):
        assert words in line
    # 13.0 B parameters, 36 GB usable: 26 GB gathered plus 208/16 = 13 GB is too much; 208/8 = 26 GB sharded fits
    recipe = build_recipe(sequence_len=4096, micro_batch_size=1, activation_checkpointing="full")
    assert resolve_plan(recipe, LLAMA_13B, parse_devices("16xA100-40")).strategy == "hsdp"
    assert resolve_plan(recipe, LLAMA_13B, parse_devices("8xA100-40")).strategy == "fsdp"
    alone = auto_strategy("1xB200", micro_batch_size=1, activation_checkpointing="full")
    assert alone.strategy == "zero2" and alone.uses_fully_shard and not alone.uses_autocast
    # without a cast DDP comes first: 8 replicas in fp32, or bf16 weights alone
    assert auto_strategy("8xB200", activation_checkpointing="full", precision="fp32").strategy == "ddp"
    only_bf16 = auto_strategy("8xB200", activation_checkpointing="full", master_weights="bf16_kahan")
    assert only_bf16.strategy == "ddp"


def test_auto_counts_no_gradients_or_moments_of_frozen_weights():
    """8 billion parameters on four GPUs with 40 GB: replicated with an adapter, sharded without."""
    shape = build_shape(
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    )  # fmt: skip
    cluster = parse_devices("4xA100-40")
    lora = build_recipe(adapter=AdapterConfig(method="lora"), activation_checkpointing="full")
    plan = resolve_plan(lora, shape, cluster)
    assert plan.strategy == "ddp" and plan.adapter.num_trained_parameters == 41_943_040
    full = resolve_plan(build_recipe(activation_checkpointing="full"), shape, cluster)
    assert full.tp > 1 and any("fsdp needs" in line for line in full.why)  # only with divided layers


def test_auto_refuses_with_numbers_and_keeps_what_the_recipe_says():
    recipe = {"sequence_len": 8192, "micro_batch_size": 1, "cluster": parse_devices("8xA100-40"), "shape": LLAMA_8B}
    recipe |= {"optimizer": "own_parts:Own", "activation_checkpointing": "none"}  # echelon divides no layers for it
    refusal(
        PlanError, "nothing fits A100-40", "zero1 needs", "fsdp needs", "33.5 GiB available",
        "Set train.activation_checkpointing=full (needs 26.5 GiB", **recipe,
    )  # fmt: skip


def test_a_requested_strategy_is_refused_only_if_its_states_do_not_fit():
    refusal(
        PlanError, "parallel=ddp", "74.5 GiB", "Set parallel=fsdp (needs", "use more devices",
        parallel="ddp", shape=LLAMA_8B, cluster=parse_devices("8xH100"),
    )  # fmt: skip
    plan = resolve_plan(build_recipe("fsdp", sequence_len=32768), LLAMA_8B, parse_devices("8xA100-80"))
    assert plan.micro_batch_size == 1 and any("may run out" in line for line in plan.why)


def test_precision_and_compile():
    plan = resolve_plan(build_recipe(), TINY, parse_devices("2xH100"))
    assert plan.precision == Precision("float32", "bfloat16", "float32", "float32", "float32")
    assert plan.compile and not plan.uses_autocast
    assert resolve_plan(build_recipe("ddp"), TINY, parse_devices("2xH100")).uses_autocast
    plan = resolve_plan(build_recipe(), TINY, cpus(2))
    assert plan.precision == Precision() and not plan.compile and not plan.uses_autocast
    amx = replace(cpus(2), bf16_supported=True)
    assert resolve_plan(build_recipe(), TINY, amx).precision.compute == "bfloat16"
    assert resolve_plan(build_recipe(precision="fp32", compile=True), TINY, amx).compile
    refusal(PlanError, "train.precision=bf16", "V100", "fp32", precision="bf16", cluster=parse_devices("2xV100"))


def test_float8_is_for_gpus_that_have_it_and_compiled_layers():
    plan = resolve_plan(build_recipe("fsdp", precision="fp8"), TINY, parse_devices("8xH100"))
    assert plan.precision == Precision(compute="bfloat16", float8=True) and plan.compile
    assert any("bfloat16, in float8 in linear layers" in line for line in describe_plan(plan))
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    kahan = build_recipe("fsdp", precision="fp8", master_weights="bf16_kahan")
    precision = resolve_plan(kahan, TINY, parse_devices("8xH100")).precision
    assert precision.float8 and precision.rounding == "kahan"
    known = replace(parse_devices("8xA100-80"), float8_supported=True)  # as the driver says of a GPU not in the table
    assert resolve_plan(build_recipe("fsdp", precision="fp8"), TINY, known).precision.float8
    for devices in ("8xA100-80", "2xcpu"):
        refusal(PlanError, "train.precision=fp8", "8.9", "bf16", precision="fp8", cluster=parse_devices(devices))
    hopper = parse_devices("8xH100")
    refusal(ConfigError, "train.compile=false", "precision=bf16", precision="fp8", compile=False, cluster=hopper)


@pytest.mark.parametrize(("precision", "shortest"), [("fp32", 60 / 0.06), ("bf16", 60 / 0.19)])
def test_a_cpu_compiles_for_a_training_that_is_long_enough(precision, shortest):
    """1,000 steps of 64 sequences: the part of the time that compiling saves must exceed the 60 s that it takes."""
    recipe = build_recipe("ddp", precision=precision)
    flops = 1000 * 64 * recipe.data.sequence_len * TINY.flops_per_token(recipe.data.sequence_len)
    for seconds, compiles in ((0.95 * shortest, False), (1.05 * shortest, True)):
        rate = flops / (2 * 0.35 * seconds)
        cpu = replace(ACCELERATORS["cpu"], fp32_flops=rate, bf16_flops=rate)
        cluster = Cluster(cpu, 2, 2, "cpu")
        plan = resolve_plan(recipe, TINY, cluster)
        assert plan.compile is compiles and any("compile auto: o" in line for line in plan.why)
        assert not resolve_plan(recipe, TINY, replace(cluster, can_compile=False)).compile
    by_epochs = build_recipe("ddp", precision=precision, epochs=3)
    assert not resolve_plan(by_epochs, TINY, cluster).compile
    assert resolve_plan(by_epochs, TINY, cluster, num_samples=1000).compile


@pytest.mark.parametrize(("seconds", "words"), [(0.9, "less than 1 s"), (2.4, "about 2s"), (150.0, "about 2m30s")])
def test_the_length_of_a_short_training_is_in_words(seconds, words):
    """1,000 steps of 64 sequences on two processes, at the 35 % of a CPU's peak that is expected."""
    recipe = build_recipe("ddp", precision="fp32")
    flops = 1000 * 64 * recipe.data.sequence_len * TINY.flops_per_token(recipe.data.sequence_len)
    cpu = replace(ACCELERATORS["cpu"], fp32_flops=flops / (2 * 0.35 * seconds))
    why = resolve_plan(recipe, TINY, Cluster(cpu, 2, 2, "cpu")).why
    assert f"compile auto: off, training takes {words} here, and compiling up to 1m00s" in why


def test_sequences_beyond_learned_positions_are_refused():
    gpt2 = build_shape({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 100})
    refusal(ConfigError, "data.sequence_len=128", "100", shape=gpt2)


def test_plan_json_round_trips():
    plan = resolve_plan(build_recipe("hsdp", activation_checkpointing="selective"), TINY, parse_devices("16xH100"))
    content = json.loads(json.dumps(plan.to_dict()))
    assert ParallelPlan.from_dict(content) == plan
    for broken, word in [
        ({**content, "dp_shart": 1}, "unknown dp_shart"),
        ({key: value for key, value in content.items() if key != "dp_shard"}, "misses dp_shard"),
        ({**content, "dp_shard": "8"}, "dp_shard='8'"),
        ({**content, "compile": 1}, "compile=1"),
        ({**content, "reduce_gradients": "never"}, "'never'"),
        ({**content, "precision": {**content["precision"], "compute": "float8"}}, "precision.compute='float8'"),
        ({**content, "precision": None}, "precision=None"),
        ({**content, "why": "because"}, "why="),
        ({**content, "ep": 3}, r"ep=3 .*divide dp_shard \* cp = 8"),
        ({**content, "order": content["order"][1:]}, "order=.*once"),
        ({**content, "order": [*content["order"][1:], content["order"][1]]}, "order=.*once"),
    ]:
        with pytest.raises(PlanError, match=word):
            ParallelPlan.from_dict(broken)


def test_description():
    plan = ParallelPlan("zero1", dp_shard=4, micro_batch_size=2, num_microbatches=3, why=("asked for",))
    plan_line, precision_line, batch_line, why_line = describe_plan(plan)
    assert "zero1 on 4 processes (dp_replicate 1 x dp_shard 4)" in plan_line and "last microbatch" in plan_line
    assert precision_line.startswith("precision: parameters float32, compute float32")
    assert batch_line == "batch: 24 sequences = 4 ranks x 3 microbatches x 2 sequences"
    assert why_line == "why: asked for"


def test_a_run_prints_its_plan_in_a_few_lines():
    """Reasons of automatic choices are left out; lines that a reader should act on are not."""
    whys = ("parallel auto: ddp, it fits", "micro_batch_size auto: 8 of 8", "experts: 93% have no adapter")
    plan = ParallelPlan("ddp", dp_replicate=2, micro_batch_size=8, why=whys)
    assert summarize_plan(plan) == [
        "plan: ddp on 2 processes; computes in float32; compile off",
        "batch: 16 sequences = 2 ranks x 1 microbatch x 8 sequences",
        "why: experts: 93% have no adapter",
        "plan: its reasons and all settings are shown by --verbose and `echelon report`",
    ]
    alone = ParallelPlan("ddp", micro_batch_size=1, precision=Precision(compute="bfloat16"))
    assert summarize_plan(alone) == [
        "plan: ddp on 1 process; computes in bfloat16; compile off",
        "batch: 1 sequence = 1 rank x 1 microbatch x 1 sequence",
    ]
    divided = ParallelPlan("fsdp+tp", dp_shard=2, tp=2, precision=Precision(float8=True))
    assert summarize_plan(divided)[0].startswith("plan: fsdp+tp on 4 processes (dp_shard 2, tp 2);")
    assert any("in float8 in linear layers" in line for line in summarize_plan(divided))


def test_a_resumed_run_pads_uneven_batches():
    plan = resolve_plan(build_recipe(batch=8), TINY, cpus(3), fill=True)
    assert (plan.dp_size, plan.num_microbatches, plan.micro_batch_size, plan.num_fill) == (3, 1, 3, 1)
    assert plan.global_batch_size == 8 and ParallelPlan.from_dict(plan.to_dict()) == plan
    assert "1 padding sequence (11.1% of the computation is wasted)" in "\n".join(describe_plan(plan))
    # A given micro batch that does not divide is replaced by the next smaller one that does.
    plan = resolve_plan(build_recipe(batch=8, micro_batch_size=4), TINY, cpus(3), fill=True)
    assert (plan.num_microbatches, plan.micro_batch_size, plan.num_fill) == (1, 3, 1)
    assert resolve_plan(build_recipe(batch=2), TINY, cpus(5), fill=True).num_fill == 3
    even = resolve_plan(build_recipe(batch=8), TINY, cpus(4), fill=True)
    assert even == resolve_plan(build_recipe(batch=8), TINY, cpus(4)) and even.num_fill == 0


def test_what_compiling_saves_on_a_cpu_is_what_was_measured():
    page = Path(__file__).parents[3] / "benchmarks" / "results" / "cpu-steps.md"
    rows = (line.split("|")[1:3] for line in page.read_text().splitlines() if line.startswith("| "))
    seconds = {name.strip(): float(cell) for name, cell in rows if cell.strip()[0].isdigit()}
    for precision, attention in (("bfloat16", "in blocks"), ("float32", "torch's attention")):
        saved = 1 - seconds[f"{attention}, compiled, memory kept"] / seconds[f"{attention}, memory kept"]
        assert COMPILE_GAIN[precision] == pytest.approx(saved, abs=0.005)
