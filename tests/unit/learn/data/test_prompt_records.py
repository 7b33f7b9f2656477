"""Prompts without answers: prepared, held out, mixed, and read back with their records."""

import json

import pytest

from echelon.ground.errors import ConfigError, DataError
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.prepared import read_prompts
from tests.unit.recipe_samples import load_text

RECIPE = """
run: {{name: prompts, dir: {folder}/run}}
model: {{config: {{model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 512}}}}
tokenizer: {tokenizer}
data: {{train: {sources}, sequence_len: {length}, {more}}}
objective: {{name: grpo}}
rollout: {{max_new_tokens: 8}}
reward: exact
train: {{steps: 2, global_batch_size: 8}}
optim: {{learning_rate: 1.0e-3}}
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def prepared(folder, sources, length=64, more="validation_fraction: 0", tokenizer="bytes"):
    text = RECIPE.format(folder=folder, sources=json.dumps(sources), length=length, more=more, tokenizer=tokenizer)
    recipe, _ = load_text(folder, text)
    return prepare_data(recipe)


def text_of(data, prompt):
    return data.tokenizer.decode(prompt.ids)


def test_a_prompt_is_read_back_with_its_whole_record(tmp_path):
    records = [{"prompt": f"{n}+{n}=", "answer": 2 * n, "level": {"of": ["ä", None]}} for n in range(20)]
    data = prepared(tmp_path, write(tmp_path / "sums.jsonl", records))
    found = read_prompts(data.train, range(20))
    assert [prompt.record for prompt in found] == records
    assert [text_of(data, prompt) for prompt in found] == [record["prompt"] for record in records]


def test_an_own_field_and_a_prompt_with_an_answer(tmp_path):
    named = write(tmp_path / "a.jsonl", [{"question": "why?", "prompt": "not this"}])
    whole = write(tmp_path / "b.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    sources = [
        {"path": named, "format": "prompt", "fields": {"prompt": "question"}},
        {"path": whole, "format": "prompt"},
    ]
    data = prepared(tmp_path, sources)
    found = read_prompts(data.train, [0, 1])
    assert [text_of(data, prompt) for prompt in found] == ["why?", "2+2="]
    assert [prompt.record for prompt in found] == [
        {"question": "why?", "prompt": "not this"}, {"prompt": "2+2=", "completion": "4"}
    ]  # fmt: skip


def test_messages_are_rendered_up_to_where_the_assistant_answers(tmp_path):
    turns = [{"role": "user", "content": "why?"}]
    path = write(
        tmp_path / "chat.jsonl", [{"prompt": turns, "answer": "so"}, {"prompt": "how?", "system": "Be brief."}]
    )
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    more = f"validation_fraction: 0, chat_template: {tmp_path}/template.jinja"
    data = prepared(tmp_path, path, more=more, tokenizer="{train: {vocab_size: 300}}")
    found = read_prompts(data.train, [0, 1])
    assert text_of(data, found[0]) == "<user>why?<assistant>"
    assert text_of(data, found[1]) == "<system>Be brief.<user>how?<assistant>"


def test_a_system_prompt_is_put_before_prompts_that_have_no_system_turn_anywhere(tmp_path):
    """As before conversations with answers (test_examples.py)."""
    user, system = {"role": "user", "content": "why?"}, {"role": "system", "content": "Now."}
    path = write(tmp_path / "chat.jsonl", [{"prompt": [user]}, {"prompt": [user, system]}, {"prompt": [system, user]}])
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    more = f"validation_fraction: 0, chat_template: {tmp_path}/template.jinja, system_prompt: Be brief."
    data = prepared(tmp_path, path, more=more, tokenizer="{train: {vocab_size: 300}}")
    assert sorted(text_of(data, prompt) for prompt in read_prompts(data.train, range(3))) == [
        "<system>Be brief.<user>why?<assistant>",
        "<system>Now.<user>why?<assistant>",
        "<user>why?<system>Now.<assistant>",
    ]


def test_held_out_prompts_and_mixtures_keep_their_records(tmp_path):
    sources = [
        {
            "path": write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}", "n": n} for n in range(60)]),
            "weight": 1.0,
        }
        for name in ("a", "b")
    ]
    data = prepared(tmp_path, sources, more="validation_fraction: 0.2")
    train = read_prompts(data.train, range(data.train.num_samples))
    others = [
        prompt for part in data.validation for prompt in read_prompts(part.dataset, range(part.dataset.num_samples))
    ]
    assert len(others) > 5 and len(train) + len(others) == 120
    assert all(text_of(data, each)[1:] == str(each.record["n"]) for each in (*train, *others))
    assert len({text_of(data, each) for each in (*train, *others)}) == 120


def test_a_prompt_that_leaves_no_room_for_an_answer_is_dropped_not_cut(tmp_path, caplog):
    path = write(tmp_path / "long.jsonl", [{"prompt": "x" * 57}, {"prompt": "y" * 58}, {"prompt": "short"}])
    data = prepared(tmp_path, path)  # 64 positions, 8 of them for the answer
    assert [text_of(data, each) for each in read_prompts(data.train, [0, 1])] == ["x" * 57, "short"]
    assert "1" in caplog.text and "dropped" in caplog.text


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "plain"}, "draws answers to prompts, but the data has plain text"),
        ({"prompt": "a", "completion": "b"}, "has prompt_completion; give records with a field `prompt`"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "has preference; give records with a field `prompt`"),
    ],
)
def test_data_without_prompts_is_refused(tmp_path, record, message):
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, write(tmp_path / "data.jsonl", [record]))


def test_prompts_without_answers_are_refused_by_other_objectives(tmp_path):
    path = write(tmp_path / "sums.jsonl", [{"prompt": "2+2=", "answer": "4"}])
    text = RECIPE.format(folder=tmp_path, sources=json.dumps(path), length=64, more="validation_fraction: 0",
                         tokenizer="bytes")  # fmt: skip
    text = text.replace("objective: {name: grpo}\nrollout: {max_new_tokens: 8}\nreward: exact\n", "")
    recipe, _ = load_text(tmp_path, text)
    with pytest.raises(ConfigError, match=r"prompts without an answer; set objective\.name=grpo, or name the field"):
        prepare_data(recipe)


def test_a_turn_of_the_assistant_is_no_end_of_a_prompt(tmp_path):
    path = write(tmp_path / "chat.jsonl", [{"prompt": [{"role": "assistant", "content": "so"}]}])
    with pytest.raises(DataError, match="has an assistant turn at the end of `prompt`"):
        prepared(
            tmp_path, path, more="validation_fraction: 0, chat_template: plain", tokenizer="{train: {vocab_size: 300}}"
        )
