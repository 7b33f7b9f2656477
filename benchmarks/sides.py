"""The sides of comparisons that train a whole model: echelon's own trainer, and a plain loop as an expert writes it."""

import json
import math
import time
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from echelon.learn.distributed.runtime import stop_runtime
from echelon.planner.plan import load_plan
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.assemble import build_trainer
from echelon.run.lifecycle.process_group import start_runtime
from echelon.run.training.trainer import Due


class EchelonTrainer:
    """echelon's trainer of a prepared run in this process, which runs blocks of steps and saves nothing.

    `processor_seconds`: of this process, in the last block.
    """

    def __init__(self, run_dir):
        self._folder = RunFolder(Path(run_dir))
        recipe, _ = load_recipe(self._folder.recipe_path)
        self.runtime = start_runtime()
        self.trainer = build_trainer(recipe, load_plan(self._folder.plan_path), self._folder, self.runtime)
        self.trainer.num_steps = 0
        self.trainer.pauses.agree_on_due = lambda done, num_steps: Due()  # only the steps are measured

    def run(self, steps):
        """Train for a block of steps; return their rows of metrics.jsonl."""
        self.trainer.num_steps += steps
        before = time.process_time()
        self.trainer.fit()
        self.processor_seconds = time.process_time() - before
        rows = [json.loads(line) for line in self._folder.metrics_path.read_text().splitlines()]
        return [row for row in rows if row["kind"] == "train"][-steps:]

    def close(self):
        """Stop the loader, the checkpoint store and the process group."""
        self.trainer.train_step.loader.close()
        self.trainer.saver.store.close()
        stop_runtime()


class PlainLoop:
    """A careful hand-written loop: fused AdamW, clipping, a schedule, the loss read at every step."""

    def __init__(self, model, batches, compiles, compute_bf16):
        """`batches`: an endless iterator of steps, each a list of microbatches (inputs, labels): int64 [batch, seq]."""
        self.model, self._batches = model.train(), batches
        self._device = next(model.parameters()).device
        self._autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=compute_bf16)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
        self._step = 0
        if compiles:
            self.model = torch.compile(self.model)

    def run(self, steps):
        """Train for a block of steps; return their seconds and losses."""
        seconds, losses = [], []
        for _ in range(steps):
            started = time.perf_counter()
            losses.append(self._train(next(self._batches)))
            seconds.append(time.perf_counter() - started)
        return seconds, losses

    def _train(self, microbatches):
        total = 0.0
        for microbatch in microbatches:
            inputs, labels = (torch.from_numpy(each).to(self._device, non_blocking=True) for each in microbatch)
            with self._autocast:
                logits = self.model(input_ids=inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            (loss / len(microbatches)).backward()
            total += loss.detach() / len(microbatches)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = 1e-4 + 4.5e-4 * (1 + math.cos(math.pi * self._step / 2000))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1
        return total.item()


def repeat_batches(inputs, labels, micro_batch, accumulate):
    """Endless steps of `accumulate` microbatches of `micro_batch` rows each, from rows `[n, seq]`, again and again."""
    rows = cycle(range(len(inputs)))
    while True:
        chosen = [[next(rows) for _ in range(micro_batch)] for _ in range(accumulate)]
        yield [(np.ascontiguousarray(inputs[each]), np.ascontiguousarray(labels[each])) for each in chosen]
