"""The time of a step while torch's profiler records it, or without what is always counted, beside other steps.

    python benchmarks/profiling_cost.py [--size tiny|medium|small] [--rounds 8] [--steps 5]

Runs in one process, on a GPU if there is one. Every round trains a block of steps without recording and one for each
way of recording, in an order that rotates, so that a drift of the machine's speed affects all. A round gives a median
step for each, by the clock and in processor time of this process, which other programs on the machine disturb less.
Printed are the median of their ratios, and the ratio of every round. A second block without recording shows the noise;
others show what named regions, and counting bytes and the rank's own time, cost a run that records nothing.
"""

import argparse
import pydoc_data.topics
import statistics
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import profile

from echelon.learn.distributed import traffic
from echelon.learn.parallel import step
from echelon.planner.hardware.detection import detect_cluster
from echelon.planner.hardware.heap import keep_freed_memory
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.setup import prepare_run
from echelon.run.training import meters, profiler, training_step
from echelon.run.training.profiler import Recorder
from measuring import describe_machine
from overhead import RECIPE, SIZES
from sides import EchelonTrainer

TEXT = Path(pydoc_data.topics.__file__)
MEDIUM = [
    "model.config.hidden_size=512", "model.config.intermediate_size=1376", "model.config.num_hidden_layers=6",
    "model.config.num_attention_heads=8", "model.config.num_key_value_heads=8", "data.sequence_len=256",
    "model.config.max_position_embeddings=256", "train.global_batch_size=2", "train.micro_batch_size=2",
]  # fmt: skip
WAYS = {"not recorded": None, "as echelon records": {}, "without shapes": {"record_shapes": False}}
AGAIN, BARE = "not recorded, again", "not recorded, and no region named"
UNCOUNTED = "not recorded, and nothing counted"
WARMUPS = 2  # the profiler starts in the first of them


@contextmanager
def regions_named(wanted):
    """Leave out the names of regions in steps unless they are wanted."""
    modules = (training_step, step)
    kept = [module.record_function for module in modules]
    try:
        for module in () if wanted else modules:
            module.record_function = lambda name: nullcontext()
        yield
    finally:
        for module, function in zip(modules, kept, strict=True):
            module.record_function = function


@contextmanager
def counted(echelon, wanted):
    """Count neither bytes nor this rank's own time unless that is wanted."""
    if wanted:
        yield
        return
    read, meters.read_own_time = meters.read_own_time, lambda: 0.0
    traffic.stop_counting()
    try:
        yield
    finally:
        meters.read_own_time = read
        echelon.trainer.accounting.meter.traffic = traffic.count_traffic()


class Probe:
    """A training step that notes the processor time of each call."""

    def __init__(self, step):
        self._step, self.seconds = step, []

    def __getattr__(self, name):
        return getattr(self._step, name)

    def __call__(self, *arguments):
        before = time.process_time()
        pending = self._step(*arguments)
        self.seconds.append(time.process_time() - before)
        return pending


def run_block(echelon, folder, steps, name):
    """The median of a step in a block of steps, by the clock and in processor time."""
    options, probe = WAYS.get(name), echelon.trainer.train_step
    first = echelon.trainer.state.step + WARMUPS + 1
    recorded = None if options is None else (first, steps)
    profiler.profile = lambda **given: profile(**(given | (options or {})))
    recorder = Recorder(echelon.runtime.device, lambda step: folder / "trace.json.gz", recorded)
    accounting = echelon.trainer.accounting
    accounting.monitors = [recorder if isinstance(each, Recorder) else each for each in accounting.monitors]
    probe.seconds.clear()
    with regions_named(name != BARE), counted(echelon, name != UNCOUNTED):
        rows = echelon.run(WARMUPS + steps)
    clock = statistics.median(row["step_seconds"] for row in rows[WARMUPS:])
    return clock, statistics.median(probe.seconds[WARMUPS:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES, "medium"], default="medium")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    keep_freed_memory()  # as every process of a run does
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [
            f"data.train.0.path={TEXT}", f"run.dir={scratch}/run", "train.eval_every=1000000",
            "checkpoint.every=1000000", "train.log_every=10", "train.precision=fp32", "train.compile=false",
            *(SIZES | {"medium": MEDIUM})[arguments.size],
        ]  # fmt: skip
        recipe, _ = load_recipe(RECIPE, overrides)
        prepared = prepare_run(recipe, False, lambda: detect_cluster(1), {})
        echelon = EchelonTrainer(prepared.folder.path)
        echelon.trainer.train_step = Probe(echelon.trainer.train_step)
        names = [*WAYS, AGAIN, BARE, UNCOUNTED]
        rounds = []
        for number in range(arguments.rounds + 1):
            order = names[number % len(names) :] + names[: number % len(names)]
            rounds.append({name: run_block(echelon, Path(scratch), arguments.steps, name) for name in order})
        echelon.close()
    print(
        f"{describe_machine('torch')}; {arguments.size}, fp32, eager, {torch.get_num_threads()} threads, "
        f"{arguments.rounds} rounds of {arguments.steps} steps each"
    )
    measured = rounds[1:]  # the first round warms up
    for place, clock in enumerate(("by the clock", "in processor time")):
        usual = statistics.median(each["not recorded"][place] for each in measured)
        print(f"{clock}: not recorded {1e3 * usual:.2f} ms a step")
        for name in names[1:]:
            ratios = [each[name][place] / each["not recorded"][place] for each in measured]
            print(f"  {name}: {statistics.median(ratios):.3f}  ({' '.join(f'{each:.2f}' for each in ratios)})")


if __name__ == "__main__":
    main()
