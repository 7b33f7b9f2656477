"""Converts other tools' spellings of recipe keys, with a note, and refuses those without an equivalent.

The tools are HF (TrainingArguments, PEFT, TRL), Axolotl, LLaMA-Factory, torchtitan and Automodel. A name without a dot
is accepted at the top level and in its key's section (`lr` and `optim.lr`), a dotted name only as written.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.keys import KeyPath, dotted, recipe_keys
from echelon.recipe.yaml_text import show_value

_NAMES: Mapping[str, str] = {
    "run.name": "run_name",
    "run.dir": "output_dir dump_folder job.dump_folder checkpoint.checkpoint_dir",
    "run.seed": "seed debug.seed rng.seed",
    "model.checkpoint": "base_model model_name_or_path pretrained_model_name_or_path",
    "model.trust_remote_code": "trust_remote_code",
    "model.attn_implementation": "attn_implementation flash_attn",
    "tokenizer": "tokenizer_name tokenizer_config",
    "adapter.method": "adapter finetuning_type load_in_4bit",
    "adapter.r": "lora_r lora_rank rank peft.dim",
    "adapter.alpha": "lora_alpha peft.alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.target_modules": "lora_target lora_target_modules lora_target_linear peft.target_modules",
    "adapter.target_parameters": "lora_target_parameters",
    "adapter.quantize_experts": "quantize_moe_experts",
    "adapter.modules_to_save": "modules_to_save lora_modules_to_save additional_target",
    "data.train": "train_file datasets",
    "data.validation": "validation_file test_datasets",
    "data.validation_fraction": "val_set_size val_size",
    "data.sequence_len": "sequence_len cutoff_len max_length max_seq_length max_seq_len block_size seq_len "
    "training.seq_len training.max_context_length",
    "data.packing": "packing sample_packing neat_packing",
    "data.chat_template": "chat_template template",
    "data.eot_tokens": "eot_tokens",
    "data.prepare_workers": "preprocessing_num_workers dataset_num_proc dataset_processes",
    "train.steps": "max_steps training.steps step_scheduler.max_steps",
    "train.epochs": "num_train_epochs num_epochs step_scheduler.num_epochs",
    "train.global_batch_tokens": "training.num_tokens_per_train_step",
    "train.global_batch_size": "global_batch_size training.global_batch_size step_scheduler.global_batch_size",
    "train.micro_batch_size": "micro_batch_size per_device_train_batch_size training.local_batch_size "
    "step_scheduler.local_batch_size",
    "train.precision": "bf16 fp16 pure_bf16 training.mixed_precision_param",
    "train.compile": "torch_compile compile.enable",
    "train.activation_checkpointing": "gradient_checkpointing activation_checkpoint.mode "
    "distributed.activation_checkpointing",
    "train.activation_offloading": "activation_offloading enable_activation_offloading",
    "train.deterministic": "full_determinism debug.deterministic",
    "train.log_every": "logging_steps metrics.log_freq",
    "train.evals_per_epoch": "evals_per_epoch",
    "train.eval_every": "eval_steps validator.freq step_scheduler.val_every_steps",
    "optim.name": "optim optimizer optimizer.name",
    "optim.learning_rate": "lr learning_rate optimizer.lr",
    "optim.weight_decay": "weight_decay optimizer.weight_decay",
    "optim.betas": "optimizer.betas",
    "optim.eps": "adam_epsilon optimizer.eps",
    "optim.max_grad_norm": "max_grad_norm training.max_norm clip_grad_norm.max_norm",
    "optim.schedule": "lr_scheduler_type lr_scheduler lr_scheduler.decay_type lr_scheduler.lr_decay_style",
    "optim.warmup_steps": "warmup_steps lr_scheduler.warmup_steps lr_scheduler.lr_warmup_steps",
    "optim.warmup_fraction": "warmup_ratio",
    "optim.min_learning_rate_fraction": "cosine_min_lr_ratio lr_scheduler.min_lr_factor",
    "parallel.dp_shard": "dp_shard_size parallelism.data_parallel_shard_degree",
    "parallel.dp_replicate": "dp_replicate_size parallelism.data_parallel_replicate_degree",
    "parallel.tp": "tp_size tensor_parallel_size parallelism.tensor_parallel_degree",
    "parallel.cp": "cp_size context_parallel_size parallelism.context_parallel_degree",
    "parallel.pp": "pp_size parallelism.pipeline_parallel_degree",
    "parallel.ep": "ep_size expert_parallel_size parallelism.expert_parallel_degree",
    "checkpoint.every_steps": "save_steps checkpoint.interval step_scheduler.ckpt_every_steps",
    "checkpoint.saves_per_epoch": "saves_per_epoch",
    "checkpoint.keep_last": "save_total_limit checkpoint.keep_latest_k checkpoint.max_recent_checkpoints",
    "track": "report_to",
}
ALIASES: Mapping[str, str] = {name: key for key, names in _NAMES.items() for name in names.split()}

# Values of other tools and their equivalents here, by alias or by key. None: the key stays unset.
_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "bf16": {True: "bf16", "auto": "auto", False: "fp32"},
    "pure_bf16": {True: "bf16", False: None},
    "fp16": {True: "fp16", False: None},
    "load_in_4bit": {True: "qlora", False: None},
    "flash_attn": {"fa2": "flash_attention_2", True: "flash_attention_2", "disabled": "eager",
                   "auto": None, False: None},
    "lora_target": {"all": "all-linear"},
    "lora_target_linear": {True: "all-linear", False: None},
    "max_steps": {-1: None},
    "report_to": {"none": None},
    "train.precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "train.activation_checkpointing": {True: "full", False: "none"},
    "optim.name": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "AdamW": "adamw",
                   "adamw_32bit": "adamw", "adamw_apex_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit",
                   "adamw_torch_8bit": "adamw_8bit", "lion_32bit": "lion", "lion_8bit": "lion",
                   "lion_pytorch": "lion"},
    "optim.schedule": {"cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine",
                       "constant_with_warmup": "constant", "warmup_stable_decay": "wsd"},
    "parallel": {"zero3": "fsdp", "full_shard": "fsdp", "shard_grad_op": "zero2", "no_shard": "ddp",
                 "hybrid_shard": "hsdp"},
    "parallel.dp_shard": {-1: "auto"},
}  # fmt: skip

NO_EQUIVALENT: Mapping[str, str] = {
    "gradient_accumulation_steps": "gradient accumulation is derived from the global batch: set "
    "train.global_batch_size (sequences per optimizer step over all processes) or train.global_batch_tokens, and "
    "remove this key.",
    "adam_beta1": "both betas are one key: set optim.betas, for example [0.9, 0.95].",
    "adam_beta2": "both betas are one key: set optim.betas, for example [0.9, 0.95].",
    "resume_from_checkpoint": "training resumes from the newest complete checkpoint of run.dir "
    "automatically; remove this key, and use --fresh to start a new run.",
    "fsdp": "sharding is chosen by parallel: fsdp, zero2 (SHARD_GRAD_OP) or hsdp (HYBRID_SHARD); set it instead.",
    "fsdp_config": "sharding is chosen by parallel: fsdp, or by its mapping of degrees; set it instead.",
    "dataset": "text is named by its path: set data.train.",
    "dataset_name": "text is named by its path: set data.train.",
    "ddp_timeout": "no collective waits for data preparation or saving, so no timeout is needed; remove this key.",
}


FREE_MAPPINGS = ("smp",)


def spellings(key: str) -> tuple[str, ...]:
    """Return the names of a recipe key in other tools."""
    return tuple(_NAMES.get(key, "").split())


def read_value(name: str, value: Any) -> Any:
    """Return the equivalent of a value given under a recipe key or another tool's name for it.

    Unknown values are returned unchanged; None means that the key stays unset.
    """
    return _VALUES.get(name, {}).get(value, value) if isinstance(value, Hashable) else value


@dataclass(frozen=True)
class Translation:
    """The recipe key and value for a key and value of another tool. `value` None: the key stays unset."""

    path: KeyPath
    value: Any
    note: str


def translate(path: KeyPath, value: Any, origin: str) -> Translation | None:
    """Convert another tool's key and value; None if there is nothing to convert, also for unknown keys.

    Raises ConfigError for a key without an equivalent.
    """
    name = dotted(path)
    if path[0] in FREE_MAPPINGS:
        return None
    if reason := NO_EQUIVALENT.get(str(path[-1]) if len(path) <= 2 else name):
        raise ConfigError(f"{origin}: {name} has no equivalent in a recipe: {reason}")
    alias, target = _find_alias(path, value)
    key = target or name
    ours = read_value(key, read_value(alias or key, value))
    if alias in ("datasets", "test_datasets"):
        ours = _translate_datasets(value)
    elif target == "track" and isinstance(ours, str):
        ours = [ours]
    elif target == "optim.warmup_steps" and isinstance(ours, float) and 0 < ours < 1:
        key = "optim.warmup_fraction"  # `transformers` 5 has both under one name
    if target is None and ours is value:
        return None
    meaning = f"{key} left unset" if ours is None else f"{key}: {show_value(ours)}"
    return Translation(tuple(key.split(".")), ours, f"{origin}: {name}: {show_value(value)} is read as {meaning}.")


def apply_aliases(draft: Draft) -> list[str]:
    """Convert other tools' keys and values in `draft` in place; return a note for each.

    Raises ConfigError if a key is given under two spellings or has no equivalent.
    """
    notes = []
    for path, value in list(_candidates(draft.data)):
        origin = draft.origin(path)
        translation = translate(path, value, origin)
        if translation is None:
            continue
        draft.remove(path)
        if len(path) == 2 and path[0] not in Recipe.model_fields and draft.get(path[:1]) == {}:
            draft.remove(path[:1])
        if draft.holds(translation.path) and translation.value is not None:
            ours = dotted(translation.path)
            raise ConfigError(
                f"{origin}: {dotted(path)} is another spelling of {ours}, which is also given "
                f"({draft.origin(translation.path)}); keep one."
            )
        if translation.value is not None:
            draft.set(translation.path, translation.value, origin)
        notes.append(translation.note)
    return notes


def _find_alias(path: KeyPath, value: Any) -> tuple[str, str] | tuple[None, None]:
    name, word = dotted(path), str(path[-1])
    # `adapter: lora` and `optim: adamw_torch` have the name of a section here, but a word as their value.
    if name in recipe_keys(Recipe) and (isinstance(value, dict) or name not in ALIASES):
        return None, None
    if name in ALIASES:
        return name, ALIASES[name]
    if len(path) == 2 and ALIASES.get(word, "").startswith(f"{path[0]}."):
        return word, ALIASES[word]
    return None, None


def _candidates(data: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, Any]]:
    # A word given for a section comes first: `adapter: lora` creates the section that `lora_r: 8` belongs to.
    for key, value in sorted(data.items(), key=lambda item: item[0] not in Recipe.model_fields):
        if isinstance(value, dict):
            yield from (((key, inner), inner_value) for inner, inner_value in value.items())
        else:
            yield (key,), value


def _translate_datasets(value: Any) -> Any:
    """Convert Axolotl's `datasets: [{path, type}]`, where `completion` means plain text."""
    if not isinstance(value, list):
        return value
    renamed = {"type": "format", "ds_type": "format"}
    sources = [
        {renamed.get(key, key): item for key, item in source.items()} if isinstance(source, dict) else source
        for source in value
    ]
    for source in sources:
        if isinstance(source, dict) and source.get("format") == "completion":
            source["format"] = "auto"
    return sources
