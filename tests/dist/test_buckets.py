"""Compressed gradients are sent while the backward pass goes on, and an error while they are sent is not lost."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.learn.parallel.data_parallel import Reduction, reduce_bucket
from echelon.learn.reduction import Buckets, TopK

pytestmark = pytest.mark.dist

PATIENCE_SECONDS = 20


class Patient(TopK):
    """Sends every value of a bucket, once the backward pass has come to the first layer."""

    def __init__(self, trained, group, reached):
        super().__init__(trained, 1.0, group)
        self._reached = reached

    def reduce(self, step, tensors):
        assert self._reached.wait(PATIENCE_SECONDS), "the backward pass waits for the sum"
        super().reduce(step, tensors)


def wide_model():
    """The weights of the last layer fill the first bucket of DDP, of a megabyte."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 600))


def loss_of(model, rank):
    return model(torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))).square().mean()


def gradients_of(model):
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def sum_in_buckets(rank, world_size):
    """The sums of the gradients of all ranks, as this rank has them, and those of plain autograd."""
    model, reached = wide_model(), threading.Event()
    model[0].register_full_backward_pre_hook(lambda *_: reached.set())
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    trained = dict(model.named_parameters())
    buckets = Buckets(Patient(trained, dist.group.WORLD, reached), has_thread=True)
    names = {id(each): name for name, each in trained.items()}
    ddp.register_comm_hook(Reduction(dist.group.WORLD, buckets, names), reduce_bucket)
    loss_of(ddp, rank).backward()
    buckets.finish()
    plain = wide_model()
    sum(loss_of(plain, each) for each in range(world_size)).backward()
    return gradients_of(model), gradients_of(plain)


@pytest.mark.slow
def test_the_backward_pass_does_not_wait_for_a_sum(workers):
    for ours, theirs in workers.run(sum_in_buckets, 2):
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[name], atol=1e-6, rtol=1e-5)


class Broken:
    """Fails at the second bucket."""

    def __init__(self):
        self.num_sums = 0

    def reduce(self, step, tensors):
        self.num_sums += 1
        if self.num_sums == 2:
            raise ConnectionError("the peer is gone")


def test_an_error_while_a_bucket_is_sent_is_raised():
    buckets, values = Buckets(Broken(), has_thread=True), torch.ones(3)
    for _ in range(3):
        assert buckets.sum(0, {"weight": values}, values).wait() is values, "nobody waits forever"
    with pytest.raises(ConnectionError, match="the peer is gone"):
        buckets.finish()
    buckets.finish()
