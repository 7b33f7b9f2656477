"""A trainer of one rank that has warmed up, so that its next step does what every later step does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from echelon.learn.distributed.runtime import Runtime
from echelon.planner.plan import ParallelPlan
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.assemble import build_trainer
from echelon.run.training.trainer import Trainer
from tests.parity.packed import packed_samples

WARM_UP_STEPS = 2


@contextmanager
def warm_trainer(rank: int, world_size: int, path: str, plan: ParallelPlan, samples: str = "") -> Iterator[Trainer]:
    """The real trainer of a run of `prepare`, after its first steps.

    Collective. `samples`: see `packed_samples`.
    """
    recipe, _ = load_recipe(Path(path))
    runtime = Runtime(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    with packed_samples(samples):
        trainer = build_trainer(recipe, plan, RunFolder(Path(recipe.run.dir)), runtime, compile_backend="aot_eager")
        for step in range(WARM_UP_STEPS):
            trainer.train_step(step)
        yield trainer
        trainer.train_step.loader.close()
        trainer.saver.store.close()
        if trainer.accounting.journal is not None:
            trainer.accounting.journal.close()
