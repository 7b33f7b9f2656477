"""Non-causal models are detected by a test run and refused; causal models pass."""

import json

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from echelon.ground.errors import ConfigError
from echelon.learn.model import copy_checks
from echelon.learn.model.build import load_config
from echelon.learn.model.copy_checks import check_is_causal
from tests.dist.command import CommandLine
from tests.families import EXTRA, small_config
from tests.unit.recipe_samples import RECIPE

ENCODER = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
           "num_attention_heads": 4}  # fmt: skip
NOT_CAUSAL = {
    "bert": {},
    "roberta": {},
    "electra": {"embedding_size": 64},
    "roformer": {},
    "gemma3_text": {"use_bidirectional_attention": True, "num_key_value_heads": 2, "head_dim": 16},
    "llama": {"is_causal": False},
}
# Non-causal models of transformers 5: a prefix LM, a bidirectional model, the decoder of an n-gram predictor, and
# encoders that are not decoders by default.
REFUSED = {
    "bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text", "electra", "ernie", "megatron-bert",
    "prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet",
}  # fmt: skip


def config_of(model_type, **fields):
    return load_config({"model_type": model_type, **ENCODER, **fields})


@pytest.mark.parametrize("model_type", NOT_CAUSAL)
def test_models_that_see_later_tokens_are_refused(model_type):
    fields = NOT_CAUSAL[model_type]
    config = config_of(model_type, **{name: value for name, value in fields.items() if name != "is_causal"})
    if "is_causal" in fields:
        config.is_causal = False
    with pytest.raises(ConfigError, match="positions attend to later tokens") as refused:
        check_is_causal(config)
    fix = {"bert": "set is_decoder: true", "gemma3_text": "set use_bidirectional_attention: false"}
    assert fix.get(model_type, "use a causal family") in str(refused.value)


@pytest.mark.parametrize("family", EXTRA)
def test_causal_models_pass(family):
    check_is_causal(load_config(small_config(family)))


@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra"])
def test_an_encoder_configured_as_a_decoder_passes(model_type):
    check_is_causal(config_of(model_type, is_decoder=True, **NOT_CAUSAL[model_type]))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4, "hidden_size": 64}),  # ALiBi
        ("mamba", {"hidden_size": 64, "num_hidden_layers": 2}),  # a state space model
        ("mistral", {**ENCODER, "num_key_value_heads": 2, "sliding_window": 4}),
    ],
)
def test_other_causal_architectures_pass(model_type, fields):
    check_is_causal(load_config({"model_type": model_type, "vocab_size": 256, **fields}))


def test_a_large_model_is_tested_with_a_small_copy():
    """Eight experts of 14336 and a width of 4096 are 46 billion parameters; the tested copy is below the limit."""
    tried = []
    measure = copy_checks.measure_leak
    copy_checks.sees_what_follows.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_checks, "measure_leak", lambda *given: tried.append(given[0]) or measure(*given))
        check_is_causal(load_config({"model_type": "mixtral"}))
        check_is_causal(load_config({"model_type": "mixtral"}))
        with pytest.raises(ConfigError):
            check_is_causal(load_config({"model_type": "bert"}))
    assert tried[0].num_hidden_layers == 8 and tried[0].hidden_size < 4096
    assert [each.model_type for each in tried].count("mixtral") == 1, "once a config"


def test_a_model_whose_forward_pass_fails_is_refused_with_a_message():
    config = load_config(small_config("mixtral"))
    config.num_experts_per_tok = 9
    with pytest.raises(ConfigError, match=r"a forward pass of this mixtral model fails .*; correct model.config"):
        check_is_causal(config)


def test_an_encoder_is_refused_before_anything_is_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE | {"model": {"config": {"model_type": "bert", **ENCODER}}}))
    ending = CommandLine(capfd, monkeypatch)("train", "recipe.yaml", "--nproc", "1")
    assert ending.code == 2 and "Traceback" not in ending.err
    assert "set is_decoder: true in model.config" in ending.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_architecture_of_transformers(model_type):
    """With default configs, only models known to see later tokens are refused. Some defaults cannot be built."""
    try:
        config = load_config({"model_type": model_type})
        copy_checks.build_on_meta(config)
    except ConfigError:
        pytest.skip("its default config makes no model")
    if model_type in REFUSED:
        with pytest.raises(ConfigError, match="positions attend to later tokens"):
            check_is_causal(config)
    else:
        check_is_causal(config)
