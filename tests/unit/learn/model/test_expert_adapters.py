"""Adapters of a mixture of experts: the expert weights, which are tensors and not linear layers, compared with PEFT."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from echelon.ground.errors import ConfigError
from echelon.learn.checkpoint.adapter_folder import describe_adapter, write_adapter
from echelon.learn.engines.prepared_layers import store_parameters
from echelon.learn.model.adapters import apply_adapter, check_adapter, find_targets, merged_weight, plain_name
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.parts import disabled_adapter
from echelon.learn.model.quantization import Quantized
from echelon.planner.adapter_plan import build_adapter_plan, describe_reach, frozen_bytes
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.memory import estimate_memory
from echelon.planner.plan import ParallelPlan, Precision
from echelon.planner.plan_lines import describe_adapter_plan
from echelon.planner.replica_costs import trained_shapes
from echelon.planner.shape import build_shape
from echelon.recipe.inputs import AdapterConfig
from tests.families import assert_same_shapes, initialized, small_config, small_model
from tests.unit.learn.model.test_adapter_layers import adapted, logits, train_three_steps, trained
from tests.unit.recipe_samples import SMALL, load_text

EXPERTS = AdapterConfig(method="lora", r=4, target_parameters="experts")
SOME = AdapterConfig(method="lora", r=4, target_modules=(), target_parameters=("experts.down_proj",))
TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}  # fmt: skip
MIXTURES = {
    "phimoe": {"model_type": "phimoe", **TINY, "num_local_experts": 4},
    "granitemoe": {"model_type": "granitemoe", **TINY, "num_local_experts": 4},
    "gpt_oss": {"model_type": "gpt_oss", **TINY, "head_dim": 16, "num_local_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **TINY, "num_experts": 4, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 32},
    "glm4_moe": {"model_type": "glm4_moe", **TINY, "head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 32,
                 "first_k_dense_replace": 1},
    "qwen3_next": {"model_type": "qwen3_next", **TINY, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32,
                   "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 32,
                   "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16},
    **{family: small_config(family) for family in ("mixtral", "qwen3_moe", "deepseek_v3")},
}  # fmt: skip


@pytest.mark.parametrize("adapter", [EXPERTS, SOME], ids=["all", "some"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen3_next"])
def test_peft_loads_the_adapter_and_both_merges_agree(tmp_path, family, adapter):
    base, config = initialized(load_config(MIXTURES[family]), seed=0), load_config(MIXTURES[family])
    model, principal = adapted(base, config, adapter)
    (tmp_path / "model").mkdir()
    write_adapter(
        tmp_path / "adapter", describe_adapter(model, trained(model), principal), None, tmp_path / "model", ""
    )
    peers = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter")).eval()
    assert {name.removeprefix("base_model.model."): each.shape for name, each in peers.named_parameters()
            if "lora_" in name} == {name: each.shape for name, each in trained(model).items()}  # fmt: skip
    assert torch.allclose(logits(model), logits(peers), atol=2e-5)
    assert not torch.allclose(logits(model), logits(base), atol=1e-3), "the adapter must do something"
    merged = peers.merge_and_unload()
    for name, parameter in merged.named_parameters():
        assert torch.allclose(merged_weight(model, name), parameter, atol=1e-5), name
    assert torch.allclose(logits(model), logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter"))), atol=2e-5)


def test_three_steps_equal_peft():
    """Losses and gradients of PEFT's own model, which starts from the same numbers."""
    base, config = small_model("qwen3_moe"), load_config(small_config("qwen3_moe"))
    model, _ = adapted(base, config, EXPERTS)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    peers = get_peft_model(
        copy.deepcopy(base),
        LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                   target_parameters=names, task_type="CAUSAL_LM"),
    )  # fmt: skip
    ours = dict(model.named_parameters())
    theirs = {name.removeprefix("base_model.model."): each for name, each in peers.named_parameters()}
    assert {name for name, each in theirs.items() if each.requires_grad} == trained(model).keys()
    for name, parameter in theirs.items():
        parameter.data = ours[name].detach().clone()
    losses = [train_three_steps(each, torch.optim.AdamW, 1e-2) for each in (model, peers)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_plan_counts_what_is_trained(family, method):
    adapter = AdapterConfig(method=method, r=4, target_parameters="experts")
    config = MIXTURES[family]
    model = build_on_meta(load_config(config))
    apply_adapter(model, adapter)
    store_parameters(model, Precision(compute="bfloat16"))
    shape = build_shape(config)
    plan = build_adapter_plan(adapter, shape)
    parameters = dict(model.named_parameters())
    assert plan.num_trained_parameters == sum(each.numel() for each in parameters.values() if each.requires_grad)
    assert_same_shapes(trained_shapes(shape, plan), model)
    experts = [each for name, each in parameters.items() if each.dim() == 3 and not name.endswith("conv1d.weight")]
    assert plan.num_adapted_experts == sum(each.numel() for each in experts) > 0
    told = describe_adapter_plan(plan, "bfloat16")
    assert describe_reach(plan, shape) is None and all(name in told for name in plan.experts)
    if method == "lora":
        frozen = [each for each in parameters.values() if not each.requires_grad]
        assert sum(frozen_bytes(shape, plan, 2)) == sum(each.numel() * each.element_size() for each in frozen)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_layers_of_all_linear_get_an_adapter_and_nothing_else_does(family):
    model = build_on_meta(load_config(MIXTURES[family]))
    targets = find_targets(model, AdapterConfig(method="lora"))
    apply_adapter(model, AdapterConfig(method="lora", r=2))
    adapted_layers = {
        plain_name(name.replace(".lora_A.default.weight", ".weight")) for name in trained(model) if ".lora_A." in name
    }
    assert adapted_layers == {f"{name}.weight" for name in targets} and targets


def test_routers_have_no_adapter():
    """PhiMoE's router is a subclass of a linear layer, whose forward returns a tuple: an adapter would break it."""
    model = build_on_meta(load_config(MIXTURES["phimoe"]))
    router = "model.layers.0.mlp.router"
    assert isinstance(model.get_submodule(router), nn.Linear)
    assert router not in find_targets(model, AdapterConfig(method="lora"))
    with pytest.raises(ConfigError, match="router of PhimoeForCausalLM cannot have an adapter: it is a router, or"):
        check_adapter(model, AdapterConfig(method="lora", target_modules=("router",)))


def test_names_that_peft_takes_for_experts_are_left_out():
    """PEFT loads `gate_proj` of a DeepSeek-V3 as an adapter of the experts, so dense layers cannot have one."""
    model = build_on_meta(load_config(small_config("deepseek_v3")))
    dense = "model.layers.0.mlp.gate_proj"
    assert isinstance(model.get_submodule(dense), nn.Linear)
    assert dense not in find_targets(model, AdapterConfig(method="lora"))
    with pytest.raises(ConfigError, match=r"gate_proj.*PEFT"):
        check_adapter(model, AdapterConfig(method="lora", target_modules=("gate_proj",)))


@pytest.mark.parametrize(
    ("family", "names", "message"),
    [
        ("mixtral", ("experts.down_prj",), "no expert weights named 'experts.down_prj'; did you mean"),
        ("mixtral", ("gate.weight",), "no expert weights named 'gate.weight'; choose from mlp.experts.gate_up_proj"),
        ("llama", "experts", "it is not a mixture of experts"),
    ],
)
def test_names_without_expert_weights_are_refused(family, names, message):
    adapter = AdapterConfig(method="lora", target_parameters=names)
    for check in (
        lambda: check_adapter(build_on_meta(load_config(small_config(family))), adapter),
        lambda: build_adapter_plan(adapter, build_shape(small_config(family))),
    ):
        with pytest.raises(ConfigError, match=message):
            check()


@pytest.mark.parametrize("key", [{"method": "dora"}, {"dropout": 0.1}, {"init": "pissa"}])
def test_what_peft_cannot_do_with_parameters_is_refused(key):
    [(name, value)] = key.items()
    with pytest.raises(ValueError, match=rf"adapter\.{name}={value}: .* expert weights, of which PEFT has no such"):
        AdapterConfig(**{"method": "lora", "target_parameters": "experts", **key})
    peers = small_model("mixtral")
    wanted = {"use_dora": True} if name == "method" else {"lora_dropout": 0.1}
    if name != "init":
        with pytest.raises(ValueError, match="does not work with"):
            get_peft_model(peers, LoraConfig(target_modules=[], target_parameters=["experts.down_proj"], **wanted))


def test_a_field_that_only_the_model_reads_is_known():
    """Qwen3-MoE's config class does not declare head_dim, which its files on the hub have and its attention reads."""
    model = build_on_meta(load_config(small_config("qwen3_moe", head_dim=32)))
    assert model.model.layers[0].self_attn.q_proj.out_features == 4 * 32
    with pytest.raises(ConfigError, match=r"model\.config\.head_dims=32 is not a field of a qwen3_moe config"):
        load_config(small_config("qwen3_moe", head_dims=32))
    with pytest.raises(ConfigError, match="is not a field") as caught:
        load_config(small_config("qwen3_moe", head_dims="x" * 20000))
    assert len(str(caught.value)) < 500


def test_memory_of_adapted_experts_by_hand():
    """Beside the estimate without them: the sums of all layers, kept for backward, and the gradient of the largest."""
    shape = build_shape(small_config("mixtral"))
    gate_up, down = 4 * 256 * 64, 4 * 64 * 128
    estimates = []
    for names in ((), "experts"):
        adapter = build_adapter_plan(AdapterConfig(method="lora", r=4, target_parameters=names), shape)
        for checkpointing in ("none", "full"):
            plan = ParallelPlan("ddp", precision=Precision(), adapter=adapter, activation_checkpointing=checkpointing)
            estimates.append(estimate_memory(shape, replace(plan, sequence_len=32)))
    without, without_full, adapted_all, adapted_full = estimates
    assert adapted_all.activations - without.activations == 4 * 2 * (gate_up + down)
    assert adapted_full.activations + adapted_full.logits - without_full.activations - without_full.logits > 0
    assert adapted_all.buffers - without.buffers == 4 * gate_up
    trained = 2 * 4 * 4 * (256 + 64 + 64 + 128)  # by hand: A and B of rank 4 for four experts in two layers
    assert adapted_all.optimizer - without.optimizer == 8 * trained


def packed_by_bitsandbytes(model, kind, double):
    """A copy of a model whose linear layers in decoder layers and experts have the values of 4-bit weights."""
    copied = copy.deepcopy(model)
    for layer in copied.model.layers:
        linears = {f"{name}.weight" for name, each in layer.named_modules() if isinstance(each, nn.Linear)}
        for name, weight in layer.named_parameters():
            if name in linears or weight.dim() == 3:
                packed, state = quantize_4bit(weight.data.contiguous(), compress_statistics=double, quant_type=kind)
                weight.data = dequantize_4bit(packed, state)
    return copied


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("fp4", False)])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_in_4_bits_have_the_numbers_of_bitsandbytes(tmp_path, family, kind, double):
    base, config = small_model(family), load_config(small_config(family))
    adapter = AdapterConfig(method="qlora", r=4, quantize_experts=True, quant_type=kind, double_quant=double)
    model, principal = adapted(base, config, adapter)
    expected = packed_by_bitsandbytes(base, kind, double)
    with disabled_adapter(model):
        assert torch.equal(logits(model), logits(expected)) and not torch.equal(logits(model), logits(base))
    experts = [name for name, each in base.named_parameters() if each.dim() == 3]
    assert experts and all(torch.equal(merged_weight(model, name), expected.get_parameter(name)) for name in experts)
    assert not [name for name, each in model.named_parameters() if each.dim() == 3], "no 16-bit copy is left"
    (tmp_path / "model").mkdir()
    content = describe_adapter(model, trained(model), principal)
    write_adapter(tmp_path / "adapter", content, None, tmp_path / "model", "")
    peers = PeftModel.from_pretrained(expected, str(tmp_path / "adapter")).eval()
    assert torch.allclose(logits(model), logits(peers), atol=2e-5)


def test_peft_loads_an_adapter_on_experts_that_bitsandbytes_packed(tmp_path):
    """As the model card says it: the parametrization of bitsandbytes, then PEFT's adapter of the attention layers."""
    base, config = small_model("mixtral"), load_config(small_config("mixtral"))
    model, principal = adapted(base, config, AdapterConfig(method="qlora", r=4, quantize_experts=True))
    (tmp_path / "model").mkdir()
    content = describe_adapter(model, trained(model), principal)
    write_adapter(tmp_path / "adapter", content, None, tmp_path / "model", "")
    for layer in base.model.layers:
        for linear in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = layer.self_attn.get_submodule(linear).weight
            weight.data = dequantize_4bit(*quantize_4bit(weight.data, compress_statistics=True, quant_type="nf4"))
    for module in list(base.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() == 3 and "experts" in type(module).__name__.lower():
                replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
    peers = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert torch.allclose(logits(model), logits(peers), atol=2e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_plan_counts_experts_in_4_bits(family):
    adapter = AdapterConfig(method="qlora", r=4, quantize_experts=True)
    config = small_config(family)
    model = build_on_meta(load_config(config))
    apply_adapter(model, adapter)
    store_parameters(model, Precision(compute="bfloat16"))
    shape = build_shape(config)
    plan = build_adapter_plan(adapter, shape)
    frozen = [each for each in model.parameters() if not each.requires_grad]
    assert sum(frozen_bytes(shape, plan, 2)) == sum(each.numel() * each.element_size() for each in frozen)
    packed = [math.prod(each.weight_shape) for each in model.modules() if isinstance(each, Quantized)]
    assert plan.num_quantized_parameters == sum(packed)
    assert plan.num_quantized_experts == shape.num_expert_parameters > 0


def test_4_bit_experts_without_qlora_or_with_an_adapter_are_refused():
    with pytest.raises(ValueError, match=r"quantize_experts=true has no effect with .*, which has no weights in 4"):
        AdapterConfig(method="lora", quantize_experts=True)
    with pytest.raises(ValueError, match=r"expert weights, of which PEFT has no such adapter in 4 bits; use .*=false"):
        AdapterConfig(method="qlora", quantize_experts=True, target_parameters="experts")
    model = build_on_meta(load_config(small_config("llama")))
    with pytest.raises(ConfigError, match=r"adapter\.quantize_experts=true: .* have no expert weights"):
        check_adapter(model, AdapterConfig(method="qlora", quantize_experts=True))


@pytest.mark.parametrize("keys", ["method: lora, target_parameters: experts", "method: qlora, quantize_experts: true"])
def test_experts_with_an_adapter_are_not_compiled(tmp_path, keys):
    shape, cluster = build_shape(small_config("mixtral")), parse_devices("1xH100")
    override = f"adapter={{{keys}}}"
    plan = resolve_plan(load_text(tmp_path, SMALL, override)[0], shape, cluster)
    assert not plan.compile and any(line.startswith("compile auto: off, with adapter.") for line in plan.why)
    with pytest.raises(ConfigError, match=r"cannot be compiled; set train\.compile=false"):
        resolve_plan(load_text(tmp_path, SMALL, override, "train.compile=true")[0], shape, cluster)
