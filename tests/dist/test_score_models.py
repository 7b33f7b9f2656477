"""Reward models and classifiers by commands, from data to folders that transformers and PEFT load with equal scores."""

import json
import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.dist.command import EXACT, await_line, finish, read_lines, start
from tests.dist.test_finetuning import base, load_as_the_card_says, write_recipe  # noqa: F401
from tests.families import load_run_model
from tests.parity.training import equal_tensors, tensors_of

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
CLASSIFICATION = {"name": "classification", "labels": ["even", "odd"]}


def write_pairs(folder):
    """Write pairs of which the chosen answer is right, some with a margin."""
    draws, rows = random.Random(0), []
    for number in range(96):
        turns = [{"role": "user", "content": f"{number} plus {number}?"}]
        answers = {"chosen": f"{2 * number}.", "rejected": f"{2 * number} or so, or {draws.randint(0, 9)}."}
        row = {name: [*turns, {"role": "assistant", "content": text}] for name, text in answers.items()}
        rows.append(row | ({"margin": draws.random()} if number % 2 else {}))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_reward(folder, method="lora", **sections):
    write_pairs(folder)
    return write_scorer(folder, method, "pairs.jsonl", {"name": "reward"}, **sections)


def write_classifier(folder, method="lora", **sections):
    """Write a recipe, and texts and messages whose label tells whether a number in them is even."""
    rows = []
    for number in range(96):
        text, label = f"{number} is {'odd' if number % 2 else 'even'}.", ("even", "odd")[number % 2]
        content = {"messages": [{"role": "user", "content": text}]} if number % 3 else {"text": text}
        rows.append({**content, "label": label if number % 5 else number % 2})
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_scorer(folder, method, "texts.jsonl", CLASSIFICATION, **sections)


def write_scorer(folder, method, data, usual_objective, **sections):
    given = {"data": {"train": data, "sequence_len": 128}, "objective": usual_objective}
    run = write_recipe(folder, **(given | sections))
    if method == "full":
        recipe = json.loads((folder / "recipe.json").read_text())
        del recipe["adapter"]
        (folder / "recipe.json").write_text(json.dumps(recipe))
    return run


def scores_of(model, tokenizer, texts):
    """The scores of texts in one padded batch, as transformers gives them."""
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        return model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits


def chats(tokenizer):
    turns = [[("user", "3 plus 3?"), ("assistant", "6.")], [("user", "Hi"), ("assistant", "A longer answer.")]]
    turns = [[{"role": role, "content": content} for role, content in chat] for chat in turns]
    return tokenizer.apply_chat_template(turns, tokenize=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_from_pairs_to_the_same_scores_in_transformers(echelon, base, tmp_path, method):  # noqa: F811
    run = write_reward(tmp_path, method, train={"steps": 20, "eval_every": 10},
                       optim={"learning_rate": 5e-3}, objective={"name": "reward", "center_weight": 0.01})  # fmt: skip
    ending = echelon("train", "recipe.json", "--nproc", "2")
    assert ending.code == 0 and "echelon generate" not in ending.err, ending
    evals = [row for row in read_lines(run.metrics_path) if row["kind"] == "eval"]
    assert evals[-1]["reward_accuracy"] > 0.9 and evals[-1]["reward_margin"] > 0.5
    ending = echelon("eval", run.path, "--json").succeeded()
    assert json.loads(ending.out)["loss"] == pytest.approx(evals[-1]["loss"], abs=1e-4)
    given = json.loads(echelon("eval", run.path, "--data", "pairs.jsonl", "--json").out)
    assert given["pairs"] == 96 and given["reward_accuracy"] > 0.9

    options = ("--merge",) if method == "lora" else ()
    assert echelon("export", run.path, "whole", *options).code == 0
    trained = load_run_model(run.path, CPU)
    model, tokenizer = load_as_the_card_says(run.export_dir if method == "lora" else tmp_path / "whole")
    texts = chats(tokenizer)
    expected = scores_of(trained, tokenizer, texts)
    assert expected.shape == (2, 1) and (expected[0] - expected[1]).abs() > 1e-3
    torch.testing.assert_close(scores_of(model, tokenizer, texts), expected, atol=1e-5, rtol=1e-5)
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
    assert whole.config.architectures == ["LlamaForSequenceClassification"] and whole.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(scores_of(whole, tokenizer, texts), expected, atol=1e-5, rtol=1e-5)
    alone = torch.cat([scores_of(whole, tokenizer, [text]) for text in texts])
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)

    for target in (run.path, "whole"):
        ending = echelon("generate", target, "--prompt", "x")
        assert ending.code == 2 and "is a model that scores texts" in ending.err, ending


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_from_labels_to_the_same_classifier_in_transformers(echelon, base, tmp_path, method):  # noqa: F811
    run = write_classifier(tmp_path, method, train={"steps": 30, "eval_every": 10}, optim={"learning_rate": 5e-3})
    ending = echelon("train", "recipe.json", "--nproc", "2")
    assert ending.code == 0 and "accuracy" in ending.out + ending.err and "echelon generate" not in ending.err, ending
    evals = [row for row in read_lines(run.metrics_path) if row["kind"] == "eval"]
    assert evals[-1]["accuracy"] > 0.9 and evals[-1]["macro_f1"] > 0.9
    own = json.loads(echelon("eval", run.path, "--json").out)
    assert own["loss"] == pytest.approx(evals[-1]["loss"], abs=1e-4) and own["labels"] == evals[-1]["labels"]
    given = json.loads(echelon("eval", run.path, "--data", "texts.jsonl", "--json").out)
    assert given["texts"] == 96 and [given["labels"][name]["texts"] for name in ("even", "odd")] == [48, 48]
    assert "with the right label" in echelon("report", run.path, "--text").out

    options = ("--merge",) if method == "lora" else ()
    assert echelon("export", run.path, "whole", *options).code == 0
    ending = echelon("eval", "whole", "--data", "texts.jsonl", "--json").succeeded()
    exported = json.loads(ending.out)
    assert exported["loss"] == pytest.approx(given["loss"], abs=1e-4) and exported["labels"] == given["labels"]
    trained = load_run_model(run.path, CPU)
    model, tokenizer = load_as_the_card_says(run.export_dir if method == "lora" else tmp_path / "whole")
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
    texts = [f"{number} is {word}." for number, word in ((3, "odd"), (10, "even"), (77, "odd"))]
    expected = scores_of(trained, tokenizer, texts)
    for loaded in (model, whole):
        torch.testing.assert_close(scores_of(loaded, tokenizer, texts), expected, atol=1e-5, rtol=1e-5)
        assert loaded.config.id2label == {0: "even", 1: "odd"} and loaded.config.label2id == {"even": 0, "odd": 1}
    assert [whole.config.id2label[number] for number in expected.argmax(-1).tolist()] == ["odd", "even", "odd"]

    ending = echelon("generate", run.path, "--prompt", "x")
    assert ending.code == 2 and "is a model that scores texts" in ending.err, ending
    write_pairs(tmp_path)
    ending = echelon("eval", run.path, "--data", "pairs.jsonl")
    assert ending.code != 0 and "has no field `label`" in ending.err, ending
    if method == "full":
        for labels, code in (("[odd,even]", 2), ("[even,odd,none]", 2), ("[even,odd]", 0)):
            more = (f"objective.labels={labels}", "run.dir=runs/on", "model.checkpoint=whole", "model.new_tokens=[]")
            ending = echelon("train", "recipe.json", *more, "train.steps=1")
            assert ending.code == code, ending
            assert code == 0 or "model.checkpoint=whole is a model that scores texts with the labels" in ending.err


@pytest.mark.slow
def test_training_goes_on_from_a_reward_model(echelon, base, tmp_path):  # noqa: F811
    """The head of a model that scores texts is loaded; that of a language model is new, from the seed."""
    write_reward(tmp_path, "full", train={"steps": 2})
    assert echelon("train", "recipe.json").code == 0
    assert echelon("export", "runs/tuned", "first").code == 0
    more = ("optim.learning_rate=1e-30", "model.new_tokens=[]")
    heads = []
    for name, source in (("again", "first"), ("of-run", "runs/tuned")):
        assert echelon("train", "recipe.json", f"run.dir=runs/{name}", f"model.checkpoint={source}", *more).code == 0
        heads.append(tensors_of(tmp_path / "runs" / name, 2)["model.score.weight"])
    expected = tensors_of(tmp_path / "runs" / "tuned", 2)["model.score.weight"]
    assert all(torch.equal(head, expected) for head in heads)
    ending = echelon("train", "recipe.json", "run.dir=runs/lm", "model.checkpoint=first", "objective.name=causal_lm",
                     "data.train=chat.jsonl", *more)  # fmt: skip
    assert ending.code == 2 and "has no head for tokens; set objective.name=reward" in ending.err


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_reward, write_classifier], ids=["reward", "classification"])
def test_a_resumed_run_equals_an_uninterrupted_one(echelon, base, tmp_path, write):  # noqa: F811
    run = write(tmp_path, train={"steps": 120})
    command = ("train", "recipe.json", "--nproc", "2", "checkpoint.every=10")
    job = start(*command)
    await_line(run.events_path, '"event": "checkpoint", "step": 10', job, seconds=120)
    job.terminate()
    assert finish(job, 120).code == 3 and 10 <= run.newest_step() < 120
    assert echelon(*command).code == 0
    assert echelon(*command, "run.dir=runs/whole").code == 0
    rows = [
        [[row[key] for key in EXACT] for row in read_lines(folder / "metrics.jsonl") if row["kind"] == "train"]
        for folder in (run.path, tmp_path / "runs" / "whole")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 120
    assert equal_tensors(tensors_of(run.path, 120), tensors_of(tmp_path / "runs" / "whole", 120))
