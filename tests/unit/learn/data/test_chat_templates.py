"""Templates and target spans, compared with values by hand and with the masks of transformers for marked templates."""

import json
import pickle
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.data.examples import parse_example
from echelon.learn.data.instruction import InstructionEncoding
from echelon.learn.data.preflight import InstructionOptions, build_instruction_encoding
from echelon.learn.data.readers.record import BrokenRecordError, Fields, SourceFile
from echelon.learn.data.templates import NAMED_TEMPLATES
from echelon.learn.data.tokenizer import add_new_tokens, build_bytes_tokenizer, train_tokenizer

TEXT = Path(json.__file__).read_text() + "What is one and one? Two. user assistant system\n" * 30
CONTROL = [token for row in NAMED_TEMPLATES.values() for token in row.tokens]
USER, ASSISTANT, SYSTEM = (
    lambda text, role=role, **flags: {"role": role, "content": text, **flags}
    for role in ("user", "assistant", "system")
)
TALK = [SYSTEM("Be brief."), USER("One and one?"), ASSISTANT("Two."), USER("And two?"), ASSISTANT("Four.")]


def build(tokenizer, format="messages", **options) -> InstructionEncoding:
    file = SourceFile(Path("x.jsonl"), "x.jsonl", "jsonl", 1, 0, True, Fields(format))
    encoding = build_instruction_encoding(InstructionOptions(**options), tokenizer, [file])
    assert encoding is not None
    return encoding


def learned(encoding: InstructionEncoding, record) -> str:
    """The text of one document, with targets in brackets."""
    (document,) = encoding.encode(record)
    return bracket(encoding, document)


def bracket(encoding, document) -> str:
    parts, inside = [], False
    for id, target in zip(document.ids.tolist(), document.targets.tolist(), strict=True):
        if target != inside:
            parts.append("[" if target else "]")
            inside = target
        parts.append(encoding.tokenizer.decode([id], skip_special_tokens=False))
    return "".join(parts) + ("]" if inside else "")


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([TEXT], 600).backend_tokenizer.to_str()


@pytest.fixture(params=["trained", "bytes"])
def tokenizer(request, trained):
    """Tokenizers with every control token and eos; the trained one also has bos."""
    if request.param == "bytes":
        made = build_bytes_tokenizer()
        made.add_special_tokens({"eos_token": "</s>", "bos_token": "<s>"})
        return add_new_tokens(made, CONTROL)
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained), eos_token="<|endoftext|>")
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return add_new_tokens(made, CONTROL)


RENDERINGS = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne and one?<|im_end|>\n"
    "<|im_start|>assistant\n[Two.<|im_end|>]\n<|im_start|>user\nAnd two?<|im_end|>\n"
    "<|im_start|>assistant\n[Four.<|im_end|>]\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nOne and one?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Two.<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd two?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Four.<|eot_id|>]",
    "mistral": "<s>[INST] Be brief.\n\nOne and one? [/INST][ Two.</s>][INST] And two? [/INST][ Four.</s>]",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nOne and one?<end_of_turn>\n<start_of_turn>model\n"
    "[Two.<end_of_turn>]\n<start_of_turn>user\nAnd two?<end_of_turn>\n<start_of_turn>model\n[Four.<end_of_turn>]\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nOne and one?</s>\n<|assistant|>\n[Two.</s>]\n"
    "<|user|>\nAnd two?</s>\n<|assistant|>\n[Four.</s>]\n",
    "alpaca": "<s>Be brief.\n\n### Instruction:\nOne and one?\n\n### Response:[Two.</s>]\n\n"
    "### Instruction:\nAnd two?\n\n### Response:[Four.</s>]",
    "plain": "<s>Be brief.One and one?[Two.</s>]And two?[Four.</s>]",
}


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_named_templates_and_their_spans(tokenizer, name):
    encoding = build(tokenizer, chat_template=name)
    assert learned(encoding, {"messages": TALK}) == RENDERINGS[name]
    # The ids equal those of transformers, because the tokenizer now has this template.
    ids = tokenizer.apply_chat_template(TALK)["input_ids"]
    assert encoding.encode({"messages": TALK})[0].ids.tolist() == ids


def test_targets_follow_the_recipe_and_the_turns(tokenizer):
    chatml = RENDERINGS["chatml"]
    last = build(tokenizer, chat_template="chatml", train_on="last")
    assert learned(last, {"messages": TALK}) == chatml.replace("[Two.<|im_end|>]", "Two.<|im_end|>")
    encoding = build(tokenizer, chat_template="chatml")
    for flag in ({"train": False}, {"weight": 0}):
        turns = [*TALK[:-1], ASSISTANT("Four.", **flag)]
        assert learned(encoding, {"messages": turns}) == chatml.replace("[Four.<|im_end|>]", "Four.<|im_end|>")
    everything = build(tokenizer, chat_template="chatml", train_on="all")
    bare = chatml.replace("[", "").replace("]", "")
    # Nothing predicts the first token.
    assert learned(everything, {"messages": TALK}) == bare.replace("<|im_start|>", "<|im_start|>[", 1) + "]"
    turns = [*TALK[:2], ASSISTANT("Two.", train=False), USER("And two?", train=False), TALK[4]]
    assert learned(everything, {"messages": turns}) == (
        "<|im_start|>[system\nBe brief.<|im_end|>\n<|im_start|>user\nOne and one?<|im_end|>\n<|im_start|>assistant\n]"
        "Two.<|im_end|>\n<|im_start|>user\nAnd two?<|im_end|>\n[<|im_start|>assistant\nFour.<|im_end|>\n]"
    )
    with pytest.raises(BrokenRecordError, match="marks a user turn for training"):
        encoding.encode({"messages": [USER("x", train=True), ASSISTANT("y")]})
    with pytest.raises(BrokenRecordError, match="no token to train on"):
        encoding.encode({"messages": [USER("x"), ASSISTANT("y", train=False)]})


def test_the_recipes_system_prompt_is_added_to_conversations_without_one(tokenizer):
    encoding = build(tokenizer, chat_template="chatml", system_prompt="Be brief.")
    assert learned(encoding, {"messages": TALK[1:]}) == RENDERINGS["chatml"]
    other = {"messages": [SYSTEM("Be long."), *TALK[1:]]}
    assert learned(encoding, other) == RENDERINGS["chatml"].replace("brief", "long")


def test_tools_are_rendered_or_refused(tokenizer):
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    record = {"messages": [*TALK[:2], call, {"role": "tool", "content": "2"}, ASSISTANT("Two.")], "tools": tools}
    head, talk = learned(build(tokenizer, chat_template="chatml"), record).split("</tool_call><|im_end|>\n", 1)
    assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one")
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in head
    assert talk == (
        "<|im_start|>user\nOne and one?<|im_end|>\n<|im_start|>assistant\n"
        '[<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>]\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n[Two.<|im_end|>]\n"
    )
    zephyr = build(tokenizer, chat_template="zephyr")
    for part in ({"tools": tools, "messages": TALK}, {"messages": record["messages"]}):
        with pytest.raises(BrokenRecordError, match="which the chat template does not use"):
            zephyr.encode(part)


ASKED = [USER("One and one?")]
SAME_PAIR = [
    {"prompt": "One and one?", "chosen": ASSISTANT("Two."), "rejected": ASSISTANT("Three.")},
    {"prompt": ASKED, "chosen": "Two.", "rejected": "Three."},
    {"prompt": "One and one?", "chosen": [*ASKED, ASSISTANT("Two.")], "rejected": [*ASKED, ASSISTANT("Three.")]},
    {"chosen": [*ASKED, ASSISTANT("Two.")], "rejected": [*ASKED, ASSISTANT("Three.")]},
    {"conversations": [{"from": "human", "value": "One and one?"}], "chosen": {"from": "gpt", "value": "Two."},
     "rejected": {"from": "gpt", "value": "Three."}},
    {"system": "", "question": "One and one?", "chosen": "Two.", "rejected": "Three."},
    {"instruction": "One and one?", "chosen": "Two.", "rejected": "Three."},
    {"messages": [*ASKED, ASSISTANT("Two.")], "rejected_response": "Three."},
]  # fmt: skip


@pytest.mark.parametrize("record", SAME_PAIR, ids=lambda record: "-".join(record))
def test_every_layout_of_a_pair_is_rendered_alike(tokenizer, record):
    """Compared with text written by hand: the targets are only the answer and its stop token."""
    encoding = build(tokenizer, "preference", chat_template="chatml", answers="pairs")
    asked = "<|im_start|>user\nOne and one?<|im_end|>\n<|im_start|>assistant\n"
    texts = [bracket(encoding, document) for document in encoding.encode(record)]
    assert texts == [f"{asked}[Two.<|im_end|>]\n", f"{asked}[Three.<|im_end|>]\n"]


MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_marked_turns_equal_transformers_and_the_prefix_method(tokenizer, tmp_path):
    """The reference is transformers' mask, for the marked template and for the same one without marks."""
    (tmp_path / "marked.jinja").write_text(MARKED)
    bare = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (tmp_path / "bare.jinja").write_text(bare)
    talks = [
        TALK,
        TALK[1:3],
        [*TALK, USER("Unanswered")],
        [USER("ü語"), ASSISTANT("🙂 \n é "), USER(""), ASSISTANT("")],
    ]
    for name in ("marked", "bare"):
        encoding = build(tokenizer, chat_template=str(tmp_path / f"{name}.jinja"))
        for talk in talks:
            found = encoding.encode_conversation(parse_example({"messages": talk}))
            theirs = tokenizer.apply_chat_template(
                talk, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
            )
            assert found.ids.tolist() == theirs["input_ids"]
            assert found.targets.tolist() == [bool(each) for each in theirs["assistant_masks"]]
    # Two marks per turn, and one at the end, as in Phi-3's training template.
    parts = (
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}{{ '\n' }}"
    )
    two = MARKED.replace(MARKED[MARKED.index("{% generation") : MARKED.index("{% else %}")], parts)
    end = "{% if not add_generation_prompt %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
    (tmp_path / "two.jinja").write_text(two + end)
    for name, behind in (("marked", ""), ("two", "[</s>]")):
        last = build(tokenizer, chat_template=str(tmp_path / f"{name}.jinja"), train_on="last")
        shown = RENDERINGS["chatml"].replace("[Two.<|im_end|>]", "Two.<|im_end|>") + behind
        assert learned(last, {"messages": TALK}) == shown


UNMARKED_END = MARKED.replace(
    " + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", " }}{% endgeneration %}{{ '\n<|im_end|>\n' }}"
)


def test_an_end_of_turn_token_of_the_recipe_is_a_target(tokenizer, tmp_path):
    """If the template's marks exclude the token, it is a target wherever its turn is, as if the marks included it."""
    (tmp_path / "t.jinja").write_text(UNMARKED_END)
    options = {"chat_template": str(tmp_path / "t.jinja"), "eot_tokens": ("<|im_end|>", "</s>")}
    expected = RENDERINGS["chatml"].replace("[Two.<|im_end|>]", "[Two.\n<|im_end|>]")
    expected = expected.replace("[Four.<|im_end|>]", "[Four.\n<|im_end|>]")
    encoding = build(tokenizer, **options)
    assert learned(encoding, {"messages": TALK}) == expected
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    assert encoding.stops == tuple(sorted(ids)) and pickle.loads(pickle.dumps(encoding)).eot_ids == frozenset(ids)
    flagged = [*TALK[:2], {**TALK[2], "train": False}, *TALK[3:]]
    assert learned(encoding, {"messages": flagged}) == expected.replace("[Two.\n<|im_end|>]", "Two.\n<|im_end|>")
    last = build(tokenizer, train_on="last", **options)
    assert learned(last, {"messages": TALK}) == expected.replace("[Two.\n<|im_end|>]", "Two.\n<|im_end|>")


def test_a_turn_may_end_in_a_token_of_the_vocabulary(tmp_path):
    """The token is not a control token; generation stops at it only because the recipe lists it."""
    text = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '|\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (tmp_path / "t.jinja").write_text(text)
    path, bytes_alone = str(tmp_path / "t.jinja"), {"separator": None}
    with pytest.raises(ConfigError, match=r"not with a token at which .*set data\.eot_tokens to the token that ends"):
        build(build_bytes_tokenizer(), chat_template=path, **bytes_alone)
    encoding = build(build_bytes_tokenizer(), chat_template=path, eot_tokens=("|",), **bytes_alone)
    assert learned(encoding, {"messages": TALK[1:3]}) == "user: One and one?|\nassistant: [Two.|]\n"
    assert encoding.stops == (ord("|"),)


def test_an_end_of_turns_must_be_one_id(tokenizer):
    with pytest.raises(ConfigError, match=r"'<\|stop\|>' is \d+ ids of .*model\.new_tokens: \['<\|stop\|>'\]"):
        build(tokenizer, chat_template="chatml", eot_tokens=("<|stop|>",))
    with pytest.raises(
        ConfigError, match=r"data\.eot_tokens=\[</s>\] is for conversations, but the data is plain text"
    ):
        build_instruction_encoding(InstructionOptions(eot_tokens=("</s>",)), tokenizer, [])


# As in Qwen3: the reasoning of earlier turns is removed once another user turn follows.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_generation_prompt_that_does_not_begin_a_turn_is_refused(tokenizer, tmp_path):
    """As in DeepSeek's template: the prompt asks for reasoning, but earlier answers are rendered without it."""
    (tmp_path / "t.jinja").write_text(
        NAMED_TEMPLATES["chatml"].text.replace("assistant\\n' }}", "assistant\\n<think>' }}")
    )
    for train_on in ("assistant", "last"):
        with pytest.raises(ConfigError, match=r"from its generation prompt, .*use another data\.chat_template"):
            build(tokenizer, chat_template=str(tmp_path / "t.jinja"), train_on=train_on)


def test_a_template_that_rerenders_earlier_turns_works_with_the_last_turn(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(FORGETFUL)
    path = str(tmp_path / "t.jinja")
    with pytest.raises(ConfigError, match=r"data\.chat_template=.*differently once more turns.*data\.train_on: last"):
        build(tokenizer, chat_template=path)
    encoding = build(tokenizer, chat_template=path, train_on="last")
    assert learned(encoding, {"messages": TALK[1:]}).endswith("assistant\n[<think></think>Four.<|im_end|>]\n")


REFUSED_TEMPLATES = {
    # The stop token is not a target.
    MARKED.replace(" + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", " }}{% endgeneration %}{{ '<|im_end|>\n' }}"): (
        r"ends its {% generation %} before <\|im_end\|>, the turn's stop token.*move {% endgeneration %} after it"
    ),
    MARKED.replace("m['content'] + '<|im_end|>' }}{% endg", "'' }}{% endg"): "generation",
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}": "not with a token at which generation can stop",
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|stop|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}": r"model\.new_tokens: \['<\|stop\|>'\]",
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}": "has no generation prompt",
    "{% for m in messages %}": "cannot be used: .* cannot be rendered",
    "{{ raise_exception('never') }}": "never",
    "{{ 1 / 0 }}": "division by zero",
    "{{ messages + 1 }}": "cannot be rendered",
}


@pytest.mark.parametrize("text", REFUSED_TEMPLATES, ids=range(len(REFUSED_TEMPLATES)))
def test_templates_with_wrong_targets_are_refused(tokenizer, tmp_path, text):
    (tmp_path / "t.jinja").write_text(text)
    with pytest.raises(ConfigError, match=REFUSED_TEMPLATES[text]) as caught:
        build(tokenizer, chat_template=str(tmp_path / "t.jinja"))
    assert str(caught.value).startswith("data.chat_template=")


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("messages", {"chat_template": "chatml"},
         r"requires <\|im_start\|>, <\|im_end\|> as single .* model\.new_tokens: \['<\|im_s"),
        ("messages", {"chat_template": "chatlm"}, r"neither a named template .chatml, llama3"),
        ("messages", {}, r"has conversations \(messages\).* set data\.chat_template to chatml"),
        ("preference", {}, r"objective\.name=dpo"),
        ("messages", {"answers": "pairs"},
         r"compares two answers, but the data has messages; give records with chosen and rejected \(and the prompt in "
         r"one of prompt, question, .*with messages and rejected_response"),
        ("preference", {"answers": "judged"},
         r"objective\.name=kto trains on judged answers, but the data has preference.*label \(true or false\).*, or "
         r"set objective\.name=dpo, orpo, simpo, cpo or reward for preferences \(chosen"),
        ("unpaired_preference", {"answers": "pairs"}, r"compares two answers, but the data has unpaired_preference"),
        ("unpaired_preference", {}, r"data has judged answers \(label\); set objective\.name=kto, or .*prompt_c"),
    ],
)  # fmt: skip
def test_missing_tokens_and_templates_are_named(plain, format, options, message):
    with pytest.raises(ConfigError, match=message):
        build(plain, format, **options)


@pytest.fixture
def plain():
    return train_tokenizer([TEXT], 400)


def test_what_a_tokenizer_brings_decides(plain):
    with pytest.raises(ConfigError, match="ends a turn with the tokenizer's eos, but the tokenizer has none"):
        build(build_bytes_tokenizer(), "alpaca")
    with pytest.raises(ConfigError, match=r"data\.train_on=last is for conversations"):
        build_instruction_encoding(InstructionOptions(train_on="last"), plain, [])
    plain.chat_template = NAMED_TEMPLATES["alpaca"].text
    assert build(plain).template == plain.chat_template


def test_alpaca_without_a_template_uses_stanfords_prompt():
    tokenizer = train_tokenizer([TEXT], 400)
    encoding = build(tokenizer, "alpaca")
    assert learned(encoding, {"instruction": "Add.", "input": "1 1", "output": "2"}) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 1\n\n"
        "### Response:[2<|endoftext|>]"
    )
    assert learned(encoding, {"instruction": "Add.", "input": "", "output": "2"}) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nAdd.\n\n### Response:[2<|endoftext|>]"
    )
    assert tokenizer.chat_template == NAMED_TEMPLATES["alpaca"].text


def test_the_template_and_the_new_tokens_are_saved_with_the_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = add_new_tokens(train_tokenizer([TEXT], 400), ["<|im_start|>", "<|im_end|>"])
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [400, 401]
    encoding = build(tokenizer, chat_template="chatml")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.apply_chat_template(TALK)["input_ids"] == encoding.encode({"messages": TALK})[0].ids.tolist()
    assert add_new_tokens(loaded, ["<|im_end|>"]).convert_tokens_to_ids("<|im_end|>") == 401
    assert loaded.decode([401], skip_special_tokens=True) == ""


def test_the_encoding_can_be_pickled(tokenizer):
    encoding = build(tokenizer, chat_template="chatml")
    copy = pickle.loads(pickle.dumps(encoding))
    assert copy == encoding
    assert learned(copy, {"messages": TALK}) == RENDERINGS["chatml"]
