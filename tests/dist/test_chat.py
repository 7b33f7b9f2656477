"""`echelon generate --chat` as a person and a script use it: on a real terminal, and through real pipes."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.learn.data.tokenizer import build_bytes_tokenizer
from tests.families import small_config
from tests.terminal import Terminal

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An HF folder with a model that answers everything by the letter e, without an end."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_bytes_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    fields = small_config("llama", False) | {"vocab_size": len(tokenizer), "max_position_embeddings": 100_000}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    [letter] = tokenizer("e", add_special_tokens=False)["input_ids"]
    # Every layer adds nothing, every word is the same vector, and the head prefers one token.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[letter] = 1.0
    model.save_pretrained(path)
    return path


def test_a_conversation_on_a_terminal(folder):
    terminal = Terminal("generate", folder, "--chat", "--max-tokens", "9", "--temperature", "0")
    assert "/reset forgets the conversation" in terminal.await_text(r"\n> ")
    terminal.type("hallo\x7f\n")  # readline removes the last letter
    assert "eeeeeeeee\r\n> " in terminal.await_text(r"e{9}.*> ")
    terminal.type("/rest\n")
    terminal.await_text(r"echelon: '/rest' is not a command.*> ")
    terminal.type("\n   \n/system be kind\n")
    terminal.await_text(r"kind\r\n> ")
    terminal.type("\x1b[A\n")  # the line before, from readline's history
    terminal.await_text(r"/system be kind\r\n> ")
    terminal.type("\x04")  # Ctrl-D
    assert terminal.await_end() == 0
    assert "Traceback" not in terminal.shown


def test_control_c_stops_the_answer_and_a_second_one_ends(folder):
    terminal = Terminal("generate", folder, "--chat", "--max-tokens", "90000", "--temperature", "0")
    terminal.await_text(r"\n> ")
    for _ in range(2):
        terminal.type("hello\n")
        terminal.await_text(r"e{20}")  # the answer appears while it is generated
        terminal.type("\x03")
        terminal.await_text(r"\r\n> ")
    terminal.type("half a line\x03")
    assert terminal.await_end() == 0
    assert "Traceback" not in terminal.shown and "echelon: " not in terminal.shown


def test_a_script_reads_each_answer_before_it_writes_the_next_message(folder):
    command = [sys.executable, "-m", "echelon", "generate", str(folder), "--chat", "--max-tokens", "3"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--temperature", "0"], **pipes) as process:
        for message in ("hello\n", "/reset\nhello\n"):
            process.stdin.write(message)
            process.stdin.flush()
            assert process.stdout.readline() == "eee\n"
        process.stdin.close()
        assert process.stdout.read() == "" and process.wait(60) == 0
        assert process.stderr.read() == ""
