"""HF Trainer and echelon agree at every step, with the same tokens and initial weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from echelon.learn.checkpoint.adapter_folder import write_adapter
from echelon.learn.data.order import SampleOrder
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.prepared import open_prepared
from echelon.learn.distributed.runtime import Runtime
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.assemble import build_trainer
from tests.cases import slow
from tests.families import small_config, small_model
from tests.parity.training import GLOBAL_BATCH, SEQUENCE_LEN, Row, read_rows, resolve, with_ranks, write_recipe

pytestmark = pytest.mark.dist

STEPS = 20  # HF's cosine ends one step after the last one, echelon's at the last one: 21 steps here equal 20 there
SEED = 3


def settings(optimizer):
    return [
        {"weight_decay": group.weight_decay, "betas": group.rule.betas, "eps": group.rule.eps}
        | {"names": sorted(slot.name for slot in group.slots)}
        for group in optimizer.groups
    ]


def train_rank(rank, world_size, path, plan):
    """Train one rank of echelon on plain text; return the settings of its optimizer. Writes the initial adapter."""
    recipe, _ = load_recipe(Path(path))
    runtime = Runtime(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    trainer = build_trainer(recipe, plan, RunFolder(Path(recipe.run.dir)), runtime)
    if recipe.adapter.is_adapter:
        content = trainer.train_step.learner.engine.describe_adapter()
        if rank == 0:
            run = RunFolder(Path(recipe.run.dir))
            write_adapter(run.path / "first", content, None, run.model_dir, "")
    trainer.fit()
    trainer.train_step.loader.close()
    trainer.saver.store.close()
    return settings(trainer.train_step.learner.engine.optimizer)


def run_echelon(workers, row, folder, text):
    path = write_recipe(row, folder, text, steps=STEPS + 1)
    content = json.loads(path.read_text())
    content["optim"]["warmup"] = 0
    if row.adapter == "dora":
        content["optim"]["no_decay"] = []  # HF Trainer decays magnitudes
    path.write_text(json.dumps(content))
    recipe, _ = load_recipe(path)
    data = prepare_data(recipe)
    run = RunFolder(Path(recipe.run.dir))
    run.create()
    run.text.write_prepared_path(data.path)
    plan = resolve(row, recipe, data.train.num_samples)
    groups = workers.run(train_rank, row.ranks, str(path), plan)[0]
    return [each for each in read_rows(run.path) if each["kind"] == "train"][:STEPS], groups, data.path


def write_peer_config(folder, prepared, adapter, family):
    """The config of HF Trainer for the data, and for an adapter folder if there is one; its path."""
    data = open_prepared(prepared, SEQUENCE_LEN)
    (shard,) = data.manifest.shards("train")
    order = SampleOrder(data.train.num_samples, SEED).sample_ids(0, STEPS * GLOBAL_BATCH)
    assert data.train.num_samples - 1 not in order, "the padded last sequence must not be among the first batches"
    small_model(family, seed=SEED).save_pretrained(folder / "model")
    config = {
        "token_file": str(prepared / shard.file), "dtype": data.manifest.dtype, "sequence_len": SEQUENCE_LEN,
        "order": order.tolist(), "model": str(folder / "model"), "output_dir": str(folder / "out"), "steps": STEPS,
        "adapter": adapter,
    }  # fmt: skip
    path = folder / "peer.json"
    path.write_text(json.dumps(config))
    return path


def run_peer(paths):
    """What HF Trainer does with each of the configs, in one process."""
    command = [sys.executable, str(Path(__file__).with_name("hf_trainer.py")), *map(str, paths)]
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    done = subprocess.run(command, capture_output=True, text=True, env=alone, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


@pytest.mark.parametrize(
    ("adapters", "family"),
    [(("full",), "llama"), slow(("lora", "dora"), "llama"), slow(("experts",), "mixtral")],
    ids=str,
)
def test_losses_agree_step_by_step(workers, text, tmp_path, adapters, family):
    found, configs = [], []
    for adapter in adapters:
        folder = tmp_path / adapter
        ours, groups, prepared = run_echelon(workers, Row(adapter=adapter, family=family), folder / "one", text)
        row = with_ranks(Row("fsdp", adapter=adapter, family=family), 2, micro_batch=2)
        two, _, _ = run_echelon(workers, row, folder / "two", text)
        found.append((ours, two, groups))
        first = None if adapter == "full" else str(folder / "one" / "run" / "first")
        configs.append(write_peer_config(folder, prepared, first, family))
    assert small_config(family)["vocab_size"] == 256
    for (ours, two, groups), peer in zip(found, run_peer(configs), strict=True):
        check_equal(ours, two, groups, peer)


def check_equal(ours, two, our_groups, peer):
    """Check that one process and two of FSDP have the peer's optimizer and its losses, step by step."""
    print("echelon AdamW:", [{**group, "names": len(group["names"])} for group in our_groups])
    print(f"HF Trainer {peer['optimizer']}:", [{**group, "names": len(group["names"])} for group in peer["groups"]])
    by_decay = [
        {group["weight_decay"]: group["names"] for group in groups if group["names"]}
        for groups in (our_groups, peer["groups"])
    ]
    assert by_decay[0] == by_decay[1], "the same parameters decay"
    for mine, fsdp, theirs in zip(ours, two, peer["rows"], strict=True):
        assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-6)
        assert mine["loss"] == pytest.approx(float(theirs["loss"]), abs=2e-5)
        assert fsdp["loss"] == pytest.approx(float(theirs["loss"]), abs=2e-5)
        assert mine["grad_norm"] == pytest.approx(float(theirs["grad_norm"]), rel=1e-4)
