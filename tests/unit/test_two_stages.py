"""Two stages of a model in one process, with the objective on the second: loss and gradients equal the full model's."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from echelon.data.loader import Microbatch
from echelon.model.parts import find_layers
from echelon.objectives.causal_lm import CausalLM
from echelon.objectives.objective import training_sums
from echelon.objectives.outputs import ObjectiveModule
from families import random_batch, small_model

LAYERS = {"llama": "num_hidden_layers", "gpt2": "n_layer"}


class NoPositions(nn.Module):
    """GPT-2 adds position embeddings to its input, which the first stage has already done."""

    def forward(self, position_ids):
        return torch.zeros(1)


def backbone_of(model):
    return model.base_model


def cut(model, start, stop):
    """A copy of the model with only these layers, and the final norm only after the last layer."""
    stage = copy.deepcopy(model)
    backbone, layers = backbone_of(stage), find_layers(stage)
    name = next(name for name, module in backbone.named_children() if module is layers)
    norm = "norm" if hasattr(backbone, "norm") else "ln_f"
    setattr(stage.config, LAYERS[model.config.model_type], stop - start)
    setattr(backbone, name, layers[start:stop])
    if stop < len(layers):
        setattr(backbone, norm, nn.Identity())
    if start > 0 and hasattr(backbone, "wpe"):
        backbone.wpe = NoPositions()
    return stage


def whole_names(stage, start):
    """The gradients of a stage, with the parameter names of the whole model."""
    layers = find_layers(stage)
    prefix = next(name for name, module in stage.named_modules() if module is layers)
    found = {}
    for name, parameter in stage.named_parameters():
        if name.startswith(f"{prefix}."):
            index, rest = name.removeprefix(f"{prefix}.").split(".", 1)
            name = f"{prefix}.{int(index) + start}.{rest}"
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", LAYERS)
def test_an_objective_on_the_last_stage_equals_the_whole_model(family, tied):
    model = small_model(family, tied, **{LAYERS[family]: 4})
    inputs, labels = random_batch()
    ids = np.arange(len(inputs))
    batch, read = Microbatch(inputs, labels, ids, ids), training_sums(CausalLM())
    first, second = cut(model, 0, 2), cut(model, 2, 4)

    whole = ObjectiveModule(model)(batch, read)
    whole.sum().backward()

    sent = backbone_of(first)(input_ids=inputs, use_cache=False).last_hidden_state
    received = sent.detach().requires_grad_()
    staged = ObjectiveModule(second)(
        batch, read, lambda: backbone_of(second)(inputs_embeds=received, use_cache=False).last_hidden_state
    )
    staged.sum().backward()
    sent.backward(received.grad)

    assert torch.equal(staged, whole)
    found = whole_names(first, 0)
    for name, gradient in whole_names(second, 2).items():
        found[name] = found[name] + gradient if name in found else gradient
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_hidden_states_are_computed_once_for_all_outputs():
    model = small_model("llama")
    inputs, labels = random_batch()
    ids = np.arange(len(inputs))
    batch, places = Microbatch(inputs, labels, ids, ids), torch.tensor([3, 7])
    calls = []

    def hidden():
        calls.append(1)
        return model.model(input_ids=inputs, use_cache=False).last_hidden_state

    def read(outputs, microbatch):
        scores = outputs.log_probabilities(microbatch.labels).sum()
        return torch.stack([-scores, outputs.token_loss_sum(microbatch.labels), outputs.logits_at(places).sum()])

    module = ObjectiveModule(model).eval()
    assert torch.equal(module(batch, read, hidden), module(batch, read))
    assert calls == [1]
