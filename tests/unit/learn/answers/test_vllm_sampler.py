"""Requests to servers like vLLM's, over HTTP, and the processes of servers; vLLM itself: tests/engines."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from echelon.ground.errors import ConfigError, TrainingError
from echelon.ground.sockets import find_free_port
from echelon.learn.answers.vllm_sampler import VllmClient, VllmConfig, VllmServer, build_command, build_starter
from tests.unit.recipe_samples import DEMO, load_text

TEXT = DEMO + "objective: {name: grpo}\nreward: exact\nrollout: {sampler: vllm, group_size: 4, max_new_tokens: 4}\n"


class Crowded(ThreadingHTTPServer):
    request_queue_size, daemon_threads = 64, True

    def handle_error(self, *_):
        """A client that waits no longer has closed its connection."""


@pytest.fixture
def serve():
    """Starts servers that answer each request with its first token and a fault, and note what they were asked."""
    servers = []

    def begin(answer):
        asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append(body["token_ids"][0])
                code, reply = answer(body)
                text = json.dumps(reply).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        server = Crowded(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", asked

    yield begin
    for server in servers:
        server.shutdown()


def drawn(body, version="3", scores=(-0.5,)):
    """A reply with one token: the first of the prompt."""
    span, content = {"version": version, "start": 0, "end": 1}, [{"logprob": score} for score in scores]
    choice = {"token_ids": body["token_ids"][:1], "logprobs": {"content": content}, "weight_versions": [span]}
    return 200, {"choices": [choice]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda body: (500, {"error": "the engine is dead"}), "answered 500.*the engine is dead"),
        (lambda body: drawn(body, version="default"), r"by weights \['default'\], not 3"),
        (lambda body: drawn(body, scores=()), "1 tokens with 0 log-probabilities"),
        (lambda body: (200, {"choices": []}), "ValueError: not enough values"),
        (lambda body: (time.sleep(9), drawn(body))[1], "timed out"),
        (None, "Connection refused"),
    ],
    ids=["dead engine", "other weights", "no scores", "no choice", "too late", "no server"],
)
def test_what_a_failed_server_leaves_goes_to_another_once(serve, answer, reason):
    good, asked = serve(drawn)
    bad = f"http://127.0.0.1:{find_free_port('127.0.0.1')}" if answer is None else serve(answer)[0]
    bodies, done = [{"token_ids": [number]} for number in range(12)], {1: ((7,), [0.0])}
    client = VllmClient([bad, good], 3, 3.0)
    failed, missing = client.run(bodies, [number for number in range(12) if number != 1], 4, done)
    assert missing == 0 and sorted(asked) == [0, *range(2, 12)]
    assert done == {number: ((number,), [-0.5]) for number in range(12)} | {1: ((7,), [0.0])}
    assert list(failed) == [bad] and re.search(reason, failed[bad])


def test_without_a_server_all_are_missing_and_a_refusal_is_an_error(serve):
    nobody = f"http://127.0.0.1:{find_free_port('127.0.0.1')}"
    assert VllmClient([nobody], 3, 9.0).run([{"token_ids": [1]}] * 2, [0, 1], 2, {})[1] == 2
    refusing, _ = serve(lambda body: (400, {"error": "the prompt is too long"}))
    with pytest.raises(TrainingError, match=r"answered 400: .*the prompt is too long"):
        VllmClient([refusing], 3, 9.0).run([{"token_ids": [1]}], [0], 1, {})


def test_a_start_that_fails_is_told_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "vllm-0.log"
    command = build_command(VllmConfig(python=sys.executable), tmp_path, 1, "float32", 16)
    server = VllmServer("http://127.0.0.1:1", build_starter(command, tmp_path, log), log)
    assert not server.keep_up()
    with pytest.raises(ConfigError, match=r"(?s)ended 1 times before it answered; see .*No module named '?vllm"):
        while not server.keep_up():
            time.sleep(0.05)


def test_a_killed_process_leaves_no_server(tmp_path):
    """Nor what the server has started, nor the folder of its weights."""
    folder, pids = tmp_path / "weights", tmp_path / "pids"
    folder.mkdir()
    child = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"
    server = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); exec({child!r})"
    parent = (
        "import pathlib, sys, time; from echelon.learn.answers.vllm_sampler import build_starter as build\n"
        f"build([sys.executable, '-c', {server!r}], pathlib.Path({str(folder)!r}), pathlib.Path('log'))()\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    started, deadline = [int(pid) for pid in pids.read_text().split()], time.monotonic() + 10
    while folder.exists() or any(map(is_alive, started)):
        assert time.monotonic() < deadline, started
        time.sleep(0.02)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.top_p=0.9"], "rollout.top_p=0.9: rollout.sampler=vllm gives log-probabilities over all tokens; use"),
        (["adapter.method=lora"], "adapter.method=lora: rollout.sampler=vllm gets whole weights; use adapter.method=f"),
        (
            ["rollout.vllm.serverss=2"],
            "rollout.vllm.serverss=2 must be left out: the section has no such key; remove it.",
        ),
        (
            ["rollout.vllm.servers=0"],
            "rollout.vllm.servers=0 must be a number of servers, or a list of addresses such as",
        ),
        (
            ["rollout.vllm={}", "rollout.sampler=native"],
            "rollout.vllm is for rollout.sampler=vllm; set that, or remove vllm.",
        ),
        (
            ["rollout.vllm.servers=[localhost:80]"],
            "rollout.vllm.servers=['localhost:80'] must be a number of servers, or",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError) as refused:
        load_text(tmp_path, TEXT, "train.global_batch_size=8", *settings)
    assert message in str(refused.value)
