"""Predicted and measured memory, for large vocabularies and long sequences.

    python benchmarks/memory.py [CASE ...] [--json]

Each case trains a small model for two steps of two microbatches, in a separate process, on a GPU if there is one. The
measured value is the peak of the bytes allocated for tensors: from the allocator on a GPU, from the allocations that
torch's profiler records on a CPU. The predicted value is that of `echelon plan` for the same plan.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.distributed.runtime import stop_runtime
from echelon.learn.engines import EngineSpec
from echelon.learn.engines.native import NativeEngine
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.model.build import load_config
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.memory import MemoryEstimate, estimate_memory
from echelon.planner.plan import ParallelPlan, Precision
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from echelon.run.lifecycle.process_group import start_runtime

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


@dataclass(frozen=True)
class Case:
    """A model and a microbatch; HF config fields that differ from a small Llama's."""

    vocab_size: int = 256
    sequence_len: int = 1024
    micro_batch_size: int = 1
    precision: str = "float32"
    checkpointing: str = "none"
    strategy: str = "ddp"
    config: dict = field(default_factory=dict)

    def model(self):
        small = {
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1,
        }  # fmt: skip
        return {**small, "vocab_size": self.vocab_size, "max_position_embeddings": self.sequence_len, **self.config}

    def plan(self):
        precision = Precision(compute=self.precision)
        batch = {"sequence_len": self.sequence_len, "micro_batch_size": self.micro_batch_size, "num_microbatches": 2}
        return ParallelPlan(self.strategy, **batch, precision=precision, activation_checkpointing=self.checkpointing)


TIED = {"tie_word_embeddings": True}
CASES = {
    "vocabulary of 128k": Case(131072, micro_batch_size=2),
    "vocabulary of 128k, bf16": Case(131072, micro_batch_size=2, precision="bfloat16"),
    "vocabulary of 256k": Case(262144, micro_batch_size=2),
    "vocabulary of 256k, bf16": Case(262144, micro_batch_size=2, precision="bfloat16"),
    "vocabulary of 256k, tied": Case(262144, micro_batch_size=2, config=TIED),
    "vocabulary of 256k, tied, bf16": Case(262144, micro_batch_size=2, precision="bfloat16", config=TIED),
    "vocabulary of 256k, soft-capped": Case(262144, micro_batch_size=2, config={"model_type": "gemma2", **TIED}),
    "vocabulary of 128k, no head row": Case(131072, 512, config={"model_type": "olmo2"}),
    "vocabulary of 128k, no head row, bf16": Case(131072, 512, precision="bfloat16", config={"model_type": "olmo2"}),
    "sequences of 32k": Case(sequence_len=32768),
    "sequences of 32k, checkpointed": Case(sequence_len=32768, checkpointing="full"),
    "sequences of 32k, selective": Case(sequence_len=32768, checkpointing="selective"),
    "sequences of 32k, bf16": Case(sequence_len=32768, precision="bfloat16"),
    "sequences of 32k, checkpointed, bf16": Case(sequence_len=32768, precision="bfloat16", checkpointing="full"),
    "both": Case(131072, 32768, checkpointing="full"),
    "both, bf16": Case(131072, 32768, precision="bfloat16", checkpointing="full"),
}  # fmt: skip


def build_engine(case: Case, plan: ParallelPlan, device: torch.device) -> NativeEngine:
    recipe = Recipe.model_validate(
        {
            "run": {"name": "memory"},
            "model": {"config": case.model()},
            "tokenizer": "bytes",
            "data": {"train": [{"path": "x"}], "sequence_len": case.sequence_len},
            "train": {"steps": 3, "global_batch_size": 2 * case.micro_batch_size},
            "optim": {"learning_rate": 1e-3},
        }
    )
    meshes = build_mesh(plan, device.type)
    return build_native_engine(EngineSpec(recipe, load_config(case.model()), plan, meshes, device))


def train_step(engine: NativeEngine, case: Case, step: int, device: torch.device) -> None:
    """Two microbatches of random tokens, and an update."""
    shape, numbers = (case.micro_batch_size, case.sequence_len), np.arange(case.micro_batch_size)
    tokens = [torch.randint(case.vocab_size, shape, device=device) for _ in range(2)]
    batch = [Microbatch(each, each, numbers, numbers) for each in tokens]
    engine.forward_backward(step, batch, torch.tensor(2.0 * tokens[0].numel(), device=device), CausalLM())
    engine.clip(1.0)
    engine.step(1e-3, torch.ones((), dtype=torch.bool, device=device))


def measure(case: Case) -> tuple[int, MemoryEstimate]:
    """(the peak of allocated bytes, the estimate) of two steps in this process."""
    runtime = start_runtime()
    plan, device = case.plan(), runtime.device
    recorder = Recorder(device)
    with recorder:
        engine = build_engine(case, plan, device)
        for step in range(2):
            train_step(engine, case, step, device)
    stop_runtime()
    return recorder.peak_bytes, estimate_memory(build_shape(case.model()), plan, device.type)


class Recorder:
    """Records allocations during its block."""

    def __init__(self, device):
        self.peak_bytes = 0
        self._device = device
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)

    def __enter__(self):
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self._profiler.__enter__()

    def __exit__(self, *error):
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated()
            return
        self._profiler.__exit__(*error)
        held = 0
        events = [event for event in self._profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            self.peak_bytes = max(self.peak_bytes, held)


def report(name: str, as_json: bool) -> None:
    peak, estimate = measure(CASES[name])
    if as_json:
        print(json.dumps({"measured": peak, "predicted": estimate.total, **asdict(estimate)}))
        return
    parts = ", ".join(f"{part} {getattr(estimate, part) / 1e6:.0f}" for part in PARTS)
    ratio = estimate.total / peak
    print(f"| {name} | {peak / 1e6:.0f} | {estimate.total / 1e6:.0f} | {ratio:.2f} | {parts} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {'; '.join(CASES)}. Default: all of them")
    parser.add_argument("--json", action="store_true", help="one JSON object for one case")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here or arguments.json:
        report(arguments.cases[0], arguments.json)
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}; MB\n")
    print("| case | measured | predicted | ratio | predicted by part |\n|---|---|---|---|---|", flush=True)
    for name in arguments.cases or CASES:
        subprocess.run([sys.executable, __file__, "--here", name], check=True)


if __name__ == "__main__":
    main()
