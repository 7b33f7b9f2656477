"""Templates that use unlimited time or memory are ended, with one message in every command."""

import json
import mmap
import re
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from echelon.ground.errors import ConfigError, EchelonError
from echelon.learn.data import limits
from echelon.learn.data.conversation import Conversation
from echelon.learn.data.limits import LimitError, helper_ended, run_here
from echelon.learn.data.templates import NAMED_TEMPLATES, ChatTemplate
from echelon.tools.inference.generate import Chat
from tests.dist.command import CommandLine

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GREEDY = {
    "a product of text": ("{{ 'x' * 10**10 }}", "MiB of memory"),
    "a product of a variable": ("{% set n = 10**10 %}{{ messages[0].content * n }}", "MiB of memory"),
    "a list": ("{{ ([0] * 10**10) | length }}", "MiB of memory"),
    "padding": ("{{ 'x'.ljust(10**10) }}", "MiB of memory"),
    "a filter": ("{{ messages[0].content | center(10**10) }}", "MiB of memory"),
    "a format": ("{{ '%10000000000d' % 1 }}", "MiB of memory"),
    "doubling": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MiB of memory"),
    "doubling of blocks": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = y %}{% endfor %}", "MiB of memory"),
    "nested loops": (NESTED, "s of CPU time"),
    "a loop that allocates": (
        "{% for i in range(99999) %}{% set x = messages[0].content * 10**6 %}{% endfor %}", "s of CPU time"),
    "a large number": ("{{ (7 ** (10**9)) % 10 }}", "s of CPU time"),
    "a rounded number": ("{{ 1 | round(-10**9) }}", "s of CPU time"),
    "a sum of lists": ("{{ ([[0]] * 10**6) | sum(start=[]) }}", "s of CPU time"),
    "a search": ("{% set a = 'x' * 10**7 %}{{ (a ~ 'z') in [a ~ 'y'] * 10**6 }}", "s of CPU time"),
    "a comparison": (
        "{% set n = namespace(x=(1.5,), y=(1.5,)) %}{% for i in range(40) %}{% set n.x = (n.x, n.x) %}"
        "{% set n.y = (n.y, n.y) %}{% endfor %}{{ n.x == n.y }}", "s of CPU time"),
    "much text": ("{{ 'x' * 10**7 }}", "characters"),
}  # fmt: skip
TALK = Conversation(({"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}), (None, None))

RECIPE = """\
run: {name: small}
model: {config: {model_type: llama, hidden_size: 64}, new_tokens: ["<|im_start|>", "<|im_end|>"]}
tokenizer: bytes
data: {train: data.jsonl, sequence_len: 64, validation_fraction: 0.1, prepare_workers: 2, chat_template: t.jinja}
train: {steps: 2, global_batch_size: 2}
optim: {learning_rate: 1e-3}
"""


@pytest.fixture
def patient(monkeypatch):
    """Lower the limits to half a second of CPU time instead of ten, and a quarter of the memory."""
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.5)
    monkeypatch.setattr(limits, "MEMORY_BYTES", 2**27)


@pytest.mark.parametrize("what", GREEDY)
def test_a_template_that_exceeds_a_limit_is_ended(patient, monkeypatch, what):
    text, why = GREEDY[what]
    if why != "s of CPU time":  # a slow machine must not reach that limit first
        monkeypatch.setattr(limits, "CPU_SECONDS", 20)
    template = ChatTemplate(text, {}, name="data.chat_template=evil.jinja")
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"^data\.chat_template=evil\.jinja (takes|writes) more than .*({why})"):
        template.render(TALK)
    assert time.monotonic() - began < 60
    assert ChatTemplate(NAMED_TEMPLATES["chatml"].text, {}).render(TALK).text


@pytest.mark.parametrize(
    "text", ["{% for i in x %}" * 30 + "{% endfor %}" * 30, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"]
)
def test_a_template_that_raises_an_error_is_one_message(text):
    with pytest.raises(Exception, match="cannot be rendered by the chat template"):
        ChatTemplate(text, {}).render(TALK)


def test_a_template_that_exceeds_a_limit_on_one_record_stops_there(patient):
    """The record does not count as broken, whatever fraction of broken records is allowed."""
    text = NAMED_TEMPLATES["chatml"].text + "{% if messages[0].content == 'now' %}" + NESTED + "{% endif %}"
    template = ChatTemplate(text, {})
    assert template.render(TALK).text
    with pytest.raises(EchelonError, match=r"the chat template takes more than 0\.5 s of CPU time"):
        template.render(Conversation(({"role": "user", "content": "now"}, *TALK.messages[1:]), (None, None)))


def test_long_conversations_are_rendered():
    long = Conversation(({"role": "user", "content": "w " * 5_000_000}, *TALK.messages[1:]), (None, None))
    assert len(ChatTemplate(NAMED_TEMPLATES["chatml"].text, {}).render(long).text) > 10_000_000


def test_the_memory_of_a_grown_process_is_measured_again(patient):
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = limits.MEMORY_BYTES
    assert run_here(lambda: 1, 60, room) == 1
    with mmap.mmap(-1, 2 * room):  # within the second
        assert run_here(lambda: len(bytes(room // 4)), 60, room) == room // 4
        with pytest.raises(LimitError, match="128 MiB"):  # far more than what the process may have free in its heap
            run_here(lambda: bytes(64 * room), 60, room)
    assert len(bytes(2 * room)) == 2 * room
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_threads_render_with_the_same_limits(patient):
    texts = [NAMED_TEMPLATES["chatml"].text, NESTED, GREEDY["a large number"][0]]
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ChatTemplate(text, {}).render, TALK) for text in texts]
    assert [type(one.exception()) for one in asked] == [type(None), ConfigError, ConfigError]


def helpers():
    return [child.pid for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


def test_the_process_that_renders_can_be_ended_and_starts_again():
    chatml, found = ChatTemplate(NAMED_TEMPLATES["chatml"].text, {}), []
    with helper_ended():
        chatml.render(TALK)
    others = helpers()  # of tests before this one
    for _ in range(2):
        with helper_ended():
            found += [(chatml.render(TALK).text, [pid for pid in helpers() if pid not in others]) for _ in range(2)]
        assert helpers() == others
    [(text, first), second, (_, third), _] = found
    assert second == (text, first) and len(first) == len(third) == 1 and first != third


def test_an_interrupted_rendering_does_not_answer_the_next_one():
    class StopError(BaseException):
        pass

    def stop(*_):
        raise StopError

    before = signal.signal(signal.SIGALRM, stop)
    chatml = ChatTemplate(NAMED_TEMPLATES["chatml"].text, {})
    try:
        expected = chatml.render(TALK)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(StopError):
            ChatTemplate(NESTED, {}).render(TALK)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert chatml.render(TALK) == expected


def test_chat_names_the_model(patient, tmp_path):
    from echelon.learn.data.tokenizer import build_bytes_tokenizer

    tokenizer = build_bytes_tokenizer()
    tokenizer.chat_template = NESTED
    with pytest.raises(ConfigError, match=rf"^--chat: the chat template of {tmp_path} takes more than"):
        Chat().encode(tmp_path, tokenizer, "hello")


@pytest.mark.parametrize(
    ("greedy", "place", "most"),
    [
        ("{{ messages[0].content * 10**10 }}", r"data\.jsonl:11", "512 MiB of memory"),
        pytest.param("{{ 3 ** (messages | length * 10**9) }}", r"data\.jsonl", "10 s of", marks=pytest.mark.slow),
    ],
    ids=["memory", "time"],
)
def test_the_command_refuses_it_by_key_and_place(tmp_path, monkeypatch, capfd, greedy, place, most):
    """Also if only a late record, in a tokenizing process, exceeds the limit."""
    greedy = f"{{% if messages[0].content == 'now' %}}{greedy}{{% endif %}}"
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "t.jinja").write_text(NAMED_TEMPLATES["chatml"].text + greedy)
    lines = [json.dumps({"messages": list(TALK.messages)})] * 20
    lines[10] = lines[10].replace("One?", "now")
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    ending = CommandLine(capfd, monkeypatch)("data", "--prepare", "recipe.yaml")
    assert ending.code == 2
    line = ending.err.splitlines()[-1]
    assert re.match(rf"echelon: \S*{place}: data\.chat_template=t\.jinja takes more than {most}", line)


PROGRAM = f"""
import threading
from echelon.ground.stop_request import stops_told
from echelon.learn.data import limits
from echelon.learn.data.templates import ChatTemplate

limits.CPU_SECONDS = 600.0
ChatTemplate("", {{}}).prompt([], generate=True)
threading.Timer(0.5, lambda: print("at work", flush=True)).start()
with stops_told():
    ChatTemplate({NESTED!r}, {{}}).prompt([], generate=True)
"""


def test_a_signal_during_rendering_ends_the_command():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "at work\n"
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "stopped by SIGTERM; start the same command again" in told
