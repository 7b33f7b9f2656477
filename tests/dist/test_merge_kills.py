"""An `export --merge` that is killed while it compares, and two of them that write to one folder."""

import json
import signal
import time

import pytest

from tests.dist.command import finish, start
from tests.dist.test_finetuning import write_base, write_recipe

pytestmark = pytest.mark.dist


def test_a_merged_folder_appears_compared_and_is_written_by_one_command(echelon, tmp_path, monkeypatch):
    write_base(tmp_path)
    run = write_recipe(tmp_path, train={"steps": 3}, model={"new_tokens": []}, data={"chat_template": "zephyr"})
    assert echelon("train", "recipe.json", "--nproc", "1").code == 0
    command, writing = ("export", str(run.path), "merged", "--merge"), tmp_path / ".writing-merged"
    first = start(*command)
    while not (writing / "README.md").exists():
        assert first.poll() is None and not (tmp_path / "merged").exists(), first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # the weights are complete, and the comparison has begun
    assert (writing / "model.safetensors").exists() and not (tmp_path / "merged").exists()
    for other in (command, command[:3]):
        ending = echelon(*other)
        assert ending.code == 2 and f"merged is being written by another process, {first.pid} on " in ending.err, ending
        assert "wait for its end, or choose another OUT" in ending.err
    first.kill()
    finish(first)
    assert writing.exists() and not (tmp_path / "merged").exists()

    ending = echelon(*command, "--nproc", "2")  # two processes compare what the third has written
    assert ending.code == 0 and "merged model compared with the adapter on" in ending.out + ending.err, ending
    assert json.loads((tmp_path / "merged" / "merge.json").read_text())["tokens"] > 0
    assert "merged model compared" in (tmp_path / "merged" / "README.md").read_text()
    assert not list(tmp_path.glob(".writing*"))
    ending = echelon(*command)
    assert ending.code == 2 and "merged exists and is not an empty folder" in ending.err, ending

    def compare(*_):
        raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr("echelon.tools.inference.merge.compare_merged", compare)
    ending = echelon("export", run.path, "other", "--merge", "--nproc", "1")
    assert ending.code == 1 and "other is complete, but was not compared with the adapter" in ending.err, ending
    assert (tmp_path / "other" / "model.safetensors").exists() and not (tmp_path / "other" / "merge.json").exists()
