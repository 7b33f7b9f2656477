"""Import recipes of torchtune: YAML whose sections name a class or function in `_component_`.

The data is read from the builders of datasets that torchtune ships, whose prompts are known; others are refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.foreign.importers.defaults import defaults_of, move_exact, put_default
from echelon.foreign.importers.ledger import Ledger
from echelon.foreign.importers.operation import put_name
from echelon.foreign.importers.sources import FILE_SUFFIXES, build_source, put_split
from echelon.foreign.importers.training import Amounts
from echelon.foreign.importers.wording import alpaca_turns
from echelon.ground.errors import ConfigError
from echelon.recipe.yaml_text import read_table, show_value

_TABLE: Mapping[str, Any] = read_table(Path(__file__).with_name("torchtune.yaml"))
_DEFAULTS = defaults_of("torchtune", None)
_COMPONENT = "_component_"
_LONGEST = 4096


def carry_torchtune(ledger: Ledger, path: Path, amounts: Amounts, trainer: str | None) -> None:
    """Import all keys of a file."""
    put_name(ledger, path.stem, "the name of the file")
    move_exact(ledger, _DEFAULTS, "run.dir", "output_dir")
    move_exact(ledger, _DEFAULTS, "run.seed", "seed", 0)
    _carry_objective(ledger)
    _carry_model(ledger)
    _carry_adapter(ledger)
    _carry_data(ledger)
    _carry_training(ledger, amounts)
    _carry_optimizer(ledger)
    _carry_operation(ledger)
    ledger.settle_rest(_TABLE["needless"], _TABLE["refused"])


def _component(ledger: Ledger, section: str) -> str | None:
    """Take the class or function of a section and return the last part of its name; None if the section has none."""
    value = ledger.take(f"{section}.{_COMPONENT}")
    return None if value is None else str(value).rpartition(".")[2]


def _carry_objective(ledger: Ledger) -> None:
    loss = _component(ledger, "loss")
    named = f"loss.{_COMPONENT}: {loss}"
    if loss in _TABLE["pairs"]:
        name, beta = _TABLE["pairs"][loss]
        ledger.put("objective.name", "dpo", named)
        ledger.put("objective.loss", name, named)
        move_exact(ledger, _DEFAULTS, "objective.beta", f"loss.{beta}", 0.1)
        if name == "sigmoid":
            move_exact(ledger, _DEFAULTS, "objective.label_smoothing", "loss.label_smoothing")
    elif loss is not None and loss not in _TABLE["losses"].split():
        ledger.refuse(f"loss.{_COMPONENT}", f"the losses {_TABLE['losses']}, DPOLoss and RSOLoss are supported.")
    first, reference = (ledger.given.get(f"{part}.checkpoint_dir") for part in ("checkpointer", "ref_checkpointer"))
    if reference is not None and Path(reference) != Path(str(first)):
        ledger.refuse("ref_checkpointer.checkpoint_dir", "the reference is the model before training.")


def _carry_model(ledger: Ledger) -> None:
    kind = _component(ledger, "checkpointer")
    if kind not in (None, "FullModelHFCheckpointer"):
        ledger.refuse(
            f"checkpointer.{_COMPONENT}",
            "only weights in the form of the hub are read; give the folder of the model from the hub "
            "(FullModelHFCheckpointer).",
        )
    if move_exact(ledger, _DEFAULTS, "model.checkpoint", "checkpointer.checkpoint_dir") is None:
        ledger.refuse(f"model.{_COMPONENT}", "the file names no folder of weights (checkpointer.checkpoint_dir).")
    for part in ("checkpointer.adapter_checkpoint", "checkpointer.recipe_checkpoint"):
        if ledger.given.get(part) is not None:
            ledger.refuse(part, "only echelon's own runs can be resumed; training starts from model.checkpoint.")
    model = str(ledger.given.get(f"model.{_COMPONENT}", ""))
    if "vision" in model or model.endswith(("classifier", "classifier_model", "reward")):
        ledger.refuse(f"model.{_COMPONENT}", "the model is not a causal language model of text.")
    ledger.put("objective.router_loss", False, "torchtune has no router loss")


def _carry_adapter(ledger: Ledger) -> None:
    """Import the adapter that the name of the model's builder begins with; without one all parameters are trained."""
    builder = _component(ledger, "model") or ""
    method, _, _ = builder.partition("_")
    if method not in ("lora", "qlora"):
        return
    quantized = method == "qlora" or ledger.given.get("model.quantize_base") is True
    dora = ledger.take("model.use_dora") is True
    ledger.take("model.quantize_base")
    named = f"model.{_COMPONENT}: {builder}"
    ledger.put("adapter.method", "qlora" if quantized else "dora" if dora else "lora", named)
    if quantized and dora:
        ledger.refuse("model.use_dora", "dora is not supported with 4-bit weights.")
    if quantized:
        ledger.put("adapter.double_quant", True, "torchtune's weights in 4 bits")
        ledger.differ(f"model.{_COMPONENT}", "weights in 4 bits (nf4) are those of bitsandbytes, not of torchao.")
    for key, name, default in (("r", "rank", 8), ("alpha", "alpha", 16), ("dropout", "dropout", 0.0)):
        move_exact(ledger, _DEFAULTS, f"adapter.{key}", f"model.lora_{name}", default)
    names = ledger.take("model.lora_attn_modules") or []
    targets = [{"output_proj": "o_proj"}.get(name, name) for name in names]
    if ledger.take("model.apply_lora_to_mlp"):
        targets += ["gate_proj", "up_proj", "down_proj"]
    ledger.put("adapter.target_modules", targets, "lora_attn_modules, apply_lora_to_mlp")
    if ledger.given.get("model.apply_lora_to_output"):
        ledger.refuse(
            "model.apply_lora_to_output",
            "the output head cannot have an adapter; train it completely with adapter.modules_to_save.",
        )


def _carry_data(ledger: Ledger) -> None:
    pairs = ledger.values.get("objective.name") == "dpo"
    kind = ledger.given.get(f"dataset.{_COMPONENT}")
    if kind is None:
        raise ConfigError(
            "the file has no single `dataset` with a `_component_`: it does not train, or joins several; give one, or "
            "write a recipe, beginning with: echelon init"
        )
    ledger.values["data.train"] = [_read_source(ledger, "dataset", pairs)]
    ledger.reasons["data.train"] = f"dataset.{_COMPONENT}: {kind}"
    validates = ledger.given.get("run_val_every_n_steps") is not None
    if validates and f"dataset_val.{_COMPONENT}" in ledger.given:
        ledger.values["data.validation"] = [_read_source(ledger, "dataset_val", pairs)]
        ledger.reasons["data.validation"] = "dataset_val"
        move_exact(ledger, _DEFAULTS, "train.eval_every", "run_val_every_n_steps")
    else:
        for full in [name for name in ledger.given if name.startswith("dataset_val.")]:
            ledger.need_not(full, "run_val_every_n_steps is not set, so nothing is evaluated.")
        ledger.put("data.validation_fraction", 0, "nothing is held out")
        ledger.put("train.eval_every", None, "nothing is evaluated")
    _carry_length(ledger)
    if ledger.given.get("shuffle") is False:
        ledger.refuse("shuffle", "samples are always shuffled.")


def _read_source(ledger: Ledger, section: str, pairs: bool) -> dict[str, Any]:
    """Read a dataset: its source, and for `dataset` its packing, its prompts and its targets."""
    builder = _component(ledger, section) or ""
    row = _TABLE["datasets"].get(builder)
    if row is None or (row["format"] == "preference") is not pairs:
        why = "pairs with a conversation as the prompt" if pairs else "datasets of " + ", ".join(_TABLE["datasets"])
        ledger.refuse(f"{section}.{_COMPONENT}", f"import knows the texts of {why} alone; rewrite the records.")
        _component(ledger, "tokenizer")
        return {"path": builder}
    path = ledger.take(f"{section}.source") or row["source"]
    files = ledger.take(f"{section}.data_files")
    if files is not None and not isinstance(files, str):
        ledger.refuse(f"{section}.data_files", "give one file, or write a recipe, where data.train lists files.")
    form = row["format"]
    if ledger.take(f"{section}.conversation_style") == "openai":
        form, row = "messages", {**row, "column": "messages"}
    fields = _read_fields(ledger, section, row)
    config = ledger.take(f"{section}.name", f"{section}.subset") or row.get("config")
    source = build_source(str(files if files is not None else path), form, fields, config)
    if form is None and source["path"].endswith(FILE_SUFFIXES):
        source.pop("format", None)
    put_split(ledger, f"{section}.split", source, "train")
    if section == "dataset":
        _carry_wording(ledger, builder, row)
        _carry_packing(ledger, form)
    else:
        for name in ("packed", "train_on_input", "new_system_prompt", "column_map", "add_eos"):
            ledger.take(f"{section}.{name}")
    return source


def _read_fields(ledger: Ledger, section: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Return echelon's names of the fields and those of the records."""
    fields = dict(row.get("fields", {}))
    for theirs in list(_TABLE["columns"]):
        value = ledger.take(f"{section}.column_map.{theirs}")
        if value is not None and (ours := row.get("columns", {}).get(theirs)) is not None:
            fields[ours] = str(value)
    if (column := ledger.take(f"{section}.column", f"{section}.conversation_column")) is not None:
        fields[row["column"]] = str(column)
    return fields


def _carry_wording(ledger: Ledger, builder: str, row: Mapping[str, Any]) -> None:
    """Import how the tokenizer writes turns, and which tokens are targets."""
    full = f"tokenizer.{_COMPONENT}"
    tokenizer = _component(ledger, "tokenizer") or ""
    if row["format"] is None:
        return
    if ledger.given.get("tokenizer.prompt_template") is not None:
        ledger.refuse("tokenizer.prompt_template", "a template of torchtune is code; remove it, or write a recipe.")
    if (template := _TABLE["tokenizers"].get(tokenizer)) is None:
        known = ", ".join(_TABLE["tokenizers"])
        ledger.refuse(full, f"import knows how {known} write turns, not how this one does.")
        return
    alpaca = row["format"] == "alpaca" and builder.startswith("alpaca")
    ledger.put("data.chat_template", alpaca_turns(template) if alpaca else template, f"{full}: {tokenizer}")
    move_exact(ledger, _DEFAULTS, "data.system_prompt", "dataset.new_system_prompt")
    if row["format"] == "preference":
        return
    given = ledger.given.get("dataset.train_on_input")
    whole = bool(row.get("train_on_input", False) if given is None else ledger.take("dataset.train_on_input"))
    said = f"the default of {builder}" if given is None else f"dataset.train_on_input: {show_value(given)}"
    ledger.put("data.train_on", "all" if whole else "assistant", said)
    if not whole:
        ledger.remark("torchtune also trains on the tokens that begin an answer's turn; echelon trains on its text.")


def _carry_packing(ledger: Ledger, form: str | None) -> None:
    packed = bool(ledger.take("dataset.packed"))
    if form != "preference":
        ledger.put("data.packing", packed, f"dataset.packed: {show_value(packed)}")
        ledger.put("data.document_mask", True, "samples do not attend to each other")
    if form is None and packed:
        ledger.differ("dataset.packed", "texts are joined and cut at data.sequence_len, not each text by itself.")
    if form is None and ledger.take("dataset.add_eos") is False:
        ledger.put("data.document_separator", None, "dataset.add_eos: false")


def _carry_length(ledger: Ledger) -> None:
    full = "tokenizer.max_seq_len"
    if move_exact(ledger, _DEFAULTS, "data.sequence_len", full) is not None:
        ledger.put("data.on_overlong", "cut", f"{full}: {ledger.given[full]}")
        return
    ledger.put("data.sequence_len", _LONGEST, "the file sets no limit")
    ledger.put("data.on_overlong", "refuse", "the file cuts nothing")
    ledger.remark(
        f"the file limits no length (tokenizer.max_seq_len), and a recipe needs a limit: data.sequence_len={_LONGEST}. "
        "A longer text stops the preparation with a message; nothing is cut."
    )


def _carry_training(ledger: Ledger, amounts: Amounts) -> None:
    micro = int(ledger.number("batch_size") or 1)
    accumulation, devices = int(ledger.number("gradient_accumulation_steps") or 1), amounts.devices or 1
    ledger.put("train.micro_batch_size", micro, "as in the file; `auto` uses the largest that fits")
    arithmetic = f"{micro} a device x {accumulation} accumulated x {devices} device{'s' if devices > 1 else ''}"
    ledger.put("train.global_batch_size", micro * accumulation * devices, arithmetic)
    if amounts.devices is None:
        ledger.remark("the batch size is per GPU, and 1 GPU was assumed; for N GPUs, import with --devices N.")
    epochs, most = ledger.number("epochs") or 1, ledger.number("max_steps_per_epoch")
    if most is not None:
        ledger.put("train.steps", int(epochs * most), f"max_steps_per_epoch: {most:g} x epochs: {epochs:g}")
        ledger.differ("max_steps_per_epoch", "it is the number of steps, also where an epoch has fewer.")
    else:
        ledger.put("train.epochs", epochs, f"epochs: {epochs:g}")
    dtype = str(ledger.take("dtype") or "fp32")
    ledger.put("train.precision", dtype, f"dtype: {dtype}")
    if dtype == "bf16":
        ledger.differ(
            "dtype",
            "trained weights stay in fp32 with bf16 arithmetic; train.master_weights=bf16_kahan halves their memory.",
        )
    elif dtype != "fp32":
        ledger.refuse("dtype", "weights are trained in fp32 or bf16.")
    compiles = ledger.take("compile")
    ledger.put("train.compile", bool(compiles), f"compile: {show_value(compiles)}")
    recomputes = bool(ledger.take("enable_activation_checkpointing"))
    ledger.put("train.activation_checkpointing", "full" if recomputes else "none", "enable_activation_checkpointing")
    if ledger.take("enable_activation_offloading"):
        ledger.put("train.activation_offloading", True, "enable_activation_offloading: true")
    if ledger.take("fsdp_cpu_offload"):
        ledger.put("parallel", {"dp_shard": "auto", "cpu_offload": True}, "fsdp_cpu_offload: true")


def _carry_optimizer(ledger: Ledger) -> None:
    kind = _component(ledger, "optimizer") or ""
    if (name := _TABLE["optimizers"].get(kind)) is None:
        ledger.refuse(f"optimizer.{_COMPONENT}", f"the supported optimizers are {', '.join(_TABLE['optimizers'])}.")
        return
    ledger.put("optim.name", name, f"optimizer.{_COMPONENT}: {kind}")
    if kind.startswith("Paged"):
        ledger.differ(f"optimizer.{_COMPONENT}", "the state is not paged to host memory.")
    move_exact(ledger, _DEFAULTS, "optim.learning_rate", "optimizer.lr", 1e-3)
    move_exact(ledger, _DEFAULTS, "optim.weight_decay", "optimizer.weight_decay", 0.01)
    put_default(ledger, _DEFAULTS, "optim.no_decay", [])
    move_exact(ledger, _DEFAULTS, "optim.betas", "optimizer.betas", list(_DEFAULTS.betas))
    move_exact(ledger, _DEFAULTS, "optim.eps", "optimizer.eps", _DEFAULTS.eps)
    limit = ledger.number("clip_grad_norm")
    ledger.put("optim.max_grad_norm", limit, f"clip_grad_norm: {show_value(limit)}")
    schedule = _component(ledger, "lr_scheduler")
    if schedule not in (None, "get_cosine_schedule_with_warmup"):
        ledger.refuse(f"lr_scheduler.{_COMPONENT}", "the supported schedule is get_cosine_schedule_with_warmup.")
    if schedule is None:
        ledger.put("optim.schedule", "constant", "the file has no lr_scheduler")
        return
    ledger.put("optim.schedule", "cosine", f"lr_scheduler.{_COMPONENT}: {schedule}")
    ledger.put("optim.min_learning_rate_fraction", 0.0, "the final value of the tool's schedule")
    move_exact(ledger, _DEFAULTS, "optim.warmup_steps", "lr_scheduler.num_warmup_steps", 0)
    if (cycles := ledger.number("lr_scheduler.num_cycles")) not in (None, 0.5):
        ledger.refuse("lr_scheduler.num_cycles", f"restarts are not supported ({cycles:g} cycles).")


def _carry_operation(ledger: Ledger) -> None:
    move_exact(ledger, _DEFAULTS, "train.log_every", "log_every_n_steps", 1)
    saves = ledger.number("save_every_n_steps")
    if saves is not None:
        ledger.put("checkpoint.every_steps", int(saves), f"save_every_n_steps: {saves:g}")
    else:
        put_default(ledger, _DEFAULTS, "checkpoint.saves_per_epoch", 1)
    logger = _component(ledger, "metric_logger")
    tracker = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}.get(str(logger))
    if tracker is not None:
        ledger.put("track", [tracker], f"metric_logger.{_COMPONENT}: {logger}")
    if (project := ledger.take("metric_logger.project")) is not None and tracker == "wandb":
        ledger.put("wandb.project", project, "metric_logger.project")
