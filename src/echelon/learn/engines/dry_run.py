"""Builds what one rank of a plan holds, on meta and without other ranks: a check of a plan before it costs anything.

The rank is one of a fake process group, which sends nothing. The model, its division and its optimizer are the real
ones, so what fails to divide here would fail on the devices.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines.prepared_layers import prepare_layers
from echelon.learn.model.build import build_on_meta
from echelon.learn.model.divided_copy import check_divides
from echelon.learn.model.router import choose_router_loss
from echelon.learn.model.sharding import local_part
from echelon.learn.model.traits import apply_plain_causal, find_traits
from echelon.learn.optimizer import build_optimizer
from echelon.learn.parallel import shard_stages
from echelon.planner.memory_parts import StoredBytes
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe


def build_rank(recipe: Recipe, config: PretrainedConfig, plan: ParallelPlan, rank: int) -> StoredBytes:
    """Build a rank of a plan, and return the bytes that it would store. No memory is allocated for weights.

    This process must not have a process group, and can build one rank only: PyTorch keeps meshes of the first one.

    Raises:
        ConfigError: the model cannot be divided as planned.
    """
    skeleton = build_on_meta(config, recipe.model.attn_implementation, recipe.model.trust_remote_code)
    traits = find_traits(skeleton, recipe.data.sequence_len)
    apply_plain_causal(skeleton, traits)
    if plan.cp_method is not None:
        check_divides(skeleton, plan.cp_method, traits, recipe.data.sequence_len)
    with _pretended_ranks(rank, plan.world_size):
        meshes = build_mesh(plan, "cpu")
        new_tokens = range(len(recipe.model.new_tokens))  # sizes depend on their number, not on their ids
        model = prepare_layers(skeleton, recipe, plan, "cpu", False, new_tokens)
        router = choose_router_loss(skeleton, model, recipe.objective.router_loss).loss
        shard_stages(model, skeleton, plan, meshes, "inductor", traits, () if router is None else router.routers)
        optimizer = build_optimizer(model, recipe.optim, recipe.train.master_weights, recipe.run.seed)
        return StoredBytes(
            parameters=_count_bytes(model.parameters()),
            gradients=_count_bytes(parameter for parameter in model.parameters() if parameter.requires_grad),
            optimizer=_count_bytes(tensor for _, tensor in optimizer.tensors()),
        )


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor.detach()).nbytes for tensor in tensors)


@contextmanager
def _pretended_ranks(rank: int, world_size: int) -> Iterator[None]:
    """A scope in which this process is one rank of a job whose other ranks do not exist."""
    # PyTorch has it nowhere else. Its collectives return without sending.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
