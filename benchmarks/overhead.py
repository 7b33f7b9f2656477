"""The step time of echelon compared with a plain PyTorch loop, with the same model, batches and optimizer.

    python benchmarks/overhead.py [TEXT_FILE] [--size tiny|small] [--precision fp32|bf16] [--compile]

Runs in one process, on a GPU if there is one. Rounds of both loops alternate, so that a drift of the machine's speed
affects both. Each round gives two median step times; the result is the median of their ratio over rounds, with its
range.
"""

import argparse
import json
import math
import pydoc_data.topics
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from echelon.data.prepared import open_prepared
from echelon.distributed.runtime import start_runtime, stop_runtime
from echelon.hardware.detection import detect_cluster
from echelon.lifecycle.assemble import build_trainer
from echelon.lifecycle.setup import prepare_run
from echelon.model.build import load_config
from echelon.recipe import load_recipe
from echelon.training.pauses import Due

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


class PlainLoop:
    """A careful hand-written loop: fused AdamW, clipping, a schedule, the loss read at every step."""

    def __init__(self, config, tokens, batch, length, device, plan):
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=plan.precision.compute == "bfloat16")
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
        self.tokens, self.batch, self.length, self.device = tokens, batch, length, device
        self.step = 0
        if plan.compile:
            self.model = torch.compile(self.model)

    def run(self, steps):
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            starts = np.random.randint(0, len(self.tokens) - self.length - 1, self.batch)
            rows = torch.from_numpy(np.stack([self.tokens[s : s + self.length + 1] for s in starts]).astype(np.int64))
            rows = rows.to(self.device)
            with self.autocast:
                logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-4 + 4.5e-4 * (1 + math.cos(math.pi * self.step / 2000))
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss.item()
            self.step += 1
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)


def run_echelon(trainer, folder, steps):
    trainer.num_steps += steps
    trainer.fit()
    rows = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    return statistics.median(row["step_seconds"] for row in rows[-steps:] if row["kind"] == "train")


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
            "checkpoint.every_steps=1000000", "train.log_every=10", f"train.precision={arguments.precision}",
            f"train.compile={str(arguments.compile).lower()}", *SIZES[arguments.size],
        ]  # fmt: skip
        recipe, _ = load_recipe(RECIPE, overrides)
        prepared = prepare_run(recipe, False, lambda: detect_cluster(1), {})
        folder, data = (
            prepared.folder,
            open_prepared(prepared.folder.text.read_prepared_path(), recipe.data.sequence_len),
        )
        runtime = start_runtime()
        trainer = build_trainer(recipe, prepared.plan, folder, runtime)
        trainer.num_steps = 0
        trainer.pauses.agree_on_due = lambda done, is_last: Due()  # only the steps are measured
        config = load_config(str(folder.model_dir))
        tokens = data.train.read_samples(np.arange(data.train.num_samples - 1)).inputs.ravel()
        length, plan = recipe.data.sequence_len, prepared.plan
        plain = PlainLoop(config, tokens, recipe.global_batch_size, length, runtime.device, plan)
        plain.run(arguments.steps)
        run_echelon(trainer, folder, arguments.steps)
        rounds = [
            (plain.run(arguments.steps), run_echelon(trainer, folder, arguments.steps)) for _ in range(arguments.rounds)
        ]
        trainer.train_step.loader.close()
        trainer.saver.store.close()
        stop_runtime()
    ratios = [ours / theirs for theirs, ours in rounds]
    device = (
        torch.cuda.get_device_name() if runtime.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{device}, torch {torch.__version__}, {arguments.size}, {arguments.precision}, "
        f"{'compiled' if arguments.compile else 'eager'}, {arguments.rounds} rounds of {arguments.steps} steps each"
    )
    print(f"plain loop  {1e3 * statistics.median(theirs for theirs, _ in rounds):.2f} ms a step")
    print(f"echelon     {1e3 * statistics.median(ours for _, ours in rounds):.2f} ms a step")
    print(f"ratio       {statistics.median(ratios):.3f}  (min {min(ratios):.3f}, max {max(ratios):.3f})")


if __name__ == "__main__":
    main()
