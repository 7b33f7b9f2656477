"""Optimizers compared with their libraries in a plain loop and with values by hand; compiled ones with plain ones."""

import numpy as np
import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F

from echelon.learn.optimizer import build_optimizer
from echelon.learn.optimizer.muon import COEFFICIENTS, orthogonalize
from echelon.learn.optimizer.slot import Slot
from echelon.learn.optimizer.stepper import (
    CompiledUpdate,
    Optimizer,
    ParameterGroup,
    choose_rule,
    compile_rule,
    find_members,
)
from echelon.recipe.training import OptimConfig
from tests.families import random_batch, small_model

RATES = [1e-2, 5e-3, 1e-2, 2e-3]
YES, NO = torch.tensor(True), torch.tensor(False)


def backward(model, step):
    model.zero_grad()
    inputs, labels = random_batch(seed=step)
    logits = model(input_ids=inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    loss.backward()
    return loss.item()


def train_ours(config, master_weights="fp32", rates=RATES, model=None):
    """Train a few steps with echelon's optimizer; return the losses and the model."""
    model = small_model("llama", seed=1) if model is None else model
    optimizer = build_optimizer(model, config, master_weights, seed=0)
    losses = []
    for step, rate in enumerate(rates):
        losses.append(backward(model, step))
        optimizer.step(step, rate, YES)
    return losses, model


def train_theirs(build, decay_by_hand=0.0):
    """The same with the library's optimizers, built from [(parameters, weight decay)] by `build(members)`."""
    model = small_model("llama", seed=1)
    members = find_members(model, OptimConfig(learning_rate=1.0))
    optimizers = build(members)
    losses = []
    for step, rate in enumerate(RATES):
        losses.append(backward(model, step))
        for member in members:
            member.parameter.data.mul_(1 - rate * decay_by_hand * bool(member.weight_decay))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def grouped(members):
    decaying = [member.parameter for member in members if member.weight_decay]
    others = [member.parameter for member in members if not member.weight_decay]
    return [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def build_muon(members):
    matrices = [member.parameter for member in members if member.is_layer_matrix]
    rest = grouped([member for member in members if not member.is_layer_matrix])
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95)),
    ]


LIBRARY = {
    "adamw": (lambda members: [torch.optim.AdamW(grouped(members), betas=(0.9, 0.95), foreach=False)], 0.0),
    "sgd": (lambda members: [torch.optim.SGD([member.parameter for member in members], momentum=0.9, lr=1.0)], 0.1),
    "adafactor": (lambda members: [torch.optim.Adafactor(grouped(members))], 0.0),
    "muon": (build_muon, 0.0),
}


def largest_difference(left, right):
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("name", LIBRARY)
def test_equals_the_library(name):
    losses, model = train_ours(OptimConfig(name=name, learning_rate=1.0))
    expected, library_model = train_theirs(*LIBRARY[name])
    # Muon's bf16 iterations amplify rounding, so only its losses are compared here, and one matrix below.
    assert losses == pytest.approx(expected, abs=2e-4 if name == "muon" else 2e-5)
    assert name == "muon" or largest_difference(model, library_model) <= 2e-6
    start = small_model("llama", seed=1)
    assert largest_difference(model, start) > 1e-3, "the comparison would see no step at all"


@pytest.mark.parametrize("shape", [(48, 20), (20, 48), (33, 33)])
def test_muon_updates_a_matrix_like_the_library(shape):
    theirs = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    library = torch.optim.Muon([theirs], weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    model = one_layer(theirs.detach().clone())
    optimizer = build_optimizer(model, OptimConfig(name="muon", learning_rate=1.0), "fp32", seed=0)
    for step, rate in enumerate(RATES):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step + 1))
        library.param_groups[0]["lr"] = rate
        theirs.grad = gradient.clone()
        library.step()
        model.layers[0].weight.grad = gradient.clone()
        optimizer.step(step, rate, YES)
    assert torch.allclose(model.layers[0].weight, theirs, atol=1e-6)


def test_orthogonalize_is_newton_schulz_and_sets_singular_values_near_one():
    generator = np.random.default_rng(0)
    for shape in ((24, 40), (40, 24)):
        matrix = generator.standard_normal(shape)
        x = matrix / np.linalg.norm(matrix)
        x = x.T if shape[0] > shape[1] else x
        for _ in range(5):
            gram = x @ x.T
            x = COEFFICIENTS[0] * x + (COEFFICIENTS[1] * gram + COEFFICIENTS[2] * gram @ gram) @ x
        x = x.T if shape[0] > shape[1] else x
        ours = orthogonalize(torch.tensor(matrix, dtype=torch.float32)).float().numpy()
        assert np.abs(ours - x).max() < 0.02
        values = np.linalg.svd(ours, compute_uv=False)
        assert values.min() > 0.6 and values.max() < 1.25


def one_layer(weight):
    """A model with one matrix in one layer."""
    model = torch.nn.Module()
    model.config = type("Config", (), {"model_type": "none"})()
    layer = torch.nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight.data = weight
    model.layers = torch.nn.ModuleList([layer])
    return model


def one_parameter(values, gradients, config):
    """Weights and state after some steps on a matrix with one row."""
    model = one_layer(torch.tensor([values]))
    (layer,) = model.layers
    optimizer = build_optimizer(model, config, "fp32", seed=0)
    for gradient in gradients:
        layer.weight.grad = torch.tensor([gradient])
        optimizer.step(0, config.learning_rate, YES)
    state = {name: tensor.flatten().tolist() for name, tensor in optimizer.tensors()}
    return layer.weight.flatten().tolist(), state


def test_lion_by_hand():
    config = OptimConfig(name="lion", learning_rate=0.1, weight_decay=0.5, betas=(0.9, 0.99))
    weights, state = one_parameter([1.0, -2.0], [[3.0, -1.0], [-0.2, -4.0]], config)
    # Step 1: momentum 0, so the signs are the gradient's, + and -:  1 * 0.95 - 0.1 = 0.85, -2 * 0.95 + 0.1 = -1.8.
    # The momentum becomes 0.01 * g = [0.03, -0.01].
    # Step 2: 0.9 * 0.03 - 0.1 * 0.2 = 0.007 is positive though the gradient is not: 0.85 * 0.95 - 0.1 = 0.7075,
    # -1.8 * 0.95 + 0.1 = -1.61. The momentum: 0.99 * 0.03 - 0.01 * 0.2 = 0.0277, -0.0099 - 0.04 = -0.0499.
    assert weights == pytest.approx([0.7075, -1.61])
    assert state["layers.0.weight.momentum"] == pytest.approx([0.0277, -0.0499])


def test_sgd_by_hand():
    config = OptimConfig(name="sgd", learning_rate=0.1, weight_decay=0.5, momentum=0.9)
    weights, _ = one_parameter([1.0], [[2.0], [1.0]], config)
    # 1 * 0.95 - 0.1 * 2 = 0.75; momentum 0.9 * 2 + 1 = 2.8: 0.75 * 0.95 - 0.28 = 0.4325
    assert weights == pytest.approx([0.4325])


def largest_update(name):
    """Of 40 steps on an embedding, in learning rates; a batch contains a fifth of the tokens."""
    generator = torch.Generator().manual_seed(0)
    model = one_layer(torch.zeros(64, 256))
    (layer,) = model.layers
    optimizer = build_optimizer(model, OptimConfig(name=name, learning_rate=1.0), "fp32", seed=0)
    largest = 0.0
    for step in range(40):
        sizes = torch.exp(2 * torch.randn(64, 256, generator=generator))
        gradient = 1e-3 * sizes * torch.randn(64, 256, generator=generator)
        gradient[torch.rand(64, generator=generator) < 0.8] = 0.0
        layer.weight.grad, before = gradient, layer.weight.detach().clone()
        optimizer.step(step, 1e-3, YES)
        largest = max(largest, (layer.weight - before).abs().max().item() / 1e-3)
    return largest


def test_8_bit_moments_move_no_weight_further_than_32_bit_ones():
    """With a second moment rounded to 0, the divisor is eps alone, and the largest update is 56,600 learning rates."""
    assert largest_update("adamw_8bit") < 1.5 * largest_update("adamw")


@pytest.mark.parametrize("master_weights", ["fp32", "bf16_kahan", "bf16_stochastic"])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion", "muon", "sgd"])
def test_a_step_that_does_not_commit_changes_nothing(name, master_weights):
    model = small_model("llama", seed=1)
    if master_weights != "fp32":
        model.bfloat16()
    optimizer = build_optimizer(model, OptimConfig(name=name, learning_rate=1e-2), master_weights, seed=0)
    backward(model, 0)
    optimizer.step(0, 1e-2, YES)
    tensors = {**dict(model.named_parameters()), **{f"{key} state": value for key, value in optimizer.tensors()}}
    before = {key: value.detach().clone() for key, value in tensors.items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step(1, 1e-2, NO)
    for key, value in tensors.items():
        assert torch.equal(value, before[key]), key
    backward(model, 1)
    optimizer.step(1, 1e-2, YES)
    assert any(not torch.equal(value, before[key]) for key, value in tensors.items())


def test_a_multiplier_scales_the_rate_of_each_step():
    config = OptimConfig(name="sgd", learning_rate=1.0, weight_decay=0.0, momentum=0.0)
    slowed = config.model_copy(update={"learning_rate_multipliers": {"*.0.*": 0.25, "lm_head*": 0.0}})
    (_, plain), (_, ours), start = (
        train_ours(config, rates=RATES[:1]), train_ours(slowed, rates=RATES[:1]), small_model("llama", seed=1)
    )  # fmt: skip
    moved = {name: parameter - start.get_parameter(name) for name, parameter in ours.named_parameters()}
    whole = {name: parameter - start.get_parameter(name) for name, parameter in plain.named_parameters()}
    for name, difference in moved.items():
        factor = 0.0 if name.startswith("lm_head") else 0.25 if ".0." in name else 1.0
        assert torch.allclose(difference, factor * whole[name], atol=1e-7), name


# Rows of whole blocks of 8-bit moments, others, and vectors, the last as large as a matrix.
SHAPES = [(256, 256), (48, 512), (300, 256), (2, 3, 256), (33, 300), (80, 700), (96,), (700,), (24576,)]


def build(config, master_weights, backend):
    """The optimizer of a parameter of each shape, and the parameters."""
    rule = choose_rule(config, is_layer_matrix=False)
    if backend is not None:
        rule = compile_rule(rule, backend)
    dtype = torch.float32 if master_weights == "fp32" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    slots = [
        Slot(str(index), each, rule, config.name == "adamw_8bit", master_weights == "bf16_kahan")
        for index, each in enumerate(parameters)
    ]
    compiled = None if backend is None else CompiledUpdate(backend)
    groups = [ParameterGroup(rule, 0.1, 1.0, slots[::2]), ParameterGroup(rule, 0.0, 0.5, slots[1::2])]
    return Optimizer(groups, seed=1, compiled=compiled), parameters


def run_steps(config, master_weights, backend=None):
    """The weights and the state after some steps, one of which does not count. Gradients are parts of one tensor."""
    optimizer, parameters = build(config, master_weights, backend)
    generator = torch.Generator().manual_seed(1)
    for step, rate in enumerate(RATES):
        sizes = [parameter.numel() for parameter in parameters]
        gradients = torch.randn(sum(sizes), generator=generator).to(parameters[0].dtype).split(sizes)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.view(parameter.shape)
        if step == 2:
            parameters[1].grad.fill_(float("nan"))
        optimizer.step(step, rate, torch.tensor(step != 2))
    weights = {f"{index}.weight": parameter.detach() for index, parameter in enumerate(parameters)}
    return weights | dict(optimizer.tensors())


CASES = {
    ("lion", "fp32"): 1,
    ("adamw", "bf16_kahan"): 1,
    ("adamw", "fp32"): 0,  # PyTorch's kernel is one pass
    ("lion", "bf16_kahan"): 1,
    ("lion", "bf16_stochastic"): 3,  # a square, other matrices, vectors
    ("sgd", "bf16_kahan"): 1,
    ("adafactor", "fp32"): 3 + 4 + 4,  # for each function: a square, matrices, three dims; vectors, which have no rows
    ("adamw_8bit", "fp32"): 2,  # rows of whole blocks, others
    ("adamw_8bit", "bf16_kahan"): 3,  # and vectors, which are not packed
}
DAILY = 3


@pytest.mark.parametrize(
    ("name", "master_weights"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (number >= DAILY)) for number, case in enumerate(CASES)],
)
def test_equal_without_compilation_with_a_graph_for_each_kind(name, master_weights):
    config = OptimConfig(name=name, learning_rate=1.0, betas=(0.9, 0.99))
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    check_equal(run_steps(config, master_weights, "aot_eager"), run_steps(config, master_weights))
    assert len(torch._dynamo.utils.get_compilation_metrics()) == CASES[name, master_weights]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "master_weights"), CASES)
def test_equal_without_compilation_by_inductor(name, master_weights):
    config = OptimConfig(name=name, learning_rate=1.0, betas=(0.9, 0.99))
    torch._dynamo.reset()
    check_equal(run_steps(config, master_weights, "inductor"), run_steps(config, master_weights))


def check_equal(ours, theirs):
    """Up to the last bits of fp32, which rarely make another code, or another bf16 number, the nearest one."""
    assert ours.keys() == theirs.keys()
    num_different = 0
    for key, expected in theirs.items():
        assert ours[key].dtype == expected.dtype and ours[key].isfinite().all()
        if key.endswith("remainder"):
            continue
        ours_full, theirs_full = (read(run, key) for run in (ours, theirs))
        difference = (ours_full - theirs_full).abs()
        num_different += (difference > 2e-6 + 1e-5 * theirs_full.abs()).sum().item()
        spacing = 2**-6 if expected.dtype == torch.bfloat16 else 1 if key.endswith("codes") else 1e-3
        assert difference.max() <= spacing, key
    assert num_different <= 1e-3 * sum(expected.numel() for expected in theirs.values())


def read(run, key):
    """A tensor in fp32; a weight with what rounding left over."""
    remainder = run.get(key.replace("weight", "remainder"))
    return run[key].float() + (remainder.float() if key.endswith("weight") and remainder is not None else 0)
