"""Another tool's file as a flat mapping of its keys, and which tool it is of."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from echelon.errors import ConfigError
from echelon.recipe.yaml_text import parse_yaml, show_value

Tool = Literal["axolotl", "hf", "llamafactory", "llamafactory-v1"]
TOOLS: tuple[Tool, ...] = get_args(Tool)

# Keys that none of the others has.
_SIGNS: Mapping[Tool, str] = {
    "axolotl": "base_model micro_batch_size num_epochs sequence_len sample_packing val_set_size lora_target_linear "
    "pad_to_sequence_len eval_sample_packing special_tokens wandb_project dataset_prepared_path train_on_inputs "
    "datasets optimizer lr_scheduler evals_per_epoch saves_per_epoch",
    "llamafactory": "stage finetuning_type do_train cutoff_len template dataset_dir lora_rank lora_target val_size "
    "quantization_bit pref_beta pref_loss neat_packing flash_attn overwrite_cache preprocessing_num_workers plot_loss",
    "llamafactory-v1": "train_dataset dist_config init_config kernel_config quant_config model_class sample_backend "
    "batching_strategy optim_config lr_scheduler_config custom_chat_template enable_activation_checkpointing",
    "hf": "per_device_train_batch_size num_train_epochs lr_scheduler_type eval_strategy save_strategy optim "
    "max_length max_seq_length dataset_name use_peft lora_r assistant_only_loss dataset_text_field max_steps "
    "output_dir learning_rate lora_alpha",
}
# `datasets`, `lora_r` and `output_dir` alone do not decide: these do.
_DECISIVE: Mapping[Tool, str] = {
    "axolotl": "base_model micro_batch_size num_epochs sample_packing val_set_size",
    "llamafactory": "stage finetuning_type cutoff_len template dataset_dir quantization_bit",
    "llamafactory-v1": "train_dataset model_class",
    "hf": "per_device_train_batch_size num_train_epochs lr_scheduler_type dataset_name model_name_or_path",
}
# The mappings into which scripts sort the arguments of several classes, and PEFT and bitsandbytes write their own.
_GROUPS = (
    "model_args", "model_arguments", "model_config", "data_args", "data_arguments", "dataset_args", "script_args",
    "script_arguments", "training_args", "training_arguments", "train_args", "trainer", "sft_config", "dpo_config",
    "peft_config", "lora", "lora_config", "quantization_config", "bnb_config", "quant_config", "optim_config",
    "accelerator_config", "dataset_kwargs",
)  # fmt: skip
_OURS = ("run", "model", "data", "train")
# Files that these tools are started with and that train nothing, by the keys that tell them.
_NO_TRAINING: tuple[tuple[str, str], ...] = (
    ("distributed_type", "settings of accelerate say how a job is spread over processes; write parallel and launch "
     "in a recipe"),
    ("zero_optimization", "settings of DeepSpeed say how a job is spread over processes; write parallel in a recipe"),
    ("infer_backend", "it is for answering, and trains nothing: use echelon generate"),
    ("export_dir", "it merges or exports a model, and trains nothing: use echelon export"),
    ("peft_config.export_dir", "it merges or exports a model, and trains nothing: use echelon export"),
    ("n_shot", "it measures a model, and trains nothing: use echelon eval"),
    ("do_predict", "it writes answers, and trains nothing: use echelon eval or echelon generate"),
)  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle")


def read_foreign(path: Path) -> dict[str, Any]:
    """The keys of a YAML or JSON file, groups of arguments taken apart: `lora_config: {r: 8}` is `lora_config.r`.

    Raises ConfigError for a file that cannot be read, a pickle, and what is no mapping.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name another tool's YAML or JSON file.") from None
    if path.suffix in _PICKLES or content[:1] == b"\x80" or content[:4] == b"PK\x03\x04":
        raise ConfigError(
            f"{path} is a Python pickle, which runs code when it is read; write the same arguments as text in the "
            "program that made it, open('training_args.json', 'w').write(training_args.to_json_string()), and import "
            "that file."
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; import reads YAML and JSON.") from None
    given = _parse(text, path)
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"{path} holds no mapping of keys; import reads the file a training tool is started with.")
    if all(isinstance(given.get(key), dict) for key in _OURS):
        raise ConfigError(f"{path} is an echelon recipe already; train it with: echelon train {path}")
    flat = _flatten(given)
    _check_training(flat, path)
    return flat


def _check_training(given: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for a file that trains nothing."""
    trains = given.get("do_train") or (given.get("stage") and not given.get("do_predict"))
    for key, reason in _NO_TRAINING:
        if given.get(key) and not trains:
            raise ConfigError(f"{path}: {key}: {show_value(given[key])}: {reason}.")


def _parse(text: str, path: Path) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}.") from None
    return parse_yaml(text, str(path))[0]


def _read_words(key: str, value: Any) -> Any:
    """These tools read YAML 1.1, where yes and no are not words; but `eval_strategy: no` is one to them too."""
    if isinstance(value, dict):
        return {inner: _read_words(str(inner), item) for inner, item in value.items()}
    if isinstance(value, list):
        return [_read_words(key, item) for item in value]
    is_word = not isinstance(value, str) or key.endswith("strategy") or key == "include_num_input_tokens_seen"
    return value if is_word else {"yes": True, "on": True, "no": False, "off": False}.get(value.lower(), value)


def _flatten(given: Mapping[Any, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in _read_words("", given).items():
        if str(key) in _GROUPS and isinstance(value, dict):
            flat.update({f"{key}.{inner}": item for inner, item in value.items()})
        else:
            flat[str(key)] = value
    return flat


def find_beside(folder: Path, name: str) -> Path | None:
    """A path as a tool is given it, from where it is started: here, beside its file in `folder`, or above that."""
    return next(
        (place / name for place in (Path(), folder, *folder.resolve().parents) if (place / name).exists()), None
    )


def detect_tool(given: Mapping[str, Any], path: Path) -> Tool:
    """The tool a file's keys are of. Raises ConfigError where they do not tell."""
    names = {name.rpartition(".")[2] for name in given}
    decisive = {tool: len(names & set(_DECISIVE[tool].split())) for tool in TOOLS}
    score = {tool: len(names & set(_SIGNS[tool].split())) for tool in TOOLS}
    if decisive["llamafactory-v1"]:  # it has keys of Axolotl's too
        return "llamafactory-v1"
    # The others write TrainingArguments too: hf is what is left.
    own: tuple[Tool, Tool] = ("axolotl", "llamafactory")
    for tool in sorted(own, key=lambda each: -score[each]):
        if decisive[tool]:
            return tool
    if score["hf"] or decisive["hf"] or {"r", "peft_type", "target_modules"} <= names:
        return "hf"
    raise ConfigError(
        f"{path}: its keys are not those of {', '.join(TOOLS)}; say which tool it is of, for example --from axolotl."
    )
