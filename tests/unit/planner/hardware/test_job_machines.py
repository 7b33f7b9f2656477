"""The machines of a SageMaker job with instance groups: the weakest of all types, the price, and what is refused."""

import re
from dataclasses import replace

import pytest

from echelon.ground.errors import ConfigError
from echelon.launch.sagemaker.launcher import SageMakerLauncher
from echelon.planner.hardware.accelerators import Cluster, parse_devices
from echelon.planner.hardware.instances import INSTANCES, cluster_of, efa_environment
from echelon.planner.hardware.job_machines import find_machines
from echelon.planner.machines import limit_to_weakest
from tests.unit.launch.sagemaker.sagemaker_jobs import RECIPE, make_job
from tests.unit.recipe_samples import load_text


def load(tmp_path, *types, overrides=()):
    """The recipe with one group for each `TYPE` or `COUNT x TYPE`."""
    groups = []
    for index, each in enumerate(types):
        count, _, name = each.rpartition(" x ")
        groups.append(f"{{name: group-{index}, instance_type: {name}, nodes: {count or 1}}}")
    group = f"launch.sagemaker.instance_groups=[{', '.join(groups)}]"
    return load_text(tmp_path, RECIPE, "launch.sagemaker.instance_type=null", group, *overrides)[0]


def test_the_plan_is_for_the_smallest_figures_of_all_types(tmp_path):
    recipe = load(tmp_path, "2 x ml.g6.12xlarge", "ml.g6e.12xlarge")
    machines = find_machines(recipe.launch)
    assert machines.describe() == "2 x ml.g6.12xlarge and 1 x ml.g6e.12xlarge"
    assert (machines.count, recipe.launch.node_range) == (3, (3, 3))
    cluster = cluster_of(machines.weakest, machines.count)
    # An L4 has 24 GB, an L40S 48; the machines have 192 and 384 GiB.
    assert (cluster.accelerator.memory_bytes, cluster.host_memory_bytes) == (24 * 10**9, 192 * 2**30)
    assert (cluster.num_devices, cluster.devices_per_node, cluster.accelerator.name) == (12, 4, "L4 and L40S")
    assert cluster.accelerator.bf16_flops == 121e12 and cluster.has_bf16
    assert machines.usd_per_hour("us-east-1") == pytest.approx((2 * 5.752 + 13.12) / 3)
    assert machines.usd_per_hour("us-west-2") is None


def test_what_one_type_lacks_all_do_without(tmp_path):
    """Of V100-32 and A10G, the one with more memory has no bf16; of p4d and p3dn, one has no RDMA."""
    cluster = cluster_of(find_machines(load(tmp_path, "ml.p3dn.24xlarge", "ml.g5.48xlarge").launch).weakest, 2)
    assert cluster.accelerator.memory_bytes == 24 * 10**9 and not cluster.has_bf16
    efa = find_machines(load(tmp_path, "ml.p4d.24xlarge", "ml.p3dn.24xlarge").launch).weakest
    assert efa_environment(efa) == {"FI_PROVIDER": "efa"}
    assert efa_environment(INSTANCES["ml.p4d.24xlarge"])["FI_EFA_USE_DEVICE_RDMA"] == "1"
    none = find_machines(load(tmp_path, "ml.g4dn.12xlarge", "ml.g7e.24xlarge").launch)
    assert none.price is None and none.weakest.price is None


def test_groups_of_one_type_are_that_type(tmp_path):
    machines = find_machines(load(tmp_path, "2 x ml.g5.12xlarge", "ml.g5.12xlarge").launch)
    assert machines.weakest == INSTANCES["ml.g5.12xlarge"]
    assert (machines.count, machines.price) == (3, INSTANCES["ml.g5.12xlarge"].price)


def test_different_numbers_of_gpus_need_a_number_of_processes(tmp_path):
    with pytest.raises(
        ConfigError, match=r"\(group-0 8, group-1 4\), but a plan .* set launch\.nproc_per_node=4, which"
    ):
        find_machines(load(tmp_path, "ml.g5.48xlarge", "ml.g5.12xlarge").launch)
    four = load(tmp_path, "ml.g5.48xlarge", "ml.g5.12xlarge", overrides=["launch.nproc_per_node=4"])
    assert cluster_of(find_machines(four.launch).weakest, 2, 4).num_devices == 8
    eight = ["launch.nproc_per_node=8"]
    with pytest.raises(
        ConfigError, match=r"launch\.nproc_per_node=8 is more than the 4 GPUs of an ml\.g5\.48xlarge and"
    ):
        cluster_of(
            find_machines(load(tmp_path, "ml.g5.48xlarge", "ml.g5.12xlarge", overrides=eight).launch).weakest, 2, 8
        )


@pytest.mark.parametrize(
    ("groups", "more", "said"),
    [
        (("ml.g5.12xlarge", "2 x ml.c5.18xlarge"), (), "group-1 (ml.c5.18xlarge) has no GPUs, but every machine"),
        (("ml.g5.12xlarge", "ml.trn1.32xlarge"), ("launch.nproc_per_node=4",), "does not train on Trainium"),
        (
            ("ml.g5.12xlarge", "ml.g5.13xlarge"),
            (),
            "launch.sagemaker.instance_groups.1.instance_type=ml.g5.13xlarge is",
        ),
        (
            ("ml.g5.12xlarge",),
            ("launch.nodes=3",),
            "launch.nodes=3 contradicts launch.sagemaker.instance_groups, which",
        ),
        (("ml.g5.12xlarge",), ("launch.sagemaker.instance_type=ml.g5.12xlarge",), "instance_groups are both set"),
        (("ml.m5.xlarge",) * 6, (), "instance_groups"),
        (("ml.m5.xlarge", "ml.g5.xlarge"), ("launch.nproc_per_node=1",), "group-0 (ml.m5.xlarge) has no GPUs"),
        (
            ("ml.p3.8xlarge", "ml.g5.12xlarge"),
            ("launch.sagemaker.kms_key=k", "launch.sagemaker.image=i"),
            "kms_key: some types in launch.sagemaker.instance_groups have local disks",
        ),
    ],
)
def test_groups_that_cannot_train_together_are_refused(tmp_path, groups, more, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        recipe = load(tmp_path, *groups, overrides=more)
        SageMakerLauncher().check(replace(make_job(tmp_path), recipe=recipe))


def test_two_groups_of_one_name_are_refused(tmp_path):
    same = "{name: a, instance_type: ml.g5.12xlarge}"
    with pytest.raises(ConfigError, match=r"two groups have the same name among a, a; rename"):
        make_job(tmp_path, "launch.sagemaker.instance_type=null", f"launch.sagemaker.instance_groups=[{same}, {same}]")


def test_the_planning_process_knows_the_other_types(tmp_path):
    """Rank 0 is on an L40S with 47.7 GB as its driver reports; the other machines have an L4."""
    recipe = load(tmp_path, "ml.g6.xlarge", "ml.g6e.xlarge")
    detected = Cluster(replace(parse_devices("1xL40S").accelerator, memory_bytes=47_700_000_000), 2, 1, "cuda", True)
    inside = {"TRAINING_JOB_NAME": "job"}
    limited = limit_to_weakest(detected, recipe, inside)
    assert (limited.accelerator.memory_bytes, limited.accelerator.name) == (24 * 10**9, "L4 and L40S")
    assert limited.has_bf16 and (limited.num_devices, limited.devices_per_node) == (2, 1)
    small = replace(detected, accelerator=replace(parse_devices("1xL4").accelerator, memory_bytes=23_000_000_000))
    assert limit_to_weakest(small, recipe, inside).accelerator == replace(
        limited.accelerator, memory_bytes=23_000_000_000
    )
    assert limit_to_weakest(detected, recipe, {}) is detected  # a laptop
    assert limit_to_weakest(detected, load_text(tmp_path, RECIPE)[0], inside) is detected
    assert not limit_to_weakest(detected, load(tmp_path, "ml.g4dn.xlarge", "ml.g6e.xlarge"), inside).has_bf16
    cpus = load(tmp_path, "ml.m5.xlarge", "ml.c5.xlarge")
    here = replace(parse_devices("4xcpu"), devices_per_node=2)
    here = replace(here, accelerator=replace(here.accelerator, memory_bytes=10**12, bf16_flops=1.0, fp32_flops=2.0))
    # Two processes share the 8 GiB of a c5.xlarge.
    expected = replace(here, accelerator=replace(here.accelerator, memory_bytes=4 * 2**30))
    assert limit_to_weakest(here, cpus, inside) == expected
