"""The router loss: DeepSeek-V3's formula under any microbatches, and its difference from transformers'."""

import copy
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import MixtralPreTrainedModel, load_balancing_loss_func

from echelon.learn.data.loader import Microbatch, positions_in_documents
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.parts import find_layers
from echelon.learn.model.router import (
    Router,
    RouterChoice,
    RouterTap,
    balance_sum,
    choose_router_loss,
    find_coefficient,
    find_routers,
    number_sequences,
)
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import training_sums
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.objectives.pairs import DPO
from echelon.learn.parallel.kept_activations import checkpoint_activations
from tests.families import microbatch_of, random_batch, small_config, small_model

EXPERTS, CHOSEN = 8, 2


def softmax(logits):
    return logits.softmax(-1)


def deepseek(logits, scores):
    """Equations 17 to 20 of arXiv:2412.19437 for one sequence, alpha 1, in loops: logits [tokens, experts]."""
    scores = scores(logits).numpy().astype(np.float64)
    num_tokens, num_experts = scores.shape
    total = 0.0
    for expert in range(num_experts):
        chosen = sum(expert in np.argsort(-row)[:CHOSEN] for row in scores)
        f = num_experts / (CHOSEN * num_tokens) * chosen
        p = sum(row[expert] / row.sum() for row in scores) / num_tokens
        total += f * p
    return total


def random_logits(*shape, seed=0):
    return torch.randn(*shape, EXPERTS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scores", [softmax, torch.sigmoid])
def test_a_sequence_equals_deepseeks_formula(scores):
    logits = random_logits(1, 13)
    router = Router("gate", 0, CHOSEN, scores)
    sequences = number_sequences(torch.ones(1, 13, dtype=torch.bool), torch.ones(1, 13), None)
    assert balance_sum(logits, router, sequences).item() / 13 == pytest.approx(deepseek(logits[0], scores), rel=1e-6)


def test_documents_and_padding_are_separate():
    """Rows of two documents and padding: each document is weighted by its targets, and padding is excluded."""
    logits = random_logits(2, 12)
    documents = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12])
    weights = torch.zeros(2, 12)
    weights[0, 1:4], weights[0, 6:9], weights[1, 2:12] = 1, 1, 1
    sequences = number_sequences(documents >= 0, weights, documents)
    found = balance_sum(logits, Router("gate", 0, CHOSEN, softmax), sequences).item()
    parts = [(logits[0, :5], 3), (logits[0, 5:9], 3), (logits[1], 10)]
    assert found == pytest.approx(sum(count * deepseek(part, softmax) for part, count in parts), rel=1e-6)


def test_the_difference_from_transformers_in_numbers():
    """For one sequence and one router, theirs is K times ours. With several, theirs pools them; ours does not."""
    one = random_logits(1, 16)
    ours = deepseek(one[0], softmax)
    assert load_balancing_loss_func((one[0],), EXPERTS, CHOSEN).item() == pytest.approx(CHOSEN * ours, rel=1e-6)
    # Two sequences that use different experts: balanced together, but not individually.
    low, high = torch.full((2, 16, EXPERTS), -8.0)
    low[:, :4], high[:, 4:] = random_logits(16)[:, :4], random_logits(16, seed=1)[:, 4:]
    theirs = load_balancing_loss_func((torch.cat([low, high]),), EXPERTS, CHOSEN).item()
    assert theirs / CHOSEN == pytest.approx(1.0, abs=0.05)
    assert (deepseek(low, softmax) + deepseek(high, softmax)) / 2 > 1.9


def packed(seed=0, num=2, length=32):
    inputs, labels = random_batch(num, length, seed=seed)
    return microbatch_of(inputs, labels, filled=torch.ones_like(labels, dtype=torch.bool))


def moe(family="qwen3_moe", **fields):
    """A small mixture of experts and its router loss."""
    fields = {"router_aux_loss_coef": 0.5, **fields}
    skeleton = build_on_meta(load_config(small_config(family, **fields)))
    return small_model(family, **fields), choose_router_loss(skeleton, skeleton).loss


def gradients(model, loss, batches, checkpointing="none", compiled=False):
    """Sums of the batches, and gradients of loss + strength * router loss."""
    model = copy.deepcopy(model).train()
    layers, tap = find_layers(model), RouterTap(model, loss.routers)
    tap.open_inside(layers)
    checkpoint_activations(layers, checkpointing)
    if compiled:
        apply_compile(layers, "aot_eager")
    tap.open_outside(layers)
    module = ObjectiveModule(model, tap)
    total = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        sums = module(batch, training_sums(CausalLM()))
        sums.backward(torch.tensor([1.0, loss.strength]))
        total += sums.detach()
    return total, {name: each.grad for name, each in model.named_parameters()}


def same(left, right, tolerance=1e-5):
    assert torch.allclose(left[0], right[0], rtol=tolerance)
    for name, gradient in left[1].items():
        assert torch.allclose(gradient, right[1][name], rtol=1e-3, atol=1e-4 * gradient.abs().max().item()), name


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_sums_and_gradients_equal_those_of_the_models_logits(family):
    """Compared with the logits that transformers records, and autograd through the explicit formula."""
    model, loss = moe(family)
    batch = packed()
    ours = gradients(model, loss, [batch])
    outputs = model.train()(input_ids=batch.input_ids, output_router_logits=True, use_cache=False)
    cross = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    terms = []
    for logits in outputs.router_logits:
        for row, labels in zip(logits.view(2, 32, -1), batch.labels, strict=True):
            chosen = torch.zeros_like(row).scatter(1, row.topk(CHOSEN).indices, 1.0)
            f = row.shape[1] / (CHOSEN * len(row)) * chosen.sum(0)
            terms.append((labels != IGNORE).sum() * (f * row.softmax(-1).mean(0)).sum())
    router = torch.stack(terms).sum() / len(outputs.router_logits)
    (cross + 0.5 * CHOSEN * router).backward()
    same(ours, (torch.stack([cross, router]).detach().double(), {n: p.grad for n, p in model.named_parameters()}))


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recomputation_and_compilation_change_nothing(checkpointing, compiled):
    model, loss = moe()
    plain = gradients(model, loss, [packed()])
    same(gradients(model, loss, [packed()], checkpointing, compiled), plain)


def test_microbatches_change_nothing():
    model, loss = moe()
    whole = packed(num=4)
    halves = [
        replace(whole, **{name: each[rows] for name, each in vars(whole).items() if hasattr(each, "shape")})
        for rows in (slice(0, 1), slice(1, 4))
    ]
    same(gradients(model, loss, halves), gradients(model, loss, [whole]))


def test_a_preference_pair_counts_once():
    """The weight of a pair is distributed over its two documents by labelled tokens; a pair without labels has none."""
    inputs, _ = random_batch(1, 24)
    documents = torch.tensor([[0] * 8 + [1] * 4 + [2] * 4 + [3] * 4 + [-1] * 4])
    labels = torch.full_like(inputs, IGNORE)
    labels[0, 5:8], labels[0, 10:11] = 7, 7
    places, position_ids = np.zeros(1, np.int64), torch.from_numpy(positions_in_documents(documents.numpy()))
    batch = Microbatch(inputs, labels, places, places, documents, position_ids, documents >= 0)
    weights = DPO(0.1).token_weights(batch)
    assert number_sequences(documents >= 0, weights, documents).weights[:4].tolist() == [0.75, 0.25, 0.0, 0.0]
    assert weights.sum() == DPO(0.1).count(batch) == 1


def test_the_strength_depends_on_the_config_field():
    _, theirs = moe("mixtral", router_aux_loss_coef=0.02)
    assert theirs.strength == pytest.approx(0.02 * 2)
    model = build_on_meta(load_config(small_config("mixtral", router_aux_loss_coef=0.0)))
    assert choose_router_loss(model, model) == RouterChoice(None, None)
    model.config.aux_loss_alpha = 0.001  # as in DeepSeek's own config.json
    assert find_coefficient(model.config) == ("aux_loss_alpha", 0.001)
    assert choose_router_loss(model, model).loss.strength == pytest.approx(0.001 * 2)  # two layers


def test_scores_equal_the_weights_of_the_router():
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    laguna = {"model_type": "laguna", "num_experts_per_tok": 2, **fields}  # its first layer is dense
    [router] = find_routers(build_on_meta(load_config(laguna)))
    assert router.scores is torch.sigmoid
    # Its router is also given the bias that balances its experts.
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
    minimax = {"model_type": "minimax_m2", "num_key_value_heads": 4, **experts, **fields}
    assert {router.scores for router in find_routers(build_on_meta(load_config(minimax)))} == {torch.sigmoid}
    logits = torch.randn(3, 4)
    [first, _] = find_routers(build_on_meta(load_config(small_config("qwen3_moe"))))
    assert torch.equal(first.scores(logits), logits.softmax(-1))
    assert find_routers(build_on_meta(load_config(small_config("llama")))) == []


def test_training_with_it_balances_the_experts():
    """Twenty steps with and without it, starting with a router that sends nearly all tokens to the same two experts."""
    balances = []
    for strength in (0.0, 1.0):
        model, loss = moe()
        for layer in model.model.layers:
            layer.mlp.gate.weight.data[:2] *= 20
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        layers, tap = find_layers(model), RouterTap(model, loss.routers)
        tap.open_inside(layers)
        tap.open_outside(layers)
        module, batch = ObjectiveModule(model, tap), packed()
        for _ in range(20):
            optimizer.zero_grad()
            sums = module(batch, training_sums(CausalLM())) / CausalLM().count(batch)
            sums.backward(torch.tensor([1.0, strength]))
            optimizer.step()
        balances.append(sums[1].item())
    assert balances[1] < 1.1 < 1.3 < balances[0], balances


def test_an_untrained_router_loss_is_reported():
    """Frozen routers, a family whose routers are not found, and a dense model whose config has the field."""
    skeleton = build_on_meta(load_config(small_config("mixtral")))
    frozen = copy.deepcopy(skeleton).requires_grad_(False)
    assert "the adapter does not train the routers" in choose_router_loss(skeleton, frozen).line
    with mock.patch.object(MixtralPreTrainedModel, "_can_record_outputs", {}):
        choice = choose_router_loss(skeleton, skeleton)
    assert choice.loss is None and "MixtralForCausalLM has no router" in choice.line
    assert "router_aux_loss_coef 0.1" in choose_router_loss(skeleton, skeleton).line
    unwanted = choose_router_loss(skeleton, skeleton, is_wanted=False)
    assert unwanted.loss is None and unwanted.line.endswith("objective.router_loss is false")
    dense = {
        "model_type": "doge",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    }
    model = build_on_meta(load_config(dense))
    assert find_coefficient(model.config) is not None and choose_router_loss(model, model) == RouterChoice(None, None)
