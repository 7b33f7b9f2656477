"""Loss of HF folders with models that score texts, beside that of `transformers`; what cannot be evaluated."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from echelon.ground.errors import ConfigError
from echelon.tools.inference.evaluate import evaluate_model
from tests.unit.learn.answers.test_reward_models import TALK, write_scorer

LABELS = ("low", "middle", "high")
TEXTS = [{"text": f"{number} plus {number} is {2 * number}.", "label": LABELS[number % 3]} for number in range(7)]


def write_records(folder, records):
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "records.jsonl"


def scores_of(folder, encoded):
    """The scores of texts, one by one, [texts, scores]."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits for ids in encoded])


def test_a_classifier_has_the_loss_and_accuracy_of_transformers(tmp_path):
    tokenizer = write_scorer(tmp_path / "model", labels=LABELS)
    found = evaluate_model(tmp_path / "model", write_records(tmp_path, TEXTS))
    scores = scores_of(tmp_path / "model", [tokenizer(record["text"])["input_ids"] for record in TEXTS])
    labels = torch.tensor([LABELS.index(record["label"]) for record in TEXTS])
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(scores, labels).item(), abs=1e-5)
    assert found["accuracy"] == pytest.approx((scores.argmax(-1) == labels).float().mean().item())
    assert found["texts"] == 7 and {name: row["texts"] for name, row in found["labels"].items()} == {
        "low": 3, "middle": 2, "high": 2
    }  # fmt: skip


def test_a_reward_model_has_the_loss_and_accuracy_of_transformers(tmp_path):
    tokenizer = write_scorer(tmp_path / "model")
    sides = [[*TALK, {"role": "assistant", "content": text}] for text in ("7.", "8 or so", "7", "I do not know")]
    pairs = [{"chosen": sides[0], "rejected": sides[1], "margin": 0.5}, {"chosen": sides[2], "rejected": sides[3]}]
    found = evaluate_model(tmp_path / "model", write_records(tmp_path, pairs))
    texts = [tokenizer.apply_chat_template(side, tokenize=False) for side in sides]
    scores = scores_of(tmp_path / "model", [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    ahead = scores[0::2, 0] - scores[1::2, 0]
    expected = -torch.nn.functional.logsigmoid(ahead - torch.tensor([0.5, 0.0])).mean()
    assert found["loss"] == pytest.approx(expected.item(), abs=1e-5) and found["pairs"] == 2
    assert found["reward_accuracy"] == (ahead > 0).float().mean().item()


def test_records_of_another_kind_are_refused(tmp_path):
    write_scorer(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"has other records than preference pairs .*is a model that scores texts"):
        evaluate_model(tmp_path / "model", write_records(tmp_path, [{"text": "3 plus 4 is 7."}] * 4))


def test_several_labels_of_one_text_are_refused(tmp_path):
    write_scorer(tmp_path / "model", labels=LABELS)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["problem_type"] = "multi_label_classification"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"problem_type=multi_label_classification in config\.json"):
        evaluate_model(tmp_path / "model", write_records(tmp_path, TEXTS))
