"""`echelon train --here`: a debugger stops one rank in the terminal, the other ranks wait, and the run is the same."""

import time

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import EXACT, process_of, read_lines, write_recipe
from tests.terminal import Terminal

pytestmark = pytest.mark.dist

# A breakpoint in the third step of one rank: in its loss, its reader or its callback.
PARTS = """
import time

import torch.distributed as dist

from echelon.learn.data.readers.record import Reader, Record, Span
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.run.training.callbacks import Callback


class Stopping(CausalLM):
    def __init__(self, config, rank):
        self.rank, self.losses = rank, 0

    def loss_sum(self, outputs, batch):
        loss = super().loss_sum(outputs, batch)
        self.losses += loss.item() > 0  # the rehearsal has no labels
        if self.losses == 3 and dist.get_rank() == self.rank:
            breakpoint()
        return loss


class Text(Reader):
    def cut(self, file, piece_bytes=2**20):
        yield Span(file, 0, file.size, file.size, True)

    def read(self, span, reading):
        breakpoint()
        yield Record(span.file.path.read_bytes())


class Diary(Callback):
    def __init__(self, at=3, seconds=0.0):
        self.at, self.seconds = at, seconds

    def on_step_end(self, row):
        time.sleep(self.seconds)
        if row["step"] == self.at:
            breakpoint()
        self.row = row
"""
PROMPT = r"\(Pdb\) $"


@pytest.fixture
def folder(echelon, tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    write_recipe(tmp_path)
    return tmp_path


def objective(rank):
    return f"objective={{name: 'parts:Stopping', options: {{rank: {rank}}}}}"


def train(folder, name, *arguments):
    return Terminal("train", "recipe.json", "--here", *arguments, f"run.name={name}", folder=folder)


def rows(folder, name):
    lines = read_lines(RunFolder(folder / "runs" / name).metrics_path)
    return [[row[key] for key in EXACT] for row in lines if row["kind"] == "train"]


@pytest.mark.slow
def test_a_loss_is_printed_and_the_run_is_the_same(echelon, folder):
    assert echelon("train", "recipe.json", "--nproc", "1", "run.name=plain").code == 0
    terminal = train(folder, "here", objective(0))
    assert "breakpoint()" not in terminal.await_text(PROMPT)
    terminal.type("p 'loss is', round(loss.item() / batch.labels.numel(), 1)\n")
    terminal.await_text(rf"\('loss is', 5.\d\).*{PROMPT}")
    terminal.type("c\n")
    assert terminal.await_end() == 0, terminal.shown
    assert "done: 6 steps" in terminal.shown and rows(folder, "here") == rows(folder, "plain")


@pytest.mark.slow
def test_a_reader_and_a_callback_stop_too_and_ctrl_c_ends_the_debugger(folder):
    parts = ("data={train: {path: text.txt, format: 'parts:Text'}}", "train.callbacks=[{name: 'parts:Diary'}]")
    terminal = train(folder, "here", *parts, "data.sequence_len=32")
    terminal.await_text(PROMPT)
    terminal.type("p span.num_bytes\n")
    terminal.await_text(rf"{(folder / 'text.txt').stat().st_size}.*{PROMPT}")
    terminal.type("c\n")
    while "on_step_end" not in terminal.await_text(PROMPT):  # the reader reads the file more than once
        terminal.type("c\n")
    terminal.type("p row['step']\n")
    terminal.await_text(rf"\b3\b.*{PROMPT}")
    terminal.type("half a line\x03")
    assert terminal.await_end() == 3
    assert terminal.shown.count("echelon: ") == 1 and "Traceback" not in terminal.shown
    assert "echelon: stopped by SIGINT in the debugger; " in terminal.shown


@pytest.mark.slow
def test_the_other_ranks_wait_for_the_debugger_without_a_limit(echelon, folder):
    settings = ("--nproc", "2", "fault.hang_seconds=1", "fault.max_restarts=0")
    assert echelon("train", "recipe.json", *settings, "run.name=plain").code == 0
    terminal = train(folder, "here", "--rank", "1", *settings, objective(1))
    terminal.await_text(PROMPT)
    time.sleep(4)
    terminal.type("p dist.get_rank(), dist.get_world_size()\n")
    terminal.await_text(rf"\(1, 2\).*{PROMPT}")
    terminal.type("c\n")
    assert terminal.await_end() == 0, terminal.shown
    assert "step 6/6" in terminal.shown and rows(folder, "here") == rows(folder, "plain")
    assert "step 6/6" in (folder / "runs" / "here" / "logs" / "rank-00000.log").read_text()


@pytest.mark.slow
def test_ctrl_c_saves_quit_does_not_and_both_resume(echelon, folder):
    settings = ("train.steps=200", "train.log_every=1", "checkpoint.every=2")
    slow = "train.callbacks=[{name: 'parts:Diary', options: {at: null, seconds: 0.1}}]"
    terminal = train(folder, "here", *settings, slow)
    terminal.await_text(r"step +\d\d+/200")
    terminal.type("\x03")
    assert terminal.await_end() == 3
    assert terminal.shown.count("echelon: ") == 1 and "echelon: stopped by SIGINT at step " in terminal.shown
    step = RunFolder(folder / "runs" / "here").newest_step()
    stopping = f"train.callbacks=[{{name: 'parts:Diary', options: {{at: {step + 3}}}}}]"
    terminal = train(folder, "here", *settings, stopping, "--nproc", "2", "--rank", "0")
    terminal.await_text(PROMPT)
    terminal.type("q\n")
    assert terminal.await_end() == 3
    assert "echelon: stopped by quit in the debugger; the newest checkpoint is step " in terminal.shown
    assert echelon("train", "recipe.json", "run.name=here", *settings).code == 0
    assert [row[0] for row in rows(folder, "here")] == list(range(1, 201))


@pytest.mark.slow
def test_a_lost_rank_ends_the_one_in_the_debugger_when_it_goes_on(folder):
    terminal = train(folder, "here", "--nproc", "2", objective(0))
    terminal.await_text(PROMPT)
    process_of(RunFolder(folder / "runs" / "here"), 1).kill()
    terminal.await_text(r"rank 1 \(pid \d+\) was killed by SIGKILL.*this rank cannot go on")
    terminal.type("p 1 + 1\n")
    terminal.await_text(PROMPT)
    terminal.type("c\n")
    assert terminal.await_end() == 1
    assert "was killed by SIGKILL" in terminal.shown


@pytest.mark.slow
def test_a_breakpoint_without_a_terminal_says_how_to_stop_there(echelon, folder):
    ending = echelon("train", "recipe.json", "--nproc", "1", objective(0))
    assert ending.code == 1 and "start the same command with --here --rank 0" in ending.err, ending.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "1"], "--rank 1 is the rank that --here runs in this terminal; add --here."),
        (["--here", "--nproc", "2", "--rank", "2"], "--rank 2: this job has the ranks 0 to 1"),
        (["--here", "--nodes", "2", "--rendezvous", "a:1"], "--here starts the other ranks itself, on this machine"),
        (["--here", "fault.on_lost_process=continue"], "--here does not work with fault.on_lost_process=continue"),
    ],
)
def test_what_cannot_run_here_is_refused(echelon, folder, arguments, message):
    ending = echelon("train", "recipe.json", *arguments)
    assert ending.code == 2 and message in ending.err and not (folder / "runs" / "tiny").exists()
