"""A loss that is one function of logits trains under every plan as in one process."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from echelon.learn.model.parts import HeadArithmetic
from echelon.learn.objectives import loss_function
from echelon.learn.objectives.loss import SHARD_PASSES, VocabularyShard, token_loss_sum
from echelon.learn.objectives.loss_function import chunked_function_sum
from echelon.learn.objectives.outputs import ObjectiveModule
from tests.parity.loss_functions import smoothed_with_z
from tests.parity.training import Row, check_training, references, train, with_ranks

pytestmark = pytest.mark.dist

LOSS = {"objective": {"name": "tests.parity.loss_functions:smoothed_with_z", "options": {"weight": 0.02}}}

ROWS = [
    Row({"tp": 2}, ranks=2, family="gemma2", tied=True),
    Row({"pp": 2}, ranks=2, micro_batch=2, tied=True),
    with_ranks(Row("fsdp", checkpointing="full"), 2, micro_batch=2),
    Row({"cp": 2}, ranks=2),
    pytest.param(with_ranks(Row("ddp", compile=True), 2, micro_batch=2), marks=pytest.mark.slow),
    pytest.param(with_ranks(Row("zero1", precision="fp16"), 2), marks=pytest.mark.slow),
    pytest.param(Row({"tp": 2, "pp": 2}, ranks=4, micro_batch=2), marks=pytest.mark.slow),
    pytest.param(with_ranks(Row("fsdp", adapter="lora", precision="bf16"), 2), marks=pytest.mark.slow),
    pytest.param(Row({"pp": 2, "schedule": "zero_bubble"}, ranks=2, micro_batch=2), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def alone(workers, text, tmp_path_factory):
    return references(workers, text, tmp_path_factory.mktemp, LOSS)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_process(workers, alone, text, tmp_path, row):
    rows, expected = train(workers, replace(row, changes=LOSS), tmp_path, text), alone(row)
    ours, theirs, loss_bound = check_training(row, rows, expected)
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=loss_bound)


def test_it_is_not_cross_entropy(workers, alone, text, tmp_path):
    """The options of the recipe reach the function: its terms are in the losses."""
    plain = train(workers, Row(), tmp_path, text)[0]["loss"]
    assert alone(Row())[0]["loss"] > plain + 0.3


def differentiate(rank, world_size):
    """The loss and the gradients of a head that two ranks divide, and of the whole one."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 6, generator=generator, requires_grad=True)
    weight = torch.randn(64, 6, generator=generator, requires_grad=True)
    bias = torch.randn(64, generator=generator, requires_grad=True)
    labels = torch.randint(0, 64, (2, 9), generator=generator)
    labels[0, :4] = -100
    leaves, part = [hidden, weight, bias], slice(32 * rank, 32 * rank + 32)
    vocabulary = VocabularyShard(part.start, dist.group.WORLD)
    arithmetic, found = HeadArithmetic(0.5, 3.0), []
    with mock.patch.object(loss_function, "logits_chunk_tokens", lambda *_: 5):
        for head, shard in (((weight, bias), None), ((weight[part], bias[part]), vocabulary)):
            loss = chunked_function_sum(smoothed_with_z, hidden, labels, {}, *head, arithmetic, shard)
            found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for gradient in found[1][1:]:  # every rank has its share of each: of the hidden states, and of its rows
        dist.all_reduce(gradient)
    return found


def test_a_divided_vocabulary_gives_the_gradients_of_the_whole(workers):
    for whole, divided in workers.run(differentiate, 2):
        for expected, ours in zip(whole, divided, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def differentiate_compiled(rank, world_size):
    """The graphs compiled for the cross-entropy of a divided vocabulary; its loss and gradient, and those of all."""
    generator, graphs = torch.Generator().manual_seed(0), []
    logits, labels = torch.randn(9, 64, generator=generator) * 4, torch.randint(0, 64, (9,), generator=generator)
    labels[:3], part = -100, slice(32 * rank, 32 * rank + 32)
    module, found = ObjectiveModule.__new__(ObjectiveModule), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    ObjectiveModule.compile_loss(module, count)
    for arithmetic in (HeadArithmetic(), HeadArithmetic(0.5, 3.0)):
        shards = [VocabularyShard(part.start, dist.group.WORLD, passes) for passes in (module.of_shard, SHARD_PASSES)]
        ours, eager = (shard.loss_and_gradient(logits[:, part], labels, arithmetic, 2.0) for shard in shards)
        leaf = logits.clone().requires_grad_()
        loss = token_loss_sum(arithmetic.apply(leaf), labels)
        loss.mul(2.0).backward()
        found.append((ours, eager, (loss.detach(), leaf.grad[:, part])))
    return len(graphs), found


def test_the_loss_of_a_divided_vocabulary_is_compiled_around_its_two_sums(workers):
    """Three graphs for each arithmetic; the loss and the gradient are those that autograd finds in one process."""
    for num_graphs, cases in workers.run(differentiate_compiled, 2):
        assert num_graphs == 6
        for compiled, eager, expected in cases:
            torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(eager, expected, rtol=1e-5, atol=1e-6)
