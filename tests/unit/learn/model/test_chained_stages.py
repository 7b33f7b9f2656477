"""The stages of a model, one after the other in one process: loss and gradients equal the whole model's bit for bit."""

import copy

import numpy as np
import pytest
import torch

from echelon.ground.errors import ConfigError
from echelon.learn.data.loader import positions_in_documents
from echelon.learn.model import stage as stages
from echelon.learn.model.parts import find_layers
from echelon.learn.model.router import RouterTap, choose_router_loss
from echelon.learn.model.stage import Absent, cut, find_ends, find_shared, stage_ranges, view_stage
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.objective import training_sums
from echelon.learn.objectives.outputs import ObjectiveModule
from tests.families import EXTRA, microbatch_of, random_batch, small_model

SIZES = (1, 2, 1)


def deep_model(family, tied=False, **fields):
    return small_model(family, tied, **{"n_layer" if family == "gpt2" else "num_hidden_layers": sum(SIZES)}, **fields)


def divide(model, sizes=SIZES):
    """Each stage of a copy of the model, as a rank of a pipeline has it."""
    ends, views = find_ends(model), []
    for place in stage_ranges(sizes):
        part = copy.deepcopy(model)
        cut(part, [place], ends)
        views.append(view_stage(part, place, ends))
    return views


def read_hidden(outputs, batch):
    return outputs.hidden


def chain(modules, batch, read):
    """Run all stages forward, then all backward; the result of `read` on the last one."""
    sent, received = [], []
    for module in modules[:-1]:
        sent.append(module(batch, read_hidden, received[-1] if received else None))
        received.append(sent[-1].detach().requires_grad_())
    result = modules[-1](batch, read, received[-1])
    result.sum().backward()
    for output, arrived in zip(sent[::-1], received[::-1], strict=True):
        output.backward(arrived.grad)
    return result


def gradients_of(modules):
    """The sum of the gradients of each parameter, by its name in the whole model."""
    found = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


def make_batch(**fields):
    return microbatch_of(*random_batch(), **fields)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", [*EXTRA, "gpt_neox", "phi3"])
def test_chained_stages_equal_the_whole_model(family, tied):
    model = deep_model(family, tied)
    batch, read = make_batch(), training_sums(CausalLM())
    modules = [ObjectiveModule(view) for view in divide(model)]
    module = ObjectiveModule(model)
    whole = module(batch, read)
    whole.sum().backward()
    assert torch.equal(chain(modules, batch, read), whole)
    found, expected = gradients_of(modules), gradients_of([module])
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def pack_documents(batch):
    documents = np.zeros(batch.input_ids.shape, dtype=np.int32)
    documents[:, 10:21], documents[:, 21:] = 1, 2
    positions = positions_in_documents(documents)
    tensors = {"documents": torch.from_numpy(documents), "position_ids": torch.from_numpy(positions)}
    return {**tensors, "document_shape": (3, 16)}


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba"], ids=["mask", "windows", "rows of their own"])
def test_documents_stay_apart_in_every_stage(family):
    model = deep_model(family)
    batch, read = make_batch(**pack_documents(make_batch())), training_sums(CausalLM())
    whole = ObjectiveModule(model)(batch, read)
    assert torch.equal(chain([ObjectiveModule(view) for view in divide(model)], batch, read), whole)
    assert not torch.equal(ObjectiveModule(model)(make_batch(), read), whole)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_router_losses_of_all_stages_add_up(family):
    model = deep_model(family)
    loss = choose_router_loss(model, model).loss
    weights = CausalLM().token_weights(make_batch())

    def router_sum(outputs, batch):
        return outputs.hidden, outputs.router_loss_sum(weights)

    def tapped(part):
        layers, tap = stages.own_layers(part), RouterTap(part, loss.routers)
        tap.open_inside(layers)
        tap.open_outside(layers)
        return ObjectiveModule(part, tap)

    views = [tapped(view) for view in divide(model)]
    received, total = None, 0
    for view in views:
        received, share = view(make_batch(), router_sum, received)
        total = total + share
    _, expected = tapped(copy.deepcopy(model))(make_batch(), router_sum)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


def test_a_stage_has_only_its_own_weights_under_their_own_names():
    model = deep_model("llama", tied=True)
    names = [{name for name, _ in view.named_parameters()} for view in divide(model)]
    assert names[0] & names[2] == set(find_shared(model, find_ends(model))) == {"model.embed_tokens.weight"}
    assert not (names[0] | names[2]) & names[1]
    assert names[0] | names[1] | names[2] == {name for name, _ in model.named_parameters()}
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in names[1])


def test_stages_on_one_rank_share_one_model():
    model = deep_model("llama")
    first, third = (stage_ranges(SIZES)[place] for place in (0, 2))
    ends = find_ends(model)
    cut(model, [first, third], ends)
    views = [view_stage(model, place, ends) for place in (first, third)]
    both = {id(each) for view in views for each in view.parameters()}
    assert both == {id(each) for each in model.parameters()}
    assert [isinstance(layer, Absent) for layer in find_layers(model)] == [False, True, True, False]
    assert views[0].lm_head is not model.lm_head and views[1].lm_head is model.lm_head


def test_a_model_that_computes_something_among_its_layers_is_refused(monkeypatch):
    """Layers that see more than the hidden states cannot be apart: here one adds what the first layer got."""
    model = deep_model("llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)

    original = type(model.base_model).forward

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        given = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        outputs = original(self, inputs_embeds=given, **kwargs)
        outputs.last_hidden_state = outputs.last_hidden_state + given
        return outputs

    monkeypatch.setattr(type(model.base_model), "forward", forward)
    with pytest.raises(ConfigError, match=r"this llama model cannot be cut into pipeline stages: its stages compute"):
        find_ends(model)


def test_hidden_states_are_computed_once_for_all_outputs():
    model = deep_model("llama")
    batch, places, calls = make_batch(), torch.tensor([3, 7]), []
    model.base_model.register_forward_hook(lambda *_: calls.append(1))

    def read(outputs, microbatch):
        scores = outputs.log_probabilities(microbatch.labels).sum()
        return torch.stack([-scores, outputs.token_loss_sum(microbatch.labels), outputs.logits_at(places).sum()])

    ObjectiveModule(model).eval()(batch, read)
    assert calls == [1]
