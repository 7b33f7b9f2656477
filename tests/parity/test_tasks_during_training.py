"""Benchmarks of lm-eval during training: lm-eval's own numbers, on any ranks, and no trace in the training."""

import json
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echelon.learn.checkpoint.export import export_run
from echelon.run.folder.run_folder import RunFolder
from tests.parity.test_evaluation import of_kind, train
from tests.parity.training import EXACT, Row, with_ranks

pytestmark = [pytest.mark.dist, pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")]

WORDS = ["def", "self", "return", "import", "value", "None", "class", "x", "0", "for"]
DATA = """\
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "{{context}}"
"""
CHOICE = """\
include: data
task: choices
output_type: multiple_choice
num_fewshot: 1
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWER = """\
include: data
task: answers
output_type: generate_until
num_fewshot: 0
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: chrf}]
"""
ROLLING = """\
include: data
task: texts
output_type: loglikelihood_rolling
num_fewshot: 0
doc_to_text: ""
doc_to_target: "{{context}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Task files of the three kinds of requests, over seven questions that two ranks cannot divide evenly."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data, fields = tmp_path / "questions.jsonl", ("context", "choices", "answer")
    questions = [(f"{WORDS[at]} {WORDS[at + 1]}", WORDS[at : at + 3], at % 3) for at in range(7)]
    data.write_text("".join(json.dumps(dict(zip(fields, each, strict=True))) + "\n" for each in questions))
    (tmp_path / "data").write_text(DATA % data)
    (tmp_path / "choices.yaml").write_text(CHOICE)
    (tmp_path / "answers.yaml").write_text(ANSWER)
    (tmp_path / "texts.yaml").write_text(ROLLING)
    return [str(tmp_path / f"{name}.yaml") for name in ("choices", "answers", "texts")]


def ask_lm_eval(folder, tasks):
    """What lm-eval itself says of an exported model, loaded by its own class."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.bos_token = tokenizer.convert_ids_to_tokens(0)  # it has none
    wrapped = HFLM(pretrained=model.eval(), tokenizer=tokenizer, backend="causal", batch_size=1)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(wrapped, tasks=["choices", "answers", "texts"], task_manager=manager, bootstrap_iters=2)[
        "results"
    ]


ROWS = [
    with_ranks(Row(family="gpt2", dropout=0.1), 2, micro_batch=2),
    with_ranks(Row("fsdp", family="gpt2", dropout=0.1), 2, micro_batch=2),
    pytest.param(with_ranks(Row({"tp": 2}), 2, micro_batch=2), marks=pytest.mark.slow),
    pytest.param(with_ranks(Row({"pp": 2}), 2, micro_batch=2), marks=pytest.mark.slow),
    pytest.param(with_ranks(Row({"cp": 2}), 2, micro_batch=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_tasks_give_lm_evals_numbers_and_leave_no_trace(workers, text, tmp_path, tasks, row):
    plain = train(workers, row, tmp_path / "plain", text)
    wanted = {"tasks": tasks, "tasks_every": 1, "select_by": "texts/word_perplexity"}
    asked = train(workers, row, tmp_path / "asked", text, evaluate=wanted, checkpoint={"keep_best": True})
    ours, theirs = ([[each[key] for key in EXACT] for each in of_kind(run, "train")] for run in (asked, plain))
    assert ours == theirs and len(ours) == 4
    folders = [export_run(run, tmp_path / f"export-{run.parent.name}", "fp32") for run in (asked, plain)]
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())

    rows = of_kind(asked, "tasks")
    assert [each["step"] for each in rows] == [1, 2, 3, 4] and all(each["seconds"] > 0 for each in rows)
    expected = ask_lm_eval(folders[0], tmp_path)
    for name in ("choices", "answers", "texts"):
        theirs = {key.removesuffix(",none"): value for key, value in expected[name].items()}
        found = rows[-1]["tasks"][name]
        assert len(found) >= 2 and (name == "answers" or any(found.values()))  # so new a model answers nothing right
        for metric, value in found.items():
            # During training lm-eval does not resample, for which it would start processes.
            assert value == (None if metric == "chrf_stderr" else pytest.approx(theirs[metric], rel=1e-5)), metric
    values = [each["tasks"]["texts"]["word_perplexity"] for each in rows]
    best = values.index(min(values)) + 1
    state = json.loads((RunFolder(asked).path / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert state["train"]["best_step"] == best and state["train"]["best_loss"] == pytest.approx(min(values))
    assert (RunFolder(asked).path / "checkpoints" / f"step-{best:08d}").is_dir()
