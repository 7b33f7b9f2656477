"""The step time of echelon compared with a plain PyTorch loop, with the same model, batches and optimizer.

    python benchmarks/overhead.py [TEXT_FILE] [--size tiny|small] [--precision fp32|bf16] [--compile]

Runs in one process, on a GPU if there is one. Rounds of both loops alternate, so that a drift of the machine's speed
affects both. Each round gives two median step times; the result is the median of their ratio over rounds, with its
range. The same is printed in processor time of this process, which other programs on the machine disturb less.
"""

import argparse
import pydoc_data.topics
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from echelon.learn.data.prepared import open_prepared
from echelon.learn.model.build import load_config
from echelon.planner.hardware.detection import detect_cluster
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.setup import prepare_run
from measuring import describe_machine
from sides import EchelonTrainer, PlainLoop

RECIPE = Path(__file__).parents[1] / "recipes" / "tinyshakespeare.yaml"
TEXT = Path(pydoc_data.topics.__file__)  # real text that exists on every machine
SIZES = {
    "tiny": [],  # the recipe unchanged: a model so small that the trainer's own time is visible
    "small": [  # a Llama with the width and depth of GPT-2
        "model.config.hidden_size=768", "model.config.intermediate_size=2048", "model.config.num_hidden_layers=12",
        "model.config.num_attention_heads=12", "model.config.num_key_value_heads=12", "model.config.vocab_size=32000",
        "model.config.max_position_embeddings=512", "data.sequence_len=512", "train.global_batch_size=16",
        "train.micro_batch_size=16",
    ],
}  # fmt: skip


def draw_batches(tokens, batch, length):
    """Endless steps of one microbatch each, from random places of the tokens."""
    while True:
        starts = np.random.randint(0, len(tokens) - length - 1, batch)
        rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
        yield [(rows[:, :-1], rows[:, 1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", default=TEXT)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true", help="compile both, each in its usual way")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [
            f"data.train.0.path={arguments.text}", f"run.dir={scratch}/run", "train.eval_every=1000000",
            "checkpoint.every=1000000", "train.log_every=10", f"train.precision={arguments.precision}",
            f"train.compile={str(arguments.compile).lower()}", *SIZES[arguments.size],
        ]  # fmt: skip
        recipe, _ = load_recipe(RECIPE, overrides)
        prepared = prepare_run(recipe, False, lambda: detect_cluster(1), {})
        data = open_prepared(prepared.folder.text.read_prepared_path(), recipe.data.sequence_len)
        echelon = EchelonTrainer(prepared.folder.path)
        device, plan = echelon.runtime.device, prepared.plan
        tokens = data.train.read_samples(np.arange(data.train.num_samples - 1)).inputs.ravel()
        model = AutoModelForCausalLM.from_config(load_config(str(prepared.folder.model_dir)), dtype=torch.float32)
        batches = draw_batches(tokens, recipe.global_batch_size, recipe.data.sequence_len)
        plain = PlainLoop(model.to(device), batches, plan.compile, plan.precision.compute == "bfloat16")

        def run_plain():
            before = time.process_time()
            seconds, _ = plain.run(arguments.steps)
            return statistics.median(seconds), (time.process_time() - before) / arguments.steps

        def run_echelon():
            rows = echelon.run(arguments.steps)
            return statistics.median(row["step_seconds"] for row in rows), echelon.processor_seconds / arguments.steps

        run_plain(), run_echelon()
        rounds = [(run_plain(), run_echelon()) for _ in range(arguments.rounds)]
        echelon.close()
    print(
        f"{describe_machine('torch', 'transformers')}; {arguments.size}, {arguments.precision}, "
        f"{'compiled' if arguments.compile else 'eager'}, {torch.get_num_threads()} threads, "
        f"{arguments.rounds} rounds of {arguments.steps} steps each"
    )
    for place, clock in enumerate(("by the clock, ms a step", "in processor time, ms a step")):
        theirs, ours = ([1e3 * each[side][place] for each in rounds] for side in (0, 1))
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        print(clock)
        print(f"  plain loop  {statistics.median(theirs):.2f}")
        print(f"  echelon     {statistics.median(ours):.2f}")
        print(f"  ratio       {statistics.median(ratios):.3f}  (min {min(ratios):.3f}, max {max(ratios):.3f})")


if __name__ == "__main__":
    main()
