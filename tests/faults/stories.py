"""Kills a job at random moments, and checks that it ends like an uninterrupted one.

A story is one run, from data preparation to the last step, with several kills. A kill waits for its phase in
events.jsonl and metrics.jsonl, then for a random time, and sends the signal from outside. The phase that was hit is
read from events.jsonl afterwards. The job continues by itself, or the same command is run again.
"""

import copy
import json
import os
import random
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import TEXT, exact_rows, finish, marked_processes, read_lines, start, write_recipe
from tests.parity.training import equal_tensors, tensors_of

PHASES = ("data preparation", "start", "step", "save", "publish", "evaluation")
# The event that begins a phase and the events that end it, the shortest phase first.
SPANS = {
    "publish": ("publish", ("checkpoint", "save_failed")),
    "save": ("save", ("publish", "save_failed")),
    "evaluation": ("evaluation", ("evaluated",)),
    "data preparation": ("prepare", ("prepared",)),
}
ATTEMPTS = ("restart", "prepare")  # each begins another evaluation
# The approximate duration of a phase; the time from its beginning to a kill is drawn from this range.
SECONDS = {"data preparation": 1.5, "start": 4.0, "step": 0.02, "save": 0.05, "publish": 0.08, "evaluation": 0.1}
LOOK_SECONDS = 0.001
PATIENCE_SECONDS = 300.0
GONE_SECONDS = 10.0

RECIPE = "story.json"
STEPS = 180
SECTIONS = {
    "train": {"global_batch_size": 12, "log_every": 90, "eval_every": 20},
    "checkpoint": {"every": 20, "keep_last": 2},
    "evaluate": {"batches": 12},
    "fault": {"max_restarts": 20},
}
MODEL = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.1}


@dataclass
class Kill:
    """One kill: the request and its result."""

    phase: str
    signal: str
    target: str
    at: float = 0.0
    landed: str = ""
    at_step: int = 0
    steps_lost: int = 0
    by_itself: bool = False
    exit_code: int | None = None
    seconds_to_recover: float | None = None


@dataclass
class Story:
    """A run of `steps` on `ranks` under `parallel`, the kills that it must survive, and the seed of their moments."""

    ranks: int
    parallel: str
    kills: list[tuple[str, str, str]]
    seed: int
    steps: int = STEPS
    done: list[Kill] = field(default_factory=list)

    @property
    def kind(self):
        """The key of the uninterrupted run to compare with."""
        return self.ranks, self.parallel, self.steps


class Teller:
    """Runs one story in a separate folder."""

    def __init__(self, folder, story):
        self._folder, self._story = folder, story
        self._random = random.Random(story.seed)
        self._events: list[dict] = []
        self._read_bytes = 0
        self.run = RunFolder(folder / "runs" / "tiny")
        write_faulty_recipe(folder, story.parallel, story.steps)

    def tell(self):
        """Run, kill and resume until the end. Asserts that the job succeeds and leaves no process after any kill."""
        job = self._start()
        for plan in self._story.kills:
            kill = Kill(*plan)
            if not self._strike(job, kill):
                break  # the job ended before the phase
            self._story.done.append(kill)
            job = self._go_on(job, kill)
        finish(job, PATIENCE_SECONDS).succeeded()
        assert not wait_until_gone(marked_processes()), "processes of the job outlive it"
        for kill in self._story.done:
            self._look_back(kill)

    def _start(self):
        path = [str(Path(__file__).with_name("slow_disk")), os.environ.get("PYTHONPATH", "")]
        command = ("train", RECIPE, "--nproc", str(self._story.ranks))
        self._mark = len(self._read_events())
        return start(*command, cwd=self._folder, PYTHONPATH=os.pathsep.join(filter(None, path)), OMP_NUM_THREADS="1")

    def _read_events(self):
        """All events so far; cheap while there are no new ones."""
        path = self.run.events_path
        if path.exists() and path.stat().st_size > self._read_bytes:
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                lines = file.read().split(b"\n")[:-1]
            self._read_bytes += sum(len(line) + 1 for line in lines)
            self._events += [json.loads(line) for line in lines]
        return self._events

    def _strike(self, job, kill):
        """Wait for the moment and kill; False if the job ended before."""
        if not self._await(job, kill.phase):
            return False
        time.sleep(self._random.uniform(0, SECONDS[kill.phase]))
        while not (victims := find_victims(job, kill.target, self._story.ranks, self.run)) and job.poll() is None:
            time.sleep(LOOK_SECONDS)
        if job.poll() is not None:
            return False
        self._left = processes_of(job)
        self._left_ranks = [each for each in self._left[1:] if (role_of(each, self.run) or "").isdecimal()]
        self._mark = len(self._read_events())
        kill.at_step, kill.at = self.run.rows.last_step(), time.time()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):  # it has just ended by itself, or with its killed parent
                victim.send_signal(signal.Signals[kill.signal])
        return True

    def _await(self, job, phase):
        """Wait until the phase has begun, for the first or second time; False if the job ends before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        first, last_step = None, None
        times = self._random.randint(1, 2)
        while job.poll() is None:
            assert time.monotonic() < deadline, f"no {phase} came: {tail_of(self.run)}"
            names = [row["event"] for row in self._read_events()[self._mark :]]
            if phase == "data preparation" and "prepare" in names:
                return True
            if phase == "start" and ("prepared" in names or "restart" in names):
                return True
            if phase not in ("data preparation", "start") and ("start" in names or "resume" in names):
                # Events before the current processes were ready belong to earlier processes.
                first = len(names) if first is None else first
                last_step = self.run.rows.last_step() + self._random.randint(2, 8) if last_step is None else last_step
                if phase == "step" and self.run.rows.last_step() >= last_step and self._classify(time.time()) == phase:
                    return True
                if phase in SPANS and names[first:].count(SPANS[phase][0]) >= times:
                    return True
            time.sleep(LOOK_SECONDS)
        return False

    def _go_on(self, job, kill):
        """After a kill: check that the right processes have ended; the job resumes, or is started again."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while job.poll() is None:
            if any(row["event"] == "restart" for row in self._read_events()[self._mark :]):
                kill.by_itself = True
                assert not wait_until_gone(self._left_ranks), "ranks of before the failure live on"
                return job
            assert time.monotonic() < deadline, f"neither ended nor started anew: {tail_of(self.run)}"
            time.sleep(0.02)
        ending = finish(job, 30)
        kill.exit_code = ending.code
        assert "Traceback" not in without_cut_starts(ending.err), ending.err
        assert not wait_until_gone(self._left), "processes of the job outlive it"
        return self._start()

    def _look_back(self, kill):
        """Read from the events which phase a kill has hit, and when the processes were ready again."""
        kill.landed = self._classify(kill.at)
        up = next((row for row in self._read_events() if row["time"] > kill.at and is_up(row)), None)
        if up is not None:
            kill.seconds_to_recover = up["time"] - kill.at
            kill.steps_lost = max(0, kill.at_step - up["step"])

    def _classify(self, at):
        """The phase of the run at that time."""
        names = [row["event"] for row in self._read_events() if row["time"] <= at]
        latest = max((index for index, name in enumerate(names) if name in ATTEMPTS), default=0)
        names = names[latest:]
        for phase, (begin, ends) in SPANS.items():
            after = names[len(names) - names[::-1].index(begin) :] if begin in names else None
            if after is not None and not any(each in ends for each in after):
                return phase
        return "step" if "start" in names or "resume" in names else "start"


def without_cut_starts(text):
    """Drop what Python itself prints in a child that starts while its parent is killed: nobody sends it its work."""
    return re.sub(r"Traceback \(most recent call last\):\n(?: .*\n)*? .*spawn_main\n(?: .*\n)*EOFError: .*\n", "", text)


def is_up(row):
    """Whether the event shows that the processes are ready for their first step."""
    return row["event"] in ("start", "resume")


def write_faulty_recipe(folder, parallel, steps):
    """Write the recipe of all stories; its text is large enough that preparation takes some time."""
    model = {"model": {"config": MODEL}}
    data = {"prepare_workers": 2, "validation_fraction": 0.002}
    sections = copy.deepcopy(SECTIONS)
    sections["train"]["steps"] = steps
    recipe = write_recipe(folder, **model, parallel=parallel, data=data, **sections)
    recipe.rename(folder / RECIPE)
    (folder / "text.txt").write_text(TEXT * 150)


def train_uninterrupted(folder, ranks, parallel, steps):
    """Train the same recipe without kills and without the slowed disk."""
    write_faulty_recipe(folder, parallel, steps)
    finish(start("train", RECIPE, "--nproc", str(ranks), cwd=folder, OMP_NUM_THREADS="1"), 300).succeeded()
    return RunFolder(folder / "runs" / "tiny")


def assert_same(run, whole, steps):
    """The metrics columns and the weights and moments after the last step are equal bit for bit; the evaluations."""
    assert exact_rows(run) == exact_rows(whole)
    assert equal_tensors(tensors_of(run.path, steps), tensors_of(whole.path, steps))
    evaluated, expected = (
        [(row["step"], row["loss"]) for row in read_lines(each.metrics_path) if row["kind"] == "eval"]
        for each in (run, whole)
    )
    assert evaluated == expected
    return evaluated


def processes_of(job):
    """The process of the command and all its descendants."""
    try:
        parent = psutil.Process(job.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def find_victims(job, target, ranks, run):
    """The processes to kill: the agent, all, rank 0 or another rank; during preparation, a tokenizing process."""
    found = processes_of(job)
    if target in ("agent", "all") or not found:
        return found[:1] if target == "agent" else found
    wanted = "0" if target == "rank 0" else str(ranks - 1)
    return [each for each in found[1:] if role_of(each, run) in (wanted, "tokenizing")][:1]


def role_of(process, run):
    """The rank of a process as text, "tokenizing" for one that prepares data, None for another."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        if "multiprocessing.spawn" in " ".join(process.cmdline()):
            return "tokenizing"
        return {pid: str(rank) for rank, pid in run.read_pids().items()}.get(process.pid)
    return None


def wait_until_gone(processes):
    """The processes that still run after GONE_SECONDS."""
    deadline = time.monotonic() + GONE_SECONDS
    while left := [each for each in processes if is_alive(each)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def is_alive(process):
    """Whether the process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tail_of(run):
    """The output of a failed test: the run's last events and the end of each log."""
    events = run.events_path.read_text().splitlines()[-8:] if run.events_path.exists() else []
    logs = [path.read_text(errors="replace")[-1500:] for path in sorted(run.logs_dir.glob("*.log"))]
    return "\n".join([*events, *logs])
