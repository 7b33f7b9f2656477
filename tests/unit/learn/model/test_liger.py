"""Liger's kernels: when they are used, and what the test at the start notices. Stand-ins take their place on a CPU."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama import modeling_llama

from echelon.learn.engines import prepared_layers
from echelon.learn.model import liger
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.liger import apply_liger, find_obstacle
from echelon.planner.plan import ParallelPlan, Precision
from echelon.recipe.load import parse_recipe
from tests.families import random_batch, small_config, small_model
from tests.unit.learn.model.test_varlen_attention import alone  # noqa: F401  (a fixture)
from tests.unit.recipe_samples import DEMO

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FusedNorm:
    def forward(self, hidden):
        normed = F.rms_norm(hidden.float(), hidden.shape[-1:], self.weight.float(), self.variance_epsilon)
        return normed.to(hidden.dtype)


class WeightlessNorm:
    def forward(self, hidden):
        return F.rms_norm(hidden, hidden.shape[-1:], None, self.variance_epsilon)


class NormWithoutGradient:
    def forward(self, hidden):
        scale = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + self.variance_epsilon).detach()
        return (hidden * scale * self.weight).to(hidden.dtype)


class FailingNorm:
    def forward(self, hidden):
        raise RuntimeError("no kernel image is available\nfor this device")


class FusedMLP:
    def forward(self, hidden):
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class OtherMLP:
    def forward(self, hidden):
        return self.down_proj(F.gelu(self.gate_proj(hidden)) * self.up_proj(hidden))


def fused_rope(queries, keys, cos, sin, unsqueeze_dim=1):
    def turn(states):
        first, second = states.chunk(2, -1)
        rotated = torch.cat([-second, first], -1)
        return states * cos.unsqueeze(unsqueeze_dim) + rotated * sin.unsqueeze(unsqueeze_dim)

    return turn(queries), turn(keys)


def backward_rope(queries, keys, cos, sin, unsqueeze_dim=1):
    """Keys turn the wrong way."""
    right, wrong = fused_rope(queries, keys, cos, sin), fused_rope(queries, keys, cos, -sin)
    return right[0], wrong[1]


@pytest.fixture
def install(monkeypatch):
    """Install a stand-in for the package, which patches as Liger does: the model, and names of `transformers`."""

    def patch_as(norm, mlp, rope):
        def patch(model, **kernels):
            patch.given = kernels
            if kernels["rope"]:
                modeling_llama.apply_rotary_pos_emb = rope
            modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP = norm, mlp
            for name, module in model.named_modules():
                if name.endswith("norm"):
                    module.forward = norm.forward.__get__(module)
                elif name.endswith("mlp") and kernels["swiglu"]:
                    module.forward = mlp.forward.__get__(module)

        return patch

    def install(norm=FusedNorm, mlp=FusedMLP, rope=fused_rope):
        package, transformers, table = (
            ModuleType(name) for name in (
                "liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"
            )
        )  # fmt: skip
        patch = transformers._apply_liger_kernel_to_instance = patch_as(norm, mlp, rope)
        table.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": patch, "mixtral": patch}
        for module in (package, transformers, table):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(liger, "find_spec", lambda name: name == "liger_kernel")
        return patch

    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):  # restored in the end, whatever is tested
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    return install


@pytest.fixture
def speed(monkeypatch):
    """Set the seconds that a layer takes without the kernels and with them."""

    def set_seconds(plain, fused):
        seconds = iter([plain, fused])
        monkeypatch.setattr(liger, "_measure", lambda *_: next(seconds))

    set_seconds(2.0, 1.0)
    return set_seconds


def skeleton(family="llama"):
    return build_on_meta(load_config(small_config(family)))


def test_kernels_that_compute_the_same_faster_have_no_obstacle(install, speed):
    names = dict(vars(modeling_llama))
    install()
    state = torch.get_rng_state()
    assert find_obstacle(skeleton(), CPU, torch.bfloat16, 256) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(vars(modeling_llama)) == names  # nothing of the test remains


@pytest.mark.parametrize(
    "wrong",
    [{"norm": WeightlessNorm}, {"norm": NormWithoutGradient}, {"mlp": OtherMLP}, {"rope": backward_rope}],
    ids=lambda wrong: next(iter(wrong.values())).__name__,
)
def test_kernels_that_compute_something_else_are_noticed(install, speed, wrong):
    names = dict(vars(modeling_llama))
    install(**wrong)
    assert "a layer's results with Liger's kernels are off by" in find_obstacle(skeleton(), CPU, torch.bfloat16, 256)
    assert dict(vars(modeling_llama)) == names


def test_other_obstacles(install, speed, monkeypatch):
    install(norm=FailingNorm)
    assert find_obstacle(skeleton(), CPU, torch.bfloat16, 64) == (
        "Liger's kernels fail here (RuntimeError: no kernel image is available)"
    )
    install()
    assert find_obstacle(skeleton("gpt2"), CPU, torch.bfloat16, 64) == "Liger has no kernels for gpt2 models"
    speed(0.001, 0.0012)
    assert find_obstacle(skeleton(), CPU, torch.bfloat16, 64) == (
        "a layer takes 1.20 ms with Liger's kernels and 1.00 without"
    )
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    assert "liger-kernel cannot be imported (ModuleNotFoundError" in find_obstacle(skeleton(), CPU, torch.bfloat16, 64)


def test_seconds_are_measured(install):
    install()
    found = find_obstacle(skeleton(), CPU, torch.bfloat16, 64)
    assert found is None or found.startswith("a layer takes")


def test_only_the_given_model_changes_and_only_on_the_given_device(install):
    patch = install(rope=lambda *_: pytest.fail("the kernel does not run on this device"))
    inputs, _ = random_batch()
    plain, patched = small_model("llama"), small_model("llama")
    with torch.no_grad():
        expected = plain(input_ids=inputs).logits
        undo = apply_liger(patched, "cuda")
        torch.testing.assert_close(patched(input_ids=inputs).logits, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(small_model("llama")(input_ids=inputs).logits, expected)
    norm = patched.model.norm
    assert type(norm) is modeling_llama.LlamaRMSNorm and norm.forward.__func__ is FusedNorm.forward
    assert patch.given["swiglu"] and not patch.given["fused_linear_cross_entropy"] and not patch.given["cross_entropy"]
    undo()
    assert modeling_llama.apply_rotary_pos_emb.__module__ == modeling_llama.__name__


def test_experts_keep_their_own_mlp(install):
    patch = install()
    apply_liger(small_model("mixtral"), "cpu")
    assert not patch.given["swiglu"] and not patch.given["geglu"]


LORA = ["adapter.method=lora", "model.checkpoint=somewhere"]
HALF = ParallelPlan("ddp", precision=Precision(compute="bfloat16"))


@pytest.mark.parametrize(
    ("overrides", "plan", "device", "is_asked"),
    [
        (LORA, HALF, CUDA, True),
        (LORA, HALF, CPU, False),
        (LORA, replace(HALF, compile=True), CUDA, False),
        (LORA, replace(HALF, precision=Precision()), CUDA, False),
        ([*LORA, "train.deterministic=true"], HALF, CUDA, False),
        ([], HALF, CUDA, False),
    ],
)
def test_they_are_for_eager_adapters(alone, monkeypatch, install, overrides, plan, device, is_asked):  # noqa: F811
    install()
    recipe, _ = parse_recipe(DEMO, "recipe.yaml", overrides)
    for obstacle, expected in ((None, True), ("they are slow", False)):
        monkeypatch.setattr(prepared_layers, "find_obstacle", lambda *_, found=obstacle: found)
        uses, line = prepared_layers.choose_liger(skeleton(), recipe, plan, alone, device)
        assert uses == (is_asked and expected)
        if not is_asked:
            assert line is None
        else:
            assert line == (prepared_layers.LIGER if expected else "kernels: PyTorch's, because they are slow")


def test_without_the_package_nothing_is_said(alone, monkeypatch):  # noqa: F811
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    recipe, _ = parse_recipe(DEMO, "recipe.yaml", LORA)
    assert prepared_layers.choose_liger(skeleton(), recipe, HALF, alone, CUDA) == (False, None)
