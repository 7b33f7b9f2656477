"""Objective, sharding, saving, evaluation, logging and the run's name, of another tool's file."""

import json
import math
import re
from pathlib import Path
from typing import Any, get_args

from echelon.errors import ConfigError
from echelon.recipe.aliases import read_value
from echelon.recipe.foreign.ledger import Ledger
from echelon.recipe.foreign.reading import Tool
from echelon.recipe.training import ParallelName
from echelon.recipe.yaml_text import show_value

_TRACKERS = ("tensorboard", "mlflow", "wandb")
_SEED = 42
STRATEGY_NAMES = get_args(ParallelName)


def carry_run(ledger: Ledger, path: Path) -> None:
    """The run's name, folder and seed."""
    out = ledger.peek("output_dir")
    name = ledger.take("run_name", "wandb_name", "mlflow_run_name") or (Path(str(out)).name if out else "") or path.stem
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", str(name)).strip("-._") or "imported"
    ledger.put("run.name", clean, "the run's or the folder's name" if clean == name else f"from {show_value(name)}")
    if out:
        ledger.move("run.dir")
    if ledger.move("run.seed") is None:
        ledger.put("run.seed", _SEED, "the tool's default")


def carry_objective(ledger: Ledger, tool: Tool) -> None:
    """What is minimised. Raises ConfigError for an objective that echelon does not have."""
    full = ledger.find("stage", "rl")
    wanted = ledger.take("stage", "rl")
    if wanted is None and tool == "hf" and ledger.find("beta", "ref_model_init_kwargs", "precompute_ref_log_probs"):
        wanted = "dpo"
    if wanted in (None, "sft", "pt", False):
        return
    if wanted not in ("dpo", "ipo"):
        raise ConfigError(
            f"{full}: {wanted} is a training that echelon does not have; it has causal_lm (pt, sft) and dpo (dpo, ipo)."
        )
    ledger.put("objective.name", "dpo", f"{full}: {wanted}" if full else "a DPO configuration")
    ledger.move("objective.beta", "pref_beta", "rl_beta", "dpo_beta", "beta")
    loss = ledger.find("pref_loss", "loss_type")
    value = ledger.take("pref_loss", "loss_type") or ("ipo" if wanted == "ipo" else "sigmoid")
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if value in ("orpo", "simpo", "kto"):
        raise ConfigError(
            f"{loss}: {value} is a training without a reference, which echelon does not have; it has dpo."
        )
    if value in ("sigmoid", "ipo"):
        ledger.put("objective.loss", value, f"{loss}: {value}" if loss else "the tool's default")
    else:
        ledger.lose(str(loss), "echelon has the losses sigmoid and ipo; sigmoid is written.")
    if ledger.peek("dpo_label_smoothing", "label_smoothing"):
        ledger.move("objective.label_smoothing", "dpo_label_smoothing", "label_smoothing")


def carry_parallel(ledger: Ledger, folder: Path) -> int | None:
    """How the work is spread: DeepSpeed's stage, FSDP's strategy, or degrees. Returns the number of devices that
    degrees make, where they are given."""
    shard, replicate = ledger.number("dp_shard_size"), ledger.number("dp_replicate_size")
    for name in ("tensor_parallel_size", "tp_size", "context_parallel_size", "cp_size", "sequence_parallel_degree",
                 "expert_parallel_size", "ep_size", "pp_size"):  # fmt: skip
        if (ledger.peek(name) or 1) == 1:
            if ledger.find(name):
                ledger.need_not(name, "one is no division.")
        else:
            ledger.lose(name, "echelon divides the batch alone; use dp_shard in its place.")
    if (full := ledger.find("deepspeed")) is not None and ledger.given[full]:
        _carry_deepspeed(ledger, full, folder)
    elif (ledger.peek("fsdp") or ledger.peek("fsdp_config")) and _carry_fsdp(ledger):
        pass
    elif shard or replicate:
        degrees = {key: size for key, size in (("dp_replicate", replicate), ("dp_shard", shard)) if size and size > 1}
        if degrees:
            ledger.put("parallel", degrees, "dp_shard_size, dp_replicate_size")
    sizes = [int(size) for size in (shard, replicate) if size and size > 0]
    return math.prod(sizes) if sizes else None


def _carry_deepspeed(ledger: Ledger, full: str, folder: Path) -> None:
    value = ledger.take(full)
    content = value if isinstance(value, dict) else _read_json(folder, str(value))
    zero = (content or {}).get("zero_optimization", {})
    stage = zero.get("stage")
    if content is None:
        match = re.search(r"z(?:ero)?[_-]?([0-3])", str(value).lower())
        stage = int(match[1]) if match else None
        ledger.differ(full, "the file was not found; its name tells the stage.")
    strategy = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}.get(stage)
    if strategy is None:
        ledger.lose(full, "no ZeRO stage was found in it; set parallel: zero1, zero2 or fsdp (ZeRO-3).")
        return
    offloads = any(_device(zero.get(key)) for key in ("offload_optimizer", "offload_param")) or "offload" in str(value)
    if offloads and strategy != "ddp":
        ledger.put("parallel", {"dp_shard": "auto", "cpu_offload": True}, f"{full}: ZeRO-{stage} with offload")
        ledger.differ(full, "parameters and optimizer state are both in host memory, and sharded as ZeRO-3 does.")
    else:
        ledger.put("parallel", strategy, f"{full}: ZeRO-{stage}")
    left = sorted(set(content or {}) - {"zero_optimization", "bf16", "fp16"})
    left = [key for key in left if (content or {})[key] not in ("auto", False, None)]
    if left:
        ledger.differ(full, f"of DeepSpeed's own settings, {', '.join(left)} could not be carried over.")


def _device(offload: Any) -> bool:
    return isinstance(offload, dict) and offload.get("device", "none") != "none"


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    for path in (folder / name, Path(name)):
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                return None
            return content if isinstance(content, dict) else None
    return None


def _carry_fsdp(ledger: Ledger) -> bool:
    words = [] if ledger.peek("fsdp") in (True, None) else ledger.words("fsdp", between=None)
    config = ledger.peek("fsdp_config")
    config = config if isinstance(config, dict) else {}
    meaningful = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    if not words and not (set(meaningful) - {"min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}):
        return False
    ledger.take("fsdp")
    if (name := ledger.find("fsdp_config")) is not None:
        ledger.expand(name, config)
    strategy = str(meaningful.get("sharding_strategy", "")).lower()
    strategy = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard"}.get(strategy, strategy)
    named = (read_value("parallel", word.removesuffix("_zero2")) for word in (strategy, *words))
    ours = next((name for name in named if name in STRATEGY_NAMES), None)
    if ours is None:
        ours = "zero2" if meaningful.get("reshard_after_forward") is False else "fsdp"
    offload = bool(meaningful.get("offload_params") or meaningful.get("cpu_offload")) or "offload" in words
    ledger.put("parallel", {"dp_shard": "auto", "cpu_offload": True} if offload else ours, "fsdp, fsdp_config")
    carried = (
        "sharding_strategy",
        "reshard_after_forward",
        "offload_params",
        "cpu_offload",
        "activation_checkpointing",
    )
    for key, value in config.items():
        word = key.removeprefix("fsdp_")
        if word in carried:
            ledger.take(f"{name}.{key}")
        elif value:
            ledger.need_not(f"{name}.{key}", "layers are wrapped, loaded and saved without being told how.")
    if meaningful.get("activation_checkpointing"):
        ledger.put("train.activation_checkpointing", "full", "fsdp_config")
    return True


def carry_operation(ledger: Ledger, tool: Tool, steps: int | None, epochs: float | None) -> None:
    """When the run is logged, evaluated and saved, and where its metrics go."""
    default = 1 if tool == "axolotl" else 500
    every = _steps(ledger, "logging_steps", ledger.number("logging_steps") or default, steps)
    ledger.put("train.log_every", every or 1, "logging_steps")
    _carry_evaluation(ledger, tool, steps, epochs)
    _carry_saving(ledger, steps, epochs)
    _carry_tracking(ledger, tool)


_UNKNOWN = "how many steps the run has is not known here; import with --samples N, or set the steps."


def _steps(ledger: Ledger, name: str, value: float | None, steps: int | None) -> int | None:
    """A number of steps, or a share of the run; None where the share is of an unknown run, which is told."""
    if not value or value >= 1:
        return int(value) if value else None
    if steps is None:
        ledger.lose(name, _UNKNOWN)
        return None
    return max(1, round(value * steps))


def _of_epoch(ledger: Ledger, name: str, times: float, steps: int | None, epochs: float | None) -> int | None:
    if steps is not None and epochs:
        return max(1, round(steps / epochs / times))
    ledger.lose(name, _UNKNOWN)
    return None


def _carry_evaluation(ledger: Ledger, tool: Tool, steps: int | None, epochs: float | None) -> None:
    strategy_name = ledger.find("eval_strategy", "evaluation_strategy")
    strategy = ledger.take("eval_strategy", "evaluation_strategy")
    holds_out = bool(ledger.values.get("data.validation") or ledger.values.get("data.validation_fraction"))
    every = ledger.number("eval_steps")
    silent = strategy is None and every is None and tool != "axolotl"
    if strategy == "no" or silent or not holds_out:
        ledger.put("train.eval_every", None, f"{strategy_name}: no" if strategy == "no" else "nothing is evaluated")
        if strategy not in (None, "no") and not holds_out:
            ledger.lose(str(strategy_name), "the file names no data to evaluate on; set data.validation.")
        return
    times = ledger.number("evals_per_epoch")
    if times or strategy == "epoch" or (every is None and strategy is None):
        name = "evals_per_epoch" if times else strategy_name or "eval_strategy"
        every = _of_epoch(ledger, name, times or 1, steps, epochs)
    if found := _steps(ledger, "eval_steps", every, steps):
        ledger.put("train.eval_every", found, "eval_steps" if not times else f"evals_per_epoch: {times}")


def _carry_saving(ledger: Ledger, steps: int | None, epochs: float | None) -> None:
    strategy_name, strategy = ledger.find("save_strategy"), ledger.take("save_strategy")
    times, every = ledger.number("saves_per_epoch"), ledger.number("save_steps")
    if strategy == "no":
        ledger.differ("save_strategy", "a run is always saved, at its end and every checkpoint.every_steps.")
    elif times or strategy == "epoch":
        name = "saves_per_epoch" if times else str(strategy_name)
        every = _of_epoch(ledger, name, times or 1, steps, epochs)
    elif strategy == "best":
        ledger.put("checkpoint.keep_best", True, "save_strategy: best")
    if found := _steps(ledger, "save_steps", every, steps):
        ledger.put("checkpoint.every_steps", found, "save_steps" if not times else f"saves_per_epoch: {times}")
    ledger.move("checkpoint.keep_last")
    if ledger.peek("load_best_model_at_end"):
        ledger.take("load_best_model_at_end")
        ledger.put("checkpoint.keep_best", True, "load_best_model_at_end: true")
        ledger.differ("load_best_model_at_end", "the best is kept; take it with --checkpoint best.")
        if (metric := ledger.find("metric_for_best_model")) and ledger.given[metric] in ("loss", "eval_loss"):
            ledger.take(metric)
    ledger.move("evaluate.early_stopping", "early_stopping_patience")


def _carry_tracking(ledger: Ledger, tool: Tool) -> None:
    full = ledger.find("report_to")
    value = ledger.peek("report_to")
    wanted = ledger.words("report_to")
    if "all" in wanted:
        ledger.differ(
            str(full), "trackers are named one by one, and none is written: track: [tensorboard, mlflow, wandb]."
        )
    unknown = [name for name in wanted if name not in (*_TRACKERS, "none", "all")]
    if unknown:
        ledger.lose(str(full), f"metrics go to {', '.join(_TRACKERS)}, not to {', '.join(unknown)}.")
    if ledger.peek("wandb_project"):
        ledger.move("wandb.project", "wandb_project")
        wanted += ["wandb"] if tool == "axolotl" else []
    if ledger.peek("wandb_entity"):
        ledger.move("wandb.entity", "wandb_entity")
    if ledger.peek("wandb_mode") in ("online", "offline"):
        ledger.move("wandb.mode", "wandb_mode")
    if ledger.peek("use_wandb"):
        ledger.take("use_wandb")
        wanted.append("wandb")
    for name, tracker in (("use_mlflow", "mlflow"), ("use_tensorboard", "tensorboard")):
        if ledger.peek(name):
            ledger.take(name)
            wanted.append(tracker)
    if ledger.peek("mlflow_tracking_uri"):
        ledger.move("mlflow.tracking_uri", "mlflow_tracking_uri")
        wanted.append("mlflow")
    if ledger.peek("mlflow_experiment_name"):
        ledger.move("mlflow.experiment", "mlflow_experiment_name")
    track = [name for name in _TRACKERS if name in wanted]
    if track:
        ledger.put("track", track, f"{full}: {show_value(value)}" if full else "the file's trackers")
