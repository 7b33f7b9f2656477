"""A file whose training cannot be reproduced is refused with the key, its value and the reason. Before these refusals
existed, each of these files became plain next-token training, or its key was ignored."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echelon.cli.main import app
from echelon.foreign.importers import import_recipe
from echelon.ground.errors import ConfigError
from echelon.recipe.load import parse_recipe

AXOLOTL: dict[str, Any] = {
    "base_model": "m", "datasets": [{"path": "a.jsonl", "type": "chat_template"}], "sample_packing": True,
    "micro_batch_size": 1, "learning_rate": 1e-4, "adapter": "lora", "lora_target_linear": True,
}  # fmt: skip
FULL = {key: value for key, value in AXOLOTL.items() if not key.startswith(("adapter", "lora"))}
FACTORY: dict[str, Any] = {
    "stage": "sft", "do_train": True, "model_name_or_path": "m", "dataset": "d", "template": "llama3",
    "finetuning_type": "full",
}  # fmt: skip
SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset_name": "o/n", "packing": False, "max_length": 512}
V1: dict[str, Any] = {"model": "m", "model_class": "llm", "train_dataset": "sets.yaml", "learning_rate": 1e-4}
TYPE = "datasets.0.type"


def run(tmp_path: Path, given: dict[str, Any], **options: Any) -> Any:
    (tmp_path / "sets.yaml").write_text("faq: {path: faq.json, source: local, converter: alpaca}\n")
    (tmp_path / "pairs.yaml").write_text("p: {path: p.json, source: local, converter: pair}\n")
    (tmp_path / "media.yaml").write_text("m: {path: m.jsonl, source: local}\n")
    table = {
        "pictures": {"file_name": "p.json", "columns": {"prompt": "q", "images": "images"}},
        "pairs": {"file_name": "p.json", "ranking": True, "columns": {"prompt": "q", "chosen": "a", "rejected": "b"}},
        "thumbs": {"file_name": "k.json", "formatting": "sharegpt", "columns": {"kto_tag": "label"}, "x": 1},
        "roles": {"file_name": "r.json", "formatting": "sharegpt", "tags": {"user_tag": "Customer"}},
    }
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    (tmp_path / "file.json").write_text(json.dumps(given))
    return import_recipe(tmp_path / "file.json", **options)


def dataset(**keys: Any) -> dict[str, Any]:
    return {**AXOLOTL, "datasets": [{"path": "a.jsonl", "type": "chat_template", **keys}]}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        # other objectives
        ({**SFT, "label_column_name": "label"}, "label_column_name"),
        ({**AXOLOTL, "rl": "grpo", "trl": {"beta": 0.1}}, "trl.beta"),
        ({**AXOLOTL, "rl": "ebft"}, "rl"),
        ({**AXOLOTL, "rl": "kto"}, TYPE),
        ({**AXOLOTL, "orpo_alpha": 0.1}, "orpo_alpha"),
        ({**AXOLOTL, "reward_model": True}, TYPE),
        (dataset(type="bradley_terry.chat_template"), TYPE),
        ({**FACTORY, "reward_model": "r"}, "reward_model"),
        ({**AXOLOTL, "num_labels": 1}, "num_labels"),
        ({**AXOLOTL, "process_reward_model": True}, "process_reward_model"),
        ({**AXOLOTL, "model_type": "AutoModelForSequenceClassification"}, "model_type"),
        ({**AXOLOTL, "num_labels": 2}, "num_labels"),
        ({**AXOLOTL, "diffusion": {"eps": 1e-3}}, "diffusion"),
        ({**AXOLOTL, "plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]}, "plugins"),
        ({**AXOLOTL, "use_eaft": True}, "use_eaft"),
        ({**AXOLOTL, "trainer_cls": "my.Trainer"}, "trainer_cls"),
        ({**AXOLOTL, "rl": "dpo", "dpo_loss_type": ["discopop"]}, "dpo_loss_type"),
        ({**AXOLOTL, "rl": "dpo", "dpo_loss_type": ["sigmoid", "bco_pair", "sft"]}, "dpo_loss_type"),
        ({**FACTORY, "stage": "ppo", "reward_model": "r"}, "stage"),
        ({**FACTORY, "stage": "dpo", "pref_loss": "kto_pair"}, "pref_loss"),
        ({**FACTORY, "stage": "dpo", "pref_ftx": 0.2}, "pref_ftx"),
        ({**FACTORY, "stage": "dpo", "ref_model": "other"}, "ref_model"),
        ({**FACTORY, "use_dft_loss": True}, "use_dft_loss"),
        ({**FACTORY, "use_asft_loss": True, "asft_alpha": 0.1}, "use_asft_loss"),
        ({**FACTORY, "use_eaft_loss": True}, "use_eaft_loss"),
        ({**SFT, "loss_type": "dft"}, "loss_type"),
        ({**SFT, "label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        # other trained parameters, or other number formats
        ({**FACTORY, "finetuning_type": "freeze"}, "finetuning_type"),
        ({**FACTORY, "finetuning_type": "oft"}, "finetuning_type"),
        ({**FACTORY, "finetuning_type": "lora", "use_llama_pro": True}, "use_llama_pro"),
        ({**FACTORY, "mixture_of_depths": "convert"}, "mixture_of_depths"),
        ({**FACTORY, "adapter_name_or_path": "a"}, "adapter_name_or_path"),
        ({**FACTORY, "finetuning_type": "lora", "quantization_bit": 3}, "quantization_bit"),
        ({**FACTORY, "finetuning_type": "lora", "quantization_bit": 4, "quantization_method": "hqq"},
         "quantization_method"),
        ({**FACTORY, "shift_attn": True}, "shift_attn"),
        ({**FACTORY, "rope_scaling": "yarn"}, "rope_scaling"),
        ({**FACTORY, "use_kt": True}, "use_kt"),
        ({**FULL, "unfrozen_parameters": ["^lm_head"]}, "unfrozen_parameters"),
        ({**FULL, "lisa_step_interval": 20, "lisa_n_layers": 4}, "lisa_step_interval"),
        ({**FULL, "load_in_8bit": True}, "load_in_8bit"),
        ({**FULL, "qat": {"weight_dtype": "int4"}}, "qat"),
        ({**FULL, "reinit_weights": True}, "reinit_weights"),
        ({**FULL, "use_onebitllms": True}, "use_onebitllms"),
        ({**FULL, "overrides_of_model_config": {"rope_theta": 1e6}}, "overrides_of_model_config"),
        ({**AXOLOTL, "relora": True}, "relora"),
        ({**AXOLOTL, "peft": {"loftq_config": {"loftq_bits": 4}}}, "peft"),
        ({**AXOLOTL, "peft_init_lora_weights": "olora"}, "peft_init_lora_weights"),
        ({**AXOLOTL, "lora_model_dir": "before"}, "lora_model_dir"),
        ({**AXOLOTL, "lora_target_linear": False, "lora_target_modules": "layers.[0-3].*"}, "lora_target_modules"),
        ({**AXOLOTL, "lora_rank_pattern": {"q_proj": 4}}, "lora_rank_pattern"),
        ({**AXOLOTL, "adapter": "llama-adapter"}, "adapter"),
        ({**AXOLOTL, "revision_of_model": "abc"}, "revision_of_model"),
        # other training dynamics
        ({**AXOLOTL, "neftune_noise_alpha": 5}, "neftune_noise_alpha"),
        ({**AXOLOTL, "jagged_restart_steps": 150}, "jagged_restart_steps"),
        ({**AXOLOTL, "lr_scheduler": "rex"}, "lr_scheduler"),
        ({**AXOLOTL, "lr_scheduler": "one_cycle"}, "lr_scheduler"),
        ({**AXOLOTL, "lr_scheduler": "warmup_stable_decay", "max_steps": 9}, "lr_scheduler"),
        ({**AXOLOTL, "lr_scheduler": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 4}}, "num_cycles"),
        ({**AXOLOTL, "lr_quadratic_warmup": True}, "lr_quadratic_warmup"),
        ({**AXOLOTL, "cosine_constant_lr_ratio": 0.5}, "cosine_constant_lr_ratio"),
        ({**AXOLOTL, "optimizer": "adafactor"}, "optimizer"),
        ({**AXOLOTL, "optimizer": "muon"}, "optimizer"),
        ({**AXOLOTL, "optimizer": "galore_adamw"}, "optimizer"),
        ({**AXOLOTL, "optimizer": "sgd", "weight_decay": 0.1}, "optimizer"),
        ({**AXOLOTL, "optim_args": "eps=1e-4"}, "optim_args"),
        ({**AXOLOTL, "embedding_lr": 1e-5}, "embedding_lr"),
        ({**AXOLOTL, "curriculum_sampling": True}, "curriculum_sampling"),
        ({**FACTORY, "disable_shuffling": True}, "disable_shuffling"),
        ({**FACTORY, "use_galore": True, "galore_rank": 128}, "use_galore"),
        ({**FACTORY, "use_apollo": True}, "use_apollo"),
        ({**FACTORY, "use_badam": True}, "use_badam"),
        ({**FACTORY, "use_adam_mini": True}, "use_adam_mini"),
        ({**SFT, "optim": "rmsprop"}, "optim"),
        ({**SFT, "accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches"),
        # other data
        ({**AXOLOTL, "processor_type": "AutoProcessor"}, "processor_type"),
        ({**FACTORY, "image_max_pixels": 262144}, "image_max_pixels"),
        ({**FACTORY, "dataset": "pictures"}, "dataset"),
        ({**FACTORY, "dataset": "thumbs"}, "dataset"),
        ({**FACTORY, "dataset": "roles"}, "dataset"),
        ({**FACTORY, "stage": "dpo", "dataset": "pairs"}, "dataset"),
        ({**FACTORY, "template": "vicuna"}, "template"),
        ({**AXOLOTL, "min_sample_len": 200}, "min_sample_len"),
        ({**AXOLOTL, "tokenizer_use_mistral_common": True}, "tokenizer_use_mistral_common"),
        ({**AXOLOTL, "chat_template": "metharme"}, "chat_template"),
        (dataset(type="jeopardy"), TYPE),
        (dataset(type="alpaca_w_system.load_open_orca"), TYPE),
        ({**dataset(type="chatml.intel"), "rl": "dpo"}, TYPE),
        (dataset(path="o/n", data_files=["a.json"]), "datasets.0.data_files"),
        (dataset(roles_to_train=["user"]), "datasets.0.roles_to_train"),
        (dataset(train_on_eos="all"), "datasets.0.train_on_eos"),
        (dataset(roles={"user": ["customer"]}), "datasets.0.roles"),
        ({**AXOLOTL, "train_on_inputs": True}, "train_on_inputs"),
        (dataset(drop_system_message=True), "datasets.0.drop_system_message"),
        (dataset(shards=10), "datasets.0.shards"),
        (dataset(revision="abc"), "datasets.0.revision"),
        ({**dataset(type="completion"), "sample_packing": False}, "sample_packing"),
        ({**SFT, "completion_only_loss": False}, "completion_only_loss"),
        ({**SFT, "model_revision": "v1"}, "model_revision"),
        ({**V1, "train_dataset": "media.yaml"}, "train_dataset"),
        ({**V1, "train_dataset": "nowhere.yaml"}, "train_dataset"),
        ({**V1, "train_dataset": "pairs.yaml"}, "train_dataset"),
        ({**V1, "peft_config": {"name": "freeze"}}, "peft_config.name"),
        ({**V1, "batching_strategy": "dynamic_batching", "max_steps": 5}, "batching_strategy"),
        ({**V1, "lr_scheduler_config": {"name": "mine"}}, "lr_scheduler_config"),
    ],
)  # fmt: skip
def test_training_that_cannot_be_reproduced_is_refused(tmp_path: Path, given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, given)
    said = str(caught.value)
    assert f"{key}: " in said or key in said.split(), said
    assert "this key is unknown to echelon" not in said or key == "lr_scheduler_config", said
    assert len(said.splitlines()) == 1, said  # one message per key


@pytest.mark.parametrize("given", [AXOLOTL, FULL, FACTORY, SFT, V1, dataset(path="o/n"), dataset(type="alpaca")])
def test_files_without_the_refused_keys_are_imported(tmp_path: Path, given: dict[str, Any]) -> None:
    """Therefore each refusal above is caused by the key that it names."""
    parse_recipe(run(tmp_path, given).text, "imported")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"model_name_or_path": "m", "template": "qwen", "infer_backend": "huggingface"},
            "for inference, not for training",
        ),
        ({"model_name_or_path": "m", "adapter_name_or_path": "a", "template": "qwen", "export_dir": "out"}, "merges"),
        (
            {**FACTORY, "do_train": False, "do_predict": True},
            "do_predict: true: the file generates answers and does not train",
        ),
        (
            {"model_name_or_path": "m", "template": "fewshot", "task": "mmlu_test", "n_shot": 5},
            "the file evaluates a model",
        ),
        ({"model": "m", "peft_config": {"name": "lora", "export_dir": "out"}}, "peft_config.export_dir"),
        ({"distributed_type": "FSDP", "mixed_precision": "bf16"}, "this is an accelerate configuration"),
        ({"zero_optimization": {"stage": 3}}, "this is a DeepSpeed configuration"),
    ],
)
def test_a_file_without_training_is_refused(tmp_path: Path, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(tmp_path, given)


PAIRS = {"model_name_or_path": "m", "dataset_name": "o/n", "beta": 0.05, "max_prompt_length": 512}


def test_a_file_for_several_trainers_requires_the_trainer(tmp_path: Path) -> None:
    """TRL's files for DPO and ORPO have the same keys."""
    with pytest.raises(ConfigError, match=r"beta: 0[.]05: several trainers of TRL have this key.* --trainer dpo"):
        run(tmp_path, PAIRS)
    recipe = parse_recipe(run(tmp_path, PAIRS, trainer="dpo").text, "imported")[0]
    assert (recipe.objective.name, recipe.objective.beta, recipe.optim.learning_rate) == ("dpo", 0.05, 1e-6)
    with pytest.raises(ConfigError, match="--trainer rloo is not supported; use one of sft, dpo, orpo, cpo, kto, grpo"):
        run(tmp_path, PAIRS, trainer="rloo")
    with pytest.raises(ConfigError, match="dataset_name: o/n: the file does not specify the trainer"):
        run(tmp_path, {"model_name_or_path": "m", "dataset_name": "o/n"})
    with pytest.raises(ConfigError, match="--trainer dpo: files of axolotl specify the trainer"):
        run(tmp_path, AXOLOTL, trainer="dpo")
    assert "dpo" in run(tmp_path, {**V1, "train_dataset": "pairs.yaml"}, trainer="dpo").text


def test_all_refused_keys_are_named_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(
        json.dumps({**AXOLOTL, "relora": True, "neftune_noise_alpha": 5, "colour": "red"})
    )
    done = CliRunner().invoke(app, ["import", str(tmp_path / "file.json")])
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2
    lines = str(done.exception).splitlines()
    assert len(lines) == 4 and done.stdout == ""
    assert "  neftune_noise_alpha: 5: noise on embeddings is not supported." in lines


@pytest.mark.parametrize(
    ("name", "text", "what", "why"),
    [
        ("8B.toml", '[model]\nflavor = "8B"\n', "TOML", "that format of torchtitan"),
        ("8B.yaml", "loss: {_component_: torchtune.modules.loss.DPOLoss}\n", "a file of torchtune", "that tool"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--from", "hf"]], ids=["detected", "named"])
def test_a_format_that_has_ended_gets_one_line(tmp_path, name, text, what, why, options):
    path = tmp_path / name
    path.write_text(text)
    answer = CliRunner().invoke(app, ["import", str(path), *options])
    assert isinstance(answer.exception, ConfigError)
    assert str(answer.exception) == (
        f"{path} is {what}, which import does not read any more, because {why} has ended; write a recipe, beginning "
        "with `echelon init`; docs/import.md#formats-that-have-ended lists its keys."
    )
