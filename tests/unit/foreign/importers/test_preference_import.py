"""Files for preference tuning become the objective of the same method, with the tool's defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.foreign.importers import Imported, import_recipe
from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.load import parse_recipe
from echelon.recipe.objective import ObjectiveConfig

AXOLOTL: dict[str, Any] = {
    "base_model": "m", "micro_batch_size": 1, "learning_rate": 1e-6, "sequence_len": 512,
    "datasets": [{"path": "a.jsonl", "type": "chat_template", "field_chosen": "good", "field_rejected": "bad"}],
}  # fmt: skip
FACTORY: dict[str, Any] = {
    "stage": "dpo", "model_name_or_path": "m", "dataset": "pairs", "template": "llama3", "finetuning_type": "full",
}  # fmt: skip
TRL: dict[str, Any] = {"model_name_or_path": "m", "dataset_name": "o/n", "max_length": 512}
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
DATASETS = {
    "pairs": {
        "file_name": "p.json", "formatting": "sharegpt", "ranking": True, "tags": TAGS,
        "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"},
    },
    "judged": {
        "file_name": "j.json", "formatting": "sharegpt", "tags": TAGS,
        "columns": {"messages": "talk", "kto_tag": "liked"},
    },
    "texts": {"file_name": "t.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "liked"}},
}  # fmt: skip


def bring_in(folder: Path, given: dict[str, Any], trainer: str | None = None) -> tuple[Recipe, Imported]:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(DATASETS))
    (folder / "file.json").write_text(json.dumps(given))
    found = import_recipe(folder / "file.json", trainer=trainer)
    return parse_recipe(found.text, "imported")[0], found


CASES: dict[str, tuple[dict[str, Any], str | None, dict[str, Any]]] = {
    "axolotl dpo": ({**AXOLOTL, "rl": "dpo", "rl_beta": 0.2}, None, {"name": "dpo", "beta": 0.2, "loss": "sigmoid"}),
    "axolotl ipo": ({**AXOLOTL, "rl": "ipo"}, None, {"name": "dpo", "loss": "ipo"}),
    "axolotl hinge": ({**AXOLOTL, "rl": "dpo", "dpo_loss_type": ["hinge"]}, None, {"name": "dpo", "loss": "hinge"}),
    "axolotl rpo": (
        {**AXOLOTL, "rl": "dpo", "rpo_alpha": 0.5}, None, {"name": "dpo", "loss": "sigmoid", "sft_weight": 0.5}
    ),
    "axolotl orpo": ({**AXOLOTL, "rl": "orpo", "orpo_alpha": 0.3}, None, {"name": "orpo", "beta": 0.3}),
    "axolotl simpo": (
        {**AXOLOTL, "rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}, None,
        {"name": "simpo", "beta": 2.0, "gamma": 1.0, "sft_weight": 0.0},
    ),
    "axolotl cpo-simpo": ({**AXOLOTL, "rl": "simpo"}, None, {"name": "simpo", "sft_weight": 1.0}),
    "axolotl kto": (
        {**AXOLOTL, "rl": "kto", "datasets": [{"path": "a.jsonl"}], "kto_desirable_weight": 0.2,
         "gradient_accumulation_steps": 4}, None,
        {"name": "kto", "desirable_weight": 0.2},
    ),
    "factory sigmoid": (FACTORY, None, {"name": "dpo", "loss": "sigmoid"}),
    "factory hinge": ({**FACTORY, "pref_loss": "hinge"}, None, {"name": "dpo", "loss": "hinge"}),
    "factory smoothed": (
        {**FACTORY, "dpo_label_smoothing": 0.1}, None, {"name": "dpo", "loss": "sigmoid", "label_smoothing": 0.1}
    ),
    "factory orpo": ({**FACTORY, "pref_loss": "orpo", "pref_beta": 0.2}, None, {"name": "orpo", "beta": 0.2}),
    "factory simpo": (
        {**FACTORY, "pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 0.8}, None,
        {"name": "simpo", "beta": 2.0, "gamma": 0.8},
    ),
    "factory kto": (
        {**FACTORY, "stage": "kto", "dataset": "judged", "pref_beta": 0.2, "kto_rejected_weight": 0.8}, None,
        {"name": "kto", "beta": 0.2, "undesirable_weight": 0.8},
    ),
    "trl dpo": (
        {**TRL, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]}, "dpo",
        {"name": "dpo", "loss": "sigmoid", "sft_weight": 0.2},
    ),
    "trl robust": (
        {**TRL, "loss_type": "robust", "label_smoothing": 0.1}, "dpo",
        {"name": "dpo", "loss": "robust", "label_smoothing": 0.1},
    ),
    "trl dpo, dropout off": ({**TRL, "disable_dropout": True}, "dpo", {"name": "dpo", "loss": "sigmoid"}),
    "trl dpo, dropout on": ({**TRL, "disable_dropout": False}, "dpo", {"name": "dpo", "loss": "sigmoid"}),
    "trl orpo": ({**TRL, "beta": 0.3}, "orpo", {"name": "orpo", "beta": 0.3}),
    "trl cpo": (
        {**TRL, "loss_type": "hinge", "cpo_alpha": 0.5}, "cpo", {"name": "cpo", "loss": "hinge", "sft_weight": 0.5}
    ),
    "trl simpo": (
        {**TRL, "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.4, "cpo_alpha": 0.0}, "cpo",
        {"name": "simpo", "beta": 2.0, "gamma": 1.4, "sft_weight": 0.0},
    ),
    "trl kto": (
        {**TRL, "desirable_weight": 1.5, "loss_type": "apo_zero_unpaired"}, "kto",
        {"name": "kto", "desirable_weight": 1.5, "loss": "apo_zero_unpaired"},
    ),
    "axolotl reward": (
        {**AXOLOTL, "reward_model": True, "model_type": "AutoModelForSequenceClassification", "num_labels": 1,
         "center_rewards_coefficient": 0.01,
         "datasets": [{"path": "a.jsonl", "type": "bradley_terry.chat_template"}]}, None,
        {"name": "reward", "center_weight": 0.01},
    ),
    "factory reward": ({**FACTORY, "stage": "rm"}, None, {"name": "reward"}),
    "trl reward": (
        {**TRL, "center_rewards_coefficient": 0.02, "disable_dropout": True, "learning_rate": 1e-6}, "reward",
        {"name": "reward", "center_weight": 0.02},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_objective_is_that_of_the_file(tmp_path: Path, name: str) -> None:
    given, trainer, expected = CASES[name]
    recipe, found = bring_in(tmp_path, given, trainer)
    assert recipe.objective == ObjectiveConfig(**expected, router_loss=False)
    assert not recipe.data.packing
    assert recipe.optim.learning_rate == given.get("learning_rate", 5e-5 if given.get("stage") else 1e-6)
    assert {entry.fate for entry in found.entries} <= {"carried", "needless", "off", "differs"}


def test_the_data_is_that_of_the_method(tmp_path: Path) -> None:
    [source] = bring_in(tmp_path, CASES["axolotl kto"][0])[0].data.train
    assert source.format == "unpaired_preference"
    [source] = bring_in(tmp_path, CASES["axolotl orpo"][0])[0].data.train
    assert source.format == "preference" and (source.fields["chosen"], source.fields["rejected"]) == ("good", "bad")
    argilla = {**AXOLOTL, "rl": "orpo", "datasets": [{"path": "a.jsonl", "type": "chat_template.argilla"}]}
    [source] = bring_in(tmp_path, argilla)[0].data.train
    assert (source.format, source.fields) == ("preference", {}), "both answers contain the prompt"
    [source] = bring_in(tmp_path, CASES["factory kto"][0])[0].data.train
    assert source.format == "unpaired_messages"
    assert source.fields == {"messages": "talk", "label": "liked"}, "the others have echelon's own names"
    [source] = bring_in(tmp_path, {**FACTORY, "stage": "sft", "dataset": "judged"})[0].data.train
    assert source.format == "messages", "of which nobody asks whether it is good"


def test_reward_models_of_other_tools(tmp_path: Path) -> None:
    [source] = bring_in(tmp_path, CASES["axolotl reward"][0])[0].data.train
    assert (source.format, source.fields) == ("preference", {})
    [source] = bring_in(tmp_path, CASES["factory reward"][0])[0].data.train
    assert source.format == "preference" and source.fields["rejected"] == "bad"
    recipe, _ = bring_in(tmp_path, {**TRL, "center_rewards_coefficient": 0.01})
    assert recipe.objective.name == "reward", "no other trainer has this key"
    assert recipe.optim.learning_rate == 1e-4 and recipe.data.on_overlong == "drop", "the defaults of RewardConfig"
    recipe, _ = bring_in(tmp_path, {**TRL, "use_peft": True, "lora_modules_to_save": ["score"]}, "reward")
    assert recipe.adapter.method == "lora" and not recipe.adapter.modules_to_save
    assert any("stores the head apart" in note for note in bring_in(tmp_path, {**FACTORY, "stage": "rm"})[1].notes)
    with pytest.raises(ConfigError, match="num_labels: 3: it is of reward models"):
        bring_in(tmp_path, {**TRL, "num_labels": 3}, "reward")


def test_what_differs_is_told(tmp_path: Path) -> None:
    assert any("also trains on the tokens of prompts" in note for note in bring_in(tmp_path, TRL, "orpo")[1].notes)
    assert any("the mean over the batch of a step" in note for note in bring_in(tmp_path, TRL, "kto")[1].notes)
    orpo = bring_in(tmp_path, {**FACTORY, "pref_loss": "orpo"})[1]
    [entry] = [entry for entry in orpo.entries if entry.name == "pref_loss"]
    assert entry.fate == "differs" and "LLaMA-Factory over answers" in entry.text


@pytest.mark.parametrize(
    ("given", "trainer", "message"),
    [
        ({**TRL, "loss_type": "alphapo"}, "cpo", "loss_type: alphapo: echelon supports the losses simpo, sigmoid"),
        ({**TRL, "loss_type": "bco"}, "kto", "loss_type: bco: echelon supports the KTO losses kto, apo_zero_unpaired"),
        ({**TRL, "loss_type": "aot"}, "dpo", "loss_type: aot: echelon supports the DPO losses sigmoid, sigmoid_norm"),
        ({**TRL, "loss_type": ["ipo", "sft"], "loss_weights": [0.8, 1]}, "dpo", "loss_weights: .*loss with 1, and"),
        ({**TRL, "cpo_alpha": 1.0}, "orpo", "cpo_alpha: 1.0: this key is of another preference method"),
        ({**FACTORY, "stage": "kto", "dataset": "texts"}, None, "texts has preferences as texts, to which LLaMA"),
    ],
)
def test_other_training_is_refused(tmp_path: Path, given: dict[str, Any], trainer: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bring_in(tmp_path, given, trainer)
