"""Multiple-choice tasks: the file, and accuracies of lm-eval, if it is installed, compared with a plain loop."""

import importlib.util
import json
import random
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from echelon.ground.errors import ConfigError
from echelon.learn.benchmarks.task_files import name_tasks, read_task
from echelon.learn.data.tokenizer import train_tokenizer
from echelon.run.lifecycle.extension_checks import check_extensions
from echelon.run.training import evaluation_checks
from echelon.tools.inference.evaluate import evaluate_task
from tests.families import small_config
from tests.unit.recipe_samples import SMALL, load_text

TEXT = "What colour is the sky? It is blue. What colour is grass? It is green. été 東京 " * 20
EXAMPLES = [
    {"question": "What colour is the sky? ", "choices": ["blue", "green", "a kind of grass"], "answer": "blue"},
    {"context": "What colour is grass?", "choices": ["blue", "green"], "answer": 1},
    {"prompt": "It is", "choices": ["été", "東京", "colour colour", "sky"], "answer": 0},
    {"prompt": "the sky", "choices": ["is blue", "is the sky"], "answer": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An HF folder with a small random model, far from uniform."""
    path = tmp_path_factory.mktemp("model")
    train_tokenizer([TEXT], 300).save_pretrained(path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small_config("llama", vocab_size=320)))
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(path)
    return path


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "colours.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in EXAMPLES) + "\n")
    return path


def plain_scores(folder):
    """The log-likelihood of every choice, one at a time, token by token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    scores = []
    for example in EXAMPLES:
        context = next(example[name] for name in ("question", "context", "prompt") if name in example)
        known = len(tokenizer(context.rstrip())["input_ids"])
        row = []
        for choice in example["choices"]:
            ids = tokenizer(context + " " + choice, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                steps = model(input_ids=ids).logits[0].log_softmax(-1)
            row.append(sum(float(steps[place - 1, ids[0, place]]) for place in range(known, ids.shape[1])))
        scores.append(row)
    return scores


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_accuracies_equal_those_of_a_plain_loop(folder, task):
    scores = plain_scores(folder)
    answers = [0, 1, 0, 1]
    sizes = {
        "acc": [[1] * len(each["choices"]) for each in EXAMPLES],
        "acc_norm": [[len(choice) for choice in each["choices"]] for each in EXAMPLES],
        "acc_bytes": [[len(choice.encode()) for choice in each["choices"]] for each in EXAMPLES],
    }
    assert sizes["acc_norm"][2] == [3, 2, 13, 3] and sizes["acc_bytes"][2] == [5, 6, 13, 3]
    result = evaluate_task(folder, task)
    for name, divisors in sizes.items():
        hits = []
        for row, divided, answer in zip(scores, divisors, answers, strict=True):
            normed = [score / size for score, size in zip(row, divided, strict=True)]
            hits.append(max(range(len(normed)), key=normed.__getitem__) == answer)
        assert result[name] == sum(hits) / 4
        assert result[f"{name}_stderr"] == pytest.approx(float(torch.tensor(hits).double().std()) / 2)
    assert result["random"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 4 + 1 / 2) / 4)
    assert (result["task"], result["examples"]) == ("colours", 4)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2: give exactly one of context, question, prompt"),
        ('{"context": "a", "prompt": "b", "choices": ["a", "b"], "answer": 0}', "line 2: give exactly one"),
        ('{"context": " ", "choices": ["a", "b"], "answer": 0}', "a string that is not empty"),
        ('{"context": "a", "choices": ["a"], "answer": 0}', "line 2: `choices` must be a list of at least two"),
        ('{"context": "a", "choices": ["a", ""], "answer": 0}', "none of them empty"),
        ('{"context": "a", "choices": ["a", "b"], "answer": 2}', "line 2: `answer` is 2; .* 0 to 1, or its text"),
        ('{"context": "a", "choices": ["a", "b"], "answer": "c"}', "`answer` is 'c'"),
        ('{"context": "a", "choices": ["a", "a"], "answer": "a"}', "`answer` is 'a'"),
        ('{"context": "a", "choices": ["a", "b"], "answer": true}', "`answer` is True"),
        ('{"context": "a", "choices": ["a", "b"]}', "`answer` is None"),
    ],
)
def test_broken_lines_are_refused_by_number(tmp_path, line, words):
    path = tmp_path / "task.jsonl"
    path.write_text(json.dumps(EXAMPLES[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=words):
        read_task(path)


def test_files_without_examples_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="contains no example"):
        read_task(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_task(tmp_path / "none.jsonl")


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_the_message_names_its_extra(folder, task):
    from echelon.tools.inference.evaluate import evaluate_with_harness

    for evaluate in (lambda: evaluate_with_harness(folder, ["hellaswag"]), lambda: evaluate_task(folder, task)):
        with pytest.raises(ConfigError, match=r"pip install 'lm-eval>="):
            evaluate()


TASK = """\
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
"""


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_a_task_file_of_lm_eval_gives_the_same_results(folder, task, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    from echelon.tools.inference.evaluate import evaluate_with_harness

    data = tmp_path / "mine.jsonl"
    data.write_text("".join(
        json.dumps({"context": each.context, "choices": each.choices, "answer": each.answer}) + "\n"
        for each in read_task(task)
    ))  # fmt: skip
    (tmp_path / "mine.yaml").write_text(TASK % data)
    ours = evaluate_task(folder, data)
    theirs = evaluate_with_harness(folder, ["mine"], tmp_path)["mine"]
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert theirs[name] == ours[name] and theirs[f"{name}_stderr"] == ours[f"{name}_stderr"]
    with pytest.raises(ConfigError, match="lm-eval has no task no_such_task"):
        evaluate_with_harness(folder, ["no_such_task_at_all"], tmp_path)


def test_names_are_read_without_running_what_a_file_names(tmp_path):
    (tmp_path / "own.yaml").write_text("task: mine\nprocess_docs: !function os.abort\n")
    (tmp_path / "group.yaml").write_text("group: many\ntask: [arc_easy, mine]\n")
    (tmp_path / "mine.jsonl").write_text(json.dumps(EXAMPLES[0]) + "\n")
    own, group, questions = (str(tmp_path / name) for name in ("own.yaml", "group.yaml", "mine.jsonl"))
    assert name_tasks(["arc_easy", own], "evaluate.tasks") == ["arc_easy", "mine"]
    for entries, words in (
        ([group], r"evaluate.tasks .*group.yaml names no task of its own"),
        ([own, questions], "evaluate.tasks: two tasks have the name mine"),
        ([str(tmp_path / "none.yaml")], r"evaluate.tasks .*none.yaml cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            name_tasks(entries, "evaluate.tasks")


def test_a_recipe_with_tasks_is_refused_before_work_starts(tmp_path, monkeypatch):
    asked = "evaluate: {tasks: [arc_easy]}\n"
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"evaluate.tasks=\['arc_easy'\] .* pip install 'lm-eval>="):
        check_extensions(load_text(tmp_path, SMALL + asked)[0])
    for text, words in (
        ("evaluate: {tasks_every: 5}\n", "evaluate.tasks_every=5 has no effect without evaluate.tasks"),
        (asked + "objective: {name: reward}\n", r"evaluate.tasks=\[arc_easy\]: .* only scores texts, and writes none"),
        (asked + "engine: tensorflow\n", "evaluate.tasks=.*engine=tensorflow computes the logits of one position"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_text(tmp_path, SMALL + text)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_tasks_are_tried_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"context": "a", "choices": ["b", "c"], "answer": 0}) + "\n")
    fields = "dataset_path: json\ntest_split: test\ndoc_to_text: a\ndoc_to_target: b\noutput_type: generate_until\n"
    fields += "dataset_kwargs: {data_files: {test: %s}}\nmetric_list: [{metric: exact_match}]\n"
    path = tmp_path / "mine.yaml"
    recipe, _ = load_text(tmp_path, f"{SMALL}evaluate: {{tasks: [{path}], select_by: mine/acc}}\n")
    for text, words in (
        (fields % data, "evaluate.select_by=mine/acc: the task mine has no such metric; it has exact_match"),
        (fields % (tmp_path / "none"), "evaluate.tasks: lm-eval cannot run the tasks here"),
        (fields % data + "generation_kwargs: {num_beams: 4}\n", "generation_kwargs.num_beams=4, which cannot be used"),
    ):
        path.write_text(f"task: mine\n{text}")
        before = random.getstate(), torch.get_rng_state()
        with pytest.raises(ConfigError, match=words):
            evaluation_checks.try_benchmarks(recipe)
        assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
