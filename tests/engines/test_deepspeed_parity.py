"""Training with DeepSpeed against the native engine: losses, norms, weights and moments, in real processes."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.api.models import export
from echelon.ground.stored import write_json
from echelon.run.folder.run_folder import RunFolder
from tests.engines.deepspeed_ranks import logits_of, measure_state, train_in_fp16, train_with_nan
from tests.parity.training import Row, difference, hashes, losses_of, prepare, read_rows, tensors_of, train
from tests.workers import WorkerPool, run_in_new_processes

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist

STEPS = 10
PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 100}}  # else small models stay whole


def run(function: Any, ranks: int, *arguments: Any) -> list[Any]:
    """Call a function in processes of its own: DeepSpeed keeps groups of processes in global variables."""
    return run_in_new_processes(function, ranks, *arguments, seconds=400)


def trained(row: Row, folder: Path, text: Path, **options: Any) -> list[dict[str, Any]]:
    """Train a row in processes of its own."""
    with closing(WorkerPool(size=row.ranks, seconds=400)) as pool:
        return train(pool, row, folder, text, **options)


class Native:
    """The native single processes that rows are compared with, each trained once a session."""

    def __init__(self, text: Path, folders: Any) -> None:
        self._text, self._folders = text, folders
        self._rows: dict[Row, Any] = {}

    def __call__(self, row: Row) -> list[dict[str, Any]]:
        reference = row.reference()
        if reference not in self._rows:
            folder = self._folders.mktemp("native")
            self._rows[reference] = trained(reference, folder, self._text, steps=STEPS)
        return self._rows[reference]


@pytest.fixture(scope="session")
def native(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Native:
    return Native(text, tmp_path_factory)


@pytest.fixture(scope="session")
def cpu_adam() -> None:
    """Compile DeepSpeed's CPUAdam where that was not done: some minutes, which the ranks of a test are not given."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()


OFFLOADS = {
    "none": {},
    "optimizer": {"offload_optimizer": True},
    "all": {"offload_optimizer": True, "offload_parameters": True},
}


def deepspeed_row(parallel: str, ranks: int, offload: str = "none", **options: Any) -> Row:
    config = PARTITIONED if parallel == "fsdp" else {}
    options.setdefault("micro_batch", 8 // ranks // 2)
    changes = {"deepspeed": {**OFFLOADS[offload], "config": config}}
    return Row(parallel, ranks, changes=changes, engine="deepspeed", **options)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("parallel", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.slow
def test_losses_and_norms_are_native_ones(native, tmp_path, text, parallel, ranks):
    """Two microbatches a rank, whose targets are uneven."""
    row = deepspeed_row(parallel, ranks)
    ours = trained(row, tmp_path / "deepspeed", text, steps=STEPS)
    losses, norms = difference(ours, native(row))
    print(f"{row}: losses differ by {losses:.2g}, norms relatively by {norms:.2g}")
    assert losses < 1e-5 and norms < 1e-5
    assert hashes(ours) == hashes(native(row))


@pytest.mark.parametrize(
    ("parallel", "offload"), [("zero1", "optimizer"), ("zero2", "optimizer"), ("fsdp", "optimizer"), ("fsdp", "all")]
)
@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_offloading_counts_every_microbatch(native, tmp_path, text, parallel, offload):
    """DeepSpeed's CPUAdam steps the partitions. With a wrong boundary, three of four microbatches are lost."""
    row = deepspeed_row(parallel, 2, offload, micro_batch=1)
    losses, norms = difference(trained(row, tmp_path, text, steps=STEPS), native(row))
    print(f"{row}, offload {offload}: losses differ by {losses:.2g}, norms relatively by {norms:.2g}")
    assert losses < 1e-5 and norms < 1e-5


@pytest.mark.slow
def test_a_loss_function_trains_as_under_native(tmp_path, text):
    row, loss = deepspeed_row("fsdp", 2), {"objective": {"name": "tests.parity.loss_functions:smoothed_with_z"}}
    ours = trained(replace(row, changes=row.changes | loss), tmp_path / "deepspeed", text, steps=STEPS)
    expected = trained(replace(row.reference(), changes=loss), tmp_path / "native", text, steps=STEPS)
    losses, norms = difference(ours, expected)
    assert losses < 1e-5 and norms < 1e-5


@pytest.mark.parametrize(
    ("parallel", "options", "loss", "norm"),
    [
        ("zero2", {"adapter": "lora"}, 1e-5, 1e-5),
        ("fsdp", {"adapter": "lora"}, 1e-5, 1e-5),
        ("zero2", {"family": "mixtral"}, 1e-5, 1e-5),
        ("fsdp", {"family": "mixtral"}, 1e-5, 1e-5),
        ("fsdp", {"checkpointing": "full", "tied": True}, 1e-5, 1e-5),
        ("zero2", {"optimizer": "sgd"}, 2e-5, 1e-4),
        ("zero2", {"optimizer": "lion"}, 2e-5, 1e-4),
        ("zero2", {"precision": "bf16"}, 2e-2, 5e-2),
        ("fsdp", {"precision": "bf16"}, 2e-2, 5e-2),
    ],
)
@pytest.mark.slow
def test_variants_train_as_under_native(native, tmp_path, text, parallel, options, loss, norm):
    """Native trains in fp32, which bf16 differs from."""
    row = deepspeed_row(parallel, 2, **options)
    losses, norms = difference(trained(row, tmp_path, text, steps=STEPS), native(row))
    assert losses < loss and norms < norm and (losses > 0 or "precision" not in options)


@pytest.mark.parametrize("parallel", ["zero2", "fsdp"])
@pytest.mark.slow
def test_fp16_skips_steps_that_overflow_and_halves_the_loss_scale(native, tmp_path, text, parallel):
    """Until the first of them it is near the single process in fp32."""
    row = deepspeed_row(parallel, 2, precision="fp16")
    path, plan = prepare(row, tmp_path, text, STEPS)
    run_path = tmp_path / "run"
    write_json(RunFolder(run_path).plan_path, plan.to_dict())
    run(train_in_fp16, 2, str(path), plan)
    ours, theirs = ([each for each in rows if each["kind"] == "train"] for rows in (read_rows(run_path), native(row)))
    skipped = [each["step"] for each in ours if each["skipped"]]
    assert len(ours) == STEPS and skipped, "DeepSpeed adds up gradients in fp16"
    losses, norms = difference(ours[: skipped[0] - 1], theirs[: skipped[0] - 1])
    assert 0 < losses < 2e-2 and norms < 5e-2
    scales = [65536 / 2 ** sum(step < each["step"] for step in skipped) for each in ours]
    assert [each["loss_scale"] for each in ours] == scales
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.3


@pytest.mark.slow
def test_a_run_goes_from_native_to_deepspeed_and_back(native, tmp_path, text):
    """Three starts of one run: native on one rank, ZeRO-3 on two, and native FSDP on two."""
    first = Row("ddp", 1, micro_batch=4)
    trained(first, tmp_path, text, steps=STEPS, stop_at=3)
    trained(deepspeed_row("fsdp", 2), tmp_path, text, steps=STEPS, stop_at=7)
    ours = trained(Row("fsdp", 2, micro_batch=4), tmp_path, text, steps=STEPS)
    losses, norms = difference(ours, native(first))
    assert losses < 1e-5 and norms < 1e-5
    assert hashes(ours) == hashes(native(first))


@pytest.mark.parametrize("parallel", ["zero2", "fsdp"])
@pytest.mark.slow
def test_its_checkpoint_is_the_native_one_moments_included(tmp_path, text, parallel):
    row = deepspeed_row(parallel, 2)
    trained(row, tmp_path / "deepspeed", text, steps=4)
    trained(row.reference(), tmp_path / "native", text, steps=4)
    ours, theirs = (tensors_of(tmp_path / name / "run", 4) for name in ("deepspeed", "native"))
    assert ours.keys() == theirs.keys()
    assert any(name.endswith("exp_avg_sq") for name in theirs)
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape and ours[name].dtype == expected.dtype, name
        scale = max(expected.abs().max().item(), 1e-12)
        assert (ours[name] - expected).abs().max().item() < 2e-3 * scale, name


@pytest.mark.parametrize(("parallel", "offload"), [("zero1", "none"), ("fsdp", "none"), ("zero2", "optimizer")])
@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_a_bad_step_of_one_rank_is_skipped_by_all_as_under_native(tmp_path, text, parallel, offload):
    changes = {"fault": {"on_bad_step": "skip"}}
    rows = {
        "native": Row("ddp", 2, micro_batch=2, changes=changes),
        "deepspeed": Row(
            parallel, 2, micro_batch=2, engine="deepspeed", changes={**changes, "deepspeed": OFFLOADS[offload]}
        ),
    }
    ended = {}
    for name, row in rows.items():
        path, plan = prepare(row, tmp_path / name, text, 6)
        write_json(RunFolder(tmp_path / name / "run").plan_path, plan.to_dict())
        run(train_with_nan, 2, str(path), plan, 4)
        ended[name] = [each for each in read_rows(tmp_path / name / "run") if each["kind"] == "train"]
        assert [each["skipped"] for each in ended[name]] == [False, False, False, True, False, False]
    found, expected = ([each["loss"] for each in ended[name] if not each["skipped"]] for name in rows)
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("parallel", "share"), [("zero1", 1), ("zero2", 1), ("fsdp", 2)])
@pytest.mark.slow
def test_each_rank_has_its_part_of_the_optimizer(tmp_path, text, parallel, share):
    """AdamW has two fp32 numbers for each parameter, and DeepSpeed one more for the master weight."""
    path, plan = prepare(deepspeed_row(parallel, 2), tmp_path, text, 2)
    write_json(RunFolder(tmp_path / "run").plan_path, plan.to_dict())
    for held in run(measure_state, 2, str(path), plan):
        assert held["moments"] == pytest.approx(held["whole"] * 2 / 2, rel=0.01)
        assert held["masters"] == pytest.approx(held["whole"] / 2, rel=0.01)
        assert held["held"] <= held["whole"] / share * (1.2 if share > 1 else 1.0)


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.slow
def test_an_export_has_the_logits_of_the_live_model_in_transformers(tmp_path, text, parallel):
    import torch
    from transformers import AutoModelForCausalLM

    ids = list(b"def read(")
    path, plan = prepare(deepspeed_row(parallel, 2), tmp_path, text, 3)
    write_json(RunFolder(tmp_path / "run").plan_path, plan.to_dict())
    live = run(logits_of, 2, str(path), plan, ids)
    assert live[0] == live[1]
    export(tmp_path / "run", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    assert (logits - torch.tensor(live[0][0])).abs().max() < 1e-4
    assert len(losses_of(read_rows(tmp_path / "run"))) == 3
