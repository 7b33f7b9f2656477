"""Compiled updates equal those that are not, and few graphs serve all shapes and steps."""

import pytest
import torch
import torch._dynamo.utils

from echelon.learn.optimizer.slot import Slot
from echelon.learn.optimizer.stepper import CompiledUpdate, Optimizer, ParameterGroup, choose_rule, compile_rule
from echelon.recipe.training import OptimConfig

# Rows of whole blocks of 8-bit moments, others, and vectors, the last as large as a matrix.
SHAPES = [(256, 256), (48, 512), (300, 256), (2, 3, 256), (33, 300), (80, 700), (96,), (700,), (24576,)]
RATES = [1e-2, 5e-3, 1e-2, 2e-3]


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
