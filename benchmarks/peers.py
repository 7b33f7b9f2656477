"""Pretraining by echelon and its peers: speed, step times, memory and start-up of the same work on CPUs.

    python benchmarks/peers.py [--turns 6] [--steps 4] [--loss-steps 200] [--sides hf-trainer ...] [--modes ddp fsdp]
        [--search-turns 2 | --settings RESULTS.json] [--together 5] [--out benchmarks/results/peers-cpu]

A Llama of 34 M parameters, sequences of 512 tokens, micro batch 4, bf16 or fp32 (`--precision`), AdamW with clipping,
on processes with one core each. Every side starts from the same weights and trains on the same batches; a side whose
losses differ fails the run. A side is measured with the settings of its users, and with the fastest of CANDIDATES,
found by a search before.

The sides of a group are all started, and then run in turns of a few seconds (paused_runs.py), because a machine's speed
changes over minutes by more than what is measured. Every group contains echelon with its defaults, and each side is
compared with it turn by turn. Nothing else should run.

*start-up* is the time from the command to the end of the first step. *peak* is the largest resident memory of a rank.
*limit* is the speed at which the cores would do the model's FLOPs at the rate of a square product of this precision,
measured by all processes at once before each round of turns. Writes FILE.json, FILE.md and FILE.svg.
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
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from finetuning import SEED, TINY, Size, write_base
from measuring import NotHere, describe_machine, measure_matmul
from paused_runs import SETTLING_STEPS, EchelonRecords, PausedRun, PeerRecords
from peer_report import write_report

FULL = Size(512, 8, 8, 8, 1408, 8192, 512, 4)
RATE, NEVER, WARMUP_STEPS = 3e-4, 1_000_000, 4
LONG_STEPS = 20_000  # hours of training: the length of the run decides whether `compile: auto` compiles
PAUSE_SECONDS = 1800  # what a collective may take, because a rank that is stopped in it waits for its next turn
PACKAGES = {"hf-trainer": "accelerate", "accelerate": "accelerate", "fabric": "lightning", "deepspeed": "deepspeed"}
ENGINES = ("echelon", "hf-trainer", "accelerate", "fabric", "deepspeed", "expert")


@dataclass(frozen=True)
class Setting:
    """How a side trains. `compiles`: no, model, layers; of echelon no, yes, auto. `keeps`: freed memory, by malloc.

    `reduces`: what echelon adds up gradients in.
    """

    attention: str | None = "sdpa"
    compiles: str = "model"
    keeps: bool = False
    reduces: str = "fp32"

    def __str__(self):
        compiled = {"no": "eager", "auto": "compile: auto"}.get(self.compiles, f"compiled ({self.compiles})")
        kept = ", memory kept" if self.keeps else ""
        reduced = "" if self.reduces == "fp32" else f", gradients in {self.reduces}"
        return f"{compiled}, {self.attention or 'default'} attention{kept}{reduced}"


# As their users run them: bf16, compiled, the default attention. echelon: the defaults of a recipe for a long run.
USUAL = {"echelon": Setting(None, "auto")} | dict.fromkeys(ENGINES[1:], Setting("sdpa", "model"))
# What the search tries beside that. Each is documented by its makers:
# - whole or regional compilation: "Regional compilation" in PyTorch's recipes, TorchDynamoPlugin in Accelerate's
#   reference, "torch.compile" in Fabric's guide, engine.compile() in DeepSpeed's compiler tutorial
# - attn_implementation: "Attention interface" in transformers' guide
# - freed memory kept: mallopt(3), as environment variables; "Performance Tuning Guide" of PyTorch, on allocators
CANDIDATES = {
    "echelon": (
        Setting(None, "yes"),
        Setting(None, "yes", reduces="bf16"),
        Setting("eager", "yes"),
        Setting("sdpa", "yes"),
        Setting(None, "no"),
    )
}
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
    precision: str
    processes: int
    num_steps: int

    @property
    def base(self):
        return self.scratch / f"base-fp32-{self.size.hidden}"

    @property
    def rows(self):
        return self.scratch / "rows.npy"


def write_inputs(scratch, size, precision, processes, num_steps):
    """Write the weights and the tokenizer, prepare the text, and write the rows of tokens in echelon's order."""
    from echelon.learn.data.order import SampleOrder
    from echelon.learn.data.prepared import open_prepared
    from echelon.planner.hardware.detection import detect_cluster
    from echelon.recipe.load import load_recipe
    from echelon.run.lifecycle.setup import prepare_run

    inputs = Inputs(scratch, size, precision, processes, num_steps)
    write_base(scratch, size, "fp32")
    sources = sorted(Path(inspect.__file__).parent.glob("*.py"))
    (scratch / "all.txt").write_text("\n".join(path.read_text(errors="ignore") for path in sources))
    path = write_recipe(inputs, scratch / "first", Side("echelon", "ddp", "usual", USUAL["echelon"]))
    recipe, _ = load_recipe(path)
    run = prepare_run(recipe, False, lambda: detect_cluster(processes), {})
    data = open_prepared(run.folder.text.read_prepared_path(), size.sequence_len).train
    wanted = num_steps * size.micro_batch * processes
    if data.num_samples < wanted:
        raise SystemExit(
            f"the text has {data.num_samples} sequences; {num_steps} steps need {wanted}; take fewer steps"
        )
    samples = data.read_samples(SampleOrder(data.num_samples, SEED).sample_ids(0, wanted))
    write_rows(inputs.rows, samples)
    return inputs


def write_rows(path, samples):
    """Write what `Rows` of peer_sides.py reads: tokens, and labels, of which none follow the end of the text."""
    np.save(path, np.stack([samples.inputs, samples.labels], axis=1))


def write_recipe(inputs, folder, side):
    """Write echelon's recipe: the defaults, except for the work itself; the setting changes them for the best."""
    folder.mkdir(parents=True)
    train = {
        "steps": LONG_STEPS, "global_batch_size": inputs.size.micro_batch * inputs.processes, "eval_every": NEVER,
        "precision": inputs.precision,
    }  # fmt: skip
    model = {"checkpoint": str(inputs.base)}
    setting = side.setting
    if side.variant == "best":
        compiles = {"yes": True, "no": False}.get(setting.compiles, "auto")
        train |= {"micro_batch_size": inputs.size.micro_batch, "compile": compiles}
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
        "parallel": side.mode,
        "checkpoint": {"every": NEVER},
        "fault": {"hang_seconds": PAUSE_SECONDS},
    }  # fmt: skip
    if setting.reduces != "fp32":
        recipe["sync"] = {"compress": {"method": setting.reduces}}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def start_side(inputs, side, folder):
    """Start a side in processes of its own."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(inputs.scratch / "compiled"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # of ninja, which DeepSpeed builds with
        "DS_ACCELERATOR": "cpu",
    }
    environment |= KEEP_MEMORY if side.setting.keeps else {}
    if side.engine == "echelon":
        command = ["-m", "echelon", "train", write_recipe(inputs, folder, side), "--nproc", inputs.processes]
        records = EchelonRecords(folder / "run")
    else:
        folder.mkdir(parents=True)
        work = {
            "engine": side.engine, "mode": side.mode, "setting": asdict(side.setting), "base": str(inputs.base),
            "rows": str(inputs.rows), "micro_batch": inputs.size.micro_batch, "steps": inputs.num_steps, "rate": RATE,
            "folder": str(folder), "precision": inputs.precision,
        }  # fmt: skip
        (folder / "work.json").write_text(json.dumps(work))
        ranks = ["--standalone", "--nproc-per-node", inputs.processes]
        sides = Path(__file__).with_name("peer_sides.py")
        command = ["-m", "torch.distributed.run", *ranks, sides, folder / "work.json"]
        records = PeerRecords(folder, inputs.processes)
    return PausedRun(command, environment, folder / "log", records)


def run_in_turns(inputs, sides, folder, num_turns, num_steps, loss_steps=0, limits=None):
    """Run sides in turns, in alternating order: ({side: its run}, {side that failed: why}).

    A run has `turns`, the seconds of the counted steps of each; `losses`, of at least `loss_steps` steps; `peak`, in
    bytes; and `start`, in seconds. `limits`: a list for the limit before each round.
    """
    started, failed, turns = {}, {}, {}
    try:
        for place, side in enumerate(sides):
            started[side] = start_side(inputs, side, folder / str(place))
            attempt(failed, side, started[side].warm_up, WARMUP_STEPS)
        for number in range(num_turns):
            if limits is not None:
                limits.append(measure_limit(inputs))
            running = [side for side in sides if side not in failed]
            for side in reversed(running) if number % 2 else running:
                turns.setdefault(side, []).append(attempt(failed, side, started[side].take_turn, num_steps))
        for side in sides:
            if side not in failed and len(started[side].read()[1]) < loss_steps:
                attempt(failed, side, started[side].run_until, loss_steps)
        runs = {}
        for side in sides:
            if side not in failed:
                _, losses, peak = started[side].read()
                runs[side] = {
                    "turns": turns[side],
                    "losses": losses,
                    "peak": peak,
                    "start": started[side].start_seconds,
                }
        return runs, failed
    finally:
        for run in started.values():
            run.end()


def attempt(failed, side, act, *arguments):
    """Return the result of an action of a side; if it fails, note the reason in `failed`."""
    try:
        return act(*arguments)
    except NotHere as reason:
        print(f"{side.name}, {side.setting}: {reason}", file=sys.stderr, flush=True)
        failed[side] = str(reason).strip().splitlines()[-1]
        return None


def measure_limit(inputs):
    """Tokens per second of the matmuls' rate: all processes measure at once, with a core each."""
    from echelon.learn.model.build import load_config
    from echelon.planner.shape import build_shape

    command = [sys.executable, __file__, "--matmul", "--precision", inputs.precision]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(inputs.processes)
    ]
    flops = sum(float(process.communicate()[0].split()[-1]) for process in started)
    shape = build_shape(load_config(str(inputs.base)).to_dict())
    return flops / shape.flops_per_token(inputs.size.sequence_len)


def find_best(inputs, engine, mode, arguments):
    """Try the usual and the candidate settings of a side in turns: the fastest, and the seconds of a step of each.

    If there are more than run together, the fastest so far runs with the next ones.
    """
    left = [
        Side(engine, mode, "usual", USUAL[engine]),
        *(Side(engine, mode, "best", each) for each in CANDIDATES[engine]),
    ]
    best, found = [], {}
    while left:
        taken = arguments.together - len(best)
        group, left = [*best, *left[:taken]], left[taken:]
        folder = inputs.scratch / "search" / f"{engine}-{mode}-{len(left)}"
        runs, failed = run_in_turns(inputs, group, folder, arguments.search_turns, arguments.steps)
        for side, reason in failed.items():
            print(f"search: {engine}, {mode}, {side.setting}: {reason}", flush=True)
        steps = {side: statistics.median(map(statistics.median, run["turns"])) for side, run in runs.items()}
        for side, seconds in steps.items():
            print(f"search: {engine}, {mode}, {side.setting}: {seconds:.3f} s a step", flush=True)
            found[str(side.setting)] = seconds
        best = [min(steps, key=steps.get)] if steps else []
    return (best[0].setting if best else None), found


def choose_sides(arguments, inputs, remarks):
    """The sides to measure, and the search's results."""
    sides, searched, kept = [], {}, {}
    if "fsdp" in arguments.modes:
        remarks.append(
            "fsdp: HF Trainer and Accelerate add up gradients in bf16 there, echelon and the expert's loop in fp32 "
            "unless a row says otherwise, which sends twice as many bytes in the backward pass"
        )
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
            if arguments.search_turns and best is None:
                best, searched[f"{engine}, {mode}"] = find_best(inputs, engine, mode, arguments)
            if best is not None:
                sides.append(Side(engine, mode, "best", best))
    return sides, searched


def form_groups(sides, together):
    """The sides that run together: of one mode, with echelon's defaults first, and the usual before the best."""
    groups = []
    for mode in dict.fromkeys(side.mode for side in sides):
        others = sorted((side for side in sides if side.mode == mode), key=lambda side: side.variant == "best")
        reference = [side for side in others if side == Side("echelon", mode, "usual", USUAL["echelon"])]
        others = [side for side in others if side not in reference]
        taken = together - len(reference)
        groups += [reference + others[first : first + taken] for first in range(0, len(others), taken)]
    return groups


def measure(arguments, inputs, sides, remarks):
    """Run all groups: the runs of each side by its name, each with the number of its group, and all limits."""
    runs, limits = {side.name: [] for side in sides}, []
    for number, group in enumerate(form_groups(sides, arguments.together)):
        folder = inputs.scratch / f"group-{number}"
        options = (arguments.turns, arguments.steps, arguments.loss_steps, limits)
        found, failed = run_in_turns(inputs, group, folder, *options)
        remarks += [f"{side.name}: failed, {reason}" for side, reason in failed.items()]
        for side, run in found.items():
            runs[side.name].append(run | {"group": number})
            steps = " ".join(f"{statistics.median(turn):.3f}" for turn in run["turns"])
            print(f"group {number + 1}: {side.name}: {steps} s a step, loss {run['losses'][-1]:.4f}", flush=True)
    print("limits: " + " ".join(f"{limit:,.0f}" for limit in limits) + " tokens/s", flush=True)
    return runs, limits


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="of each side")
    parser.add_argument(
        "--steps", type=int, default=4, help=f"of a turn that count, after {SETTLING_STEPS} that do not"
    )
    parser.add_argument("--loss-steps", type=int, default=200, help="steps at least whose losses are compared")
    parser.add_argument("--search-turns", type=int, default=2, help="of each setting; 0: only the usual settings")
    parser.add_argument("--together", type=int, default=5, help="sides in memory at once, about 4 GB each")
    parser.add_argument("--settings", type=Path, help="take the best settings from this result, without a search")
    parser.add_argument("--sides", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--modes", nargs="+", choices=["ddp", "fsdp"], default=["ddp", "fsdp"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a test of this program")
    parser.add_argument("--out", type=Path, help="the results, without their suffixes")
    parser.add_argument("--matmul", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # `run_in_turns` ends its processes
    if arguments.matmul:
        print(max(measure_matmul(arguments.precision) for _ in range(20)))
        return
    if hasattr(os, "sched_setaffinity"):  # a core for each process, also on a machine with more
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processes])
    remarks = []
    with tempfile.TemporaryDirectory() as scratch:
        # A side that is to be stopped may run a few steps more.
        turns = max(arguments.turns, arguments.search_turns) * (arguments.steps + SETTLING_STEPS + 2)
        num_steps = WARMUP_STEPS + turns + arguments.loss_steps + 10
        size = TINY if arguments.size == "tiny" else FULL
        inputs = write_inputs(Path(scratch), size, arguments.precision, arguments.processes, num_steps)
        sides, searched = choose_sides(arguments, inputs, remarks)
        runs, limits = measure(arguments, inputs, sides, remarks)
    sides = [side for side in sides if runs[side.name]]
    packages = [each for each in ("torch", "transformers", *PACKAGES.values()) if find_spec(each)]
    results = {
        "machine": describe_machine(*dict.fromkeys(packages)),
        "work": f"{size.sequence_len} tokens, micro batch {size.micro_batch}, {arguments.processes} processes, "
        f"{arguments.precision}",
        "tokens": size.sequence_len * size.micro_batch * arguments.processes,
        "turns": arguments.turns, "limits": limits, "search": searched, "remarks": remarks,
        "sides": [asdict(side) | {"name": side.name, "words": str(side.setting)} for side in sides],
        "runs": runs,
    }  # fmt: skip
    print(write_report(results, arguments.out))
    failed = [remark for remark in results["remarks"] if "failed" in remark]
    sys.exit("\n".join(failed) if failed else 0)


if __name__ == "__main__":
    main()
