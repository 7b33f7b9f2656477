"""`train.loop`: a loop of one's own keeps restarts, checkpoints, metrics and evaluations of echelon's."""

import json
import math
import os
from pathlib import Path

import pytest

import echelon as library
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import EXACT, await_line, finish, read_lines, start, write_recipe

pytestmark = pytest.mark.dist

# The smallest loop; one that is killed once, in its 7th step; and wrong ones.
LOOPS = """
import os
import signal
from pathlib import Path


def smallest(learner, run):
    for step in run.steps():
        sums = learner.forward_backward(run.batch(step))
        grad_norm = learner.clip()
        learner.step(run.learning_rate(step))
        run.record(step, sums, grad_norm)


def killed(learner, run):
    for step in run.steps():
        sums = learner.forward_backward(run.batch(step))
        grad_norm = learner.clip()
        if step == 6 and learner.meshes.data_rank == 0 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        learner.step(run.learning_rate(step))
        run.record(step, sums, grad_norm, rank=float(learner.meshes.data_rank), targets=sums.num_targets)
        run.save_if_due(step)
        run.evaluate_if_due(step)


def one_step(learner, run, record=1, **more):
    for step in run.steps():
        sums = learner.forward_backward(run.batch(step))
        grad_norm = learner.clip()
        learner.step(run.learning_rate(step))
        for _ in range(record):
            run.record(step, sums, grad_norm, **more)


def silent(learner, run):
    one_step(learner, run, record=0)


def doubled(learner, run):
    one_step(learner, run, record=2)


def short(learner, run):
    for step in run.steps():
        run.record(step, learner.forward_backward(run.batch(step)), learner.clip())
        return


def taken(learner, run):
    one_step(learner, run, loss=1.0)


def vector(learner, run):
    one_step(learner, run, losses=learner.clip().expand(3))


def infinite(learner, run):
    for step in run.steps():
        sums = learner.forward_backward(run.batch(step))
        run.record(step, sums, learner.clip() * float("nan"))


def alone(learner):
    pass


NUMBER = 3
"""


@pytest.fixture
def folder(echelon, tmp_path):
    (tmp_path / "loops.py").write_text(LOOPS)
    write_recipe(tmp_path, train={"steps": 12, "eval_every": 4}, checkpoint={"every": 4})
    return tmp_path


def rows(folder, name, kind="train", keys=EXACT):
    lines = read_lines(RunFolder(folder / "runs" / name).metrics_path)
    return [[row[key] for key in keys] for row in lines if row["kind"] == kind]


@pytest.mark.parametrize(
    ("nproc", "parallel"), [pytest.param(2, "fsdp", marks=pytest.mark.slow), (1, "ddp")], ids=["fsdp", "one"]
)
def test_a_killed_loop_goes_on_and_equals_the_default_one(echelon, folder, nproc, parallel):
    settings = ("recipe.json", "--nproc", nproc, f"parallel={parallel}")
    assert echelon("train", *settings, "run.name=plain").code == 0
    ending = echelon("train", *settings, "run.name=own", "train.loop=loops:killed")
    assert ending.code == 0 and "restart 1 of" in ending.out and (folder / "killed").exists(), ending
    assert rows(folder, "own") == rows(folder, "plain")
    loss = ("step", "loss")
    assert rows(folder, "own", "eval", loss) == rows(folder, "plain", "eval", loss) != []
    assert {row[0] for row in rows(folder, "own", keys=("rank",))} == {(nproc - 1) / 2}
    assert {row[0] for row in rows(folder, "own", keys=("targets",))} == {4 * 32}
    assert f"rank {(nproc - 1) / 2:.4g}" in ending.out
    assert [each.step for each in library.Run(folder / "runs" / "own").checkpoints()][-1] == 12


@pytest.mark.slow
def test_a_stopped_loop_saves_and_resumes(folder):
    settings = ("train", "recipe.json", "--nproc", "1", "train.loop=loops:smallest", "train.steps=3000")
    job = start(*settings, cwd=folder)
    run = RunFolder(folder / "runs" / "tiny")
    await_line(run.metrics_path, '"step": 20,', job, seconds=120)
    job.terminate()
    ending = finish(job, 120)
    assert ending.code == 3 and "stopped by SIGTERM at step " in ending.err, ending
    step = run.newest_step()
    job = start(*settings, cwd=folder)
    await_line(run.metrics_path, f'"step": {step + 3},', job, seconds=120)
    job.terminate()
    assert finish(job, 120).code == 3
    steps = [row[0] for row in rows(folder, "tiny")]
    assert len(steps) >= step + 3 and steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sync={name: diloco}", "sync.name=diloco: train.loop=loops:smallest replaces echelon's usual loop"),
        ("sync={name: parameter_server}", "sync.name=parameter_server: train.loop=loops:smallest replaces echelon's"),
        ("engine=horovod", "engine=horovod: train.loop=loops:smallest replaces echelon's usual loop"),
        ("fault.on_bad_step=rollback", "use fault.on_bad_step=stop or skip, or remove train.loop"),
        ("fault.spike_factor=10", "remove fault.spike_factor, or remove train.loop"),
        ("train.loop=loops:absent", "train.loop=loops:absent: the module loops has no absent; correct the name."),
        ("train.loop=absent:loop", "train.loop=absent:loop: absent cannot be imported on this machine"),
        ("train.loop=loops:alone", "it must be a function of (learner, run), but it is alone(learner)"),
        ("train.loop=loops:NUMBER", "it must be a function of (learner, run), but it is a int"),
    ],
)
def test_what_a_loop_cannot_have_is_refused_at_once(echelon, folder, setting, message):
    ending = echelon("train", "recipe.json", "--nproc", "1", "train.loop=loops:smallest", setting)
    assert ending.code == 2 and message in ending.err and not (folder / "runs" / "tiny").exists(), ending


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("silent", "train.loop: step 0 has no run.record yet; call run.record(step, sums, grad_norm) exactly once"),
        (
            "doubled",
            "train.loop: step 0 is not the current one, 1; call run.record(step, sums, grad_norm) exactly once",
        ),
        ("short", "train.loop returned after step 1 of 12; go on to the end of run.steps()"),
        ("taken", "run.record(..., loss=...): every row has this key already; choose another name."),
        ("vector", "run.record(..., losses=...): a metric is one number, and this has the shape [3]; give its mean."),
        ("infinite", "step 1: loss=5.5"),
    ],
)
def test_a_wrong_loop_ends_with_one_message(echelon, folder, name, message):
    ending = echelon("train", "recipe.json", "--nproc", "1", f"train.loop=loops:{name}")
    assert ending.code == 1 and message in ending.err and ending.err.count("echelon: ") == 1, ending


SMALL = (
    "--nproc", "2", "parallel=fsdp", "train.steps=6", "train.eval_every=3", "train.global_batch_size=4",
    "data.train=text.txt", "data.sequence_len=32", "evaluate.batches=1", "checkpoint.every=3",
)  # fmt: skip
TINY = "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}"


@pytest.fixture
def recipes(folder):
    """Trains a recipe of the repository, in a process that has no other module of the name `recipes`."""
    os.symlink(Path(__file__).parents[2] / "recipes", folder / "recipes")

    def train(name, *settings):
        finish(start("train", f"recipes/loops/{name}.yaml", *settings, cwd=folder), 240).succeeded()
        rows = [row for path in (folder / "runs").glob("own-*") for row in read_lines(path / "metrics.jsonl")]
        return [row for row in rows if row["kind"] == "train"]

    return train


@pytest.fixture
def teacher(echelon, folder):
    """A trained model, exported."""
    assert echelon("train", "recipe.json", "run.name=first", "train.steps=60", "optim.learning_rate=1e-2").code == 0
    assert echelon("export", "runs/first", "teacher").code == 0
    return "teacher"


@pytest.mark.slow
def test_the_pretraining_loop_trains(recipes):
    steps = recipes("pretrain", *SMALL, f"model.config={TINY}", "optim.warmup=4")
    assert [row["targets"] for row in steps] == [4 * 32] * 6
    # A warm-up of four steps, and a decay in the last fifth, which is the last step.
    shares = [row["learning_rate"] / 2e-3 for row in steps]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1, 1, (1 / 6) / 0.2])


@pytest.mark.slow
def test_the_distillation_loop_learns_from_its_teacher(recipes, teacher):
    longer = ("train.steps=60", "train.eval_every=30", "optim.learning_rate=1e-2")
    losses = [row["loss"] for row in recipes("distill", *SMALL, f"model.config={TINY}", *longer)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.slow
def test_the_preference_loop_prefers_the_chosen_answers(folder, recipes, teacher):
    pairs = [{"prompt": f"{n} plus ", "chosen": f"{n} is {2 * n}", "rejected": f"{n}, {n}!"} for n in range(8)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    small = [setting for setting in SMALL if not setting.startswith(("data.train", "train.eval_every"))]
    rows = recipes(
        "preferences", *small, f"model.checkpoint={teacher}", "train.steps=12", "optim.learning_rate=1e-3",
        "data.validation_fraction=0", "data.document_separator=null",
    )  # fmt: skip
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[-1]["reward_accuracy"] == 1 and rows[-1]["dpo_loss"] < rows[0]["dpo_loss"]
