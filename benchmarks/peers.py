"""Pretraining by echelon and its peers: speed, step times, memory and start-up of the same work on CPUs.

    python benchmarks/peers.py [--rounds 3] [--steps 20] [--loss-steps 200] [--sides hf-trainer ...] [--modes ddp fsdp]
        [--search-steps 8 | --settings RESULTS.json] [--out benchmarks/results/peers-cpu]

A Llama of 34 M parameters, sequences of 512 tokens, micro batch 4, bf16, AdamW with clipping, on processes with one
core each. Every side starts from the same weights and trains on the same batches; a side whose losses differ fails the
run. A side is measured with the settings of its users, and with the fastest of CANDIDATES, found by a search
before the rounds. Sides run one after the other in every round, in alternating order; nothing else should run.

*start-up* is the time from the command to the end of the first step, with a warm compilation cache after the first
round. *peak* is the largest resident memory of a rank until its last step. *limit* is the speed at which the cores
would do the model's FLOPs at the rate of a square bf16 product, measured by all processes at once before each round.
Writes FILE.json, FILE.md and FILE.svg.
"""

import argparse
import inspect
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from finetuning import SEED, TINY, Size, write_base
from measuring import NotHere, describe_machine, measure_matmul
from peer_report import find_differences, render_picture, render_table

FULL = Size(512, 8, 8, 8, 1408, 8192, 512, 4)
RATE, NEVER, WARMUP_STEPS = 3e-4, 1_000_000, 3
STOPPED = 3  # the exit code of `echelon train` after a signal
LONG_STEPS = 20_000  # hours of training: the length of the run decides whether `compile: auto` compiles
TIMEOUT_SECONDS = 3600
PACKAGES = {"hf-trainer": "accelerate", "accelerate": "accelerate", "fabric": "lightning", "deepspeed": "deepspeed"}
ENGINES = ("echelon", "hf-trainer", "accelerate", "fabric", "deepspeed", "expert")


@dataclass(frozen=True)
class Setting:
    """How a side trains. `compiles`: no, model, layers; of echelon no, yes, auto. `keeps`: freed memory, by malloc."""

    attention: str | None = "sdpa"
    compiles: str = "model"
    keeps: bool = False

    def __str__(self):
        compiled = {"no": "eager", "auto": "compile: auto"}.get(self.compiles, f"compiled ({self.compiles})")
        kept = ", memory kept" if self.keeps else ""
        return f"{compiled}, {self.attention or 'default'} attention{kept}"


# As their users run them: bf16, compiled, the default attention. echelon: the defaults of a recipe for a long run.
USUAL = {"echelon": Setting(None, "auto")} | dict.fromkeys(ENGINES[1:], Setting("sdpa", "model"))
# What the search tries beside that. Each is documented by its makers:
# - whole or regional compilation: "Regional compilation" in PyTorch's recipes, TorchDynamoPlugin in Accelerate's
#   reference, "torch.compile" in Fabric's guide, engine.compile() in DeepSpeed's compiler tutorial
# - attn_implementation: "Attention interface" in transformers' guide
# - freed memory kept: mallopt(3), as environment variables; "Performance Tuning Guide" of PyTorch, on allocators
CANDIDATES = {"echelon": (Setting(None, "yes"), Setting("eager", "yes"), Setting("sdpa", "yes"), Setting(None, "no"))}
CANDIDATES |= dict.fromkeys(
    ENGINES[1:],
    (
        Setting("sdpa", "no", True),
        Setting("sdpa", "layers", True),
        Setting("eager", "model", True),
        Setting("eager", "layers"),
        Setting("eager", "layers", True),
    ),
)
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


@dataclass(frozen=True)
class Side:
    """A row of the table. `variant`: usual or best."""

    engine: str
    mode: str
    variant: str
    setting: Setting

    @property
    def name(self):
        return f"{self.engine}, {self.mode}, {self.variant}"


@dataclass(frozen=True)
class Inputs:
    """What all sides are given: base weights, rows of tokens, and the folder of echelon's prepared data."""

    scratch: Path
    size: Size
    processes: int

    @property
    def base(self):
        return self.scratch / f"base-fp32-{self.size.hidden}"

    @property
    def rows(self):
        return self.scratch / "rows.npy"


def write_inputs(scratch, size, processes, num_steps):
    """Write the weights and the tokenizer, prepare the text, and write the rows of tokens in echelon's order."""
    from echelon.data.order import SampleOrder
    from echelon.data.prepared import open_prepared
    from echelon.hardware.detection import detect_cluster
    from echelon.lifecycle.setup import prepare_run
    from echelon.recipe import load_recipe

    inputs = Inputs(scratch, size, processes)
    write_base(scratch, size, "fp32")
    sources = sorted(Path(inspect.__file__).parent.glob("*.py"))
    (scratch / "all.txt").write_text("\n".join(path.read_text(errors="ignore") for path in sources))
    path = write_recipe(inputs, scratch / "first", USUAL["echelon"], "ddp", num_steps, is_usual=True)
    recipe, _ = load_recipe(path)
    run = prepare_run(recipe, False, lambda: detect_cluster(processes), {})
    data = open_prepared(run.folder.text.read_prepared_path(), size.sequence_len).train
    wanted = num_steps * size.micro_batch * processes
    if data.num_samples < wanted:
        raise SystemExit(
            f"the text has {data.num_samples} sequences; {num_steps} steps need {wanted}; take fewer steps"
        )
    samples = data.read_samples(SampleOrder(data.num_samples, SEED).sample_ids(0, wanted))
    np.save(inputs.rows, np.concatenate([samples.inputs, samples.labels[:, -1:]], axis=1))
    return inputs


def write_recipe(inputs, folder, setting, mode, num_steps, is_usual):
    """Write echelon's recipe: the defaults, except for the work itself; `setting` changes them for the best.

    With the defaults, the recipe is that of a long run, which `run_side` stops.
    """
    folder.mkdir(parents=True)
    train = {
        "steps": LONG_STEPS if is_usual else num_steps,
        "global_batch_size": inputs.size.micro_batch * inputs.processes, "eval_every": NEVER,
    }  # fmt: skip
    model = {"checkpoint": str(inputs.base)}
    if not is_usual:
        compiles = {"yes": True, "no": False}.get(setting.compiles, "auto")
        train |= {"precision": "bf16", "micro_batch_size": inputs.size.micro_batch, "compile": compiles}
        model |= {"attn_implementation": setting.attention} if setting.attention else {}
    recipe = {
        "run": {"name": "peers", "dir": str(folder / "run"), "seed": SEED},
        "model": model,
        "data": {
            "train": str(inputs.scratch / "all.txt"), "sequence_len": inputs.size.sequence_len,
            "validation_fraction": 0, "prepared_dir": str(inputs.scratch / "prepared"),
        },
        "train": train,
        "optim": {"learning_rate": RATE, "schedule": "constant"},
        "parallel": mode,
        "checkpoint": {"every_steps": NEVER},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def run_side(inputs, side, num_steps, folder):
    """Run a side in processes of its own; return its measurements. Raises NotHere with the end of its output."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(inputs.scratch / "compiled"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # of ninja, which DeepSpeed builds with
        "DS_ACCELERATOR": "cpu",
    }
    environment |= KEEP_MEMORY if side.setting.keeps else {}
    if side.engine == "echelon":
        recipe = write_recipe(inputs, folder, side.setting, side.mode, num_steps, side.variant == "usual")
        command = ["-m", "echelon", "train", recipe, "--nproc", inputs.processes]
        marker = folder / "run" / "metrics.jsonl"
    else:
        folder.mkdir(parents=True)
        work = {
            "engine": side.engine, "mode": side.mode, "setting": asdict(side.setting), "base": str(inputs.base),
            "rows": str(inputs.rows), "micro_batch": inputs.size.micro_batch, "steps": num_steps, "rate": RATE,
            "folder": str(folder),
        }  # fmt: skip
        (folder / "work.json").write_text(json.dumps(work))
        ranks = ["--standalone", "--nproc-per-node", inputs.processes]
        sides = Path(__file__).with_name("peer_sides.py")
        command = ["-m", "torch.distributed.run", *ranks, sides, folder / "work.json"]
        marker = folder / "first-step"
    stops = side.engine == "echelon" and side.variant == "usual"
    start = launch(command, environment, folder / "log", marker, num_steps if stops else None)
    seconds, losses, peak = read_echelon(folder, num_steps) if side.engine == "echelon" else read_peer(folder)
    return {"seconds": seconds, "losses": losses, "peak": peak, "start": start}


def launch(command, environment, log, marker, num_rows=None):
    """Run a Python command to its end; return the seconds until the file `marker` had content or was made.

    `num_rows`: stop it by SIGTERM when the file has so many rows of training steps.
    """
    started, first, stopped = time.monotonic(), None, False
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() - started < TIMEOUT_SECONDS:
                if first is None and marker.exists() and (marker.stat().st_size or marker.name == "first-step"):
                    first = time.monotonic() - started
                if first and num_rows and not stopped and marker.read_text().count('"train"') >= num_rows:
                    process.terminate()
                    stopped = True
                time.sleep(0.02 if first is None else 0.5)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != (STOPPED if stopped else 0) or first is None:
        raise NotHere(f"exit code {process.returncode}: {log.read_text()[-3000:]}")
    return first


def read_echelon(folder, num_steps):
    """(seconds, losses, peak bytes) of the first steps of echelon's run, from its metrics."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"][:num_steps]
    return [row["step_seconds"] for row in rows], [row["loss"] for row in rows], rows[-1]["memory_peak_bytes"]


def read_peer(folder):
    """(seconds, losses, peak bytes) of a peer: the losses are the mean over its ranks, which have as many targets."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    losses = [statistics.fmean(each) for each in zip(*(record["losses"] for record in records), strict=True)]
    return records[0]["seconds"], losses, max(record["peak"] for record in records)


def measure_limit(inputs):
    """Tokens per second of the matmuls' rate: all processes measure at once, with a core each."""
    from echelon.model.build import load_config
    from echelon.planner.shape import build_shape

    command = [sys.executable, __file__, "--matmul"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(inputs.processes)
    ]
    flops = sum(float(process.communicate()[0].split()[-1]) for process in started)
    shape = build_shape(load_config(str(inputs.base)).to_dict())
    return flops / shape.flops_per_token(inputs.size.sequence_len)


def find_best(inputs, engine, mode, num_steps):
    """Try the usual and the candidate settings of a side for a few steps each; return the fastest and all results."""
    found = {}
    variants = [("usual", USUAL[engine]), *(("best", each) for each in CANDIDATES[engine])]
    for number, (variant, setting) in enumerate(variants):
        folder = inputs.scratch / "search" / f"{engine}-{mode}-{number}"
        try:
            run = run_side(inputs, Side(engine, mode, variant, setting), num_steps, folder)
        except NotHere as reason:
            print(f"search: {engine}, {mode}, {setting}: {str(reason).splitlines()[-1]}", flush=True)
            continue
        found[setting] = statistics.median(run["seconds"][WARMUP_STEPS:])
        print(f"search: {engine}, {mode}, {setting}: {found[setting]:.3f} s a step", flush=True)
    return (min(found, key=found.get) if found else None), {str(key): value for key, value in found.items()}


def choose_sides(arguments, inputs, remarks):
    """The sides to measure, and the search's results."""
    sides, searched, kept = [], {}, {}
    if arguments.settings:
        known = json.loads(arguments.settings.read_text())["sides"]
        kept = {
            (each["engine"], each["mode"]): Setting(**each["setting"]) for each in known if each["variant"] == "best"
        }
    for engine in arguments.sides:
        package = PACKAGES.get(engine)
        if package and find_spec(package) is None:
            remarks.append(f"{engine}: not measured, {package} is not installed")
            continue
        for mode in arguments.modes:
            if (engine, mode) == ("fabric", "fsdp"):
                remarks.append(
                    "fabric, fsdp: not measured: its FSDPStrategy needs a GPU, and under its ModelParallelStrategy "
                    "users call fully_shard themselves, as the expert's loop does"
                )
                continue
            sides.append(Side(engine, mode, "usual", USUAL[engine]))
            best = kept.get((engine, mode))
            if arguments.search_steps and best is None:
                best, searched[f"{engine}, {mode}"] = find_best(inputs, engine, mode, arguments.search_steps)
            if best is not None:
                sides.append(Side(engine, mode, "best", best))
    return sides, searched


def measure(arguments, inputs, sides, remarks):
    """Run every side in every round: the runs of each side by its name, and the limit of each round."""
    runs, limits = {side.name: [] for side in sides}, []
    for number in range(arguments.rounds):
        limits.append(measure_limit(inputs))
        print(f"round {number + 1}: limit {limits[-1]:,.0f} tokens/s", flush=True)
        num_steps = max(arguments.steps, arguments.loss_steps) if number == 0 else arguments.steps
        for place, side in enumerate(reversed(sides) if number % 2 else sides):
            try:
                run = run_side(inputs, side, num_steps, inputs.scratch / f"round-{number}" / str(place))
            except NotHere as reason:
                remarks.append(f"{side.name}: failed in round {number + 1}, {str(reason).splitlines()[-1]}")
                print(f"{side.name}: {reason}", file=sys.stderr, flush=True)
                continue
            runs[side.name].append(run)
            step = statistics.median(run["seconds"][WARMUP_STEPS:])
            print(f"round {number + 1}: {side.name}: {step:.3f} s a step, loss {run['losses'][-1]:.4f}", flush=True)
    return runs, limits


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help=f"per side and round; {WARMUP_STEPS} are not counted")
    parser.add_argument("--loss-steps", type=int, default=200, help="of the first round, which compares the losses")
    parser.add_argument("--search-steps", type=int, default=8, help="of each setting tried; 0: only the usual settings")
    parser.add_argument("--settings", type=Path, help="take the best settings from this result, without a search")
    parser.add_argument("--sides", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--modes", nargs="+", choices=["ddp", "fsdp"], default=["ddp", "fsdp"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a test of this program")
    parser.add_argument("--out", type=Path, help="the results, without their suffixes")
    parser.add_argument("--matmul", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(arguments.steps, arguments.search_steps or arguments.steps) <= WARMUP_STEPS:
        parser.error(f"--steps and --search-steps must be above {WARMUP_STEPS}, the steps that are not counted")
    return arguments


def main():
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # `launch` then ends its processes
    if arguments.matmul:
        print(max(measure_matmul() for _ in range(20)))
        return
    if hasattr(os, "sched_setaffinity"):  # a core for each process, also on a machine with more
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processes])
    remarks = []
    with tempfile.TemporaryDirectory() as scratch:
        num_steps = max(arguments.steps, arguments.loss_steps, arguments.search_steps)
        size = TINY if arguments.size == "tiny" else FULL
        inputs = write_inputs(Path(scratch), size, arguments.processes, num_steps)
        sides, searched = choose_sides(arguments, inputs, remarks)
        runs, limits = measure(arguments, inputs, sides, remarks)
    sides = [side for side in sides if runs[side.name]]
    packages = [each for each in ("torch", "transformers", *PACKAGES.values()) if find_spec(each)]
    results = {
        "machine": describe_machine(*dict.fromkeys(packages)),
        "work": f"{size.sequence_len} tokens, micro batch {size.micro_batch}, {arguments.processes} processes",
        "tokens": size.sequence_len * size.micro_batch * arguments.processes,
        "warmup": WARMUP_STEPS, "limits": limits, "search": searched, "remarks": remarks,
        "sides": [asdict(side) | {"name": side.name, "words": str(side.setting)} for side in sides],
        "runs": runs,
    }  # fmt: skip
    differences, results["remarks"] = find_differences(results, remarks)
    text = render_table(results, differences)
    print(text)
    if arguments.out:
        arguments.out.with_suffix(".json").write_text(json.dumps(results) + "\n")
        arguments.out.with_suffix(".md").write_text(text)
        arguments.out.with_suffix(".svg").write_text(render_picture(results))
    failed = [remark for remark in results["remarks"] if "failed" in remark]
    sys.exit("\n".join(failed) if failed else 0)


if __name__ == "__main__":
    main()
