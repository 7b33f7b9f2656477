"""What a stage keeps between the two halves of its backward pass under `zero_bubble`, measured with PyTorch's own."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from transformers import AutoConfig

from echelon.learn.engines.footprint import HostAllocations
from echelon.learn.model.adapters import apply_adapter
from echelon.learn.model.build import build_on_meta
from echelon.planner.activations import deferred_bytes
from echelon.planner.adapter_plan import build_adapter_plan
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe.inputs import AdapterConfig
from tests.unit.planner.test_memory import BATCH, MODELS, SEQUENCE, build_model

FAMILIES = [name for name in MODELS if name != "gpt2-dropout"]
NO_ADAPTER, LORA = AdapterConfig(), AdapterConfig(method="lora", r=4, dropout=0.0)


class Identity(torch.autograd.Function):
    """Hidden states as a stage returns them: PyTorch refuses to detach a view."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def build_stage(config, adapter):
    if adapter.method == "full":
        return build_model(config, torch.float32)
    model = build_on_meta(AutoConfig.for_model(**config))
    apply_adapter(model, adapter)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.fill_(0.01) if each.is_floating_point() else each.zero_()
    return model.train().base_model


def measure_deferred(model, hidden_size):
    """Bytes that the gradients of activations leave until those of the weights are computed, after a first pass."""
    for _ in range(2):
        received = torch.randn(BATCH, SEQUENCE, hidden_size, requires_grad=True)
        allocations = HostAllocations()
        with allocations:
            hidden = model(inputs_embeds=received, use_cache=False).last_hidden_state
            output = Identity.apply(hidden)
            allocations.mark("forward")
            _, groups = stage_backward_input([output], [torch.ones_like(output)], [received], model.parameters())
            allocations.mark("half way")
        stage_backward_weight(model.parameters(), groups)
    before, after = allocations.moments[:2]
    return after.held - before.held


@pytest.mark.parametrize(("name", "adapter"), [*((name, NO_ADAPTER) for name in FAMILIES), ("llama", LORA)])
def test_the_planned_bytes_are_those_that_pytorch_keeps(name, adapter):
    config = MODELS[name]
    shape = build_shape(config)
    plan = ParallelPlan(
        "pp",
        pp=2,
        schedule="zero_bubble",
        stages=(2, 2),
        micro_batch_size=BATCH,
        adapter=build_adapter_plan(adapter, shape),
    )
    measured = measure_deferred(build_stage(config, adapter), shape.hidden_size)
    assert deferred_bytes(shape, replace(plan, sequence_len=SEQUENCE)) == pytest.approx(measured, rel=0.1)


def test_a_checkpointed_layer_would_be_recomputed_for_each_weight():
    """The reason why this is refused: 7 products and 2 norms of a Llama's layer, each in a pass of its own."""
    model = build_model(MODELS["llama"], torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    runs = []
    model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(None))
    received = torch.randn(BATCH, SEQUENCE, 64, requires_grad=True)
    output = model(inputs_embeds=received, use_cache=False).last_hidden_state
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [received], model.parameters())
    assert len(runs) == 2, "the forward pass, and once more for the gradients of activations"
    stage_backward_weight(model.parameters(), groups)
    assert len(runs) == 2 + 9
