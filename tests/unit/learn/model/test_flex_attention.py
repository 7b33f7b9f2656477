"""Soft-capped attention by flex attention: what a CPU can show of the path that GPUs take."""

from dataclasses import replace

import pytest
import torch
from transformers import masking_utils

from echelon.learn.engines import prepared_layers
from echelon.learn.model import flex_attention
from echelon.learn.model.attention import describe_document_mask
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.flex_attention import FLEX, has_flex
from echelon.learn.model.small_copy import randomize
from echelon.learn.model.traits import computes_as_eager, find_traits
from echelon.learn.model.varlen_attention import TOLERANCE, VARLEN, find_error
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.planner.plan import ParallelPlan
from echelon.recipe.load import parse_recipe
from tests.families import small_config, small_model
from tests.unit.learn.model.test_document_mask import LENGTHS, loss_alone, losses, packed
from tests.unit.learn.model.test_varlen_attention import alone  # noqa: F401  (a fixture)
from tests.unit.recipe_samples import DEMO

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CPU, PLAN = torch.device("cpu"), ParallelPlan("ddp")
CAPPED = {"attn_logit_softcapping": 0.5, "sliding_window": 4}


@pytest.fixture
def uncompiled():
    """Flex attention step by step: a CPU's kernels compile for long."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def differentiable(monkeypatch, uncompiled):
    """Flex attention refuses gradients on CPUs, although its definition in PyTorch has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def build(attention, **fields):
    """Weights are so large that caps matter."""
    model = small_model("gemma2", **(CAPPED | fields))
    torch.manual_seed(0)
    randomize(model)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_documents_have_the_loss_that_eager_attention_gives_them_alone(uncompiled, precision):
    eager, flex = build("eager").eval(), build(FLEX).eval()
    tolerance = 1e-5 if precision == torch.float32 else 0.05
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        found, after = losses(flex, packed()), losses(flex, packed(changed=(0, 1)))
        for row, lengths in enumerate(LENGTHS):
            for number in range(len(lengths)):
                expected = loss_alone(eager, packed(), row, number)
                torch.testing.assert_close(found[row, number], expected, rtol=tolerance, atol=tolerance)
    assert [place for place in found if not torch.equal(found[place], after[place])] == [(0, 1)]
    free = build("eager", attn_logit_softcapping=None).eval()
    assert loss_alone(free, packed(), 0, 0) != pytest.approx(loss_alone(eager, packed(), 0, 0).item(), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(differentiable, dtype):
    error = find_error(flex_attention.run_flex, CPU, dtype, 16, flex_attention.attend_capped)
    assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_gradients_of_a_model_are_those_of_eager_attention(differentiable):
    eager, flex = build("eager"), build(FLEX)
    for model in (eager, flex):
        ObjectiveModule(model)(packed(), CausalLM().loss_sum).backward()
    for (name, expected), parameter in zip(eager.named_parameters(), flex.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("fault", ["cap", "mask", "scale", "missing"])
def test_a_kernel_that_computes_something_else_is_not_used(differentiable, monkeypatch, fault):
    original = flex_attention.compile_friendly_flex_attention
    changes = {
        "cap": {"score_mod": lambda score, *_: score / 4},
        "scale": {"scale": 4.0},
        "mask": {"block_mask": None},
        "missing": {"of another release": None},
    }[fault]

    def faulty(*inputs, **options):
        return original(*inputs, **(options | changes))

    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", faulty)
    assert find_error(flex_attention.run_flex, CPU, torch.float32, 16, flex_attention.attend_capped) > TOLERANCE


def test_only_gpus_are_asked():
    assert not has_flex(CPU, torch.bfloat16, load_config(small_config("gemma2")))


def test_an_attention_without_the_cap_is_noticed():
    model = build_on_meta(load_config(small_config("gemma2")))
    assert computes_as_eager(model, FLEX)
    assert not computes_as_eager(model, VARLEN)


@pytest.fixture
def uncompiled_masks(monkeypatch):
    """Compiling what builds a mask for a CPU takes long."""

    def build_mask(*args, _compile, build=masking_utils.create_block_mask, **options):
        return build(*args, **options)

    monkeypatch.setattr(masking_utils, "create_block_mask", build_mask)


def test_other_documents_do_not_compile_again(uncompiled_masks):
    model = small_model("gemma2", **CAPPED).eval()
    model.set_attn_implementation(FLEX)
    find_traits(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    apply_compile(model.model.layers, "aot_eager")
    with torch.no_grad():
        first = losses(model, packed(0))
        count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for seed in range(1, 4):
            losses(model, packed(seed))
    assert first and torch._dynamo.utils.counters["stats"]["unique_graphs"] == count
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_cap_and_the_scale_are_no_constants_of_the_kernel(uncompiled, monkeypatch):
    """torch makes a constant that changes a variable on the CPU, with which it cannot compile flex attention."""
    found = []

    def noting(*inputs, score_mod, scale, original=flex_attention.compile_friendly_flex_attention, **options):
        found.append((scale, [cell.cell_contents for cell in score_mod.__closure__]))
        return original(*inputs, score_mod=score_mod, scale=scale, **options)

    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", noting)
    losses(build(FLEX).eval(), packed())
    assert found
    for scale, captured in found:
        assert scale == 1.0 and [type(value) for value in captured] == [torch.Tensor] * 2


EAGER = "attention: eager, because this GPU's flex attention does not compute the model's soft-capped attention"
LAYERS = (
    "attention: eager, because flex attention is wrong in layers that are both compiled and checkpointed; it needs "
    "less memory, and train.compile=false or train.activation_checkpointing=none"
)
COMPILED = replace(PLAN, compile=True)
CHOSEN = "attention: flex attention, whose kernels cap the scores"


@pytest.mark.parametrize(
    ("wanted", "here", "equal", "plan", "chosen", "line"),
    [
        (None, True, True, PLAN, FLEX, CHOSEN),
        (None, False, True, PLAN, "eager", EAGER),
        (None, True, False, PLAN, "eager", EAGER),
        ("eager", True, True, PLAN, "eager", None),
        (None, True, True, COMPILED, FLEX, CHOSEN),
        (None, True, True, replace(PLAN, activation_checkpointing="full"), FLEX, CHOSEN),
        (None, True, True, replace(COMPILED, activation_checkpointing="full"), "eager", LAYERS),
        (None, True, True, replace(COMPILED, activation_checkpointing="selective"), "eager", LAYERS),
    ],
)
def test_it_is_used_where_it_works(alone, monkeypatch, wanted, here, equal, plan, chosen, line):  # noqa: F811
    monkeypatch.setattr(prepared_layers, "has_flex", lambda *_: here)
    monkeypatch.setattr(prepared_layers, "computes_as_eager", lambda *_: equal)
    recipe, _ = parse_recipe(DEMO, "recipe.yaml", [] if wanted is None else [f"model.attn_implementation={wanted}"])
    skeleton = build_on_meta(load_config(small_config("gemma2")), wanted)
    traits, found = prepared_layers.choose_attention_kernel(skeleton, recipe, plan, alone, torch.device("cuda"))
    assert (skeleton.config._attn_implementation, found) == (chosen, line)
    assert traits.mask == "by_layer"
    assert ("flex attention" in describe_document_mask(chosen, traits.mask)) == (chosen == FLEX)
