"""What an environment says, as tokens: those of the whole conversation in the words of the chat template."""

import pytest

from echelon.ground.errors import DataError
from echelon.learn.answers.conversations import ReplyWriter
from echelon.learn.data.templates import NAMED_TEMPLATES, load_template
from echelon.learn.data.tokenizer import add_new_tokens, build_bytes_tokenizer

# How each template ends an answer, and what it puts before its text.
ENDS = {
    "alpaca": "{}</s>", "chatml": "{}<|im_end|>", "gemma": "{}<end_of_turn>", "llama3": "{}<|eot_id|>",
    "mistral": " {}</s>", "zephyr": "{}</s>",
}  # fmt: skip


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def tokenizer():
    made = build_bytes_tokenizer()
    made.add_special_tokens({"eos_token": "</s>", "bos_token": "<s>"})
    return add_new_tokens(made, [token for row in NAMED_TEMPLATES.values() for token in row.tokens])


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def render(tokenizer, *messages):
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, text)


def test_all_templates_are_tested():
    assert ENDS.keys() == NAMED_TEMPLATES.keys() - {"plain"}


@pytest.mark.parametrize("name", ENDS)
def test_a_reply_is_what_the_template_puts_after_the_answer(tokenizer, name):
    tokenizer.chat_template = load_template(name)
    wording, prompt = ReplyWriter(tokenizer), render(tokenizer, user("Guess."))
    whole = render(tokenizer, user("Guess."), answer("Is it 7?"), user("Lower. ä"))
    ended = encode(tokenizer, ENDS[name].format("Is it 7?"))
    assert [*prompt, *ended, *wording.reply(prompt, ended, "Lower. ä")] == whole
    # A turn that was cut off is ended by the template, not by the model.
    assert [*prompt, *ended[:-1], *wording.reply(prompt, ended[:-1], [user("Lower. ä")])] == whole


def test_messages_have_their_roles(tokenizer):
    tokenizer.chat_template = load_template("chatml")
    wording, prompt = ReplyWriter(tokenizer), render(tokenizer, user("Guess."))
    said = [{"role": "system", "content": "Be quick."}, user("Lower.")]
    ended = encode(tokenizer, "7<|im_end|>")
    whole = render(tokenizer, user("Guess."), answer("7"), *said)
    assert [*prompt, *ended, *wording.reply(prompt, ended, said)] == whole


def test_first_words_follow_the_prompt(tokenizer):
    plain = encode(tokenizer, "Guess: ")
    assert ReplyWriter(tokenizer).open(plain, "0 to 9. ") == encode(tokenizer, "Guess: 0 to 9. ")
    assert ReplyWriter(tokenizer).open(plain, None) == plain
    tokenizer.chat_template = load_template("chatml")
    prompt = render(tokenizer, user("Guess."))
    assert ReplyWriter(tokenizer).open(prompt, "0 to 9.") == render(tokenizer, user("Guess."), user("0 to 9."))
    assert ReplyWriter(tokenizer).open(plain, "0 to 9. ") == encode(tokenizer, "Guess: 0 to 9. "), "it is a text"


def test_a_text_is_answered_by_a_text(tokenizer):
    tokenizer.chat_template = load_template("chatml")
    wording, prompt, last = ReplyWriter(tokenizer), encode(tokenizer, "Guess: "), encode(tokenizer, "7")
    assert wording.reply(prompt, last, " no. ") == encode(tokenizer, " no. ")
    assert wording.reply(prompt, last, None) == []
    with pytest.raises(DataError, match=r"^said messages, but its prompt is a text$"):
        wording.reply(prompt, last, [user("no")])


def test_what_the_template_cannot_write_is_told(tokenizer):
    tokenizer.chat_template = load_template("gemma")
    prompt = render(tokenizer, user("Guess."))
    with pytest.raises(DataError, match=r"^said what the chat template cannot write: .*tool"):
        ReplyWriter(tokenizer).reply(prompt, [1], [{"role": "tool", "content": "x"}])
