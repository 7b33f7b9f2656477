"""Parameter counts and bytes with an adapter, compared with PEFT's layers on meta and with values computed by hand."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

from echelon.ground.errors import ConfigError, PlanError
from echelon.learn.engines.prepared_layers import store_parameters
from echelon.learn.model.adapters import apply_adapter
from echelon.learn.model.build import build_on_meta
from echelon.learn.model.quantization import QuantizedLinear
from echelon.planner.adapter_plan import build_adapter_plan, frozen_bytes
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.memory import estimate_memory
from echelon.planner.plan import AdapterPlan, ParallelPlan, Precision
from echelon.planner.plan_lines import describe_plan
from echelon.planner.replica_costs import trained_shapes
from echelon.planner.shape import build_shape
from echelon.recipe.inputs import AdapterConfig
from echelon.recipe.load import load_recipe
from tests.families import assert_same_shapes, small_config
from tests.parity.training import Row, resolve, write_recipe
from tests.unit.recipe_samples import SMALL as SMALL_RECIPE
from tests.unit.recipe_samples import load_text

BF16 = Precision(compute="bfloat16")
LLAMA3_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
ODD = {"vocab_size": 130, "hidden_size": 72, "intermediate_size": 136, "num_hidden_layers": 3,
       "num_attention_heads": 6, "num_key_value_heads": 3}  # fmt: skip
MODELS = {
    "llama": {"model_type": "llama", **ODD, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", **ODD, "head_dim": 12},
    "gemma2": {"model_type": "gemma2", **ODD, "head_dim": 20},
    "gpt2": {"model_type": "gpt2", "vocab_size": 130, "n_embd": 72, "n_layer": 3, "n_head": 6, "n_inner": 136},
    "olmo2": {"model_type": "olmo2", **ODD},  # not counted by formula
}


def planned(config, **adapter):
    shape = build_shape(config)
    return shape, build_adapter_plan(AdapterConfig.model_validate(adapter), shape)


def injected(config, adapter):
    model = build_on_meta(AutoConfig.for_model(**config))
    apply_adapter(model, adapter)
    store_parameters(model, BF16)
    return model


ADAPTERS = [
    *(
        (name, {"method": method, "r": 5})
        for name in MODELS
        for method in ("lora", "qlora", "dora")
        if (name, method) != ("gpt2", "qlora")
    ),
    ("llama", {"method": "lora", "target_modules": ["q_proj", "down_proj"]}),
    ("llama", {"method": "qlora", "double_quant": False, "target_modules": ["v_proj"]}),
    ("gpt2", {"method": "lora", "target_modules": ["c_proj"]}),
    ("llama", {"method": "lora", "modules_to_save": ["embed_tokens", "lm_head", "norm", "input_layernorm"]}),
    ("llama", {"method": "lora", "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("qwen3", {"method": "qlora", "modules_to_save": ["down_proj", "q_norm", "post_attention_layernorm"]}),
    ("gemma2", {"method": "qlora", "modules_to_save": ["lm_head", "embed_tokens", "pre_feedforward_layernorm"]}),
    ("gemma2", {"method": "dora", "modules_to_save": ["embed_tokens"]}),
    ("gpt2", {"method": "lora", "modules_to_save": ["wte", "wpe", "ln_f", "ln_2"]}),
    ("olmo2", {"method": "lora", "modules_to_save": ["embed_tokens"]}),
]


@pytest.mark.parametrize(("name", "adapter"), ADAPTERS)
def test_counts_and_bytes_equal_peft(name, adapter):
    model = injected(MODELS[name], AdapterConfig.model_validate(adapter))
    parameters = list(model.parameters())
    shape, plan = planned(MODELS[name], **adapter)
    assert plan.num_trained_parameters == sum(each.numel() for each in parameters if each.requires_grad)
    frozen = [each for each in parameters if not each.requires_grad]
    assert sum(frozen_bytes(shape, plan, 2)) == sum(each.numel() * each.element_size() for each in frozen)
    packed = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    assert plan.num_quantized_parameters == sum(each.in_features * each.out_features for each in packed)


@pytest.mark.parametrize(("name", "adapter"), ADAPTERS)
def test_shapes_equal_peft(name, adapter):
    """All trained matrices, and as many numbers in vectors. GPT-2's linear layers are stored transposed."""
    model = injected(MODELS[name], AdapterConfig.model_validate(adapter))
    shape, plan = planned(MODELS[name], **adapter)
    assert_same_shapes(trained_shapes(shape, plan), model)


def test_bytes_of_modules_trained_in_full():
    """Untied embedding and head under DDP: fp32 weights, gradients and moments, and the sum of the head's gradient."""
    shape, adapter = planned(SMALL, method="lora", r=4, modules_to_save=["embed_tokens", "lm_head"])
    assert (adapter.num_saved_outside, adapter.num_saved_inside, adapter.num_looked_up) == (12_800, 0, 6_400)
    plan = ParallelPlan("ddp", precision=BF16, adapter=adapter)
    estimate = estimate_memory(shape, replace(plan, sequence_len=48))
    frozen, whole = FROZEN - 12_800, 12_800
    assert estimate.parameters == 2 * frozen + 4 * (TRAINED + whole) + 2 * (TRAINED + whole - 6_400)
    assert (estimate.gradients, estimate.optimizer) == (4 * (TRAINED + whole), 8 * (TRAINED + whole))
    frozen_head = estimate_memory(shape, replace(plan, adapter=planned(SMALL, method="lora", r=4)[1], sequence_len=48))
    assert estimate.logits - frozen_head.logits == 100 * 64 * 4
    assert "with embed_tokens, lm_head trained in full: " in "\n".join(describe_plan(plan))
    assert ParallelPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    older = plan.to_dict()
    older["adapter"] = {
        key: value for key, value in older["adapter"].items() if "saved" not in key and "looked" not in key
    }
    assert ParallelPlan.from_dict(older).adapter.saved == (), "a run's plan from before is read"


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"method": "lora", "modules_to_save": ["embed_token"]}, "did you mean embed_tokens"),
        ({"method": "lora", "modules_to_save": ["self_attn"]}, "'self_attn' matches no embedding, head, norm"),
    ],
)
def test_a_name_that_is_not_counted_is_refused(adapter, message):
    with pytest.raises(ConfigError, match=message):
        planned(SMALL, **adapter)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["adapter={method: lora, modules_to_save: [q_proj], target_modules: [q_proj]}"],
            "both name q_proj: it is either tr",
        ),
        (["adapter={method: lora, modules_to_save: [norm, norm]}"], "adapter.modules_to_save has 'norm' twice"),
        (["adapter={modules_to_save: [norm]}"], "has no effect with adapter.method=full"),
        (
            ["adapter={method: lora, modules_to_save: [norm]}", "objective.name=dpo"],
            "objective.name=dpo needs the original weights, which this trains in place",
        ),
    ],
)
def test_a_recipe_refuses_modules_that_cannot_be_trained_in_full(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, SMALL_RECIPE, *overrides)


def test_llama3_8b():
    """The well-known parameter count of LoRA on Llama-3 8B at rank 16."""
    shape, plan = planned(LLAMA3_8B, method="qlora", r=16)
    assert plan.num_trained_parameters == 41_943_040
    # a layer: 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    assert plan.num_quantized_parameters == 32 * (41_943_040 + 176_160_768) == 6_979_321_856
    inside, outside = frozen_bytes(shape, plan, 2)
    # a block of 64 takes 32 bytes plus 1; 256 blocks take 4 more, and each of the 7 layers 4; two norms in bf16
    assert inside == 6_979_321_856 // 64 * 33 + 6_979_321_856 // 64 // 256 * 4 + 32 * 7 * 4 + 32 * 2 * 4096 * 2
    assert outside == 2 * (2 * 128256 * 4096 + 4096)
    # 4 N + 2 N_trained + 12 L h s, N without the input embedding
    attention = 12 * 32 * 4096 * 8192
    trained = plan.num_trained_parameters
    flops = 4 * (8_030_261_248 - 128256 * 4096) + 2 * trained + attention
    assert shape.flops_per_token(8192, trained) == flops
    assert shape.mfu(1000, 2, 1e15, 8192, trained) == 1000 * flops / 2e15


# r * (in + out), at q (64 -> 128), k, v (64 -> 32), o (128 -> 64), gate, up (64 -> 176), down (176 -> 64)
SMALL = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
TRAINED = 4 * 4 * (192 + 96 + 96 + 192 + 240 + 240 + 240)
LAYER, OUTSIDE = 54_400, 12_864
FROZEN = 4 * LAYER + OUTSIDE
SHARDED = {"reshard_after_forward": True, "reduce_gradients": "each", "precision": BF16}


@pytest.mark.parametrize(
    ("plan", "parameters", "gradients", "optimizer", "buffers"),
    [
        # frozen weights in bf16, trained ones in fp32 with a bf16 copy from autocast
        (ParallelPlan("ddp", dp_replicate=4, precision=BF16), 2 * FROZEN + 6 * TRAINED, 4 * TRAINED, 8 * TRAINED, 0),
        (ParallelPlan("ddp", dp_replicate=4), 4 * FROZEN + 4 * TRAINED, 4 * TRAINED, 8 * TRAINED, 0),
        # a quarter of each; two layers and the parameters outside the layers gathered in bf16
        (
            ParallelPlan("fsdp", dp_shard=4, **SHARDED),
            (2 * FROZEN + 4 * TRAINED) // 4 + 2 * (OUTSIDE + 2 * LAYER) + 2 * 2 * TRAINED // 4,
            TRAINED,
            2 * TRAINED,
            2 * LAYER + (2 + 4) * TRAINED // 4,
        ),
        # ZeRO-1 accumulates full gradients, only of trained parameters
        (
            ParallelPlan("zero1", dp_shard=4, num_microbatches=2, precision=BF16),
            (2 * FROZEN + 4 * TRAINED) // 4 + 2 * FROZEN + 2 * TRAINED,
            TRAINED + 4 * TRAINED,
            2 * TRAINED,
            2 * LAYER + (2 + 4) * TRAINED // 4,
        ),
    ],
    ids=lambda value: value.strategy if isinstance(value, ParallelPlan) else "",
)
def test_states_by_hand(plan, parameters, gradients, optimizer, buffers):
    shape, adapter = planned(SMALL, method="lora", r=4)
    estimate = estimate_memory(shape, replace(plan, adapter=adapter, sequence_len=48))
    assert (estimate.parameters, estimate.gradients, estimate.optimizer) == (parameters, gradients, optimizer)
    assert estimate.buffers == buffers + 2 * 48 * 16 * 4


def test_a_frozen_head_has_no_gradient_and_4_bit_weights_are_dequantized_singly():
    shape, adapter = planned(SMALL, method="qlora", r=4)
    plan = ParallelPlan("ddp", precision=BF16, adapter=adapter)
    estimate, full = (
        estimate_memory(shape, replace(plan, sequence_len=48)),
        estimate_memory(shape, replace(plan, adapter=None, sequence_len=48)),
    )
    assert full.logits - estimate.logits == 100 * 64 * 4
    assert estimate.buffers == 64 * 176 * 2 + 2 * 48 * 16 * 4
    inside, outside = frozen_bytes(shape, adapter, 2)
    assert estimate.parameters == inside + outside + 6 * TRAINED


def test_plan_json_contains_the_adapter():
    shape, adapter = planned(SMALL, method="qlora", r=4, target_modules=["q_proj"])
    plan = ParallelPlan("ddp", adapter=adapter)
    content = json.loads(json.dumps(plan.to_dict()))
    assert ParallelPlan.from_dict(content) == plan
    assert content["adapter"]["num_trained_parameters"] == 4 * 4 * 192
    (line,) = (line for line in describe_plan(plan) if line.startswith("adapter: "))
    total = 3072 + shape.num_parameters
    assert f"qlora of rank 4 at q_proj: 3,072 of {total:,} parameters are trained (1." in line
    assert "%); the frozen ones are in float32, 217,088 of them in 4 bits" in line
    for broken, word in [
        ({**content, "adapter": "lora"}, "adapter='lora'"),
        ({**content, "adapter": {**content["adapter"], "method": "full"}}, "'full'"),
        ({**content, "adapter": {**content["adapter"], "targets": "q_proj"}}, "targets='q_proj'"),
        ({**content, "adapter": {"r": 4}}, "plan.adapter misses"),
    ]:
        with pytest.raises(PlanError, match=word):
            ParallelPlan.from_dict(broken)


def test_new_tokens_are_trained_rows():
    adapter = build_adapter_plan(AdapterConfig(method="lora", r=4), build_shape(SMALL), num_new_tokens=2)
    assert isinstance(adapter, AdapterPlan)
    assert adapter.num_trained_parameters == TRAINED + 2 * 2 * 64


def test_a_missing_target_is_refused():
    with pytest.raises(ConfigError, match="no linear layer named 'q_prj'; did you mean q_proj"):
        planned(SMALL, method="lora", target_modules=["q_prj"])


def test_experts_without_an_adapter_are_reported(tmp_path):
    """The plan prints the fraction that PEFT does not reach; for a dense model it prints nothing."""
    row = Row(adapter="lora", family="qwen3_moe")
    recipe, _ = load_recipe(write_recipe(row, tmp_path, tmp_path / "text.txt", steps=4))
    lines = [line for line in describe_plan(resolve(row, recipe, 1000)) if "experts:" in line]
    model = build_on_meta(AutoConfig.for_model(**small_config("qwen3_moe")))
    experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    total = sum(each.numel() for each in model.parameters())
    apply_adapter(model, recipe.adapter)
    assert not any(".experts." in name and each.requires_grad for name, each in model.named_parameters())
    assert len(lines) == 1 and f"{experts / total:.0%} of the model's parameters are expert weights" in lines[0]
    dense = Row(adapter="lora")
    recipe, _ = load_recipe(write_recipe(dense, tmp_path / "dense", tmp_path / "text.txt", steps=4))
    assert not any("experts" in line for line in describe_plan(resolve(dense, recipe, 1000)))


@pytest.mark.parametrize(
    ("kept", "compiles"), [("auto", False), ("selective", False), ("full", True), ("{memory_budget: 0.5}", True)]
)
def test_4_bit_weights_are_compiled_where_the_compiler_does_not_keep_them_in_16_bits(tmp_path, kept, compiles):
    overrides = ["adapter={method: qlora}", f"train.activation_checkpointing={kept}"]
    shape, gpu = build_shape(small_config("llama")), parse_devices("1xH100")

    def plan(*more):
        return resolve_plan(load_text(tmp_path, SMALL_RECIPE, *overrides, *more)[0], shape, gpu)

    assert plan().compile is compiles
    wanted = plan("train.compile=true")
    assert wanted.compile and any("this plan does not count them" in line for line in wanted.why) is not compiles
