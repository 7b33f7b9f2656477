"""Recipes for a model size and number of tokens: the size matches, values are near published ones, recipes load."""

import math
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.scaled_recipe import best_batch_tokens, parse_count, render_scaled, scale_recipe
from echelon.planner.shape import build_shape
from tests.unit.recipe_samples import load_text

SIZES = [round(10 ** (7 + exponent / 12)) for exponent in range(47)] + [70_000_000_000]


@pytest.mark.parametrize("params", SIZES)
def test_the_shape_matches_the_size_within_three_percent(tmp_path: Path, params: int) -> None:
    scaled = scale_recipe(params, None)
    recipe, notes = load_text(tmp_path, render_scaled(scaled, "a"))
    assert notes == [] and recipe.model.config is not None
    fields = recipe.model.config | {"vocab_size": scaled["vocab_size"]}
    shape = build_shape(fields)
    assert abs(shape.num_parameters / params - 1) < 0.03
    assert shape.num_heads * shape.head_dim == shape.hidden_size and shape.head_dim in (64, 128)
    assert 2 < shape.intermediate_size / shape.hidden_size < 3.4
    assert recipe.train.tokens == 20 * params
    assert 0 < recipe.optim.warmup <= 0.05 * recipe.num_steps(0) + 1


@pytest.mark.parametrize("params", [125_000_000, 1_300_000_000, 7_000_000_000, 70_000_000_000])
def test_it_is_planned_on_64_gpus(tmp_path: Path, params: int) -> None:
    scaled = scale_recipe(params, 20 * params)
    recipe, _ = load_text(tmp_path, render_scaled(scaled, "a"))
    plan = resolve_plan(recipe, scaled.shape, parse_devices("64xH100"))
    assert plan.world_size == 64 and plan.global_batch_size * scaled["sequence_len"] == scaled["global_batch_tokens"]


# As published, for about these numbers of tokens: (parameters, tokens, layers, width, batch in tokens, learning rate).
# GPT-3: table 2.1 of arXiv:2005.14165. Pythia: table 6 and section 2.3 of 2304.01373. LLaMA: table 2 of 2302.13971.
PUBLISHED = {
    "GPT-3 Small": (125e6, 300e9, 12, 768, 0.5e6, 6e-4),
    "GPT-3 Medium": (350e6, 300e9, 24, 1024, 0.5e6, 3e-4),
    "GPT-3 XL": (1.3e9, 300e9, 24, 2048, 1e6, 2e-4),
    "GPT-3 6.7B": (6.7e9, 300e9, 32, 4096, 2e6, 1.2e-4),
    "GPT-3 13B": (13e9, 300e9, 40, 5140, 2e6, 1e-4),
    "Pythia 410M": (405e6, 300e9, 24, 1024, 2e6, 3e-4),
    "Pythia 2.8B": (2.8e9, 300e9, 32, 2560, 2e6, 1.6e-4),
    "LLaMA 13B": (13e9, 1e12, 40, 5120, 4e6, 3e-4),
    "LLaMA 65B": (65.2e9, 1.4e12, 80, 8192, 4e6, 1.5e-4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_are_near_published_ones(name: str) -> None:
    params, tokens, layers, width, batch, rate = PUBLISHED[name]
    scaled = scale_recipe(round(params), round(tokens))
    shape = scaled.shape
    assert shape.num_layers == pytest.approx(layers, rel=0.25)
    assert shape.hidden_size == pytest.approx(width, rel=0.25)
    if "GPT-3" in name:
        assert 0.7 < scaled["global_batch_tokens"] / batch < 1.5
    else:  # LLaMA and Pythia have larger batches, and LLaMA higher learning rates
        assert 0.24 < scaled["global_batch_tokens"] / batch <= 2
    assert 0.3 < scaled["learning_rate"] / rate < 2


@pytest.mark.parametrize(("params", "sequences"), [(7e9, 2304), (67e9, 4608)])
def test_the_batch_law_gives_the_batches_of_the_paper(params: float, sequences: int) -> None:
    # DeepSeek LLM 7B and 67B: 2e12 tokens in batches of 2304 and 4608 sequences of 4096 (arXiv:2401.02954, table 2).
    assert best_batch_tokens(6 * params * 2e12) == pytest.approx(sequences * 4096, rel=0.06)


def test_short_runs_have_smaller_batches_and_shorter_warm_ups() -> None:
    short, long = scale_recipe(10_000_000, 100_000_000), scale_recipe(10_000_000, 10_000_000_000)
    # C = 6 N D = 6e15: 0.2920 * C^0.3271 = 42 thousand tokens, and a little more with attention.
    assert short["global_batch_tokens"] in (32768, 65536) and long["global_batch_tokens"] >= 131072
    assert short["warmup"] == round(0.05 * math.ceil(100_000_000 / short["global_batch_tokens"]))
    assert short["learning_rate"] == pytest.approx(0.003239 - 0.0001395 * 16.12, abs=5e-5)  # ln 1e7 = 16.118


def test_a_missing_number_is_derived() -> None:
    assert scale_recipe(1_000_000_000, None)["tokens"] == 20_000_000_000
    scaled = scale_recipe(None, 7_000_000_000)
    assert scaled.shape.num_parameters == pytest.approx(350e6, rel=0.03)
    assert "as Chinchilla found best" in scaled.notes[0]


def test_a_ratio_far_from_chinchilla_is_reported() -> None:
    assert scale_recipe(1_000_000_000, 20_000_000_000).notes == ()
    assert "found a larger model on fewer tokens" in scale_recipe(1_000_000_000, 1_000_000_000_000).notes[0]
    assert "found a smaller model on more" in scale_recipe(1_000_000_000, 2_000_000_000).notes[0]


@pytest.mark.parametrize(
    ("text", "count"),
    [("1.3b", 1_300_000_000), ("350m", 350_000_000), ("2e9", 2 * 10**9), ("50B", 50 * 10**9), ("10_000k", 10**7)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count("--params", text) == count


@pytest.mark.parametrize("text", ["", "many", "1.3x", "-1b", "1e", "b", "1e400"])
def test_an_invalid_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--params .* is not a count; write it like 1.3b, 350m or 2e9\.$"):
        parse_count("--params", text)


def test_a_size_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="--params 10k is out of range; use 1m to 1t"):
        scale_recipe(10_000, None)
    with pytest.raises(ConfigError, match="--tokens 10 is out of range"):
        scale_recipe(10_000_000, 10)
    with pytest.raises(
        ConfigError, match=r"--params 10m: no sensible shape with a vocabulary of 256000 .* --vocab-size"
    ):
        scale_recipe(10_000_000, None, 256_000)


def test_another_vocabulary() -> None:
    scaled = scale_recipe(350_000_000, None, 50257)
    assert scaled["vocab_size"] == 50257 and scaled.shape.vocab_size == 50304
    assert scaled.shape.num_parameters == pytest.approx(350e6, rel=0.03)
