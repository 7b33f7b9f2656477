"""The meaning of records of each format, by hand; any malformed record is refused cleanly."""

import json
import random

import numpy as np
import pytest

from echelon.learn.data.conversation import Completion, Conversation, EncodedDocument, Judged, Preference
from echelon.learn.data.examples import parse_example
from echelon.learn.data.instruction import InstructionEncoding
from echelon.learn.data.readers.record import BrokenRecordError
from echelon.learn.data.templates import NAMED_TEMPLATES
from echelon.learn.data.tokenizer import build_bytes_tokenizer

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def talk(*turns: tuple[str, str]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": text} for role, text in turns)


ASKED = talk(("user", "Hi"), ("assistant", "Ho"))

CONVERSATIONS = {
    "messages": ({"messages": [*ASKED]}, ASKED),
    "parts of text, null for what is not there": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}],
                       "tool_calls": None, "name": None}, ASKED[1]], "tools": None},
        ASKED,
    ),
    "developer is system": (
        {"messages": [{"role": "developer", "content": "S"}, *ASKED]}, (*talk(("system", "S")), *ASKED),
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "system": "S"},
        (*talk(("system", "S")), *ASKED),
    ),
    "its own system turn wins": (
        {"conversations": [{"from": "system", "value": "T"}, *ASKED], "system": "S"}, (*talk(("system", "T")), *ASKED),
    ),
    # LLaMA-Factory's examples: a call as JSON text, an observation, an answer.
    "sharegpt with tools": (
        {"conversations": [
            {"from": "human", "value": "1 and?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"}, {"from": "gpt", "value": "2."}], "tools": json.dumps([TOOL])},
        (*talk(("user", "1 and?")), {"role": "assistant", "content": "", "tool_calls": [CALL]},
         *talk(("tool", "2"), ("assistant", "2."))),
    ),
    "OpenAI's call": (
        {"messages": [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"}, ASKED[1]]},
        (ASKED[0], {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
         {"role": "tool", "content": "2", "tool_call_id": "c1"}, ASKED[1]),
    ),
    "alpaca": ({"instruction": "Hi", "output": "Ho"}, ASKED),
    "alpaca with all": (
        {"instruction": "Add.", "input": "1 1", "output": "2", "system": "S", "history": [["Hi", "Ho"]]},
        (*talk(("system", "S")), *ASKED,
         {"role": "user", "content": "Add.\n1 1", "instruction": "Add.", "input": "1 1"}, *talk(("assistant", "2"))),
    ),
    "prompt and completion of turns": ({"prompt": [ASKED[0]], "completion": [ASKED[1]]}, ASKED),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(name):
    record, messages = CONVERSATIONS[name]
    found = parse_example(record)
    assert isinstance(found, Conversation)
    assert found.messages == messages
    assert found.learned == (None,) * len(messages)
    assert found.tools == (({"type": "function", "function": TOOL},) if record.get("tools") else ())
    assert found.answers == ("prompt" in record)


def test_flags_of_turns():
    turns = [
        {**ASKED[0], "train": False},
        {**ASKED[1], "weight": 1},
        ASKED[0],
        {**ASKED[1], "weight": 0, "train": True},
    ]
    found = parse_example({"messages": turns})
    assert (found.learned, found.messages) == ((False, True, None, False), ASKED * 2)


SAID = talk(("system", "S"))[0]
A, B = talk(("assistant", "A"))[0], talk(("assistant", "B"))[0]
PREFERENCES = {
    "texts": ({"prompt": "P", "chosen": "A", "rejected": "B"}, Completion("P", "A"), Completion("P", "B")),
    # As in hh-rlhf: the texts differ after "Assistant:", from the space on.
    "whole texts": (
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello you", "rejected": "\n\nHuman: Hi\n\nAssistant: Help"},
        Completion("\n\nHuman: Hi\n\nAssistant:", " Hello you"), Completion("\n\nHuman: Hi\n\nAssistant:", " Help"),
    ),
    "turns": ({"prompt": [ASKED[0]], "chosen": [A], "rejected": [B]}, (ASKED[0], A), (ASKED[0], B)),
    "a question and turns": ({"prompt": "Hi", "chosen": [A], "rejected": [B]}, (ASKED[0], A), (ASKED[0], B)),
    # As in UltraFeedback: the answers repeat the prompt.
    "the prompt twice": (
        {"prompt": "Hi", "chosen": [ASKED[0], A], "rejected": [ASKED[0], B]}, (ASKED[0], A), (ASKED[0], B),
    ),
    "one message each": ({"prompt": "Hi", "chosen": A, "rejected": B}, (ASKED[0], A), (ASKED[0], B)),
    "a prompt of one message": ({"prompt": ASKED[0], "chosen": [A], "rejected": [B]}, (ASKED[0], A), (ASKED[0], B)),
    "turns and texts": ({"prompt": [ASKED[0]], "chosen": "A", "rejected": "B"}, (ASKED[0], A), (ASKED[0], B)),
    # As in LLaMA-Factory: in the forms of ShareGPT, OpenAI and Alpaca.
    "conversations": (
        {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "A"},
         "rejected": {"from": "gpt", "value": "B"}}, (ASKED[0], A), (ASKED[0], B),
    ),
    "longer conversations": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"},
                           {"from": "human", "value": "Hi"}], "chosen": [{"from": "gpt", "value": "A"}],
         "rejected": [{"from": "gpt", "value": "B"}]}, (*ASKED, ASKED[0], A), (*ASKED, ASKED[0], B),
    ),
    "messages": ({"messages": [ASKED[0]], "chosen": A, "rejected": B}, (ASKED[0], A), (ASKED[0], B)),
    "alpaca": (
        {"instruction": "Hi", "input": "", "history": [["Hi", "Ho"]], "chosen": "A", "rejected": "B"},
        (*ASKED, ASKED[0], A), (*ASKED, ASKED[0], B),
    ),
    # As Intel's orca_dpo_pairs, and as distilabel's with the prompt in `input`.
    "question and system": (
        {"system": "S", "question": "Hi", "chosen": "A", "rejected": "B"}, (SAID, ASKED[0], A), (SAID, ASKED[0], B),
    ),
    "no system there": ({"system": "", "question": "Hi", "chosen": "A", "rejected": "B"}, (ASKED[0], A), (ASKED[0], B)),
    "input and system": (
        {"system": "S", "input": "Hi", "chosen": "A", "rejected": "B"}, (SAID, ASKED[0], A), (SAID, ASKED[0], B),
    ),
    "prompt and system": (
        {"system": "S", "prompt": "Hi", "chosen": "A", "rejected": "B"}, (SAID, ASKED[0], A), (SAID, ASKED[0], B),
    ),
    # As in ultrafeedback_binarized, where `messages` repeats the chosen conversation; also without `prompt`.
    "the chosen one twice": (
        {"prompt": "Hi", "messages": [ASKED[0], A], "chosen": [ASKED[0], A], "rejected": [ASKED[0], B]},
        (ASKED[0], A), (ASKED[0], B),
    ),
    "the chosen one as messages": (
        {"messages": [ASKED[0], A], "chosen": [ASKED[0], A], "rejected": [ASKED[0], B]}, (ASKED[0], A), (ASKED[0], B),
    ),
    "a system in the answers": (
        {"prompt": "Hi", "chosen": [SAID, ASKED[0], A], "rejected": [SAID, ASKED[0], B]},
        (SAID, ASKED[0], A), (SAID, ASKED[0], B),
    ),
    # As in ms-swift.
    "a rejected response": (
        {"messages": [SAID, ASKED[0], A], "rejected_response": "B"}, (SAID, ASKED[0], A), (SAID, ASKED[0], B),
    ),
    "a rejected message": ({"messages": [ASKED[0], A], "rejected_response": B}, (ASKED[0], A), (ASKED[0], B)),
    "no prompt": ({"chosen": [*ASKED, ASKED[0], A], "rejected": [*ASKED, ASKED[0], B]},
                  (*ASKED, ASKED[0], A), (*ASKED, ASKED[0], B)),
}  # fmt: skip


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences(name):
    record, chosen, rejected = PREFERENCES[name]
    found = parse_example(record)
    assert isinstance(found, Preference)
    for side, wanted in ((found.chosen, chosen), (found.rejected, rejected)):
        if isinstance(wanted, Completion):
            assert side == wanted
        else:
            assert (side.messages, side.answers) == (wanted, len(wanted) - 1)


JUDGED = {
    "texts": ({"prompt": "a", "completion": "b", "label": True}, True, Completion("a", "b")),
    "a number": ({"prompt": "a", "completion": "b", "label": 0}, False, Completion("a", "b")),
    "a word of a table": ({"prompt": "a", "completion": "b", "label": "True"}, True, Completion("a", "b")),
    "turns": ({"prompt": [ASKED[0]], "completion": [A], "label": False}, False, (ASKED[0], A)),
    "a conversation": ({"messages": [SAID, ASKED[0], A], "label": True}, True, (SAID, ASKED[0], A)),
}


@pytest.mark.parametrize("name", JUDGED)
def test_judged_answers(name):
    record, is_good, wanted = JUDGED[name]
    found = parse_example(record)
    assert isinstance(found, Judged) and found.is_good == is_good
    assert (found.text if isinstance(wanted, Completion) else found.text.messages) == wanted
    if not isinstance(wanted, Completion):
        assert found.text.answers == len(wanted) - 1
    [document] = encoding().encode(record)
    assert document.is_good == is_good and document.targets.any()


def encoding(**changes) -> InstructionEncoding:
    """Bytes, with `~` as the stop token."""
    values = {
        "tokenizer_json": build_bytes_tokenizer().backend_tokenizer.to_str(), "special_tokens": (("eos_token", "~"),),
        "template": NAMED_TEMPLATES["plain"].text, "train_on": "assistant", "system_prompt": None, "before": (),
        "stop": ord("~"),
    }  # fmt: skip
    return InstructionEncoding(**{**values, **changes})


def show(documents: tuple[EncodedDocument, ...]) -> list[tuple[bytes, bytes]]:
    """The text of each document, and the text of its targets."""
    return [(bytes(each.ids.tolist()), bytes(each.ids[each.targets].tolist())) for each in documents]


def test_texts_end_with_the_stop_token_as_a_target():
    record = {"prompt": "1+1=", "completion": "2"}
    assert show(encoding().encode(record)) == [(b"1+1=2~", b"2~")]
    assert show(encoding(before=(1,)).encode(record)) == [(b"\x011+1=2~", b"2~")]
    # A text that already begins with it gets no second one.
    assert show(encoding(before=(ord("1"),)).encode(record)) == [(b"1+1=2~", b"2~")]
    assert show(encoding(stop=None, needs_stop=False).encode(record)) == [(b"1+1=2", b"2")]
    with pytest.raises(BrokenRecordError, match=r"no eos; set data\.document_separator"):
        encoding(stop=None).encode(record)
    pair = encoding().encode({"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    assert show(pair) == [(b"1+1=2~", b"2~"), (b"1+1=3~", b"3~")]


def test_only_the_answer_of_a_prompt_or_a_pair_is_a_target():
    prompt = [*ASKED, ASKED[0]]
    pair = encoding().encode({"prompt": prompt, "chosen": [A], "rejected": [B]})
    assert show(pair) == [(b"HiHo~HiA~", b"A~"), (b"HiHo~HiB~", b"B~")]
    for train_on in ("assistant", "last", "all"):
        documents = encoding(train_on=train_on).encode({"prompt": prompt, "completion": [A, ASKED[0], B]})
        assert show(documents) == [(b"HiHo~HiA~HiB~", b"A~B~")]
    with_system = encoding(system_prompt="S").encode({"prompt": prompt, "completion": [A]})
    assert show(with_system) == [(b"SHiHo~HiA~", b"A~")]


def test_a_token_across_the_border_is_not_a_target():
    """`ab` is one token: with prompt `a` and completion `bc`, only `c` is completely in the completion."""
    tokenizer = json.loads(build_bytes_tokenizer().backend_tokenizer.to_str())
    tokenizer["model"]["vocab"]["ab"], tokenizer["model"]["merges"] = 256, [["a", "b"]]
    (document,) = encoding(tokenizer_json=json.dumps(tokenizer)).encode({"prompt": "a", "completion": "bc"})
    assert document.ids.tolist() == [256, ord("c"), ord("~")]
    assert document.targets.tolist() == [False, True, True]


def test_labels_select_the_targets_of_given_ids():
    (document,) = encoding().encode({"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, 8]})
    assert document.ids.tolist() == [5, 6, 7, 8]
    assert document.targets.tolist() == [False, False, True, True]
    assert document.ids.dtype == np.int64


BROKEN = {
    "no JSON object": ({"messages": ["Hi"]}, "a turn in `messages` that is not an object"),
    "no list": ({"messages": "Hi"}, "no list in `messages`"),
    "no turn": ({"messages": []}, "no turn in `messages`"),
    "role": ({"messages": [{"role": "narrator", "content": "x"}]}, "with role 'narrator'"),
    "no role": ({"messages": [{"content": "x"}]}, "with role None"),
    "no text": ({"messages": [{"role": "user"}]}, "a turn without text"),
    "number": ({"messages": [{"role": "user", "content": 5}]}, "no text in `messages`"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
    "nobody answers": ({"messages": [ASKED[0]]}, "no assistant turn"),
    "weight": ({"messages": [ASKED[0], {**ASKED[1], "weight": 0.5}]}, "weight=0.5; use true or 1"),
    "nothing learned": ({"messages": [ASKED[0], {**ASKED[1], "train": False}]}, "no token to train on"),
    "arguments": ({"messages": [ASKED[0], {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]}, "invalid JSON in `arguments`"),
    "call": ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, "invalid JSON in `function_call`"),
    "nameless call": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "a tool call without a name"),
    "tools": ({"messages": [*ASKED], "tools": "{"}, "invalid JSON in `tools`"),
    "tools of texts": ({"messages": [*ASKED], "tools": ["add"]}, "`tools` that are not a list of objects"),
    "surrogate": ({"instruction": "\ud800", "output": "x"}, "not UTF-8 in `instruction`"),
    "history": ({"instruction": "a", "output": "b", "history": [["x"]]}, "not a list of .question, answer."),
    "two kinds": ({"prompt": "a", "completion": [A]}, "neither two texts nor two lists"),
    "a prompt's system": ({"prompt": "a", "completion": "b", "system": "S"}, "plain text cannot contain"),
    "same": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same chosen and rejected answer"),
    "kinds of a pair": ({"prompt": "a", "chosen": "b", "rejected": [B]}, "of different types"),
    "nothing shared": ({"chosen": "b", "rejected": "c"}, "no prompt in `prompt`, `question`, `instruction`"),
    "no shared turn": ({"chosen": [A], "rejected": [B]}, "`conversations`, `messages`, and `chosen` and `rejected` do"),
    "only a system": ({"chosen": "b", "rejected": "c", "system": "S"}, "no prompt in `prompt`"),
    "an answered prompt": ({"conversations": [*ASKED], "chosen": A, "rejected": B}, "an assistant turn at the end of"),
    "chosen by nobody": ({"messages": [ASKED[0]], "rejected_response": "x"}, "do not end with an assistant turn"),
    "a rejected user": ({"prompt": "a", "chosen": A, "rejected": ASKED[0]}, "has no assistant turn"),
    "the same response": ({"messages": [ASKED[0], A], "rejected_response": "A"}, "the same chosen and rejected answer"),
    "a judgement": ({"prompt": "a", "completion": "b", "label": "good"}, "has label='good'; use true for a good"),
    "half a judgement": ({"prompt": "a", "completion": "b", "label": 0.5}, "has label=0.5; use true for a good answer"),
    "an empty good answer": ({"prompt": "a", "completion": " ", "label": True}, "has an empty answer"),
    "a judged question": ({"messages": [ASKED[0]], "label": True}, "do not end with a judged answer after a prompt"),
    "lengths": ({"input_ids": [1, 2], "labels": [1]}, "has 2 `input_ids` and 1 `labels`"),
    "shifted": ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "the label 2 at position 0, where the id is 1; "),
    "range": ({"input_ids": [1, 256], "labels": [1, 256]}, "has the id 256, but the tokenizer has the ids 0 to 255"),
    "no label": ({"input_ids": [1, 2], "labels": [-100, -100]}, "no token to train on"),
    "only the first": ({"input_ids": [1, 2], "labels": [1, -100]}, "no token to train on"),
    "no ids": ({"input_ids": [], "labels": []}, "no token to train on"),
    "text as ids": ({"input_ids": ["a"], "labels": ["a"]}, "no list of token ids"),
    "a tool for plain": ({"messages": [*ASKED, {"role": "tool", "content": {"a": 1}}]}, "no text in `messages`"),
    "no format": ({"question": "x"}, "not have the fields of any format; its fields are question"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_records_are_named(name):
    record, reason = BROKEN[name]
    with pytest.raises(BrokenRecordError, match=reason):
        encoding().encode(record)


def test_without_a_template_conversations_are_refused_with_the_fix():
    with pytest.raises(BrokenRecordError, match=r"set data\.chat_template, for example to chatml"):
        encoding(template=None).encode({"prompt": [ASKED[0]], "completion": [A]})


def test_malformed_records_are_refused_cleanly():
    """Records with parts replaced by values of every type are encoded with a target, or raise BrokenRecordError."""
    records = [record for record, _ in CONVERSATIONS.values()] + [record for record, *_ in PREFERENCES.values()]
    records += [record for record, *_ in JUDGED.values()]
    records += [{"prompt": "a", "completion": "b"}, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]
    odd = [
        None,
        0,
        -1,
        2.5,
        True,
        "",
        "x",
        "\ud800",
        [],
        {},
        [[]],
        [None],
        {"role": "user"},
        [{"content": "x"}],
        10**30,
    ]
    draw, encoded = random.Random(5), 0
    for template in ("plain", "chatml", "gemma", "alpaca"):
        encoder = encoding(template=NAMED_TEMPLATES[template].text)
        for _ in range(250):
            record = json.loads(json.dumps(draw.choice(records)))
            _damage(record, draw, odd)
            try:
                documents = encoder.encode({key: value for key, value in record.items() if value is not None})
            except BrokenRecordError as error:
                assert str(error)
            else:
                encoded += 1
                assert all(each.targets.any() and len(each.ids) == len(each.targets) for each in documents)
    assert encoded > 50


def _damage(value, draw, odd) -> None:
    """Replace a random part of a record by an unusual value."""
    while True:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.8:
            value = value[key]
            continue
        value[key] = draw.choice(odd)
        return
