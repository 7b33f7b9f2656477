"""Named validation sets and samples of prompts: the same on any ranks, and without a trace in the training."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from echelon.learn.answers.sampling import Sampling
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.prepared import open_prepared
from echelon.recipe.load import load_recipe
from echelon.recipe.render import render_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.tools.inference.generate import generate_samples
from tests.families import load_run_model
from tests.parity.training import SEQUENCE_LEN, Row, read_rows, resolve, train_rank, with_ranks, write_recipe

pytestmark = pytest.mark.dist

PROMPTS = ["def add(", "x"]
EVALUATION = {
    "train": {"eval_every": 2},
    "evaluate": {"batches": 2, "prompts": PROMPTS, "prompt_tokens": 12},
    "checkpoint": {"every": 4, "keep_best": True},
}


def train(workers, row, folder, text, steps=4, stop_at=None, **sections):
    """Train a row with two validation sets: one larger than what is evaluated of it, one of five sequences."""
    path = write_recipe(row, folder, text, steps)
    (folder / "long.txt").write_text(text.read_text()[:5000])
    (folder / "short.txt").write_text("é is two bytes. " * 8)
    recipe = json.loads(path.read_text())
    for key, values in sections.items():
        recipe[key] |= values
    recipe["data"] |= {"prepared_dir": str(folder / "prepared")}
    recipe["data"].pop("validation_fraction")
    recipe["data"]["validation"] = [{"name": "long", "path": str(folder / "long.txt")}, str(folder / "short.txt")]
    path.write_text(json.dumps(recipe))
    recipe, _ = load_recipe(path)
    data = prepare_data(recipe)
    run = RunFolder(Path(recipe.run.dir))
    run.create()
    run.text.write_prepared_path(data.path)
    run.recipe_path.write_text(render_recipe(recipe))
    workers.run(train_rank, row.ranks, str(path), resolve(row, recipe, data.train.num_samples), stop_at, "")
    return run.path


def of_kind(run, kind):
    return [row for row in read_rows(run) if row["kind"] == kind]


def samples(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(workers, text, tmp_path_factory):
    """One process."""
    return train(workers, Row(), tmp_path_factory.mktemp("one"), text, **EVALUATION)


def test_losses_are_those_of_a_plain_loop(alone):
    final = of_kind(alone, "eval")[-1]
    assert final["step"] == 4 and list(final["sets"]) == ["long", "short.txt"]
    model = load_run_model(alone, torch.device("cpu"))
    data = open_prepared(RunFolder(alone).text.read_prepared_path(), SEQUENCE_LEN)
    sums = []
    for each, num_sequences in zip(data.validation, (16, 5), strict=True):  # 2 batches of 8; 136 bytes in 32s
        ids = torch.tensor([int(token) for chunk in each.dataset.iter_tokens() for token in chunk])
        ids = ids[: num_sequences * SEQUENCE_LEN + 1]
        total = 0.0
        for start in range(0, len(ids) - 1, SEQUENCE_LEN):
            window = ids[start : start + SEQUENCE_LEN + 1]
            with torch.no_grad():
                logits = model(input_ids=window[None, :-1]).logits[0]
            total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
        found = final["sets"][each.name]
        assert found["target_tokens"] == len(ids) - 1
        assert found["loss"] == pytest.approx(total / (len(ids) - 1), abs=1e-5)
        assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=1e-12)  # a token is a byte
        sums.append((total, len(ids) - 1))
    assert final["target_tokens"] == sum(count for _, count in sums)
    assert final["loss"] == pytest.approx(sum(total for total, _ in sums) / final["target_tokens"], abs=1e-5)
    assert final["perplexity"] == pytest.approx(math.exp(final["loss"]))


def test_samples_are_those_of_generate(alone):
    rows = samples(alone)
    assert [(row["step"], row["prompt"]) for row in rows] == [(step, prompt) for step in (2, 4) for prompt in PROMPTS]
    expected = generate_samples(alone, PROMPTS, Sampling(max_tokens=12, seed=3))
    assert [row["text"] for row in rows[2:]] == [sample.text for sample in expected]


ROWS = [
    with_ranks(Row("ddp"), 2, micro_batch=2),
    with_ranks(Row("zero1"), 2),
    pytest.param(with_ranks(Row("fsdp"), 4, micro_batch=1), marks=pytest.mark.slow),
    with_ranks(Row("hsdp"), 4),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_plan_evaluates_alike(workers, text, tmp_path, alone, row):
    run = train(workers, row, tmp_path, text, **EVALUATION)
    for ours, theirs in zip(of_kind(run, "eval"), of_kind(alone, "eval"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-5)
        for name, found in ours["sets"].items():
            assert found["loss"] == pytest.approx(theirs["sets"][name]["loss"], abs=2e-5)
            assert found["target_tokens"] == theirs["sets"][name]["target_tokens"]
    assert samples(run) == samples(alone)


@pytest.mark.parametrize(
    "row",
    [Row(family="gpt2", dropout=0.1), with_ranks(Row("fsdp", family="gpt2", dropout=0.1), 2, micro_batch=2)],
    ids=str,
)
def test_samples_leave_no_trace_in_the_training(workers, text, tmp_path, row):
    plain = train(workers, row, tmp_path / "plain", text, train={"eval_every": None})
    sampled = train(workers, row, tmp_path / "sampled", text, **EVALUATION)
    keys = ("step", "loss", "grad_norm", "batch_hash")
    ours, theirs = ([[each[key] for key in keys] for each in of_kind(run, "train")] for run in (sampled, plain))
    assert ours == theirs


def test_a_resumed_run_has_each_sample_once(workers, text, tmp_path, alone):
    wanted = EVALUATION | {"checkpoint": {"every": 3, "keep_best": False}}
    train(workers, Row(), tmp_path, text, stop_at=3, **wanted)
    # Step 4 was never saved: it, its evaluation and its samples come once more.
    with (tmp_path / "run" / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "prompt": "x", "text": "lost"}) + "\n{")
    run = train(workers, Row(), tmp_path, text, **wanted)
    assert [row["step"] for row in samples(run)] == [2, 2, 3, 3, 4, 4]
    assert [row for row in samples(run) if row["step"] != 3] == samples(alone)
