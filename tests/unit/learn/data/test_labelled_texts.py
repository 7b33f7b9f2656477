"""Texts with labels: as `transformers` tokenizes them, cut at their end, and refused with their place if wrong."""

import json

import numpy as np
import pytest

from echelon.ground.errors import ConfigError, DataError
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.shards import NO_LABEL
from echelon.learn.data.tokenizer import build_bytes_tokenizer
from tests.unit.recipe_samples import load_text

RECIPE = """
run: {{name: labels, dir: {folder}/run}}
model: {{config: {{model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 512}}}}
tokenizer: {folder}/tokenizer
data: {{train: {sources}, sequence_len: 16, validation_fraction: 0, packing: false{more}}}
objective: {{name: classification, labels: [negative, positive]}}
train: {{steps: 2, global_batch_size: 4}}
optim: {{learning_rate: 1.0e-3}}
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer with a token before each text and one after it, which pads too."""
    made = build_bytes_tokenizer()
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"})
    made.chat_template = TEMPLATE
    from tokenizers.processors import TemplateProcessing

    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.bos_token_id)]
    )
    made.save_pretrained(tmp_path / "tokenizer")
    return made


def prepared(folder, records, source=None, more="", name="texts.jsonl"):
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    sources = json.dumps([{"path": str(folder / name), **(source or {})}])
    recipe, _ = load_text(folder, RECIPE.format(folder=folder, sources=sources, more=more))
    return prepare_data(recipe)


def texts_of(data):
    """The ids of each sample, and its label, which follows its last id."""
    samples, found = data.train.read_samples(np.arange(data.train.num_samples)), []
    for inputs, labels in zip(samples.inputs, samples.labels, strict=True):
        [last] = np.flatnonzero(labels != NO_LABEL).tolist()
        found.append((inputs[: last + 1].tolist(), int(labels[last])))
    return found


def test_texts_and_pairs_are_those_of_the_tokenizer(tmp_path, tokenizer):
    records = [{"text": "good", "label": "positive", "id": 7}, {"text": "bad", "text_pair": "or so", "label": 0}]
    found = texts_of(prepared(tmp_path, records))
    assert found == [(tokenizer("good")["input_ids"], 1), (tokenizer("bad", "or so")["input_ids"], 0)]
    assert found[0][0][0] == tokenizer.bos_token_id


def test_fields_with_other_names(tmp_path, tokenizer):
    records = [{"premise": "a", "hypothesis": "b", "gold": "1", "label": "other"}]
    fields = {"text": "premise", "text_pair": "hypothesis", "label": "gold"}
    assert texts_of(prepared(tmp_path, records, {"fields": fields})) == [(tokenizer("a", "b")["input_ids"], 1)]


def test_messages_are_rendered_without_their_last_padding(tmp_path, tokenizer):
    """No turn of the assistant is needed; the template is that of the tokenizer."""
    turns = [{"role": "user", "content": "Hi"}]
    [(ids, label)] = texts_of(prepared(tmp_path, [{"messages": turns, "label": "negative"}]))
    whole = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert (whole[-1], label) == (tokenizer.pad_token_id, 0) and ids == whole[:-1]


def test_a_long_text_is_cut_at_its_end(tmp_path, tokenizer):
    records = [{"text": "x" * length, "label": 1} for length in (15, 16, 40)]
    data = prepared(tmp_path, records)
    assert [ids for ids, _ in texts_of(data)] == [tokenizer("x" * 15)["input_ids"]] * 3
    [source] = data.manifest.streams["train"]
    assert (source.labelled.num_overlong, source.labelled.num_dropped, source.labelled.lost_tokens) == (2, 0, 26)
    [(ids, _)] = texts_of(prepared(tmp_path, records, more=", on_overlong: drop"))
    assert len(ids) == 16
    with pytest.raises(DataError, match=r"data\.sequence_len=16; increase it"):
        prepared(tmp_path, records, more=", on_overlong: refuse")


def test_an_unknown_label_is_one_error_with_its_place(tmp_path, tokenizer):
    records = [{"text": "a", "label": 0}, {"text": "b", "label": "neutral"}]
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path, records)
    assert str(caught.value) == (
        f"{tmp_path}/texts.jsonl:2: label='neutral' is none of objective.labels (negative, positive), nor a position "
        "in that list; correct the record, or objective.labels."
    )


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"text": "a"}, "has no field `label`, which the format labelled requires"),
        ({"label": 1}, "has neither `text` nor `messages`"),
        ({"text": "a", "messages": [], "label": 1}, "has `text` and `messages`"),
        ({"text": "a", "system": "b", "label": 1}, "has `system`, which does not go with `text`"),
        ({"messages": [{"role": "user", "content": "a"}], "text_pair": "b", "label": 1}, "has `text_pair`, which does"),
        ({"text": 5, "label": 1}, "has no text in `text`"),
    ],
)
def test_records_of_another_kind(tmp_path, tokenizer, record, problem):
    with pytest.raises(DataError, match=problem):
        prepared(tmp_path, [record])


@pytest.mark.parametrize(
    ("name", "source", "found"), [("texts.txt", {}, "plain text"), ("texts.jsonl", {"format": "messages"}, "messages")]
)
def test_data_without_labels(tmp_path, tokenizer, name, source, found):
    message = f"classification learns labels of texts, but the data has {found}; give records with `label` and `text`"
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, [{"messages": [{"role": "user", "content": "a"}], "label": 1}], source, name=name)
