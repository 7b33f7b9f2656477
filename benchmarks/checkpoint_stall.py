"""The training time lost to a save: asynchronous, synchronous, and compared with HF Trainer's save of the same model.

    python benchmarks/checkpoint_stall.py [--rounds 7] [--folder DISK]

Runs in one process, on a GPU if there is one, and saves weights and AdamW's two moments. Each round saves in all three
ways, with steps in between. *the call* is the pause between two steps. After an asynchronous save, training continues
during the writing: *slowed steps* is the additional time of these steps, compared with the same number of ordinary
steps, until the checkpoint is published. *stall* is the sum of both. *checksums* is the time of hashing alone, which is
part of a save.
"""

import argparse
import os
import platform
import pydoc_data.topics
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from echelon.ground.checksums import describe_files
from echelon.learn.distributed.runtime import stop_runtime
from echelon.learn.model.build import load_config
from echelon.planner.hardware.detection import detect_cluster
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.assemble import build_trainer
from echelon.run.lifecycle.process_group import start_runtime
from echelon.run.lifecycle.setup import prepare_run

RECIPE = Path(__file__).parents[1] / "recipes" / "tinyshakespeare.yaml"
TEXT = Path(pydoc_data.topics.__file__)  # real text that exists on every machine
# A Llama with GPT-2's width and half its depth; few tokens per step, so that a save takes long compared with a step.
CHANGES = [
    "model.config.hidden_size=768", "model.config.intermediate_size=2048", "model.config.num_hidden_layers=6",
    "model.config.num_attention_heads=12", "model.config.num_key_value_heads=12", "model.config.vocab_size=16384",
    "train.micro_batch_size=1", "train.global_batch_size=1", "train.eval_every=1000000", "train.steps=1000000",
    "checkpoint.every=1000000", "checkpoint.keep_last=1", "train.log_every=1000000",
]  # fmt: skip
ORDINARY_STEPS = 3


class Echelon:
    """echelon's trainer, run step by step; saves on request."""

    def __init__(self, trainer, checkpoints_dir):
        self.trainer, self.checkpoints_dir = trainer, checkpoints_dir
        self.store = trainer.saver.store
        self.state = {"train": trainer.state.to_dict(), "sync": {}}
        self.step_number = 0

    def step(self):
        started = time.perf_counter()
        self.trainer.train_step(self.step_number)
        if self.trainer.train_step.learner.device.type == "cuda":
            torch.cuda.synchronize()
        self.step_number += 1
        return time.perf_counter() - started

    def ordinary_step(self):
        return statistics.median(self.step() for _ in range(ORDINARY_STEPS))

    def save(self, asynchronous):
        self.store.asynchronous = asynchronous
        started = time.perf_counter()
        self.store.save(self.step_number, self.trainer.train_step.learner.engine.state_dict(), self.state)
        return time.perf_counter() - started

    def save_asynchronously(self):
        """(the call, the additional time of the steps until the checkpoint was published)."""
        ordinary = self.ordinary_step()
        call, began, steps = self.save(True), time.perf_counter(), []
        while not self.store.is_idle:
            steps.append(self.step())
        writing = time.perf_counter() - began
        self.store.wait()
        return call, sum(steps) - len(steps) * ordinary, writing, ordinary

    def save_synchronously(self):
        """(the call, the hashing of the same files)."""
        self.step()
        call = self.save(False)
        [folder] = self.checkpoints_dir.glob("step-*")
        started = time.perf_counter()
        describe_files(folder.glob("*.distcp"))
        return call, time.perf_counter() - started


def build_peer(config, folder, device):
    """HF Trainer with the same model, after one step, so that its optimizer has its state."""

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            row = torch.arange(64) + index
            return {"input_ids": row, "labels": row}

    peer = Trainer(
        model=AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=folder, max_steps=1, per_device_train_batch_size=2, save_strategy="no", report_to=[],
            use_cpu=device.type == "cpu", disable_tqdm=True, save_total_limit=1,
        ),
        train_dataset=Rows(),
    )  # fmt: skip
    peer.train()
    return peer


def save_with_peer(peer):
    """HF Trainer's save: weights, optimizer, scheduler and random state, without a flush to disk."""
    peer.state.global_step += 1
    started = time.perf_counter()
    peer._save_checkpoint(peer.model, trial=None)
    return time.perf_counter() - started


def show(name, seconds):
    print(f"| {name} | {statistics.median(seconds):.3f} s | {min(seconds):.3f} to {max(seconds):.3f} s |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        recipe, _ = load_recipe(RECIPE, [f"data.train.0.path={TEXT}", f"run.dir={scratch}/run", *CHANGES])
        prepared = prepare_run(recipe, False, lambda: detect_cluster(1), {})
        runtime = start_runtime()
        trainer = build_trainer(recipe, prepared.plan, prepared.folder, runtime)
        ours = Echelon(trainer, prepared.folder.checkpoints_dir)
        config = load_config(str(prepared.folder.model_dir))
        peer = build_peer(config, f"{scratch}/peer", runtime.device)
        ours.save_asynchronously(), ours.save_synchronously(), save_with_peer(peer)  # not counted
        rounds = [
            (ours.save_asynchronously(), ours.save_synchronously(), save_with_peer(peer))
            for _ in range(arguments.rounds)
        ]
        num_parameters = sum(each.numel() for each in trainer.train_step.learner.engine.weights().values())
        num_bytes = sum(path.stat().st_size for path in prepared.folder.checkpoints_dir.rglob("*.distcp"))
        trainer.train_step.loader.close()
        trainer.saver.store.close()
        stop_runtime()
    beside, alone, theirs = zip(*rounds, strict=True)
    calls, slowed, writing, ordinary = zip(*beside, strict=True)
    synchronous, hashing = zip(*alone, strict=True)
    device = (
        torch.cuda.get_device_name() if runtime.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{device} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}"
    )
    print(
        f"{num_parameters / 1e6:.0f} M parameters, {num_bytes / 1e9:.2f} GB per checkpoint, "
        f"{arguments.rounds} rounds, an ordinary step {statistics.median(ordinary):.3f} s\n"
    )
    print("| per save | median | spread over rounds |\n|---|---|---|")
    show("HF Trainer's save (not flushed, no checksums)", theirs)
    show("synchronous save", synchronous)
    show("of it, checksums", hashing)
    show("asynchronous: the call", calls)
    show("asynchronous: slowed steps", slowed)
    show("asynchronous: stall", [call + slow for call, slow in zip(calls, slowed, strict=True)])
    show("asynchronous: from the call to published", writing)
    ratios = {
        "the call / synchronous": [call / whole for call, whole in zip(calls, synchronous, strict=True)],
        "stall / synchronous": [(c + s) / whole for c, s, whole in zip(calls, slowed, synchronous, strict=True)],
        "the call / HF Trainer's": [call / whole for call, whole in zip(calls, theirs, strict=True)],
    }
    for name, values in ratios.items():
        print(f"| {name} | {statistics.median(values):.1%} | {min(values):.1%} to {max(values):.1%} |")


if __name__ == "__main__":
    main()
