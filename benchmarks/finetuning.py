"""LoRA and QLoRA compared with PEFT and HF Trainer: tokens per second and peak memory for the same work.

    python benchmarks/finetuning.py [ROW ...] [--pairs 2] [--blocks 6] [--steps 3]

Each side is a separate process, on a GPU if there is one. Both processes of a pair run at the same time and take turns:
one runs a block of steps while the other waits, so that a drift of the machine's speed affects both. The peer is
unmodified: `transformers.Trainer`, its own collator, and `peft.get_peft_model`, after
`prepare_model_for_kbit_training` for QLoRA, as in PEFT's documentation. It reads token rows, examples and base weights
from files and does not import echelon.

*tokens/s* is computed from the median step of a block; *tokens/CPU s* from the CPU time of a block, which other work on
the same cores hardly affects (on a GPU it measures the work of the host). *memory* is, on a CPU, the peak resident
memory minus the memory after the imports, which is printed; on a GPU, the peak of allocated bytes. *whole run* is the
peak from the imports to the end, including loading; for *steps* the peak is reset after the first block.
"""

import argparse
import datetime
import importlib
import inspect
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

SEED = 5
RANK, ALPHA = 16, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RATE = 1e-4
DOCUMENTED = (
    "argparse asyncio calendar collections concurrent.futures configparser csv datetime difflib doctest email.message "
    "functools inspect ipaddress json logging mailbox os pathlib pickletools random shutil smtplib statistics "
    "subprocess tarfile tempfile textwrap typing unittest.mock zipfile"
)


@dataclass(frozen=True)
class Row:
    """One comparison: both sides get these settings."""

    adapter: str
    precision: str = "bf16"
    checkpointing: bool = False
    examples: str = ""  # if examples have uneven lengths: how the peer forms its padded batches


ROWS = {
    "lora-fp32": Row("lora", "fp32"),
    "lora-bf16": Row("lora"),
    "lora-bf16-checkpointed": Row("lora", checkpointing=True),
    "qlora-bf16": Row("qlora"),
    "qlora-bf16-checkpointed": Row("qlora", checkpointing=True),
    "lora-bf16-examples": Row("lora", examples="random"),
    "lora-bf16-examples-grouped": Row("lora", examples="group_by_length"),
}


@dataclass(frozen=True)
class Size:
    """The size of a Llama and of a step's batch."""

    hidden: int
    layers: int
    heads: int
    inner: int
    vocab: int
    sequence_len: int
    micro_batch: int

    def config(self):
        return {
            "hidden_size": self.hidden, "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads // 2, "vocab_size": self.vocab,
            "max_position_embeddings": self.sequence_len, "tie_word_embeddings": False,
        }  # fmt: skip


ON_CPU = Size(512, 8, 8, 1408, 8192, 256, 4)
ON_CUDA = Size(2048, 16, 32, 5632, 32000, 2048, 4)


# Inputs of both sides


def prepare(scratch, size, row):
    """Write base weights, tokenizer and text once; for a row, echelon's run and the peer's rows of the same tokens."""
    from echelon.data.order import SampleOrder
    from echelon.data.prepared import open_prepared
    from echelon.hardware.detection import detect_cluster
    from echelon.lifecycle.setup import prepare_run
    from echelon.recipe import load_recipe

    name = next(key for key, value in ROWS.items() if value == row)
    folder = scratch / name
    folder.mkdir()
    base = write_base(scratch, size, row.precision)
    recipe_path = folder / "recipe.yaml"
    recipe_path.write_text(json.dumps(describe_recipe(scratch, folder, base, size, row)))
    recipe, _ = load_recipe(recipe_path)
    run = prepare_run(recipe, False, lambda: detect_cluster(1), {})
    data = open_prepared(run.folder.text.read_prepared_path(), size.sequence_len).train
    ids = SampleOrder(data.num_samples, SEED).sample_ids(0, min(data.num_samples, 2000))
    samples = data.read_samples(ids)
    if row.examples:
        examples = split_examples(samples)
        per_batch = round(len(examples) / len(ids) * size.micro_batch)
        longest = max(len(each["input_ids"]) for each in examples)
        note = (
            f"{len(examples)} examples of {int(np.mean([len(each['input_ids']) for each in examples]))} tokens on "
            f"average, {longest} at most; echelon feeds {size.micro_batch} full sequences a step, the peer {per_batch} "
            "examples, which is as many tokens"
        )
    else:
        examples = [{"input_ids": each.tolist(), "labels": each.tolist()} for each in samples.inputs]
        per_batch, note = size.micro_batch, f"{size.micro_batch} sequences of {size.sequence_len} a step"
    peer = {
        "base": str(base), "examples": examples, "batch": per_batch, "adapter": row.adapter,
        "precision": row.precision, "checkpointing": row.checkpointing, "out": str(folder / "peer"),
        "sampling": row.examples,
    }  # fmt: skip
    (folder / "peer.json").write_text(json.dumps(peer))
    return run.folder.path, folder / "peer.json", note


def write_base(scratch, size, precision):
    """Write the initial weights of a Llama and a tokenizer; frozen weights are stored in the compute dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from echelon.data.tokenizer import train_tokenizer

    base = scratch / f"base-{precision}"
    if base.exists():
        return base
    texts = [path.read_text(errors="ignore") for path in sorted(Path(inspect.__file__).parent.glob("*.py"))]
    tokenizer = train_tokenizer(texts, 8192)
    torch.manual_seed(SEED)
    end = tokenizer.eos_token_id
    model = LlamaForCausalLM(LlamaConfig(**size.config(), bos_token_id=end, eos_token_id=end, pad_token_id=end))
    model.to(torch.bfloat16 if precision == "bf16" else torch.float32).save_pretrained(base)
    tokenizer.save_pretrained(base)
    (scratch / "text").mkdir(exist_ok=True)
    (scratch / "text" / "text.txt").write_text("\n".join(texts[:60]))
    write_chats(scratch / "chats.jsonl")
    return base


def write_chats(path):
    """Write questions about functions of Python's standard library, with their docstrings as answers."""
    modules = [importlib.import_module(name) for name in DOCUMENTED.split()]
    seen = {}
    for module in modules:
        for name, value in vars(module).items():
            members = vars(value).items() if inspect.isclass(value) else [("", value)]
            for member, function in members:
                if inspect.isfunction(function) and function.__doc__:
                    asked = f"{module.__name__}.{name}.{member}".rstrip(".")
                    seen.setdefault(asked, inspect.cleandoc(function.__doc__))
    with path.open("w") as stream:
        for name, answer in seen.items():
            turns = [{"role": "user", "content": f"What does {name} do?"}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": turns}) + "\n")


def describe_recipe(scratch, folder, base, size, row):
    data = {"sequence_len": size.sequence_len, "validation_fraction": 0, "prepared_dir": str(scratch / "prepared")}
    if row.examples:
        data |= {"train": str(scratch / "chats.jsonl"), "chat_template": "zephyr"}
    else:
        data |= {"train": str(scratch / "text")}
    never = 1000000
    return {
        "run": {"name": "finetuning", "dir": str(folder / "run"), "seed": SEED},
        "model": {"checkpoint": str(base)},
        "adapter": {"method": row.adapter, "r": RANK, "alpha": ALPHA, "target_modules": TARGETS},
        "data": data,
        "train": {
            "steps": never, "global_batch_size": size.micro_batch, "micro_batch_size": size.micro_batch,
            "precision": row.precision, "activation_checkpointing": "full" if row.checkpointing else "none",
            "log_every": 10, "eval_every": None,
        },
        "optim": {
            "learning_rate": RATE, "schedule": "constant", "warmup_steps": 0, "betas": [0.9, 0.999],
            "weight_decay": 0.0, "max_grad_norm": 1.0,
        },
        "checkpoint": {"every_steps": never},
    }  # fmt: skip


def split_examples(samples):
    """The examples of packed sequences in the peer's format: ids and unshifted labels."""
    examples = []
    for inputs, labels, documents in zip(samples.inputs, samples.labels, samples.documents, strict=True):
        for number in range(documents.max() + 1):
            here = documents == number
            ids, targets = inputs[here], labels[here]
            examples.append(
                {
                    "input_ids": [*ids.tolist(), max(int(targets[-1]), 0)],
                    "labels": [-100, *targets.tolist()],
                }
            )
    return examples


# The two sides, each in a separate process


class Gate:
    """The start of a side's measurement, between imports and loading; then a side runs blocks of steps on request."""

    def __init__(self):
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # output of libraries is not an answer
        self._baseline = 0 if torch.cuda.is_available() else resident_bytes("VmRSS")
        reset_peak()

    def wait(self):
        """Wait for a request; return whether another block should run."""
        wanted = sys.stdin.readline().strip() == "go"
        self._used = time.process_time()
        return wanted

    def tell(self, **measured):
        """Send the measurements of a block."""
        answer = {
            "peak": peak_bytes() - self._baseline, "baseline": self._baseline, "threads": torch.get_num_threads(),
            "cpu_seconds": time.process_time() - self._used,
        }  # fmt: skip
        print(json.dumps(answer | measured), file=self._answers)


def resident_bytes(field):
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_bytes():
    """The peak memory since the last reset."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_bytes("VmHWM")


def reset_peak():
    """Reset the peak to the current memory."""
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def run_echelon(run_dir, steps):
    """Run echelon's trainer in this process, as a worker does."""
    from echelon.distributed.runtime import start_runtime, stop_runtime
    from echelon.lifecycle.assemble import build_trainer
    from echelon.lifecycle.setup import read_plan
    from echelon.model.quantization import import_bitsandbytes
    from echelon.recipe import load_recipe
    from echelon.runs.run_folder import RunFolder
    from echelon.training.pauses import Due

    import_bitsandbytes()
    import_what_both_use()
    gate = Gate()
    folder = RunFolder(Path(run_dir))
    recipe, _ = load_recipe(folder.recipe_path)
    runtime = start_runtime()
    trainer = build_trainer(recipe, read_plan(folder), folder, runtime)
    trainer.num_steps = 0
    trainer.pauses.agree_on_due = lambda done, is_last: Due()  # only the steps are measured
    targets = 0
    while gate.wait():
        trainer.num_steps += steps
        trainer.fit()
        rows = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
        seconds = [row["step_seconds"] for row in rows[-steps:]]
        done = trainer.state.target_tokens
        gate.tell(seconds=seconds, targets=done - targets, first_loss=rows[0]["loss"])
        targets = done
        if trainer.num_steps == steps:
            reset_peak()
    trainer.train_step.loader.close()
    trainer.saver.store.close()
    stop_runtime()


def run_peer(config_path, steps):
    """Run PEFT and HF Trainer, without an import of echelon."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    import_what_both_use()
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    config = json.loads(Path(config_path).read_text())
    gate = Gate()
    dtype = torch.bfloat16 if config["precision"] == "bf16" else torch.float32
    quantization = None
    if config["adapter"] == "qlora":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model = AutoModelForCausalLM.from_pretrained(config["base"], dtype=dtype, quantization_config=quantization)
    recompute = {"use_reentrant": False}
    if quantization is not None:
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=config["checkpointing"], gradient_checkpointing_kwargs=recompute
        )
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    collator = default_data_collator
    if config["sampling"]:
        collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(config["base"]), padding="longest")
    targets = []

    def collate_and_count(examples):
        batch = collator(examples)
        targets.append(int((batch["labels"][:, 1:] != -100).sum()))
        return batch

    class Blocks(TrainerCallback):
        """Pauses the trainer between blocks."""

        def pause(self, control):
            control.should_training_stop = not gate.wait()
            self.seconds, self.mark = [], time.perf_counter()

        def on_train_begin(self, args, state, control, **kwargs):
            self.pause(control)

        def on_step_end(self, args, state, control, **kwargs):
            if len(self.seconds) + 1 == steps and torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds.append(now - self.mark)
            self.mark = now
            if len(self.seconds) < steps:
                return
            fed = targets[state.global_step - steps : state.global_step]  # the loader is a batch ahead
            losses = [row["loss"] for row in state.log_history if "loss" in row]
            gate.tell(seconds=self.seconds, targets=sum(fed), first_loss=losses[0] if losses else None)
            if state.global_step == steps:
                reset_peak()
            self.pause(control)

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=config["out"],
            max_steps=1000000,
            per_device_train_batch_size=config["batch"],
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=config["precision"] == "bf16",
            gradient_checkpointing=config["checkpointing"],
            gradient_checkpointing_kwargs=recompute if config["checkpointing"] else None,
            train_sampling_strategy=config["sampling"] or "sequential",
            logging_steps=10,
            logging_first_step=True,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            seed=SEED,
        ),
        train_dataset=config["examples"],
        data_collator=collate_and_count,
        callbacks=[Blocks()],
    )
    trainer.train()


def import_what_both_use():
    """Import the packages first, so that the peak memory measures training, not imports."""
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401


# The comparison


class Side:
    """The process of one side, seen from the parent."""

    def __init__(self, name, path, steps):
        command = [sys.executable, __file__, "--side", name, "--path", str(path), "--steps", str(steps)]
        self._log = path.with_name(f"{name}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def run_block(self):
        """Run a block of steps; return the measurements."""
        print("go", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args}\n{self._log.read_text()[-3000:]}")
        return json.loads(answer)

    def end(self):
        """Ask the process to exit, and wait for it."""
        self._process.stdin.close()
        self._process.wait(60)


def run_pair(run_dir, peer_json, blocks, steps):
    """Run blocks of both sides in turns: [(echelon's, the peer's), ...]; the first of each is a warm-up."""
    ours, theirs = Side("echelon", run_dir, steps), Side("peer", peer_json, steps)
    done = []
    for number in range(blocks + 1):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        measured = {side: side.run_block() for side in order}
        done.append((measured[ours], measured[theirs]))
    ours.end()
    theirs.end()
    return done


def rate(block, is_uneven):
    """Target tokens per second: from the median step, or from all steps if they differ in size."""
    seconds = sum(block["seconds"]) if is_uneven else statistics.median(block["seconds"]) * len(block["seconds"])
    return block["targets"] / seconds


def spread(values, form):
    """The median and the range."""
    low, middle, high = (format(value, form) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def compare(name, scratch, size, arguments):
    """Measure one row; return its line of the table and a remark."""
    row = ROWS[name]
    run_dir, peer_json, fed = prepare(scratch, size, row)
    rates, costs, whole, later, kept = [], [], [], [], []
    for number in range(arguments.pairs):
        pair_dir = scratch / name / f"run-{number}"
        shutil.copytree(run_dir, pair_dir)
        blocks = run_pair(pair_dir, peer_json, arguments.blocks, arguments.steps)
        rates += [tuple(rate(block, row.examples != "") for block in pair) for pair in blocks[1:]]
        costs += [tuple(block["targets"] / block["cpu_seconds"] for block in pair) for pair in blocks[1:]]
        whole.append(tuple(max(block[side]["peak"] for block in blocks) for side in (0, 1)))
        later.append(tuple(max(block[side]["peak"] for block in blocks[1:]) for side in (0, 1)))
        kept = blocks
    cells = [name]
    for each in (rates, costs):
        cells += [f"{statistics.median(side):.0f}" for side in zip(*each, strict=True)]
        cells.append(spread([ours / theirs for ours, theirs in each], ".2f"))
    for peaks in (whole, later):
        cells += [f"{statistics.median(each) / 1e6:.0f}" for each in zip(*peaks, strict=True)]
        cells.append(spread([ours / theirs for ours, theirs in peaks], ".2f"))
    ours, theirs = kept[-1]
    base = (
        ""
        if not ours["baseline"]
        else f"; after imports {ours['baseline'] / 1e6:.0f} and {theirs['baseline'] / 1e6:.0f} MB"
    )
    remark = (
        f"{name}: {fed}; first loss {ours['first_loss']:.3f} and {theirs['first_loss']:.3f}; "
        f"{ours['threads']} and {theirs['threads']} threads{base}"
    )
    return f"| {' | '.join(cells)} |", remark


def describe_machine(arguments):
    """The lines above the table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "bitsandbytes"))
    return (
        f"{datetime.date.today()}, {device}, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"{versions}; {arguments.pairs} pairs of processes, {arguments.blocks} blocks of {arguments.steps} steps each"
    )


HEAD = """
| | tokens/s: echelon | peer | ratio | tokens/CPU s: echelon | peer | ratio | whole run: echelon, MB | peer | ratio \
| steps: echelon, MB | peer | ratio |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of: {', '.join(ROWS)}. Default: all of them")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--side", choices=["echelon", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        {"echelon": run_echelon, "peer": run_peer}[arguments.side](arguments.path, arguments.steps)
        return
    size = ON_CUDA if torch.cuda.is_available() else ON_CPU
    print(describe_machine(arguments) + "\n" + str(size) + "\n" + HEAD, flush=True)
    remarks = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.rows or ROWS:
            line, remark = compare(name, Path(scratch), size, arguments)
            print(line, flush=True)
            remarks.append(remark)
    print("\n" + "\n".join(f"- {remark}" for remark in remarks))


if __name__ == "__main__":
    main()
