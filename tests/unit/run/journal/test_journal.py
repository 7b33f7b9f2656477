"""The console messages and rows of a run."""

import errno
import json
import os

import pytest
from transformers import LlamaConfig

from echelon.learn.data.tokenizer import train_tokenizer
from echelon.planner.memory_parts import MemoryParts
from echelon.recipe.batches import BatchSchedule, constant_batch, ramp_batch
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal import journal as journal_module
from echelon.run.journal.journal import Journal
from echelon.run.lifecycle.run_records import describe_end, describe_tokens
from echelon.run.training.state import TrainState
from tests.unit.recipe_samples import load_text


@pytest.mark.parametrize(
    ("batches", "remaining"),
    [
        (constant_batch(8, 64), "8s"),  # two steps took 2 s: 8 more
        # 2 sequences in each of the first five steps, then 8: 4 of them took 2 s, and 2 * 2 + 6 * 8 are left
        (ramp_batch(2, 8, 6, over_tokens=640, sequence_len=64), "26s"),
    ],
)
def test_the_time_left_counts_sequences(tmp_path, monkeypatch, batches: BatchSchedule, remaining: str, caplog):
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: next(clock))
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=11, log_every=3, batches=batches)
    row = dict.fromkeys(("loss", "grad_norm", "tokens_per_second", "mfu", "memory_peak_bytes"))
    for step in (1, 2, 3):
        more = {"step": step, "step_seconds": 1.0, "data_wait_seconds": 0.0, "learning_rate": 1.0, "skipped": False}
        journal.train({"kind": "train", **row, **more})
    journal.close()
    assert [line.split("eta ")[1] for line in caplog.messages] == ["-", remaining]


def test_a_console_line_has_averages_since_the_line_before(tmp_path, caplog):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=5, log_every=4, batches=constant_batch(8, 64))
    row = {"kind": "train", "learning_rate": 1.0, "skipped": False, "loss": 2.0, "grad_norm": 1.0}
    row |= {"memory_peak_bytes": 2**30}
    for step, seconds in enumerate((9.0, 3.0, 0.5, 0.5, 2.0), start=1):
        speed = {"tokens_per_second": 400 / seconds, "mfu": 0.1 / seconds, "step_seconds": seconds}
        journal.train({**row, "step": step, **speed, "data_wait_seconds": 0.25})
    journal.close()
    # steps 2 to 4: 1,200 tokens in 4 s, of which 0.75 s waited
    assert [line.split("tok/s ")[1].split("  eta")[0] for line in caplog.messages] == [
        "44  mfu 1.1%  peak_mem 1.00 GiB  wait 2.8%",
        "300  mfu 7.5%  peak_mem 1.00 GiB  wait 18.8%",
        "200  mfu 5.0%  peak_mem 1.00 GiB  wait 12.5%",
    ]
    rows = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert [each["tokens_per_second"] for each in rows][2:4] == [800, 800]


@pytest.mark.parametrize(
    ("seconds", "level", "steps"),
    [
        (0.95, "INFO", [1, 12, 23, 34, 45, 56, 67, 78, 89, 100, 111, 120]),  # ten seconds apart, the first and the last
        (30.0, "INFO", [*range(1, 121)]),
        (0.95, "DEBUG", [*range(1, 121)]),
    ],
)
def test_short_steps_have_a_line_every_ten_seconds(tmp_path, monkeypatch, caplog, seconds, level, steps):
    """Every step is in metrics.jsonl, whatever the console shows."""
    clock = {"now": 100.0}
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: clock["now"])
    caplog.set_level(level, logger=journal_module.__name__)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=120, log_every=1, batches=constant_batch(8, 64))
    row = dict.fromkeys(("loss", "grad_norm", "tokens_per_second", "mfu", "memory_peak_bytes"))
    row |= {"step_seconds": seconds, "data_wait_seconds": 0.0, "learning_rate": 1.0, "skipped": False}
    for step in range(1, 121):
        clock["now"] += seconds
        journal.train({"kind": "train", **row, "step": step})
    journal.close()
    assert [int(line.split("/")[0].removeprefix("step")) for line in caplog.messages] == steps
    assert len(folder.metrics_path.read_text().splitlines()) == 120


def test_the_mfu_can_be_left_out_of_the_console(tmp_path, caplog):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=1, log_every=1, batches=constant_batch(8, 64), shows_mfu=False)
    row = {"kind": "train", "learning_rate": 1.0, "skipped": False, "loss": 2.0, "grad_norm": 1.0, "mfu": 0.5}
    row |= {"memory_peak_bytes": 2**30, "tokens_per_second": 10.0, "step_seconds": 1.0, "data_wait_seconds": 0.0}
    journal.train({**row, "step": 1})
    journal.close()
    assert "mfu" not in caplog.text and json.loads(folder.metrics_path.read_text())["mfu"] == 0.5


def test_the_end_says_what_came_out_and_what_comes_next(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "a run")
    folder.create()
    rows = ({"kind": "train", "step": 1, "loss": 3.0}, {"kind": "train", "step": 2, "loss": 2.5})
    lines = [json.dumps(row) for row in (*rows, {"kind": "eval", "step": 2, "loss": 2.75})]
    folder.metrics_path.write_text("\n".join(lines) + "\n")
    recipe, _ = load_text(tmp_path)
    told = [*describe_end(folder, TrainState(step=2, best_loss=2.75, best_step=2), 75.0, "$1.50", recipe)]
    assert told == [
        "done: 2 steps in 1m15s; last training loss 2.5000; best held-out loss 2.7500 at step 2; cost $1.50",
        f"run folder: {folder.path}",
        f"next: echelon eval '{folder.path}'",
        f"next: echelon generate '{folder.path}' --prompt \"...\"",
        f"next: echelon export '{folder.path}' 'a run-exported'",
    ]
    first, *_ = describe_end(folder, TrainState(step=2), 75.0, None, recipe)
    assert first == "done: 2 steps in 1m15s; last training loss 2.5000"
    monkeypatch.setenv("SM_HOSTS", '["algo-1"]')
    in_container = [*describe_end(folder, TrainState(step=2), 75.0, None, recipe)]
    assert in_container == [first, f"run folder: {folder.path}"], "no command there could use it"


def test_the_memory_is_an_event_and_a_table(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=9, log_every=9, batches=constant_batch(8, 64))
    assert journal.memory_lines == []
    mib = 2**20
    planned = MemoryParts(mib, mib, 2 * mib, 30 * mib, 6 * mib, 0, mib)
    journal.memory(4, planned, MemoryParts(mib, mib, 2 * mib, 33, 0, 512, 1000))
    journal.close()
    assert journal.memory_lines == [
        "tensors of one process     planned    measured",
        "weights                   1.00 MiB    1.00 MiB",
        "gradients                 1.00 MiB    1.00 MiB",
        "optimizer                 2.00 MiB    2.00 MiB",
        "activations               30.0 MiB        33 B",
        "loss                      6.00 MiB         0 B",
        "other                          0 B       512 B",
        "frozen models             1.00 MiB      1000 B",
        "total                     41.0 MiB    4.00 MiB",
    ]
    [event] = folder.rows.read_events()
    assert (event["event"], event["step"], event["planned"]["loss"]) == ("memory", 4, 6 * mib)
    assert event["measured"] == {
        "weights": mib, "gradients": mib, "optimizer": 2 * mib, "activations": 33, "loss": 0, "other": 512,
        "frozen_models": 1000,
    }  # fmt: skip


def test_rows_are_cut_and_the_file_continues(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=9, log_every=9, batches=constant_batch(8, 64))
    for step in (2, 3, 4):
        journal.train({"kind": "train", "step": step})
    journal.cut(2)
    journal.train({"kind": "train", "step": 3})
    journal.close()
    assert [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()] == [2, 3]


def test_rows_wait_on_a_full_disk_and_stay_complete(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    journal = Journal(folder, num_steps=9, log_every=1, batches=constant_batch(8, 64))
    disk = FullDisk(journal._file, room=100)
    journal._file = disk
    row = {"kind": "eval", "loss": 1.0, "perplexity": 2.0, "bits_per_byte": None}
    row |= {"reward_accuracy": None, "reward_margin": None, "sets": {}}
    for step in (1, 2, 3):
        journal.evaluation({"step": step, **row})
    assert folder.metrics_path.stat().st_size == 100
    with pytest.raises(OSError, match="No space left"):
        journal.flush()
    disk.room = 10**6
    journal.evaluation({"step": 4, **row})
    journal.close()
    assert [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()] == [1, 2, 3, 4]


class FullDisk:
    """A file that accepts the first `room` bytes, and then fails like a full disk."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def write(self, content):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._file.write(content[: self.room])
        self.room -= taken
        return taken

    def close(self):
        self._file.close()


def test_special_tokens_are_told_with_their_owner():
    tokenizer = train_tokenizer(["a text of some words"] * 3, 260)
    tokenizer.pad_token = "a"
    pad = tokenizer.pad_token_id
    config = LlamaConfig(bos_token_id=0, eos_token_id=[3, 5], pad_token_id=None)
    line = describe_tokens(config, tokenizer, [tokenizer.eos_token_id])
    told = f"tokens: pad {pad} (tokenizer), eos [3, 5] (model config), bos 0 (model config)"
    assert line == f"{told}; generation stops at 0 (<|endoftext|>)"
    bare = LlamaConfig(bos_token_id=None, eos_token_id=None, pad_token_id=7)
    tokenizer.pad_token = None
    line = describe_tokens(bare, tokenizer, [])
    assert line == "tokens: pad 7 (model config), eos 0 (tokenizer), bos none; generation stops at none"
