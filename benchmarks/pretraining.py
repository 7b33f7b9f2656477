"""Pretraining on one device: tokens per second, MFU, and peak memory beside the planner's prediction.

    python benchmarks/pretraining.py TABLE [ROW ...] [--rounds 3] [--steps 4] [--size tiny]

The model is that of recipes/pretrain-1.3b.yaml, on source code of Python's standard library. Each side is a separate
process. The sides of a row run at the same time and take turns: one runs a block of steps while the others wait. HF
Trainer and the plain loop do not import echelon; they compile the whole model, echelon compiles each layer. Nothing is
saved.

MFU is that of echelon's metrics, with the same formula and peak for every side. *of matmul* is the share of the bf16
matrix product measured at the start, instead of the vendor's peak.
"""

import argparse
import importlib
import inspect
import json
import math
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kernel_table import render_kernels
from measuring import NotHere, describe_machine, free_cache, measure_matmul, measure_rows, spread
from turns import Gate, Side, take_turns

RECIPE = Path(__file__).parents[1] / "recipes" / "pretrain-1.3b.yaml"
TEXT_BYTES, DOCUMENT_CHARACTERS = 4_000_000, 3000
SHRINK = 32  # the factor on every length with --size tiny
TINY = (
    "hidden_size=64", "intermediate_size=176", "num_hidden_layers=2", "num_attention_heads=2", "num_key_value_heads=2",
)  # fmt: skip
# Llama 3's widths, with a few layers: at these, products in float8 pay.
WIDE = (
    "hidden_size=4096", "intermediate_size=14336", "num_hidden_layers=4", "num_attention_heads=32",
    "num_key_value_heads=8",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One side of a row of the table: who trains, and how.

    side: echelon, hf (HF Trainer) or plain. overrides: of the recipe. length: tokens of a sequence. sequences: those of
    a step. micro: those of a microbatch; None leaves it to the planner. is_wide: the model for float8. shards: the plan
    must use `fully_shard`. chunk_bytes: of the loss's logits. kernel: the fused attention that torch prefers. float8:
    the plain loop's linear layers are converted by torchao. needs_gpu: it cannot run on a CPU.
    """

    side: str = "echelon"
    overrides: tuple[str, ...] = ()
    length: int = 2048
    sequences: int = 16
    micro: int | None = None
    is_wide: bool = False
    shards: bool = False
    chunk_bytes: int | None = None
    kernel: str | None = None
    float8: bool = False
    needs_gpu: bool = False


FLEX = "model.attn_implementation=flex_attention"  # it has no backward pass on a CPU
# With small microbatches, because the weights and moments of all sides of a row are on the device.
BESIDE = Row(micro=4)
WIDE_BESIDE = Row(micro=4, is_wide=True)
LONG = Row(length=8192, sequences=4, micro=1)
JOINED = Row(overrides=("data.document_mask=false",), micro=4)
APART = replace(JOINED, overrides=("data.document_mask=true",))
# In two tables each.
PLANNED = (Row(),)
TITAN, TRAINER = ((BESIDE, replace(BESIDE, side=side)) for side in ("torchtitan", "hf"))

# The rows that matter most come first: a call on a lent machine may end before the last ones.
TABLES = {
    "figures": {
        "as the planner chooses": PLANNED,
        "torchtitan": TITAN,
        "HF Trainer": TRAINER,
    },
    "peers": {
        "torchtitan": TITAN,
        "plain loop": (BESIDE, replace(BESIDE, side="plain")),
        "HF Trainer": TRAINER,
    },
    "variants": {
        "as the planner chooses": PLANNED,
        "zero1, micro batch 4": (Row(overrides=("parallel=zero1",), micro=4, shards=True),),
        "zero2, micro batch 4": (Row(overrides=("parallel=zero2",), micro=4, shards=True),),
        "FlashAttention-2": (Row(kernel="FLASH_ATTENTION"),),
        "loss in chunks of 256 MiB": (Row(chunk_bytes=2**28),),
        "micro batch 16, selective": (Row(overrides=("train.activation_checkpointing=selective",), micro=16),),
        "fully_shard over one": (Row(overrides=("parallel=fsdp",), shards=True),),
        "parallel: ddp": (Row(overrides=("parallel=ddp",)),),
        "flex attention": (Row(overrides=(FLEX,), needs_gpu=True),),
        "not compiled": (Row(overrides=("train.compile=false",)),),
    },
    "float8": {
        "plain loop, torchao": (replace(WIDE_BESIDE, side="plain"), replace(WIDE_BESIDE, side="plain", float8=True)),
        "echelon, bf16": (WIDE_BESIDE,),
        "echelon, fp8": (WIDE_BESIDE, replace(WIDE_BESIDE, overrides=("train.precision=fp8",))),
        "echelon, fp8 by rows": (replace(WIDE_BESIDE, overrides=("train.precision=fp8_rowwise")),),
    },
    "long": {
        "8,192 tokens": (LONG, replace(LONG, side="hf")),
        "32,768 tokens, checkpointed": (
            replace(LONG, length=32768, sequences=2, overrides=("train.activation_checkpointing=full",)),
        ),
        "32,768 tokens, offloaded": (
            replace(
                LONG,
                length=32768,
                sequences=2,
                needs_gpu=True,
                overrides=("train.activation_checkpointing=full", "train.activation_offloading=true"),
            ),
        ),
        "32,768 tokens, selective": (
            replace(LONG, length=32768, sequences=2, overrides=("train.activation_checkpointing=selective",)),
        ),
    },
    "packed": {
        "2,048 tokens": (JOINED, APART),
        "8,192 tokens": (replace(LONG, overrides=JOINED.overrides), replace(LONG, overrides=APART.overrides)),
        "2,048 tokens, flex": (
            JOINED,
            replace(APART, overrides=(*APART.overrides, FLEX), needs_gpu=True),
        ),
    },
}
PROFILED = ("as the planner chooses",)


# Inputs of all sides


def write_text(path):
    """Write pieces of the standard library's source as documents, the same ones for every machine with this Python."""
    room = TEXT_BYTES
    with path.open("w") as stream:
        for source in sorted(Path(inspect.__file__).parent.glob("*.py")):
            text = source.read_text(errors="ignore")
            for start in range(0, len(text), DOCUMENT_CHARACTERS):
                piece = text[start : start + DOCUMENT_CHARACTERS]
                stream.write(json.dumps({"text": piece}) + "\n")
                room -= len(piece)
            if room < 0:
                return


def override(row, scratch, folder, is_tiny):
    """The overrides that turn the 1.3 B recipe into that of a row."""
    length = row.length // SHRINK if is_tiny else row.length
    widths = TINY if is_tiny else WIDE if row.is_wide else ()
    return [
        f"data.train.0.path={scratch / 'text.jsonl'}", f"data.prepared_dir={scratch / 'prepared'}",
        f"data.sequence_len={length}", "data.validation_fraction=0", "train.eval_every=null", "evaluate.batches=null",
        f"run.dir={folder / 'run'}", "tokenizer.train.vocab_size=4096",
        "model.config.vocab_size=32000", f"model.config.max_position_embeddings={length}",
        *(f"model.config.{field}" for field in widths), *(["train.tokens=1000000"] if is_tiny else []),
        f"train.global_batch_tokens={row.sequences * length}", "checkpoint.every=1000000",
        *([] if row.micro is None else [f"train.micro_batch_size={row.micro}"]),
        *row.overrides,
    ]  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """What is known of a side before it runs. `plan` in words; `flops`: those of a token; `predicted`: peak bytes."""

    path: Path
    plan: str
    flops: float
    predicted: int


def prepare(row, scratch, folder, is_tiny):
    """Write the run folder, the token rows and the job of a side. Raises NotHere for what this version refuses."""
    from echelon.ground.errors import ConfigError, PlanError
    from echelon.learn.data.prepared import open_prepared
    from echelon.learn.model.build import load_config
    from echelon.planner.hardware.detection import detect_cluster
    from echelon.planner.memory import MemoryEstimate
    from echelon.planner.shape import build_shape
    from echelon.recipe.load import load_recipe
    from echelon.run.lifecycle.setup import prepare_run

    folder.mkdir(parents=True)
    try:
        recipe, _ = load_recipe(RECIPE, override(row, scratch, folder, is_tiny))
        run = prepare_run(recipe, False, lambda: detect_cluster(1), {})
    except (ConfigError, PlanError) as error:
        raise NotHere(f"refused: {error}") from error
    plan, length = run.plan, recipe.data.sequence_len
    if row.shards and not plan.uses_fully_shard:
        raise NotHere(f"{row.overrides[0]} does not use fully_shard on one process")
    data = open_prepared(run.folder.text.read_prepared_path(), length).train
    samples = data.read_samples(np.arange(min(data.num_samples, 512)))
    np.savez(folder / "rows.npz", inputs=samples.inputs, labels=samples.labels)
    job = {
        "run": str(run.folder.path), "rows": str(folder / "rows.npz"), "model": str(run.folder.model_dir),
        "micro": plan.micro_batch_size, "accumulate": plan.num_microbatches, "compiles": plan.compile,
        "bf16": plan.precision.compute == "bfloat16", "chunk_bytes": row.chunk_bytes, "kernel": row.kernel,
        "float8": row.float8, "out": str(folder / "out"),
    }  # fmt: skip
    # The run folder gets its config when the trainer is built; the other sides need it before.
    config = load_config({**recipe.model.config})
    config.save_pretrained(run.folder.model_dir)
    (folder / "job.json").write_text(json.dumps(job))
    estimate = MemoryEstimate(**json.loads(run.folder.estimate_path.read_text())["memory"])
    words = f"{plan.micro_batch_size} x {plan.num_microbatches}, {'compiled' if plan.compile else 'eager'}"
    if row.side == "echelon":
        words = f"{plan.strategy}{' by fully_shard' if plan.uses_fully_shard else ''}, {words}"
    return Prepared(folder / "job.json", words, build_shape(config.to_dict()).flops_per_token(length), estimate.total)


# The sides, each in a separate process


def run_echelon(job, steps, gate):
    """Run echelon's trainer in this process, as a worker does."""
    from echelon.planner import model_shape
    from sides import EchelonTrainer

    if job["chunk_bytes"] is not None:
        assert model_shape.LARGE_CHUNK_BYTES
        model_shape.LARGE_CHUNK_BYTES = job["chunk_bytes"]
    with ExitStack() as stack:
        if job["kernel"] is not None:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            others = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
            stack.enter_context(sdpa_kernel([getattr(SDPBackend, job["kernel"]), *others], set_priority=True))
        echelon = EchelonTrainer(job["run"])
        tokens, first_loss = 0, None
        while gate.wait():
            rows = echelon.run(steps)
            first_loss = rows[0]["loss"] if first_loss is None else first_loss
            fed, tokens = rows[-1]["tokens"] - tokens, rows[-1]["tokens"]
            gate.tell(seconds=[row["step_seconds"] for row in rows], targets=fed, first_loss=first_loss)
        echelon.close()


def build_from_config(job):
    """A model with random fp32 weights, as `transformers` draws them, on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(job["model"])
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def run_hf(job, steps, gate):
    """Run HF Trainer: fused AdamW, autocast, and torch.compile where echelon compiles."""
    from transformers import default_data_collator

    from hf_trainer import train_in_blocks

    inputs = np.load(job["rows"])["inputs"]
    examples = [{"input_ids": row, "labels": row} for row in torch.from_numpy(inputs.astype(np.int64))]
    train_in_blocks(
        gate, build_from_config(job), examples, default_data_collator, steps,
        output_dir=job["out"],
        per_device_train_batch_size=job["micro"],
        gradient_accumulation_steps=job["accumulate"],
        learning_rate=1e-4,
        weight_decay=0.1,
        optim="adamw_torch_fused",
        bf16=job["bf16"],
        torch_compile=job["compiles"],
    )  # fmt: skip


def run_plain(job, steps, gate):
    """Run the plain loop, whose linear layers compute in float8 if the job says so."""
    from sides import PlainLoop, repeat_batches

    model = build_from_config(job)
    if job["float8"]:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Without the head, as torchao's documentation advises.
        config = Float8LinearConfig(emulate=not torch.cuda.is_available())
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    rows = np.load(job["rows"])
    batches = repeat_batches(rows["inputs"], rows["labels"], job["micro"], job["accumulate"])
    loop = PlainLoop(model, batches, job["compiles"], job["bf16"])
    num_tokens, first_loss = steps * job["micro"] * job["accumulate"] * rows["inputs"].shape[1], None
    while gate.wait():
        seconds, losses = loop.run(steps)
        first_loss = losses[0] if first_loss is None else first_loss
        gate.tell(seconds=seconds, targets=num_tokens, first_loss=first_loss)


def run_torchtitan(job, steps, gate):
    """Run torchtitan's Trainer: autocast, fused AdamW, compiled blocks and loss."""
    from transformers import AutoConfig

    import titan
    from sides import repeat_batches

    rows = np.load(job["rows"])
    batches = repeat_batches(rows["inputs"], rows["labels"], job["micro"], job["accumulate"])
    shape = {name: job[name] for name in ("micro", "accumulate", "compiles")}
    titan.train_in_blocks(
        gate, AutoConfig.from_pretrained(job["model"]), steps, batches, rows["inputs"].shape[1], **shape,
        compute_bf16=job["bf16"], folder=job["out"],
    )  # fmt: skip


SIDES = {"echelon": run_echelon, "hf": run_hf, "plain": run_plain, "torchtitan": run_torchtitan}
NAMES = {"echelon": "echelon", "hf": "HF Trainer", "plain": "plain loop", "torchtitan": "torchtitan"}


# The tables


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s: the peak of MFU, and that of a matrix product measured here."""

    peak: float
    matmul: float


HEAD = """
| row | side | tokens/s, median (range) | against the first | MFU | of matmul | peak GB | predicted GB \
| graphs, breaks, recompiled | first loss | plan |
|---|---|---|---|---|---|---|---|---|---|---|"""


def speed(block):
    """Tokens per second, by the median step."""
    return block["targets"] / (float(np.median(block["seconds"])) * len(block["seconds"]))


def render_side(name, row, prepared, blocks, first_blocks, ceilings):
    """The line of one side; ratios are of the same round."""
    speeds = [speed(block) for block in blocks]
    ratios = [ours / speed(theirs) for ours, theirs in zip(speeds, first_blocks, strict=True)]
    reached = float(np.median(speeds)) * prepared.flops
    predicted = f"{prepared.predicted / 1e9:.1f}" if row.side == "echelon" else ""
    cells = [
        name, ", ".join([NAMES[row.side], *row.overrides, *["float8"] * row.float8]),
        spread(speeds, ",.0f"), spread(ratios, ".2f"),
        f"{reached / ceilings.peak:.1%}", f"{reached / ceilings.matmul:.1%}",
        f"{max(block['peak'] for block in blocks) / 1e9:.1f}", predicted,
        ", ".join(map(str, blocks[-1]["graphs"])), f"{blocks[-1]['first_loss']:.3f}", prepared.plan,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def check_needs(rows):
    """Raise NotHere if a row needs a GPU, or a package that cannot be imported."""
    if any(row.needs_gpu for row in rows) and not torch.cuda.is_available():
        raise NotHere("it needs a GPU")
    needed = ["torchao.float8"] * any(row.float8 for row in rows)
    needed += ["titan"] * any(row.side == "torchtitan" for row in rows)  # our side, which imports torchtitan
    for name in needed:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package for another version of torch may fail in any way
            raise NotHere(f"{name.partition('.')[0]} cannot be imported: {error}") from error


def measure(name, rows, scratch, ceilings, arguments):
    """Run the sides of a row in turns, and print their lines; returns the kernels of the first, if it is profiled."""
    check_needs(rows)
    folder = scratch / str(len(list(scratch.iterdir())))
    is_tiny = arguments.size == "tiny"
    prepared = [prepare(row, scratch, folder / str(place), is_tiny) for place, row in enumerate(rows)]
    sides = [
        Side(
            NAMES[row.side],
            [__file__, arguments.table, "--side", row.side, "--path", each.path, "--steps", arguments.steps],
            each.path.with_name("side.log"),
        )
        for row, each in zip(rows, prepared, strict=True)
    ]
    is_profiled = name in PROFILED
    done = take_turns(sides, arguments.rounds, is_profiled)
    kernels = done[0][-1].get("kernels")
    timed = [blocks[1 : arguments.rounds + 1] for blocks in done]
    for row, each, blocks in zip(rows, prepared, timed, strict=True):
        print(render_side(name, row, each, blocks, timed[0], ceilings), flush=True)
    return kernels


def run_side(arguments):
    """Be a side: build, and run blocks of steps as the parent asks."""
    gate = Gate()
    SIDES[arguments.side](json.loads(Path(arguments.path).read_text()), arguments.steps, gate)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows of the table by name (default: all)")
    parser.add_argument("--rounds", type=int, help="default 3")
    parser.add_argument("--steps", type=int, help="steps of a block (default 4)")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a test of this program")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row that would end later than this")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        run_side(arguments)
        return
    is_tiny = arguments.size == "tiny"
    arguments.rounds = arguments.rounds or (1 if is_tiny else 3)
    arguments.steps = arguments.steps or (2 if is_tiny else 4)
    from echelon.planner.hardware.detection import find_peak_flops

    table = TABLES[arguments.table]
    if unknown := [name for name in arguments.rows if name not in table]:
        parser.error(f"{', '.join(unknown)}: {arguments.table} has the rows {'; '.join(table)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = Ceilings(find_peak_flops(device, "bfloat16"), measure_matmul())
    free_cache()
    print(
        f"{describe_machine('torch', 'transformers')}; {arguments.rounds} rounds of {arguments.steps} steps; MFU of "
        f"{ceilings.peak / 1e12:.4g} TFLOP/s, a matrix product measured at {ceilings.matmul / 1e12:.4g}\n{HEAD}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_text(scratch / "text.jsonl")

        def measure_row(name):
            kernels = measure(name, table[name], scratch, ceilings, arguments)
            if kernels is not None:  # at once: the call may end before the last row
                print(f"\nKernels of: {name}\n\n{render_kernels(kernels, arguments.steps)}\n{HEAD}", flush=True)

        is_whole = measure_rows(arguments.rows or table, arguments.seconds, measure_row)
    sys.exit(not is_whole)


if __name__ == "__main__":
    main()
