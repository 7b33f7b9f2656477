"""Import the run length, batch size, precision, optimizer and schedule of another tool's file."""

import math
from dataclasses import dataclass, replace
from typing import get_args

from echelon.foreign.importers.ledger import Defaults, Ledger, put_default
from echelon.foreign.importers.source_file import TABLE
from echelon.ground.errors import ConfigError
from echelon.recipe.aliases import read_value, spellings
from echelon.recipe.names import OPTIMIZERS
from echelon.recipe.training import OptimConfig
from echelon.recipe.yaml_text import show_value

_DIFFERENCES, _MORE_OPTIMIZERS, _OTHER_OPTIMIZERS = (
    TABLE["optimizers"][kind] for kind in ("differences", "more", "others")
)
_OPTIMIZERS = tuple(OPTIMIZERS)
_SCHEDULES: tuple[str, ...] = get_args(OptimConfig.model_fields["schedule"].annotation)
_DIVISIONS: tuple[str, ...] = tuple(TABLE["divisions"].split())


@dataclass(frozen=True)
class Amounts:
    """Numbers that the file does not contain: devices and, if known, training sequences."""

    devices: int | None = None
    samples: int | None = None


def carry_training(ledger: Ledger, tool: str, defaults: Defaults, amounts: Amounts) -> int | None:
    """Import the run length, batch size, precision and memory settings. Returns the steps, None if unknown."""
    batch = _carry_batch(ledger, tool, defaults, amounts)
    steps = _carry_length(ledger, defaults, batch, amounts.samples)
    if "train.precision" not in ledger.values:  # the dtype of an ms-swift file sets it
        _carry_precision(ledger, defaults)
    _explain_dtypes(ledger)
    if ledger.peek("torch_compile") not in (None, False):
        ledger.move("train.compile")
    else:
        ledger.put("train.compile", False, "not set in the file")
    _carry_recomputation(ledger, defaults)
    if ledger.peek("full_determinism"):
        ledger.move("train.deterministic")
    return steps


def _carry_batch(ledger: Ledger, tool: str, defaults: Defaults, amounts: Amounts) -> int:
    whole = ledger.number("global_batch_size") if tool == "llamafactory-v1" else None
    micro = ledger.number(*spellings("train.micro_batch_size")) or defaults.micro_batch_size
    ledger.put("train.micro_batch_size", micro, "as in the file; `auto` uses the largest that fits")
    if whole is not None:
        ledger.put("train.global_batch_size", whole, f"global_batch_size: {whole:g}")
        return int(whole)
    divided = math.prod(_degree(ledger, name) for name in _DIVISIONS)
    devices = max(1, (amounts.devices or 1) // divided)
    full, accumulation = _find_accumulation(ledger, tool, micro, devices)
    batch = int(micro * accumulation * devices)
    arithmetic = f"{micro:g} a device x {accumulation:g} accumulated x {devices} device{'s' if devices > 1 else ''}"
    if divided > 1 and amounts.devices is not None:
        arithmetic += f" ({amounts.devices}, of which {divided} see the same data)"
    ledger.put("train.global_batch_size", batch, arithmetic)
    if full is not None and accumulation > 1:
        ledger.differ(full, f"accumulation is derived from the global batch: {arithmetic} = {batch}.")
    if amounts.devices is None:
        ledger.remark(
            f"the file's batch size is {micro * accumulation:g} per GPU, and 1 GPU was assumed; for N GPUs, import "
            f"with --devices N or multiply train.global_batch_size={batch} by N."
        )
    return batch


def _find_accumulation(ledger: Ledger, tool: str, micro: float, devices: int) -> tuple[str | None, float]:
    """Return (the key that sets it, the number of microbatches per step on each device)."""
    full = ledger.find("gradient_accumulation_steps")
    accumulation = ledger.number("gradient_accumulation_steps") or 1
    if tool == "axolotl" and full is None and (name := ledger.find("batch_size")) is not None:
        return name, (ledger.number(name) or micro) // micro
    if tool == "ms-swift" and full is None:  # its default gives a step of about 16 samples
        return None, math.ceil(16 / micro / devices)
    return full, accumulation


def _degree(ledger: Ledger, name: str) -> int:
    """Return a parallel degree of the file, recorded or not; 1 if it sets none."""
    value = next((value for full, value in ledger.given.items() if full.rpartition(".")[2] == name), None)
    return max(1, int(value)) if isinstance(value, int) else 1


def _carry_length(ledger: Ledger, defaults: Defaults, batch: int, samples: int | None) -> int | None:
    steps = ledger.number("max_steps")
    epochs = ledger.find(*spellings("train.epochs"))
    value = ledger.number(*spellings("train.epochs"))
    if steps is not None and steps > 0:
        ledger.put("train.steps", steps, f"max_steps: {steps:g}")
        if epochs is not None:
            ledger.need_not(epochs, f"max_steps={steps:g} takes precedence in both tools.")
        return int(steps)
    if steps is not None:
        ledger.need_not("max_steps", "the number of epochs sets the length of the run.")
    value = value or defaults.epochs
    ledger.put("train.epochs", value, f"{epochs}: {value:g}" if epochs else f"the default of {defaults.name}")
    if epochs is not None:
        ledger.differ(
            epochs, "the last batch of the last epoch is filled with samples of the next one; nothing is dropped."
        )
    return None if samples is None else math.ceil(value * samples / batch)


def _carry_precision(ledger: Ledger, defaults: Defaults) -> None:
    full16 = next((name for name in ("fp16", "float16") if ledger.peek(name)), None)
    half = next((name for name in ("bf16", "bfloat16", "fp16") if ledger.find(name) is not None), None)
    if ledger.peek("fp8"):
        ledger.move("train.precision", "fp8")
        ledger.put("train.precision", "fp8", "fp8: true")
    elif (pure := ledger.find("pure_bf16")) is not None and ledger.take(pure):
        ledger.put("train.precision", "bf16", f"{pure}: true")
        ledger.differ(
            pure, "weights stay in fp32 with bf16 arithmetic; train.master_weights=bf16_kahan halves their memory."
        )
    elif full16 is not None and not ledger.peek("bf16", "bfloat16"):
        ledger.take("float16")
        ledger.take("fp16")
        ledger.put("train.precision", "fp16", f"{full16}: true")
    elif half in ("bf16", "bfloat16"):
        value = ledger.take(half)
        ours = "bf16" if value == "full" else read_value("bf16", value)
        ledger.put("train.precision", ours, f"{half}: {show_value(value)}")
        if value == "full":
            ledger.differ(half, "weights stay in fp32 with bf16 arithmetic.")
    else:
        # LLaMA-Factory stores frozen weights in the checkpoint's dtype and computes in it.
        adapts = defaults.name == "LLaMA-Factory" and "adapter.method" in ledger.values
        put_default(ledger, defaults, "train.precision", "auto" if adapts else defaults.precision)


def _explain_dtypes(ledger: Ledger) -> None:
    """Record the other keys that set the precision."""
    while (again := ledger.find("bf16", "bfloat16")) is not None:
        ledger.need_not(again, f"train.precision={ledger.values['train.precision']} sets it.")
    dtype = ledger.find("torch_dtype", "dtype")
    if dtype is not None and "16" in str(ledger.given[dtype]) and "adapter.method" not in ledger.values:
        ledger.differ(
            dtype, "weights stay in fp32 with 16-bit arithmetic; train.master_weights=bf16_kahan halves their memory."
        )
    elif dtype is not None:
        ledger.need_not(dtype, "frozen weights are stored in the compute dtype, others in fp32.")


def _carry_recomputation(ledger: Ledger, defaults: Defaults) -> None:
    full = ledger.find("gradient_checkpointing", "activation_checkpointing", "enable_activation_checkpointing")
    if "train.activation_checkpointing" in ledger.values:  # set by the FSDP settings
        ledger.take("gradient_checkpointing", "activation_checkpointing", "enable_activation_checkpointing")
        return
    if full is None:
        off = ledger.find("disable_gradient_checkpointing")
        recomputes = defaults.recomputes and not (off is not None and ledger.take(off))
        put_default(ledger, defaults, "train.activation_checkpointing", "full" if recomputes else "none")
        return
    value = ledger.take(full)
    ledger.put("train.activation_checkpointing", "full" if value else "none", f"{full}: {show_value(value)}")
    if value not in (True, False):
        ledger.differ(
            full, "activations are recomputed, not moved to host memory; train.activation_offloading=true does both."
        )


def carry_optimizer(ledger: Ledger, tool: str, defaults: Defaults, steps: int | None) -> None:
    """Import the optimizer, its hyperparameters and the schedule."""
    name = _carry_rule(ledger, tool)
    if tool == "llamafactory-v1" and name == "muon":  # its MuonOptimizer has other defaults than AdamW's
        defaults = replace(defaults, weight_decay=0.1, betas=(0.9, 0.95))
    full = ledger.find(*spellings("optim.learning_rate"))
    rate = ledger.number(*spellings("optim.learning_rate"))
    if full is not None:
        ledger.put("optim.learning_rate", rate, f"{full}: {rate}")
    elif defaults.learning_rate is None:
        raise ConfigError(f"the file has no learning_rate, and {defaults.name} has no default; add it.")
    else:
        rate = defaults.learning_rate
        put_default(ledger, defaults, "optim.learning_rate", rate)
    if ledger.move("optim.weight_decay", "optim_config.wd") is None:
        put_default(ledger, defaults, "optim.weight_decay", defaults.weight_decay)
    if name == "sgd" and ledger.values["optim.weight_decay"]:
        ledger.refuse(str(ledger.find("weight_decay") or "optimizer"), "echelon's SGD uses decoupled weight decay.")
    if defaults.decays_all:
        put_default(ledger, defaults, "optim.no_decay", [])
    _carry_moments(ledger, defaults, name)
    if ledger.peek("max_grad_norm") == 0:
        ledger.take("max_grad_norm")
        ledger.put("optim.max_grad_norm", None, "max_grad_norm: 0")
    elif ledger.move("optim.max_grad_norm") is None:
        put_default(ledger, defaults, "optim.max_grad_norm", defaults.max_grad_norm)
    ratio = ledger.find("loraplus_lr_ratio")
    if ratio is not None and (value := ledger.take(ratio)):
        ledger.put("optim.learning_rate_multipliers", {"*lora_B*": value}, f"{ratio}: {value}")
    _carry_schedule(ledger, tool, defaults, steps)


def _carry_moments(ledger: Ledger, defaults: Defaults, name: str) -> None:
    """Import betas, epsilon and momentum, if the optimizer has them."""
    _carry_betas(ledger, defaults, name)
    if name in ("adamw", "adamw_8bit", "muon") and ledger.move("optim.eps", "adamw_eps") is None:
        put_default(ledger, defaults, "optim.eps", defaults.eps)
    momentum = ledger.number("momentum")
    if name in _MOMENTUM:
        default, whose = _MOMENTUM[name]
        ledger.put("optim.momentum", momentum or default, whose if momentum is None else "momentum")


# Optimizers with momentum: the value if the file sets none, and the origin of that default.
_MOMENTUM = {"muon": (0.95, "the default of its Muon"), "sgd": (0.0, "torch.optim.SGD's default")}


def _carry_betas(ledger: Ledger, defaults: Defaults, name: str) -> None:
    pair = ledger.take("adamw_betas")
    betas = [ledger.number("adam_beta1"), ledger.number("adam_beta2")]
    if name in ("adamw", "adamw_8bit", "lion", "muon"):
        chosen = [default if value is None else value for value, default in zip(betas, defaults.betas, strict=True)]
        said = pair is not None or any(value is not None for value in betas)
        ledger.put("optim.betas", pair or chosen, "as in the file" if said else f"the default of {defaults.name}")


def _carry_rule(ledger: Ledger, tool: str) -> str:
    full = ledger.find("optim_config.name") or ledger.find("optimizer", "optim")
    if ledger.peek("use_muon"):
        ledger.take("use_muon")
        ledger.put("optim.name", "muon", "use_muon: true")
        if full is not None:
            ledger.need_not(full, "use_muon takes precedence.")
        return "muon"
    if full is None:
        ledger.put("optim.name", "adamw", "the tool's default")
        return "adamw"
    value = str(ledger.take(full))
    plain = value.removeprefix("paged_")
    ours = _MORE_OPTIMIZERS.get(plain, read_value("optim.name", plain))
    is_other = plain in _OTHER_OPTIMIZERS and not (tool == "llamafactory-v1" and plain == "muon")
    if is_other or ours not in _OPTIMIZERS:
        names = ", ".join(name for name in _OPTIMIZERS if name != "adafactor")
        ledger.refuse(full, _OTHER_OPTIMIZERS.get(plain, f"the supported optimizers are {names}."))
        return "adamw"
    ledger.put("optim.name", ours, f"{full}: {value}")
    difference = _DIFFERENCES.get(plain, "")
    if plain != value or difference:
        ledger.differ(
            full, f"{'The state is not paged to host memory. ' if plain != value else ''}{difference}".strip()
        )
    return str(ours)


def _carry_schedule(ledger: Ledger, tool: str, defaults: Defaults, steps: int | None) -> None:
    full = ledger.find("lr_scheduler", "lr_scheduler_type")
    value = str(ledger.take(full)) if full is not None else defaults.schedule
    ours = read_value("optim.schedule", value.removesuffix("_with_restarts"))
    extra = ledger.peek("lr_scheduler_kwargs")
    if isinstance(extra, dict):
        ledger.expand(str(ledger.find("lr_scheduler_kwargs")), extra)
    if ours not in _SCHEDULES:
        ledger.refuse(str(full), f"the supported schedules are {', '.join(_SCHEDULES)}.")
        return
    warmup = _carry_warmup(ledger, tool, defaults, steps, value)
    if ours == "wsd" and ledger.take("decay_type") != "1-sqrt":
        ledger.refuse(str(full), "echelon decays with 1 - sqrt; set decay_type: 1-sqrt in lr_scheduler_kwargs.")
    if ours == "inverse_sqrt" and not warmup:
        ledger.refuse(str(full), "echelon's decay depends on the length of the warm-up; add warmup_steps.")
    if (cycles := ledger.number("num_cycles")) is not None and cycles not in (1, 0.5):
        ledger.refuse("num_cycles", "restarts are not supported.")
    ledger.put("optim.schedule", ours, f"{full}: {value}" if full else f"the default of {defaults.name}")
    if ours != "constant":
        _carry_floor(ledger, ours, steps)


def _carry_floor(ledger: Ledger, schedule: str, steps: int | None) -> None:
    rate = ledger.values["optim.learning_rate"]
    floor = ledger.number("cosine_min_lr_ratio", "min_lr_rate", "min_lr_ratio")
    least = ledger.number("min_lr", "lr_end")
    if floor is None and least is None and schedule == "polynomial":
        least = 1e-7  # transformers' own lr_end
    if floor is None:
        floor = least / rate if least and rate else 0.0
    ledger.put("optim.min_learning_rate_fraction", float(f"{floor:.6g}"), "the final value of the tool's schedule")
    if schedule == "polynomial":
        ledger.put("optim.polynomial_power", ledger.number("power") or 1.0, "power of lr_scheduler_kwargs")
    decay = ledger.find("num_decay_steps")
    if schedule != "wsd" or decay is None:
        return
    if steps is None:
        ledger.refuse(
            decay, "echelon sets it as a fraction of the run, whose number of steps is not known; add max_steps."
        )
    else:
        ledger.put("optim.decay_fraction", round((ledger.number(decay) or 0) / steps, 6), f"{decay} of {steps}")


def _carry_warmup(ledger: Ledger, tool: str, defaults: Defaults, steps: int | None, schedule: str) -> bool:
    """Import the warm-up, in steps or as a fraction of the run. Returns whether there is one."""
    count, ratio = ledger.find("warmup_steps"), ledger.find("warmup_ratio")
    value, share = ledger.number("warmup_steps"), ledger.number("warmup_ratio")
    if schedule == "constant":
        for name in filter(None, (count, ratio)):
            if ledger.given[name]:
                ledger.need_not(name, "the schedule `constant` has no warm-up.")
        return False
    if value and value >= 1:
        ledger.put("optim.warmup", int(value), f"{count}: {value:g}")
        if ratio is not None:
            ledger.need_not(ratio, f"warmup_steps={value:g} takes precedence in both tools.")
        return True
    if value or share:
        fraction = value or share
        ledger.put("optim.warmup", fraction, f"{count if value else ratio}: {fraction:g}")
        return True
    return value is None and share is None and _put_default_warmup(ledger, tool, defaults, steps)


def _put_default_warmup(ledger: Ledger, tool: str, defaults: Defaults, steps: int | None) -> bool:
    """Put the tool's default warm-up, if the file sets none. Returns whether there is one."""
    if not (share := defaults.warmup):
        return False
    if tool == "axolotl" and steps is not None:
        ledger.put("optim.warmup", min(int(share * steps), 100), f"the default of Axolotl, of {steps} steps")
        return True
    ledger.put("optim.warmup", share, f"the default of {defaults.name}")
    if tool == "axolotl":
        ledger.remark("Axolotl's default warm-up, 3 % of the steps, is limited to 100 steps; echelon's is not.")
    return True
