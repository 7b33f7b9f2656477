"""A run whose batches come from a user's own file: killed and resumed, it repeats the uninterrupted run."""

import pytest

from tests.dist.command import EXACT, read_lines, write_recipe

pytestmark = pytest.mark.dist

SOURCE = '''
import os
import random
import signal
from pathlib import Path

from echelon.learn.data.own_batches import build_step_batch


class Counting:
    """Numbers in a row, from a start that is drawn for each sequence. Kills its process once if `mark` is a file."""

    is_pure = True

    def __init__(self, recipe, data, place, mark):
        self.recipe, self.place, self.mark = recipe, place, Path(mark)

    def batch(self, step):
        if step == 9 and self.mark.exists():
            self.mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        count, lists, weights = self.recipe.batches.sequences(step), [], []
        for index in self.place.share(count):
            draw = random.Random(f"{self.recipe.run.seed} {step} {index}")
            start = draw.randrange(200)
            lists.append(list(range(start, start + draw.randint(4, 32))))
            weights.append(draw.choice([0.5, 1.0, 3.0]))
        labels = [[*each[1:], -100] for each in lists]
        return build_step_batch(step, lists, labels, self.place, {"weight": weights}, count)

    def close(self):
        pass


def weighted(logits, labels, extra):
    scores = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return -(scores * (labels != -100) * extra.get("weight", 1)).sum()
'''


def train(echelon, folder, nproc=1):
    """The rows of the steps of a run in a folder, and its events."""
    folder.mkdir()
    (folder / "my_source.py").write_text(SOURCE)
    source = {"source": "my_source:Counting", "options": {"mark": str(folder / "mark")}}
    write_recipe(
        folder, data={"train": str(folder / "text.txt"), "sequence_len": 32, **source},
        objective={"name": "my_source:weighted"}, run={"name": "own", "dir": str(folder / "run")}, train={"steps": 12},
    )  # fmt: skip
    return lambda: echelon("train", folder / "recipe.json", "--nproc", nproc)


def rows_of(folder, keys=EXACT):
    return [
        [row[key] for key in keys] for row in read_lines(folder / "run" / "metrics.jsonl") if row["kind"] == "train"
    ]


@pytest.mark.slow
def test_a_killed_run_repeats_the_batches_bit_for_bit(echelon, tmp_path, monkeypatch):
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    for name, folder in folders.items():
        run = train(echelon, folder)
        if name == "killed":
            (folder / "mark").touch()
        monkeypatch.chdir(folder)
        ended = run().succeeded()
        assert "data: batches of my_source:Counting\n" in ended.out
    events = [event["event"] for event in read_lines(folders["killed"] / "run" / "events.jsonl")]
    assert "failure" in events and "resume" in events, "it was killed, and resumed from a checkpoint"
    assert rows_of(folders["killed"]) == rows_of(folders["whole"])


@pytest.mark.slow
def test_two_processes_feed_the_same_sequences(echelon, tmp_path, monkeypatch):
    for nproc in (1, 2):
        run = train(echelon, tmp_path / str(nproc), nproc)
        monkeypatch.chdir(tmp_path / str(nproc))
        assert run().code == 0
    one, two = (rows_of(tmp_path / name, ("step", "batch_hash", "tokens", "target_tokens")) for name in ("1", "2"))
    assert one == two
