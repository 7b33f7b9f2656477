"""Environments of the user's: their replies, and their failures in every way, in a real process."""

import os
import sys
import time

import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.answers.environments import EnvironmentProcess, check_environment
from echelon.recipe.rollout import EnvironmentConfig

OWN = """
import asyncio
import os
import random
import time


class Echo:
    def __init__(self, sign="!"):
        self.sign = sign

    def reset(self, record, seed):
        self.heard = []
        return f"{record['name']} {random.Random(seed).randrange(1000)}"

    def step(self, answer):
        self.heard.append(answer)
        return self.sign.join(self.heard), len(self.heard), len(self.heard) == 2


class Nap(Echo):
    async def reset(self, record, seed):
        await asyncio.sleep(0.3)

    async def step(self, answer):
        await asyncio.sleep(0.3)
        return [{"role": "tool", "content": answer}], 0.5, False


class Broken(Echo):
    def step(self, answer):
        match answer:
            case "raise":
                raise KeyError("word")
            case "end":
                os._exit(3)
            case "hang":
                time.sleep(600)
            case "number":
                return 7
            case "words":
                return 7, 1.0, True
            case "nan":
                return None, float("nan"), True
            case "secret":
                return os.environ.get("HF_TOKEN", "none"), 0, True
        return super().step(answer)


class Ill(Echo):
    def __init__(self):
        raise RuntimeError("no board")


class Half:
    def reset(self, record, seed):
        pass
"""

RECORDS = [{"name": "a"}, {"name": "b"}, {"name": "c"}]


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_environments_of_the_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    started = []

    def build(name, **further):
        config = EnvironmentConfig(name=f"own_environments_of_the_test:{name}", **further)
        started.append(EnvironmentProcess(config))
        return started[-1]

    yield build
    for process in started:
        process.close()
    sys.modules.pop("own_environments_of_the_test", None)


def test_each_answer_has_an_environment_of_its_own(own):
    process = own("Echo", options={"sign": "-"})
    first = process.reset(RECORDS, [1, 2, 1])
    assert [reply.said[0] for reply in first] == ["a", "b", "c"]
    assert first[0].said[2:] == first[2].said[2:] != first[1].said[2:], "the draws are those of the seed"
    assert [(reply.said, reply.reward, reply.is_done) for reply in process.step({2: "x", 0: "y"})] == [
        ("x", 1.0, False), ("y", 1.0, False)
    ]  # fmt: skip
    assert [(reply.said, reply.is_done) for reply in process.step({0: "z", 1: "w"})] == [("y-z", True), ("w", False)]
    process.reset(RECORDS[:1], [1])
    assert process.step({0: "new"})[0].said == "new"
    assert "own_environments_of_the_test" not in sys.modules, "it was imported in this process"


def test_environments_that_wait_do_so_at_the_same_time(own):
    process = own("Nap")
    started = time.monotonic()
    assert [reply.said for reply in process.reset(RECORDS * 4, range(12))] == [None] * 12
    replies = process.step(dict.fromkeys(range(12), "x"))
    assert time.monotonic() - started < 3 < 12 * 0.6
    assert replies[0].said == [{"role": "tool", "content": "x"}] and replies[0].reward == 0.5


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("raise", "raised KeyError in step: 'word'"),
        ("number", "returned 7 from step, and not (text, reward, done)"),
        ("words", "raised TypeError in step: it said 7, which is neither a text nor a list of messages"),
        ("nan", "returned the reward nan, and one must be between -1e+15 and 1e+15"),
    ],
)
def test_an_environment_that_fails_costs_no_other_answer(own, answer, problem):
    process = own("Broken")
    process.reset(RECORDS, [1, 2, 3])
    assert [reply.problem for reply in process.step({0: "well", 1: answer, 2: "well"})] == [None, problem, None]
    assert process.step({0: "again"})[0].said == "well!again"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("hang", "did not answer within rollout.environment.timeout_seconds=0.5"),
        ("end", "ended the process in which it ran"),
    ],
)
def test_a_process_that_fails_ends_all_conversations_and_starts_again(own, answer, problem):
    process = own("Broken", timeout_seconds=0.5)
    process.reset(RECORDS, [1, 2, 3])
    assert [reply.problem for reply in process.step({0: "well", 1: answer})] == [problem] * 2
    assert process.step({2: "well"})[0].problem == "ended with the process in which it ran"
    process.reset(RECORDS, [1, 2, 3])
    assert process.step({2: "well"})[0].said == "well"


def test_an_environment_does_not_see_secrets(own, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_aB3dE5fG7hJ9kL1mN3pQ5rS7")
    process = own("Broken")
    process.reset(RECORDS, [1, 2, 3])
    assert process.step({0: "secret"})[0].said == "none"
    assert "HF_TOKEN" in os.environ


def test_one_that_cannot_be_built_is_a_problem_of_the_answers(own):
    assert {reply.problem for reply in own("Ill").reset(RECORDS, [1, 2, 3])} == {
        "raised RuntimeError in reset: no board"
    }


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_package:E", None, r"^rollout\.environment\.name=no_such_package:E: no_such_package cannot be import"),
        ("own_environments_of_the_test:Half", None, r"must be a class with reset, step, .* but it has no step\(\)"),
        ("own_environments_of_the_test:Echo", {"sing": "x"}, r"^rollout\.environment\.options=.* does not fit"),
    ],
    ids=["package", "method", "option"],
)
def test_an_environment_that_cannot_be_used_is_refused(own, name, options, message):
    with pytest.raises(ConfigError, match=message):
        check_environment(EnvironmentConfig(name=name, options=options))
