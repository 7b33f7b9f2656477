"""LoRA and QLoRA compared with PEFT and HF Trainer: tokens per second and peak memory for the same work.

    python benchmarks/finetuning.py [ROW ...] [--pairs 2] [--blocks 6] [--steps 3] [--size tiny]

Each side is a separate process, on a GPU if there is one. Both processes of a pair run at the same time and take turns:
one runs a block of steps while the other waits, so that a drift of the machine's speed affects both. The peer is
unmodified: `transformers.Trainer`, its own collator, and `peft.get_peft_model`, after
`prepare_model_for_kbit_training` for QLoRA, as in PEFT's documentation; in the rows named after Liger and Unsloth, with
their kernels. It reads token rows, examples and base weights from files and does not import echelon.

*tokens/s* is computed from the median step of a block; *tokens/CPU s* from the CPU time of a block, which other work on
the same cores hardly affects (on a GPU it measures the work of the host). *memory* is, on a CPU, the peak resident
memory minus the memory after the imports, which is printed; on a GPU, the peak of allocated bytes. *whole run* is the
peak from the imports to the end, including loading; for *steps* the peak is reset after the first block.
"""

import argparse
import importlib
import inspect
import json
import math
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from measuring import NotHere, describe_machine, free_cache, measure_rows, spread
from turns import Gate, Side, take_turns

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
    """One comparison: both sides get these settings.

    peer: whose kernels HF Trainer uses, PEFT's own by default; trl: SFTTrainer of TRL.
    """

    adapter: str
    precision: str = "bf16"
    checkpointing: bool = False
    examples: str = ""  # if examples have uneven lengths: how the peer forms its padded batches
    peer: str = "peft"
    is_large: bool = False


ROWS = {
    "lora-fp32": Row("lora", "fp32"),
    "lora-bf16": Row("lora"),
    "lora-bf16-checkpointed": Row("lora", checkpointing=True),
    "qlora-bf16": Row("qlora"),
    "qlora-bf16-checkpointed": Row("qlora", checkpointing=True),
    "lora-bf16-examples": Row("lora", examples="random"),
    "lora-bf16-examples-grouped": Row("lora", examples="group_by_length"),
    "lora-bf16-trl": Row("lora", peer="trl"),
    "qlora-bf16-trl": Row("qlora", peer="trl"),
}
# Named on the command line: they need a GPU, and Liger or Unsloth, or the memory for 8 billion parameters.
MORE_ROWS = {
    "lora-bf16-liger": Row("lora", peer="liger_kernel"),
    "qlora-bf16-liger": Row("qlora", peer="liger_kernel"),
    "lora-bf16-unsloth": Row("lora", peer="unsloth"),
    "qlora-bf16-unsloth": Row("qlora", peer="unsloth"),
    "lora-8b": Row("lora", checkpointing=True, is_large=True),
    "lora-8b-liger": Row("lora", checkpointing=True, peer="liger_kernel", is_large=True),
    "lora-8b-unsloth": Row("lora", checkpointing=True, peer="unsloth", is_large=True),
    "qlora-8b": Row("qlora", checkpointing=True, is_large=True),
    "qlora-8b-liger": Row("qlora", checkpointing=True, peer="liger_kernel", is_large=True),
    "qlora-8b-unsloth": Row("qlora", checkpointing=True, peer="unsloth", is_large=True),
}

NEEDS_GPU = ("liger_kernel", "unsloth")  # peers


@dataclass(frozen=True)
class Size:
    """The size of a Llama and of a step's batch."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    sequence_len: int
    micro_batch: int

    def config(self):
        return {
            "hidden_size": self.hidden, "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab,
            "max_position_embeddings": self.sequence_len, "tie_word_embeddings": False,
        }  # fmt: skip


TINY = Size(64, 2, 2, 1, 176, 8192, 64, 2)
ON_CPU = Size(512, 8, 8, 4, 1408, 8192, 256, 4)
ON_CUDA = Size(2048, 16, 32, 16, 5632, 32000, 2048, 4)
LARGE = Size(4096, 32, 32, 8, 14336, 128256, 2048, 2)  # Llama 3 8B


def choose_size(row, is_tiny):
    """The size of a row on this machine."""
    if is_tiny:
        return TINY
    return LARGE if row.is_large else ON_CUDA if torch.cuda.is_available() else ON_CPU


# Inputs of both sides


def prepare(scratch, folder, size, row):
    """Write base weights, tokenizer and text once; for a row, echelon's run and the peer's rows of the same tokens."""
    from echelon.learn.data.order import SampleOrder
    from echelon.learn.data.prepared import open_prepared
    from echelon.planner.hardware.detection import detect_cluster
    from echelon.recipe.load import load_recipe
    from echelon.run.lifecycle.setup import prepare_run

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
        "sampling": row.examples, "peer": row.peer, "sequence_len": size.sequence_len,
    }  # fmt: skip
    (folder / "peer.json").write_text(json.dumps(peer))
    return run.folder.path, folder / "peer.json", note


def write_base(scratch, size, precision):
    """Write the initial weights of a Llama and a tokenizer; frozen weights are stored in the compute dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from echelon.learn.data.tokenizer import train_tokenizer

    base = scratch / f"base-{precision}-{size.hidden}"
    if base.exists():
        return base
    for other in scratch.glob("base-*"):  # the disk need not hold several large ones
        shutil.rmtree(other)
    texts = [path.read_text(errors="ignore") for path in sorted(Path(inspect.__file__).parent.glob("*.py"))]
    tokenizer = train_tokenizer(texts, 8192)
    torch.manual_seed(SEED)
    end = tokenizer.eos_token_id
    config = LlamaConfig(**size.config(), bos_token_id=end, eos_token_id=end, pad_token_id=end)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # drawing 8 billion numbers on a CPU takes long
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16 if precision == "bf16" else torch.float32).save_pretrained(base)
    del model
    free_cache()
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
            "learning_rate": RATE, "schedule": "constant", "warmup": 0, "betas": [0.9, 0.999],
            "weight_decay": 0.0, "max_grad_norm": 1.0,
        },
        "checkpoint": {"every": never},
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


def run_echelon(run_dir, steps):
    """Run echelon's trainer in this process, as a worker does."""
    from echelon.ground.quiet_imports import import_bitsandbytes
    from sides import EchelonTrainer

    import_bitsandbytes()
    import_what_both_use()
    gate = Gate()
    echelon = EchelonTrainer(run_dir)
    targets, first_loss = 0, None
    while gate.wait():
        rows = echelon.run(steps)
        first_loss = rows[0]["loss"] if first_loss is None else first_loss
        done = rows[-1]["target_tokens"]
        gate.tell(seconds=[row["step_seconds"] for row in rows], targets=done - targets, first_loss=first_loss)
        targets = done
    echelon.close()


def build_peer(config):
    """The peer's model with an adapter: by PEFT, or by Unsloth, which must be imported before transformers."""
    dtype = torch.bfloat16 if config["precision"] == "bf16" else torch.float32
    recompute = {"use_reentrant": False}
    adapter = {"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "target_modules": TARGETS}
    if config["peer"] == "unsloth":
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            config["base"],
            max_seq_length=config["sequence_len"],
            dtype=dtype,
            load_in_4bit=config["adapter"] == "qlora",
        )
        checkpointing = "unsloth" if config["checkpointing"] else False
        return FastLanguageModel.get_peft_model(model, **adapter, use_gradient_checkpointing=checkpointing)
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = None
    if config["adapter"] == "qlora":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model = AutoModelForCausalLM.from_pretrained(config["base"], dtype=dtype, quantization_config=quantization)
    if quantization is not None:
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=config["checkpointing"], gradient_checkpointing_kwargs=recompute
        )
    return get_peft_model(model, LoraConfig(**adapter, task_type="CAUSAL_LM"))


def run_peer(config_path, steps):
    """Run PEFT and HF Trainer, without an import of echelon."""
    config = json.loads(Path(config_path).read_text())
    if config["peer"] == "unsloth":
        import unsloth  # noqa: F401
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, default_data_collator

    from hf_trainer import train_in_blocks

    import_what_both_use()
    gate = Gate()
    model = build_peer(config)
    collator = default_data_collator
    if config["sampling"]:
        collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(config["base"]), padding="longest")
    examples, chosen = config["examples"], {}
    if config["peer"] == "trl":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        masked = [each | {"attention_mask": [1] * len(each["input_ids"])} for each in examples]  # SFTTrainer needs it
        examples = Dataset.from_list(masked)
        ready = {"skip_prepare_dataset": True}  # the examples are token ids
        chosen = {"kinds": (SFTTrainer, SFTConfig), "dataset_kwargs": ready, "max_length": None}
        chosen["remove_unused_columns"] = False  # it would remove the mask
    train_in_blocks(
        gate, model, examples, collator, steps, **chosen,
        output_dir=config["out"],
        per_device_train_batch_size=config["batch"],
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        bf16=config["precision"] == "bf16",
        gradient_checkpointing=config["checkpointing"],
        gradient_checkpointing_kwargs={"use_reentrant": False} if config["checkpointing"] else None,
        use_liger_kernel=config["peer"] == "liger_kernel",
        train_sampling_strategy=config["sampling"] or "sequential",
        seed=SEED,
    )  # fmt: skip


def import_what_both_use():
    """Import the packages first, so that the peak memory measures training, not imports."""
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401


# The comparison


def run_pair(run_dir, peer_json, blocks, steps):
    """Run blocks of both sides in turns: [(echelon's, the peer's), ...]; the first of each is a warm-up."""
    paths = {"echelon": run_dir, "peer": peer_json}
    sides = [
        Side(name, [__file__, "--side", name, "--path", path, "--steps", steps], path.with_name(f"{name}.log"))
        for name, path in paths.items()
    ]
    return list(zip(*take_turns(sides, blocks), strict=True))


def rate(block, is_uneven):
    """Target tokens per second: from the median step, or from all steps if they differ in size."""
    seconds = sum(block["seconds"]) if is_uneven else statistics.median(block["seconds"]) * len(block["seconds"])
    return block["targets"] / seconds


def compare(name, scratch, arguments):
    """Measure one row; return its line of the table and a remark."""
    row = (ROWS | MORE_ROWS)[name]
    if find_spec(row.peer) is None:
        raise NotHere(f"{row.peer} is not installed")
    if row.peer in NEEDS_GPU and not torch.cuda.is_available():
        raise NotHere(f"{row.peer} needs a GPU")
    size = choose_size(row, arguments.size == "tiny")
    run_dir, peer_json, fed = prepare(scratch, scratch / name, size, row)
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


HEAD = """
| | tokens/s: echelon | peer | ratio | tokens/CPU s: echelon | peer | ratio | whole run: echelon, MB | peer | ratio \
| steps: echelon, MB | peer | ratio |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = f"of: {', '.join(ROWS)} (default: all of these); {', '.join(MORE_ROWS)}"
    parser.add_argument("rows", nargs="*", metavar="ROW", help=named)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a test of this program")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row that would end later than this")
    parser.add_argument("--side", choices=["echelon", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        {"echelon": run_echelon, "peer": run_peer}[arguments.side](arguments.path, arguments.steps)
        return
    if unknown := [name for name in arguments.rows if name not in ROWS | MORE_ROWS]:
        parser.error(f"{', '.join(unknown)}: the rows are {', '.join(ROWS | MORE_ROWS)}")
    print(
        f"{describe_machine('torch', 'transformers', 'peft', 'bitsandbytes')}; {arguments.pairs} pairs of processes, "
        f"{arguments.blocks} blocks of {arguments.steps} steps each\n{HEAD}",
        flush=True,
    )
    remarks = []

    def measure(name):
        line, remark = compare(name, Path(scratch), arguments)
        print(line, flush=True)
        remarks.append(remark)

    with tempfile.TemporaryDirectory() as scratch:
        is_whole = measure_rows(arguments.rows or ROWS, arguments.seconds, measure)
    print("\n".join(f"- {remark}" for remark in remarks))
    sys.exit(not is_whole)


if __name__ == "__main__":
    main()
