"""`echelon export --push`, with a local server that speaks the hub's API for uploads."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.dist.command import finish, start, write_recipe
from tests.families import load_run_model
from tests.hub_server import HubServer, push_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TOKEN = "let-me-in"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = HubServer()
    for key, value in {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
    }.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    hub.stop()


@pytest.fixture
def run(hub, tmp_path):
    """A run that trained an adapter on a folder."""
    push_model(hub, "team/base", tmp_path / "base")
    write_recipe(
        tmp_path,
        model={"config": None, "checkpoint": str(tmp_path / "base")},
        tokenizer=None,
        adapter={"method": "lora", "r": 4},
        train={"steps": 3},
        checkpoint={"every": 3},
    )
    assert finish(start("train", "recipe.json", "--nproc", "1", cwd=tmp_path), 300).code == 0
    return tmp_path / "runs" / "tiny"


def echelon(folder, *arguments, token=TOKEN):
    environment = {} if token is None else {"HF_TOKEN": token}
    ending = finish(start("export", "runs/tiny", *arguments, cwd=folder, **environment), 300)
    assert token is None or token not in ending.out + ending.err, "a token is never printed"
    return ending


def download(hub, name, folder, revision=None):
    """What anybody with the token downloads, by the hub's own client, which has read the endpoint at its import."""
    return snapshot_download(name, revision=revision, endpoint=hub.url, token=TOKEN, local_dir=folder)


def assert_no_token(folder):
    for path in Path(folder).rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


def test_a_merged_model_and_an_adapter_are_uploaded(hub, run, tmp_path):
    ending = echelon(tmp_path, "merged", "--merge", "--push", "team/merged", "--private")
    assert ending.code == 0 and f"push: {hub.url}/team/merged/commit/" in ending.out, ending
    assert hub.repositories["team/merged"].private and (tmp_path / "merged" / "model.safetensors").is_file()
    there = download(hub, "team/merged", tmp_path / "there")
    ids = torch.arange(1, 30)[None]
    live = load_run_model(run, torch.device("cpu"))
    with torch.no_grad():
        expected = live(input_ids=ids).logits
        found = AutoModelForCausalLM.from_pretrained(there)(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert "A model with its adapter merged" in (Path(there) / "README.md").read_text()

    ending = echelon(tmp_path, "--push", "tuned", "--revision", "v1")
    assert ending.code == 0 and not (run / "push").exists(), ending
    there = download(hub, "team/tuned", tmp_path / "tuned", "v1")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, there).eval()(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not hub.repositories["team/tuned"].commits[hub.repositories["team/tuned"].head]  # `main` has nothing
    ending = echelon(tmp_path, "--push", "team/merged", "--private")
    assert ending.code == 0 and len(hub.repositories["team/merged"].commits) == 3, ending
    assert_no_token(run)


def test_a_failed_upload_is_repeated_with_the_command_of_the_message(hub, run, tmp_path):
    hub.failing = 100
    ending = echelon(tmp_path, "--push", "team/tuned")
    assert ending.code == 1 and "the export in runs/tiny/push is complete" in ending.err, ending
    assert (run / "push" / "adapter_model.safetensors").is_file() and "Traceback" not in ending.err
    hub.failing = 0
    _, *command = shlex.split(ending.err.strip().rpartition("Repeat the upload with: ")[2])
    client = [sys.executable, "-m", "huggingface_hub.cli.hf", *command, "--token", TOKEN]
    subprocess.run(client, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    repository = hub.repositories["team/tuned"]
    assert (
        repository.commits[repository.head]["adapter_model.safetensors"]
        == (run / "push" / "adapter_model.safetensors").read_bytes()
    )
    assert echelon(tmp_path, "--push", "team/tuned").code == 0 and not (run / "push").exists()


def test_what_is_refused_is_refused_before_the_export(hub, run, tmp_path):
    push_model(hub, "others/model", tmp_path / "theirs")
    push_model(hub, "team/public", tmp_path / "public")
    for arguments, token, message in (
        (("--push", "team/x"), None, "--push team/x: no token is set; set HF_TOKEN to a token with write access"),
        (("--push", "team/x"), "wrong", "--push team/x: the hub rejects the token"),
        (("--push", "others/model"), TOKEN, "the name is taken or belongs to others"),
        (("--push", "nobody/x"), TOKEN, "the name is taken or belongs to others"),
        (("--push", "team/public", "--private"), TOKEN, "the repository team/public exists and is public"),
        (("--push", "a b"), TOKEN, "--push a b: "),
        (("--private",), TOKEN, "--private and --revision require --push ID"),
        ((), TOKEN, "export needs a folder to write; give OUT, or upload with --push ID"),
    ):
        ending = echelon(tmp_path, *arguments, token=token)
        assert ending.code == 2 and message in ending.err and len(ending.err.splitlines()) == 1, ending
    hub.stop()
    ending = echelon(tmp_path, "--push", "team/x")
    assert ending.code == 2 and "cannot be reached" in ending.err and "hf upload team/x FOLDER ." in ending.err, ending
    assert not (run / "push").exists()
