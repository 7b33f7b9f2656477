"""Import the sharding, checkpoints, evaluation, logging and run name of another tool's file."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from echelon.foreign.importers.ledger import Defaults, Ledger, put_default
from echelon.foreign.importers.source_file import PLUGINS, TABLE, find_beside
from echelon.ground.stored import read_json
from echelon.recipe.aliases import read_value
from echelon.recipe.training import ParallelName
from echelon.recipe.yaml_text import show_value

_TRACKERS = ("tensorboard", "mlflow", "wandb")
STRATEGY_NAMES = get_args(ParallelName)


def carry_run(ledger: Ledger, defaults: Defaults, path: Path) -> None:
    """Import the run's name, folder and seed."""
    out = ledger.peek("output_dir")
    name = ledger.take("run_name", "wandb_name", "mlflow_run_name") or (Path(str(out)).name if out else "") or path.stem
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", str(name)).strip("-._") or "imported"
    why = "the name of the run or of the folder" if clean == name else f"from {show_value(name)}"
    ledger.put("run.name", clean, why)
    if out:
        ledger.move("run.dir")
    if ledger.move("run.seed") is None:
        put_default(ledger, defaults, "run.seed", defaults.seed)


def refuse_plugins(ledger: Ledger) -> None:
    """Record Axolotl's `plugins`, refusing those that may change the training."""
    if ledger.find("plugins") is None:
        return
    others = [name for name in ledger.words("plugins") if name not in PLUGINS]
    if others:
        ledger.refuse("plugins", f"{', '.join(others)} may change the training, and echelon does not support it.")
    else:
        ledger.need_not(
            "plugins", "these plugins do not change the training: other implementations, trackers or evaluations."
        )


def carry_parallel(ledger: Ledger, folder: Path) -> int | None:
    """Import the parallel strategy: DeepSpeed's stage, FSDP's strategy, or data-parallel degrees.

    Returns the product of the degrees, the number of devices; None if the file has none.
    """
    _carry_divisions(ledger)
    degrees = {"dp_replicate": ledger.number("dp_replicate_size"), "dp_shard": ledger.number("dp_shard_size")}
    sizes = {key: int(size) for key, size in degrees.items() if size and size > 0}
    if (full := ledger.find("deepspeed")) is not None and ledger.given[full]:
        _carry_deepspeed(ledger, full, folder)
    elif (ledger.peek("fsdp") or ledger.peek("fsdp_config")) and _carry_fsdp(ledger):
        pass
    elif divided := {key: size for key, size in sizes.items() if size > 1}:
        ledger.put("parallel", divided, "dp_shard_size, dp_replicate_size")
    return math.prod(sizes.values()) if sizes else None


_DIVISIONS: tuple[str, ...] = (*TABLE["divisions"].split(), *TABLE["expert_divisions"].split())


def _carry_divisions(ledger: Ledger) -> None:
    """Record the parallel degrees that are not imported."""
    for name in _DIVISIONS:
        if (ledger.peek(name) or 1) != 1:
            ledger.lose(name, "echelon chooses the parallel strategy; the result is the same.")
        elif ledger.find(name):
            ledger.need_not(name, "a degree of one has no effect.")


def _carry_deepspeed(ledger: Ledger, full: str, folder: Path) -> None:
    value = ledger.take(full)
    settings = value if isinstance(value, dict) else _read_json(folder, str(value))
    content = settings or {}
    zero = content.get("zero_optimization", {})
    stage = zero.get("stage")
    if settings is None:
        match = re.search(r"z(?:ero)?[_-]?([0-3])", str(value).lower())
        stage = int(match[1]) if match else None
        ledger.differ(full, "the file was not found; the stage is taken from its name.")
    if (strategy := {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}.get(stage)) is None:
        ledger.lose(full, "no ZeRO stage was found; set parallel: zero1, zero2 or fsdp (ZeRO-3).")
        return
    offloads = any(_device(zero.get(key)) for key in ("offload_optimizer", "offload_param")) or "offload" in str(value)
    if offloads and strategy != "ddp":
        ledger.put("parallel", {"dp_shard": "auto", "cpu_offload": True}, f"{full}: ZeRO-{stage} with offload")
        ledger.differ(full, "parameters and optimizer state are both in host memory, sharded as in ZeRO-3.")
    else:
        ledger.put("parallel", strategy, f"{full}: ZeRO-{stage}")
    _check_deepspeed(ledger, full, content)


def _device(offload: Any) -> bool:
    return isinstance(offload, dict) and offload.get("device", "none") != "none"


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    path = find_beside(folder, name)
    if path is None or not path.is_file():
        return None
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _check_deepspeed(ledger: Ledger, full: str, content: dict[str, Any]) -> None:
    """Refuse an optimizer or schedule in the DeepSpeed file that overrides the Trainer's; report other settings."""
    for part, same in (("optimizer", ("AdamW", "Adam")), ("scheduler", ())):
        if isinstance(content.get(part), dict) and content[part].get("type") not in same:
            ledger.refuse(
                full,
                f"its {part}, {content[part].get('type')}, overrides this file's; remove it from the DeepSpeed file.",
            )
    imported = {"zero_optimization", "bf16", "fp16", "optimizer", "scheduler"}
    left = sorted(key for key in content.keys() - imported if content[key] not in ("auto", False, None))
    if left:
        ledger.differ(full, f"the DeepSpeed settings {', '.join(left)} could not be imported.")


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
    offload = bool(meaningful.get("offload_params") or meaningful.get("cpu_offload")) or "offload" in words
    ours = {"dp_shard": "auto", "cpu_offload": True} if offload else _find_strategy(meaningful, words)
    ledger.put("parallel", ours, "fsdp, fsdp_config")
    for key, value in config.items():
        if key.removeprefix("fsdp_") in _CARRIED_OF_FSDP:
            ledger.take(f"{name}.{key}")
        elif value:
            ledger.need_not(f"{name}.{key}", "echelon wraps, loads and saves layers without this setting.")
    if meaningful.get("activation_checkpointing"):
        ledger.put("train.activation_checkpointing", "full", "fsdp_config")
    return True


_CARRIED_OF_FSDP = (
    "sharding_strategy", "reshard_after_forward", "offload_params", "cpu_offload", "activation_checkpointing",
)  # fmt: skip


def _find_strategy(config: Mapping[str, Any], words: Sequence[str]) -> str:
    """Find the name of the FSDP strategy in `fsdp_config` or in the words of `fsdp`."""
    strategy = str(config.get("sharding_strategy", "")).lower()
    strategy = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard"}.get(strategy, strategy)
    named = (read_value("parallel", word.removesuffix("_zero2")) for word in (strategy, *words))
    default = "zero2" if config.get("reshard_after_forward") is False else "fsdp"
    return next((name for name in named if name in STRATEGY_NAMES), default)


def carry_operation(ledger: Ledger, defaults: Defaults, steps: int | None) -> None:
    """Import logging, evaluation, checkpoints and trackers."""
    every, full = ledger.number("logging_steps"), "logging_steps"
    if every and every < 1:
        every = None if steps is None else max(1, round(every * steps))
        if every is None:
            ledger.lose(full, "the number of steps is not known at import; every step is logged.")
    why = full if full in {name.rpartition(".")[2] for name in ledger.given} else f"the default of {defaults.name}"
    ledger.put("train.log_every", int(every or defaults.log_every or 1), why)
    _carry_evaluation(ledger, defaults, steps)
    _carry_saving(ledger, defaults, steps)
    _carry_tracking(ledger)


def _put_rhythm(ledger: Ledger, key: str, value: float, name: str, steps: int | None) -> None:
    """Import an interval in steps or, below 1, a fraction of the run.

    A fraction becomes steps if the number of steps is known, else passes over the data.
    """
    epochs = ledger.values.get("train.epochs")
    if value >= 1:
        ledger.put(key, int(value), f"{name}: {value:g}")
    elif steps is not None:
        ledger.put(key, max(1, math.ceil(value * steps)), f"{name}: {value:g} of {steps} steps")
    elif epochs:
        ledger.put(key, f"1/{1 / (value * epochs):.6g} epochs", f"{name}: {value:g} of {epochs:g} epochs")


def _carry_evaluation(ledger: Ledger, defaults: Defaults, steps: int | None) -> None:
    named = ledger.find("eval_strategy", "evaluation_strategy")
    strategy = ledger.take("eval_strategy", "evaluation_strategy")
    holds_out = bool(ledger.values.get("data.validation") or ledger.values.get("data.validation_fraction"))
    every, times = ledger.number("eval_steps"), ledger.number("evals_per_epoch")
    if strategy is None:
        asked, every = _find_default_evaluation(ledger, defaults, holds_out, every, times)
    else:
        asked = strategy
    if strategy == "no" or not asked:
        ledger.put("train.eval_every", None, f"{named}: no" if strategy == "no" else "nothing is evaluated")
    elif not holds_out:
        ledger.put("train.eval_every", None, "nothing is evaluated")
        if named is not None:
            ledger.lose(named, "the file has no evaluation data; set data.validation.")
    elif times or strategy == "epoch":
        why = f"evals_per_epoch: {times:g}" if times else f"{named}: epoch"
        ledger.put("train.eval_every", f"1/{times or 1} epochs", why)
    else:
        _put_rhythm(ledger, "train.eval_every", every or ledger.values["train.log_every"], "eval_steps", steps)


def _find_default_evaluation(
    ledger: Ledger, defaults: Defaults, holds_out: bool, every: float | None, times: float | None
) -> tuple[Any, float | None]:
    """Return whether a file without a strategy evaluates, and every how many steps.

    In Axolotl eval_steps alone enables evaluation, in ms-swift held-out data alone, then with every save.
    """
    if defaults.name == "ms-swift" and holds_out:
        return "steps", every or ledger.peek("save_steps") or 500
    return (every or times if defaults.name == "Axolotl" else None), every


def _carry_saving(ledger: Ledger, defaults: Defaults, steps: int | None) -> None:
    named, strategy = ledger.find("save_strategy"), ledger.take("save_strategy")
    times, every = ledger.number("saves_per_epoch"), ledger.number("save_steps")
    epochs = ledger.number("save_epochs")
    if strategy == "no":
        ledger.differ(str(named), "echelon always saves checkpoints: every checkpoint.every steps and at the end.")
    elif strategy == "best":
        ledger.put("checkpoint.keep_best", True, "save_strategy: best")
    elif times or epochs or strategy == "epoch":
        why = f"saves_per_epoch: {times:g}" if times else f"save_epochs: {epochs:g}" if epochs else f"{named}: epoch"
        ledger.put("checkpoint.every", f"1/{times or 1 / (epochs or 1):.6g} epochs", why)
    elif every:
        _put_rhythm(ledger, "checkpoint.every", every, "save_steps", steps)
    elif defaults.saves == "epoch":
        put_default(ledger, defaults, "checkpoint.every", "1 epochs")
    elif defaults.saves is not None:
        put_default(ledger, defaults, "checkpoint.every", defaults.saves)
    _carry_best(ledger, defaults)


def _carry_best(ledger: Ledger, defaults: Defaults) -> None:
    """Import how many checkpoints are kept, the choice of the best one, and early stopping."""
    if ledger.move("checkpoint.keep_last") is None and defaults.keep_last is not None:
        put_default(ledger, defaults, "checkpoint.keep_last", defaults.keep_last)
    if ledger.peek("load_best_model_at_end"):
        ledger.take("load_best_model_at_end")
        ledger.put("checkpoint.keep_best", True, "load_best_model_at_end: true")
        ledger.differ(
            "load_best_model_at_end",
            "the best checkpoint is kept but not loaded at the end; select it with --checkpoint best.",
        )
    metric = ledger.find("metric_for_best_model")
    if metric is not None and ledger.given[metric] in ("loss", "eval_loss"):
        ledger.need_not(metric, "the best checkpoint is the one with the lowest evaluation loss.")
    elif metric is not None and ledger.find("early_stopping_patience", "early_stopping_steps"):
        ledger.refuse(metric, "early stopping uses only the evaluation loss.")
    ledger.move("evaluate.early_stopping", "early_stopping_patience", "early_stopping_steps")


def _carry_variables(ledger: Ledger) -> None:
    names = [
        name for name in ("wandb_project", "wandb_entity", "wandb_mode") if ledger.peek(name) not in ("", "disabled")
    ]
    if env := {name.upper(): value for name in names if (value := ledger.take(name)) is not None}:
        ledger.put("launch.env", env, "as in the file")


def _carry_tracking(ledger: Ledger) -> None:
    full = ledger.find("report_to")
    value = ledger.peek("report_to")
    trackers = ledger.words("report_to")
    if "all" in trackers:
        ledger.differ(str(full), "trackers must be listed; none is set: track: [tensorboard, mlflow, wandb].")
    unknown = [name for name in trackers if name not in (*_TRACKERS, "none", "all")]
    if unknown:
        ledger.lose(str(full), f"metrics go to {', '.join(_TRACKERS)}, not to {', '.join(unknown)}.")
    for name, (key, tracker) in TABLE["trackers"].items():
        if ledger.peek(name):
            if key is None:
                ledger.take(name)
            else:
                ledger.move(key, name)
            trackers += [] if tracker is None else [tracker]
    trackers += ["wandb"] if ledger.peek("wandb_project") else []
    _carry_variables(ledger)
    track = [name for name in _TRACKERS if name in trackers]
    if track:
        ledger.put("track", track, f"{full}: {show_value(value)}" if full else "the file's trackers")
