"""Length, batch, precision, optimizer and schedule of another tool's file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from echelon.recipe.aliases import read_value, spellings
from echelon.recipe.foreign.ledger import Ledger
from echelon.recipe.foreign.reading import Tool
from echelon.recipe.training import OptimConfig
from echelon.recipe.yaml_text import show_value

# What is not quite the same under the same name.
_DIFFERENCES: Mapping[str, str] = {
    "adamw_bnb_8bit": "Its blocks of 8-bit moments are torchao's, not bitsandbytes'.",
    "adamw_8bit": "Its blocks of 8-bit moments are torchao's, not bitsandbytes'.",
    "lion_8bit": "Its moment is kept in 32 bits.",
    "adafactor": "Its learning rate is relative to each parameter's size.",
    "cosine_with_restarts": "There are no restarts.",
}
_OPTIMIZERS: tuple[str, ...] = get_args(OptimConfig.model_fields["name"].annotation)
_SCHEDULES: tuple[str, ...] = get_args(OptimConfig.model_fields["schedule"].annotation)
_BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Amounts:
    """What the file leaves to the machine and to the data: devices, and, where known, training sequences."""

    devices: int | None = None
    samples: int | None = None


def carry_training(ledger: Ledger, tool: Tool, amounts: Amounts) -> int | None:
    """How long, how much at a time, in which precision; returns the number of steps where it is known."""
    batch = _carry_batch(ledger, tool, amounts)
    steps = _carry_length(ledger, tool, batch, amounts.samples)
    _carry_precision(ledger, tool)
    if ledger.peek("torch_compile") not in (None, False):
        ledger.move("train.compile")
    else:
        ledger.put("train.compile", False, "not asked for")
    _carry_recomputation(ledger, tool)
    if ledger.peek("full_determinism"):
        ledger.move("train.deterministic")
    return steps


def _carry_batch(ledger: Ledger, tool: Tool, amounts: Amounts) -> int:
    micro = ledger.number(*spellings("train.micro_batch_size"))
    if micro is None:
        micro = 1 if tool == "axolotl" else 8
    full = ledger.find("gradient_accumulation_steps")
    accumulation = ledger.number("gradient_accumulation_steps") or 1
    devices = amounts.devices or 1
    batch = int(micro * accumulation * devices)
    arithmetic = f"{micro} a device x {accumulation} accumulated x {devices} device{'s' if devices > 1 else ''}"
    ledger.put("train.global_batch_size", batch, arithmetic)
    ledger.put("train.micro_batch_size", micro, "as in the file; `auto` takes what fits")
    if full is not None and accumulation > 1:
        ledger.differ(full, f"accumulation is derived from the global batch: {arithmetic} = {batch}.")
    if amounts.devices is None:
        ledger.remark(
            f"the file's batch is {micro * accumulation} for each GPU, and 1 GPU was assumed: for N of them import "
            f"with --devices N, or multiply train.global_batch_size={batch} by N."
        )
    return batch


def _carry_length(ledger: Ledger, tool: Tool, batch: int, samples: int | None) -> int | None:
    steps = ledger.number("max_steps")
    epochs = ledger.find(*spellings("train.epochs"))
    if steps is not None and steps > 0:
        ledger.put("train.steps", steps, f"max_steps: {steps:g}")
        if epochs is not None:
            ledger.need_not(epochs, f"max_steps={steps} goes first, there as here.")
        return int(steps)
    if steps is not None:
        ledger.need_not("max_steps", "the run's length is that of its epochs.")
    value = ledger.number(*spellings("train.epochs")) or (1 if tool == "axolotl" else 3)
    ledger.put("train.epochs", value, f"{epochs}: {value}" if epochs else f"the default of {tool}")
    if epochs is not None:
        ledger.differ(epochs, "the last batch of the last epoch is filled from the next one, and nothing is dropped.")
    return None if samples is None else math.ceil(value * samples / batch)


def _carry_precision(ledger: Ledger, tool: Tool) -> None:
    full16, half = ledger.find("fp16", "float16"), ledger.find("bf16", "bfloat16")
    if (pure := ledger.find("pure_bf16")) is not None and ledger.take(pure):
        ledger.put("train.precision", "bf16", f"{pure}: true")
        ledger.differ(
            pure, "weights stay fp32 beside bf16 arithmetic; train.master_weights=bf16_kahan saves their half."
        )
    elif full16 is not None and ledger.given[full16] is True:
        ledger.take(full16)
        ledger.put("train.precision", "fp16", f"{full16}: true")
    elif half is not None:
        value = ledger.take(half)
        ours = "bf16" if value == "full" else read_value("bf16", value)
        ledger.put("train.precision", ours, f"{half}: {show_value(value)}")
        if value == "full":
            ledger.differ(half, "weights stay fp32 beside bf16 arithmetic.")
    elif tool == "axolotl" or _is_trl(ledger):
        ledger.put("train.precision", "auto", f"the default of {'axolotl' if tool == 'axolotl' else 'TRL'}")
    else:
        ledger.put("train.precision", "fp32", "neither bf16 nor fp16")


def _is_trl(ledger: Ledger) -> bool:
    """Whether a file of the HF family is of TRL, whose defaults are others than those of TrainingArguments."""
    signs = {"max_length", "packing", "dataset_text_field", "assistant_only_loss", "completion_only_loss", "beta",
             "use_peft", "dataset_num_proc", "eos_token", "loss_type"}  # fmt: skip
    return bool(signs & {name.rpartition(".")[2] for name in ledger.given})


def _carry_recomputation(ledger: Ledger, tool: Tool) -> None:
    full = ledger.find("gradient_checkpointing", "activation_checkpointing")
    if "train.activation_checkpointing" in ledger.values:  # FSDP's settings said so
        ledger.take("gradient_checkpointing", "activation_checkpointing")
        return
    if full is None:
        if (off := ledger.find("disable_gradient_checkpointing")) is not None and ledger.take(off):
            return
        if tool == "llamafactory" or (tool == "hf" and _is_trl(ledger)):
            ledger.put("train.activation_checkpointing", "full", "on by default there")
        return
    value = ledger.take(full)
    ledger.put("train.activation_checkpointing", "full" if value else "none", f"{full}: {show_value(value)}")
    if value not in (True, False):
        ledger.differ(full, "activations are recomputed and not moved to host memory.")


def carry_optimizer(ledger: Ledger, tool: Tool, steps: int | None) -> None:
    """The optimizer, its numbers, and the schedule; a share of the run becomes steps where `steps` is known."""
    name = _carry_rule(ledger)
    learning_rate = ledger.find(*spellings("optim.learning_rate"))
    rate = ledger.number(*spellings("optim.learning_rate"))
    if learning_rate is not None:
        ledger.put("optim.learning_rate", rate, f"{learning_rate}: {rate}")
    else:
        rate = 1e-6 if _is_dpo(ledger) and tool == "hf" else 2e-5 if tool == "hf" and _is_trl(ledger) else 5e-5
        ledger.put("optim.learning_rate", rate, "the tool's default")
    if ledger.move("optim.weight_decay") is None:
        ledger.put("optim.weight_decay", 0.0, "the tool's default")
    betas = [ledger.take("adam_beta1"), ledger.take("adam_beta2")]
    if name in ("adamw", "adamw_8bit", "lion", "muon"):
        chosen = [default if value is None else value for value, default in zip(betas, _BETAS, strict=True)]
        ledger.put("optim.betas", chosen, "adam_beta1, adam_beta2" if any(betas) else "the tool's default")
    ledger.move("optim.eps")
    if ledger.peek("max_grad_norm") == 0:
        ledger.take("max_grad_norm")
        ledger.put("optim.max_grad_norm", None, "max_grad_norm: 0")
    else:
        ledger.move("optim.max_grad_norm")
    ratio = ledger.find("loraplus_lr_ratio")
    if ratio is not None and (value := ledger.take(ratio)):
        ledger.put("optim.learning_rate_multipliers", {"*lora_B*": value}, f"{ratio}: {value}")
    _carry_schedule(ledger, tool, steps)


def _is_dpo(ledger: Ledger) -> bool:
    return ledger.values.get("objective.name") == "dpo"


def _carry_rule(ledger: Ledger) -> str:
    full = ledger.find("optimizer", "optim")
    if full is None:
        return "adamw"
    value = str(ledger.take(full))
    paged = value.startswith("paged_")
    ours = read_value("optim.name", value.removeprefix("paged_"))
    difference = _DIFFERENCES.get(value.removeprefix("paged_"), "")
    if ours not in _OPTIMIZERS:
        ledger.put("optim.name", "adamw", f"{full}: {value}")
        ledger.lose(full, f"echelon has {', '.join(_OPTIMIZERS)}; adamw is written.")
        return "adamw"
    ledger.put("optim.name", ours, f"{full}: {value}")
    if paged or difference:
        ledger.differ(full, f"{'Its state is not paged to host memory. ' if paged else ''}{difference}".strip())
    return str(ours)


def _carry_schedule(ledger: Ledger, tool: Tool, steps: int | None) -> None:
    full = ledger.find("lr_scheduler", "lr_scheduler_type")
    value = str(ledger.take(full)) if full is not None else ("cosine" if tool == "axolotl" else "linear")
    ours = read_value("optim.schedule", value.removesuffix("_with_restarts"))
    difference = _DIFFERENCES.get(value, "")
    if ours not in _SCHEDULES:
        assert full is not None
        ledger.lose(full, f"echelon has {', '.join(_SCHEDULES)}; cosine is written.")
        ours = "cosine"
    elif difference and full is not None:
        ledger.differ(full, difference)
    extra = ledger.peek("lr_scheduler_kwargs")
    if isinstance(extra, dict):
        name = ledger.find("lr_scheduler_kwargs")
        assert name is not None
        ledger.expand(name, extra)
    warmup = _carry_warmup(ledger, tool, steps, value)
    if ours == "inverse_sqrt" and not warmup:
        ledger.lose(full or "lr_scheduler_type", "inverse_sqrt needs optim.warmup_steps; cosine is written.")
        ours = "cosine"
    ledger.put("optim.schedule", ours, f"{full}: {value}" if full else f"the default of {tool}")
    if ours != "constant":
        _carry_floor(ledger, ours, steps)


def _carry_floor(ledger: Ledger, schedule: str, steps: int | None) -> None:
    rate = ledger.values["optim.learning_rate"]
    floor = ledger.number("cosine_min_lr_ratio", "min_lr_rate", "min_lr_ratio")
    least = ledger.number("min_lr", "lr_end")
    if floor is None:
        floor = least / rate if least and rate else 0.0
    ledger.put("optim.min_learning_rate_fraction", float(f"{floor:.6g}"), "where the tool's schedule ends")
    if schedule == "polynomial":
        ledger.put("optim.polynomial_power", ledger.number("power") or 1.0, "power of lr_scheduler_kwargs")
    if schedule == "wsd" and (decay := ledger.number("num_decay_steps")):
        if steps is None:
            ledger.lose("num_decay_steps", "how many steps the run has is not known here; set optim.decay_fraction.")
        else:
            ledger.put("optim.decay_fraction", round(decay / steps, 6), f"num_decay_steps: {decay} of {steps}")


def _carry_warmup(ledger: Ledger, tool: Tool, steps: int | None, schedule: str) -> int:
    count, ratio = ledger.find("warmup_steps"), ledger.find("warmup_ratio")
    value = ledger.number("warmup_steps")
    if schedule == "constant":
        if count is not None and value:
            ledger.need_not(count, "the schedule `constant` of transformers does not warm up.")
        return 0
    if value and value >= 1:
        ledger.put("optim.warmup_steps", int(value), f"warmup_steps: {value}")
        if ratio is not None:
            ledger.need_not(ratio, f"warmup_steps={value} goes first, there as here.")
        return int(value)
    name = count if value else ratio
    share = value or ledger.number("warmup_ratio")
    if share is None and tool == "axolotl" and value is None:
        share, name = 0.03, "warmup_ratio"
    if not share:
        return 0
    if steps is None:
        text = (
            f"{share:g} of the steps are warm-up there{'' if name in ledger.given else ' by default'}, and how many "
            f"steps the epochs have is not known here; import with --samples N, the number of training sequences, or "
            f"set optim.warmup_steps."
        )
        ledger.lose(name or "warmup_ratio", text)
        return 0
    warmup = math.ceil(share * steps)
    ledger.put("optim.warmup_steps", warmup, f"{name}: {share:g} of {steps} steps")
    return warmup
