"""The dispatch of tokens to experts: outputs, gradients, traffic, and what the host reads."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.parallel import expert
from echelon.learn.parallel.kept_activations import checkpoint_activations
from echelon.planner.plan import ParallelPlan
from tests.families import small_config
from tests.parity.test_host_reads import HostReads

pytestmark = pytest.mark.dist

TOKENS = (24, 40)  # of the two ranks
CHOSEN = 2
GROUPS = {False: expert.ExpertGroup, True: expert.FixedCapacity}


class Exchanges(TorchDispatchMode):
    """Notes the bytes of the rows that this rank gives to each all-to-all."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        sent = {torch.ops.c10d.alltoall_base_.default: 1, torch.ops._c10d_functional.all_to_all_single.default: 0}
        if operation in sent:
            rows = args[sent[operation]]
            self.sizes.append(rows.numel() * rows.element_size())
        return operation(*args, **(kwargs or {}))


def build_experts(family):
    """The experts of a layer, with random weights."""
    found = expert.find_experts(build_on_meta(load_config(small_config(family))))
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
    group = GROUPS[has_fixed_capacity](DeviceMesh("cpu", list(range(world_size))).get_group())
    with HostReads() as reads, Exchanges() as exchanges:
        outputs = expert.ExpertDispatch(experts, group, num_experts)(hidden, chosen[mine], weights)
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


def run_divided(rank, world_size, parallel):
    """How the experts of a model are exchanged on GPUs: the groups of `divide_experts`."""
    plan = ParallelPlan("fsdp", **parallel)
    meshes = replace(build_mesh(plan, "cpu"), device_type="cuda")
    model = build_on_meta(load_config(small_config("mixtral")))
    expert.divide_experts(model, plan, meshes)
    return {type(dispatch.group) for dispatch in expert.find_dispatches(model)}


def test_gpus_exchange_only_the_rows_that_are_needed(workers):
    """Not ep times as many, for the host reads their numbers. With tp alone nothing is sent, and the host need not."""
    for parallel, kind in (({"dp_shard": 2, "ep": 2}, expert.ExpertGroup), ({"tp": 2}, expert.FixedCapacity)):
        assert workers.run(run_divided, 2, parallel) == [{kind}] * 2


class Tolists(TorchFunctionMode):
    """Counts how often the host reads the numbers of a tensor."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.Tensor.tolist, torch.Tensor.item)
        return function(*args, **(kwargs or {}))


def run_again(rank, world_size, policy, changed):
    """Bytes sent and reads of a checkpointed pass, of its repetition with the backward pass, and all gradients."""
    hidden, chosen, weights = build_tokens(build_experts("qwen3_moe").num_experts, False)
    mine = slice(rank * 32, rank * 32 + 32)
    hidden, weights = hidden[mine].clone().requires_grad_(), weights[mine].clone().requires_grad_()
    experts, outcomes = build_experts("qwen3_moe"), []
    share = experts.num_experts // world_size
    for name, each in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(each.detach()[rank * share : (rank + 1) * share].clone()))
    layer = nn.Module()
    layer.experts = experts
    group = expert.ExpertGroup(DeviceMesh("cpu", list(range(world_size))).get_group())
    experts.forward = expert.ExpertDispatch(experts, group, share * world_size)
    # the second as if rounding had chosen other experts
    choices, passes = [chosen[mine], (chosen[mine] + 1) % experts.num_experts], []

    def forward(hidden, weights):
        passes.append(None)
        return experts(hidden, choices[changed and len(passes) > 1], weights).square()

    layer.forward = forward
    checkpoint_activations([layer], policy)
    with Tolists() as reads, Exchanges() as exchanges:
        loss = layer.forward(hidden, weights).sum()
        outcomes.append((reads.count, len(exchanges.sizes)))
        loss.backward()
        outcomes.append((reads.count, len(exchanges.sizes)))
    return outcomes, len(passes), [hidden.grad, *(each.grad for each in experts.parameters())]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_repeated_pass_takes_the_same_route(workers, policy):
    """One read of the host and one exchange of numbers, and the same gradients. `selective` keeps what was sent."""
    plain = workers.run(run_again, 2, "none", False)
    for (outcomes, num_passes, gradients), (_, _, expected) in zip(
        workers.run(run_again, 2, policy, False), plain, strict=True
    ):
        assert outcomes == [(1, 3), (1, 7 if policy == "full" else 5)] and num_passes == 2
        for found, exact in zip(gradients, expected, strict=True):
            torch.testing.assert_close(found, exact, rtol=0, atol=0)
    for outcomes, _, _ in workers.run(run_again, 2, policy, True):
        assert outcomes[-1] == (1, 7 if policy == "full" else 5), (
            "a repetition that chooses otherwise sends the rows of the first pass"
        )


def run_shares(rank, world_size, family, num_ranks, has_fixed_capacity):
    """Outputs and gradients of this rank's tokens, added up over the shares of two ranks of tp; of its experts."""
    hidden, chosen, weights = build_tokens(build_experts(family).num_experts, False)
    mine = slice(rank * 32, rank * 32 + 32)
    hidden, weights = hidden[mine].clone().requires_grad_(), weights[mine].clone().requires_grad_()
    ranks = DeviceMesh("cpu", list(range(world_size))).get_group() if num_ranks > 1 else None
    shares, outputs = [], 0
    with HostReads() as reads, Exchanges() as exchanges:
        for index in range(2):
            experts = build_experts(family)
            size = experts.num_experts // num_ranks // 2
            first = (2 * rank if num_ranks > 1 else 0) * size + index * size
            for name, each in list(experts.named_parameters()):
                setattr(experts, name, nn.Parameter(each.detach()[first : first + size].clone()))
            dispatch = expert.ExpertDispatch(
                experts, GROUPS[has_fixed_capacity](ranks), experts.num_experts, expert.Share(index, 2)
            )
            outputs = outputs + dispatch(hidden, chosen[mine], weights)
            shares.append(experts)
        outputs.square().sum().backward()
    names = [name for name, _ in shares[0].named_parameters()]
    gradients = {name: torch.cat([getattr(each, name).grad for each in shares]) for name in names}
    return outputs.detach(), hidden.grad, weights.grad, gradients, exchanges.sizes, reads.found


@pytest.mark.parametrize("has_fixed_capacity", [False, True], ids=["exact", "fixed capacity"])
@pytest.mark.parametrize("num_ranks", [1, 2], ids=["tp", "tp and ep"])
def test_the_shares_of_tensor_parallelism_add_up(workers, num_ranks, has_fixed_capacity):
    """Each process computes both shares of its experts: without ep those of all experts, and with it of one half.

    Together the shares send each pair once.
    """
    parts, whole = workers.run(run_shares, 2, "qwen3_moe", num_ranks, has_fixed_capacity), run_whole("qwen3_moe", False)
    for place in range(3):
        torch.testing.assert_close(torch.cat([part[place] for part in parts]), whole[place], rtol=1e-4, atol=1e-5)
    for name, expected in whole[3].items():
        halves = [part[3][name] for part in parts]
        found = torch.cat(halves) if num_ranks > 1 else halves[0] + halves[1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    row, num_experts = 64 * 4, len(next(iter(whole[3].values())))
    for *_, sizes, reads in parts:
        if num_ranks == 1:
            assert sizes == []
        else:
            first, second = sizes[:3], sizes[3:6]  # of the forward passes: numbers of pairs, rows, results
            assert first[0] == second[0] == 8 * num_experts // 2
            rows = [2 * 32 * min(CHOSEN, num_experts // 4)] * 2 if has_fixed_capacity else [32 * CHOSEN]
            assert first[1] + second[1] == row * sum(rows)
        if has_fixed_capacity:
            assert reads == []
