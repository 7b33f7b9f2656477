"""`rollout.sampler: vllm` with a real vLLM on CPUs: its draws, its weights, and runs whose servers are killed."""

import json
import signal
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chisquare
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.ground.sockets import find_free_port
from echelon.learn.answers.sampling import Sampling
from echelon.learn.answers.vllm_sampler import VllmConfig, VllmSampler, build_command, build_starter
from echelon.learn.learner import Learner
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import MARK, assert_no_orphan, await_line, finish, marked_processes, read_lines, start
from tests.dist.command import write_recipe as write

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm, which `make engine-vllm` builds"),
]
SECONDS = 900  # of a start and a run on a busy machine
STEPS = 6
TEMPERATURE = 0.9
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
REWARD = """
def letters(answers, records):
    return [sum(c.islower() for c in answer) / (len(answer) + 1) for answer in answers]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    (tmp_path / "handover").mkdir()
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} is "}) + "\n" for n in range(48)))
    servers = {"python": str(PYTHON), "args": {"enforce_eager": True}, "env": ENVIRONMENT, "folder": "handover"}
    write(
        tmp_path,
        model={"config": CONFIG},
        data={"train": "prompts.jsonl", "sequence_len": 16, "validation_fraction": 0.05},
        objective={"name": "grpo"},
        rollout={
            "group_size": 8, "max_new_tokens": 6, "temperature": TEMPERATURE, "max_mismatch": 1e-4, "sampler": "vllm",
            "vllm": servers,
        },
        reward="rewards:letters",
        train={"steps": STEPS, "global_batch_size": 32, "log_every": 1, "compile": False},
        optim={"learning_rate": 1e-2, "schedule": "constant"},
        checkpoint={"every": STEPS},
    )  # fmt: skip
    yield tmp_path
    assert_no_orphan(15)
    assert not list((tmp_path / "handover").iterdir())


def score(model, prompt, answers):
    """fp64 log-probabilities [answers, tokens] of answers of one length at the temperature, and those of any first."""
    ids = torch.tensor([[*prompt, *answer] for answer in answers])
    with torch.no_grad():
        logits = model(ids).logits[:, len(prompt) - 1 : -1].double() / TEMPERATURE
    scores = logits.log_softmax(-1)
    return scores.gather(2, ids[:, len(prompt) :, None])[..., 0], scores[0, 0]


def fit(tokens, shares):
    """The p-value of Pearson's chi-squared test; tokens that are rarely expected count as one."""
    expected = shares.exp().numpy() * len(tokens)
    seen = np.bincount(tokens, minlength=len(expected))
    rare = expected < 5
    pooled = [np.append(counts[~rare], counts[rare].sum()) for counts in (seen, expected)]
    return chisquare(*pooled).pvalue


def test_draws_follow_the_weights_before_and_after_an_update(folder):
    """Log-probabilities are those of transformers within 1e-4, and tokens pass a chi-squared test."""
    draws, prompt = 2000, [104, 101, 121]
    recipe, _ = load_recipe(folder / "recipe.json", [f"train.global_batch_size={draws}", f"rollout.group_size={draws}"])
    with closing(Learner.build(recipe)) as learner, closing(VllmSampler(learner)) as sampler:
        [handover] = (folder / "handover").iterdir()
        for step in range(2):
            sampling = Sampling(max_tokens=3, temperature=TEMPERATURE, top_k=0, num_samples=draws, seed=step)
            drawn = sampler.answer([prompt], sampling)
            assert set(drawn.prompts) == {tuple(prompt)} and drawn.versions == [step] * draws == [step] * drawn.most
            stored = load_file(handover / "model.safetensors")
            live = {f"model.{name}": tensor for name, tensor in stored.items()}
            torch.testing.assert_close(
                live, {k: v for k, v in learner.engine.state_dict().items() if k in live}, rtol=0, atol=0
            )
            model = AutoModelForCausalLM.from_pretrained(handover)
            whole = [number for number, answer in enumerate(drawn.answers) if len(answer) == 3]
            expected, shares = score(model, prompt, [drawn.answers[number] for number in whole])
            found = torch.stack([drawn.at_temperature[number] for number in whole]).double()
            assert len(whole) > 0.9 * draws and (found - expected).abs().max() < 1e-4
            firsts = [answer[0] for answer in drawn.answers]
            assert fit(firsts, shares) > 1e-4
            assert fit(firsts, (shares / 2).log_softmax(-1)) < 1e-9
            learner.forward_backward(drawn.batch(step, advantages=torch.randn(draws, generator=torch.Generator())))
            learner.step(5e-2)


def train(folder, nproc, *settings, kill_at=None):
    """Train, kill a server after a step, and return the rows of the steps."""
    job = start("train", "recipe.json", *settings, "--nproc", str(nproc), cwd=folder)
    run = RunFolder(folder / "runs" / "tiny")
    if kill_at is not None:
        await_line(run.metrics_path, f'"step": {kill_at},', job, SECONDS)
        next(process for process in marked_processes() if "vllm.entrypoints" in " ".join(process.cmdline()[:4])).kill()
    finish(job, SECONDS).succeeded()
    rows = [row for row in read_lines(run.metrics_path) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["mismatch_max"] for row in rows) < 1e-4 and rows[-1]["grad_norm"] > 0
    return run


@pytest.mark.parametrize(
    ("parallel", "settings", "kill_at"),
    [
        ("ddp", [], None),
        ("fsdp", ["rollout.vllm.servers=2"], 2),
        ("{tp: 2}", ["rollout.lag=1"], None),
        ("{pp: 2}", [], None),
    ],
    ids=["ddp", "fsdp and one of two servers killed", "tp a step ahead", "pp"],
)
def test_processes_train_on_its_answers(folder, parallel, settings, kill_at):
    train(folder, 2, f"parallel={parallel}", *settings, kill_at=kill_at)


def test_a_server_that_runs_already_gets_the_weights(folder):
    """It has others at first. It is still there when the run has ended."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG, vocab_size=256)).save_pretrained("other")
    port, log = find_free_port("127.0.0.1"), folder / "server.log"
    config = VllmConfig(python=str(PYTHON), args={"enforce_eager": True}, env=ENVIRONMENT)
    process = build_starter(build_command(config, folder / "other", port, "float32", 16), folder / "other", log)()
    while "startup complete" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.5)
    train(folder, 2, f"rollout.vllm.servers=[http://127.0.0.1:{port}]")
    assert process.poll() is None
    process.terminate()
    process.wait()


def test_the_only_server_is_started_again(folder):
    run = train(folder, 1, "fault.hang_seconds=15", kill_at=2)
    assert (run.path / "logs" / "vllm-0.log").read_text().count("Application startup complete") == 2


def test_a_killed_run_leaves_no_server(folder):
    """As root of the processes, the command is killed; the fixture looks for what is left."""
    job = start("train", "recipe.json", "train.steps=400", "--nproc", "2", cwd=folder)
    await_line(folder / "runs" / "tiny" / "metrics.jsonl", '"step": 1,', job, SECONDS)
    job.send_signal(signal.SIGKILL)
    job.communicate(timeout=60)
