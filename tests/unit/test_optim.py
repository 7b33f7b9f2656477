"""Parameter groups and norms, against values worked out by hand."""

import pytest
import torch

from echelon.optim import global_norm, parameter_groups
from families import small_model


def test_matrices_decay_and_vectors_do_not():
    model = small_model("gpt2")
    matrices, vectors = parameter_groups(model.named_parameters(), weight_decay=0.1)
    assert matrices["weight_decay"] == 0.1 and vectors["weight_decay"] == 0.0
    assert all(parameter.ndim == 2 for parameter in matrices["params"])
    assert all(parameter.ndim == 1 for parameter in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_global_norm_is_the_norm_of_everything_joined():
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.tensor([12.0])]
    assert global_norm(tensors).item() == pytest.approx(13.0)
