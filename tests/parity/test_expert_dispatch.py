"""The dispatch of tokens to experts: outputs, gradients, traffic, and what the host reads."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.model.build import build_on_meta, load_config
from echelon.parallel.expert import ExpertDispatch, ExpertGroup, find_experts
from families import small_config
from test_host_reads import HostReads

pytestmark = pytest.mark.dist

TOKENS = (24, 40)  # of the two ranks
CHOSEN = 2


class Exchanges(TorchDispatchMode):
    """Notes the bytes of the rows that this rank gives to each all-to-all."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.c10d.alltoall_base_.default:
            self.sizes.append(args[1].numel() * args[1].element_size())
        return operation(*args, **(kwargs or {}))


def build_experts(family):
    """The experts of a layer, with random weights."""
    found = find_experts(build_on_meta(load_config(small_config(family))))
    experts = copy.deepcopy(next(iter(found.values()))).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(5)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return experts


def build_tokens(num_experts, lonely):
    """All ranks' hidden states, experts and weights; `lonely`: no token needs an expert of the second rank."""
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(sum(TOKENS), 64, generator=generator)
    limit = num_experts // 2 if lonely else num_experts
    chosen = torch.rand(sum(TOKENS), limit, generator=generator).argsort(-1)[:, :CHOSEN]
    return hidden, chosen, torch.rand(sum(TOKENS), CHOSEN, generator=generator)


def run_whole(family, lonely):
    """Outputs and gradients of all tokens in one process."""
    experts = build_experts(family)
    hidden, chosen, weights = build_tokens(experts.num_experts, lonely)
    hidden.requires_grad_(), weights.requires_grad_()
    outputs = type(experts).forward.__wrapped__(experts, hidden, chosen, weights)
    outputs.square().sum().backward()
    return outputs.detach(), hidden.grad, weights.grad, {name: each.grad for name, each in experts.named_parameters()}


def run_part(rank, world_size, family, lonely, has_fixed_capacity):
    """Outputs and gradients of this rank's tokens and experts; bytes sent; reads of the host."""
    experts = build_experts(family)
    num_experts = experts.num_experts
    hidden, chosen, weights = build_tokens(num_experts, lonely)
    share = num_experts // world_size
    for name, each in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(each.detach()[rank * share : (rank + 1) * share].clone()))
    tokens = TOKENS if not has_fixed_capacity else (32, 32)
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    hidden, weights = hidden[mine].clone().requires_grad_(), weights[mine].clone().requires_grad_()
    group = ExpertGroup(DeviceMesh("cpu", list(range(world_size))).get_group(), has_fixed_capacity)
    with HostReads() as reads, Exchanges() as exchanges:
        outputs = ExpertDispatch(experts, group, num_experts)(hidden, chosen[mine], weights)
        outputs.square().sum().backward()
    gradients = {name: each.grad for name, each in experts.named_parameters()}
    sent = [int((chosen[mine] // share == peer).sum()) for peer in range(world_size)]
    received = int((chosen // share == rank).sum())
    return outputs.detach(), hidden.grad, weights.grad, gradients, exchanges.sizes, (sum(sent), received), reads.found


@pytest.mark.parametrize("has_fixed_capacity", [False, True], ids=["exact", "fixed capacity"])
@pytest.mark.parametrize(
    ("family", "lonely"), [("qwen3_moe", False), ("mixtral", True), ("deepseek_v3", False)], ids=str
)
def test_outputs_gradients_and_bytes(workers, family, lonely, has_fixed_capacity):
    parts = workers.run(run_part, 2, family, lonely, has_fixed_capacity)
    whole = run_whole(family, lonely)
    for place in range(3):
        torch.testing.assert_close(torch.cat([part[place] for part in parts]), whole[place], rtol=1e-4, atol=1e-5)
    for name, expected in whole[3].items():
        found = torch.cat([part[3][name] for part in parts])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    num_experts = len(next(iter(whole[3].values())))
    for *_, sizes, (sent, received), reads in parts:
        if has_fixed_capacity:
            sent = received = 2 * 32 * min(CHOSEN, num_experts // 2)
            assert reads == []
        row = 64 * 4
        assert sizes == [8 * num_experts, row * sent, row * received, row * sent, row * received]
