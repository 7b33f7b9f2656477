"""Distillation by commands: a teacher's values prepared once, and trained on under several plans; what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch

from echelon.ground.run_files import RunFiles
from echelon.learn.data import taught
from echelon.learn.data.tokenizer import build_bytes_tokenizer, train_tokenizer
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import TEXT, finish, read_lines, start, write_recipe
from tests.dist.command import train_in_process as train
from tests.dist.test_train_from_rewards import exact
from tests.families import small_model

pytestmark = pytest.mark.dist

DISTILL = {"name": "distill", "teacher": "teacher"}


@pytest.fixture
def folder(echelon, tmp_path):
    save_teacher(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(TEXT)
    write_recipe(
        tmp_path,
        objective=DISTILL,
        train={"steps": 24, "global_batch_size": 8, "log_every": 1, "eval_every": 12, "compile": False},
        optim={"learning_rate": 1e-2},
    )
    return tmp_path


def save_teacher(folder, seed=5, scale=8.0):
    """A model with random, but decided, predictions."""
    model = small_model("qwen3", seed=seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    model.save_pretrained(folder)
    build_bytes_tokenizer().save_pretrained(folder)
    return model


def rows_of(folder, name="tiny", kind="train"):
    return [row for row in read_lines(RunFiles(folder / "runs" / name).metrics_path) if row["kind"] == kind]


def losses_of(folder, name):
    return [row["loss"] for row in rows_of(folder, name)]


def values_folder(folder):
    [path] = (folder / "runs" / "prepared").glob("*/teachers/*/taught.json")
    return path.parent


@pytest.mark.slow
def test_a_model_learns_from_a_teacher_in_memory(echelon, folder):
    ending = echelon("train", "recipe.json", "--nproc", "2").succeeded()
    assert "teacher: " in ending.out and " frozen parameters" in ending.out
    assert "kl " in ending.out and "agreement " in ending.out
    losses, [first, last] = losses_of(folder, "tiny"), rows_of(folder, kind="eval")
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert last["kl"] == pytest.approx(last["loss"], rel=1e-6) and last["kl"] < first["kl"]
    assert last["perplexity"] == pytest.approx(np.exp(last["cross_entropy"]))
    assert last["agreement"] > 0.05 and last["entropy"] > 0
    assert "unigram" not in ending.out
    assert echelon("eval", "runs/tiny").code == 0


@pytest.mark.slow
def test_prepared_values_of_all_tokens_train_as_the_teacher_in_memory(echelon, folder):
    settings = ["objective.top_k=256", "objective.temperature=1.5"]
    ending = echelon("data", "--prepare", "recipe.json", *settings)
    assert ending.code == 0 and "256 tokens for each of at most" in ending.out, ending
    assert echelon("train", "recipe.json", "run.name=memory", settings[1], "--nproc", "1").code == 0
    expected = losses_of(folder, "memory")
    shutil.rmtree("teacher")  # it is not needed any more
    for name, parallel, nproc in (("one", "ddp", 1), ("two", "fsdp", 2), ("tp", "{tp: 2}", 2), ("cp", "{cp: 2}", 2)):
        echelon(
            "train", "recipe.json", f"run.name={name}", *settings, f"parallel={parallel}", "--nproc", str(nproc)
        ).succeeded()
        assert losses_of(folder, name) == pytest.approx(expected, abs=2e-5), name


@pytest.mark.slow
def test_few_tokens_teach_too_and_are_prepared_once(echelon, folder):
    echelon("data", "--prepare", "recipe.json", "--teacher", "teacher", "--top-k", "8").succeeded()
    again = echelon("data", "--prepare", "recipe.json", "--teacher", "teacher", "--top-k", "8")
    assert "teacher: prepared in" in again.out and "tokens for each" not in again.out
    assert echelon("train", "recipe.json", "objective.top_k=8", "--nproc", "2", "parallel=fsdp").code == 0
    losses = losses_of(folder, "tiny")
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert rows_of(folder, kind="eval")[-1]["agreement"] > 0.05


@pytest.mark.slow
def test_pieces_are_divided_and_a_killed_preparation_goes_on(folder, monkeypatch, echelon):
    """Two processes, pieces of few samples; a piece that is there is not computed again."""
    (folder / "sitecustomize.py").write_text("import echelon.learn.data.taught as t\nt._PIECE_BYTES = 2**17\n")
    command = ("data", "--prepare", "recipe.json", "--teacher", "teacher", "--top-k", "16", "--nproc", "2")
    job = start(*command, cwd=folder, PYTHONPATH=str(folder))
    prepared = folder / "runs" / "prepared"
    while len(list(prepared.glob("*/teachers/*/*.safetensors"))) < 3:
        assert job.poll() is None, job.communicate()
    job.kill()
    finish(job)
    kept = {path: path.stat().st_mtime_ns for path in prepared.glob("*/teachers/*/*.safetensors")}
    assert not list(prepared.glob("*/teachers/*/taught.json"))
    assert finish(start("train", "recipe.json", "objective.top_k=16", cwd=folder, PYTHONPATH=str(folder))).code == 2
    ending = finish(start(*command, cwd=folder, PYTHONPATH=str(folder)))
    assert ending.code == 0 and " of it are there" in ending.out, ending
    whole = {path: path.stat().st_mtime_ns for path in values_folder(folder).glob("*.safetensors")}
    assert len(whole) > len(kept) and all(whole[path] == time for path, time in kept.items())
    assert not list(values_folder(folder).glob("*.lock*"))


def test_values_are_the_likeliest_tokens_of_the_plain_model(echelon, folder):
    """A conversation, of which only the answers are targets, and packed documents that do not see each other."""
    records = [{"prompt": f"{n} and {n}?", "completion": f" {2 * n}!"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = ["data.train=pairs.jsonl", "data.validation_fraction=0.1", "data.document_separator=null"]
    echelon("data", "--prepare", "recipe.json", *data, "--teacher", "teacher", "--top-k", "4").succeeded()
    from echelon.learn.data.prepare import prepare_data
    from echelon.learn.teacher import open_taught
    from echelon.recipe.load import load_recipe

    recipe, _ = load_recipe(folder / "recipe.json", [*data, "objective.top_k=4"])
    samples = open_taught(recipe, prepare_data(recipe)).train.read_samples(np.array([1, 0]))
    model = small_model("qwen3", seed=5)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    checked = 0
    for row in range(2):
        for document in range(samples.documents[row].max() + 1):
            span = samples.documents[row] == document
            with torch.no_grad():
                logits = model(torch.from_numpy(samples.inputs[row][span])[None]).logits[0].double()
            scores, tokens = logits.log_softmax(-1).topk(4)
            labelled = torch.from_numpy(samples.labels[row][span] != -100)
            found = [torch.from_numpy(samples.extra[name][row][span]) for name in (taught.TOKENS, taught.SCORES)]
            assert torch.equal(found[0][labelled].long(), tokens[labelled])
            torch.testing.assert_close(found[1][labelled, :4].double(), scores[labelled], atol=2e-5, rtol=0)
            rest = (1 - scores.exp().sum(-1)).log()
            torch.testing.assert_close(found[1][labelled, 4].double(), rest[labelled], atol=1e-3, rtol=0)
            assert not found[0][~labelled].any() and not found[1][~labelled].any()
            checked += int(labelled.sum())
    assert checked > 10


def test_a_wrong_teacher_is_noticed(echelon, folder):
    assert echelon("data", "--prepare", "recipe.json", "--teacher", "teacher", "--top-k", "4").code == 0
    save_teacher(folder / "teacher", seed=6)
    ending = echelon("train", "recipe.json", "objective.top_k=4")
    assert ending.code == 2 and "The values there were made by other weights (teacher)." in ending.err, ending
    assert "Run `echelon data RECIPE --teacher teacher --top-k 4`" in ending.err
    ending = echelon("train", "recipe.json", "objective.top_k=5", "objective.temperature=2.0")
    assert ending.code == 2 and "are not prepared (objective.temperature=2, data.sequence_len=32)" in ending.err


def test_another_tokenizer_is_refused(echelon, folder):
    train_tokenizer([TEXT], 300).save_pretrained(folder / "teacher")
    for command in (["train", "recipe.json"], ["data", "--prepare", "recipe.json", "--teacher", "teacher"]):
        ending = echelon(*command)
        assert ending.code == 2, ending
        assert "objective.teacher=teacher has another tokenizer than the recipe: id " in ending.err
        assert "to the recipe's tokenizer, and " in ending.err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["objective.teacher=nowhere/at-all"], "objective.teacher=nowhere/at-all"),
        (["objective.top_k=8"], "objective.top_k=8: the log-probabilities of objective.teacher=teacher for the data"),
        (["parallel={cp: 2}"], "parallel.cp=2 does not divide the attention of a teacher"),
        (["parallel={pp: 2}"], "the teacher needs all layers on each process"),
    ],
)
def test_what_cannot_train_is_refused(echelon, folder, settings, message):
    ending = echelon("train", "recipe.json", *settings, "--nproc", "2")
    assert ending.code == 2 and message in ending.err, ending
    assert not RunFiles(folder / "runs" / "tiny").metrics_path.exists()


def test_a_full_disk_is_refused_before_work(echelon, folder, monkeypatch):
    from echelon.learn import teaching

    usage = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(teaching.shutil, "disk_usage", lambda path: usage)
    ending = echelon("data", "--prepare", "recipe.json", "--teacher", "teacher", "--top-k", "8")
    assert ending.code == 1 and "the teacher's values need up to" in ending.err, ending
    assert "use a smaller objective.top_k" in ending.err


@pytest.fixture
def answers(folder):
    """Prompts with answers, and a recipe that samples its own in most steps."""
    records = [{"prompt": f"{n} and {n}?", "completion": f" {2 * n}!"} for n in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_recipe(
        folder,
        data={"train": "pairs.jsonl", "validation_fraction": 0.1, "document_separator": None},
        objective={**DISTILL, "loss": "jsd", "on_policy_fraction": 0.7},
        rollout={"max_new_tokens": 6},
        train={"steps": 16, "global_batch_size": 8, "log_every": 1, "eval_every": 8, "compile": False},
        optim={"learning_rate": 1e-2, "schedule": "constant"},
        checkpoint={"every": 4},
    )
    return folder


LORA = ("adapter.method=lora", "adapter.r=16")
EXACT = ("step", "loss", "grad_norm", "on_policy", "answer_tokens", "entropy", "batch_hash", "tokens")


@pytest.mark.slow
def test_a_model_learns_on_its_own_answers(answers):
    ending, _ = train(answers, "tiny", 2, "objective.on_policy_fraction=1.0")
    rows, evaluated = rows_of(answers), rows_of(answers, kind="eval")
    assert all(row["on_policy"] == 1 and 0 < row["answer_tokens"] <= 6 and row["sample_seconds"] > 0 for row in rows)
    assert sum(row["loss"] for row in rows[-4:]) < 0.9 * sum(row["loss"] for row in rows[:4])
    assert evaluated[-1]["kl"] < evaluated[0]["kl"] and "rollout: " in ending.out
    samples = read_lines(RunFolder(answers / "runs" / "tiny").rows.samples_path)
    assert {row["step"] for row in samples} == {1, 11, 16} and all(row["prompt"].endswith("?") for row in samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "settings"),
    [("ddp", ()), ("fsdp", ()), ("{tp: 2}", ()), ("ddp", LORA), ("fsdp", LORA)],
    ids=["ddp", "fsdp", "tp", "ddp and lora", "fsdp and lora"],
)
def test_processes_draw_the_same_answers(answers, parallel, settings):
    """In fp32 sums differ in their last bits; the draws of the first steps are the same."""
    train(answers, "one", 1, *settings)
    train(answers, "two", 2, f"parallel={parallel}", *settings)
    alone, together = rows_of(answers, "one"), rows_of(answers, "two")
    assert {row["on_policy"] for row in alone} == {0, 1}
    losses = [[row["loss"] for row in rows[:6]] for rows in (together, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for row, expected in zip(together[:6], alone[:6], strict=True):
        same = ("tokens", "target_tokens", "on_policy", "answer_tokens")
        assert [row[name] for name in same] == [expected[name] for name in same]
        assert row["entropy"] == (None if expected["on_policy"] == 0 else pytest.approx(expected["entropy"], abs=1e-5))
    first = [read_lines(RunFolder(answers / "runs" / name).rows.samples_path)[0] for name in ("one", "two")]
    assert first[0] == first[1]


LOOP = """
import json

from echelon.run.training.distill_loop import distill_on_policy


def loop(learner, run):
    sample = learner.generate

    def generate(*given, **further):
        found = sample(*given, **further)
        with open(f"drawn-{learner.place.size}-{learner.place.rank}", "a") as file:
            file.write("".join(json.dumps(answer) + chr(10) for answer in found.answers))
        return found

    learner.generate = generate
    distill_on_policy(learner, run)
"""


def test_sequences_with_one_prompt_have_their_own_answers(answers):
    (answers / "watched.py").write_text(LOOP)
    (answers / "pairs.jsonl").write_text("".join(json.dumps({"prompt": "same?", "completion": f" {n}!"}) + "\n"
                                                 for n in range(60)))  # fmt: skip
    settings = ("objective.on_policy_fraction=1", "train.steps=1", "train.loop=watched:loop")
    train(answers, "one", 1, *settings)
    train(answers, "two", 2, *settings)
    alone, *together = (read_lines(answers / f"drawn-{place}") for place in ("1-0", "2-0", "2-1"))
    assert len({str(answer) for answer in alone}) == len(alone) == 8
    assert [*together[0], *together[1]] == alone


@pytest.mark.slow
def test_prompts_need_no_answers(answers):
    """The same draws and losses as from records with answers, which are never read."""
    records = [json.loads(line) for line in (answers / "pairs.jsonl").read_text().splitlines()]
    (answers / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in records))
    (answers / "held.jsonl").write_text(json.dumps({"prompt": "200 and 200?", "completion": " 400!"}) + "\n")
    settings = ("objective.on_policy_fraction=1", "train.steps=4")
    for name, source in (("with", "pairs"), ("without", "prompts")):
        train(answers, name, 2, *settings, f"data.train={source}.jsonl", "data.validation=held.jsonl",
              "data.validation_fraction=null")  # fmt: skip
    same = ("loss", "grad_norm", "answer_tokens", "entropy", "left_out", "tokens")
    found = [[[row[key] for key in same] for row in rows_of(answers, name)] for name in ("with", "without")]
    assert found[0] == found[1] and len(found[0]) == 4 and all(row[-2] == 0 for row in found[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["objective.on_policy_fraction=0.5"], "objective.name=distill with objective.on_policy_fraction=1"),
        (["objective.on_policy_fraction=1"], "held-out prompts without an answer cannot be evaluated"),
    ],
)
def test_prompts_that_need_answers_are_refused(echelon, answers, settings, message):
    (answers / "pairs.jsonl").write_text("".join(json.dumps({"prompt": f"{n} and?"}) + "\n" for n in range(60)))
    ending = echelon("train", "recipe.json", *settings)
    assert ending.code == 2 and message in ending.err, ending


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_run_equals_an_uninterrupted_one(answers, nproc):
    train(answers, "whole", nproc)
    assert "restart 1 of" in train(answers, "killed", nproc, kill_at=6)[0].out
    assert exact(rows_of(answers, "killed"), EXACT) == exact(rows_of(answers, "whole"), EXACT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.group_size=4"], "rollout.group_size=4 has no effect with objective.name=distill"),
        (["reward=exact"], "reward has no effect with objective.name=distill; set objective.name: grpo, or rem"),
        (["objective.on_policy_fraction=0"], "=distill; set objective.name: grpo, or objective.on_policy_f"),
        (
            ["rollout.max_new_tokens=31"],
            "rollout.max_new_tokens=31 leaves no room for a prompt in data.sequence_len=32",
        ),
        (["data.packing=true"], "needs the prompt of each answer, and so one answer in a sequence"),
        (["sync.name=local_sgd"], "sync.name=local_sgd: objective.on_policy_fraction="),
    ],
)
def test_what_cannot_sample_is_refused(echelon, answers, settings, message):
    ending = echelon("train", "recipe.json", *settings)
    assert ending.code == 2 and message in ending.err, ending
