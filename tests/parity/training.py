"""Running real training in the worker pool: what every parity, resume and reshard test is made of."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel.style import ParallelStyle

from echelon.ground.errors import TrainingError
from echelon.ground.stored import write_json
from echelon.learn.data.feed import Feed
from echelon.learn.data.loader import BatchLoader
from echelon.learn.data.mixture import build_order
from echelon.learn.data.order import DataOrder, SampleOrder
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.shards import NO_LABEL, Samples
from echelon.learn.distributed.mesh import Meshes, build_mesh
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.engines.engine import EngineSpec, Targets
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.model.build import load_config
from echelon.learn.model.context_attention import divided_inputs
from echelon.learn.model.router import RouterLoss
from echelon.learn.objectives import outputs
from echelon.learn.parallel.pipeline import Pipeline
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import Accelerator, Cluster
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe.load import load_recipe
from echelon.recipe.objective import ObjectiveConfig
from echelon.recipe.render import render_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.assemble import build_trainer
from echelon.run.training.trainer import Trainer
from tests.families import small_config
from tests.workers import WorkerPool

GLOBAL_BATCH = 8
SEQUENCE_LEN = 32
ADAPTERS = {
    "lora": {"method": "lora", "r": 4, "alpha": 8},
    "experts": {"method": "lora", "r": 4, "alpha": 8, "target_parameters": "experts"},
    "4-bit experts": {"method": "qlora", "r": 4, "alpha": 8, "quantize_experts": True},
    "qlora experts": {
        "method": "qlora",
        "r": 4,
        "alpha": 8,
        "target_modules": [],
        "target_parameters": ["experts.down_proj"],
    },
    "whole": {"method": "lora", "r": 4, "alpha": 8, "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "qlora whole": {"method": "qlora", "r": 4, "alpha": 8, "modules_to_save": ["lm_head", "down_proj"]},
    "rslora": {"method": "lora", "r": 4, "alpha": 8, "rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "pissa": {"method": "lora", "r": 4, "alpha": 4, "init": "pissa"},
    "dora": {"method": "dora", "r": 4, "alpha": 8},
    "qlora": {"method": "qlora", "r": 4, "alpha": 8},
    "qlora fp4": {"method": "qlora", "r": 4, "alpha": 8, "quant_type": "fp4", "double_quant": False},
}
LEARNING_RATES = {"lion": 1e-4, "sgd": 0.1, "adafactor": 0.02}
MACHINE = Accelerator(
    "test machine", memory_bytes=2**33, bf16_flops=None, fp32_flops=None, memory_bandwidth=None, source="-"
)


# What a resumed run has in common with one that never stopped, bit for bit.
EXACT = ("step", "tokens", "target_tokens", "loss", "grad_norm", "learning_rate", "batch_hash", "skipped")
LOSS, NORM = 2e-5, 1e-4
MUON_LOSS, MUON_NORM = 1e-4, 1e-3  # it orthogonalises in bf16, which enlarges roundings
HALF_LOSS, HALF_NORM = 2e-2, 5e-2  # bf16 and fp16


@dataclass(frozen=True)
class Row:
    """One combination of options: what a plan, a model and a precision can be."""

    parallel: Any = "ddp"
    ranks: int = 1
    micro_batch: int = GLOBAL_BATCH
    family: str = "llama"
    tied: bool = False
    checkpointing: str = "none"
    compile: bool = False
    precision: str = "fp32"
    dropout: float = 0.0
    optimizer: str = "adamw"
    master_weights: str = "fp32"
    adapter: str = "full"
    fields: tuple[tuple[str, Any], ...] = ()
    """Fields of the model's config that differ, and their values."""
    changes: Any = None
    """Keys of the recipe that differ, by section; or the value of a key without sections."""
    engine: str = "native"

    def __str__(self) -> str:
        name = (
            self.parallel if isinstance(self.parallel, str) else "+".join(f"{k}={v}" for k, v in self.parallel.items())
        )
        extras = [
            f"{self.ranks} ranks", f"mb {self.micro_batch}", self.family, "tied" if self.tied else "untied",
            f"ac {self.checkpointing}", "compile" if self.compile else "eager", self.precision,
        ]  # fmt: skip
        extras += [self.optimizer] if self.optimizer != "adamw" else []
        extras += [self.master_weights] if self.master_weights != "fp32" else []
        extras += [self.adapter] if self.adapter != "full" else []
        extras += [self.engine] if self.engine != "native" else []
        extras += [f"{name} {value}" for name, value in self.fields]
        return " ".join([name, *extras])

    def reference(self) -> "Row":
        """The same training in one process, whole batch at once, nothing switched on."""
        kept = ("family", "tied", "dropout", "optimizer", "adapter", "fields")
        return Row(**{name: getattr(self, name) for name in kept})

    def config(self) -> dict[str, Any]:
        """The model's config."""
        dropout = {"attn_pdrop": self.dropout, "resid_pdrop": self.dropout} if self.family == "gpt2" else {}
        return small_config(self.family, self.tied, **dropout, **dict(self.fields))


def write_recipe(row: Row, folder: Path, text: Path, steps: int) -> Path:
    """The row as a recipe file, the run folder beside it."""
    overrides = {
        "run": {"name": "row", "dir": str(folder / "run"), "seed": 3},
        "model": {"config": row.config()},
        "tokenizer": "bytes",
        "data": {
            "train": [{"path": str(text)}], "validation_fraction": 0.05, "sequence_len": SEQUENCE_LEN,
            "prepared_dir": str(text.parent / "prepared"), "prepare_workers": 1,
        },
        "train": {
            "steps": steps, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": row.micro_batch,
            "precision": row.precision, "compile": row.compile, "activation_checkpointing": row.checkpointing,
            "eval_every": steps, "master_weights": row.master_weights,
        },
        "optim": {"name": row.optimizer, "learning_rate": LEARNING_RATES.get(row.optimizer, 1e-3), "warmup": 2},
        "evaluate": {"batches": 1},
        "parallel": row.parallel,
        "engine": row.engine,
        "checkpoint": {"every": steps, "async": True},
    }  # fmt: skip
    if row.adapter != "full":
        overrides["adapter"] = ADAPTERS[row.adapter]
    for section, keys in (row.changes or {}).items():
        overrides[section] = {**overrides.get(section, {}), **keys} if isinstance(keys, dict) else keys
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.json"  # JSON is YAML
    path.write_text(json.dumps(overrides))
    return path


def resolve(row: Row, recipe: Any, num_samples: int) -> ParallelPlan:
    """The plan that the real planner makes of the row on this many processes of one machine."""
    cluster = Cluster(MACHINE, num_devices=row.ranks, devices_per_node=row.ranks, kind="cpu")
    return resolve_plan(recipe, build_shape(row.config()), cluster, num_samples=num_samples, fill=True)


def train(
    workers: "WorkerPool | PlantedWorkers",
    row: Row,
    folder: Path,
    text: Path,
    steps: int = 4,
    stop_at: int | None = None,
    mutation: str = "",
    backend: str = "aot_eager",
) -> list[dict[str, Any]]:
    """Train (or go on training) a row in real processes; the rows of metrics.jsonl. `backend`: of `torch.compile`."""
    path, plan = prepare(row, folder, text, steps)
    run = RunFolder(folder / "run")
    write_json(run.plan_path, plan.to_dict())
    workers.run(train_rank, plan.world_size, str(path), plan, stop_at, mutation, backend)
    return read_rows(run.path)


class PlantedWorkers:
    """A pool in which another function trains: it gets what `train_rank` does up to `stop_at`, and then `extra`.

    `raised`: what it has returned on each rank in the last training; None before.
    """

    def __init__(self, pool: WorkerPool, planted: Callable[..., Any], *extra: Any) -> None:
        self._pool, self._planted, self._extra = pool, planted, extra
        self.raised: Any = None

    def run(
        self, function: Any, world_size: int, path: str, plan: ParallelPlan, stop_at: int | None, *given: Any
    ) -> None:
        """Take the place of `WorkerPool.run` in `train`."""
        self.raised = self._pool.run(self._planted, world_size, path, plan, stop_at, *self._extra)


def prepare(row: Row, folder: Path, text: Path, steps: int) -> tuple[Path, ParallelPlan]:
    """A run of the row with its data prepared, of which nothing is trained yet: its recipe's path and its plan."""
    path = write_recipe(row, folder, text, steps)
    recipe, _ = load_recipe(path)
    plain = recipe.model_copy(update={"objective": ObjectiveConfig()})  # packed.py makes pairs of plain text
    data = prepare_data(plain)
    run = RunFolder(Path(recipe.run.dir))
    run.create()
    run.text.write_prepared_path(data.path)
    run.recipe_path.write_text(render_recipe(recipe))
    return path, resolve(row, recipe, data.train.num_samples)


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Masked:
    """A dataset whose targets are uneven: a stretch of each sequence has none, and some sequences have none at all."""

    def __init__(self, dataset: Any, order: DataOrder) -> None:
        self._dataset = dataset
        self._without = set(order.sample_ids(GLOBAL_BATCH, 2).tolist())  # the first two places of step 1
        self.num_samples, self.num_tokens = dataset.num_samples, dataset.num_tokens

    def read_samples(self, ids: Any) -> Samples:
        samples = self._dataset.read_samples(ids)
        for row, sample in zip(samples.labels, ids.tolist(), strict=True):
            row[: SEQUENCE_LEN if sample in self._without else sample * 7 % (SEQUENCE_LEN - 1)] = NO_LABEL
        return samples


def with_uneven_targets(feed: Any, recipe: Any, is_wrong: bool = False) -> Feed:
    """The same feed with uneven targets, in place of a feed of echelon's own loader; `is_wrong`: of other samples."""
    feed.close()
    dataset = feed.source.dataset
    order = build_order(recipe, dataset)
    masked = Masked(dataset, order)
    if is_wrong:
        order = SampleOrder(dataset.num_samples, recipe.run.seed + 1)
    return Feed(partial(BatchLoader, masked, order, recipe.batches), feed.place)


def build_engine(path: str, config: Any, plan: ParallelPlan, backend: Any = "inductor") -> tuple[Any, Meshes]:
    """This rank's part of the engine of a recipe's file, for a model's config or folder; and the meshes of the plan."""
    recipe, _ = load_recipe(Path(path))
    meshes = build_mesh(plan, "cpu")
    spec = EngineSpec(recipe, load_config(config), plan, meshes, torch.device("cpu"), backend)
    return build_native_engine(spec), meshes


def raised_in_training(rank: int, world_size: int, path: str, plan: ParallelPlan, stop_at: int | None) -> str | None:
    """The message of the error that `train_rank` raises."""
    try:
        train_rank(rank, world_size, path, plan, stop_at, "")
    except TrainingError as error:
        return str(error)
    return None


@contextmanager
def masked_trainer(
    rank: int, world_size: int, path: str, plan: ParallelPlan, mutation: str = "", backend: str = "aot_eager"
) -> Iterator[Trainer]:
    """The real trainer; without a source in its recipe, its loader is replaced by one with uneven targets."""
    recipe, _ = load_recipe(Path(path))
    runtime = Runtime(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    trainer = build_trainer(recipe, plan, RunFolder(Path(recipe.run.dir)), runtime, compile_backend=backend)
    if recipe.data.source is None:
        is_wrong = mutation == "wrong sample" and rank == world_size - 1
        trainer.train_step.loader = with_uneven_targets(trainer.train_step.loader, recipe, is_wrong)
    yield trainer
    trainer.train_step.loader.close()
    trainer.saver.store.close()
    if trainer.accounting.journal is not None:
        trainer.accounting.journal.close()


def train_rank(
    rank: int,
    world_size: int,
    path: str,
    plan: ParallelPlan,
    stop_at: int | None,
    mutation: str,
    backend: str = "aot_eager",
) -> None:
    """One rank: the real trainer, one fault planted if asked."""
    with ExitStack() as stack:
        for patch in mutations(mutation, world_size):
            stack.enter_context(patch)
        trainer = stack.enter_context(masked_trainer(rank, world_size, path, plan, mutation, backend))
        if mutation == "local count":
            trainer.train_step.learner.count_targets = lambda batch, loss: local_count(trainer, batch)
        trainer.num_steps = stop_at or trainer.num_steps
        trainer.fit()


def local_count(trainer: Any, batch: Any) -> Targets:
    """The classic mistake: each rank divides by its own targets, scaled so that equal counts would hide it."""
    own = torch.stack(
        [trainer.train_step.learner.objective.count(microbatch) for microbatch in batch.microbatches]
    ).sum()
    return Targets(own, own * dist.get_world_size())


def mutations(name: str, world_size: int) -> list[Any]:
    """Faults that must turn parity rows red; and what is otherwise computed on GPUs alone."""
    if name == "average again":
        from torch.distributed.fsdp import FSDPModule

        import echelon.learn.parallel.data_parallel as data

        summed = data.sum_gradients

        def averaged(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            return summed(group, bucket).then(lambda done: done.value() / world_size)

        divide = FSDPModule.set_gradient_divide_factor
        return [
            mock.patch.object(data, "sum_gradients", averaged),
            mock.patch.object(
                FSDPModule, "set_gradient_divide_factor", lambda self, factor: divide(self, float(world_size))
            ),
        ]
    if name == "local matrices":
        from echelon.learn.optimizer import muon
        from echelon.learn.optimizer.sharded_parameter import ParameterPlacement

        return [
            mock.patch.object(muon, "is_divided", lambda layout: False),
            mock.patch.object(ParameterPlacement, "gather", lambda self, part: part),
            mock.patch.object(ParameterPlacement, "keep_part", lambda self, whole: whole),
        ]
    if name == "local statistics":
        from echelon.learn.optimizer.sharded_parameter import ParameterPlacement

        return [mock.patch.object(ParameterPlacement, "add_up", lambda self, partial, dim=None: partial)]
    if name == "tied gradient not summed":
        return [mock.patch.object(Pipeline, "_sum_shared", lambda self: None)]
    if name == "tied gradient counted twice":
        nothing = property(lambda self: frozenset(), lambda self, names: None)
        return [mock.patch.object(Pipeline, "counted_elsewhere", nothing, create=True)]
    if name == "local positions":
        return [mock.patch.object(outputs, "divided_inputs", with_local_positions)]
    if name == "peer counted twice":
        return [mock.patch.object(Meshes, "counts_data", True)]
    if name == "gradients of experts counted twice":
        from echelon.learn.parallel.expert import ExpertGroup

        def twice(ctx: Any, gradient: torch.Tensor) -> Any:
            group, sent, received = ctx.way
            return ExpertGroup.exchange(group, gradient, received, sent) * group.size, None, None, None

        return [mock.patch("echelon.learn.parallel.expert._Exchange.backward", twice)]
    if name == "experts of fixed capacity":
        from echelon.learn.parallel import expert

        return [mock.patch.object(expert, "ExpertGroup", expert.FixedCapacity)]
    if name == "plain norms of heads":
        from echelon.learn.parallel import tensor

        kept = {"replicated_with_grad_allreduce": lambda stream: Untouched()}
        return [mock.patch.dict(tensor.STYLES, kept)]
    if name == "router gradient counted by every rank":
        from echelon.learn.parallel import tensor_styles

        return [mock.patch.object(tensor_styles, "_share_gradient", lambda num_ranks, router, inputs: inputs)]
    if name == "router gradient of own experts":
        from echelon.learn.parallel import tensor_styles

        return [mock.patch.object(tensor_styles, "_add_up_gradient_of_weights", lambda mesh, experts, inputs: inputs)]
    if name == "a router loss of every rank":
        strength = RouterLoss.strength.fget
        return [mock.patch.object(RouterLoss, "strength", property(lambda self: strength(self) * world_size))]
    return []


def with_local_positions(*args: Any) -> dict[str, Any]:
    """The mistake of context parallelism: each rank counts the positions of its part from 0."""
    inputs = divided_inputs(*args)
    part = torch.arange(inputs["position_ids"].shape[1])
    return inputs | {"position_ids": part.expand_as(inputs["position_ids"])}


class Untouched(ParallelStyle):
    """Leaves a module as it is."""

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        return module


def references(
    workers: WorkerPool, text: str, make_folder: Callable[[str], Path], changes: dict[str, Any]
) -> Callable[[Row], list[dict[str, Any]]]:
    """A function to the metrics of a row's training in one process with changes of the recipe, trained once each."""
    trained: dict[str, list[dict[str, Any]]] = {}

    def find(row: Row) -> list[dict[str, Any]]:
        row = replace(row.reference(), changes=changes)
        if str(row) not in trained:
            trained[str(row)] = train(workers, row, make_folder("one"), text)
        return trained[str(row)]

    return find


def check_training(
    row: Row, rows: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Check that a row's losses, norms and batches are those of one process. Both last evaluations, and their bound."""
    assert_same_curve(rows, expected, bounds(row))
    ours, theirs = ([found for found in rows if found["kind"] == "eval"][-1] for rows in (rows, expected))
    return ours, theirs, bounds(row)[0]


def assert_same_curve(
    rows: list[dict[str, Any]], expected: list[dict[str, Any]], bound: tuple[float, float] = (LOSS, NORM)
) -> None:
    """The losses and the gradient norms are the expected ones within a bound for each, and the batches exactly."""
    losses, norms = difference(rows, expected)
    assert losses <= bound[0] and norms <= bound[1], f"loss {losses:.1e}, norm {norms:.1e}"
    assert hashes(rows) == hashes(expected)


def difference(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> tuple[float, float]:
    """The largest absolute difference of losses, and the largest relative one of gradient norms."""
    ours, theirs = ([row for row in each if row["kind"] == "train"] for each in (rows, expected))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    losses = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    norms = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(ours, theirs, strict=True))
    assert math.isfinite(losses) and math.isfinite(norms)
    return losses, norms


def bounds(row: Row) -> tuple[float, float]:
    """How far a row's losses, and its norms relatively, may be from the reference."""
    if row.precision != "fp32":
        return HALF_LOSS, HALF_NORM
    return (MUON_LOSS, MUON_NORM) if row.optimizer == "muon" else (LOSS, NORM)


def hashes(rows: list[dict[str, Any]]) -> list[str]:
    """The batch hash of every step."""
    return [row["batch_hash"] for row in rows if row["kind"] == "train"]


def losses_of(rows: list[dict[str, Any]]) -> list[float]:
    """The training loss of every step."""
    return [row["loss"] for row in rows if row["kind"] == "train"]


def weight_difference(run: Path, reference: Path, step: int) -> float:
    """The largest absolute difference of any weight between the checkpoints of two runs."""
    return weight_differences(run, reference, step).max().item()


def weight_differences(run: Path, reference: Path, step: int) -> torch.Tensor:
    """The absolute difference of each weight between the checkpoints of two runs: [number of weights], in fp64."""
    ours, theirs = tensors_of(run, step), tensors_of(reference, step)
    names = [name for name in theirs if name.startswith("model.")]
    assert names and {name for name in ours if name.startswith("model.")} == set(names)
    return torch.cat([(ours[name].double() - theirs[name].double()).abs().flatten() for name in names])


def with_ranks(row: Row, ranks: int, **changes: Any) -> Row:
    """The row on another number of ranks, with the largest microbatch that divides."""
    return replace(row, ranks=ranks, micro_batch=changes.pop("micro_batch", GLOBAL_BATCH // ranks), **changes)


def tensors_of(run: Path, step: int) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole."""
    from echelon.learn.checkpoint.fill import load_alone, read_metadata

    folder = run / "checkpoints" / f"step-{step:08d}"
    entries = read_metadata(folder).state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    load_alone(folder, tensors)
    return tensors


def equal_tensors(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two checkpoints are the same bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def check_exact_resume(
    train_into: Callable[..., list[dict[str, Any]]], folder: Path, text: Path, steps: int, stop_at: int | None = None
) -> dict[str, Any]:
    """Half of the steps, and a resume for the rest, are the whole bit for bit; the tensors of the last checkpoint.

    Args:
        train_into: called with a folder, the text, the steps and where to stop.
        stop_at: where to stop instead.
    """
    straight = train_into(folder / "straight", text, steps=steps)
    train_into(folder / "resumed", text, steps=steps, stop_at=stop_at or steps // 2)
    resumed = train_into(folder / "resumed", text, steps=steps)
    ours, theirs = (
        [tuple(each[key] for key in EXACT) for each in rows if each["kind"] == "train"] for rows in (resumed, straight)
    )
    assert ours == theirs
    runs = [tensors_of(folder / name / "run", step=steps) for name in ("straight", "resumed")]
    assert equal_tensors(*runs)
    return runs[1]
