"""The memory that an objective needs, measured in the rehearsal of a real step, compared with what is planned."""

from contextlib import closing
from dataclasses import astuple
from pathlib import Path

import pytest

from echelon.learn.data.tokenizer import build_bytes_tokenizer
from echelon.learn.learner import Learner
from echelon.planner.memory import estimate_memory, estimate_parts
from echelon.recipe.load import load_recipe
from tests.families import small_model
from tests.parity.training import Row, resolve, write_recipe

pytestmark = pytest.mark.dist

VOCABULARY, TEACHER_WIDTH = 8192, 96
OWN = "tests.parity.loss_functions:smoothed_with_z"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    model = small_model("qwen3", vocab_size=VOCABULARY, hidden_size=TEACHER_WIDTH)
    model.save_pretrained(folder)
    build_bytes_tokenizer().save_pretrained(folder)
    return folder, sum(parameter.numel() for parameter in model.parameters())


def measure(rank, world_size, path, plan):
    """The parts that were measured and planned, and the planned total."""
    recipe, _ = load_recipe(Path(path))
    with closing(Learner.build(recipe, plan)) as learner:
        planned = estimate_parts(learner.shape, learner.plan, "cpu")
        return learner.memory, planned, estimate_memory(learner.shape, learner.plan, "cpu").total


def run(workers, folder, text, objective, **row):
    row = Row(micro_batch=4, changes={"objective": objective}, fields=(("vocab_size", VOCABULARY),), **row)
    path = write_recipe(row, folder, text, steps=4)
    plan = resolve(row, load_recipe(path)[0], 1000)
    return workers.run(measure, row.ranks, str(path), plan)[0]


@pytest.mark.parametrize(
    ("objective", "row"),
    [
        ({"name": "distill"}, {}),
        ({"name": "distill", "loss": "reverse", "temperature": 2.0, "sft_weight": 0.5}, {}),
        ({"name": "distill", "loss": "jsd"}, {}),
        ({"name": "distill"}, {"precision": "bf16"}),
        pytest.param({"name": "distill"}, {"parallel": "fsdp", "ranks": 2}, marks=pytest.mark.slow),
        ({"name": OWN}, {}),
        ({"name": "causal_lm"}, {}),
    ],
    ids=str,
)
def test_a_step_needs_what_is_planned(workers, text, tmp_path, teacher, objective, row):
    folder, numel = teacher
    distills = objective["name"] == "distill"
    given = {**objective, "teacher": str(folder)} if distills else objective
    measured, planned, total = run(workers, tmp_path, text, given, **row)
    assert measured.loss == pytest.approx(planned.loss, rel=0.1)
    if "ranks" not in row:  # gathered weights and buffers are planned for deeper models
        needed = sum(astuple(measured))
        assert needed == pytest.approx(sum(astuple(planned)), rel=0.1) and needed == pytest.approx(total, rel=0.1)
    assert measured.frozen_models == pytest.approx(planned.frozen_models, rel=0.01)
    assert planned.frozen_models == (4 * numel / row.get("ranks", 1) if distills else 0)
