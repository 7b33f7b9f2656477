"""Runs the real trainer in this process, on one GPU."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import echelon.learn.parallel
from echelon.learn.data.prepare import prepare_data
from echelon.learn.parallel.data_parallel import Replicated, autocast_scope
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import Accelerator, Cluster
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe.load import load_recipe
from echelon.recipe.objective import ObjectiveConfig
from echelon.recipe.render import render_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.assemble import build_trainer
from tests.parity.packed import packed_samples
from tests.parity.training import GLOBAL_BATCH, SEQUENCE_LEN, Row, read_rows, with_uneven_targets, write_recipe

GPU = Accelerator("test GPU", 2**36, bf16_flops=1e15, fp32_flops=5e13, memory_bandwidth=None, source="-")
OFFLOAD = {"cpu_offload": True}


@dataclass(frozen=True)
class Case:
    """A row, optionally with the wrapper of a parallel strategy over a group of one.

    `around` is `ddp`, or, for `fully_shard`, `fsdp` or `zero1`. `samples`: see `packed_samples`.
    """

    row: Row = field(default_factory=lambda: Row(micro_batch=4))
    around: str = ""
    overrides: tuple[str, ...] = ()
    samples: str = ""

    def __str__(self) -> str:
        return " ".join([*([f"{self.around} of one"] if self.around else []), str(self.row)])

    def apply(self, plan: ParallelPlan) -> ParallelPlan:
        """The plan of the planner, with sharding that it would not choose for this row."""
        if self.around not in ("fsdp", "zero1"):
            return plan
        reshard = self.around == "fsdp"
        reduction = "each" if reshard else "last"
        return replace(plan, strategy=self.around, reshard_after_forward=reshard, reduce_gradients=reduction)


def replicate(module: Any, plan: ParallelPlan, meshes: Any, seed: int) -> Replicated:
    """DDP over a group of one."""
    return Replicated(module, plan, meshes, autocast_scope(plan, meshes.device_type), seed)


@contextmanager
def trainer_on_gpu(case: Case, runtime: Any, folder: Path, text: Path, steps: int = 4):
    """Create the trainer of a case, with uneven numbers of targets; close everything at the end."""
    recipe, _ = load_recipe(write_recipe(case.row, folder, text, steps), case.overrides)
    data = prepare_data(recipe.model_copy(update={"objective": ObjectiveConfig()}))
    run = RunFolder(Path(recipe.run.dir))
    run.create()
    run.text.write_prepared_path(data.path)
    run.recipe_path.write_text(render_recipe(recipe))
    shape = build_shape(recipe.model.config or case.row.config())
    plan = case.apply(resolve_plan(recipe, shape, Cluster(GPU, 1, 1, "cuda", True), data.train.num_samples))
    with ExitStack() as stack:
        if case.around == "ddp":
            stack.enter_context(mock.patch.object(echelon.learn.parallel, "build_data_parallel", replicate))
        stack.enter_context(packed_samples(case.samples))
        trainer = build_trainer(recipe, plan, run, runtime)
        trainer.recipe, trainer.plan, trainer.run_folder = recipe, plan, run
        if recipe.data.sequence_len == SEQUENCE_LEN and recipe.data.source is None:
            trainer.train_step.loader = with_uneven_targets(trainer.train_step.loader, recipe)
        try:
            yield trainer
        finally:
            trainer.train_step.loader.close()
            trainer.saver.store.close()
            trainer.accounting.journal.close()


def train_on_gpu(case: Case, runtime: Any, folder: Path, text: Path, steps: int = 4, stop_at: int | None = None):
    """Train or resume a case; return the rows of metrics.jsonl."""
    assert case.row.ranks == 1 and case.row.micro_batch <= GLOBAL_BATCH
    with trainer_on_gpu(case, runtime, folder, text, steps) as trainer:
        trainer.num_steps = stop_at or trainer.num_steps
        trainer.fit()
        return read_rows(trainer.run_folder.path)


def model_overrides(sequence_len: int, **fields: Any) -> tuple[str, ...]:
    """Overrides that change the width, depth, vocabulary or sequence length of a row."""
    return (f"data.sequence_len={sequence_len}", *(f"model.config.{name}={value}" for name, value in fields.items()))
