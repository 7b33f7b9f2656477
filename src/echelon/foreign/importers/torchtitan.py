"""Import recipes of torchtitan in TOML, as in its releases up to 0.2: a new language model on plain text."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.foreign.importers.defaults import defaults_of, move_exact, put_default
from echelon.foreign.importers.ledger import Ledger
from echelon.foreign.importers.operation import put_name
from echelon.foreign.importers.sources import build_source
from echelon.foreign.importers.training import Amounts
from echelon.recipe.yaml_text import read_table, show_value

_TABLE: Mapping[str, Any] = read_table(Path(__file__).with_name("torchtitan.yaml"))
_DEFAULTS = defaults_of("torchtitan", None)
_APART = ("_flex", "_varlen")


def carry_torchtitan(ledger: Ledger, path: Path, amounts: Amounts, trainer: str | None) -> None:
    """Import all keys of a file."""
    put_name(ledger, path.stem, "the name of the file")
    move_exact(ledger, _DEFAULTS, "run.seed", "debug.seed", 0)
    _carry_model(ledger)
    _carry_data(ledger)
    _carry_training(ledger, amounts)
    _carry_precision(ledger)
    _carry_optimizer(ledger)
    _carry_operation(ledger)
    ledger.settle_rest(_TABLE["needless"], _TABLE["refused"])


def _carry_model(ledger: Ledger) -> None:
    name, flavor = str(ledger.take("model.name")), str(ledger.take("model.flavor"))
    plain = next((flavor.removesuffix(end) for end in _APART if flavor.endswith(end)), flavor)
    ledger.put("data.document_mask", plain != flavor, f"model.flavor: {flavor}")
    tokenizer = ledger.take("model.hf_assets_path", "model.tokenizer_path")
    if tokenizer is None or str(tokenizer).endswith(".model"):
        ledger.refuse("model.flavor", "give the folder of the tokenizer from the hub as model.hf_assets_path.")
    else:
        ledger.put("tokenizer", tokenizer, f"model.hf_assets_path: {tokenizer}")
    start = ledger.take("checkpoint.initial_load_path")
    if start is not None and ledger.take("checkpoint.initial_load_in_hf"):
        ledger.put("model.checkpoint", start, f"checkpoint.initial_load_path: {start}")
        return
    if start is not None:
        ledger.refuse(
            "checkpoint.initial_load_path",
            "checkpoints of torchtitan are not read; convert it to the form of the hub (checkpoint.last_save_in_hf), "
            "and set checkpoint.initial_load_in_hf.",
        )
    family = _TABLE["models"].get(name, {"flavors": {}})
    if (sizes := family["flavors"].get(plain)) is None:
        known = "; ".join(f"{kind} {', '.join(row['flavors'])}" for kind, row in _TABLE["models"].items())
        ledger.refuse("model.flavor", f"import knows the sizes of {known}, not those of {name} {flavor}.")
        return
    ledger.put("model.config", {**family["shared"], **sizes}, f"model.name: {name}, model.flavor: {flavor}")
    ledger.remark(
        "new weights are drawn as transformers draws them (normal, 0.02), not as torchtitan does, by depth and width."
    )


def _carry_data(ledger: Ledger) -> None:
    ledger.values["data.train"] = [_read_source(ledger, "training")]
    ledger.reasons["data.train"] = "training.dataset"
    ledger.differ(
        "training.dataset", "torchtitan also begins each document with bos; both end it with eos. Of an endless stream "
        "as c4, data.train.0.max_samples says how much is prepared."
    )  # fmt: skip
    if ledger.take("validation.enable"):
        ledger.values["data.validation"] = [_read_source(ledger, "validation")]
        ledger.reasons["data.validation"] = "validation.dataset"
        move_exact(ledger, _DEFAULTS, "train.eval_every", "validation.freq", 10)
    else:
        ledger.put("data.validation_fraction", 0, "nothing is held out")
        ledger.put("train.eval_every", None, "nothing is evaluated")
        for full in ("validation.dataset", "validation.dataset_path", "validation.freq", "validation.steps"):
            if ledger.find(full) is not None:
                ledger.need_not(full, "validation is not enabled.")
    move_exact(ledger, _DEFAULTS, "data.sequence_len", "training.seq_len", _DEFAULTS.sequence_len)
    ledger.put("data.packing", True, "texts are joined")


def _read_source(ledger: Ledger, section: str) -> dict[str, Any]:
    name, path = str(ledger.take(f"{section}.dataset")), ledger.take(f"{section}.dataset_path")
    if (row := _TABLE["datasets"].get(name)) is None:
        ledger.refuse(f"{section}.dataset", f"import knows {', '.join(_TABLE['datasets'])}; name another in a recipe.")
        return {"path": name}
    source = build_source(str(path or row["path"]), None, {}, None if path else row.get("config"))
    return {**source, "split": row["split"]} if source.get("format") == "hub" else source


def _carry_training(ledger: Ledger, amounts: Amounts) -> None:
    degrees = _carry_parallel(ledger)
    apart = degrees["tp"] * degrees["cp"] * degrees["pp"]
    named = degrees["dp_replicate"] * degrees["dp_shard"] if degrees["dp_shard"] > 0 else 1
    devices = max(1, amounts.devices // apart) if amounts.devices is not None else named
    micro = int(ledger.number("training.local_batch_size") or _DEFAULTS.micro_batch_size)
    ledger.put("train.micro_batch_size", micro, "as in the file; `auto` uses the largest that fits")
    whole = ledger.number("training.global_batch_size") or -1
    if whole > 0:
        ledger.put("train.global_batch_size", int(whole), f"training.global_batch_size: {whole:g}")
    else:
        ledger.put("train.global_batch_size", micro * devices, f"{micro} a device x {devices} with other data")
        if amounts.devices is None:
            ledger.remark(
                f"the file's batch size is {micro} per GPU, and {devices} with other data were assumed; for N GPUs, "
                "import with --devices N."
            )
    move_exact(ledger, _DEFAULTS, "train.steps", "training.steps", 10_000)
    ledger.put("train.compile", bool(ledger.take("compile.enable")), "compile.enable")
    mode = ledger.take("activation_checkpoint.mode") or "selective"
    if mode not in ("none", "selective", "full"):
        ledger.differ("activation_checkpoint.mode", "activations are recomputed by layer; the result is the same.")
        mode = "selective"
    ledger.put("train.activation_checkpointing", mode, f"activation_checkpoint.mode: {mode}")
    if ledger.take("debug.deterministic"):
        ledger.put("train.deterministic", True, "debug.deterministic: true")


def _carry_parallel(ledger: Ledger) -> dict[str, int]:
    """Import the degrees other than 1; return all, -1 for what is left."""
    names = {"dp_replicate": "data_parallel_replicate", "dp_shard": "data_parallel_shard", "tp": "tensor_parallel",
             "cp": "context_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel"}  # fmt: skip
    degrees = {
        ours: int(ledger.number(f"parallelism.{theirs}_degree") or (-1 if ours == "dp_shard" else 1))
        for ours, theirs in names.items()
    }
    parallel: dict[str, Any] = {
        ours: "auto" if degree < 0 else degree for ours, degree in degrees.items() if degree != 1
    }
    if ledger.take("training.enable_cpu_offload"):
        parallel["cpu_offload"] = True
    ledger.put("parallel", parallel or "ddp", "parallelism")
    return degrees


def _carry_precision(ledger: Ledger) -> None:
    converters = ledger.take("model.converters") or []
    low = str(ledger.take("training.mixed_precision_param") or "bfloat16")
    if ledger.take("training.dtype") == "bfloat16":
        ledger.differ("training.dtype", "weights stay in fp32 with bf16 arithmetic.")
    if converters == ["float8"]:
        ledger.put("train.precision", "fp8", "model.converters: [float8]")
        if ledger.take("quantize.linear.float8.recipe_name") not in (None, "tensorwise"):
            ledger.put("train.float8_scaling", "row", "quantize.linear.float8.recipe_name")
        ledger.differ("model.converters", "the output head is not computed in float8, whatever filter_fqns says.")
    elif converters:
        ledger.refuse("model.converters", "the number formats bf16, fp32 and float8 are supported.")
    else:
        ours = {"bfloat16": "bf16", "float32": "fp32"}.get(low, low)
        ledger.put("train.precision", ours, f"training.mixed_precision_param: {low}")


def _carry_optimizer(ledger: Ledger) -> None:
    name = ledger.take("optimizer.name") or "AdamW"
    if name != "AdamW":
        ledger.refuse("optimizer.name", "only AdamW is imported.")
    ledger.put("optim.name", "adamw", f"optimizer.name: {name}")
    move_exact(ledger, _DEFAULTS, "optim.learning_rate", "optimizer.lr", _DEFAULTS.learning_rate)
    move_exact(ledger, _DEFAULTS, "optim.weight_decay", "optimizer.weight_decay", _DEFAULTS.weight_decay)
    put_default(ledger, _DEFAULTS, "optim.no_decay", [])
    given = [ledger.number(f"optimizer.beta{number}") for number in (1, 2)]
    betas = [default if beta is None else beta for beta, default in zip(given, _DEFAULTS.betas, strict=True)]
    ledger.put("optim.betas", betas, "optimizer.beta1, optimizer.beta2, or their defaults")
    move_exact(ledger, _DEFAULTS, "optim.eps", "optimizer.eps", _DEFAULTS.eps)
    move_exact(ledger, _DEFAULTS, "optim.max_grad_norm", "training.max_norm", _DEFAULTS.max_grad_norm)
    _carry_schedule(ledger)


def _carry_schedule(ledger: Ledger) -> None:
    warmup = int(move_exact(ledger, _DEFAULTS, "optim.warmup_steps", "lr_scheduler.warmup_steps", 200))
    steps, ratio = int(ledger.values["train.steps"]), ledger.number("lr_scheduler.decay_ratio")
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    kind = str(ledger.take("lr_scheduler.decay_type") or "linear")
    said = f"lr_scheduler.decay_type: {kind}"
    if decay == 0:
        ledger.put("optim.schedule", "constant", f"lr_scheduler.decay_ratio: {show_value(ratio)}")
        return
    if kind == "sqrt":
        ledger.put("optim.schedule", "wsd", said)
        ledger.put("optim.decay_fraction", math.floor(decay / steps * 1e6) / 1e6, f"the last {decay} of {steps} steps")
    elif decay < steps - warmup:
        ledger.refuse(
            "lr_scheduler.decay_ratio", "echelon's decay after steps of a constant rate is sqrt (decay_type: sqrt)."
        )
    ledger.values.setdefault("optim.schedule", kind)
    ledger.reasons.setdefault("optim.schedule", said)
    floor = ledger.number("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min") or 0.0
    ledger.put("optim.min_learning_rate_fraction", floor, "the final value of the tool's schedule")
    if ledger.given.get("lr_scheduler.total_steps") not in (None, steps):
        ledger.refuse("lr_scheduler.total_steps", "a schedule is as long as its run; set training.steps.")


def _carry_operation(ledger: Ledger) -> None:
    move_exact(ledger, _DEFAULTS, "run.dir", "job.dump_folder")
    move_exact(ledger, _DEFAULTS, "train.log_every", "metrics.log_freq", 10)
    saves = ledger.take("checkpoint.enable", "checkpoint.enable_checkpoint")
    if saves:
        move_exact(ledger, _DEFAULTS, "checkpoint.every_steps", "checkpoint.interval", 500)
        move_exact(ledger, _DEFAULTS, "checkpoint.keep_last", "checkpoint.keep_latest_k", 10)
    else:
        for full in ("checkpoint.interval", "checkpoint.keep_latest_k"):
            if ledger.find(full) is not None:
                ledger.need_not(full, "checkpoints are not enabled; echelon saves by its own default.")
    track = [name for name in ("tensorboard", "wandb") if ledger.take(f"metrics.enable_{name}")]
    if track:
        ledger.put("track", track, "metrics")
