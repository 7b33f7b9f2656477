"""The SDK's `distribution` dictionaries and their conversion."""

import json
import re

import pytest

from echelon.ground.errors import ConfigError
from echelon.launch.job_checks import check_job
from echelon.launch.sagemaker.launcher import SageMakerLauncher
from echelon.launch.sagemaker.request import build_submission
from tests.unit.launch.sagemaker.sagemaker_jobs import RECIPE, make_job

P4D = "launch.sagemaker.instance_type=ml.p4d.24xlarge"


def submit(tmp_path, distribution, *overrides):
    # JSON is YAML, so the text of a dictionary can be used unchanged
    return build_submission(make_job(tmp_path, f"launch.sagemaker.distribution={json.dumps(distribution)}", *overrides))


def smp(launcher, **parameters):
    return {**launcher, "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}}


V2 = {"torch_distributed": {"enabled": True}}
V1 = {"mpi": {"enabled": True, "processes_per_host": 4}}
SMDDP = {"smdistributed": {"dataparallel": {"enabled": True}}}


@pytest.mark.parametrize(
    ("distribution", "parallel"),
    [
        ({"torch_distributed": {"enabled": True}}, "auto"),
        ({"torch_distributed": {"enabled": True}, "mpi": {"enabled": False}}, "auto"),
        ({"pytorchddp": {"enabled": True}}, "ddp"),
        (smp(V2), "auto"),
        (smp(V2, hybrid_shard_degree=0), {"dp_replicate": None, "dp_shard": "auto"}),
        (smp(V2, hybrid_shard_degree=1), {"dp_replicate": "auto", "dp_shard": None}),
        (smp(V2, hybrid_shard_degree=4), {"dp_replicate": "auto", "dp_shard": 4}),
        (smp(V2, sm_activation_offloading=False, fsdp_cache_flush_warnings=True), "auto"),
        (smp(V1, sharded_data_parallel_degree=2, ddp=True), {"dp_replicate": "auto", "dp_shard": 2}),
        (smp(V1, partitions=2, microbatches=2, placement_strategy="cluster"), {"pp": 2, "microbatches": 2}),
        (smp(V1, microbatches=4, placement_strategy="spread"), {"dp_replicate": "auto", "pp": 1}),
        (smp(V1, sdp_reduce_bucket_size=5e8, sdp_max_live_parameters=10**9), "auto"),
    ],
)
def test_the_resulting_plan(tmp_path, distribution, parallel):
    # Two machines of four GPUs.
    plan = submit(tmp_path, distribution, "launch.nodes=2").staging.recipe.parallel
    if isinstance(parallel, dict):
        assert {name: getattr(plan, name) for name in parallel} == parallel
    else:
        assert plan == parallel


@pytest.mark.parametrize(
    "flat",
    [
        {"microbatches": 2, "partitions": 2, "placement_strategy": "spread"},
        {"enabled": True, "parameters": {"microbatches": 2, "partitions": 2, "placement_strategy": "spread"}},
    ],
)
def test_the_flat_dictionary_of_old_examples_is_that_of_the_sdk(tmp_path, flat):
    given = submit(tmp_path, {"smdistributed_modelparallel": flat}, "launch.nodes=2")
    nested = submit(tmp_path, smp({"mpi": {"enabled": True}}, **(flat.get("parameters") or flat)), "launch.nodes=2")
    assert given.staging.recipe.parallel == nested.staging.recipe.parallel
    assert given.staging.recipe.parallel.pp == 2
    assert any(
        "smdistributed_modelparallel -> smdistributed.modelparallel, started by mpi" in line for line in given.lines
    )


def test_settings_of_the_library_are_keys_of_the_recipe(tmp_path):
    recipe = submit(tmp_path, smp(V2, random_seed=7)).staging.recipe
    assert recipe.run.seed == 7
    recipe = submit(tmp_path, smp(V1, fp16=True, sdp_gradient_clipping=0.5)).staging.recipe
    assert (recipe.train.precision, recipe.optim.max_grad_norm) == ("fp16", 0.5)
    train = submit(tmp_path, smp(V2, sm_activation_offloading=True, activation_loading_horizon=3)).staging.recipe.train
    assert train.activation_offloading == 2


def test_each_parameter_has_a_message(tmp_path):
    parameters = {"hybrid_shard_degree": 4, "random_seed": 7, "allow_empty_shards": True}
    lines = submit(tmp_path, smp(V2, **parameters)).lines
    assert [sum(f"{name}" in line for line in lines) for name in parameters] == [1, 1, 1]
    assert any("hybrid_shard_degree=4 -> parallel.dp_replicate=auto, parallel.dp_shard=4" in line for line in lines)


def test_mpi_sets_processes_and_variables(tmp_path):
    options = "-verbose -x NCCL_DEBUG=VERSION -x 'NOTE=two words' -x PATH"
    submission = submit(tmp_path, {"mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": options}})
    assert submission.staging.recipe.launch.nproc_per_node == 2
    assert submission.request["Environment"] == {"NCCL_DEBUG": "VERSION", "NOTE": "two words"}


def test_other_engines_are_started_by_their_entries(tmp_path):
    machine = "launch.sagemaker.instance_type=ml.m5.4xlarge"
    mirrored = submit(tmp_path, {"multi_worker_mirrored_strategy": {"enabled": True}}, "parallel=ddp", machine)
    assert mirrored.staging.recipe.engine == "tensorflow"
    assert any("multi_worker_mirrored_strategy -> engine=tensorflow" in line for line in mirrored.lines)
    served = submit(tmp_path, {"parameter_server": {"enabled": True}}, "parallel=ddp", machine)
    assert (served.staging.recipe.engine, served.staging.recipe.sync.name) == ("native", "parameter_server")
    assert any("distribution.parameter_server -> sync.name=parameter_server" in line for line in served.lines)
    ours = "launch.sagemaker.image=111122223333.dkr.ecr.us-west-2.amazonaws.com/ours:1"
    horovod = ("engine=horovod", "parallel=ddp", ours)
    under_mpi = submit(tmp_path, {"mpi": {"enabled": True, "processes_per_host": 2}}, *horovod)
    assert under_mpi.staging.recipe.engine == "horovod"
    assert under_mpi.staging.recipe.launch.nproc_per_node == 2


@pytest.mark.parametrize(
    ("distribution", "lines"),
    [
        ({"pytorchx": {"enabled": True}}, ["pytorchx -> torch_distributed"]),
        (SMDDP, ["smdistributed.dataparallel -> torch_distributed, which trains the same model over NCCL"]),
        ({"smdistributed_dataparallel": {"enabled": True}},
         ["smdistributed_dataparallel -> smdistributed.dataparallel", "dataparallel -> torch_distributed, which"]),
    ],
    ids=str,
)  # fmt: skip
def test_other_names_of_the_same_training(tmp_path, distribution, lines):
    """The job is that of torch_distributed, and a line says so."""
    given, plain = (submit(tmp_path, each, "parallel=fsdp", P4D) for each in (distribution, V2))
    assert given.staging.recipe.parallel == plain.staging.recipe.parallel
    told = "\n".join(given.lines)
    assert all(line in told for line in lines)


REFUSED = [
    ({}, [], "has no enabled entry"),
    ({"torch_distributed": {"enabled": False}}, [], "has no enabled entry"),
    ({"torch_distributed": True}, [], "must be a mapping"),
    ({"torch_distributed": {"enabled": "yes"}}, [], "torch_distributed.enabled=yes is neither"),
    ({"torch_distributed": {"on": True}}, [], "torch_distributed.on is unknown"),
    ({"torchrun": {"enabled": True}}, [], "distribution.torchrun is not a distribution"),
    ({"pytorchxla": {"enabled": True}}, [], "train.compile=true"),
    ({"parameter_server": {"enabled": True}}, ["engine=tensorflow"],
     "is for engine=native, and the recipe has engine=tensorflow; remove one."),
    ({"parameter_server": {"enabled": True}}, ["sync.name=diloco"], "contradicts sync.name=diloco"),
    ({"multi_worker_mirrored_strategy": {"enabled": True}}, ["engine=horovod"], "engine=horovod is another one"),
    ({"multi_worker_mirrored_strategy": {"enabled": True}}, ["tensorflow.strategy=mirrored", "engine=tensorflow"],
     "contradicts tensorflow.strategy=mirrored"),
    ({"instance_groups": []}, [], "every machine of a job trains"),
    ({"torch_distributed": {"enabled": True}, "mpi": {"enabled": True}}, [], "one distribution"),
    ({"smdistributed": {"dataparallel": {"enabled": True}, "modelparallel": {"enabled": True}}}, [], "one distr"),
    ({"smdistributed": {"modelparallel": {"enabled": True}}}, [], "its launcher: torch_distributed: {enabled: true} f"),
    (smp(V2, random_seed=1.5), [], "parameters: run.seed=1.5 must be a whole number"),
    ({"smdistributed": {"debugger": {"enabled": True}}}, [], "smdistributed.debugger is unknown; known: dataparallel"),
    ({"mpi": {"enabled": True, "processes_per_host": 0}}, [], "processes_per_host=0 must be"),
    ({"mpi": {"enabled": True, "processes_per_host": 8}}, [], "launch.nproc_per_node=8 is more than the 4 GPUs"),
    ({"mpi": {"enabled": True, "processes_per_host": 2}}, ["launch.nproc_per_node=4"], "nproc_per_node=4; remove one"),
    ({"mpi": {"enabled": True, "custom_mpi_options": "--bind-to none"}}, [], "options: --bind-to is an option"),
    ({"mpi": {"enabled": True, "custom_mpi_options": "-x 'A=b"}}, [], "balanced quotes"),
    ({"pytorchddp": {"enabled": True}}, ["parallel=fsdp"], "pytorchddp is DDP, and parallel=fsdp"),
    ({"smdistributed_dataparallel": {"enabled": True}, **SMDDP}, [], "remove one of both"),
    ({"pytorchx": {"enabled": True}, **V2}, [], "it is another name of torch_distributed; remove one of both"),
    (smp(V2, microbatches=4), [], "microbatches belongs to version 1 of the library, which runs under mpi"),
    (smp(V1, hybrid_shard_degree=4), [], "hybrid_shard_degree belongs to version 2 of the library"),
    (smp(V1, fp16=True), ["train.precision=bf16"], "fp16 sets train.precision=fp16, but the recipe has"),
    (smp(V2, hybrid_shard_degree=4), ["parallel=ddp"], "hybrid_shard_degree sets parallel={dp_replicate: auto"),
    (smp(V1, auto_partition=False), [], "modelparallel.parameters.auto_partition=false: code does not assign"),
]  # fmt: skip


@pytest.mark.parametrize(("distribution", "overrides", "words"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_refused_by_name_with_an_alternative(tmp_path, distribution, overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        submit(tmp_path, distribution, *overrides)


def test_the_checked_plan_is_the_one_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = make_job(
        tmp_path, "launch.nodes=2", text=f"{RECIPE}    distribution: {json.dumps(smp(V2, hybrid_shard_degree=0))}"
    )
    assert any(line.startswith("plan: fsdp on 8 x A10G") for line in check_job(job).lines)


def test_messages_reach_the_user(tmp_path):
    job = make_job(tmp_path, text=RECIPE + "    distribution: {pytorchddp: {enabled: true}}\n")
    assert any("parallel=ddp over NCCL" in line for line in SageMakerLauncher().check(job))
