"""Conversations: turns, the random draws of each answer, the limit of positions, and `generate --chat` on a pipe."""

import io
import json
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import echelon
from echelon.ground.errors import ConfigError
from echelon.learn.data.tokenizer import train_tokenizer
from tests.dist.command import CommandLine
from tests.families import small_config

TEXT = "The café serves naïve résumés, 東京 and 👍🏽 to all. " * 20
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
POSITIONS = 220


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An HF folder with a small random model, a tokenizer with a chat template, and a limit of positions."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    fields = small_config("llama", True) | {"vocab_size": 320, "max_position_embeddings": POSITIONS}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    for parameter in model.parameters():  # far from uniform, so that greedy choices are not close to ties
        parameter.data.mul_(4)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    return path


def answer_of(folder, messages, max_tokens):
    """The greedy answer of transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    said = model.generate(ids, max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_every_answer_follows_all_turns_before_it(folder):
    dialogue = echelon.chat(folder, max_tokens=8, temperature=0, system="Be kind.")
    turns = [{"role": "system", "content": "Be kind."}]
    for message in ("The café", "東京?", "a"):
        pieces = []
        answer = dialogue.ask(message, pieces.append).text
        turns.append(user(message))
        assert answer == "".join(pieces) == answer_of(folder, turns, 8)
        turns.append(assistant(answer))
    assert dialogue.turns == turns[1:]
    dialogue.reset()
    assert dialogue.ask("a").text == answer_of(folder, [turns[0], user("a")], 8)
    dialogue.reset("Be rude.")
    assert dialogue.ask("a").text == answer_of(folder, [{"role": "system", "content": "Be rude."}, user("a")], 8)


def test_answers_have_their_own_random_draws(folder):
    options = {"max_tokens": 8, "temperature": 1.5}
    said = []
    for _ in range(2):
        dialogue = echelon.chat(folder, **options)
        for _ in range(3):
            said.append(dialogue.ask("a").text)
            dialogue.reset()
    assert said[:3] == said[3:] and len(set(said)) == 3
    assert said[0] == echelon.generate(folder, "a", chat=True, **options)


def test_the_oldest_turns_leave_a_full_conversation_and_one_message_says_so(folder, caplog):
    dialogue = echelon.chat(folder, max_tokens=20, temperature=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kept = []
    for number in range(12):
        kept.append(user(f"question {number}"))
        ids = tokenizer.apply_chat_template(kept, add_generation_prompt=True)["input_ids"]
        while len(ids) + 20 > POSITIONS:
            kept = kept[2:]
            ids = tokenizer.apply_chat_template(kept, add_generation_prompt=True)["input_ids"]
        kept.append(assistant(dialogue.ask(f"question {number}").text))
        assert dialogue.turns == kept
    assert len(kept) < 24  # turns were dropped
    [note] = [each.message for each in caplog.records if "oldest turns" in each.message]
    assert f"the {POSITIONS} positions of the model" in note
    dialogue.reset()
    for _ in range(12):
        dialogue.ask("once more in a new conversation")
    assert sum("oldest turns" in each.message for each in caplog.records) == 2


def test_a_long_message_gets_a_short_answer_or_is_refused(folder):
    dialogue = echelon.chat(folder, max_tokens=POSITIONS, temperature=0)
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template([user("a")], add_generation_prompt=True)[
        "input_ids"
    ]
    assert dialogue.ask("a").text == answer_of(folder, [user("a")], POSITIONS - len(ids))
    before = dialogue.turns
    with pytest.raises(ConfigError, match=rf"the message has \d+ tokens .* {POSITIONS} positions; send a shorter one"):
        dialogue.ask("a z" * POSITIONS)
    assert dialogue.turns == before


def test_an_interrupt_keeps_the_part_that_was_shown(folder):
    dialogue = echelon.chat(folder, max_tokens=30, temperature=0)
    pieces = []

    def write(text):
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dialogue.ask("The café", write)
    shown = "".join(pieces)
    assert dialogue.turns == [user("The café"), assistant(shown)]
    assert answer_of(folder, [user("The café")], 30).startswith(shown)
    assert dialogue.ask("a").text == answer_of(folder, [*dialogue.turns[:2], user("a")], 30)


def test_a_model_without_a_template_is_refused(folder, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    with pytest.raises(ConfigError, match="has no chat template"):
        echelon.chat(tmp_path)


@pytest.fixture
def piped(capfd, monkeypatch, folder):
    """Runs `echelon generate --chat` with these lines on stdin."""

    def run(lines, *options):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
        return CommandLine(capfd, monkeypatch)("generate", folder, "--chat", "--max-tokens", "8", *options)

    return run


def test_a_pipe_gets_one_line_for_each_message(piped, folder):
    ended = piped("The café\n\n東京?\n/reset\n東京?\n /quit \nnever read\n".encode(), "--temperature", "0")
    first = answer_of(folder, [user("The café")], 8)
    second = answer_of(folder, [user("The café"), assistant(first), user("東京?")], 8)
    expected = [first, second, answer_of(folder, [user("東京?")], 8)]
    assert ended.code == 0, ended.err
    assert ended.out == "".join(each.replace("\n", "\\n") + "\n" for each in expected)
    assert ended.err == ""
    ended = piped("The café\n/system Be kind.\na".encode(), "--temperature", "0", "--json")
    rows = [json.loads(line) for line in ended.out.splitlines()]
    kind = answer_of(folder, [{"role": "system", "content": "Be kind."}, user("a")], 8)
    assert [(row["prompt"], row["text"]) for row in rows] == [("The café", first), ("a", kind)]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (b"", (), "stdin contains no message"),
        (b"\xff\n", (), "stdin cannot be read"),
        (b"a\n/rest\n", (), "'/rest' is not a command"),
        (b"a\n/system\n", (), "'/system' is not a command"),
        (b"a\n/reset all\n", (), "'/reset all' is not a command"),
        (b"a\n", ("--num-samples", "2"), "--num-samples 2 requires --prompt or --prompts"),
        (b"a\n", ("--out", "x.jsonl"), "--out x.jsonl requires --prompt or --prompts"),
        (b"a\n", ("--prompt", "a", "--prompts", "a.txt"), "generate needs one of --prompt TEXT and --prompts FILE"),
    ],
)
def test_what_a_pipe_cannot_say_is_refused(piped, lines, options, message):
    ended = piped(lines, *options)
    assert ended.code == 2
    assert ended.err.startswith("echelon: ") and message in ended.err


def test_a_path_is_a_message(piped):
    ended = piped(b"/usr/bin\n")
    assert (ended.code, len(ended.out.splitlines())) == (0, 1)


def test_without_chat_a_prompt_is_required(capfd, monkeypatch, folder):
    ended = CommandLine(capfd, monkeypatch)("generate", folder)
    assert ended.code == 2
    assert ended.err == "echelon: generate needs one of --prompt TEXT and --prompts FILE; give one.\n"
