"""Checkpoints whose files name or shape weights in another way than the model does, read and written."""

from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import WeightRenaming

from echelon.ground.errors import CheckpointError
from echelon.learn.checkpoint.export import stored_tensors, write_weights
from echelon.learn.engines.native import NativeEngine, NativeParts
from echelon.learn.model import conversion
from echelon.learn.model.build import build_on_meta, load_config, materialize, persistent_buffers
from echelon.learn.model.conversion import conversions_to_files, conversions_to_model
from echelon.learn.model.weights import PretrainedWeights
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from echelon.run.lifecycle.model_checks import find_model_fields
from tests.families import small_config

FAMILIES = ["llama", "gpt2", "gpt_neox", "mixtral", "qwen3_moe", "deepseek_v3"]
IDS = torch.arange(32).reshape(2, 16)


def save_theirs(family, folder):
    """A model as transformers makes and saves it, with buffers that are not their initial values."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(load_config(small_config(family))).eval()
    for buffer in persistent_buffers(theirs).values():
        buffer.uniform_(0.0, 0.3)
    theirs.save_pretrained(folder)
    return theirs


def load_ours(folder):
    config = load_config(str(folder))
    skeleton, model = build_on_meta(config), build_on_meta(config)
    materialize(model, "cpu")
    PretrainedWeights(skeleton, folder).fill(model)
    return model.eval(), skeleton


def names_in(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_transformers_are_read_and_written_as_it_does(family, tmp_path):
    theirs = save_theirs(family, tmp_path / "theirs")
    ours, skeleton = load_ours(tmp_path / "theirs")
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    (tmp_path / "ours").mkdir()
    theirs.config.save_pretrained(tmp_path / "ours")
    tensors = stored_tensors(ours)
    write_weights(lambda names: {name: tensors[name].detach() for name in names}, skeleton, tmp_path / "ours", "fp32")
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    back, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(back.eval()(IDS).logits, theirs(IDS).logits)


def test_every_expert_is_a_weight_of_its_own_in_the_files(tmp_path):
    save_theirs("mixtral", tmp_path)
    assert "model.layers.1.block_sparse_moe.experts.3.w1.weight" in names_in(tmp_path)


def test_a_rank_reads_the_experts_that_it_has(tmp_path):
    """Of the fused weight of a layer, rows 1 and 2 come from the files of experts 1 and 2 alone."""
    theirs = save_theirs("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    skeleton = build_on_meta(load_config(str(tmp_path)))
    conversions = conversions_to_model(skeleton, {name: tuple(each.shape) for name, each in tensors.items()})
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        (fused,) = [each for each in conversions if name in each.targets]
        rows = fused.of_rows(slice(1, 3))
        assert rows is not None and len(rows.sources) == len(fused.sources) / 2
        assert all(".experts.1." in source or ".experts.2." in source for source in rows.sources)
        part = rows.convert({source: tensors[source] for source in rows.sources})[name]
        assert torch.equal(part, theirs.get_parameter(name)[1:3]) and part.shape == rows.targets[name]
    (plain,) = [each for each in conversions if "model.norm.weight" in each.targets]
    assert plain.only_renames and plain.of_rows(slice(1, 3)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda name, each: None if ".experts.2.w2." in name else each,
            r"has shape .* in the weights and .* by config\.json",
        ),
        (lambda name, each: None if ".w2." in name else each, r"weight model\.layers\.0\.mlp\.experts\.down_proj"),
        (
            lambda name, each: each[:4].clone() if ".experts.2.w1." in name else each,
            r"experts\.0\.w1.*cannot be converted to model\.layers\.\d\.mlp\.experts\.gate_up_proj",
        ),
        (lambda name, each: each.to(torch.int8) if ".experts.2.w1." in name else each, "is stored as I8"),
    ],
    ids=["missing", "all missing", "another shape", "another dtype"],
)
def test_experts_that_do_not_fit_together_are_refused(change, message, tmp_path):
    save_theirs("mixtral", tmp_path)
    changed = {name: change(name, each) for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file({name: each for name, each in changed.items() if each is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_ours(tmp_path)


def test_what_is_left_out_or_not_there_is_named(tmp_path, caplog):
    save_theirs("deepseek_v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = tensors.pop("model.layers.1.mlp.gate.e_score_correction_bias")
    old_table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors, **old_table, "model.layers.0.odd": bias}, tmp_path / "model.safetensors")
    ours, _ = load_ours(tmp_path)
    assert (
        "1 stored weights are not used, because DeepseekV3ForCausalLM has no such parameters: model.layers.0.odd"
        in (caplog.text)
    )
    assert "1 buffers of DeepseekV3ForCausalLM are not stored and keep their initial values" in caplog.text
    assert ours.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").abs().max() == 0


def test_names_that_cannot_be_read_back_stay_those_of_the_model(monkeypatch):
    skeleton = build_on_meta(load_config(small_config("llama")))
    shapes = {name: tuple(each.shape) for name, each in skeleton.state_dict().items()}
    one_way = {True: [], False: [WeightRenaming(r"^lost\.", "model.")]}
    monkeypatch.setattr(conversion, "get_model_conversion_mapping", lambda _, add_legacy=True: one_way[add_legacy])
    assert {name for each in conversions_to_files(skeleton, shapes) for name in each.targets} == shapes.keys()
    monkeypatch.setattr(conversion, "get_model_conversion_mapping", lambda *_, **__: one_way[False])
    stored = {name for each in conversions_to_files(skeleton, shapes) for name in each.targets}
    assert "lost.norm.weight" in stored


def test_rules_that_read_neither_name_back_are_refused(monkeypatch):
    skeleton = build_on_meta(load_config(small_config("llama")))
    shapes = {name: tuple(each.shape) for name, each in skeleton.state_dict().items()}
    away = {True: [WeightRenaming(r"layers\.0\.", "layers.1.")], False: []}
    monkeypatch.setattr(conversion, "get_model_conversion_mapping", lambda _, add_legacy=True: away[add_legacy])
    with pytest.raises(CheckpointError, match="of a llama checkpoint cannot be reversed"):
        conversions_to_files(skeleton, shapes)


def test_a_config_with_an_infinite_number_is_read(tmp_path):
    """`transformers` writes it as `{"__float__": "Infinity"}`: Mamba layers have such a limit."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8}
    config = load_config({"model_type": "bamba", "hidden_size": 64, "vocab_size": 256, "mamba_d_head": 16, **sizes})
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    recipe = Recipe.model_validate(
        {
            "run": {"name": "x"},
            "model": {"checkpoint": str(tmp_path)},
            "data": {"train": [{"path": "text.txt"}], "sequence_len": 32},
            "train": {"steps": 1, "global_batch_size": 1},
            "optim": {"learning_rate": 1e-3},
        }
    )
    fields, _ = find_model_fields(recipe, tokenizer_vocab_size=256)
    assert fields["time_step_limit"] == [0.0, float("inf")]
    assert build_shape(fields).hidden_size == 64


def test_a_checkpoint_has_what_the_architecture_itself_does_not_train():
    """AFMoE's expert bias is a parameter without a gradient: only what an adapter freezes may be left out."""
    model = build_on_meta(load_config(small_config("llama")))
    materialize(model, "cpu")
    model.model.norm.weight.requires_grad_(False)
    parallel, optimizer = SimpleNamespace(tensors=dict), SimpleNamespace(tensors=list)
    engine = NativeEngine(NativeParts(parallel, model, optimizer, None, None, None))
    assert {f"model.{name}" for name, _ in model.named_parameters()} == engine.state_dict().keys()
