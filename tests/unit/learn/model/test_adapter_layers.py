"""Adapters compared with PEFT, 4-bit layers compared with bitsandbytes."""

import copy
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from echelon.ground.errors import CheckpointError, ConfigError
from echelon.learn.checkpoint.adapter_folder import describe_adapter, write_adapter
from echelon.learn.model.adapters import apply_adapter, check_adapter, initialize_adapter, merged_weight, plain_name
from echelon.learn.model.build import build_on_meta, load_config, materialize
from echelon.learn.model.parts import disabled_adapter
from echelon.learn.model.quantization import QuantizedLinear
from echelon.learn.model.weights import grown, initialize_buffers, weight_places
from echelon.planner.adapter_plan import check_packages
from echelon.recipe.inputs import AdapterConfig
from tests.families import small_config, small_model

IDS = torch.arange(24).reshape(2, 12)


def adapted(base, config, adapter, new_token_ids=()):
    """A live model with the weights of `base` and an adapter with nonzero B, and its initial state."""
    skeleton = build_on_meta(config)
    model = copy.deepcopy(skeleton)
    apply_adapter(model, adapter, new_token_ids)
    materialize(model, "cpu")
    with torch.no_grad():
        for name, place in weight_places(model).items():
            place.write(place.take(base.get_parameter(name)))
    initialize_buffers(model, skeleton)
    principal = initialize_adapter(model, adapter, seed=5)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or (parameter.requires_grad and plain_name(name) is not None):
            parameter.data += torch.randn_like(parameter) * 0.1
    return model.eval(), principal


def trained(model):
    return {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}


def train_three_steps(model, rule, rate):
    """The loss of each step."""
    optimizer, losses = rule([each for each in model.parameters() if each.requires_grad], lr=rate), []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


CASES = {
    "lora": ("llama", AdapterConfig(method="lora", r=4)),
    "rslora on two": ("llama", AdapterConfig(method="lora", r=4, rslora=True, target_modules=("q_proj", "v_proj"))),
    "dora": ("llama", AdapterConfig(method="dora", r=4)),
    "pissa": ("llama", AdapterConfig(method="lora", r=4, init="pissa")),
    "lora on Conv1D": ("gpt2", AdapterConfig(method="lora", r=4)),
    "dora on Conv1D": ("gpt2", AdapterConfig(method="dora", r=4)),
    "pissa on Conv1D": ("gpt2", AdapterConfig(method="lora", r=4, init="pissa")),
    "embedding and head whole": (
        "llama",
        AdapterConfig(method="lora", r=4, modules_to_save=("embed_tokens", "lm_head")),
    ),
    "tied, whole by one name": ("tied llama", AdapterConfig(method="lora", r=4, modules_to_save=("embed_tokens",))),
    "tied, whole by the other": ("tied llama", AdapterConfig(method="dora", r=4, modules_to_save=("lm_head",))),
    "a tied wte and norms whole": (
        "tied gpt2",
        AdapterConfig(method="lora", r=4, modules_to_save=("wte", "ln_1", "ln_f")),
    ),
    # The names of the layers' norms also end in "norm", so PEFT would select them too.
    "a norm and a layer whole": ("llama", AdapterConfig(method="lora", r=4, modules_to_save=("norm", "down_proj"))),
    "a head with an adapter": ("llama", AdapterConfig(method="lora", r=4, target_modules=("lm_head", "q_proj"))),
}


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_the_adapter_and_both_merges_agree(tmp_path, case):
    family, adapter = CASES[case]
    tied, family = family.startswith("tied"), family.removeprefix("tied ")
    base, config = small_model(family, tied), load_config(small_config(family, tied))
    model, principal = adapted(base, config, adapter)
    (tmp_path / "model").mkdir()
    content = describe_adapter(model, trained(model), principal)
    num_bytes = write_adapter(tmp_path / "adapter", content, None, tmp_path / "model", "a card")
    assert num_bytes == (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 0
    peers = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter")).eval()
    assert torch.allclose(logits(model), logits(peers), atol=2e-5)
    assert not torch.allclose(logits(model), logits(base), atol=1e-3), "the adapter must do something"
    merged = peers.merge_and_unload()
    for name, parameter in merged.named_parameters():
        assert torch.allclose(merged_weight(model, name), parameter, atol=1e-5), name
    assert torch.allclose(logits(model), logits(peers), atol=2e-5), "merging a copy changes nothing"


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("saved", [(), ("lm_head", "norm")], ids=["nothing whole", "whole"])
def test_the_same_parameters_train_as_under_peft(method, saved):
    adapter = AdapterConfig(method=method, r=3, modules_to_save=saved)
    base = small_model("llama")
    model, _ = adapted(base, load_config(small_config("llama")), adapter)
    peers = get_peft_model(
        base,
        LoraConfig(
            r=3, target_modules="all-linear", use_dora=method == "dora", task_type="CAUSAL_LM",
            modules_to_save=[name if name == "lm_head" else f"model.{name}" for name in saved] or None,
        ),
    )  # fmt: skip
    theirs = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): each.shape
        for name, each in trained(peers).items()
    }
    assert {name: each.shape for name, each in trained(model).items()} == theirs


def run_under_autocast(model):
    """Logits, gradients, and the bytes kept for the backward pass, without weights."""
    weights = {each.data_ptr() for each in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        computed = model(input_ids=IDS).logits
    computed.float().square().sum().backward()
    gradients = {name.removeprefix("base_model.model."): each.grad for name, each in model.named_parameters()}
    return computed, gradients, sum(size for size, _ in kept.values())


def test_in_bf16_results_equal_peft_bit_for_bit_with_less_memory():
    base = small_model("llama")
    model, _ = adapted(base, load_config(small_config("llama")), AdapterConfig(method="lora", r=4))
    settings = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    peers = get_peft_model(copy.deepcopy(base), settings).eval()
    ours = dict(model.named_parameters())
    for name, parameter in peers.named_parameters():
        parameter.data = ours[name.removeprefix("base_model.model.")].detach().clone()
    for parameter in (*model.parameters(), *peers.parameters()):
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    (logits, gradients, kept), (their_logits, their_gradients, they_keep) = map(run_under_autocast, (model, peers))
    assert torch.equal(logits, their_logits)
    trained_names = [name for name, gradient in their_gradients.items() if gradient is not None]
    assert len(trained_names) == 2 * 7 * 2
    for name in trained_names:
        assert torch.equal(gradients[name], their_gradients[name]), name
    config = base.config
    # in PEFT, k, v and up each keep a bf16 copy of the input that q and gate keep already
    copies = config.num_hidden_layers * 3 * IDS.numel() * config.hidden_size * 2
    assert they_keep - kept >= copies


def test_pissa_starts_equal_to_the_base_and_to_peft():
    base, config = small_model("llama"), load_config(small_config("llama"))
    adapter = AdapterConfig(method="lora", r=4, init="pissa")
    fresh = build_on_meta(config)
    apply_adapter(fresh, adapter)
    materialize(fresh, "cpu")
    for name, place in weight_places(fresh).items():
        place.write(place.take(base.get_parameter(name).detach()))
    initialize_buffers(fresh, build_on_meta(config))
    initialize_adapter(fresh, adapter, seed=5)
    assert torch.allclose(logits(fresh.eval()), logits(base), atol=1e-5)
    theirs = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights="pissa")
    )
    ours = dict(fresh.named_parameters())
    peers = {name.removeprefix("base_model.model."): each for name, each in theirs.named_parameters()}
    names = [name for name in ours if name.endswith("lora_A.default.weight")]
    assert names
    for name in names:
        products = [each[name.replace("lora_A", "lora_B")] @ each[name] for each in (ours, peers)]
        rests = [each[name.replace("lora_A.default", "base_layer")] for each in (ours, peers)]
        assert torch.allclose(*products, atol=1e-5) and torch.allclose(*rests, atol=1e-5), name


def test_an_fp32_export_subtracts_the_initial_adapter_of_a_bf16_run():
    base, config = small_model("llama"), load_config(small_config("llama"))
    adapter = AdapterConfig(method="lora", r=4, init="pissa")

    def begin(held, frozen_dtype=None):
        model = build_on_meta(config)
        apply_adapter(model, adapter)
        materialize(model, "cpu")
        for name, place in weight_places(model).items():
            if "proj" in name:
                place.tensor.data = place.tensor.data.to(held)
            place.write(place.take(base.get_parameter(name).detach()))
        return initialize_adapter(model, adapter, 5, frozen_dtype)

    trained_with, exported, careless = begin(torch.bfloat16), begin(torch.float32, torch.bfloat16), begin(torch.float32)
    for name, (a, b) in trained_with.items():
        assert torch.equal(exported[name][0], a) and torch.equal(exported[name][1], b), name
    assert any(not torch.equal(careless[name][0], a) for name, (a, _) in trained_with.items())


def test_with_the_adapter_disabled_the_model_is_the_base():
    base, config = small_model("llama"), load_config(small_config("llama"))
    model, _ = adapted(base, config, AdapterConfig(method="dora", r=4))
    with_it, flags = logits(model), {name: each.requires_grad for name, each in model.named_parameters()}
    with disabled_adapter(model):
        assert torch.equal(logits(model), logits(base))
    assert torch.equal(logits(model), with_it)
    assert {name: each.requires_grad for name, each in model.named_parameters()} == flags


@pytest.mark.parametrize("tied", [False, True])
def test_only_new_rows_train_and_peft_loads_them(tmp_path, tied):
    base, fields = small_model("llama", tied=tied), small_config("llama", tied)
    adapter = AdapterConfig(method="lora", r=4)
    rows = fields["vocab_size"]
    bigger = copy.deepcopy(base)
    bigger.resize_token_embeddings(rows + 2, mean_resizing=False)
    with torch.no_grad():
        for module in (bigger.get_input_embeddings(), bigger.get_output_embeddings()):
            module.weight.copy_(grown(module.weight[:rows], rows + 2))
    model, principal = adapted(bigger, load_config({**fields, "vocab_size": rows + 2}), adapter, [rows, rows + 1])
    assert torch.equal(bigger.get_input_embeddings().weight[rows], base.get_input_embeddings().weight.mean(0))
    new = {name: each for name, each in model.named_parameters() if "trainable_tokens_delta" in name}
    assert len(new) == (1 if tied else 2) and all(each.shape[0] == 2 for each in new.values())
    for each in new.values():
        each.data += 0.5
    (tmp_path / "model").mkdir()
    content = describe_adapter(model, trained(model), principal)
    write_adapter(tmp_path / "adapter", content, None, tmp_path / "model", "")
    user = copy.deepcopy(base)
    user.resize_token_embeddings(rows + 2)
    peers = PeftModel.from_pretrained(user, str(tmp_path / "adapter")).eval()
    assert torch.allclose(logits(model), logits(peers), atol=2e-5)
    head = merged_weight(model, "model.embed_tokens.weight" if tied else "lm_head.weight")
    assert torch.allclose(head[rows:], next(iter(reversed(new.values()))).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("quant_type", "double"), [("nf4", True), ("nf4", False), ("fp4", True)])
def test_4_bit_codes_equal_bitsandbytes(quant_type, double, dtype):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    plain = nn.Linear(128, 72)
    theirs = bnb.nn.Linear4bit(128, 72, quant_type=quant_type, compress_statistics=double, compute_dtype=dtype)
    theirs.load_state_dict(plain.state_dict())
    theirs = theirs.to("cpu")
    with torch.device("meta"):
        ours = QuantizedLinear(nn.Linear(128, 72), quant_type, double)
    ours.to_empty(device="cpu")
    ours.fill(plain.weight.detach())
    ours.bias.data.copy_(plain.bias.detach())
    inputs = [torch.randn(5, 128, dtype=dtype, requires_grad=True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    outputs = [layer(each) for layer, each in zip((ours, theirs), inputs, strict=True)]
    for each in outputs:
        each.float().square().sum().backward()
    assert torch.equal(*outputs) and torch.equal(inputs[0].grad, inputs[1].grad)
    if dtype == torch.float32:
        assert torch.equal(ours.dequantize(), bnb.functional.dequantize_4bit(theirs.weight, theirs.weight.quant_state))
    stored = ours.weight.numel() + ours.scales.numel()
    assert stored == 72 * 64 + (4 + 4 + 144 if double else 4 * 144)  # by hand: 144 blocks of 64, one block of blocks


def test_a_file_that_differs_from_the_trained_weights_is_refused(tmp_path, monkeypatch):
    base, config = small_model("llama"), load_config(small_config("llama"))
    model, principal = adapted(base, config, AdapterConfig(method="lora", r=4))
    (tmp_path / "model").mkdir()
    content = describe_adapter(model, trained(model), principal)
    import echelon.learn.checkpoint.adapter_folder as folder

    save = folder.save_file

    def flipped(tensors, *rest, **options):
        name = next(iter(tensors))
        save({**tensors, name: tensors[name] + 1}, *rest, **options)

    monkeypatch.setattr(folder, "save_file", flipped)
    with pytest.raises(CheckpointError, match="differs from the trained values"):
        write_adapter(tmp_path / "adapter", content, None, tmp_path / "model", "")
    assert not (tmp_path / "adapter").exists() and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"target_modules": ("q_porj",)}, "no linear layer named 'q_porj'; did you mean q_proj?"),
        ("llama", {"r": 60, "init": "pissa"}, "adapter.r=60: "),
        ("llama", {"r": 500}, "adapter.r=500 exceeds the rank of every target layer; "),
        ("gpt2", {"method": "qlora"}, "no plain linear layers"),
    ],
)
def test_combinations_that_the_model_excludes_are_refused(family, changes, message):
    model = build_on_meta(load_config(small_config(family)))
    with pytest.raises(ConfigError) as caught:
        check_adapter(model, AdapterConfig(**{"method": "lora", **changes}))
    assert message in str(caught.value)


def test_plain_names():
    assert plain_name("model.layers.0.self_attn.q_proj.base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"
    assert plain_name("model.embed_tokens.token_adapter.base_layer.weight") == "model.embed_tokens.weight"
    assert plain_name("model.norm.weight") == "model.norm.weight"
    assert plain_name("model.layers.0.self_attn.q_proj.lora_A.default.weight") is None


@pytest.mark.parametrize(
    ("absent", "method", "packages"),
    [("bitsandbytes", "qlora", "'peft>=.*' 'bitsandbytes>=.*'"), ("peft", "dora", "'peft>=.*'")],
)
def test_a_missing_package_is_named(monkeypatch, absent, method, packages):
    monkeypatch.setitem(sys.modules, absent, None)
    message = rf"adapter.method={method} requires the package {absent}, .* pip install {packages}, or use adapter"
    with pytest.raises(ConfigError, match=message):
        check_packages(AdapterConfig(method=method))


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_only_4_bits_need_bitsandbytes(monkeypatch, method):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    check_packages(AdapterConfig(method=method))


def test_modules_trained_in_full_equal_peft():
    """Three SGD steps with an adapter and tied embedding and head, compared with PEFT."""
    config = load_config(small_config("llama", tied=True))
    base = small_model("llama", tied=True)
    model, _ = adapted(base, config, AdapterConfig(method="lora", r=3, modules_to_save=("embed_tokens",)))
    peers = get_peft_model(
        small_model("llama", tied=True),
        LoraConfig(r=3, target_modules="all-linear", modules_to_save=["embed_tokens"], ensure_weight_tying=True,
                   lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM"),
    )  # fmt: skip
    ours, theirs = dict(model.named_parameters()), dict(peers.named_parameters())
    for name, parameter in theirs.items():
        plain = name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
        if parameter.requires_grad:
            parameter.data = ours[plain].detach().clone()
    losses = [train_three_steps(each, torch.optim.SGD, 0.02) for each in (model, peers)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]


def test_modules_trained_in_full_are_not_quantized():
    model = build_on_meta(load_config(small_config("llama")))
    apply_adapter(model, AdapterConfig(method="qlora", r=4, modules_to_save=("down_proj", "lm_head")))
    assert (
        type(model.model.layers[1].mlp.down_proj) is nn.Linear
        and model.model.layers[1].mlp.down_proj.weight.requires_grad
    )
    assert isinstance(model.model.layers[1].mlp.up_proj.base_layer, QuantizedLinear)
    assert model.lm_head.weight.requires_grad and not model.model.embed_tokens.weight.requires_grad


def test_new_tokens_need_no_adapter_where_all_rows_are_trained():
    model = build_on_meta(load_config(small_config("llama")))
    apply_adapter(model, AdapterConfig(method="lora", r=4, modules_to_save=("embed_tokens",)), [254, 255])
    rows = [name for name in trained(model) if "trainable_tokens_delta" in name]
    assert rows == ["lm_head.token_adapter.trainable_tokens_delta.default"]
    assert model.model.embed_tokens.weight.requires_grad


def test_a_name_that_matches_no_module_is_refused():
    model = build_on_meta(load_config(small_config("llama")))
    for name, message in (("embed_token", "did you mean embed_tokens"), ("self_attn", "choose from")):
        with pytest.raises(ConfigError, match=f"no module with weights named '{name}'; .*{message}"):
            check_adapter(model, AdapterConfig(method="lora", modules_to_save=(name,)))
