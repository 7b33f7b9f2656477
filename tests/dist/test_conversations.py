"""Training from rewards over several turns, and one step late: learned, killed, resumed on other numbers of ranks."""

import json
import signal

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import read_lines, write_recipe
from tests.dist.test_train_from_rewards import EXACT, exact, rewards
from tests.dist.test_train_from_rewards import train as train_as_told

pytestmark = pytest.mark.dist

STEPS = 12
CODE = '''
import time


class Copy:
    """Whatever the model says first, it is asked for a letter; the second turn should be that letter."""

    def __init__(self, ill=False):
        self.ill = ill

    def reset(self, record, seed):
        self.letter, self.is_asked = record["letter"], False

    def step(self, answer):
        if self.ill:
            raise RuntimeError("the table is gone")
        if self.is_asked:
            return None, float(answer == self.letter), True
        self.is_asked = True
        return f":{self.letter}=", 0.0, False


class Spell:
    """Wants small letters for as many turns as the record says."""

    def reset(self, record, seed):
        self.left = record["turns"]

    async def step(self, answer):
        self.left -= 1
        return f"{self.left}.", sum("a" <= c <= "z" for c in answer) / 4, self.left == 0


class Stuck(Copy):
    def step(self, answer):
        time.sleep(600)


def slow(answers, records):
    time.sleep(0.3)
    return [float(len(set(answer))) / 8 for answer in answers]


def stuck(answers, records):
    time.sleep(600)
'''
ROLLOUT = {"group_size": 8, "max_new_tokens": 2, "environment": {"name": "talks:Spell", "max_turns": 3}}


@pytest.fixture
def folder(echelon, tmp_path):
    (tmp_path / "talks.py").write_text(CODE)
    records = [{"prompt": f"{n:02d}?", "letter": "abcd"[n * 7 % 4], "turns": 1 + n % 3} for n in range(64)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_recipe(
        tmp_path,
        data={"train": "prompts.jsonl", "validation_fraction": 0.1, "sequence_len": 16},
        objective={"name": "grpo"},
        rollout=ROLLOUT,
        train={"steps": STEPS, "global_batch_size": 32, "log_every": 1, "compile": False},
        optim={"learning_rate": 2e-2, "schedule": "constant"},
        checkpoint={"every": 4},
    )
    return tmp_path


KEYS = (*EXACT, "turns", "mismatch_max")


def train(folder, name, nproc, *settings, **ends):
    """Train in a process of its own, which `ends` as told; returns its ending and the rows of its steps."""
    ending, _, rows = train_as_told(folder, name, nproc, *settings, **ends)
    return ending, [row for row in rows if row["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_model_learns_to_answer_its_environment(folder, lag):
    """Only who reads what the environment has said in between can do better than one in four."""
    settings = (
        "rollout.environment.name=talks:Copy", "rollout.max_new_tokens=1", "rollout.group_size=16",
        f"rollout.lag={lag}", "train.steps=150", "train.global_batch_size=256", "train.eval_every=150",
        "optim.learning_rate=1e-2",
    )  # fmt: skip
    _, rows = train(folder, "copy", 1, *settings)
    assert sum(rewards(rows)[:5]) < 5 * 0.05 and sum(rewards(rows)[-5:]) > 5 * 0.5, rewards(rows)
    assert {row["turns"] for row in rows} == {2.0} and all(row["mismatch_max"] < 1e-3 for row in rows)
    samples = read_lines(RunFolder(folder / "runs" / "copy").rows.samples_path)
    assert all(row["text"][-4] == ":" and row["text"][-2] == "=" for row in samples), "whole conversations"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("rollout.lag=1",)], ids=["in time", "one step late"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_run_equals_an_uninterrupted_one(folder, nproc, settings):
    _, whole = train(folder, "whole", nproc, *settings)
    ending, killed = train(folder, "killed", nproc, *settings, kill_at=6)
    assert "restart 1 of" in ending.out, ending
    assert len(whole) == STEPS and exact(killed, KEYS) == exact(whole, KEYS)
    assert len({row["turns"] for row in whole}) > 1, "answers of different lengths"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_draw_the_same_conversations(folder, parallel):
    _, alone = train(folder, "one", 1, "rollout.lag=1")
    _, together = train(folder, "two", 2, "rollout.lag=1", f"parallel={parallel}")
    assert rewards(together)[:6] == pytest.approx(rewards(alone)[:6], abs=1e-9)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_its_answers_on_another_number_of_processes(folder):
    """The answers of the next step are in the checkpoint: weights of now would draw others."""
    _, whole = train(folder, "whole", 2, "rollout.lag=1")
    _, stopped = train(folder, "stopped", 2, "rollout.lag=1", kill_at=3, by=signal.SIGTERM, code=3)
    _, rows = train(folder, "stopped", 1, "rollout.lag=1")
    done = len(stopped)
    assert 3 <= done < STEPS - 2
    assert rewards(rows)[: done + 2] == pytest.approx(rewards(whole)[: done + 2], abs=1e-9)
    assert rows[done]["loss"] == pytest.approx(whole[done]["loss"], abs=1e-6)


@pytest.mark.slow
def test_answers_are_drawn_one_step_before_they_train(folder):
    """The first two steps have answers of the initial weights, as where the first update changes nothing."""
    late, still = (
        train(folder, name, 1, "rollout.lag=1", "train.steps=3", *settings)[1]
        for name, settings in (("late", ()), ("still", ("optim.learning_rate=1e-30",)))
    )
    assert [row["batch_hash"] for row in late][:2] == [row["batch_hash"] for row in still][:2]
    assert late[2]["batch_hash"] != still[2]["batch_hash"]
    # The ratio of the second step is not 1: the weights have changed since its answers were drawn.
    assert abs(still[1]["loss"]) < 1e-6 < abs(late[1]["loss"])
    _, now = train(folder, "now", 1, "train.steps=2")
    assert now[0]["batch_hash"] == late[0]["batch_hash"] and now[1]["batch_hash"] != late[1]["batch_hash"]


@pytest.mark.slow
def test_rewards_are_computed_beside_the_training_pass_and_added_up(folder):
    settings = ("rollout.environment=null", "rollout.max_new_tokens=8", "train.steps=6", "reward=talks:slow")
    waits, settings = {}, (*settings, "train.eval_every=3")
    for lag in (0, 1):
        _, rows = train(folder, f"slow-{lag}", 1, *settings, f"rollout.lag={lag}")
        waits[lag] = sorted(row["reward_seconds"] for row in rows)[len(rows) // 2]
    assert waits[1] < waits[0] - 0.02, waits
    _, rows = train(folder, "both", 1, "reward=talks:slow", "train.steps=2")
    assert all(row["reward"] == pytest.approx(row["reward_Spell"] + row["reward_slow"]) for row in rows)


@pytest.mark.slow
def test_an_environment_that_fails_ends_the_run_with_one_message(folder):
    environment = json.dumps({"name": "talks:Copy", "options": {"ill": True}})
    ending, _ = train(folder, "ill", 2, f"rollout.environment={environment}", code=1)
    assert "Traceback" not in ending.err, ending
    assert (
        "no answer had a reward in 3 steps: talks:Copy raised RuntimeError in step: the table is gone (16 of 16 "
        "answers)." in ending.err
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "what"),
    [(("rollout.environment.name=talks:Stuck",), "the environment"), (("reward=talks:stuck",), "the rewards")],
)
def test_a_hang_is_named_by_what_is_waited_for(folder, settings, what):
    ending, _ = train(folder, "stuck", 1, *settings, "fault.hang_seconds=5", "fault.max_restarts=0", code=1)
    assert f"{what} did not end within 5 s" in ending.err, ending


def test_more_answers_than_a_checkpoint_keeps_are_refused(folder):
    ending, _ = train(folder, "large", 1, "rollout.lag=1", "data.sequence_len=100000", code=2)
    assert "have up to 3200000 tokens, and may have 2097152; use fewer" in ending.err, ending


def test_an_environment_that_is_not_there_is_refused(folder):
    ending, _ = train(folder, "absent", 1, "rollout.environment=talks:NoSuch", code=2)
    assert "rollout.environment.name=talks:NoSuch: the module talks has no NoSuch" in ending.err
