"""Initial weights and loading of checkpoints, compared with transformers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from echelon.ground.errors import CheckpointError, ConfigError
from echelon.learn.data.tokenizer import build_bytes_tokenizer
from echelon.learn.model import weights
from echelon.learn.model.build import build_on_meta, load_config, materialize
from echelon.learn.model.seeds import derive_seed, seed_generators
from echelon.learn.model.weights import PretrainedWeights, initialize_weights
from echelon.learn.opened import OpenedModel, one_process
from echelon.learn.parallel.data_parallel import apply_fully_shard
from echelon.planner.plan import ParallelPlan
from tests.families import EXTRA, small_config, small_model


@pytest.mark.parametrize("family", EXTRA)
def test_buffers_and_statistics_equal_transformers(family):
    ours = small_model(family)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(load_config(small_config(family)))
    for (name, buffer), (_, expected) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name)
    for (name, parameter), (_, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert parameter.std(unbiased=False).item() == pytest.approx(expected.std(unbiased=False).item(), rel=0.1), name


def test_weights_depend_only_on_seed_and_name():
    one, same, other = small_model("llama", seed=1), small_model("llama", seed=1), small_model("llama", seed=2)
    deep = small_model("llama", seed=1, num_hidden_layers=4)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        assert torch.equal(parameter, deep.get_parameter(name)), "a deeper model begins with the same layers"
        assert parameter.ndim < 2 or not torch.equal(parameter, other.get_parameter(name))
    layers = [layer.mlp.up_proj.weight for layer in deep.model.layers]
    assert not torch.equal(layers[0], layers[1])


def test_derived_seeds_are_frozen():
    # printf "0\x1fmodel.embed_tokens" | sha256sum: the first eight bytes, little-endian, halved
    assert derive_seed(0, "model.embed_tokens") == 6033119073688940214
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")


def test_seeded_generators_draw_what_manual_seed_lets_them_draw():
    torch.manual_seed(2**62 + 1)
    expected = torch.rand(3)
    seed_generators(2**62 + 1, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)


def materialised(folder):
    config = load_config(str(folder))
    skeleton = build_on_meta(config)
    model = build_on_meta(config).to_empty(device="cpu")
    model.tie_weights()
    return model, skeleton


def load(folder):
    model, skeleton = materialised(folder)
    PretrainedWeights(skeleton, folder).fill(model)
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral", "gemma"])
def test_a_saved_model_loads_as_in_transformers(family, tied, tmp_path):
    small_model(family, tied, seed=5).save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = load(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(16).reshape(1, 16)
    assert torch.equal(model.eval()(input_ids=ids).logits, expected.eval()(input_ids=ids).logits)


def test_names_without_the_backbones_prefix_are_found(tmp_path):
    saved = small_model("gpt2", tied=True, seed=5)
    bare = {name.removeprefix("transformer."): value.detach().clone() for name, value in saved.named_parameters()}
    saved.config.save_pretrained(tmp_path)
    save_file(bare, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).transformer.wte.weight, saved.transformer.wte.weight)


def test_files_of_another_model_are_refused(tmp_path):
    small_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"model\.checkpoint.*the weight model\.layers\.2\S+ is missing"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"shape \(128, 64\) in the weights and \(64, 64\) by"):
        load(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    model = small_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors only"):
        load(tmp_path)


def test_damaged_weights_are_refused_by_training_and_evaluation(tmp_path):
    """Integers in place of weights, an index that names files of another folder, and a missing name."""
    model = small_model("llama")
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    model.config.save_pretrained(tmp_path)
    build_bytes_tokenizer().save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.layers\.0.* is stored as I32"):
        load(tmp_path)
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"lack the weight {name}"):  # transformers would initialize it randomly
        OpenedModel(tmp_path, None, one_process("cpu"))
    for files in (
        {name: "../model.safetensors"},
        {name: "model.bin"},
        {name: None},
        [],
        {name: "9" * 5000 + ".safetensors"},
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json cannot be read") as refused:
            load(tmp_path)
        assert len(str(refused.value)) < 1000
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read \(File does not contain tensor x\)"):
        load(tmp_path)


def last_stage(folder):
    """A tied model without embedding and first layer, as on the last rank of a pipeline, and its skeleton."""
    config = load_config(str(folder))
    skeleton, model = build_on_meta(config), build_on_meta(config)
    model.model.embed_tokens, model.model.layers[0] = torch.nn.Identity(), torch.nn.Identity()
    return model.to_empty(device="cpu"), skeleton


@pytest.mark.parametrize("source", ["seed", "folder"])
def test_a_stage_has_exactly_its_weights_of_the_whole_model(source, tmp_path, monkeypatch):
    """This includes its head, which is tied to an embedding on another stage."""
    whole = small_model("llama", tied=True, seed=5)
    whole.save_pretrained(tmp_path)
    model, skeleton = last_stage(tmp_path)
    made, make = [], weights.make_unit
    monkeypatch.setattr(
        weights, "make_unit", lambda skeleton, name, *rest: made.append(name) or make(skeleton, name, *rest)
    )
    if source == "seed":
        initialize_weights(model, skeleton, seed=5)
        assert "model.layers.1" in made and "model.layers.0" not in made
    else:
        PretrainedWeights(skeleton, tmp_path).fill(model)
    found = dict(model.named_parameters())
    assert "lm_head.weight" in found and not any("layers.0" in name or "embed" in name for name in found)
    for name, parameter in found.items():
        assert torch.equal(parameter, whole.get_parameter(name)), name


def test_a_part_that_is_a_model_of_its_own_is_initialised_by_its_own_rules():
    """Gemma 3n's rules read a field that only its backbone has."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    per_layer = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 0}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0]}
    listed = {**sizes, **per_layer, **kinds, "intermediate_size": 64, "laurel_rank": 8}
    config = load_config({"model_type": "gemma3n_text", **listed})
    skeleton, model = build_on_meta(config), build_on_meta(config)
    materialize(model, "cpu")
    initialize_weights(model, skeleton, seed=0)
    assert model.model.per_layer_projection_scale == 64**-0.5


def test_layers_that_share_a_weight_are_not_sharded():
    """`fully_shard` would give each layer a weight of its own, and training would drive them apart."""
    model = small_model("llama")
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(ConfigError, match=r"layers 0 and 1 share the weight mlp\.up_proj\.weight.* parallel: ddp"):
        apply_fully_shard(model, layers, ParallelPlan("fsdp", dp_shard=2), None)
