"""DPO compared with its formula on plain `transformers` models, one answer at a time."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import echelon.learn.data.prepare
import echelon.learn.objectives.loss
from echelon.ground.errors import ConfigError
from echelon.learn.data.loader import Microbatch, Padding, build_microbatch, set_width
from echelon.learn.data.shards import Samples
from echelon.learn.evaluation import EvalResults, build_result, count_labels
from echelon.learn.model.parts import find_layers
from echelon.learn.model.router import RouterTap, choose_router_loss
from echelon.learn.model.traits import find_traits
from echelon.learn.objectives.loss import IGNORE, HeadArithmetic, chunked_log_probabilities
from echelon.learn.objectives.objective import build_objective, training_sums
from echelon.learn.objectives.outputs import ObjectiveModule, lay_out_rows
from echelon.learn.objectives.pairs import DPO
from echelon.planner.hardware.accelerators import Cluster
from echelon.run.lifecycle.setup import prepare_run
from tests.families import EXTRA, microbatch_of, random_batch, small_model
from tests.parity.training import MACHINE
from tests.unit.learn.objectives.pair_samples import PAIRS, module_of, pair_batch, scores_by_hand
from tests.unit.recipe_samples import SMALL, load_text
from tests.unit.tools.report.watch import Watch


def margins_by_hand(model, reference, batch):
    """For each pair, the log-ratio of the chosen answer minus that of the rejected one."""
    with torch.no_grad():
        before = scores_by_hand(reference, batch)
    chosen, rejected = (now - then for now, then in zip(scores_by_hand(model, batch), before, strict=True))
    return chosen - rejected


@pytest.mark.parametrize("family", ["gemma2", "mamba"], ids=["soft-capped", "recurrent"])
def test_loss_and_gradients_equal_the_formula(family, monkeypatch):
    monkeypatch.setattr(echelon.learn.objectives.loss, "logits_chunk_tokens", lambda *_: 7)
    model, reference, batch, objective = small_model(family), small_model(family, seed=1), pair_batch(), DPO(0.5)
    loss = module_of(model, reference)(batch, objective.loss_sum)
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert int(objective.count(batch)) == 3 and objective.count(batch).dtype == torch.int64
    assert all(parameter.grad is None for parameter in reference.parameters())

    model.zero_grad()
    expected = -torch.sigmoid(0.5 * margins_by_hand(model, reference, batch)).log().sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=2e-4, atol=2e-5, msg=name)


def test_rows_and_masks_give_the_same_loss_router_loss_and_gradients():
    """Mixtral can do both: its pairs in one sequence with a mask, and each answer in a row of its own."""
    found, batch = {}, pair_batch()
    for name in ("mask", "rows"):
        model = small_model("mixtral")
        traits = find_traits(model)
        traits = traits if name == "mask" else replace(traits, mask=None)
        router = choose_router_loss(model, model).loss
        tap, layers = RouterTap(model, router.routers), find_layers(model)
        tap.open_inside(layers)
        tap.open_outside(layers)
        module = ObjectiveModule(model, tap, traits)
        module.refer_to(ObjectiveModule(small_model("mixtral", seed=1), traits=traits).eval())
        sums = module(batch, training_sums(DPO(0.5)))
        sums.sum().backward()
        found[name] = sums.detach(), {name: each.grad for name, each in model.named_parameters()}
    torch.testing.assert_close(found["rows"][0], found["mask"][0], rtol=1e-5, atol=1e-6)
    for name, gradient in found["mask"][1].items():
        torch.testing.assert_close(found["rows"][1][name], gradient, rtol=2e-4, atol=2e-5, msg=name)


def test_rows_hold_each_document_and_read_it_back():
    batch = pair_batch()
    rows = lay_out_rows(batch)
    fed = rows.spread(batch.input_ids)
    assert fed.shape == (2 * 4, 16)
    for row in range(2):
        for document in range(4):
            tokens = batch.input_ids[row][batch.documents[row] == document]
            assert fed[4 * row + document][rows.filled[4 * row + document]].tolist() == tokens.tolist()
    back = rows.collect(fed[..., None].float())[..., 0]
    assert torch.equal(back[batch.documents >= 0], batch.input_ids[batch.documents >= 0].float())


def test_the_loader_measures_documents_on_the_host():
    inputs = np.arange(64).reshape(2, 32)
    documents = np.full((2, 32), -1, dtype=np.int32)
    documents[0, :9], documents[0, 9:12], documents[1, :20] = 0, 1, 0
    samples = Samples(inputs, inputs.copy(), documents, True)
    ids = np.arange(2)
    assert build_microbatch(set_width(samples), ids, ids).document_shape == (2, 24)
    whole = Padding(is_equal=True)
    assert build_microbatch(set_width(samples, padding=whole), ids, ids, whole).document_shape == (2, 32)


def test_evaluation_reports_rewards():
    model, reference, batch, objective = small_model("llama"), small_model("llama", seed=6), pair_batch(), DPO(0.5)
    with torch.no_grad():
        sums = module_of(model, reference)(batch, objective.evaluation_sums)
        margins = margins_by_hand(model, reference, batch)
    assert 0 < int((margins > 0).sum()) < 3, "an accuracy that says something"
    result = build_result(objective, [*count_labels(objective, batch).tolist(), *sums.tolist()], None)
    assert result.row() == {
        "loss": pytest.approx(-torch.sigmoid(0.5 * margins).log().mean().item(), rel=1e-5),
        "perplexity": None,
        "bits_per_byte": None,
        "target_tokens": sum(map(sum, PAIRS.values())),
        "pairs": 3,
        "answers": None,
        "reward_accuracy": pytest.approx((margins > 0).float().mean().item()),
        "reward_margin": pytest.approx(0.5 * margins.mean().item(), rel=1e-4, abs=1e-6),
    }
    whole = EvalResults({"one": result, "two": build_result(objective, [1.0, 9.0, 4.0, 0.0, -2.0], None)}).whole
    assert whole.row()["pairs"] == 4 and whole.loss == pytest.approx((3 * result.loss + 4.0) / 4)
    assert whole.measures["reward_margin"] == pytest.approx((3 * result.measures["reward_margin"] - 2.0) / 4)


def test_pairs_without_labels_count_zero_and_reach_every_parameter():
    model, batch = small_model("llama"), pair_batch()
    masked = Microbatch(**vars(batch) | {"labels": torch.full_like(batch.labels, IGNORE)})
    loss = module_of(model, small_model("llama", seed=1))(masked, DPO(0.1, "ipo").loss_sum)
    loss.backward()
    assert loss.item() == 0.0 and int(DPO(0.1).count(masked)) == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_the_reference_is_the_model_without_its_adapter():
    """In training mode with dropout, the reference has none, and computing it does not change the model."""
    peft = pytest.importorskip("peft")
    base, batch = small_model("llama"), pair_batch()
    config = peft.LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, copy.deepcopy(base)).train()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    module = ObjectiveModule(model)

    def reference(outputs, read):
        return outputs.reference_log_probabilities(read.labels)

    found = module(batch, reference)
    with torch.no_grad():
        expected = ObjectiveModule(base.eval())(batch, lambda outputs, read: outputs.log_probabilities(read.labels))
        adapted = module.eval()(batch, lambda outputs, read: outputs.log_probabilities(read.labels))
    assert torch.equal(found, expected) and not found.requires_grad
    assert not torch.allclose(adapted, expected, atol=1e-3)
    module.train()(batch, DPO(0.1).loss_sum).backward()
    assert all(each.training for each in model.modules())
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained


@pytest.mark.parametrize("family", EXTRA)
def test_log_probabilities_equal_those_of_the_models_logits(family, monkeypatch):
    monkeypatch.setattr(echelon.learn.objectives.loss, "logits_chunk_tokens", lambda *_: 10)
    model, (inputs, labels) = small_model(family, tied=True), random_batch()
    weights = torch.randn(labels.shape, generator=torch.Generator().manual_seed(2))
    batch = microbatch_of(inputs, labels)
    scores = ObjectiveModule(model)(batch, lambda outputs, read: outputs.log_probabilities(read.labels))
    (scores * weights).sum().backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    everything = torch.log_softmax(model(input_ids=inputs).logits.float(), -1)
    expected = everything.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != IGNORE)
    (expected * weights).sum().backward()
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=2e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("trains_head", [True, False])
def test_log_probabilities_never_keep_all_logits(trains_head, monkeypatch):
    """Vocabulary 2048, 512 tokens, chunks of 32; a frozen head of 16 x 2048 gets no gradient either."""
    monkeypatch.setattr(echelon.learn.objectives.loss, "logits_chunk_tokens", lambda *_: 32 if trains_head else 2)
    hidden = torch.randn(2, 256 if trains_head else 8, 16, requires_grad=True)
    weight = torch.randn(2048, 16, requires_grad=trains_head)
    labels = torch.randint(0, 2048, hidden.shape[:2])
    with Watch() as watch:
        chunked_log_probabilities(hidden, labels, weight, None, HeadArithmetic()).sum().backward()
    assert watch.largest == (32 if trains_head else 2) * 2048
    assert (weight.grad is not None) == trains_head


def test_bf16_trains_every_parameter():
    """Autocast may cache a cast weight; one cached for the reference must not be used in the trained pass."""
    model, batch = small_model("llama"), pair_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module_of(model, copy.deepcopy(model))(batch, DPO(0.1).loss_sum)
    loss.backward()
    assert loss.item() == pytest.approx(3 * np.log(2), abs=1e-6), "the margins of equal models are 0"
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_an_adapter_that_changes_the_reference_is_refused(tmp_path):
    recipe, _ = load_text(tmp_path, SMALL, "objective={name: dpo, beta: 0.2, loss: ipo}")
    assert build_objective(recipe.objective) == DPO(0.2, "ipo")
    with pytest.raises(ConfigError, match=r"use adapter\.init=default"):
        load_text(tmp_path, SMALL, "objective.name=dpo", "adapter={method: lora, init: pissa}")


def test_an_invalid_run_is_refused_before_any_worker_starts(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("Two answers to one prompt. " * 200)
    paths = [f"data.train={tmp_path / 'text.txt'}", f"run.dir={tmp_path / 'run'}", "data.prepare_workers=1"]

    def prepare(*overrides):
        recipe, _ = load_text(tmp_path, SMALL, *paths, *overrides)
        prepare_run(recipe, False, lambda: Cluster(MACHINE, 1, 1, kind="cpu"), {})

    with pytest.raises(ConfigError, match="compares two answers, but the data has plain text"):
        prepare("objective.name=dpo")
